from __future__ import annotations

import subprocess
import sys

import pytest

_TAKES_AND_FREES = """
import ctypes, resource, sys
from mlx_ring.worker.platform.device import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
size = 10 << 20
def arrays():
    taken = [libc.malloc(size) for _ in range(6)]
    for place in taken:
        ctypes.memset(place, 1, size)
    for place in reversed(taken):
        libc.free(place)
for _ in range(3):
    arrays()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
arrays()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other C libraries keep their own counsel")
def test_arrays_of_a_step_get_the_memory_of_those_before_them() -> None:
    def faults(how: str) -> int:
        return int(subprocess.check_output([sys.executable, "-c", _TAKES_AND_FREES, how], text=True))

    assert faults("trim") > 5000
    assert faults("keep") < 100
