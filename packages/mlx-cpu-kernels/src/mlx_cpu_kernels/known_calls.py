"""Calls of mlx-lm's layers and models, by which the classes are recognized that decoder_layers.py replaces.

Each function is mlx-lm's word by word, but for the names and types of variables. Their code is compared, not run.
"""

# ruff: noqa: RET504, SIM108, B020, B905 - as there
from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any, cast

import mlx.core as mx

Call = Callable[..., Any]
Masks = Callable[..., list[Any]]
scaled_dot_product_attention = swiglu = create_attention_mask = cast("Call", None)


def is_same(call: object, known: Call) -> bool:
    """Report whether each instruction of a call is that of a known one; a call may be no function."""
    code = getattr(call, "__code__", None)
    return code is not None and _instructions(code) == _instructions(known.__code__)


def _instructions(code: CodeType) -> tuple[object, ...]:
    return code.co_code, code.co_names, code.co_consts, code.co_argcount, code.co_nlocals


def layer(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> Any:
    added = self.self_attn(self.input_layernorm(x), mask, cache)
    hidden = x + added
    added = self.mlp(self.post_attention_layernorm(hidden))
    out = hidden + added
    return out


def attention(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> Any:
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


def normalized_attention(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> Any:
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


def gated_layer(self: Any, x: mx.array) -> Any:
    return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


def llama_model(self: Any, inputs: mx.array, cache: Any = None, input_embeddings: Any = None) -> Any:
    if input_embeddings is not None:
        x = input_embeddings
    else:
        x = self.embed_tokens(inputs)
    if cache is None:
        cache = [None] * len(self.layers)
    full = create_attention_mask(x, cache[self.fa_idx])
    if self.swa_idx is not None:
        sliding = create_attention_mask(x, cache[self.swa_idx], window_size=self.sliding_window)
    for layer, cache in zip(self.layers, cache):
        mask = sliding if layer.use_sliding else full  # pyright: ignore[reportPossiblyUnboundVariable]
        x = layer(x, mask, cache=cache)
    return self.norm(x)


def plain_model(self: Any, inputs: mx.array, cache: Any = None, input_embeddings: Any = None) -> Any:
    if input_embeddings is not None:
        x = input_embeddings
    else:
        x = self.embed_tokens(inputs)
    if cache is None:
        cache = [None] * len(self.layers)
    mask = create_attention_mask(x, cache[0])
    for layer, each in zip(self.layers, cache):
        x = layer(x, mask, each)
    return self.norm(x)


def _llama_masks(model: Any, x: mx.array, cache: Any, make: Call) -> list[Any]:
    full = make(x, cache[model.fa_idx])
    if model.swa_idx is None:
        return [full] * len(model.layers)
    sliding = make(x, cache[model.swa_idx], window_size=model.sliding_window)
    return [sliding if layer.use_sliding else full for layer in model.layers]


def _plain_masks(model: Any, x: mx.array, cache: Any, make: Call) -> list[Any]:
    return [make(x, cache[0])] * len(model.layers)


def _by_name(layer: Call, x: mx.array, mask: Any, cache: Any) -> mx.array:
    return layer(x, mask, cache=cache)


def _by_position(layer: Call, x: mx.array, mask: Any, cache: Any) -> mx.array:
    return layer(x, mask, cache)


MODELS: dict[Call, tuple[Masks, Call]] = {
    llama_model: (_llama_masks, _by_name),
    plain_model: (_plain_masks, _by_position),
}
"""Known calls of models, with a function of a token's mask for each layer, and how they call a layer."""
