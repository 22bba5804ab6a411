"""Small configurations for every model family of mlx-lm.

Families ignore unknown fields, so one set of small values works for nearly all of them. `SPECIAL` has
additional values. Windows are shorter than the run.
"""

from __future__ import annotations

from typing import Any

LAYERS = 6
HIDDEN = 64
VOCABULARY = 300
_HEADS = 4
_WINDOW = 8
_THREES = ["sliding_attention", "sliding_attention", "full_attention"] * 2
"""Layer types: two sliding layers, then a full one."""

COMMON: dict[str, Any] = {
    # size
    **dict.fromkeys(("hidden_size", "hidden_dim", "n_embd", "d_model", "block_dim"), HIDDEN),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layers", "n_layer"), LAYERS),
    **dict.fromkeys(("intermediate_size", "n_inner"), 128),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 512),
    "vocab_size": VOCABULARY,
    # attention
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_heads", "n_head"), _HEADS),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "query_pre_attn_scalar"), 16),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_window_size"), _WINDOW),
    **dict.fromkeys(("window_size", "loop_window_size"), _WINDOW),
    "sliding_window_pattern": 3,
    "layer_types": _THREES,
    "hybrid_layer_pattern": [1, 1, 0] * 2,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rotary_emb_base": 10000,
    "rotary_dim": 8,
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct"), 0.5),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 32),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 16),
    **dict.fromkeys(("use_qk_norm", "qk_norm", "post_norm"), True),
    # experts
    **dict.fromkeys(("num_experts", "num_local_experts", "moe_num_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "num_shared_expert"), 1),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size"), 64),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers"), 1),
    **dict.fromkeys(("decoder_sparse_step", "moe_layer_freq", "n_group", "topk_group"), 1),
    **dict.fromkeys(("norm_topk_prob", "use_expert_bias"), True),
    "mlp_only_layers": [],
    "routed_scaling_factor": 1.0,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    # sparse attention with an index
    "index_head_dim": 32,
    "index_n_heads": 2,
    "index_topk": _WINDOW,
    # recurrent layers
    **dict.fromkeys(("state_size", "ssm_state_size", "mamba_d_state", "mamba_d_head", "mamba_head_dim"), 16),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "mamba_d_conv", "conv_kernel"), 4),
    **dict.fromkeys(("n_groups", "mamba_n_groups"), 1),
    **dict.fromkeys(("time_step_rank", "mamba_dt_rank"), 8),
    **dict.fromkeys(("use_conv_bias", "mamba_conv_bias"), True),
    "mamba_d_ssm": 64,
    "mamba_expand": 2,
    "mamba_hidden_act": "silu",
    "mamba_proj_bias": False,
    "chunk_size": 16,
    "conv_L_cache": 3,
    "time_step_limit": [0.0, 1e9],
    "residual_in_fp32": False,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 3,
    "layer_group_size": 3,
    "group_norm_size": 2,
    # other fields
    **dict.fromkeys(
        ("rms_norm_eps", "layer_norm_eps", "norm_eps", "layernorm_epsilon", "layer_norm_epsilon"), 1e-5
    ),
    **dict.fromkeys(("attention_bias", "mlp_bias", "use_bias", "use_qkv_bias", "bias", "qkv_bias"), False),
    **dict.fromkeys(("conv_bias", "block_auto_adjust_ff_dim", "tie_word_embeddings"), False),
    "hidden_act": "silu",
    "block_multiple_of": 32,
    "block_ffn_dim_multiplier": 1.0,
    "logits_scaling": 1.0,
    "attention_multiplier": 0.25,
    "embedding_multiplier": 1.5,
    "residual_multiplier": 0.9,
    "scale_emb": 2.0,
    "scale_depth": 1.4,
    "dim_model_base": 32,
}

_YARN = {
    "type": "yarn",
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 2.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 64,
}
_SCALED_YARN = {"rope_parameters": {**_YARN, "llama_4_scaling_beta": 0.1}}
_LLAMA4 = {
    "attention_chunk_size": _WINDOW,
    "floor_scale": 4,
    "interleave_moe_layer_step": 2,
    "intermediate_size_mlp": 128,
    "no_rope_layers": [1, 1, 0] * 2,
    "num_experts_per_tok": 1,
}
_LONGCAT = {
    "attention_method": "MLA",
    "zero_expert_type": "identity",
    "zero_expert_num": 2,
    "ffn_hidden_size": 128,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
}
_SHARED_KV = {
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 16,
}
_FULL_TWICE = {"full_attn_idxs": [1, 4]}
_DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_ROPE_OF_EACH_KIND = {
    "rope_parameters": dict.fromkeys(("sliding_attention", "full_attention"), _DEFAULT_ROPE)
}
_DELTA_LAYERS = {
    "kda_layers": [1, 2, 4, 5],
    "full_attn_layers": [3, 6],
    "num_heads": _HEADS,
    "head_dim": 16,
    "short_conv_kernel_size": 4,
}

