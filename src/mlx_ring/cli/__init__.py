"""Commands of `mlx-ring`: a thin shell over the other packages."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager

INTERRUPTED = 130
"""Exit code after Ctrl-C, as in shells: 128 plus the number of SIGINT."""


@contextmanager
def importing() -> Generator[None]:
    """Import without garbage collections.

    Modules make lasting objects, and the search among them takes 0.1 s of a head's start.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
