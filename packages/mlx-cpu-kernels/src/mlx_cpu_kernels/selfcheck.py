"""Comparison of the kernels with MLX's own operations, before they take their place.

`python -m mlx_cpu_kernels.selfcheck BINARY` is a trial: it loads a binary, and prints a verdict as JSON.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import mlx.core as mx

from mlx_cpu_kernels.packages import Unavailable

Operation = Callable[..., mx.array]
Sample = tuple[str, tuple[Any, ...], dict[str, Any]]
"""Name of an operation, its arguments and its options."""

_TOLERANCES = {mx.float32: 1e-4, mx.float16: 2e-3, mx.bfloat16: 1.6e-2}
"""Largest difference from MLX's own result in float32, as a part of its largest value: in half types two units."""
_TRIAL_THREADS = 3
_IN_PLACE = {"append", "attended_token"}
"""Operations that change arguments."""
_PRODUCT, _QUANTIZED_ATTENTION = "quantized_matmul", "quantized_scaled_dot_product_attention"
_MANY_ROWS = 50


def check(kernels: ModuleType, stock: Callable[[str], Operation]) -> None:
    """Compare each operation with MLX's own, which `stock` returns by name. Raises `Unavailable` if one differs."""
    with mx.stream(mx.Device(mx.cpu)):
        samples = [*_products(), *_large_products(), *_layers(), *_fused()]
        references = {
            **_FUNCTIONS,
            _QUANTIZED_ATTENTION: _attention_of_dequantized(stock),
            **_fused_references(stock),
        }
        differences: list[mx.array] = []
        for name, arguments, options in samples:
            given = map(_separate, arguments) if name in _IN_PLACE else arguments
            ours = _joined(getattr(kernels, name)(*given, **options))
            own = references[name] if name in references else stock(name)
            theirs = own(
                *arguments, **options
            )  # its shape and type: in half types MLX adds up what it has rounded
            alike = ours.shape == theirs.shape and ours.dtype == theirs.dtype
            wide = _wide_product(stock) if name == _PRODUCT else own
            exact = wide(*map(_wide, arguments), **options)
            differences.append(_difference(ours, exact) if alike else mx.array(math.inf))
        found = cast("list[float]", mx.stack(differences).tolist())
    for (name, _, options), difference in zip(samples, found, strict=True):
        if not difference <= 1:  # or it is no number
            raise Unavailable(f"the self-check found a wrong result of {name} with {_shown(options)}")


def _joined(result: mx.array | Sequence[mx.array] | None) -> mx.array:
    """Return the arrays of a result side by side. Raises `Unavailable` where the kernels do not apply, but should."""
    if result is None:
        raise Unavailable("the self-check found an operation that does not apply to its arguments")
    return result if isinstance(result, mx.array) else mx.concatenate([each.reshape(-1) for each in result])


def _separate(argument: Any) -> Any:
    """Return copies of arrays, which an operation may change."""
    if isinstance(argument, (tuple, list)):
        copies = [_separate(each) for each in cast("Sequence[Any]", argument)]
        return copies if isinstance(argument, list) else tuple(copies)
    return argument + 0 if isinstance(argument, mx.array) else argument


def _wide(argument: Any) -> Any:
    if isinstance(argument, (tuple, list)):
        return [_wide(each) for each in cast("Sequence[Any]", argument)]
    if isinstance(argument, mx.array) and argument.dtype in _TOLERANCES:
        return argument.astype(mx.float32)
    return argument


def _difference(ours: mx.array, exact: mx.array) -> mx.array:
    """Return the largest difference, in parts of what is allowed."""
    most = mx.maximum(mx.max(mx.abs(exact)), 1e-30)
    return mx.max(mx.abs(ours.astype(mx.float32) - exact)) / (_TOLERANCES[ours.dtype] * most)


def _shown(options: dict[str, Any]) -> dict[str, Any]:
    return {name: "an array" if isinstance(one, mx.array) else one for name, one in options.items()}


def _swiglu(gate: mx.array, x: mx.array) -> mx.array:
    return gate * mx.sigmoid(gate) * x


def _gelu(x: mx.array) -> mx.array:
    return x * (1 + mx.tanh(0.7978845608 * (x + 0.044715 * x * x * x))) / 2


def _gelu_by_sigmoid(x: mx.array) -> mx.array:
    return x * mx.sigmoid(1.702 * x)


_FUNCTIONS: dict[str, Operation] = {
    "swiglu": _swiglu,
    "gelu_approx": _gelu,
    "gelu_fast_approx": _gelu_by_sigmoid,
}
"""Functions that mx does not have, by its operations."""


