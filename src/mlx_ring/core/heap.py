"""Memory that was given back to the C library, and that it keeps for later."""

from __future__ import annotations

import contextlib
import ctypes


def give_back_freed_memory() -> None:
    """Let the system have it: after much has come and gone, that is most of what a small process holds.

    glibc alone keeps so much, and alone offers to give it back.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
