"""Device of a worker: its memory, its name, and reuse of freed memory."""

from __future__ import annotations

import ast
import math
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import mlx_ring
from mlx_cpu_kernels import SpeedReport
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


RECOMMENDED = {"max_recommended_working_set_size": 36 * 2**30, "memory_size": 48 * 2**30}


@pytest.mark.parametrize(
    ("active", "footprint", "used"), [(8 * 2**30, 10 * 2**30, 10 * 2**30), (8 * 2**30, 0, 8 * 2**30)]
)
def test_a_macs_memory_leaves_a_fifth_of_the_recommendation(active: int, footprint: int, used: int) -> None:
    total, left = device.gpu_memory(RECOMMENDED, active, lambda: footprint)
    assert 0.9 * total == pytest.approx(0.8 * 36 * 2**30), "with the default utilization"
    assert left == total - used, "the whole process counts, not MLX's arrays alone"
    assert device.gpu_memory(RECOMMENDED, 100 * 2**30, lambda: 0)[1] == 0


def test_a_gpu_with_its_own_memory_counts_what_mlx_holds() -> None:
    def ask() -> int:
        raise AssertionError("the process's memory is the CPU's")

    assert device.gpu_memory({"total_memory": 80 * 2**30}, 8 * 2**30, ask) == (80 * 2**30, 72 * 2**30)


def test_kept_buffers_are_limited_on_a_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[int] = []
    monkeypatch.setattr(mx, "set_cache_limit", limits.append)
    device.limit_kept_buffers()
    assert limits == []
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(device, "device_memory", lambda: (64 * 2**30, 0))
    device.limit_kept_buffers()
    assert limits == [4 * 2**30]


WIRING = {"set_wired_limit", "wired_limit", "generate_step", "stream_generate", "BatchGenerator"}
"""Names of MLX and mlx-lm that wire memory: with them macOS panicked within two minutes (ml-explore/mlx#3186)."""


def test_no_module_wires_a_macs_memory() -> None:
    def names(source: str) -> set[str]:
        nodes = list(ast.walk(ast.parse(source)))
        attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        imported = {name.name for node in nodes if isinstance(node, ast.ImportFrom) for name in node.names}
        return attributes | imported

    assert names("from mlx_lm.generate import stream_generate\nmx.set_wired_limit(1)") >= {
        "stream_generate",
        "set_wired_limit",
    }
    files = list(Path(mlx_ring.__path__[0]).rglob("*.py"))
    assert len(files) > 300
    assert not {file.name: found for file in files if (found := names(file.read_text("utf-8")) & WIRING)}


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


