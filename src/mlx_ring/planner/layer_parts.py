"""Matrices of a model's layers and what attention reads back, from a configuration alone, and bytes from names of tensors. Pure.

Decoders of the usual builds: attention with grouped keys, with latent keys (MLA, with or without an indexer), or a gated
delta rule; MLPs, experts, or both. Matrices have the names that mlx-lm gives them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, cast

from mlx_ring.models.config_limits import HEAD_NAMES, KV_HEAD_NAMES
from mlx_ring.models.layer_tensors import dequantized_bytes, group_by_layers, names_head, path_of_layers
from mlx_ring.models.model_folder import ModelFolder, TensorEntry
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
_EXPERT = re.compile(r"(?:^|\.)(?:experts|switch_mlp|switch_glu)\.")
"""Names of expert weights, of which a token uses some; every token uses `shared_experts`."""
_LOOKED_UP = "per_layer"
"""Names of Gemma's further embeddings, which are no output head."""


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
    if _is_recurrent(folder, index):
        key_heads, value_heads, key, value = _delta_sizes(folder)
        convolved = (2 * key_heads * key + value_heads * value) * 3 * 2
        return LookBack(state_bytes=value_heads * key * value * _FLOAT_BYTES + convolved)
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


def window_of(folder: ModelFolder, index: int) -> int | None:
    """Return the attention window of a layer; None if it is unlimited."""
    window = number(folder, "sliding_window")
    kind = _kind_of(folder, index)
    if window is None or folder.entry("use_sliding_window") is False:
        return None
    if kind is not None:
        return window if kind == "sliding_attention" else None
    pattern = number(folder, "sliding_window_pattern", "_sliding_window_pattern")
    if pattern is not None:
        return None if (index + 1) % pattern == 0 else window
    if folder.model_type == "gpt_oss":
        return window if index % 2 == 0 else None
    return window


def _kind_of(folder: ModelFolder, index: int) -> object:
    """Return the kind of a layer's attention in `layer_types`; None without that."""
    kinds = folder.entry("layer_types")
    return cast("list[object]", kinds)[index] if isinstance(kinds, list) else None


def layer_nbytes(folder: ModelFolder, index: int, formats: WeightFormats) -> dict[Role, float]:
    """Return the bytes of a layer's matrices by role, in their formats."""
    found: dict[Role, float] = {"attention": 0.0, "mlp": 0.0, "experts": 0.0, "router": 0.0}
    for matrix in layer_matrices(folder, index):
        found[matrix.role] += matrix.weights * formats.of(matrix.name, matrix.inputs).nbytes
    return found


def _is_recurrent(folder: ModelFolder, index: int) -> bool:
    if number(folder, "linear_num_value_heads") is None:
        return False
    kind = _kind_of(folder, index)
    if kind is not None:
        return kind == "linear_attention"
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


# ---- bytes that a decode step reads, from the names and sizes of tensors


@dataclass(frozen=True, slots=True)
class DecodeBytes:
    """Bytes of weights that a step with one token reads."""

    layers: tuple[int, ...]
    head: int
    """Bytes of the output head, or of the embedding if it is tied. The lookup of a token's embedding is negligible."""


def decode_bytes(
    folder: ModelFolder, *, widened: bool, keeps_scales: bool = False, dequantized: bool = False
) -> DecodeBytes | None:
    """Return the bytes that a step reads; None if the tensors' names do not contain their layers.

    Args:
        folder: what its safetensors headers say.
        widened: whether half precision becomes float32 when it is loaded.
        keeps_scales: whether scales of quantized weights do not.
        dequantized: whether quantized weights do.
    """
    inside, outside = group_by_layers(folder.tensors)
    path = path_of_layers(inside, folder.num_layers)
    if path is None:
        return None
    share = _active_share(folder)
    size = _sizer(folder, widened=widened, keeps_scales=keeps_scales, dequantized=dequantized)
    layers = [Fraction(0)] * folder.num_layers
    for place, rest, entry in inside[path]:
        if place < folder.num_layers:
            layers[place] += size(entry) * (share if _EXPERT.search(rest) else 1)
    return DecodeBytes(tuple(map(int, layers)), _head_bytes(outside, folder.vocab_size, size))


def layer_bytes(
    folder: ModelFolder, *, widened: bool, keeps_scales: bool = False, dequantized: bool = False
) -> tuple[int, ...] | None:
    """Return the bytes of each layer with all experts; None if the tensors' names do not contain their layers."""
    size = _sizer(folder, widened=widened, keeps_scales=keeps_scales, dequantized=dequantized)
    inside, _ = group_by_layers(folder.tensors)
    path = path_of_layers(inside, folder.num_layers)
    if path is None:
        return None
    sizes = [0] * folder.num_layers
    for place, _, entry in inside[path]:
        if place < folder.num_layers:
            sizes[place] += size(entry)
    return tuple(sizes)


_Size = Callable[[TensorEntry], int]
"""Function that returns the bytes of a loaded tensor."""


def _sizer(folder: ModelFolder, *, widened: bool, keeps_scales: bool, dequantized: bool) -> _Size:
    sizes = dequantized_bytes(folder) if dequantized else dict[str, int]()

    def size(entry: TensorEntry) -> int:
        return sizes.get(entry.name, entry.loaded_bytes(widened=widened, keeps_scales=keeps_scales))

    return size


def _active_share(folder: ModelFolder) -> Fraction:
    """Return the share of experts that one token uses; 1 if the configuration does not state it."""
    experts, active = number(folder, *EXPERT_COUNTS), number(folder, *ACTIVE_COUNTS)
    if experts is None or active is None or not 0 < active < experts:
        return Fraction(1)
    return Fraction(active, experts)


def _head_bytes(outside: Iterable[TensorEntry], vocab_size: int, size_of: _Size) -> int:
    """Return the bytes of the output head or of a tied embedding: the largest tensor with a row for each token."""
    heads: Counter[str] = Counter()
    tied: Counter[str] = Counter()
    for entry in outside:
        module = entry.name.rpartition(".")[0]
        size = size_of(entry)
        if names_head(entry.name):
            heads[module] += size
        elif entry.shape[:1] == (vocab_size,) and _LOOKED_UP not in entry.name:
            tied[module] += size
    return max((heads or tied).values(), default=0)
