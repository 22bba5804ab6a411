"""Device on which MLX computes, what multiplies there, its memory, and how the C library keeps freed memory.

On a CPU MLX takes an array's memory from `malloc` and frees it again. glibc returns free memory at the end of its heap
to the system if it exceeds twice the largest array. The kernel clears each newly allocated page, which needs more
than half of the time for drawing 16 tokens of 152,000.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import mlx.core as mx

from mlx_cpu_kernels import SpeedReport, speed_up
from mlx_ring.core.environment import library_variable, package_version, set_for_libraries
from mlx_ring.core.errors import ConfigError
from mlx_ring.core.folders import cache_folder
from mlx_ring.host.machine import machine_identity
from mlx_ring.host.process import METAL_SHARE, own_memory, usable_memory

_KEPT_PART = 16
"""Part of a GPU's memory up to which freed buffers stay. It lies within what no plan uses."""
_COMPILED = "MLX_PTX_CACHE_DIR"
_TILE_ROWS, _ROWS_TO_FILL = 8, 3
"""Numbers of rows from which MLX with CUDA multiplies tiles of rows with quantized weights, and from which rows are added."""
_ROWS_TO_DEQUANTIZE = 256
"""Number of rows from which a product of dequantized weights is faster with CUDA."""
_COPIES_AT_ONCE, _MOST_COPIES_BYTES = 0.4, 11 << 30
"""Dequantized weights that exist at the same time, because MLX starts operations ahead: a part of all, and their most bytes.
The part is that of activations on an H200. The most are 11 graphs of 1 GB, the largest that MLX 0.32 makes."""
_RESERVE_BYTES = 1 << 30
_LOOK_S = 0.1
"""Seconds for which the GPU's free memory is not asked again."""
own_product = mx.quantized_matmul
"""The product of MLX itself."""


def device_name() -> str:
    """Return the default device of MLX: "cpu" or "gpu"."""
    return mx.default_device().type.name


def choose_products(mode: str, threads: int) -> SpeedReport:
    """Choose by `--blas`, for products of `threads` threads each. Return what was chosen. It imports MLX.

    - `auto`: OpenBLAS, and native kernels for quantized weights;
    - `openblas`: OpenBLAS alone;
    - `off`: what MLX brings along.
    """
    if mode == "off":
        return SpeedReport("MLX's own (OpenBLAS is switched off by --blas off)")
    if compiles_kernels():
        mx.quantized_matmul = multiply_on_cuda
    return speed_up(threads, kernels=mode == "auto")


@dataclass(slots=True)
class _Room:
    """Memory of a GPU for dequantized weights."""

    free_bytes: int = 0
    looked_at: float = -math.inf

    def has(self, copy_bytes: int, bits: float) -> bool:
        """Report whether weights of so many bits may be dequantized for a chunk, one matrix of which takes so many bytes."""
        now = time.monotonic()
        if now - self.looked_at > _LOOK_S:
            self.free_bytes, self.looked_at = free_memory() + mx.get_cache_memory(), now
        # Weights are a part of what is held.
        copies = min(_MOST_COPIES_BYTES, _COPIES_AT_ONCE * mx.get_active_memory() * 16 / bits)
        return max(copy_bytes, copies) + _RESERVE_BYTES <= self.free_bytes


room = _Room()


def multiply_on_cuda(
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None = None,
    transpose: bool = True,  # noqa: FBT001, FBT002 - as MLX has it
    group_size: int | None = None,
    bits: int | None = None,
    mode: str = "affine",
    *,
    stream: mx.Stream | mx.Device | None = None,
) -> mx.array:
    """Compute `mx.quantized_matmul` as an NVIDIA GPU does it fastest.

    MLX 0.32 takes only the rows of the last but one axis together. It reads the weights once for each sequence of a
    decode step (sequences, 1, width), and once for each of fewer than 8 rows. With many rows it is slower than a product
    of dequantized weights. docs/nvidia.md has figures.
    """
    own = partial(own_product, group_size=group_size, bits=bits, mode=mode)
    rows, width = math.prod(x.shape[:-1]), x.shape[-1]
    if rows < _ROWS_TO_FILL or w.ndim != 2 or not transpose or stream is not None:  # noqa: PLR2004 - a matrix
        return own(x, w, scales, biases, transpose, stream=stream)
    together = x if x.shape[-2] == rows else x.reshape(rows, width)
    is_affine = mode == "affine" and scales.dtype == x.dtype
    # In float32, MLX would round the factors of a product of other weights than quantized ones.
    if is_affine and rows >= _ROWS_TO_DEQUANTIZE and x.dtype != mx.float32:
        numbers = w.shape[0] * width
        if room.has(numbers * x.dtype.size, w.nbytes * 8 / numbers):
            return x @ mx.dequantize(w, scales, biases, group_size, bits, mode, dtype=x.dtype).T
    # Tiles have 64 columns or a group.
    if is_affine and rows < _TILE_ROWS and width % max(64, group_size or 64) == 0:
        nothing = [(0, 0)] * (together.ndim - 2)
        padded = mx.pad(together, [*nothing, (0, _TILE_ROWS - rows), (0, 0)])
        product = own(padded, w, scales, biases)[..., :rows, :]
    else:
        product = own(together, w, scales, biases)
    return product if together is x else product.reshape(*x.shape[:-1], -1)


