"""Device of a worker: its memory, its name, and reuse of freed memory."""

from __future__ import annotations

import subprocess
import sys

import pytest

from mlx_ring.host.process import UsableMemory
from mlx_ring.worker.platform import device

_ALLOCATE_AND_FREE = """
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


def test_memory_of_a_cpu_is_the_containers_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    group = UsableMemory(4 * 10**9, 3 * 10**9, "the control group (/sys/fs/cgroup/memory.max)")
    monkeypatch.setattr(device, "usable_memory", lambda: group)
    assert device.device_memory() == (group.total_bytes, group.available_bytes)
    assert device.free_memory() == group.available_bytes
    assert device.device_description()[1] == group.limited_by


def test_device_has_a_name() -> None:
    name, limited_by = device.device_description()
    assert name
    assert limited_by


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only glibc has these limits")
def test_new_arrays_reuse_the_memory_of_freed_ones() -> None:
    def page_faults(how: str) -> int:
        return int(subprocess.check_output([sys.executable, "-c", _ALLOCATE_AND_FREE, how], text=True))

    assert page_faults("trim") > 5000
    assert page_faults("keep") < 100
