"""Tiny random models, one for each kind of cache."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_map  # pyright: ignore[reportUnknownVariableType] - its tree is any

VOCABULARY = 101

_DENSE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LATENT: dict[str, Any] = {
    **_EXPERTS,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
}

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "qwen3": _DENSE,
    "gemma3_text": {**_DENSE, "sliding_window": 24, "sliding_window_pattern": 2},
    "gpt_oss": {
        **_DENSE,
        **_EXPERTS,
        "num_local_experts": 4,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "deepseek_v3": {**_DENSE, **_LATENT},
    "deepseek_v32": {**_DENSE, **_LATENT, "index_topk": 8, "index_head_dim": 64, "index_n_heads": 2},
    "llama4": {
        "text_config": {
            **_DENSE,
            "model_type": "llama4",
            "attention_bias": False,
            "attention_chunk_size": 16,
            "hidden_act": "silu",
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 64,
            "num_experts_per_tok": 1,
            "num_local_experts": 2,
            "use_qk_norm": True,
        }
    },
    "qwen3_next": {
        **_DENSE,
        **_EXPERTS,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 3,
        "num_experts": 4,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 64,
        "mlp_only_layers": [0],
        "full_attention_interval": 2,
        "partial_rotary_factor": 0.5,
    },
    "falcon_h1": {
        **_DENSE,
        "attention_bias": False,
        "mamba_d_conv": 4,
        "mamba_d_head": 32,
        "mamba_d_ssm": 64,
        "mamba_d_state": 16,
        "mamba_expand": 1,
        "mamba_n_groups": 1,
        "mamba_n_heads": 2,
    },
    "mamba2": {
        "num_heads": 8,
        "head_dim": 16,
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "state_size": 16,
        "num_hidden_layers": 2,
        "layer_norm_epsilon": 1e-5,
        "conv_kernel": 4,
        "n_groups": 2,
        "use_bias": False,
        "use_conv_bias": True,
        "tie_word_embeddings": True,
        "time_step_limit": (0.01, 10.0),
        "time_step_rank": "auto",
    },
}

RAGGED = ("qwen3", "gemma3_text", "gpt_oss", "deepseek_v3", "deepseek_v32")
SLIDING = ("gemma3_text", "gpt_oss")
RECURRENT = ("qwen3_next", "falcon_h1", "mamba2")


@cache
def small_model(family: str) -> nn.Module:
    """Make a model with seeded weights that distinguish tokens and positions."""
    module = importlib.import_module(f"mlx_lm.models.{family}")
    mx.random.seed(7)
    config = {"model_type": family, **CONFIGURATIONS[family]}
    model: nn.Module = module.Model(module.ModelArgs.from_dict(config))
    model.update(tree_map(_with_noise, model.parameters()))
    mx.eval(model.parameters())
    return model


def _with_noise(weight: mx.array) -> mx.array:
    return (
        weight + 0.05 * mx.random.normal(weight.shape) if mx.issubdtype(weight.dtype, mx.floating) else weight
    )


def tokens(count: int, seed: int = 0) -> list[int]:
    return [(7 * place * place + 3 * place + 11 * seed) % VOCABULARY for place in range(count)]
