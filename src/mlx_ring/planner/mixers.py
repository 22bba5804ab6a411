"""Attention of a model's layers and what they have in its place: matrices and states, from a configuration alone. Pure.

Attention has grouped keys, or latent keys (MLA, with or without an indexer). Other layers have a delta rule, linear
attention, a state-space model, a linear recurrence or a short convolution. Matrices have the names that mlx-lm gives them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

from mlx_ring.models.architectures import (
    CONVOLUTIONS,
    is_gated_delta,
    kind_of_attention,
    lacks_kv,
    language_module,
    listed_entry,
    mixer_of,
    module_of,
    number,
)
from mlx_ring.models.config_limits import HEAD_NAMES, KV_HEAD_NAMES
from mlx_ring.models.model_folder import ModelFolder

Role = Literal["attention", "mlp", "experts", "router"]
_FLOAT_BYTES = 4
_WINDOW_NAMES = ("sliding_window", "window_size")


@dataclass(frozen=True, slots=True)
class Matrix:
    """One matrix of a layer, or `count` equal ones."""

    name: str
    role: Role
    outputs: int
    inputs: int
    count: int = 1

    @property
    def weights(self) -> int:
        return self.count * self.outputs * self.inputs


# ---- attention

_SLIDES_BY_KIND: Mapping[str, int] = {
    **dict.fromkeys(("afmoe", "exaone_moe", "gear", "gemma3n", "laguna", "llama", "mellum"), 1),
    **dict.fromkeys(("ministral3", "muse_spark"), 1),
    **dict.fromkeys(("gpt_oss", "step3p5"), 2),
    **dict.fromkeys(("muse_glimmer", "olmo3", "spark2_5"), 4),
    "gemma4_text": 0,
}
"""mlx-lm's modules whose layers slide where `layer_types` says so, and the pattern that they have without that.

The pattern is a number of layers, of which the last has full attention. It is 0 if the configuration has it as an entry.
"""
_SLIDES_BY_PATTERN = ("cohere2", "exaone4", "gemma3_text", "plamo3")
"""Modules whose layers slide by `sliding_window_pattern`, whatever `layer_types` says."""
_ALWAYS_FULL = ("mistral3", "pixtral")
"""Multimodal modules that make full caches, whatever their language model's module does."""


def window_of(folder: ModelFolder, index: int) -> int | None:
    """Return the most tokens that a layer keeps, as mlx-lm's module makes its cache; None if it keeps all.

    Most modules make full caches whatever `sliding_window` is.
    """
    module = language_module(folder.config)
    if module_of(folder.model_type, folder.classes) in _ALWAYS_FULL:
        return None
    if module == "mimo_v2_flash":
        return (
            number(folder, "sliding_window_size")
            if listed_entry(folder, "hybrid_layer_pattern", index) == 1
            else None
        )
    if module == "recurrent_gemma":
        return number(folder, "attention_window_size")
    if module == "baichuan_m1":
        layers = folder.entry("sliding_window_layers")
        slides = isinstance(layers, list) and index in layers
    elif module in _SLIDES_BY_PATTERN:
        slides = _slides_by_pattern(folder, index)
    elif module in _SLIDES_BY_KIND:
        kind = kind_of_attention(folder, index)
        pattern = _SLIDES_BY_KIND[module] or number(folder, "sliding_window_pattern") or 1
        slides = (index + 1) % pattern != 0 if kind is None else kind == "sliding_attention"
    else:
        slides = False
    return number(folder, *_WINDOW_NAMES) if slides else None


def _slides_by_pattern(folder: ModelFolder, index: int) -> bool:
    pattern = folder.entry("sliding_window_pattern", "_sliding_window_pattern")
    if isinstance(pattern, str) and pattern:
        return pattern[index % len(pattern)] == "L"
    return isinstance(pattern, int) and pattern > 0 and (index + 1) % pattern != 0


def head_sizes(folder: ModelFolder, index: int) -> tuple[int, int, int]:
    """Return the numbers of heads of queries and of keys, and the width of a head."""
    heads = number(folder, *HEAD_NAMES) or 1
    if language_module(folder.config) == "recurrent_gemma":
        return heads, 1, folder.hidden_size // heads
    width = number(folder, "head_dim", "hidden_size_per_head") or folder.hidden_size // heads
    kv_heads = number(folder, *KV_HEAD_NAMES) or heads
    if window_of(folder, index) is None and (wide := number(folder, "global_head_dim")) is not None:
        return heads, number(folder, "num_global_key_value_heads") or kv_heads, wide
    return heads, kv_heads, width


