"""A child ends when its parent does, whatever ended the parent.

The parent keeps the writing end of a pipe and never writes; the child inherits the
reading end. The kernel closes the writing end with the parent, even by SIGKILL, and
the child reads its end of file.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable


def watch_lifeline(descriptor: int, end: Callable[[], None]) -> None:
    """Call `end` from a thread of its own once the inherited pipe closes."""

    def wait() -> None:
        while os.read(descriptor, 1):
            pass
        end()

    threading.Thread(target=wait, name="lifeline", daemon=True).start()
