"""A tiny random model of each family whose layers can be split, plain and quantized."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten  # pyright: ignore[reportUnknownVariableType] - its tree is any
from mlx_lm.utils import load_model  # pyright: ignore[reportUnknownVariableType] - configurations are bare dicts
from tests.worker.random_models import write_random_model

GROUP = 32
_COMMON: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "intermediate_size": 512,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "vocab_size": 509,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "mistral": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "qwen3_moe": {
        "num_attention_heads": 8,
        "head_dim": 32,
        "num_key_value_heads": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [0],
        "norm_topk_prob": True,
    },
    "phi3": {"tie_word_embeddings": True},
}


def write_family(
    folder: Path, family: str, bits: int | None = None, mode: str = "affine", **entries: Any
) -> Path:
    """Write the model's folder; with `bits` its matrices are quantized in groups of 32."""
    config = _COMMON | {"model_type": family} | FAMILIES[family] | entries
    write_random_model(folder, config, spread=0.1, norm=1.0)
    if bits is None:
        return folder
    model = cast("Any", load_model(folder)[0])
    nn.quantize(model, group_size=GROUP, bits=bits, mode=mode)
    weights = cast("dict[str, mx.array]", tree_flatten(model.parameters(), destination={}))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    config["quantization"] = {"group_size": GROUP, "bits": bits, "mode": mode}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
