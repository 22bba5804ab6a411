"""Matrices of a model's layers and what attention reads back, from a configuration alone. Pure.

Decoders of the usual builds: attention with grouped keys, with latent keys (MLA, with or without an indexer), or a gated
delta rule; MLPs, experts, or both. Matrices have the names that mlx-lm gives them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

from mlx_ring.models.architectures import language_module, module_of
from mlx_ring.models.config_limits import HEAD_NAMES, KV_HEAD_NAMES
from mlx_ring.models.model_folder import ModelFolder
from mlx_ring.planner.weight_format import WeightFormats

Role = Literal["attention", "mlp", "experts", "router"]
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
ACTIVE_COUNTS = (
    *("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "top_k_experts"),
    *("moe_topk", "moe_top_k", "moe_k"),
)
_WITHOUT_GATE = ("gpt2", "gpt_neox", "gpt_bigcode", "gptj", "phi", "starcoder2", "nemotron", "falcon", "opt")
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


def number(folder: ModelFolder, *names: str) -> int | None:
    """Return the first whole number among entries of the configuration, else among mlx-lm's defaults for them."""
    for found in (folder.entry(*names), *map(folder.entry, names)):
        if type(found) is int:
            return found
    return None


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
    # Qwen's models count from one, DeepSeek's from zero.
    if index % (number(folder, "moe_layer_freq") or 1):
        return False
    return (index + 1) % (number(folder, "decoder_sparse_step") or 1) == 0


def layer_matrices(folder: ModelFolder, index: int) -> Sequence[Matrix]:
    """Return the matrices of a layer."""
    return (*_attention(folder, index), *_feed_forward(folder, index))


def small_numbers(folder: ModelFolder, index: int) -> int:
    """Return the number of weights outside matrices: norms, biases and convolutions, approximately."""
    biases = sum(
        matrix.count * matrix.outputs
        for matrix in layer_matrices(folder, index)
        if folder.model_type == "gpt_oss"
        or (folder.model_type.startswith("qwen2") and matrix.name.endswith(("q_proj", "k_proj", "v_proj")))
    )
    return 2 * folder.hidden_size + biases


def look_back(folder: ModelFolder, index: int) -> LookBack:
    """Return what a layer keeps and reads of the tokens before."""
    if (state_bytes := state_bytes_of(folder, index)) is not None:
        return LookBack(state_bytes=state_bytes)
    back = _attended(folder, index)
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
            if _listed(folder, "hybrid_layer_pattern", index) == 1
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
        kind = _kind_of(folder, index)
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


def _listed(folder: ModelFolder, name: str, index: int) -> object:
    """Return a layer's value in a list of the configuration; None without that."""
    values = folder.entry(name)
    if not isinstance(values, (list, str)) or index >= len(listed := cast("Sequence[object]", values)):
        return None
    return listed[index]


def _kind_of(folder: ModelFolder, index: int) -> object:
    """Return the kind of a layer's attention in `layer_types`; None without that."""
    return _listed(folder, "layer_types", index)


# ---- layers without KV

_GATED_DELTA = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "prism_hadamard_qwen35", "olmo_hybrid")
_WITHOUT_KV = ("mamba", "mamba2", "rwkv7")
"""Modules whose layers all have a recurrent state."""
_GROUPED = ("bailing_hybrid", "bailing_moe_linear", "bailing_moe_v3")
"""Modules with full attention in the last layer of each group, and in layers that fill no group."""
_ATTENTION_KINDS = ("attention", "full_attention", "sliding_attention", "*")
_CONVOLUTIONS, _CONVOLVED_BYTES = ("gear", "lfm2", "lfm2_moe"), 3 * 2
"""Modules whose other layers are short convolutions; bytes that one keeps per channel: three numbers of two bytes."""


def state_bytes_of(folder: ModelFolder, index: int) -> int | None:
    """Return the bytes of the recurrent state that a layer has instead of KV; None for a layer with attention."""
    if _is_recurrent(folder, index):
        key_heads, value_heads, key, value = _delta_sizes(folder)
        convolved = (2 * key_heads * key + value_heads * value) * 3 * 2
        return value_heads * key * value * _FLOAT_BYTES + convolved
    return _other_state_bytes(folder, index) if _lacks_kv(folder, index) else None


