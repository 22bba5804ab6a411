"""Matrices of a model's layers and what attention reads back, from a configuration alone. Pure.

Attention has grouped keys, latent keys (MLA, with or without an indexer), or a gated delta rule. Some layers are
state-space models or short convolutions. MLPs, experts, or both follow. Matrices have the names that mlx-lm gives them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

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
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
ACTIVE_COUNTS = (
    *("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "top_k_experts"),
    *("moe_topk", "moe_top_k", "moe_k"),
)
_WITHOUT_GATE = (
    "gpt2",
    "gpt_neox",
    "gpt_bigcode",
    "gptj",
    "phi",
    "starcoder2",
    "nemotron",
    "nemotron_h",
    "falcon",
    "opt",
)
"""Models whose MLPs have two matrices."""
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


@dataclass(frozen=True, slots=True)
class LookBack:
    """Numbers that attention keeps and reads for the tokens before, of one layer."""

    kept_per_token: int = 0
    """Numbers of keys and values of one token."""
    query_width: int = 0
    """Numbers in the queries of one token while decoding, as they are compared with each kept token."""
    score_width: int = 0
    """Numbers in the queries and in the weighted values of one token of a prompt, all heads together."""
    window: int | None = None
    """Most tokens that are kept; None: all."""
    selected: int | None = None
    """Most tokens that attention reads after an indexer has chosen them; None: all that are kept."""
    index_width: int = 0
    """Numbers in the indexer's queries of one token, as they are compared with every kept token."""
    state_bytes: int = 0
    """Bytes of a recurrent state, whatever the length."""


def experts_of(folder: ModelFolder, index: int) -> tuple[int, int] | None:
    """Return the number of experts of a layer and of those that one token uses; None for a layer without."""
    count, active = number(folder, *EXPERT_COUNTS), number(folder, *ACTIVE_COUNTS)
    if not count or active is None or folder.entry("enable_moe_block") is False:
        return None
    return (count, min(active, count)) if _has_experts(folder, index) else None


def _has_experts(folder: ModelFolder, index: int) -> bool:
    """Report whether a layer of a model with experts has some, by any of the entries that say so."""
    dense, kinds, every = (
        folder.entry(name) for name in ("mlp_only_layers", "mlp_layer_types", "moe_layer_freq")
    )
    for flags in (kinds, every):
        if isinstance(flags, list) and index < len(listed := cast("list[object]", flags)):
            return listed[index] not in (0, "dense")
    if index < (number(folder, "first_k_dense_replace") or 0) or (isinstance(dense, list) and index in dense):
        return False
    if (of_family := _experts_of_family(folder, index)) is not None:
        return of_family
    # Qwen's models count from one, DeepSeek's from zero.
    if index % (number(folder, "moe_layer_freq") or 1):
        return False
    return (index + 1) % (number(folder, "decoder_sparse_step") or 1) == 0


def _experts_of_family(folder: ModelFolder, index: int) -> bool | None:
    """Report whether a layer has experts, by entries that only its family reads; None for other families."""
    module = language_module(folder.config)
    if module == "nemotron_h":
        return mixer_of(folder, module, index) in ("E", "moe")
    if module == "jamba":
        offset, period = (
            number(folder, "expert_layer_offset") or 0,
            number(folder, "expert_layer_period") or 1,
        )
        return (index + offset) % period == 0 and (number(folder, "num_experts") or 0) > 1
    return index >= (number(folder, "num_dense_layers") or 0) if module == "lfm2_moe" else None


def layer_matrices(folder: ModelFolder, index: int) -> Sequence[Matrix]:
    """Return the matrices of a layer."""
    mixer, _ = state_space(folder, index)
    has_attention = language_module(folder.config) not in _KNOWN_MIXERS or not lacks_kv(folder, index)
    attention = _attention(folder, index) if has_attention else ()
    return (*mixer, *attention, *_feed_forward(folder, index))