def _wide_product(stock: Callable[[str], Operation]) -> Operation:
    """Return products in float32. MLX's own takes twenty times as long for many rows as one of dequantized weights."""

    def multiply(x: mx.array, *matrix: mx.array, **options: Any) -> mx.array:
        if x.shape[-2] < _MANY_ROWS:
            return stock(_PRODUCT)(x, *matrix, **options)
        return x @ stock("dequantize")(*matrix, **options).T

    return multiply


def _attention_of_dequantized(stock: Callable[[str], Operation]) -> Operation:
    def attend(
        queries: mx.array, *kv: tuple[mx.array, ...], scale: float, mask: str, **quantization: int
    ) -> mx.array:
        keys, values = (stock("dequantize")(*parts, **quantization) for parts in kv)
        return stock("scaled_dot_product_attention")(queries, keys, values, scale=scale, mask=mask)

    return attend


def _fused_references(stock: Callable[[str], Operation]) -> dict[str, Operation]:
    """Return what parts of a decoder layer compute, in MLX's own operations."""

    def product(x: mx.array, linear: Sequence[Any]) -> mx.array:
        *matrix, addend, group_size, bits = linear
        result = stock(_PRODUCT)(x, *matrix, group_size=group_size, bits=bits)
        return result if addend is None else result + addend

    def heads(*given: Any) -> list[mx.array]:
        x, norm, linears, counts, head_norms, rotation, offset = given
        dims, traditional, base, scale, frequencies = rotation
        options = {"traditional": traditional, "base": base, "scale": scale, "freqs": frequencies}
        x = stock("rms_norm")(x, *norm)
        results: list[mx.array] = []
        for i, (linear, count) in enumerate(zip(linears, counts, strict=True)):
            each = product(x, linear).reshape(*x.shape[:2], count, -1)
            if i < len(head_norms):
                each = stock("rms_norm")(each, *head_norms[i])
            each = each.transpose(0, 2, 1, 3)
            results.append(
                each if i == len(counts) - 1 else stock("rope")(each, dims, **options, offset=offset)
            )
        return results

    def attended_token(*given: Any) -> mx.array:
        *of_heads, output, scale, (keys, values, slot, begins), gated = given
        x = of_heads[0]
        queries, *new = heads(*of_heads)
        planes = [
            _written(plane, rows, slot, begins) for plane, rows in zip((keys, values), new, strict=True)
        ]
        attended = [
            stock("scaled_dot_product_attention")(
                queries[row : row + 1],
                *(plane[slot + row : slot + row + 1, :, : begin + 1] for plane in planes),
                scale=scale,
            )
            for row, begin in enumerate(begins)
        ]
        flat = mx.concatenate(attended).transpose(0, 2, 1, 3).reshape(*x.shape[:2], -1)
        hidden = x + product(flat, output)
        return _joined([hidden if gated is None else gated_layer(hidden, *gated), *planes])

    def gated_layer(x: mx.array, norm: Sequence[Any], *linears: Sequence[Any]) -> mx.array:
        gate, up = (product(stock("rms_norm")(x, *norm), linear) for linear in linears[:2])
        return x + product(_swiglu(gate, up), linears[2])

    def added(x: mx.array, linear: Sequence[Any], residual: mx.array) -> mx.array:
        return residual + product(x.transpose(0, 2, 1, 3).reshape(*residual.shape[:2], -1), linear)

    return {
        "heads": lambda *given: _joined(heads(*given)),
        "attended_token": attended_token,
        "gated_layer": gated_layer,
        "added": added,
        "append": _appended,
    }


def _appended(plane: mx.array, rows: mx.array, slot: int, begin: int) -> mx.array:
    return _written(plane, rows, slot, [begin] * rows.shape[0])


def _written(plane: mx.array, rows: mx.array, slot: int, begins: Sequence[int]) -> mx.array:
    """Return a copy of a plane with each row from its position on."""
    plane = plane + 0
    for row, begin in enumerate(begins):
        plane[slot + row, :, begin : begin + rows.shape[2]] = rows[row]
    return plane


def _fused() -> Iterator[Sample]:
    """Yield parts of decoder layers: with and without addends and norms of heads, both rotations, one row and several."""
    size, counts = 96, [4, 2, 2]
    for dtype, (batch, tokens), is_rich in (
        (mx.float32, (1, 1), True),
        (mx.float32, (2, 9), False),
        (mx.float16, (2, 1), True),
    ):

        def linear(
            rows: int, columns: int, dtype: mx.Dtype = dtype, *, is_rich: bool = is_rich
        ) -> tuple[Any, ...]:
            quantization: dict[str, Any] = {"group_size": 32, "bits": 4}
            addend = _numbers(rows).astype(dtype) if is_rich else None
            return *_matrices(rows, columns, dtype=dtype, **quantization), addend, 32, 4

        x = _numbers(batch, tokens, size).astype(dtype)
        norm = (_numbers(size).astype(dtype) + 2, 1e-5)
        head_norms = [(_numbers(32).astype(dtype) + 2, 1e-6)] * (2 if is_rich else 0)
        rotation = (
            (32, False, None, 1.0, mx.exp(mx.arange(16) * 0.1)) if is_rich else (24, True, 1e4, 1.0, None)
        )
        offset = mx.array([700 + 3 * row for row in range(batch)]) if is_rich else 41
        linears = [linear(32 * count, size) for count in counts]
        of_heads = x, norm, linears, counts, head_norms, rotation, offset
        gated = norm, linear(160, size), linear(160, size), linear(size, 160)
        yield "heads", of_heads, {}
        if tokens == 1:
            planes = (_numbers(3, 2, 200, 32).astype(dtype) + i for i in range(2))
            places = *planes, 1, [150, 3][:batch]
            for after in (None, gated):
                yield "attended_token", (*of_heads, linear(size, 128), 0.2, places, after), {}
        yield "gated_layer", (x, *gated), {}
        yield "added", (_numbers(batch, 4, tokens, 32).astype(dtype), linear(size, 128), x), {}


def _products() -> Iterator[Sample]:
    """Yield products that use each kernel: every number of bits, mode and type, blocks that end early."""
    for bits in (2, 3, 4, 5, 6, 8):
        for group_size, dtype in ((32, mx.float32), (64, mx.float16), (128, mx.bfloat16)):
            options: dict[str, Any] = {"bits": bits, "group_size": group_size}
            matrices = _matrices(3, 50, 3 * group_size, dtype=dtype, **options)
            yield from _products_with(matrices, 3 * group_size, dtype, options)
    for mode, dtype in (("mxfp4", mx.bfloat16), ("nvfp4", mx.float16), ("mxfp8", mx.bfloat16)):
        yield from _products_with(_matrices_of_mode(mode, 3, 50, 96), 96, dtype, {"mode": mode})


def _products_with(
    matrices: tuple[mx.array, ...], columns: int, dtype: mx.Dtype, options: dict[str, Any]
) -> Iterator[Sample]:
    """Yield products with three matrices of 50 rows: with one row of x and several, transposed and not."""
    matrix = tuple(part[0] for part in matrices)
    yield "dequantize", matrix, options
    for rows in (1, 3, 18):
        yield _PRODUCT, (_numbers(rows, columns), *matrix), options
    straight = {**options, "transpose": False}
    yield _PRODUCT, (_numbers(2, 50), *matrix), straight
    chosen = {"rhs_indices": mx.array([[0, 2], [1, 2]], mx.uint32)}
    yield "gather_qmm", (_numbers(2, 1, 1, columns), *matrices), {**options, **chosen}
    yield "gather_qmm", (_numbers(2, 1, 1, 50), *matrices), {**straight, **chosen}
    if dtype != mx.float32:
        yield _PRODUCT, (_numbers(2, columns).astype(dtype), *matrix), options


def _large_products() -> Iterator[Sample]:
    """Yield products that are large enough for several threads, and those of many rows, of which one has an outlier."""
    cases = ((1, 1536, 64, False), (20, 64, 64, False), (50, 96, 32, True), (150, 192, 64, True))
    for rows, columns, group_size, has_outlier in cases:
        options: dict[str, Any] = {"bits": 4, "group_size": group_size}
        matrix, x = _matrices(520, columns, **options), _numbers(rows, columns)
        if has_outlier:
            x[rows - 10, 3] = 1e4
        yield _PRODUCT, (x, *matrix), options


def _layers() -> Iterator[Sample]:
    for dtype in _TOLERANCES:
        for rows, size in ((3, 40), (130, 256)):
            yield "rms_norm", (_numbers(rows, size).astype(dtype), _numbers(size).astype(dtype), 1e-5), {}
        for traditional in (False, True):
            options = {"traditional": traditional, "base": 1e4, "scale": 1.0, "offset": 900}
            yield "rope", (_numbers(1, 2, 3, 40).astype(dtype), 32), options
        weight, bias = (_numbers(size).astype(dtype) + offset for size, offset in ((41, 0), (41, 1)))
        yield "layer_norm", (_numbers(130, 41).astype(dtype) + 0.5, weight, bias, 1e-5), {}
    yield "rms_norm", (_numbers(3, 40), None, 1e-5), {}
    yield "layer_norm", (_numbers(3, 40), None, None, 1e-5), {}
    for name in ("gelu_approx", "gelu_fast_approx"):
        yield name, (_numbers(40, 1025) * 9,), {}
    given = {"base": None, "freqs": mx.exp(mx.arange(16) * 0.1), "offset": mx.array([3, 70])}
    yield "rope", (_numbers(2, 4, 65, 40), 32), {"traditional": False, "scale": 1.0, **given}
    for shape in ((3, 41), (40, 1024)):
        yield "swiglu", (_numbers(*shape) * 20, _numbers(*shape)), {}
    yield from _attentions()


