"""Stop a single thread of another process, as if it hung in a library. Its other threads keep running. Linux only."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
from collections.abc import Generator

import pytest

_SEIZE, _INTERRUPT, _DETACH = 0x4206, 0x4207, 17
_ALL_THREADS = 0x40000000
"""`__WALL`"""


@contextlib.contextmanager
def frozen_thread(thread: int) -> Generator[None]:
    """Stop the thread within the context. Its process must be a descendant of this one, and can be killed."""
    if sys.platform != "linux":
        pytest.skip("only Linux can stop a single thread")
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
    libc.ptrace.restype = ctypes.c_long
    for request in (_SEIZE, _INTERRUPT):
        if libc.ptrace(request, thread, None, None):
            pytest.skip(f"a thread cannot be stopped here: {os.strerror(ctypes.get_errno())}")
    os.waitpid(thread, _ALL_THREADS)
    # The kernel reports the end to the tracer first; the parent would wait for us.
    threading.Thread(target=_reap, args=(thread,), daemon=True).start()
    try:
        yield
    finally:
        libc.ptrace(_DETACH, thread, None, None)


def _reap(thread: int) -> None:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(thread, _ALL_THREADS)