def look_back(folder: ModelFolder, index: int) -> LookBack:
    """Return what a layer keeps and reads of the tokens before."""
    if (state_bytes := state_bytes_of(folder, index)) is not None:
        return LookBack(state_bytes=state_bytes)
    back = _attended(folder, index)
    if language_module(folder.config) in _WITH_BOTH:
        return replace(back, state_bytes=_other_state_bytes(folder, index))
    return replace(back, kept_per_token=0) if _shares_kv(folder, index) else back


def _attended(folder: ModelFolder, index: int) -> LookBack:
    heads, kv_heads, width = _head_sizes(folder, index)
    chosen, indexed = number(folder, "index_topk"), number(folder, "index_n_heads") or 0
    indexed *= number(folder, "index_head_dim") or 0
    if (latent := number(folder, "kv_lora_rank")) is not None:
        rope = number(folder, "qk_rope_head_dim") or 0
        keys = (number(folder, "qk_nope_head_dim") or width) + rope
        values = number(folder, "v_head_dim") or width
        kept = latent + rope + (number(folder, "index_head_dim") or 0)
        return LookBack(
            kept,
            heads * (latent + rope),
            heads * (keys + values),
            window_of(folder, index),
            chosen,
            indexed,
        )
    if number(folder, "o_groups"):
        # Keys are kept for groups of tokens, and chosen as groups; most layers have one for four tokens.
        selected = None if chosen is None else 4 * chosen
        return LookBack(width // 4, heads * width // 4, heads * width // 2, None, selected, indexed // 4)
    window = window_of(folder, index)
    return LookBack(2 * kv_heads * width, heads * width, 2 * heads * width, window)


def _shares_kv(folder: ModelFolder, index: int) -> bool:
    """Report whether a layer reads the KV of an earlier one and keeps none itself."""
    if language_module(folder.config) not in ("gemma3n", "gemma4_text"):
        return False
    return index >= folder.num_layers - (number(folder, "num_kv_shared_layers") or 0)


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


# ---- layers without KV

_CONVOLVED_BYTES = 3 * 2
"""Bytes that a convolution keeps per channel: three numbers of two bytes."""


def state_bytes_of(folder: ModelFolder, index: int) -> int | None:
    """Return the bytes of the recurrent state that a layer has instead of KV; None for a layer with attention."""
    if is_gated_delta(folder, index):
        key_heads, value_heads, key, value = _delta_sizes(folder)
        convolved = (2 * key_heads * key + value_heads * value) * 3 * 2
        return value_heads * key * value * _FLOAT_BYTES + convolved
    return _other_state_bytes(folder, index) if lacks_kv(folder, index) else None


def _other_state_bytes(folder: ModelFolder, index: int) -> int:
    """Return the bytes of the state of a convolution, of linear attention, or of a state-space model; of others 0."""
    module, hidden = language_module(folder.config), folder.hidden_size
    if module in CONVOLUTIONS:
        return hidden * _CONVOLVED_BYTES
    if module == "nemotron_h" and mixer_of(folder, module, index) not in _STATE_KINDS:
        return 0
    heads = number(folder, "mamba_n_heads", "mamba_num_heads")
    width = number(folder, "mamba_d_head", "mamba_head_dim", "head_dim", "hidden_size_per_head")
    states = number(folder, "mamba_d_state", "ssm_state_size", "state_size")
    if states is None:
        heads = number(folder, *HEAD_NAMES) or 1
        return hidden * (width or hidden // heads) * _FLOAT_BYTES + hidden * _CONVOLVED_BYTES
    if heads is None or width is None:
        inner = hidden * (number(folder, "mamba_expand", "expand") or 2)
    else:
        inner = heads * width
    return inner * (states * _FLOAT_BYTES + _CONVOLVED_BYTES)


def _delta_sizes(folder: ModelFolder) -> tuple[int, int, int, int]:
    """Return the numbers of heads of keys and values, and their widths."""
    found = [number(folder, f"linear_{name}") or 0 for name in ("num_key_heads", "num_value_heads")]
    widths = [number(folder, f"linear_{name}_head_dim") or 0 for name in ("key", "value")]
    return found[0], found[1], widths[0], widths[1]


def _head_sizes(folder: ModelFolder, index: int) -> tuple[int, int, int]:
    """Return the numbers of heads of queries and of keys, and the width of a head."""
    heads = number(folder, *HEAD_NAMES) or 1
    width = number(folder, "head_dim") or folder.hidden_size // heads
    kv_heads = number(folder, *KV_HEAD_NAMES) or heads
    if window_of(folder, index) is None and (wide := number(folder, "global_head_dim")) is not None:
        return heads, number(folder, "num_global_key_value_heads") or kv_heads, wide
    return heads, kv_heads, width


def _attention(folder: ModelFolder, index: int) -> Iterator[Matrix]:
    hidden = folder.hidden_size
    if is_gated_delta(folder, index):
        key_heads, value_heads, key, value = _delta_sizes(folder)
        at = f"model.layers.{index}.linear_attn"
        keys, values = key_heads * key, value_heads * value
        yield Matrix(f"{at}.in_proj_qkvz", "attention", 2 * (keys + values), hidden)
        yield Matrix(f"{at}.in_proj_ba", "attention", 2 * value_heads, hidden)
        yield Matrix(f"{at}.out_proj", "attention", hidden, values)
        return
    at = f"model.layers.{index}.self_attn"
    if number(folder, "kv_lora_rank") is not None:
        yield from _latent_attention(folder, at)
        return
    heads, kv_heads, width = _head_sizes(folder, index)
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
    rope, nope = number(folder, "qk_rope_head_dim") or 0, number(folder, "qk_nope_head_dim") or 0
    values = number(folder, "v_head_dim") or nope
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
    heads, _, width = _head_sizes(folder, 0)
    rank, low = number(folder, "q_lora_rank") or hidden, number(folder, "o_lora_rank") or hidden
    yield Matrix(f"{at}.wq_a", "attention", rank, hidden)
    yield Matrix(f"{at}.wq_b", "attention", heads * width, rank)
    yield Matrix(f"{at}.wkv", "attention", width, hidden)
    yield Matrix(f"{at}.wo_a", "attention", groups * low, heads * width // groups)
    yield Matrix(f"{at}.wo_b", "attention", hidden, groups * low)


# ---- state-space models and convolutions

_MAMBA, _MAMBA_2 = ("mamba", "jamba"), ("mamba2", "falcon_h1", "nemotron_h", "granitemoehybrid")
_STATE_KINDS = ("M", "mamba", "linear_attention", "conv")
"""Names of Nemotron-H's layers with a state-space model."""
_WITH_BOTH = ("falcon_h1",)
"""Modules whose layers have attention and a state-space model."""
_KNOWN_MIXERS = (*_MAMBA, *_MAMBA_2, "lfm2", "lfm2_moe")
"""Modules whose layers without KV have the matrices below; those of others count as those of attention."""


def state_space(folder: ModelFolder, index: int) -> tuple[Sequence[Matrix], int]:
    """Return the matrices of a layer's state-space model or convolution, and its other numbers; none for other layers."""
    module, hidden = language_module(folder.config), folder.hidden_size
    is_other = module == "nemotron_h" and mixer_of(folder, module, index) not in _STATE_KINDS
    if module not in _KNOWN_MIXERS or is_other or not (module in _WITH_BOTH or lacks_kv(folder, index)):
        return (), 0
    at = f"model.layers.{index}.{'conv' if module in CONVOLUTIONS else 'mamba'}"
    if module in CONVOLUTIONS:
        matrices = Matrix(f"{at}.in_proj", "attention", 3 * hidden, hidden), _out(at, hidden, hidden)
        return matrices, hidden * (number(folder, "conv_L_cache") or 0)
    kernel = number(folder, "mamba_d_conv", "conv_kernel") or 0
    states = number(folder, "mamba_d_state", "ssm_state_size", "state_size") or 0
    if module in _MAMBA:
        inner = number(folder, "mamba_expand", "expand") if module == "jamba" else None
        inner = inner * hidden if inner else number(folder, "intermediate_size", "d_inner") or 2 * hidden
        rank = number(folder, "mamba_dt_rank", "time_step_rank") or -(-hidden // 16)
        return (
            Matrix(f"{at}.in_proj", "attention", 2 * inner, hidden),
            Matrix(f"{at}.x_proj", "attention", rank + 2 * states, inner),
            Matrix(f"{at}.dt_proj", "attention", inner, rank),
            _out(at, hidden, inner),
        ), inner * (kernel + states + 3)
    heads = number(folder, "mamba_n_heads", "mamba_num_heads", "num_heads") or 1
    width = number(folder, "mamba_d_head", "mamba_head_dim", "head_dim") or 0
    inner = (number(folder, "mamba_d_ssm") if module == "falcon_h1" else None) or heads * width
    convolved = inner + 2 * (number(folder, "mamba_n_groups", "n_groups") or 1) * states
    projected = Matrix(f"{at}.in_proj", "attention", inner + convolved + heads, hidden)
    return (projected, _out(at, hidden, inner)), convolved * (kernel + 1) + 3 * heads + inner


def _out(at: str, outputs: int, inputs: int) -> Matrix:
    return Matrix(f"{at}.out_proj", "attention", outputs, inputs)


# ---- feed-forward layers


def _dense_size(folder: ModelFolder) -> int:
    """Return the width of a layer's MLP."""
    module, size = language_module(folder.config), number(folder, "intermediate_size", "n_inner")
    if module == "lfm2":
        size = number(folder, "block_ff_dim") or size
        if size and folder.entry("block_auto_adjust_ff_dim") is True:
            factor = folder.entry("block_ffn_dim_multiplier")
            size = int((factor if isinstance(factor, (int, float)) else 1) * int(2 * size / 3))
            step = number(folder, "block_multiple_of") or 1
            size = -(-size // step) * step
    return size or 4 * folder.hidden_size


def _feed_forward(folder: ModelFolder, index: int) -> Iterator[Matrix]:
    hidden, at, module = folder.hidden_size, f"model.layers.{index}.mlp", language_module(folder.config)
    experts = experts_of(folder, index)
    has_none = module in ("mamba", "mamba2") or (
        module == "nemotron_h" and mixer_of(folder, module, index) not in ("-", "mlp", "E", "moe")
    )
    if has_none:
        return
    if experts is None or folder.entry("enable_moe_block") is True:
        yield from _mlp(folder, at, "mlp", _dense_size(folder))
    if experts is None:
        return
    size = number(folder, "moe_intermediate_size", "expert_intermediate_size", "intermediate_size") or hidden
    latent = number(folder, "moe_latent_size")
    yield from _mlp(folder, f"{at}.switch_mlp", "experts", size, experts[0], latent)
    if latent:
        yield Matrix(f"{at}.fc1_latent_proj", "mlp", latent, hidden)
        yield Matrix(f"{at}.fc2_latent_proj", "mlp", hidden, latent)
    shared = number(folder, "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size")
    if shared is None and module == "granitemoehybrid":
        shared = number(folder, "shared_intermediate_size")
    if shared is None:
        shared = (number(folder, "n_shared_experts") or 0) * size
    if shared:
        yield from _mlp(folder, f"{at}.shared_experts", "mlp", shared)
    yield Matrix(f"{at}.gate", "router", experts[0], hidden)


def _mlp(
    folder: ModelFolder, at: str, role: Role, size: int, count: int = 1, inputs: int | None = None
) -> Iterator[Matrix]:
    hidden = inputs or folder.hidden_size
    if folder.model_type not in _WITHOUT_GATE:
        yield Matrix(f"{at}.gate_proj", role, size, hidden, count)
    yield Matrix(f"{at}.up_proj", role, size, hidden, count)
    yield Matrix(f"{at}.down_proj", role, hidden, size, count)
