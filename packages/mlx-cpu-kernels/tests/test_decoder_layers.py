"""Decoder layers in few operations: mlx-lm's results, for each build of a layer."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false
from __future__ import annotations

import io
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, cast

import mlx.core as mx
import pytest
from decoder_models import BUILDS, SIZES, assert_operations, caches, make_model, own_layers, steps, with_lora
from mlx import nn
from mlx.utils import tree_flatten

from mlx_cpu_kernels import operations

pytestmark = pytest.mark.usefixtures("installed")


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=["float32", "bfloat16"])
def test_logits_are_those_of_the_separate_operations(build: str, dtype: mx.Dtype) -> None:
    family, changes = BUILDS[build]
    model = make_model(family, dtype, **changes)
    fused = steps(model)
    with own_layers():
        separate = steps(model)
    for ours, theirs in zip(fused, separate, strict=True):
        if dtype == mx.float32:
            assert mx.array_equal(ours, theirs).item()
        else:  # mlx-lm rounds within a gate, too
            most = cast("float", mx.max(mx.abs(theirs)).item())
            assert mx.allclose(ours, theirs, rtol=0, atol=0.02 * most).item()


def _left_padded(model: Any) -> list[Any]:
    return [caches().BatchKVCache([0, 3]) for _ in model.layers]


def _quantized(model: Any) -> list[Any]:
    return [caches().QuantizedKVCache(group_size=32, bits=8) for _ in model.layers]


@pytest.mark.parametrize("make_cache", [_left_padded, _quantized])
def test_logits_are_those_of_the_separate_operations_with_any_cache(
    make_cache: Callable[[Any], list[Any]],
) -> None:
    model = make_model("qwen3", head_dim=32)
    fused = steps(model, make_cache)
    with own_layers():
        assert all(mx.array_equal(*pair).item() for pair in zip(fused, steps(model, make_cache), strict=True))


def _with_mixed_bits(model: nn.Module) -> None:
    bits = {"v_proj": 8, "up_proj": 3, "down_proj": 6}

    def choose(path: str, module: nn.Module) -> bool | dict[str, int]:
        chosen = bits.get(path.rpartition(".")[2], 4)
        return hasattr(module, "to_quantized") and {"group_size": 32, "bits": chosen}

    nn.quantize(model, class_predicate=choose)


def _in_mxfp4(model: nn.Module) -> None:
    nn.quantize(model, group_size=32, bits=4, mode="mxfp4")


@pytest.mark.parametrize("quantize", [_with_mixed_bits, _in_mxfp4, with_lora])
def test_logits_are_those_of_the_separate_operations_with_any_weights(
    quantize: Callable[[nn.Module], None],
) -> None:
    model = make_model("llama", quantize=quantize)
    fused = steps(model)
    with own_layers():
        assert all(mx.array_equal(*pair).item() for pair in zip(fused, steps(model), strict=True))


@pytest.mark.parametrize("has_biases", [True, False], ids=["biases", "no biases"])
def test_layers_that_mlx_lm_shares_between_ranks_are_few_operations(*, has_biases: bool) -> None:
    model = make_model("llama", attention_bias=has_biases, mlp_bias=has_biases)
    model.shard(mx.distributed.init())
    model.train()
    separate = steps(model)
    model.eval()
    assert type(model.layers[0].mlp.down_proj) is nn.QuantizedShardedToAllLinear
    dot = io.StringIO()
    mx.export_to_dot(dot, model.layers[0](mx.zeros((1, 1, 64))))
    assert all(name in dot.getvalue() for name in ("CpuHeadProducts", "CpuGatedLayer"))
    assert all(mx.array_equal(*pair).item() for pair in zip(steps(model), separate, strict=True))


def _compiled(layer: Callable[[mx.array], mx.array], x: mx.array) -> mx.array:
    return mx.compile(layer)(x)


def _checkpointed(layer: Callable[[mx.array], mx.array], x: mx.array) -> mx.array:
    def loss(x: mx.array) -> mx.array:
        return mx.sum(mx.checkpoint(layer)(x) ** 2)

    return mx.grad(loss)(x)


def _beside_a_row_of_nan(layer: Callable[[mx.array], mx.array], x: mx.array) -> mx.array:
    nan = mx.where(mx.arange(x.shape[1])[:, None] == 3, mx.nan, x)
    return layer(mx.concatenate([nan, x]))


@pytest.mark.parametrize("use", [_compiled, _checkpointed, _beside_a_row_of_nan])
def test_a_layer_is_used_like_one_of_separate_operations(
    use: Callable[[Callable[[mx.array], mx.array], mx.array], mx.array],
) -> None:
    layer = partial(make_model("llama").layers[0].__call__, mask="causal")
    x = mx.sin(mx.arange(5 * 64)).reshape(1, 5, 64)
    ours = use(layer, x)
    with own_layers():
        theirs = use(layer, x)
    assert mx.array_equal(ours, theirs, equal_nan=True).item()
    assert not mx.all(mx.isnan(ours)).item()


def test_threads_compute_on_streams_of_their_own() -> None:
    model = make_model("llama")
    expected = steps(model)
    mx.eval(expected)

    def compute(_thread: int) -> bool:
        with mx.stream(mx.new_stream(mx.Device(mx.cpu))):
            repeated = [steps(model) for _ in range(4)]
            return all(
                mx.array_equal(*pair).item() for each in repeated for pair in zip(each, expected, strict=True)
            )

    with ThreadPoolExecutor(3) as threads:
        assert all(threads.map(compute, range(3)))


@pytest.mark.parametrize("build", ["llama", "qwen3, whose heads are normalized"])
def test_rows_at_positions_of_their_own_are_rotated_as_by_mlx(build: str) -> None:
    model = make_model(BUILDS[build][0], **BUILDS[build][1])

    class Cache:
        offset = mx.array([3, 40], mx.int32)

        def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
            return keys, values

    def hidden() -> mx.array:
        return model.layers[0](mx.sin(mx.arange(2 * 5 * 64)).reshape(2, 5, 64), "causal", Cache())

    ours = hidden()
    with own_layers():
        assert mx.array_equal(ours, hidden()).item()


def test_gradients_are_those_of_mlx() -> None:
    model = make_model("qwen3", head_dim=32)
    layer = model.layers[0]

    def loss(x: mx.array) -> mx.array:
        return mx.sum(layer(x, "causal") ** 2)

    x = mx.sin(mx.arange(5 * 64)).reshape(1, 5, 64)
    ours = mx.grad(loss)(x)
    operations.uninstall()
    assert mx.allclose(ours, mx.grad(loss)(x), rtol=1e-3, atol=1e-3).item()


def test_a_model_is_trained_with_the_gradients_of_mlx() -> None:
    training: Any = nn
    model = make_model("llama", quantize=with_lora)
    tokens = mx.arange(2 * 12).reshape(2, 12) * 7 % SIZES["vocab_size"]

    def loss(model: Any) -> mx.array:
        return training.losses.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:], reduction="mean")

    def step() -> tuple[mx.array, dict[str, mx.array]]:
        value, gradients = training.value_and_grad(model, loss)(model)
        flat: Any = tree_flatten(gradients, destination={})
        mx.eval(value, flat)
        return value, flat

    value, ours = step()
    operations.uninstall()
    expected, theirs = step()
    assert mx.allclose(value, expected, rtol=1e-5).item()
    assert ours.keys() == theirs.keys()
    assert {path.rpartition(".")[2] for path in ours} == {"weight", "lora_a", "lora_b"}  # norms and adapters
    for path, gradient in theirs.items():
        most = cast("float", mx.max(mx.abs(gradient)).item())
        assert most > 0, path
        assert mx.allclose(ours[path], gradient, rtol=0, atol=1e-4 * most).item(), path


def test_a_layer_is_compiled_for_any_number_of_tokens() -> None:
    model = make_model("llama")
    mx.eval(model.parameters())
    layer = mx.compile(model.layers[0].__call__, shapeless=True)
    for tokens in (3, 5):
        x = mx.random.normal((1, tokens, SIZES["hidden_size"]))
        assert mx.allclose(layer(x), model.layers[0](x), rtol=1e-5, atol=1e-5).item()


def test_products_of_nothing_are_left_to_mlx() -> None:
    kernels: Any = operations._load()
    nothing = mx.zeros((8, 0), mx.uint32), mx.zeros((8, 0)), mx.zeros((8, 0)), None, 32, 4
    assert kernels.gated_layer(mx.zeros((1, 2, 0)), None, nothing, nothing, nothing) is None


def test_a_layer_is_few_operations() -> None:
    names = ["CpuHeadProducts", "CpuAttention", "CpuAddedProduct", "CpuGatedLayer"]
    assert_operations(make_model("llama").layers[0], None, names)