def _attentions() -> Iterator[Sample]:
    keys, values = _numbers(1, 2, 150, 40), _numbers(1, 2, 150, 24)
    for tokens in (1, 9):
        shown = (mx.arange(150) % 7 != tokens) & (mx.arange(tokens)[:, None] >= 0)
        for mask in (None, "causal", shown, mx.where(shown, 0.5, -2.0)):
            options = {"scale": 0.3, "mask": mask}
            yield "scaled_dot_product_attention", (_numbers(1, 4, tokens, 40), keys, values), options
    options = {"scale": 0.125, "mask": "causal", "sinks": _numbers(6)}
    keys = _numbers(2, 3, 140, 64)
    yield "scaled_dot_product_attention", (_numbers(2, 6, 12, 64), keys, keys + 0.5), options
    for dtype in (mx.float16, mx.bfloat16):
        half = keys.astype(dtype)
        yield (
            "scaled_dot_product_attention",
            (_numbers(2, 6, 2, 64).astype(dtype), half, half),
            {"scale": 0.125},
        )

    yield "append", (_numbers(3, 2, 9, 40), _numbers(2, 4, 2, 40).transpose(0, 2, 1, 3), 1, 3), {}
    for bits in (4, 8):
        quantization: dict[str, Any] = {"group_size": 32, "bits": bits}
        kv = [_matrices(2, 2, 150, 64, **quantization) for _ in range(2)]
        for tokens in (1, 9):
            options = {"scale": 0.3, "mask": "causal", **quantization}
            yield _QUANTIZED_ATTENTION, (_numbers(2, 4, tokens, 64), *kv), options


def _matrices(*shape: int, bits: int, group_size: int, dtype: mx.Dtype = mx.float32) -> tuple[mx.array, ...]:
    """Return weights, scales and biases of any kind: `mx.quantize` would take longer than all products."""
    *leading, columns = shape
    groups = (*leading, columns // group_size)
    weights = _words(*leading, columns * bits // 32)
    scales = (_numbers(*groups) / (1 << bits)).astype(dtype)
    return weights, scales, (scales * -(1 << bits - 1)).astype(dtype)


def _matrices_of_mode(mode: str, *shape: int) -> tuple[mx.array, mx.array]:
    """Return weights and scales that are bytes, of sizes around a hundredth."""
    *leading, columns = shape
    bits, group_size = _FORMATS[mode]
    weights = _words(*leading, columns * bits // 32)
    groups = (*leading, columns // group_size)
    scales = mx.arange(math.prod(groups)).reshape(groups) % 7
    scales = scales + (118 if mode != "nvfp4" else 5)
    if mode == "mxfp8":
        weights = weights & 0xFEFEFEFE  # a byte of ones is no number
    return weights, scales.astype(mx.uint8)


_FORMATS = {"mxfp4": (4, 32), "nvfp4": (4, 16), "mxfp8": (8, 32)}
"""Bits and group of the modes that have no choice."""


def _words(*shape: int) -> mx.array:
    return (mx.arange(math.prod(shape), dtype=mx.uint32) * 2654435761).astype(mx.uint32).reshape(shape)


def _numbers(*shape: int) -> mx.array:
    """Return numbers of both signs and several sizes, the same each time and without MLX's random state."""
    return _sines(1 << (math.prod(shape) - 1).bit_length())[: math.prod(shape)].reshape(shape)


@cache
def _sines(count: int) -> mx.array:
    return mx.sin(mx.arange(count, dtype=mx.float32) * 1.7)


def _main() -> None:
    from mlx_cpu_kernels.operations import load, stock

    parser = argparse.ArgumentParser(prog="python -m mlx_cpu_kernels.selfcheck")
    parser.add_argument("binary", type=Path)
    works, detail = True, ""
    try:
        kernels = load(parser.parse_args().binary)
        detail = kernels.instruction_set()
        for threads in (1, _TRIAL_THREADS):
            kernels.set_threads(threads)
            check(kernels, stock)
    except (ImportError, Unavailable) as reason:
        works, detail = False, str(reason)
    print(json.dumps({"works": works, "detail": detail}))  # noqa: T201 - read by trial.py


if __name__ == "__main__":
    _main()
