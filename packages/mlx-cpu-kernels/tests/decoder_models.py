"""Small models of mlx-lm in 4 bits, with and without the kernels' decoder layers."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false
from __future__ import annotations

import importlib
import io
import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cache
from typing import Any, cast

import mlx.core as mx
import pytest
from mlx import nn
from mlx.utils import tree_map

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


@contextmanager
def own_layers() -> Generator[None]:
    """Give mlx-lm its own layers for a while; their operations stay those of the kernels."""
    decoder_layers.uninstall()
    try:
        yield
    finally:
        decoder_layers.install(operations._load())


def random_like(array: mx.array) -> mx.array:
    return mx.random.normal(array.shape) * 0.2


def in_four_bits(model: nn.Module) -> None:
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
    model.update(tree_map(random_like, model.parameters()))
    (quantize or in_four_bits)(model)
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


def with_lora(model: Any) -> None:
    in_four_bits(model)
    tuner: Any = importlib.import_module("mlx_lm.tuner.utils")
    tuner.linear_to_lora_layers(model, 1, {"rank": 4, "scale": 2.0, "dropout": 0.0})
    for _path, module in model.named_modules():
        if "lora_b" in module:
            module.lora_b = random_like(module.lora_b)  # which begins as zeros


def assert_operations(layer: Any, cache: Any, names: list[str]) -> None:
    """Check that a layer computes a token in these operations, and in one other at most."""
    dot = io.StringIO()
    mx.export_to_dot(dot, layer(mx.zeros((1, 1, 64)), None, cache))
    graph = dot.getvalue()
    assert all(name in graph for name in names)
    assert "QuantizedProduct" not in graph
    assert graph.count('shape="rectangle"') <= len(names) + 1


@cache
def _offsets(begins: tuple[int, ...]) -> mx.array:
    return mx.array(begins, mx.int32)


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
        return _offsets(tuple(self.begins))

    def places(self, mask: Any) -> tuple[mx.array, mx.array, int, list[int]] | None:
        return None if mask is not None else (self.planes[0], self.planes[1], 1, self.begins)

    def replace_planes(self, keys: mx.array, values: mx.array) -> None:
        self.planes = [keys, values]
        self.begins = [begin + 1 for begin in self.begins]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Generator[mx.array]:
        """Append as mlx-lm's layers do; all rows have one length."""
        begin, rows = self.begins[0], len(self.begins)
        end = begin + keys.shape[2]
        self.begins = [end] * rows
        for plane, new in zip(self.planes, (keys, values), strict=True):
            plane[1 : rows + 1, :, begin:end] = new
        return (plane[1 : rows + 1, :, :end] + 0 for plane in self.planes)
