"""Layers that were prepared: neighbours in one operation, as separate operations and as the modules are now."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false
from __future__ import annotations

import gc
import importlib
import io
import math
import weakref
from collections.abc import Callable
from typing import Any, cast

import mlx.core as mx
import pytest
from decoder_models import BUILDS, MODULES_ROTATE, SIZES, Planes, make_model, own_layers, random_like
from mlx import nn
from mlx.utils import tree_flatten, tree_map

from mlx_cpu_kernels import decoder_layers

pytestmark = pytest.mark.usefixtures("installed")


def _graph(*arrays: mx.array) -> str:
    dot = io.StringIO()
    mx.export_to_dot(dot, *arrays)
    return dot.getvalue()


def _planes(model: Any, begins: list[int]) -> list[Any]:
    size = model.layers[0].self_attn.k_proj.weight.shape[0] // SIZES["num_key_value_heads"]
    caches = [Planes(list(begins), 4, 160, size) for _ in model.layers]
    for i, cache in enumerate(caches):
        cache.planes = [(plane * (1 + i)).astype(model.model.norm.weight.dtype) for plane in cache.planes]
        mx.eval(cache.planes)
    return caches


def _tokens(model: Any, cache: list[Any], count: int = 3) -> list[mx.array]:
    """Return the results of tokens one after another, two rows each, that nothing evaluates between them."""
    return [model.model(mx.array([[7 + i], [11 + i]]), cache=cache) for i in range(count)]


def _is_close(ours: mx.array, theirs: mx.array, tolerance: float) -> bool:
    most = mx.max(mx.abs(theirs))
    return cast("bool", mx.all(mx.abs(ours - theirs) <= tolerance * most).item())


def _prepared(family: str = "llama", dtype: mx.Dtype = mx.float32, **changes: Any) -> Any:
    """Return a model whose layers are prepared by two tokens; the first evaluates its weights."""
    model = make_model(family, dtype, None, **({"num_hidden_layers": 4} | changes))
    for _ in range(2):
        mx.eval(_tokens(model, _planes(model, [150, 3]), 1))
    assert all(id(layer) in decoder_layers._prepared for layer in model.layers)
    return model


def _one_by_one(model: Any, cache: list[Any], count: int = 3) -> list[mx.array]:
    """Return the same as `_tokens`, by mlx-lm's layers, for which each row has a cache of its own."""
    results: list[mx.array] = []
    rows = [
        [_row_cache(each, row) if isinstance(each, Planes) else each for each in cache] for row in range(2)
    ]
    for i in range(count):
        tokens = mx.array([[7 + i], [11 + i]])
        results.append(mx.concatenate([model.model(tokens[r : r + 1], cache=rows[r]) for r in range(2)]))
    return results


def _row_cache(cache: Planes, row: int) -> Any:
    own = importlib.import_module("mlx_lm.models.cache").KVCache()
    begin = cache.begins[row]
    own.keys, own.values = (plane[row + 1 : row + 2, :, :begin] + 0 for plane in cache.planes)
    own.offset = begin
    return own


@pytest.mark.slow
@pytest.mark.parametrize(
    "build",
    sorted(BUILDS.keys() - MODULES_ROTATE - {"experts", "sliding windows", "layers without positions"}),
)
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16], ids=["float32", "float16"])
def test_prepared_layers_compute_what_separate_operations_do(build: str, dtype: mx.Dtype) -> None:
    family, changes = BUILDS[build]
    model = _prepared(family, dtype, **changes)
    with own_layers():
        expected = _one_by_one(model, _planes(model, [150, 3]))
        mx.eval(expected)
    mx.eval(_tokens(model, _planes(model, [150, 3]), 1))
    cache = _planes(model, [150, 3])
    ours = _tokens(model, cache)
    graph = _graph(ours[0])
    assert "CpuAttendedLayers" in graph
    assert "CpuAttendedToken" not in graph
    for each, theirs in zip(ours, expected, strict=True):
        assert _is_close(each, theirs, 1e-5 if dtype == mx.float32 else 1e-2)
    other = _planes(model, [150, 3])
    single: list[mx.array] = []
    for i in range(len(ours)):
        decoder_layers._prepared.clear()  # so that each layer is an operation of its own
        single.append(model.model(mx.array([[7 + i], [11 + i]]), cache=other))
    assert all(mx.array_equal(*pair).item() for pair in zip(ours, single, strict=True))
    for one, two in zip(cache, other, strict=True):
        assert one.begins == two.begins == [153, 6]
        assert all(mx.array_equal(*pair).item() for pair in zip(one.planes, two.planes, strict=True))


