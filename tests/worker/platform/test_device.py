"""Device of a worker: its memory, its name, and reuse of freed memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_ring.core.environment import library_variable
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


def test_kernels_compiled_for_a_gpu_are_kept_in_the_users_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("MLX_PTX_CACHE_DIR", raising=False)
    device.keep_compiled_kernels()
    assert not library_variable("MLX_PTX_CACHE_DIR"), "a CPU's kernels are not compiled by MLX"
    monkeypatch.setattr(device, "compiles_kernels", lambda: True)
    monkeypatch.setattr(mx, "device_info", lambda: {"architecture": "sm_90"})
    device.keep_compiled_kernels()
    folder = Path(library_variable("MLX_PTX_CACHE_DIR"))
    assert folder.is_relative_to(tmp_path / "mlx-ring")
    assert folder.name == "sm_90"
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", "/mine")
    device.keep_compiled_kernels()
    assert library_variable("MLX_PTX_CACHE_DIR") == "/mine"
