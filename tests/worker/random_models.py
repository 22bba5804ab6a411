"""Folders of tiny random models, as `save_pretrained` would write them, without the tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten  # pyright: ignore[reportUnknownVariableType] - its tree is any
from mlx_lm.utils import _get_classes  # pyright: ignore[reportPrivateUsage, reportUnknownVariableType] - the one way to a class

QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 5,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "vocab_size": 320,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
}

QWEN3_MOE: dict[str, Any] = {
    **QWEN3,
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}


def write_random_model(
    folder: Path, config: dict[str, Any], seed: int = 0, *, spread: float = 0.3, norm: float = 0.0
) -> Path:
    """Make the model of `config` with seeded normal weights in float32 and write its folder.

    Args:
        spread: standard deviation of the weights.
        norm: mean of the norms' weights. In deeper models, 1.0 and a smaller spread keep numbers in bounds.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model_class, arguments_class = cast("tuple[Any, Any]", cast("object", _get_classes(config)))
    mx.random.seed(seed)
    model = model_class(arguments_class.from_dict(config))
    shapes = cast("dict[str, mx.array]", tree_flatten(model.parameters(), destination={}))
    weights = {
        name: (norm if "norm" in name else 0.0) + spread * mx.random.normal(value.shape)
        for name, value in shapes.items()
    }
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder
