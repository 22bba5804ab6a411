"""A thread for calls that go thousands deep: llguidance's follow a schema's references, one by one."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

STACK_BYTES = 256 << 20
"""Of addresses: memory is only taken as far as calls go. With the usual 8 MiB a process ends at 1,000 references."""
_SIZE = threading.Lock()
"""The size is that of every thread that is started meanwhile."""


def deep_thread(name: str) -> ThreadPoolExecutor:
    """One thread that takes one call at a time."""
    pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
    with _SIZE:
        usual = threading.stack_size(STACK_BYTES)
        try:
            pool.submit(int).result()
        finally:
            threading.stack_size(usual)
    return pool
