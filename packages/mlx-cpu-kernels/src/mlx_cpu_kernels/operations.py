"""MLX's operations on quantized weights and of transformers' layers, computed by the native kernels.

`install()` puts them in the place of MLX's own in `mlx.core` and `mlx.core.fast`, where `mlx.nn` and mlx-lm look them up
at each call. So every layer, share of a tensor group and Mixture of Experts has them, also in models that call the
operations themselves. Where the kernels do not apply, on a GPU or for other types, MLX's own operation is built.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx

from mlx_cpu_kernels import decoder_layers, fallback
from mlx_cpu_kernels.build import NAME, Target, find_binary, why_without
from mlx_cpu_kernels.packages import Unavailable
from mlx_cpu_kernels.selfcheck import Operation, check

_OPERATIONS: dict[str, ModuleType] = {
    **dict.fromkeys(("quantized_matmul", "gather_qmm", "dequantize"), mx),
    **dict.fromkeys(("rms_norm", "layer_norm", "rope", "scaled_dot_product_attention"), mx.fast),
}
"""Names of the operations, with the module that has MLX's own."""
_ACTIVATION = "swiglu"
_QUANTIZED_ATTENTION = "quantized_scaled_dot_product_attention"
_UNARY = ("gelu_approx", "gelu_fast_approx")
_MODEL_FUNCTIONS = {
    **dict.fromkeys(_UNARY, "mlx.nn.layers.activations"),
    _ACTIVATION: "mlx_lm.models.activations",
    _QUANTIZED_ATTENTION: "mlx_lm.models.base",
}
"""Functions of mlx.nn and mlx-lm that are replaced, with their modules. Others import them by name."""
_PACKAGES = ("mlx.nn", "mlx_lm")
_SCALAR = "scalar"
"""Name of the kernels for any processor, which are a reference and slow."""


@dataclass(frozen=True, slots=True)
class KernelReport:
    """Result of an installation."""

    active: bool
    detail: str
    """The instruction set, or why MLX's own operations stay; empty where these are fast: on GPUs and Macs."""


_FALLBACK: dict[str, Operation] = {
    "quantized_matmul": fallback.multiply,
    "gather_qmm": fallback.gather,
}
_stock: dict[str, Operation] = {}
_without_kernels: set[str] = set()
"""Names of the operations in `_stock` that the fall-back replaces."""
_loaded: dict[Path, ModuleType] = {}
_checked: set[tuple[ModuleType, int]] = set()
"""Loaded kernels that compute what MLX does, with their number of threads."""
_lock = threading.Lock()


def install(threads: int = 1) -> KernelReport:
    """Compute the operations on CPUs by native kernels, on `threads` threads each.

    Where they were not built for the installed MLX, or compute something else than MLX, its own stay. Safe to repeat,
    and then quick: what was compared once with MLX is not compared again. mlx-lm, where it is used, is imported before.
    """
    if mx.default_device() != mx.Device(mx.cpu):
        return KernelReport(active=False, detail="")
    if sys.platform != "linux":
        return KernelReport(active=False, detail="they are for Linux")
    with _lock:
        try:
            kernels = _load()
            mx.synchronize()  # nothing computes while the number of threads changes
            kernels.set_threads(max(1, threads))
            if (kernels, threads) not in _checked:
                check(kernels, stock)
                _checked.add((kernels, threads))
        except Exception as reason:  # noqa: BLE001 - whatever fails, MLX computes as before
            return KernelReport(active=False, detail=str(reason))
        for name, module in _OPERATIONS.items():
            _stock.setdefault(name, getattr(module, name))
            setattr(module, name, getattr(kernels, name))
        _without_kernels.clear()
        _install_model_functions(kernels)
        decoder_layers.install(kernels)
        return KernelReport(active=True, detail=kernels.instruction_set())