def test_neighbours_are_one_operation_and_other_caches_are_their_own() -> None:
    model = _prepared(num_hidden_layers=13)
    cache = _planes(model, [3, 3])
    assert _graph(*_tokens(model, cache, 1)).count("CpuAttendedLayers") == math.ceil(
        13 / decoder_layers._MOST_TOGETHER
    )
    cache = _planes(model, [3, 3])
    cache[0] = importlib.import_module("mlx_lm.models.cache").KVCache()
    cache[5].begins = [4, 4]
    cache[6] = importlib.import_module("mlx_lm.models.cache").KVCache()
    graph = _graph(*_tokens(model, cache, 1))
    assert graph.count("CpuAttendedLayers") == 3
    assert graph.count("CpuGatedLayer") == 2
    model = _prepared()
    cache = _planes(model, [0, 0])
    cache[2] = importlib.import_module("mlx_lm.models.cache").KVCache()
    ours = _tokens(model, cache)
    with own_layers():
        cache = _planes(model, [0, 0])
        cache[2] = importlib.import_module("mlx_lm.models.cache").KVCache()
        theirs = _tokens(model, cache)
    assert all(_is_close(*pair, 1e-5) for pair in zip(ours, theirs, strict=True))


def _replace_scales(layer: Any) -> None:
    layer.mlp.up_proj.scales = layer.mlp.up_proj.scales * 1.5


def _change_scales(layer: Any) -> None:
    layer.self_attn.v_proj.scales[:3] = 0.25


def _multiply_scales(layer: Any) -> None:
    scales = layer.mlp.up_proj.scales
    scales *= 1.5


def _update(layer: Any) -> None:
    layer.update(tree_map(_other, layer.parameters()))


def _load(layer: Any) -> None:
    weights = cast("list[tuple[str, mx.array]]", tree_flatten(layer.parameters()))
    layer.load_weights([(name, _other(array)) for name, array in weights])


def _other(array: mx.array) -> mx.array:
    return array ^ 0x11111111 if array.dtype == mx.uint32 else array * 1.5


def _change_scale(layer: Any) -> None:
    layer.self_attn.scale = 0.5


def _change_epsilon(layer: Any) -> None:
    layer.post_attention_layernorm.eps = 0.5


def _add_bias(layer: Any) -> None:
    layer.mlp.down_proj.bias = mx.ones(64)


def _change_rotation(layer: Any) -> None:
    layer.self_attn.rope.base = 100.0


def _change_norm(layer: Any) -> None:
    layer.input_layernorm = nn.RMSNorm(64)


def _change_class(layer: Any) -> None:
    kind = type(layer.mlp)
    layer.mlp.__class__ = type(kind.__name__, (kind,), {"__call__": _double})


def _change_layer(layer: Any) -> None:
    kind = type(layer)
    layer.__class__ = type(kind.__name__, (kind,), {"__call__": _double})


def _double(_module: Any, x: mx.array, *_others: Any, **_named: Any) -> mx.array:
    return x * 2


@pytest.mark.parametrize(
    "change",
    [
        _replace_scales,
        _change_scales,
        _multiply_scales,
        _update,
        _load,
        _change_scale,
        _change_epsilon,
        _add_bias,
        _change_rotation,
        _change_norm,
        _change_class,
        _change_layer,
    ],
)
def test_what_is_changed_after_it_was_prepared_computes_as_it_does(change: Callable[[Any], None]) -> None:
    model = _prepared()
    (before,) = _tokens(model, _planes(model, [3, 3]), 1)
    change(model.layers[1])
    first, second = (_tokens(model, _planes(model, [3, 3]), 1)[0] for _ in range(2))
    with own_layers():
        (expected,) = _one_by_one(model, _planes(model, [3, 3]), 1)
    assert _is_close(first, expected, 1e-5)
    assert _is_close(second, expected, 1e-5)
    assert not _is_close(before, expected, 1e-3)  # evaluated after the change, with what it was built of


