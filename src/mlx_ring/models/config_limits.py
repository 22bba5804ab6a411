"""Limits of the sizes in a model's configuration, so that a wrong one ends in a sentence and not in endless work.

No real model comes near the limits. Only sizes that mlx-ring reads itself are checked; mlx-lm checks the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from mlx_ring.core.errors import ModelCorrupt

LAYER_NAMES = ("num_hidden_layers", "n_layers", "n_layer", "num_layers", "num_transformer_layers")
HIDDEN_NAMES = ("hidden_size", "d_model", "n_embd", "dim", "model_dim")
HEAD_NAMES = ("num_attention_heads", "n_head", "n_heads")
KV_HEAD_NAMES = ("num_key_value_heads", "n_kv_heads")
VOCABULARY_NAMES = ("vocab_size", "padded_vocab_size", "num_vocab")
CONTEXT_NAMES = (
    *("max_position_embeddings", "max_seq_len", "max_sequence_length", "model_max_length"),
    *("max_context_length", "n_positions", "n_ctx", "seq_length"),
)
_LIMITS: Mapping[str, tuple[int, int]] = {
    **dict.fromkeys(LAYER_NAMES, (1, 10_000)),
    **dict.fromkeys(HIDDEN_NAMES, (1, 1 << 20)),
    **dict.fromkeys(VOCABULARY_NAMES, (1, 1 << 24)),
    **dict.fromkeys(CONTEXT_NAMES, (1, (1 << 31) - 1)),
    **dict.fromkeys(HEAD_NAMES, (1, 1 << 16)),
    **dict.fromkeys((*KV_HEAD_NAMES, "head_dim"), (1, 1 << 16)),
    **dict.fromkeys(("intermediate_size", "n_inner", "moe_intermediate_size"), (1, 1 << 24)),
    **dict.fromkeys(("shared_expert_intermediate_size", "kv_lora_rank", "qk_rope_head_dim"), (0, 1 << 24)),
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts"), (0, 1 << 16)
    ),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "experts_per_token"), (0, 1 << 16)),
    **dict.fromkeys(("first_k_dense_replace", "decoder_sparse_step"), (0, 10_000)),
    **dict.fromkeys(("moe_layer_freq", "full_attention_interval", "_sliding_window_pattern"), (0, 10_000)),
    **dict.fromkeys(("top_k_experts", "moe_topk", "moe_top_k", "moe_k", "moe_num_experts"), (0, 1 << 16)),
    **dict.fromkeys(("o_groups", "index_n_heads", "num_global_key_value_heads"), (0, 1 << 16)),
    **dict.fromkeys(("global_head_dim", "index_head_dim", "qk_nope_head_dim", "v_head_dim"), (0, 1 << 16)),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), (0, 1 << 16)),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), (0, 1 << 16)),
    **dict.fromkeys(("q_lora_rank", "o_lora_rank", "expert_intermediate_size", "index_topk"), (0, 1 << 24)),
    **dict.fromkeys(("sliding_window",), (0, (1 << 31) - 1)),
    **dict.fromkeys(("sliding_window_pattern",), (1, 10_000)),
}
"""Smallest and largest value of each size, by its names."""
_WHOLE = frozenset((*LAYER_NAMES, *HIDDEN_NAMES, *VOCABULARY_NAMES, *CONTEXT_NAMES))
"""Sizes of the whole model. Others may be lists, with a value for each layer."""
_PATTERNS = frozenset({"sliding_window_pattern"})
"""Sizes that some models write as a text instead, such as `LLLG`."""
_QUANTIZATION = {"bits": (1, 64), "group_size": (-1, 1 << 20)}
"""Limits of a quantization's numbers. A group size of -1 is a whole row."""
_SHOWN = 60


def check_config(file: Path, config: Mapping[str, Any]) -> None:
    """Check the sizes of a configuration, and of the language model's part of it.

    Raises:
        ModelCorrupt: a size is no whole number, or beyond its limits. The error names the file, the size and its value.
    """
    for part in (config, config.get("text_config"), config.get("llm_config")):
        if not isinstance(part, Mapping):
            continue
        sizes = cast("Mapping[str, object]", part)
        for name, limits in _LIMITS.items():
            for value in _values(name, sizes.get(name)):
                _check(file, name, value, limits)
        for kind in ("quantization", "quantization_config"):
            _check_quantization(file, kind, sizes.get(kind))
        _check_layer_types(file, sizes)


def _values(name: str, value: object) -> Iterator[object]:
    """Yield the values to check: none of a missing size, and each layer's of a list."""
    if value is None or (name in _PATTERNS and isinstance(value, str)):
        return
    if isinstance(value, list) and name not in _WHOLE:
        # A layer without such a part may have a 0 or a null.
        yield from (each for each in cast("list[object]", value) if each is not None and each != 0)
    else:
        yield value


def _check(file: Path, name: str, value: object, limits: tuple[int, int]) -> None:
    least, most = limits
    if type(value) is not int or not least <= value <= most:
        shown = repr(value)
        raise ModelCorrupt(
            f"{file} gives {name} as {shown if len(shown) <= _SHOWN else shown[:_SHOWN] + '…'}; it must be a whole "
            f"number from {least} to {most}. Correct the file, or fetch the model again."
        )


def _check_quantization(file: Path, name: str, given: object) -> None:
    if isinstance(given, Mapping):
        numbers = cast("Mapping[str, object]", given)
        for key, limits in _QUANTIZATION.items():
            if numbers.get(key) is not None:
                _check(file, f"{name}.{key}", numbers[key], limits)
    elif given is not None:
        raise ModelCorrupt(
            f"{file} gives {name} as {repr(given)[:_SHOWN]}; it must be an object. Correct the file, or fetch the model "
            "again."
        )


def _check_layer_types(file: Path, sizes: Mapping[str, object]) -> None:
    kinds, layers = sizes.get("layer_types"), next(filter(None, map(sizes.get, LAYER_NAMES)), None)
    if isinstance(kinds, list) and isinstance(layers, int) and len(cast("list[object]", kinds)) < layers:
        raise ModelCorrupt(
            f"{file} has {len(cast('list[object]', kinds))} layer_types for {layers} layers; it must have one for each. "
            "Correct the file, or fetch the model again."
        )
