"""Layers that other code has changed compute as it does, whenever it changed them."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false
from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import pytest
from decoder_models import SIZES, make_model, own_layers, steps
from mlx import nn

from mlx_cpu_kernels import decoder_layers, operations

pytestmark = pytest.mark.usefixtures("installed")


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
