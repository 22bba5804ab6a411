"""MLX's operations on quantized weights, computed by the native kernels.

`install()` puts them in the place of MLX's own in `mlx.core`, where `mlx.nn` and mlx-lm look them up at each call. So
every layer, share of a tensor group and Mixture of Experts has them, also in models that call the operations themselves.
"""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import mlx.core as mx

from mlx_cpu_kernels.build import NAME, Target, Unavailable, find_binary

OPERATIONS = ("quantized_matmul", "gather_qmm", "dequantize")
_TOLERANCE = 1e-4
"""Largest difference from MLX's own result, as a part of its largest value. Rounding alone makes some 1e-6."""


@dataclass(frozen=True, slots=True)
class KernelReport:
    """What computes operations on quantized weights."""

    active: bool
    detail: str
    """The instruction set, or why MLX's own operations stay."""


_stock: dict[str, Callable[..., mx.array]] = {}
_lock = threading.Lock()


def install(threads: int = 1) -> KernelReport:
    """Compute MLX's quantized operations on CPUs by native kernels, on `threads` threads each.

    Where they were not built for the installed MLX, or compute something else than MLX, its own stay. Safe to repeat.
    """
    with _lock:
        try:
            kernels = _load()
            kernels.set_threads(max(1, threads))
            _check(kernels)
        except (Unavailable, ImportError) as reason:
            return KernelReport(active=False, detail=str(reason))
        for name in OPERATIONS:
            _stock.setdefault(name, getattr(mx, name))
            setattr(mx, name, getattr(kernels, name))
        return KernelReport(active=True, detail=kernels.instruction_set())


def uninstall() -> None:
    """Give MLX its own operations back."""
    with _lock:
        for name, operation in _stock.items():
            setattr(mx, name, operation)
        _stock.clear()


def stock(name: str) -> Callable[..., mx.array]:
    """Return MLX's own operation `name`, installed or not."""
    return _stock.get(name) or getattr(mx, name)


def _load() -> ModuleType:
    target = Target.installed()
    binary = find_binary(target)
    if binary is None:
        raise Unavailable("they are not built (`python -m mlx_cpu_kernels.build` builds them)")
    spec = importlib.util.spec_from_file_location(f"mlx_cpu_kernels.{NAME}", binary)
    if spec is None or spec.loader is None:
        raise Unavailable(f"{binary} is no module of this Python")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _check(kernels: ModuleType) -> None:
    """Compare each operation with MLX's own. Raises `Unavailable`."""
    with mx.stream(mx.Device(mx.cpu)):
        for name, arguments, options in _samples():
            ours, theirs = (
                operation(*arguments, **options) for operation in (getattr(kernels, name), stock(name))
            )
            if ours.shape != theirs.shape or ours.dtype != theirs.dtype or not _is_close(ours, theirs):
                raise Unavailable(f"the self-check found a wrong result of {name} with {options}")


def _is_close(ours: mx.array, theirs: mx.array) -> bool:
    most = mx.max(mx.abs(theirs)).item()
    difference = mx.max(mx.abs(ours - theirs)).item()
    return (
        isinstance(most, float)
        and isinstance(difference, float)
        and difference <= _TOLERANCE * max(most, 1e-30)
    )


def _samples() -> Iterator[tuple[str, tuple[mx.array, ...], dict[str, Any]]]:
    """Yield operations with arguments that use each kernel: every number of bits, one row and several."""
    for bits in (2, 3, 4, 5, 6, 8):
        for group_size in (32, 64, 128):
            options: dict[str, Any] = {"bits": bits, "group_size": group_size}
            matrices = mx.quantize(_numbers(3, 48, 128), **options)
            matrix = tuple(part[0] for part in matrices)
            yield "dequantize", matrix, options
            for rows in (1, 3, 18):
                yield "quantized_matmul", (_numbers(rows, 128), *matrix), options
            yield "quantized_matmul", (_numbers(2, 48), *matrix), {**options, "transpose": False}
            chosen = {"rhs_indices": mx.array([[0, 2], [1, 2]], mx.uint32)}
            yield "gather_qmm", (_numbers(2, 1, 1, 128), *matrices), {**options, **chosen}


def _numbers(*shape: int) -> mx.array:
    """Return numbers of both signs and several sizes, the same each time and without MLX's random state."""
    count = 1
    for size in shape:
        count *= size
    return mx.sin(mx.arange(count, dtype=mx.float32) * 1.7).reshape(shape)
