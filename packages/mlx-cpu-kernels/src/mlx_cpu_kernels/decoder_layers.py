"""Decoder layers of mlx-lm's models in few operations.

A token of a small model takes longer for operations' own costs than for its weights. So a layer of quantized weights is
built of four operations beside its cache:

1. a norm with queries, keys and values, rotated,
2. attention,
3. the output product with the residual,
4. a norm with the gated products, the last product and the residual.

Where each row has one token, and the cache is a `PlaneCache`, the whole layer and its cache are one operation.

Layers are recognized by their code: a class is replaced if each instruction of its `__call__` is that of a function
below. So another release of mlx-lm, a model of another build, or a layer that somebody changed keeps its own. Attention
and gated layers may also be changed later.
Within such a layer, too, whatever is not as expected is computed by the modules themselves.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from types import CodeType, ModuleType
from typing import Any, Protocol, cast

import mlx.core as mx
from mlx import nn

_FAMILIES = ("llama", "mimo", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss")
"""mlx-lm's modules to look into; other modules' layers stay as they are."""
_MODELS = "mlx_lm.models"

Call = Callable[..., Any]
_Sum = Callable[[mx.array], mx.array]


class PlaneCache(Protocol):
    """Cache of a layer that lets the kernels append to its arrays in place."""

    offset: int | mx.array
    """Position of the next token: one for all rows, or `(batch,)`."""

    def places(self, mask: Any) -> tuple[mx.array, mx.array, int, list[int]] | None:
        """Return planes of keys and values, `(slots, heads, capacity, size)`, with the places of one more token a row.

        The places are the slot of the first row, behind which the others follow, and the index of each row's token. A
        plane holds the keys or values of one sequence in each slot, in any type. Nothing else reads it from that index
        on: it is changed in place. Return None where a row sees anything else than its slot up to its token, as by
        `mask`, or where there is no room.
        """
        ...

    def replace_planes(self, keys: mx.array, values: mx.array) -> None:
        """Take the planes with one more token a row."""
        ...


_kernels: list[ModuleType] = []
"""The kernels in use, or none."""
_own: dict[type[nn.Module], Call] = {}
"""Replaced `__call__` of classes of layers."""
_attentions: dict[type[nn.Module], tuple[Call, bool]] = {}
"""Known classes of attention with their `__call__`, and whether they normalize heads."""
_gated: dict[type[nn.Module], Call] = {}
"""Known classes of gated layers, with their `__call__`."""


def install(kernels: ModuleType) -> None:
    """Replace the layers of mlx-lm's models, if mlx-lm is in use. Safe to repeat."""
    _kernels[:] = [kernels]
    if "mlx_lm" not in sys.modules or _own:
        return
    for kind in _classes():
        code = getattr(kind.__call__, "__code__", None)
        if code is None:  # a callable that is no function
            continue
        if _is_same(code, _layer):
            _own[kind] = kind.__call__
        elif _is_same(code, _attention) or _is_same(code, _normalized_attention):
            _attentions[kind] = kind.__call__, _is_same(code, _normalized_attention)
        elif _is_same(code, _gated_layer):
            _gated[kind] = kind.__call__
    for kind, own in _own.items():
        kind.__call__ = _make_call(kernels, own)


def uninstall() -> None:
    """Give the classes their own `__call__` back."""
    _kernels.clear()
    for kind, own in _own.items():
        kind.__call__ = own
    for known in (_own, _attentions, _gated):
        known.clear()


def append(plane: mx.array, rows: mx.array, slot: int, begin: int) -> mx.array | None:
    """Write `rows` (slots, heads, tokens, size) into a plane in place, from a slot and an index in it on.

    Return the plane to use from then on; None without kernels. Raises ValueError where the rows do not fit.
    """
    return _kernels[0].append(plane, rows, slot, begin) if _kernels else None


def _classes() -> Iterator[Any]:
    """Yield the modules' classes that define a call of their own."""
    for name in _FAMILIES:
        try:
            module = importlib.import_module(f"{_MODELS}.{name}")
        except ImportError:  # a release without it
            continue
        for value in vars(module).values():
            if inspect.isclass(value) and value.__module__ == module.__name__ and "__call__" in vars(value):
                yield value


def _is_same(code: CodeType, known: Call) -> bool:
    return _instructions(code) == _instructions(known.__code__)


def _instructions(code: CodeType) -> tuple[object, ...]:
    return code.co_code, code.co_names, code.co_consts, code.co_argcount, code.co_nlocals


