"""Decoder layers in few operations: mlx-lm's results, for each build of a layer, and mlx-lm's own where one differs."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false
from __future__ import annotations

import importlib
import io
import math
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import mlx.core as mx
import pytest
from mlx import nn
from mlx.utils import tree_flatten, tree_map

from mlx_cpu_kernels import decoder_layers, operations

pytest.importorskip("mlx_lm")
if not operations.install().active:
    pytest.skip("the native kernels are not built", allow_module_level=True)
operations.uninstall()

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 50,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
BUILDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "neighbours are pairs": ("llama", {"rope_traditional": True}),
    "llama 3's frequencies": ("llama", {"rope_scaling": LLAMA3}),
    "yarn, which the module computes": ("llama", {"rope_scaling": YARN}),
    "linear": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4}}),
    "dynamic": ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 4}}),
    "a base that is an integer": ("llama", {"rope_theta": 10000}),
    "layers without positions": ("smollm3", {"no_rope_layer_interval": 2}),
    "sliding windows": (
        "llama",
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5},
    ),
    "qwen2": ("qwen2", {}),
    "qwen3, whose heads are normalized": ("qwen3", {"head_dim": 32}),
    "experts": (
        "qwen3_moe",
        {
            "head_dim": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        },
    ),
}

MODULES_ROTATE = {"yarn, which the module computes", "dynamic"}
"""Builds whose rotation the kernels do not know."""


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    before = mx.default_device()
    mx.set_default_device(mx.Device(mx.cpu))
    operations.install()
    yield
    operations.uninstall()
    mx.set_default_device(before)


@contextmanager
def own_layers() -> Generator[None]:
    """Give mlx-lm its own layers for a while; their operations stay those of the kernels."""
    decoder_layers.uninstall()
    try:
        yield
    finally:
        decoder_layers.install(operations._load())


def _random(array: mx.array) -> mx.array:
    return mx.random.normal(array.shape) * 0.2


def _in_four_bits(model: nn.Module) -> None:
    nn.quantize(model, group_size=32, bits=4)


def make_model(
    family: str,
    dtype: mx.Dtype = mx.float32,
    quantize: Callable[[nn.Module], None] | None = None,
    **changes: Any,
) -> Any:
    module = importlib.import_module(f"mlx_lm.models.{family}")
    mx.random.seed(1)
    model = cast("nn.Module", module.Model(module.ModelArgs(model_type=family, **(SIZES | changes))))
    model.update(tree_map(_random, model.parameters()))
    (quantize or _in_four_bits)(model)
    model.set_dtype(dtype)
    return model


def caches() -> Any:
    return importlib.import_module("mlx_lm.models.cache")


def steps(model: Any, make_cache: Callable[[Any], list[Any]] | None = None) -> list[mx.array]:
    """Return logits without a cache, of two chunks of a prompt, and of two tokens."""
    tokens = mx.arange(2 * 12).reshape(2, 12) * 7 % SIZES["vocab_size"]
    cache = (make_cache or caches().make_prompt_cache)(model)
    parts = (tokens[:, :7], tokens[:, 7:10], tokens[:, 10:11], tokens[:, 11:])
    return [model(tokens), *(model(part, cache=cache) for part in parts)]


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


def _with_lora(model: Any) -> None:
    _in_four_bits(model)
    tuner: Any = importlib.import_module("mlx_lm.tuner.utils")
    tuner.linear_to_lora_layers(model, 1, {"rank": 4, "scale": 2.0, "dropout": 0.0})
    for _path, module in model.named_modules():
        if "lora_b" in module:
            module.lora_b = _random(module.lora_b)  # which begins as zeros


@pytest.mark.parametrize("quantize", [_with_mixed_bits, _in_mxfp4, _with_lora])
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


class Planes:
    """A cache of planes, of which each row has its own slot and length."""

    def __init__(self, begins: list[int], slots: int, capacity: int, size: int) -> None:
        """Make planes that hold numbers up to the rows' lengths; row i has slot i + 1."""
        self.begins = begins
        shape = slots, SIZES["num_key_value_heads"], capacity, size
        self.planes = [mx.sin(mx.arange(math.prod(shape)) * (0.3 + i)).reshape(shape) for i in range(2)]
        mx.eval(self.planes)

    @property
    def offset(self) -> mx.array:
        return mx.array(self.begins, mx.int32)

    def places(self, mask: Any) -> tuple[mx.array, mx.array, int, list[int]] | None:
        return None if mask is not None else (self.planes[0], self.planes[1], 1, self.begins)

    def replace_planes(self, keys: mx.array, values: mx.array) -> None:
        self.planes = [keys, values]
        self.begins = [begin + 1 for begin in self.begins]


