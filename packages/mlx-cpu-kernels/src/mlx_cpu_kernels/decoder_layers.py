"""Decoder layers of mlx-lm's models in few operations.

A token of a small model takes longer for operations' own costs than for its weights. So a layer of quantized weights is
built of four operations beside its cache:

1. a norm with queries, keys and values, rotated,
2. attention,
3. the output product with the residual,
4. a norm with the gated products, the last product and the residual.

Where each row has one token, and the cache is a `PlaneCache`, the whole layer and its cache are one operation. From the
next token on it is prepared, so that its weights are no inputs of the operation. Neighbours that a known model calls are then
one operation together, as long as their modules hold what they held.

Layers and models are recognized by their code: a class is replaced if each instruction of its `__call__` is that of a function
below. So another release of mlx-lm, a model of another build, or a layer that somebody changed keeps its own. Attention
and gated layers may also be changed later.
Within such a layer, too, whatever is not as expected is computed by the modules themselves.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import weakref
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any, NamedTuple, Protocol, cast

import mlx.core as mx
from mlx import nn

from mlx_cpu_kernels import known_calls
from mlx_cpu_kernels.known_calls import Call, is_same
from mlx_cpu_kernels.layer_arguments import MODELS, Ranks, Sum, linear_of, parts_of, rotation_of, sum_of

_FAMILIES = ("llama", "mimo", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss")
"""mlx-lm's modules to look into; other modules' layers stay as they are."""
_MOST_TOGETHER = 10
"""Layers of one operation: each of its results has a list of all others."""

_Step = tuple[Any, Any, Any]
"""A layer with its mask and its cache."""


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


class _Prepared(NamedTuple):
    layer: Any
    """The kernels' object, which holds the weights."""
    ranks: Ranks | None
    attention: type[nn.Module]
    gated: type[nn.Module]
    parts: tuple[weakref.ref[Any], ...]
    """The modules and their arrays. When one of them ends, this is forgotten: old weights take no memory."""


_kernels: list[ModuleType] = []
"""The kernels in use, or none."""
_own: dict[type[nn.Module], Call] = {}
"""Replaced `__call__` of classes of layers and models."""
_layers: dict[type[nn.Module], Call] = {}
"""Classes of layers, with the `__call__` that replaces their own."""
_prepared: dict[int, _Prepared] = {}
"""Prepared layers by the id of the layer."""
_attentions: dict[type[nn.Module], tuple[Call, bool]] = {}
"""Known classes of attention with their `__call__`, and whether they normalize heads."""
_gated: dict[type[nn.Module], Call] = {}
"""Known classes of gated layers, with their `__call__`."""
_CALLS: list[tuple[Any, str, object]] = [
    (kind, "__call__", kind.__call__)
    for kind in (
        *(nn.QuantizedLinear, nn.QuantizedAllToShardedLinear, nn.QuantizedShardedToAllLinear),
        *(nn.RMSNorm, nn.RoPE),
    )
]
_inner: list[tuple[Any, str, object]] = []
"""Functions that layers would call: classes and modules, with names in them and what these name."""


def install(kernels: ModuleType) -> None:
    """Replace the layers of mlx-lm's models, if mlx-lm is in use. Safe to repeat."""
    _kernels[:] = [kernels]
    if "mlx_lm" not in sys.modules:
        return
    if _own:
        _inner[:] = _inner_functions()
        return
    models: list[tuple[Any, Call, known_calls.Masks, Call]] = []
    for kind in _classes():
        own = kind.__call__
        if is_same(own, known_calls.layer):
            _own[kind] = own
        elif is_same(own, known_calls.attention) or is_same(own, known_calls.normalized_attention):
            _attentions[kind] = own, is_same(own, known_calls.normalized_attention)
        elif is_same(own, known_calls.gated_layer):
            _gated[kind] = own
        models += [(kind, own, *ways) for known, ways in known_calls.MODELS.items() if is_same(own, known)]
    for kind, own in _own.items():
        _layers[kind] = kind.__call__ = _make_call(kernels, own)
    _inner[:] = _inner_functions()
    for kind, own, masks, call in models:
        _own[kind] = own
        kind.__call__ = _make_model_call(kernels, kind.__module__, own, masks, call)