def _make_call(kernels: ModuleType, own: Call) -> Call:
    def call(layer: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        if not _own:
            return own(layer, x, mask, cache)
        attention, norm = layer["self_attn"], layer["input_layernorm"]
        mlp, second_norm = layer["mlp"], layer["post_attention_layernorm"]
        gated, sums = _gated_parts(mlp, second_norm)
        whole = gated if sums is None else None
        hidden, is_whole = _attend(kernels, attention, norm, x, mask, cache, whole)
        return hidden if is_whole else _combine(kernels, mlp, second_norm, hidden, gated, sums)

    return call


def _attend(
    kernels: Any, attention: Any, norm: Any, x: mx.array, mask: Any, cache: Any, gated: tuple[Any, ...] | None
) -> tuple[mx.array, bool]:
    """Return x + attention(norm(x)), or what the gated layer makes of it, and whether it is that."""
    kind = cast("type[nn.Module]", type(attention))
    call, has_norms = _attentions.get(kind, (None, False))
    norms = [norm, *(attention[name] for name in ("q_norm", "k_norm") if has_norms)]
    is_known = call is kind.__call__ and all(type(each) is nn.RMSNorm for each in norms)
    linears = [_linear(attention[name]) for name in ("q_proj", "k_proj", "v_proj") if is_known]
    if not linears or None in linears:
        return x + attention(norm(x), mask, cache), False
    first_norm, *head_norms = ((each["weight"], each.eps) for each in norms)
    rotation = _rotation(attention.rope)
    offset = 0 if cache is None else cache.offset
    arguments = (
        *(x, first_norm, linears, [attention.n_heads, attention.n_kv_heads, attention.n_kv_heads]),
        *(head_norms, rotation, offset if rotation is not None else 0),
    )
    if rotation is not None and x.shape[1] == 1 and hasattr(cache, "places"):
        attended = _attend_token(kernels, arguments, attention, mask, cache, gated)
        if attended is not None:
            return attended, gated is not None
    heads = kernels.heads(*arguments)
    if heads is None:
        return x + attention(norm(x), mask, cache), False
    queries, keys, values = heads
    if rotation is None:
        queries, keys = (attention.rope(array, offset=offset) for array in (queries, keys))
    if cache is not None:
        keys, values = cache.update_and_fetch(keys, values)
    attend = sys.modules[type(attention).__module__].scaled_dot_product_attention
    output = attend(queries, keys, values, cache=cache, scale=attention.scale, mask=mask)
    return _added(kernels, output, attention["o_proj"], x), False


def _attend_token(
    kernels: Any,
    arguments: tuple[Any, ...],
    attention: Any,
    mask: Any,
    cache: Any,
    gated: tuple[Any, ...] | None,
) -> mx.array | None:
    """Return x + attention(norm(x)) of one token a row, with the gated layer if it is given; None where it takes more."""
    output, places = _linear(attention["o_proj"]), cache.places(mask)
    if output is None or places is None:
        return None
    result = kernels.attended_token(*arguments, output, attention.scale, places, gated)
    if result is None:
        return None
    attended, keys, values = result
    cache.replace_planes(keys, values)
    return attended


def _gated_parts(mlp: Any, norm: Any) -> tuple[tuple[Any, ...] | None, _Sum | None]:
    """Return norm, gate, up and down as the kernels take them; None if the modules have to compute them.

    Also return what sums the result over ranks; None where there are none.
    """
    kind = cast("type[nn.Module]", type(mlp))
    if kind not in _gated or _gated[kind] is not kind.__call__ or type(norm) is not nn.RMSNorm:
        return None, None
    sums = _sum_of(mlp["down_proj"])
    down = _linear(mlp["down_proj"]) if sums is None else _parts(mlp["down_proj"])
    linears = [*(_linear(mlp[name]) for name in ("gate_proj", "up_proj")), down]
    return (None, None) if None in linears else (((norm["weight"], norm.eps), *linears), sums)


def _combine(
    kernels: Any, mlp: Any, norm: Any, x: mx.array, gated: tuple[Any, ...] | None, sums: _Sum | None
) -> mx.array:
    """Return x + mlp(norm(x))."""
    combined = None if gated is None else kernels.gated_layer(x, *gated, sums is None)
    if combined is None:
        return x + mlp(norm(x))
    return combined if sums is None else x + sums(combined)


def _added(kernels: Any, inner: mx.array, linear: nn.Module, x: mx.array) -> mx.array:
    """Return x + linear(inner)."""
    parts = _linear(linear)
    result = None if parts is None else kernels.added(inner, parts, x)
    if result is not None:
        return result
    if inner.ndim > x.ndim:  # heads
        inner = inner.transpose(0, 2, 1, 3).reshape(*x.shape[:2], -1)
    return x + cast("Call", linear)(inner)


def _linear(module: nn.Module) -> tuple[Any, ...] | None:
    """Return the parts of a quantized layer as the kernels take them."""
    # A part of the rows adds up gradients of the input, and otherwise computes the same.
    is_part = type(module) is nn.QuantizedAllToShardedLinear and not module.training
    if not (is_part or type(module) is nn.QuantizedLinear):
        return None
    return _parts(module, cast("Any", module).get("bias"))


def _parts(module: Any, bias: mx.array | None = None) -> tuple[Any, ...] | None:
    """Return the parts with this bias."""
    if module.mode != "affine":
        return None
    return module["weight"], module["scales"], module["biases"], bias, module.group_size, module.bits


def _sum_of(module: Any) -> _Sum | None:
    """Return the sum of a layer's products over the ranks of a group, with its bias; None for a layer without ranks.

    A subclass of `nn.QuantizedLinear` may have such a sum as its method `sum_of`.
    """
    kind = cast("type[nn.Module]", type(module))
    if kind.__bases__ == (nn.QuantizedLinear,) and "sum_of" in vars(kind):
        return module.sum_of
    if kind is not nn.QuantizedShardedToAllLinear:
        return None

    def sum_of(product: mx.array) -> mx.array:
        total = mx.distributed.all_sum(product, group=module.group)
        return total + module["bias"] if "bias" in module else total

    return sum_of


def _rotation(rope: Any) -> tuple[Any, ...] | None:
    """Return the options of a rotation as the kernels take them; None if the module has to compute it."""
    if type(rope) is nn.RoPE:
        return rope.dims, rope.traditional, rope.base, rope.scale, None
    if type(rope) is getattr(sys.modules.get(f"{_MODELS}.rope_utils"), "Llama3RoPE", None):
        return rope.dims, rope.traditional, None, 1.0, rope["_freqs"]
    return None


# Functions of mlx-lm's layers, word by word but for the names and types of variables. Their code is compared, not run.
scaled_dot_product_attention = swiglu = cast("Call", None)


def _layer(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> Any:
    added = self.self_attn(self.input_layernorm(x), mask, cache)
    hidden = x + added
    added = self.mlp(self.post_attention_layernorm(hidden))
    out = hidden + added
    return out  # noqa: RET504 - as there


def _attention(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> Any:
    batch, tokens, _size = x.shape
    queries, keys, values = self.q_proj(x), self.k_proj(x), self.v_proj(x)
    queries = queries.reshape(batch, tokens, self.n_heads, -1).transpose(0, 2, 1, 3)
    keys = keys.reshape(batch, tokens, self.n_kv_heads, -1).transpose(0, 2, 1, 3)
    values = values.reshape(batch, tokens, self.n_kv_heads, -1).transpose(0, 2, 1, 3)
    if cache is not None:
        queries = self.rope(queries, offset=cache.offset)
        keys = self.rope(keys, offset=cache.offset)
        keys, values = cache.update_and_fetch(keys, values)
    else:
        queries = self.rope(queries)
        keys = self.rope(keys)
    output = scaled_dot_product_attention(queries, keys, values, cache=cache, scale=self.scale, mask=mask)
    output = output.transpose(0, 2, 1, 3).reshape(batch, tokens, -1)
    return self.o_proj(output)


def _normalized_attention(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> Any:
    batch, tokens, _size = x.shape
    queries, keys, values = self.q_proj(x), self.k_proj(x), self.v_proj(x)
    queries = self.q_norm(queries.reshape(batch, tokens, self.n_heads, -1)).transpose(0, 2, 1, 3)
    keys = self.k_norm(keys.reshape(batch, tokens, self.n_kv_heads, -1)).transpose(0, 2, 1, 3)
    values = values.reshape(batch, tokens, self.n_kv_heads, -1).transpose(0, 2, 1, 3)
    if cache is not None:
        queries = self.rope(queries, offset=cache.offset)
        keys = self.rope(keys, offset=cache.offset)
        keys, values = cache.update_and_fetch(keys, values)
    else:
        queries = self.rope(queries)
        keys = self.rope(keys)
    output = scaled_dot_product_attention(queries, keys, values, cache=cache, scale=self.scale, mask=mask)
    output = output.transpose(0, 2, 1, 3).reshape(batch, tokens, -1)
    return self.o_proj(output)


def _gated_layer(self: Any, x: mx.array) -> Any:
    return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))