SPECIAL: dict[str, dict[str, Any]] = {
    "afm7": {"num_kv_reuse_layers": 1, "hidden_dim_scale_factor": 2.0},
    "baichuan_m1": {"sliding_window_layers": [0, 1, 3, 4], "conv_window": 2},
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": 128, "moe_num_experts": 4, "moe_top_k": 2, "moe_jitter_eps": 0.0},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
    },
    "deepseek_v2": {"rope_scaling": _YARN},
    "exaone4": {"sliding_window_pattern": "LLG"},
    "exaone_moe": {"is_moe_layer": [False, *[True] * (LAYERS - 1)]},
    "gemma3n": {
        **_SHARED_KV,
        "rope_local_base_freq": 10000.0,
        "final_logit_softcapping": 30.0,
        "altup_active_idx": 0,
        "altup_coef_clip": 120.0,
        "altup_correct_scale": True,
        "altup_lr_multiplier": 1.0,
        "altup_num_inputs": 2,
        "laurel_rank": 16,
        "activation_sparsity_pattern": [0.0] * LAYERS,
        "intermediate_size": [128] * LAYERS,
    },
    "gemma4_text": {**_SHARED_KV, "global_head_dim": 16},
    "glm_moe_dsa": {
        "num_key_value_heads": _HEADS,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "granitemoehybrid": {"layer_types": ["mamba", "mamba", "attention"] * 2},
    "hunyuan": {
        "use_mixed_mlp_moe": True,
        "use_cla": True,
        "cla_share_factor": 2,
        "rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 1000.0},
    },
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 3,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
    },
    "kimi_k3_text": {
        "hidden_act": "situ",
        "num_experts_per_token": 2,
        "linear_attn_config": {**_DELTA_LAYERS, "gate_lower_bound": -5.0},
        "attn_res_block_size": 2,
    },
    "kimi_linear": {
        "model_max_length": 512,
        "linear_attn_config": _DELTA_LAYERS,
    },
    "lfm2": _FULL_TWICE,
    "lfm2_moe": {**_FULL_TWICE, "layer_types": ["conv", "full_attention", "conv"] * 2},
    "lille-130m": {"block_size": 256},
    "llama4_text": _LLAMA4,
    "longcat_flash": _LONGCAT,
    "longcat_flash_ngram": _LONGCAT,
    "mellum": _ROPE_OF_EACH_KIND,
    "mimo_v2_flash": {
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "swa_rope_theta": 10000.0,
        "swa_num_attention_heads": _HEADS,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 16,
        "swa_v_head_dim": 16,
        "moe_layer_freq": [0, *[1] * (LAYERS - 1)],
    },
    "minimax_m3_text": {
        "dense_intermediate_size": 128,
        "layer_types": None,
        "moe_layer_freq": [0, *[1] * (LAYERS - 1)],
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_block_size": 4,
        "index_topk_blocks": 2,
    },
    "minicpm3": {
        "rope_scaling": {
            "type": "longrope",
            "original_max_position_embeddings": 64,
            "short_factor": [1.0] * 8,
            "long_factor": [1.0] * 8,
        }
    },
    "ministral3": _SCALED_YARN,
    "mistral4": _SCALED_YARN,
    "muse_spark_text": {
        "post_norm_eps": 1e-5,
        "rope_parameters": _DEFAULT_ROPE,
        "layer_rope_theta": [10000.0, 10000.0, 0.0] * 2,
        "final_logit_softcapping": 30.0,
        "output_multiplier": 1.0,
        "moe_hidden_size": HIDDEN,
        "num_shared_experts": 0,
    },
    "nemotron-nas": {
        "block_configs": [
            {
                "attention": {"n_heads_in_group": 2, "no_op": False, "replace_with_linear": False},
                "ffn": {"ffn_mult": 2.0, "no_op": False, "replace_with_linear": False},
            }
        ]
        * LAYERS
    },
    "nemotron_h": {"layer_types": None, "hybrid_override_pattern": list("M*-M*-"), "n_groups": 2},
    "olmo_hybrid": {
        "linear_allow_neg_eigval": True,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2,
    },
    "openelm": {
        "num_transformer_layers": LAYERS,
        "model_dim": HIDDEN,
        "ffn_dim_divisor": 8,
        "num_query_heads": [_HEADS] * LAYERS,
        "num_kv_heads": [2] * LAYERS,
        "ffn_multipliers": [2.0] * LAYERS,
    },
    "phi3small": {
        "dense_attention_every_n_layers": 2,
        "ff_intermediate_size": 128,
        "gegelu_limit": 20.0,
        "mup_attn_multiplier": 1.0,
        "mup_embedding_multiplier": 10.0,
        "mup_width_multiplier": 8.0,
        "rope_embedding_base": 10000,
        "rope_position_scale": 1.0,
        "blocksparse_block_size": 64,
        "blocksparse_num_local_blocks": 16,
        "blocksparse_vert_stride": 8,
    },
    "phixtral": {"model_dim": HIDDEN, "num_vocab": VOCABULARY},
    "plamo": {"n_shared_head": 2},
    "qwen": {"kv_channels": 16},
    "recurrent_gemma": {
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "block_types": ["recurrent", "recurrent", "attention"],
        "lru_width": HIDDEN,
        "num_key_value_heads": 1,
    },
    "rwkv7": {"a_low_rank_dim": 16, "v_low_rank_dim": 16, "gate_low_rank_dim": 16, "decay_low_rank_dim": 16},
    "spark2_5": {**_ROPE_OF_EACH_KIND, "hidden_act": "gelu"},
    "step3p5": {"num_attention_groups": 2, "moe_top_k": 2, "share_expert_dim": 64},
}