def attended(layer: Any, x: mx.array, cache: Planes) -> mx.array:
    """Return what a layer computes of one token a row, with a cache of its own for each."""
    rows: list[mx.array] = []
    for row, begin in enumerate(cache.begins):
        own = importlib.import_module("mlx_lm.models.cache").KVCache()
        own.keys, own.values = (plane[row + 1 : row + 2, :, : begin + 1] + 0 for plane in cache.planes)
        own.offset = begin
        rows.append(layer(x[row : row + 1], None, own))
    return mx.concatenate(rows)


@pytest.mark.parametrize("build", sorted(BUILDS.keys() - MODULES_ROTATE))
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16], ids=["float32", "float16"])
def test_tokens_of_planes_are_those_of_caches_of_their_own(build: str, dtype: mx.Dtype) -> None:
    family, changes = BUILDS[build]
    model = make_model(family, dtype, **changes)
    layer, x = model.layers[0], mx.cos(mx.arange(2 * 64)).reshape(2, 1, 64).astype(dtype)
    size = layer.self_attn.k_proj.weight.shape[0] // SIZES["num_key_value_heads"]
    cache = Planes([150, 3], 4, 160, size)
    cache.planes = [plane.astype(dtype) for plane in cache.planes]
    before = [mx.array(plane.tolist(), dtype) for plane in cache.planes]
    tolerance = 1e-5 if dtype == mx.float32 else 5e-3
    for step in (1, 2):
        with own_layers():
            expected = attended(layer, x, cache)
        ours = layer(x, None, cache)
        most = cast("float", mx.max(mx.abs(expected)).item())
        assert mx.allclose(ours, expected, rtol=0, atol=tolerance * most).item()
        assert cache.begins == [150 + step, 3 + step]
    for plane, old in zip(cache.planes, before, strict=True):
        changed = mx.any(plane != old, axis=(1, 3))
        places = {
            (slot, index)
            for slot, row in enumerate(cast("list[list[bool]]", changed.tolist()))
            for index, is_new in enumerate(row)
            if is_new
        }
        assert places == {(1, 150), (1, 151), (2, 3), (2, 4)}


def test_planes_are_changed_in_place_and_gradients_are_those_of_mlx() -> None:
    layer, cache = make_model("llama").layers[0], Planes([5], 2, 9, 16)
    keys, values = cache.planes
    x = mx.sin(mx.arange(64.0)).reshape(1, 1, 64)

    def loss(x: mx.array) -> mx.array:
        cache.planes, cache.begins = [keys, values], [5]
        return mx.sum(layer(x, None, cache) ** 2)

    ours = mx.grad(loss)(x)
    operations.uninstall()

    def own_loss(x: mx.array) -> mx.array:
        cache.planes, cache.begins = [keys, values], [5]
        return mx.sum(attended(layer, x, cache) ** 2)

    assert mx.allclose(ours, mx.grad(own_loss)(x), rtol=1e-3, atol=1e-3).item()
    operations.install()
    written = decoder_layers.append(keys, mx.ones((1, 2, 3, 16)), 1, 6)
    assert written is not None
    mx.eval(written)
    assert mx.all(keys[1, :, 6:] == 1).item()


@pytest.mark.parametrize(
    ("rows", "slot", "begin"),
    [((2, 2, 1, 16), 1, 0), ((1, 2, 2, 16), 0, 8), ((1, 2, 1, 16), 0, -1), ((1, 1, 1, 16), 0, 0)],
)
def test_rows_that_do_not_fit_a_plane_are_refused(rows: tuple[int, ...], slot: int, begin: int) -> None:
    with pytest.raises(ValueError, match="rows do not fit"):
        decoder_layers.append(mx.zeros((2, 2, 9, 16)), mx.zeros(rows), slot, begin)


def test_a_layer_is_few_operations() -> None:
    layer = make_model("llama").layers[0]
    for cache, names in (
        (None, ["CpuHeadProducts", "CpuAttention", "CpuAddedProduct", "CpuGatedLayer"]),
        (Planes([5], 2, 9, 16), ["CpuAttendedToken"]),
    ):
        dot = io.StringIO()
        mx.export_to_dot(dot, layer(mx.zeros((1, 1, 64)), None, cache))
        graph = dot.getvalue()
        assert all(name in graph for name in names)
        assert "QuantizedProduct" not in graph
        assert graph.count('shape="rectangle"') <= len(names) + 1


def _double(_module: Any, x: mx.array, *_others: Any) -> mx.array:
    return x * 2


def _change_attention(layer: Any) -> None:
    kind = type(layer.self_attn)
    layer.self_attn.__class__ = type(kind.__name__, (kind,), {"__call__": _double})


def _change_output(layer: Any) -> None:
    kind = type(layer.self_attn.o_proj)
    layer.self_attn.o_proj.__class__ = type(kind.__name__, (kind,), {"__call__": _double})


def _change_gate(layer: Any) -> None:
    layer.mlp.gate_proj = nn.Linear(64, 96)


def _change_norm(layer: Any) -> None:
    layer.input_layernorm = nn.LayerNorm(64)


@pytest.mark.parametrize("change", [_change_attention, _change_output, _change_gate, _change_norm])
def test_what_is_changed_computes_as_it_does(change: Callable[[Any], None]) -> None:
    layer = make_model("llama").layers[0]
    change(layer)
    x = mx.sin(mx.arange(5 * 64)).reshape(1, 5, 64)
    ours = layer(x, "causal")
    with own_layers():
        assert mx.array_equal(ours, layer(x, "causal")).item()


def test_a_class_of_other_code_keeps_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    llama: Any = importlib.import_module("mlx_lm.models.llama")

    def call(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        return x + self.self_attn(self.input_layernorm(x), mask, cache)

    operations.uninstall()
    monkeypatch.setattr(llama.TransformerBlock, "__call__", call)
    operations.install()
    assert llama.TransformerBlock.__call__ is call
    operations.uninstall()


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
    model = make_model("llama", quantize=_with_lora)
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


@pytest.mark.parametrize("kind", ["Attention", "MLP"])
def test_classes_that_are_changed_after_the_installation_keep_their_calls(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    changed = getattr(importlib.import_module("mlx_lm.models.llama"), kind)
    own = changed.__call__

    def recorded(self: Any, *arguments: Any, **options: Any) -> Any:
        calls.append(self)
        return own(self, *arguments, **options)

    monkeypatch.setattr(changed, "__call__", recorded)
    mx.eval(make_model("llama")(mx.arange(3)[None]))
    assert len(calls) == SIZES["num_hidden_layers"]


def test_classes_whose_call_is_no_function_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = importlib.import_module("mlx_lm.models.llama").MLP
    model = make_model("llama")
    expected = steps(model)
    decoder_layers.uninstall()
    monkeypatch.setattr(changed, "__call__", property(lambda self: partial(_multiply, self)))
    decoder_layers.install(operations._load())
    assert all(mx.array_equal(*pair).item() for pair in zip(steps(model), expected, strict=True))


def _multiply(mlp: Any, x: mx.array) -> mx.array:
    swiglu = importlib.import_module("mlx_lm.models.activations").swiglu
    return mlp.down_proj(swiglu(mlp.gate_proj(x), mlp.up_proj(x)))


def _rotate(rope: Any, x: mx.array, offset: Any = 0) -> mx.array:
    return rope(x, offset=offset)


def test_rotations_may_be_any_callable() -> None:
    model = make_model("llama")
    expected = steps(model)
    for layer in model.layers:
        rope = layer.self_attn.pop("rope")
        layer.self_attn.rope = partial(_rotate, rope)
    assert all(mx.array_equal(*pair).item() for pair in zip(steps(model), expected, strict=True))


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