@pytest.mark.parametrize(
    "quantization",
    [
        {"group_size": 64, "bits": 4},
        {"group_size": 32, "bits": 3},
        {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    ],
)
@pytest.mark.parametrize(
    "shape",
    [
        (64,),
        (1, 64),
        (2, 1, 64),
        (3, 1, 64),
        (1, 5, 64),
        (7, 64),
        (9, 1, 64),
        (2, 5, 64),
        (1, 300, 64),
        (128, 2, 64),
    ],
)
def test_products_for_nvidia_gpus_are_those_of_mlx(
    shape: Sequence[int], quantization: dict[str, Any]
) -> None:
    mx.random.seed(7)
    for dtype, tolerance in ((mx.float32, 1e-5), (mx.float16, 5e-3)):
        weights = mx.quantize(mx.random.normal((96, 64)).astype(dtype), **quantization)
        x = mx.random.normal(shape).astype(dtype)
        expected = device.own_product(x, *weights, transpose=True, **quantization)
        product = device.multiply_on_cuda(x, *weights, transpose=True, **quantization)
        assert (product.shape, product.dtype) == (expected.shape, expected.dtype)
        assert bool((mx.abs(product - expected) <= tolerance * mx.abs(expected).max()).all())


def test_products_for_nvidia_gpus_read_the_weights_once(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[tuple[int, ...]] = []

    def counted(x: mx.array, *others: Any, **named: Any) -> mx.array:
        taken.append(tuple(x.shape))
        return own(x, *others, **named)

    own = device.own_product
    monkeypatch.setattr(device, "own_product", counted)
    with_free_memory(64 << 30, monkeypatch)

    def shapes(
        quantization: dict[str, Any], dtype: mx.Dtype, *given: tuple[int, ...]
    ) -> list[tuple[int, ...]]:
        weights = mx.quantize(mx.random.normal((64, 96)).astype(dtype), **quantization)
        taken.clear()
        for shape in given:
            device.multiply_on_cuda(mx.zeros((*shape, 96), dtype), *weights, **quantization)
        return [shape[:-1] for shape in taken]

    few, many = ((1, 1), (2, 1), (5, 1), (1, 5), (8, 1), (1, 40)), ((256, 1), (1, 512))
    affine = {"group_size": 32, "bits": 4}
    # 96 columns are no whole number of tiles: MLX multiplies such rows one by one, whatever their number.
    assert shapes(affine, mx.float16, *few) == [(1, 1), (2, 1), (5,), (1, 5), (8,), (1, 40)]
    assert shapes(affine, mx.float16, *many) == []
    assert shapes(affine, mx.float32, *many) == [(256,), (1, 512)]
    assert shapes({"group_size": 32, "bits": 4, "mode": "mxfp4"}, mx.float16, *many) == [(256,), (1, 512)]
    weights = mx.quantize(mx.random.normal((64, 128)), bits=4)
    taken.clear()
    for shape in few:
        device.multiply_on_cuda(mx.zeros((*shape, 128)), *weights, bits=4)
    assert [shape[:-1] for shape in taken] == [(1, 1), (2, 1), (8,), (1, 8), (8,), (1, 40)]


def nothing_faster(_threads: int, *, kernels: bool) -> SpeedReport:
    return SpeedReport(f"MLX's own, kernels: {kernels}")


def with_free_memory(free_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a process compute on a GPU that had so much memory when it started."""
    monkeypatch.setattr(device, "compiles_kernels", lambda: True)
    monkeypatch.setattr(device, "free_memory", lambda: free_bytes)
    monkeypatch.setattr(mx, "quantized_matmul", mx.quantized_matmul)
    monkeypatch.setattr(device.room, "looked_at", -math.inf)
    monkeypatch.setattr(device, "speed_up", nothing_faster)
    device.choose_products("auto", 1)


def test_weights_are_dequantized_only_where_memory_suffices(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = 0

    def counted(x: mx.array, *others: Any, **named: Any) -> mx.array:
        nonlocal taken
        taken += 1
        return own(x, *others, **named)

    own = device.own_product
    monkeypatch.setattr(device, "own_product", counted)
    weights = mx.quantize(mx.random.normal((512, 512)).astype(mx.bfloat16), bits=8)
    x = mx.zeros((256, 512), mx.bfloat16)
    monkeypatch.setattr(mx, "get_cache_memory", lambda: 0)
    reserve, copy = 1 << 30, 2 * 512 * 512
    # Of 100 MB of weights in 8.5 bits and more, 0.4 are dequantized at once. A small model has one copy at least.
    for held, free, products in (
        (0, reserve + copy - 1, 1),
        (0, reserve + copy, 0),
        (100 << 20, reserve + (80 << 20) - 1, 1),
        (100 << 20, reserve + (80 << 20), 0),
        (100 << 30, reserve + (11 << 30), 0),
    ):
        monkeypatch.setattr(mx, "get_active_memory", lambda held=held: held)
        with_free_memory(free, monkeypatch)
        taken = 0
        assert device.multiply_on_cuda(x, *weights, bits=8).shape == (256, 512)
        assert taken == products, (held, free)


def test_the_free_memory_of_a_gpu_is_not_asked_for_each_product(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    with_free_memory(64 << 30, monkeypatch)
    monkeypatch.setattr(device, "free_memory", lambda: asked.append(1) or 64 << 30)
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)
    weights = mx.quantize(mx.zeros((64, 64), mx.bfloat16), bits=4)
    for _ in range(5):
        device.multiply_on_cuda(mx.zeros((256, 64), mx.bfloat16), *weights, bits=4)
    assert len(asked) == 1


def test_products_that_mlx_must_judge_are_its_own() -> None:
    # Weights of several matrices, and those that are not transposed.
    weights = mx.quantize(mx.random.normal((2, 64, 64)), bits=4)
    single = mx.quantize(mx.random.normal((64, 64)), bits=4)
    x = mx.random.normal((2, 5, 64))
    for of_mlx, transpose in ((weights, True), (single, False)):
        expected = device.own_product(x, *of_mlx, transpose=transpose, bits=4)
        assert mx.array_equal(device.multiply_on_cuda(x, *of_mlx, transpose, bits=4), expected)


def test_only_processes_with_an_nvidia_gpu_replace_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "quantized_matmul", mx.quantized_matmul)
    monkeypatch.setattr(device, "speed_up", nothing_faster)
    device.choose_products("auto", 1)
    assert mx.quantized_matmul is not device.multiply_on_cuda
    monkeypatch.setattr(device, "compiles_kernels", lambda: True)
    device.choose_products("off", 1)
    assert mx.quantized_matmul is not device.multiply_on_cuda
    device.choose_products("auto", 1)
    assert mx.quantized_matmul is device.multiply_on_cuda