def _attention(folder: ModelFolder, index: int) -> Iterator[Matrix]:
    hidden = folder.hidden_size
    at = f"model.layers.{index}.self_attn"
    if number(folder, "kv_lora_rank") is not None:
        yield from _latent_attention(folder, at)
        return
    heads, kv_heads, width = head_sizes(folder, index)
    if groups := number(folder, "o_groups"):
        yield from _grouped_attention(folder, at, groups)
        return
    gated = (
        folder.model_type.startswith(("qwen3_next", "qwen3_5")) or folder.entry("attn_output_gate") is True
    )
    yield Matrix(f"{at}.q_proj", "attention", heads * width * (2 if gated else 1), hidden)
    yield Matrix(f"{at}.k_proj", "attention", kv_heads * width, hidden)
    shares_keys = folder.entry("attention_k_eq_v") is True and window_of(folder, index) is None
    if not shares_keys:
        yield Matrix(f"{at}.v_proj", "attention", kv_heads * width, hidden)
    yield Matrix(f"{at}.o_proj", "attention", hidden, heads * width)


def _latent_attention(folder: ModelFolder, at: str) -> Iterator[Matrix]:
    hidden = folder.hidden_size
    heads = number(folder, *HEAD_NAMES) or 1
    latent, rank = number(folder, "kv_lora_rank") or 0, number(folder, "q_lora_rank")
    rope, nope = number(folder, "qk_rope_head_dim") or 0, number(folder, "qk_nope_head_dim", "head_dim") or 0
    values = number(folder, "v_head_dim", "head_dim") or nope
    if rank is None:
        yield Matrix(f"{at}.q_proj", "attention", heads * (nope + rope), hidden)
    else:
        yield Matrix(f"{at}.q_a_proj", "attention", rank, hidden)
        yield Matrix(f"{at}.q_b_proj", "attention", heads * (nope + rope), rank)
    yield Matrix(f"{at}.kv_a_proj_with_mqa", "attention", latent + rope, hidden)
    yield Matrix(f"{at}.embed_q", "attention", heads * latent, nope)
    yield Matrix(f"{at}.unembed_out", "attention", heads * values, latent)
    yield Matrix(f"{at}.o_proj", "attention", hidden, heads * values)
    if (indexers := number(folder, "index_n_heads")) is not None and rank is not None:
        width = number(folder, "index_head_dim") or 0
        yield Matrix(f"{at}.indexer.wq_b", "attention", indexers * width, rank)
        yield Matrix(f"{at}.indexer.wk", "attention", width, hidden)
        yield Matrix(f"{at}.indexer.weights_proj", "attention", indexers, hidden)