def install_fallback() -> bool:
    """Convert quantized weights for products of several rows, without the kernels. Safe to repeat.

    Return false on a GPU, where MLX's own operations are fast.
    """
    if mx.default_device() != mx.Device(mx.cpu):
        return False
    with _lock:
        for name, operation in _FALLBACK.items():
            if name not in _stock:
                own = _stock[name] = getattr(mx, name)
                _without_kernels.add(name)
                setattr(mx, name, partial(operation, own))
    return True


def uninstall() -> None:
    """Give MLX its own operations back."""
    with _lock:
        for name in _stock.keys() & _OPERATIONS.keys():
            setattr(_OPERATIONS[name], name, _stock[name])
        _replace_in_models({name: _stock[name] for name in _stock.keys() & _MODEL_FUNCTIONS.keys()})
        _stock.clear()
        decoder_layers.uninstall()
        _without_kernels.clear()


def are_installed() -> bool:
    """Return true while MLX has the kernels' operations."""
    return bool(_stock.keys() - _without_kernels)


def stock(name: str) -> Operation:
    """Return MLX's own operation `name`, installed or not."""
    return _stock.get(name) or getattr(_OPERATIONS[name], name)


def _install_model_functions(kernels: ModuleType) -> None:
    """Replace functions of the packages that are in use, for models that are imported already or later."""
    replaced: dict[str, Operation] = {}
    for name, module in _MODEL_FUNCTIONS.items():
        if any(module.startswith(package) and package in sys.modules for package in _PACKAGES):
            own: Operation = getattr(importlib.import_module(module), name)
            replaced[name] = _MAKERS[name](getattr(kernels, name), _stock.setdefault(name, own))
    _replace_in_models(replaced)


def _activation(swiglu: Operation, stock: Operation) -> Operation:
    def combine(gate: mx.array, x: mx.array) -> mx.array:
        return swiglu(gate, x) if gate.dtype == mx.float32 == x.dtype else stock(gate, x)

    return combine


def _quantized_attention(attend: Callable[..., mx.array | None], stock: Operation) -> Operation:
    def attend_or_stock(*arguments: Any, **options: Any) -> mx.array:
        result = attend(*arguments, **options)
        return stock(*arguments, **options) if result is None else result

    return attend_or_stock


def _unary(activate: Operation, stock: Operation) -> Operation:
    def activate_or_stock(x: mx.array) -> mx.array:
        return activate(x) if x.dtype == mx.float32 else stock(x)

    return activate_or_stock


_MAKERS: dict[str, Callable[[Callable[..., Any], Operation], Operation]] = {
    **dict.fromkeys(_UNARY, _unary),
    _ACTIVATION: _activation,
    _QUANTIZED_ATTENTION: _quantized_attention,
}
"""Makers of the functions that take the places of others, from the kernels' and their own."""


def _replace_in_models(operations: Mapping[str, Operation]) -> None:
    """Put operations where modules have named theirs.

    Their dictionaries are searched, because asking a module for a name may import others.
    """
    modules = [vars(module) for name, module in list(sys.modules.items()) if name.startswith(_PACKAGES)]
    for function, operation in operations.items():
        present = getattr(sys.modules.get(_MODEL_FUNCTIONS[function]), function, None)
        for names in modules:
            if present is not None and names.get(function) is present:
                names[function] = operation


def _load() -> ModuleType:
    """Load the binary for the installed MLX that works on this host. Raises `Unavailable`."""
    target = Target.installed()
    binary = find_binary(target)
    if binary is None:
        raise Unavailable(why_without(target))
    if binary not in _loaded:
        _loaded[binary] = load(binary)
    return _loaded[binary]


def load(binary: Path) -> ModuleType:
    """Load a binary, which may end this process where it was not tried. Raises `Unavailable` or ImportError."""
    spec = importlib.util.spec_from_file_location(f"mlx_cpu_kernels.{NAME}", binary)
    if spec is None or spec.loader is None:
        raise Unavailable(f"{binary} is no module of this Python")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if module.instruction_set() == _SCALAR:
        raise Unavailable("this processor has none of AVX-512, AVX2 and NEON")
    return module
