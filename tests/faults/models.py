"""Tiny random models of five kinds whose every token is one ASCII character, so that a text shows its tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten  # pyright: ignore[reportUnknownVariableType] - its tree is any
from mlx_lm.utils import load_model  # pyright: ignore[reportUnknownVariableType] - configurations are bare dicts
from tests.tiny_model import write_tokenizer
from tests.worker.random_models import write_random_model

CHARACTERS = "".join(map(chr, range(ord(" "), 127)))
_SPECIAL = 2
"""Number of special tokens, which come first. Their rows of the output head are zero."""
_HEAD_SCALE = 3.0
"""Factor of the output head, so that the special tokens, whose logits are zero, are unlikely."""
_DENSE: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 128,
    "num_hidden_layers": 6,
    "intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "vocab_size": _SPECIAL + len(CHARACTERS),
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
_RECURRENT: dict[str, Any] = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 3,
    "shared_expert_intermediate_size": 64,
    "full_attention_interval": 2,
    "partial_rotary_factor": 0.5,
}
MODELS: Mapping[str, dict[str, Any]] = {
    "dense": _DENSE,
    "experts": {**_DENSE, **_EXPERTS, "model_type": "qwen3_moe"},
    "quantized": {**_DENSE, "quantization": {"group_size": 32, "bits": 4}},
    "sliding": {
        **_DENSE,
        "model_type": "gemma3_text",
        "sliding_window": 24,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 32,
    },
    "recurrent": {**_DENSE, **_EXPERTS, **_RECURRENT, "model_type": "qwen3_next"},
}


def write_model(folder: Path, kind: str) -> Path:
    """Write a model's folder with its tokenizer."""
    config = dict(MODELS[kind])
    quantization: dict[str, int] | None = config.pop("quantization", None)
    write_random_model(folder, config, spread=0.1, norm=1.0)
    _change_head(folder)
    if quantization is not None:
        _quantize(folder, config, quantization)
    return write_tokenizer(folder, [_as_byte(character) for character in CHARACTERS])


def tokens_of(text: str) -> list[int]:
    """Return the tokens of a text."""
    return [_SPECIAL + CHARACTERS.index(character) for character in text]


def _as_byte(character: str) -> str:
    """Return a character as `ByteLevel` writes it."""
    return "\u0120" if character == " " else character


def _change_head(folder: Path) -> None:
    """Bar special tokens, and scale the others."""
    file = folder / "model.safetensors"
    weights = cast("dict[str, mx.array]", mx.load(str(file)))
    head = "lm_head.weight" if "lm_head.weight" in weights else "model.embed_tokens.weight"
    special, others = weights[head][:_SPECIAL], weights[head][_SPECIAL:]
    weights[head] = mx.concatenate([mx.zeros_like(special), _HEAD_SCALE * others])
    mx.eval(weights)
    mx.save_safetensors(str(file), weights, {"format": "mlx"})


def _quantize(folder: Path, config: dict[str, Any], quantization: dict[str, int]) -> None:
    model = cast("Any", load_model(folder)[0])
    nn.quantize(model, group_size=quantization["group_size"], bits=quantization["bits"])
    weights = cast("dict[str, mx.array]", tree_flatten(model.parameters(), destination={}))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config | {"quantization": quantization}))