def uninstall() -> None:
    """Give the classes their own `__call__` back."""
    _kernels.clear()
    for kind, own in _own.items():
        kind.__call__ = own
    for known in (_own, _layers, _attentions, _gated, _prepared, _inner):
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
            module = importlib.import_module(f"{MODELS}.{name}")
        except ImportError:  # a release without it
            continue
        for value in vars(module).values():
            if inspect.isclass(value) and value.__module__ == module.__name__ and "__call__" in vars(value):
                yield value


def _inner_functions() -> list[tuple[Any, str, object]]:
    """Return the functions that the operations of a layer take the place of, beside those of attention and gated layers."""
    found = list(_CALLS)
    for name, home in (("swiglu", "activations"), ("scaled_dot_product_attention", "base")):
        known = getattr(sys.modules.get(f"{MODELS}.{home}"), name, None)
        modules = (sys.modules.get(f"{MODELS}.{family}") for family in _FAMILIES)
        found += [(module, name, known) for module in modules if hasattr(module, name)]
    return found


def _are_as_known() -> bool:
    """Report whether nobody has put others in the place of the functions that layers would call."""
    return all(getattr(place, name) is known for place, name, known in _inner)


def _make_call(kernels: ModuleType, own: Call) -> Call:
    def call(layer: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        if not (_own and _are_as_known()):
            return own(layer, x, mask, cache)
        if id(layer) in _prepared and _is_token(x):
            return _Together(kernels, separate).run(x, [(layer, mask, cache)], are_own=True)
        return separate(layer, x, mask, cache)

    def separate(layer: Any, x: mx.array, mask: Any, cache: Any) -> mx.array:
        attention, norm = layer["self_attn"], layer["input_layernorm"]
        mlp, second_norm = layer["mlp"], layer["post_attention_layernorm"]
        gated, sums = _gated_parts(mlp, second_norm)
        hidden, is_whole = _attend(kernels, attention, norm, x, mask, cache, gated, sums, layer)
        return hidden if is_whole else _combine(kernels, mlp, second_norm, hidden, gated, sums)

    return call


def _attend(
    kernels: Any,
    attention: Any,
    norm: Any,
    x: mx.array,
    mask: Any,
    cache: Any,
    gated: tuple[Any, ...] | None,
    sums: Sum | None,
    layer: Any,
) -> tuple[mx.array, bool]:
    """Return x + attention(norm(x)), or what the gated layer makes of it, and whether it is that."""
    kind = cast("type[nn.Module]", type(attention))
    call, has_norms = _attentions.get(kind, (None, False))
    norms = [norm, *(attention[name] for name in ("q_norm", "k_norm") if has_norms)]
    is_known = call is kind.__call__ and all(type(each) is nn.RMSNorm for each in norms)
    linears = [linear_of(attention[name]) for name in ("q_proj", "k_proj", "v_proj") if is_known]
    if not linears or None in linears:
        return x + attention(norm(x), mask, cache), False
    first_norm, *head_norms = ((each["weight"], each.eps) for each in norms)
    rotation = rotation_of(attention.rope)
    offset = 0 if cache is None else cache.offset
    arguments = (
        *(x, first_norm, linears, [attention.n_heads, attention.n_kv_heads, attention.n_kv_heads]),
        *(head_norms, rotation, offset if rotation is not None else 0),
    )
    if rotation is not None and x.shape[1] == 1 and hasattr(cache, "places"):
        whole = gated if sums is None else None
        attended = _attend_token(kernels, arguments, attention, mask, cache, whole)
        if gated is not None and (attended is not None or sums is not None):
            _prepare(kernels, layer, arguments, gated, sums)
        if attended is not None:
            return attended, whole is not None
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
    output, places = linear_of(attention["o_proj"]), cache.places(mask)
    if output is None or places is None:
        return None
    result = kernels.attended_token(*arguments, output, attention.scale, places, gated)
    if result is None:
        return None
    attended, keys, values = result
    cache.replace_planes(keys, values)
    return attended


def _prepare(
    kernels: Any, layer: Any, arguments: tuple[Any, ...], gated: tuple[Any, ...], sums: Sum | None
) -> None:
    """Prepare a layer for the tokens that follow, if its weights are at hand."""
    attention, mlp = layer["self_attn"], layer["mlp"]
    parts = [*layer.values(), *_values(attention), *mlp.values()]
    modules = [part for part in parts if isinstance(part, nn.Module)]
    x, *of_heads, _offset = arguments
    output, ranks = linear_of(attention["o_proj"]), None
    if sums is not None:
        ranks, late = sums
        of_output = sum_of(attention["o_proj"])
        if of_output is None or of_output[0] != ranks:
            return
        output = parts_of(attention["o_proj"], of_output[1])
        gated = (*gated[:-1], parts_of(mlp["down_proj"], late))
    joined = None if ranks is None else ranks.joined
    prepared = kernels.prepare_layer(layer, modules, x, *of_heads, output, attention.scale, gated, joined)
    if prepared is not None:
        key = id(layer)
        owners = (layer, *modules)
        arrays = [each for owner in owners for each in _values(owner) if isinstance(each, mx.array)]
        ends = tuple(weakref.ref(each, lambda _: _prepared.pop(key, None)) for each in (*owners, *arrays))
        _prepared[key] = _Prepared(prepared, ranks, type(attention), type(mlp), ends)


def _values(module: Any) -> list[Any]:
    """Return what a module holds, and its attributes."""
    return [*module.values(), *vars(module).values()]


def _find_prepared(kernels: Any, layer: Any) -> _Prepared | None:
    """Return what was prepared of a layer, if its modules and their classes are what they were."""
    found = _prepared.get(id(layer))
    if found is None:
        return None
    are_known = (
        _attentions[found.attention][0] is found.attention.__call__
        and _gated[found.gated] is found.gated.__call__
    )
    if are_known and kernels.holds(found.layer):
        return found
    del _prepared[id(layer)]
    return None


def _is_token(x: mx.array) -> bool:
    return x.ndim == 3 and x.shape[1] == 1  # noqa: PLR2004 - batch, tokens, numbers


class _Together:
    """Prepared layers, neighbours with planes of their own, that become one operation."""

    def __init__(self, kernels: Any, call: Call) -> None:
        """Compute them by `call`, with layer, x, mask and cache, where the kernels do not apply."""
        self._kernels = kernels
        self._call = call
        self._steps: list[_Step] = []
        self._layers: list[Any] = []
        self._planes: list[mx.array] = []
        self._ranks: Ranks | None = None
        self._slot, self._begins = 0, list[int]()
        self._offset: int | mx.array = 0

    def run(self, x: mx.array, steps: Iterable[_Step], *, are_own: bool = False) -> mx.array:
        """Return x, one token a row, after layers, of which some may be prepared.

        With `are_own`, the layers are known to be called by what replaces their own call.
        """
        for step in steps:
            if not self._has_room_for(step[2]):
                x = self._finish(x)
            found = self._find(step, are_own=are_own)
            places = None if found is None else step[2].places(step[1])
            if found is None or places is None:
                layer, mask, cache = step
                x = self._call(layer, self._finish(x), mask, cache)
                continue
            if self._steps and not (found.ranks == self._ranks and self._is_beside(places, step[2].offset)):
                x = self._finish(x)
            self._steps.append(step)
            self._layers.append(found.layer)
            self._ranks = found.ranks
            keys, values, self._slot, self._begins = places
            self._planes += keys, values
            self._offset = step[2].offset
        return self._finish(x)

    def _has_room_for(self, cache: Any) -> bool:
        return len(self._steps) < _MOST_TOGETHER and all(cache is not other for _, _, other in self._steps)

    def _find(self, step: _Step, *, are_own: bool) -> _Prepared | None:
        """Return a prepared layer, if its cache may have planes, and no other call is in the place of its own."""
        layer, _, cache = step
        kind = cast("type[nn.Module]", type(layer))
        is_own = are_own or _layers.get(kind) is kind.__call__
        return _find_prepared(self._kernels, layer) if is_own and hasattr(cache, "places") else None

    def _is_beside(self, places: tuple[mx.array, mx.array, int, list[int]], offset: int | mx.array) -> bool:
        """Report whether a layer's tokens have the same places as those of the layers before."""
        is_same = offset is self._offset or (
            isinstance(offset, int) and isinstance(self._offset, int) and offset == self._offset
        )
        return is_same and places[2] == self._slot and places[3] == self._begins

    def _finish(self, x: mx.array) -> mx.array:
        """Return x after the layers that wait."""
        if not self._steps:
            return x
        where = self._slot, self._begins, self._offset
        ranks = self._ranks
        first = x if ranks is None else ranks.in_turn(x)
        result = self._kernels.attended_layers(first, self._layers, self._planes, *where)
        if result is None:
            for layer, mask, cache in self._steps:
                x = self._call(layer, x, mask, cache)
        else:
            x, planes = result[0], result[1:]
            if ranks is not None:
                ranks.follow(x)
            for i, (_, _, cache) in enumerate(self._steps):
                cache.replace_planes(planes[2 * i], planes[2 * i + 1])
        self._steps, self._layers, self._planes = [], [], []
        return x


def _make_model_call(kernels: Any, name: str, own: Call, masks: known_calls.Masks, call: Call) -> Call:
    """Return the call of a model of the module `name`, whose layers are called by `call`."""

    def run(
        model: Any, inputs: mx.array, cache: Any = None, input_embeddings: mx.array | None = None
    ) -> mx.array:
        if cache is None or not (_prepared and _are_as_known()):
            return own(model, inputs, cache, input_embeddings)
        x = model.embed_tokens(inputs) if input_embeddings is None else input_embeddings
        if not _is_token(x):
            return own(model, inputs, cache, input_embeddings)
        found = masks(model, x, cache, sys.modules[name].create_attention_mask)
        return model.norm(_Together(kernels, call).run(x, zip(model.layers, found, cache, strict=False)))

    return run


def _gated_parts(mlp: Any, norm: Any) -> tuple[tuple[Any, ...] | None, Sum | None]:
    """Return norm, gate, up and down as the kernels take them; None if the modules have to compute them.

    Also return what sums the result over ranks; None where there are none.
    """
    kind = cast("type[nn.Module]", type(mlp))
    if kind not in _gated or _gated[kind] is not kind.__call__ or type(norm) is not nn.RMSNorm:
        return None, None
    sums = sum_of(mlp["down_proj"])
    down = linear_of(mlp["down_proj"]) if sums is None else parts_of(mlp["down_proj"])
    linears = [*(linear_of(mlp[name]) for name in ("gate_proj", "up_proj")), down]
    return (None, None) if None in linears else (((norm["weight"], norm.eps), *linears), sums)


def _combine(
    kernels: Any, mlp: Any, norm: Any, x: mx.array, gated: tuple[Any, ...] | None, sums: Sum | None
) -> mx.array:
    """Return x + mlp(norm(x))."""
    combined = None if gated is None else kernels.gated_layer(x, *gated, sums is None)
    if combined is None:
        return x + mlp(norm(x))
    if sums is None:
        return combined
    ranks, bias = sums
    total = ranks.all_sum(combined)
    return x + (total if bias is None else total + bias)


def _added(kernels: Any, inner: mx.array, linear: nn.Module, x: mx.array) -> mx.array:
    """Return x + linear(inner)."""
    parts = linear_of(linear)
    result = None if parts is None else kernels.added(inner, parts, x)
    if result is not None:
        return result
    if inner.ndim > x.ndim:  # heads
        inner = inner.transpose(0, 2, 1, 3).reshape(*x.shape[:2], -1)
    return x + cast("Call", linear)(inner)