def _grouped_attention(folder: ModelFolder, at: str, groups: int) -> Iterator[Matrix]:
    """Yield DeepSeek-V4's matrices: one key for all heads, and an output of low rank by groups of heads."""
    hidden = folder.hidden_size
    heads, _, width = head_sizes(folder, 0)
    rank, low = number(folder, "q_lora_rank") or hidden, number(folder, "o_lora_rank") or hidden
    yield Matrix(f"{at}.wq_a", "attention", rank, hidden)
    yield Matrix(f"{at}.wq_b", "attention", heads * width, rank)
    yield Matrix(f"{at}.wkv", "attention", width, hidden)
    yield Matrix(f"{at}.wo_a", "attention", groups * low, heads * width // groups)
    yield Matrix(f"{at}.wo_b", "attention", hidden, groups * low)


# ---- layers without KV, and further parts of those with it

_STATE_KINDS = ("M", "mamba", "linear_attention", "conv")
"""Names of Nemotron-H's layers with a state-space model."""
_WITH_BOTH = ("falcon_h1",)
"""Modules whose layers have attention and a state-space model."""
_USUAL_KERNEL = 4
"""Tokens that a short convolution sees, if the configuration does not say so."""


class Mixer(NamedTuple):
    """Part of a layer in place of attention, or beside it."""

    matrices: Sequence[Matrix] = ()
    numbers: int = 0
    """Weights outside matrices."""
    kept: int = 0
    """Numbers of its state in the model's format ..."""
    kept_floats: int = 0
    """... and in float32."""


def mixer_matrices(folder: ModelFolder, index: int) -> Sequence[Matrix]:
    """Return the matrices of a layer's attention, and of what it has in its place."""
    mixer = mixer_of_layer(folder, index)
    if mixer is None:
        return tuple(_attention(folder, index))
    return (*mixer.matrices, *(_attention(folder, index) if has_kv(folder, index) else ()))


def has_kv(folder: ModelFolder, index: int) -> bool:
    """Report whether a layer keeps keys and values."""
    return not is_gated_delta(folder, index) and not lacks_kv(folder, index)


def mixer_of_layer(folder: ModelFolder, index: int) -> Mixer | None:
    """Return what a layer has in place of attention, or beside it; None for attention alone."""
    if is_gated_delta(folder, index):
        return _gated_delta(folder, index)
    module = language_module(folder.config)
    if not (module in _WITH_BOTH or lacks_kv(folder, index)):
        return None
    if module == "nemotron_h" and mixer_of(folder, module, index) not in _STATE_KINDS:
        return Mixer()
    return _MIXERS.get(module, _unknown)(folder, index)


def _unknown(folder: ModelFolder, index: int) -> Mixer:
    """Return linear attention with a short convolution, for families whose matrices count as those of attention."""
    heads, _, width = head_sizes(folder, index)
    hidden = folder.hidden_size
    kept = hidden * (_USUAL_KERNEL - 1)
    return Mixer(tuple(_attention(folder, index)), 0, kept, hidden * (width or hidden // heads))


def _gated_delta(folder: ModelFolder, index: int) -> Mixer:
    hidden, at = folder.hidden_size, f"model.layers.{index}.linear_attn"
    key_heads, value_heads = (number(folder, f"linear_num_{name}_heads") or 0 for name in ("key", "value"))
    key, value = (number(folder, f"linear_{name}_head_dim") or 0 for name in ("key", "value"))
    keys, values = key_heads * key, value_heads * value
    kernel = number(folder, "linear_conv_kernel_dim") or _USUAL_KERNEL
    matrices = (
        Matrix(f"{at}.in_proj_qkvz", "attention", 2 * (keys + values), hidden),
        Matrix(f"{at}.in_proj_ba", "attention", 2 * value_heads, hidden),
        _out(at, hidden, values),
    )
    return Mixer(matrices, 0, (2 * keys + values) * (kernel - 1), values * key)


def _convolution(folder: ModelFolder, index: int) -> Mixer:
    hidden, at = folder.hidden_size, f"model.layers.{index}.conv"
    kernel = number(folder, "conv_L_cache") or _USUAL_KERNEL
    if language_module(folder.config) not in ("lfm2", "lfm2_moe"):
        return Mixer(tuple(_attention(folder, index)), 0, hidden * (kernel - 1))
    matrices = Matrix(f"{at}.in_proj", "attention", 3 * hidden, hidden), _out(at, hidden, hidden)
    return Mixer(matrices, hidden * kernel, hidden * (kernel - 1))


def _mamba(folder: ModelFolder, index: int) -> Mixer:
    hidden, at = folder.hidden_size, f"model.layers.{index}.mamba"
    kernel, states = _kernel(folder), _states(folder)
    is_jamba = language_module(folder.config) == "jamba"
    inner = number(folder, "mamba_expand", "expand") if is_jamba else None
    inner = inner * hidden if inner else number(folder, "intermediate_size", "d_inner") or 2 * hidden
    rank = number(folder, "mamba_dt_rank", "time_step_rank") or -(-hidden // 16)
    matrices = (
        Matrix(f"{at}.in_proj", "attention", 2 * inner, hidden),
        Matrix(f"{at}.x_proj", "attention", rank + 2 * states, inner),
        Matrix(f"{at}.dt_proj", "attention", inner, rank),
        _out(at, hidden, inner),
    )
    return Mixer(matrices, inner * (kernel + states + 3), inner * (kernel - 1 + states))


def _mamba_2(folder: ModelFolder, index: int) -> Mixer:
    hidden, at = folder.hidden_size, f"model.layers.{index}.mamba"
    kernel, states = _kernel(folder), _states(folder)
    heads = number(folder, "mamba_n_heads", "mamba_num_heads", "num_heads") or 1
    width = number(folder, "mamba_d_head", "mamba_head_dim", "head_dim") or 0
    given = number(folder, "mamba_d_ssm") if language_module(folder.config) == "falcon_h1" else None
    inner = given or heads * width
    convolved = inner + 2 * (number(folder, "mamba_n_groups", "n_groups") or 1) * states
    matrices = (
        Matrix(f"{at}.in_proj", "attention", inner + convolved + heads, hidden),
        _out(at, hidden, inner),
    )
    numbers = convolved * (kernel + 1) + 3 * heads + inner
    return Mixer(matrices, numbers, convolved * (kernel - 1), inner * states)


def _plamo_2(folder: ModelFolder, index: int) -> Mixer:
    hidden, at = folder.hidden_size, f"model.layers.layers.{index}.mixer"
    kernel, states = _kernel(folder), _states(folder)
    heads = number(folder, "mamba_num_heads") or 1
    inner, rank = heads * (number(folder, "hidden_size_per_head") or 0), max(64, hidden // 16)
    matrices = (
        Matrix(f"{at}.in_proj", "attention", 2 * inner, hidden),
        Matrix(f"{at}.bcdt_proj", "attention", rank + 2 * states, inner),
        Matrix(f"{at}.dt_proj", "attention", heads, rank),
        _out(at, hidden, inner),
    )
    return Mixer(
        matrices, inner * kernel + 3 * heads + rank + 2 * states, inner * (kernel - 1), inner * states
    )


def _linear_recurrence(folder: ModelFolder, index: int) -> Mixer:
    """Return RecurrentGemma's recurrence, whose gates are no matrices that are quantized."""
    hidden, at = folder.hidden_size, f"model.layers.{index}.temporal_block"
    width = hidden // (number(folder, *HEAD_NAMES) or 1)
    names = ("linear_y", "linear_x", "linear_out")
    matrices = tuple(Matrix(f"{at}.{name}", "attention", hidden, hidden) for name in names)
    numbers = hidden * (2 * width + _USUAL_KERNEL + 7)
    return Mixer(matrices, numbers, hidden * (_USUAL_KERNEL - 1) + hidden)


def _kimi_delta(folder: ModelFolder, index: int) -> Mixer:
    hidden, at = folder.hidden_size, f"model.layers.{index}.self_attn"
    given = cast("Mapping[str, object]", folder.entry("linear_attn_config"))
    heads, width, kernel = (
        size if isinstance(size := given.get(name), int) else usual
        for name, usual in (("num_heads", 1), ("head_dim", 0), ("short_conv_kernel_size", _USUAL_KERNEL))
    )
    inner = heads * width
    matrices = (
        *(Matrix(f"{at}.{name}_proj", "attention", inner, hidden) for name in "qkv"),
        *(Matrix(f"{at}.{name}_a_proj", "attention", width, hidden) for name in "fg"),
        *(Matrix(f"{at}.{name}_b_proj", "attention", inner, width) for name in "fg"),
        Matrix(f"{at}.b_proj", "attention", heads, hidden),
        Matrix(f"{at}.o_proj", "attention", hidden, inner),
    )
    numbers = 3 * inner * kernel + inner + heads + width
    return Mixer(matrices, numbers, 3 * inner * (kernel - 1), inner * width)


def _linear_attention(folder: ModelFolder, index: int) -> Mixer:
    """Return Ling's linear attention, with as many heads of keys as of queries."""
    hidden, at = folder.hidden_size, f"model.layers.{index}.attention"
    is_hybrid = language_module(folder.config) == "bailing_hybrid"
    heads = number(folder, *HEAD_NAMES) or 1
    width = (number(folder, "head_dim") if is_hybrid else None) or hidden // heads
    inner = heads * width
    matrices = (
        Matrix(f"{at}.query_key_value", "attention", 3 * inner, hidden),
        Matrix(f"{at}.g_proj", "attention", inner, hidden),
        Matrix(f"{at}.dense", "attention", hidden, inner),
    )
    return Mixer(matrices, inner, 0 if is_hybrid else inner * width, inner * width if is_hybrid else 0)


def _rwkv_7(folder: ModelFolder, index: int) -> Mixer:
    hidden, at = folder.hidden_size, f"model.layers.{index}.attn"
    ranks = {
        "w": number(folder, "decay_low_rank_dim") or 0,
        "v": number(folder, "v_low_rank_dim") or 0 if index else 0,
        "a": number(folder, "a_low_rank_dim") or 0,
        "g": number(folder, "gate_low_rank_dim") or 0,
    }
    lows = {name: rank for name, rank in ranks.items() if rank}
    matrices = (
        *(Matrix(f"{at}.{name}_proj", "attention", hidden, hidden) for name in "rkvo"),
        *(Matrix(f"{at}.{name}_lora.lora.0", "attention", rank, hidden) for name, rank in lows.items()),
        *(Matrix(f"{at}.{name}_lora.lora.2", "attention", hidden, rank) for name, rank in lows.items()),
    )
    kept = hidden * (number(folder, "head_dim") or 0) + 2 * hidden
    return Mixer(matrices, 17 * hidden, kept)


def _kernel(folder: ModelFolder) -> int:
    return number(folder, "mamba_d_conv", "conv_kernel") or _USUAL_KERNEL


def _states(folder: ModelFolder) -> int:
    return number(folder, "mamba_d_state", "ssm_state_size", "state_size") or 0


def _out(at: str, outputs: int, inputs: int) -> Matrix:
    return Matrix(f"{at}.out_proj", "attention", outputs, inputs)


_MIXERS: Mapping[str, Callable[[ModelFolder, int], Mixer]] = {
    **dict.fromkeys(CONVOLUTIONS, _convolution),
    **dict.fromkeys(("mamba", "jamba"), _mamba),
    **dict.fromkeys(("mamba2", "falcon_h1", "nemotron_h", "granitemoehybrid"), _mamba_2),
    **dict.fromkeys(("bailing_moe_linear", "bailing_hybrid"), _linear_attention),
    "plamo2": _plamo_2,
    "recurrent_gemma": _linear_recurrence,
    "kimi_linear": _kimi_delta,
    "rwkv7": _rwkv_7,
}
"""Parts of layers without KV by mlx-lm's module; others count as linear attention with the matrices of attention."""