WRAPPERS = {
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n",
    "gemma4": "gemma4_text",
    "kimi_k25": "deepseek_v3",
    "kimi_k3": "kimi_k3_text",
    "kimi_vl": "deepseek_v3",
    "lfm2-vl": "lfm2",
    "llama4": "llama4_text",
    "minimax_m3_vl": "minimax_m3_text",
    "mistral3": "ministral3",
    "muse_spark": "muse_spark_text",
    "pixtral": "llama",
    "qwen2_vl": "qwen2",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
    "qwen3_5": "qwen3_next",
    "qwen3_5_moe": "qwen3_next",
}
"""Multimodal families, and the language model that their configuration nests."""


_SHARES_KV = "its layers share KV with earlier ones, which may be another stage's"
_HANDS_ON_MORE = "its layers hand on more than activations"
WHY = {
    **dict.fromkeys(("gemma3n", "gemma4", "gemma4_text", "hunyuan"), _SHARES_KV),
    **dict.fromkeys(("deepseek_v41", "kimi_k3", "rwkv7"), _HANDS_ON_MORE),
    "afm7": "its layers stand in two lists",
    "iquestloopcoder": "it runs its layers twice",
    "olmo": "mlx-lm does not run it here: its module needs the package hf_olmo",
    "prism_hadamard_qwen35": "no small configuration of it is in tests/conformance/families.py yet",
}
"""Reasons for failures whose own messages are unclear."""

_NOTHING_SHARED = {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}
CONDITIONS: dict[str, dict[str, Any]] = {
    "gemma4": _NOTHING_SHARED,
    "gemma4_text": _NOTHING_SHARED,
    "hunyuan": {"use_cla": False},
}
"""Configuration entries with which a family can be split."""


def configuration(family: str) -> dict[str, Any]:
    """Return the small configuration of a family, named as in `mlx_lm.models`."""
    inner = WRAPPERS.get(family)
    given = {**COMMON, "model_type": family, **SPECIAL.get(family, {})}
    if inner is not None:
        given["text_config"] = _without_none({**COMMON, "model_type": inner, **SPECIAL.get(inner, {})})
    return _without_none(given)


def _without_none(given: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name != "layer_types" or value is not None}


def with_entries(given: dict[str, Any], entries: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration with other entries, also in the nested one."""
    changed = {**given, **entries}
    if "text_config" in changed:
        changed["text_config"] = {**changed["text_config"], **entries}
    return changed


_TWO_WIDE_HEADS: dict[str, Any] = {
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_heads", "n_head"), 2),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_kv_heads"), 2),
    **dict.fromkeys(
        ("head_dim", "query_pre_attn_scalar", "kv_channels", "global_head_dim", "index_head_dim"), 32
    ),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 32),
}
_QUANTIZED: dict[str, dict[str, Any]] = {
    # Its factors of rotations are for the common width.
    "minicpm3": {"qk_rope_head_dim": 16, "qk_nope_head_dim": 16},
    "openelm": {"num_query_heads": [2] * LAYERS, "num_kv_heads": [2] * LAYERS},
}


def quantizable_configuration(family: str) -> dict[str, Any]:
    """Return the small configuration with keys and values of 32 numbers, the smallest group that MLX quantizes."""
    return with_entries(configuration(family), {**_TWO_WIDE_HEADS, **_QUANTIZED.get(family, {})})