def _lacks_kv(folder: ModelFolder, index: int) -> bool:
    """Report whether a layer has no KV, by the entries that each of mlx-lm's modules reads."""
    module = language_module(folder.config)
    if module in _GROUPED and (size := number(folder, "layer_group_size")):
        return (index + 1) % size != 0 and index < folder.num_layers // size * size
    if module in ("kimi_linear", "kimi_k3"):
        given = folder.entry("linear_attn_config")
        linear = cast("Mapping[str, object]", given).get("kda_layers") if isinstance(given, Mapping) else None
        return isinstance(linear, list) and index + 1 in linear
    if module == "plamo2":
        step = number(folder, "mamba_step") or 2
        return folder.entry("mamba_enabled") is not False and index % step != step // 2
    if module in _CONVOLUTIONS and isinstance(full := folder.entry("full_attn_idxs"), list):
        return index not in full
    kind = _mixer_of(folder, module, index)
    if kind is None and module == "jamba":
        return index % (number(folder, "attn_layer_period") or 1) != (
            number(folder, "attn_layer_offset") or 0
        )
    return module in _WITHOUT_KV or (kind is not None and kind not in _ATTENTION_KINDS)


def _mixer_of(folder: ModelFolder, module: str, index: int) -> object:
    """Return the kind of a layer in the list of kinds that a module with layers without KV reads; None without that."""
    if module == "recurrent_gemma":
        kinds = folder.entry("block_types", "_block_types")
        return (
            cast("list[object]", kinds)[index % len(cast("list[object]", kinds))]
            if isinstance(kinds, list)
            else None
        )
    if module == "nemotron_h":
        names = ("hybrid_override_pattern", "layers_block_type", "layer_types")
    else:
        names = {"jamba": ("layers_block_type",), "granitemoehybrid": ("layer_types",)}.get(
            module, ("layer_types",) if module in _CONVOLUTIONS else ()
        )
    return next((kind for name in names if (kind := _listed(folder, name, index)) is not None), None)


def _other_state_bytes(folder: ModelFolder, index: int) -> int:
    """Return the bytes of the state of a convolution, of linear attention, or of a state-space model; of others 0."""
    module, hidden = language_module(folder.config), folder.hidden_size
    if module in _CONVOLUTIONS:
        return hidden * _CONVOLVED_BYTES
    if module == "nemotron_h" and _mixer_of(folder, module, index) not in ("M", "mamba"):
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


def layer_nbytes(folder: ModelFolder, index: int, formats: WeightFormats) -> dict[Role, float]:
    """Return the bytes of a layer's matrices by role, in their formats."""
    found: dict[Role, float] = {"attention": 0.0, "mlp": 0.0, "experts": 0.0, "router": 0.0}
    for matrix in layer_matrices(folder, index):
        found[matrix.role] += matrix.weights * formats.of(matrix.name, matrix.inputs).nbytes
    return found


def _is_recurrent(folder: ModelFolder, index: int) -> bool:
    """Report whether a layer has a gated delta rule instead of attention."""
    module = language_module(folder.config)
    if module == "olmo_hybrid" and (kind := _kind_of(folder, index)) is not None:
        return kind == "linear_attention"
    if module not in _GATED_DELTA or number(folder, "linear_num_value_heads") is None:
        return False
    return (index + 1) % (number(folder, "full_attention_interval") or 4) != 0


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
    if _is_recurrent(folder, index):
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


def _feed_forward(folder: ModelFolder, index: int) -> Iterator[Matrix]:
    hidden, at = folder.hidden_size, f"model.layers.{index}.mlp"
    experts = experts_of(folder, index)
    if experts is None or folder.entry("enable_moe_block") is True:
        yield from _mlp(folder, at, "mlp", number(folder, "intermediate_size", "n_inner") or 4 * hidden)
    if experts is None:
        return
    size = number(folder, "moe_intermediate_size", "expert_intermediate_size", "intermediate_size") or hidden
    yield from _mlp(folder, f"{at}.switch_mlp", "experts", size, experts[0])
    shared = number(folder, "shared_expert_intermediate_size")
    if shared is None:
        shared = (number(folder, "n_shared_experts") or 0) * size
    if shared:
        yield from _mlp(folder, f"{at}.shared_experts", "mlp", shared)
    yield Matrix(f"{at}.gate", "router", experts[0], hidden)


def _mlp(folder: ModelFolder, at: str, role: Role, size: int, count: int = 1) -> Iterator[Matrix]:
    hidden = folder.hidden_size
    if folder.model_type not in _WITHOUT_GATE:
        yield Matrix(f"{at}.gate_proj", role, size, hidden, count)
    yield Matrix(f"{at}.up_proj", role, size, hidden, count)
    yield Matrix(f"{at}.down_proj", role, hidden, size, count)
