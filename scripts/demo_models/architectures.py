"""The shapes of the two demo models, as Hugging Face configurations.

The rows of every matrix are divisible by 4 x 32, so that four ranks can split a quantized demo in whole groups.
`demo` ties its embeddings and `demo-moe` does not, because both occur in real models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

COMMON: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": None,
    "dtype": "bfloat16",
    "head_dim": 32,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 32_768,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 100_000.0,
    "sliding_window": None,
    "use_cache": True,
    "use_sliding_window": False,
}


@dataclass(frozen=True)
class Phase:
    """Run of a learning-rate schedule over `tokens` tokens of a mix of the corpus.

    If a run ends at `end_tokens`, before its schedule, the next phase decays the rate.
    """

    mix: str
    tokens: int
    peak_learning_rate: float
    end_tokens: int


@dataclass(frozen=True)
class Recipe:
    """Model configuration and training phases."""

    config: dict[str, Any]
    phases: tuple[Phase, ...]


RECIPES: dict[str, Recipe] = {
    "demo": Recipe(
        COMMON
        | {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_hidden_layers": 8,
            "max_window_layers": 8,
            "tie_word_embeddings": True,
        },
        phases=(
            Phase("broad", 6_000_000, 2e-3, end_tokens=6_000_000),
            Phase("careful", 5_000_000, 1.2e-3, end_tokens=2_000_000),
            Phase("careful", 4_000_000, 1.2e-3, end_tokens=4_000_000),
            Phase("reading", 2_500_000, 8e-4, end_tokens=2_500_000),
        ),
    ),
    "demo-moe": Recipe(
        COMMON
        | {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "hidden_size": 128,
            "intermediate_size": 256,
            "moe_intermediate_size": 128,
            "num_hidden_layers": 16,
            "max_window_layers": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "output_router_logits": False,
            "router_aux_loss_coef": 0.01,
            "tie_word_embeddings": False,
        },
        phases=(
            Phase("whole", 6_500_000, 2e-3, end_tokens=1_000_000),
            Phase("whole", 4_000_000, 2e-3, end_tokens=4_000_000),
        ),
    ),
}