def test_adapters_that_come_and_change_and_go_are_computed() -> None:
    tuner: Any = importlib.import_module("mlx_lm.tuner.utils")
    model = _prepared()

    def assert_is_computed() -> mx.array:
        (ours,) = _tokens(model, _planes(model, [3, 3]), 1)
        with own_layers():
            (expected,) = _one_by_one(model, _planes(model, [3, 3]), 1)
        assert _is_close(ours, expected, 1e-5)
        for _ in range(2):  # layers are prepared again
            mx.eval(_tokens(model, _planes(model, [3, 3]), 1))
        return ours

    without = assert_is_computed()
    tuner.linear_to_lora_layers(model, 2, {"rank": 4, "scale": 20.0, "dropout": 0.0})
    adapters = [module for _, module in model.named_modules() if "lora_b" in module]
    for adapter in adapters:
        adapter.lora_b = random_like(adapter.lora_b)
    first = assert_is_computed()
    for adapter in adapters:
        adapter.lora_b = adapter.lora_b * 3
    second = assert_is_computed()
    tuner.remove_lora_layers(model)
    assert _is_close(assert_is_computed(), without, 1e-6)
    assert not any(_is_close(*pair, 1e-3) for pair in ((first, without), (second, without), (first, second)))


def test_weights_that_a_model_no_longer_has_take_no_memory() -> None:
    model = _prepared(intermediate_size=2048)
    mx.eval(model.parameters())
    mx.clear_cache()
    gc.collect()
    old, before = weakref.ref(model.layers[1].mlp.up_proj.weight), mx.get_active_memory()
    model.update(tree_map(_other, model.parameters()))
    mx.eval(model.parameters())
    assert old() is None
    assert mx.get_active_memory() < before + model.layers[1].mlp.up_proj.weight.nbytes


def test_a_class_that_is_changed_after_its_layers_were_prepared_keeps_its_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = _prepared()
    monkeypatch.setattr(importlib.import_module("mlx_lm.models.llama").MLP, "__call__", _double)
    (ours,) = _tokens(model, _planes(model, [3, 3]), 1)
    with own_layers():
        (expected,) = _one_by_one(model, _planes(model, [3, 3]), 1)
    assert _is_close(ours, expected, 1e-5)


@pytest.mark.parametrize("name", ["QuantizedLinear", "RMSNorm", "RoPE"])
def test_classes_of_mlx_that_are_changed_later_keep_their_calls(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, kind = _prepared(), getattr(nn, name)
    own = kind.__call__

    def call(module: Any, x: mx.array, **named: Any) -> mx.array:
        return own(module, x, **named) * 1.5

    monkeypatch.setattr(kind, "__call__", call)
    _assert_equal_to_separate(model)


@pytest.mark.parametrize("name", ["swiglu", "scaled_dot_product_attention"])
def test_functions_that_are_changed_later_are_called(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llama = importlib.import_module("mlx_lm.models.llama")
    model, own = _prepared(), getattr(llama, name)

    def call(*arguments: Any, **named: Any) -> mx.array:
        return own(*arguments, **named) * 1.5

    monkeypatch.setattr(llama, name, call)
    _assert_equal_to_separate(model)


def _assert_equal_to_separate(model: Any) -> None:
    (ours,) = _tokens(model, _planes(model, [3, 3]), 1)
    without = model.model(mx.array([[7, 8, 9]]))
    with own_layers():
        (expected,) = _one_by_one(model, _planes(model, [3, 3]), 1)
        theirs = model.model(mx.array([[7, 8, 9]]))
    assert _is_close(ours, expected, 1e-5)
    assert mx.array_equal(without, theirs).item()


def test_prepared_layers_have_the_gradients_of_mlx() -> None:
    model = _prepared()
    x = mx.sin(mx.arange(2 * 64.0)).reshape(2, 1, 64)

    def loss(x: mx.array) -> mx.array:
        return mx.sum(model.model(None, _planes(model, [3, 3]), x) ** 2)

    def own_loss(x: mx.array) -> mx.array:
        cache = _planes(model, [3, 3])
        rows = [[_row_cache(each, row) for each in cache] for row in range(2)]
        return sum((mx.sum(model.model(None, rows[r], x[r : r + 1]) ** 2) for r in range(2)), mx.array(0.0))

    assert "CpuAttendedLayers" in _graph(loss(x))
    ours = mx.grad(loss)(x)
    with own_layers():
        assert mx.allclose(ours, mx.grad(own_loss)(x), rtol=1e-3, atol=1e-3).item()


def test_layers_are_forgotten_with_their_model() -> None:
    model = _prepared()
    kept = {id(layer) for layer in model.layers}
    assert kept <= decoder_layers._prepared.keys()
    del model
    gc.collect()
    assert not kept & decoder_layers._prepared.keys()