def compiles_kernels() -> bool:
    """Report whether MLX compiles kernels at their first use, which takes up to a minute each: with CUDA.

    Those of products with quantized weights took 38 to 52 s each with MLX 0.32 and NVRTC 13.0, for tiles of 16, 32 and
    64 rows. They are compiled for each number of bits and size of groups.
    """
    return mx.cuda.is_available()


def keep_compiled_kernels() -> None:
    """Keep kernels that MLX compiles for an NVIDIA GPU in the user's cache, and not until the next start of the machine.

    MLX names them by what they compute, so each version and kind of GPU gets a folder. A folder of the user stays.
    """
    if not compiles_kernels() or library_variable(_COMPILED):
        return
    with contextlib.suppress(ConfigError):
        kind = str(mx.device_info()["architecture"])
        set_for_libraries({_COMPILED: str(cache_folder() / "cuda" / package_version("mlx") / kind)})


def device_memory() -> tuple[int, int]:
    """Return the device's memory, and what is left of it, in bytes: RAM for a CPU, what is recommended for a GPU.

    A container's limit counts. Memory of a GPU that others hold does not: see `free_memory`.
    """
    if mx.default_device() == mx.Device(mx.cpu):
        ram = usable_memory()
        return ram.total_bytes, ram.available_bytes
    return gpu_memory(mx.device_info(), mx.get_active_memory(), own_memory)


def gpu_memory(info: Mapping[str, str | int], active: int, footprint: Callable[[], int]) -> tuple[int, int]:
    """Return a GPU's memory, and what this process leaves of it, in bytes.

    Args:
        info: what MLX says of the device.
        active: bytes that MLX's arrays hold.
        footprint: returns the bytes of the whole process. It is asked where the machine's memory is the GPU's.
    """
    recommended = info.get("max_recommended_working_set_size")
    if recommended:
        total = int(METAL_SHARE * int(recommended))
        return total, max(0, total - max(active, footprint()))
    total = int(info.get("memory_size") or info["total_memory"])
    return total, max(0, total - active)


def limit_kept_buffers() -> None:
    """Limit the freed buffers that MLX keeps of a GPU's memory for later arrays.

    By default it keeps up to 1.5 times what Metal recommends (ml-explore/mlx#3350). No other process could use that, such
    as the worker of another model, and it counts in this one's footprint.
    """
    if mx.default_device() != mx.Device(mx.cpu):
        mx.set_cache_limit(device_memory()[0] // _KEPT_PART)


def free_memory() -> int:
    """Return the bytes that no process holds: CUDA's driver knows them, Metal shares the machine's memory."""
    _, left = device_memory()
    if mx.default_device() == mx.Device(mx.cpu):
        return left
    info = mx.device_info().get("free_memory")
    return min(left, usable_memory().available_bytes if info is None else int(info))


def device_description() -> tuple[str, str]:
    """Return the device's name, and what bounds its memory, as text."""
    if mx.default_device() == mx.Device(mx.cpu):
        return machine_identity().processor, usable_memory().limited_by
    info = mx.device_info()
    advised = "max_recommended_working_set_size" in info
    name = str(info.get("device_name") or machine_identity().processor)
    return name, "Metal's recommendation" if advised else "the device"


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt(3)."""
_KEPT_BYTES = 128 << 20
"""Bytes to keep at the heap's end: arrays of a step, but not KV or weights, which are larger."""
_LARGEST_BYTES = 32 << 20
"""Size from which an array gets memory of its own; glibc's upper bound."""


def keep_freed_memory() -> bool:
    """Keep freed memory for later arrays. Return whether the C library supports it: glibc does."""
    if not sys.platform.startswith("linux"):
        return False
    library = ctypes.CDLL(None)
    mallopt = getattr(library, "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _LARGEST_BYTES)) and bool(mallopt(_TRIM_THRESHOLD, _KEPT_BYTES))
