"""Matrices of a model's layers, their number formats, and what layers read of the tokens before, from a configuration. Pure.

After attention, or what a layer has in its place (`mixers.py`), MLPs, experts, or both follow. Matrices have the names
that mlx-lm gives them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from mlx_ring.core.types import DTYPES
from mlx_ring.models.architectures import language_module, mixer_of, number
from mlx_ring.models.config_limits import quantization_kind
from mlx_ring.models.model_folder import ModelFolder
from mlx_ring.planner.mixers import (
    Matrix,
    Role,
    has_kv,
    head_sizes,
    mixer_matrices,
    mixer_of_layer,
    window_of,
)

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
    "rwkv7",
)
"""Models whose MLPs have two matrices."""


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
    state: int = 0
    """Numbers of a recurrent state in the model's format, whatever the length ..."""
    state_floats: int = 0
    """... and in float32."""


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
    return (*mixer_matrices(folder, index), *_feed_forward(folder, index))


def look_back(folder: ModelFolder, index: int) -> LookBack:
    """Return what a layer keeps and reads of the tokens before."""
    back = _attended(folder, index) if has_kv(folder, index) else LookBack()
    if (mixer := mixer_of_layer(folder, index)) is not None:
        return replace(back, state=mixer.kept, state_floats=mixer.kept_floats)
    return replace(back, kept_per_token=0) if _shares_kv(folder, index) else back


def _attended(folder: ModelFolder, index: int) -> LookBack:
    heads, kv_heads, width = head_sizes(folder, index)
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


# ---- feed-forward layers


def _dense_size(folder: ModelFolder) -> int:
    """Return the width of a layer's MLP."""
    module, size = language_module(folder.config), number(folder, "intermediate_size", "n_inner")
    if module == "recurrent_gemma" and size:
        # Its configurations count both halves.
        size //= 2
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
    if shared := _shared_size(folder, module, size):
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


def _shared_size(folder: ModelFolder, module: str, size: int) -> int:
    """Return the width of a layer's shared experts together; `size` is that of a routed one."""
    given = number(folder, "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size")
    count = number(folder, "num_shared_experts") or 0
    if module in ("bailing_moe", "bailing_moe_linear"):
        return 0 if folder.entry("moe_router_enable_shared_expert") is False else (given or size) * count
    if module in ("bailing_hybrid", "kimi_linear"):
        return (given or count * size) if count else 0
    if given is None and module == "granitemoehybrid":
        given = number(folder, "shared_intermediate_size")
    return (number(folder, "n_shared_experts") or 0) * size if given is None else given


# ---- formats of weights

_GROUP = 64
_HALF, _FLOAT = 16, 32
"""Bits of a number, by dtype."""
_EIGHT, _FOUR = 8, 4
_SCALES: Mapping[str, tuple[int, int, int]] = {
    "mxfp4": (_FOUR, 32, 8),
    "mxfp8": (_EIGHT, 32, 8),
    "nvfp4": (_FOUR, 16, 8),
}
"""Bits, group and bits of a group's scale of MLX's formats with a scale of 8 bits."""
_FP8_BLOCK = 128
_PREFIX = re.compile(r"^.*?(?=model\.layers\.|model\.embed_tokens|lm_head)")
_SAME = (
    (".block_sparse_moe.", ".mlp."),
    (".experts.switch_glu.", ".mlp.switch_mlp."),
    (".mlp.experts.", ".mlp.switch_mlp."),
    (".mlp.router", ".mlp.gate"),
    (".shared_expert.", ".shared_experts."),
)
"""Names that models have for the same matrices."""
_GPTQ_GROUP = 128
_KEPT = ("modules_to_not_convert", "ignore", "ignored_layers")
_LONGEST_GROUP = 1024
"""Longest group within a row; larger ones are blocks of several rows."""


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """Number format of weights."""

    bits: int
    group: int = _GROUP
    plain: str = "bfloat16"
    """Dtype of unquantized numbers: activations, keys and values."""
    scales: str = ""
    """Dtype of scales and biases of quantized weights, if they have another than unquantized numbers."""
    scale_bits: int | None = None
    """Bits of a group's scale, where it has one of its own kind and no bias; None: two numbers of `scales`."""

    @property
    def is_quantized(self) -> bool:
        return self.bits < _HALF

    @property
    def has_byte_scales(self) -> bool:
        """True if a group has a scale of 8 bits and no bias, as of mxfp4, nvfp4 and mxfp8."""
        return self.is_quantized and self.scale_bits == _EIGHT

    @property
    def plain_bits(self) -> int:
        return _bits_of(self.plain)

    @property
    def nbytes(self) -> float:
        """Bytes of one weight, with its part of the scales."""
        if not self.is_quantized:
            return self.bits / 8
        group = 2 * _bits_of(self.scales or self.plain) if self.scale_bits is None else self.scale_bits
        return (self.bits + group / self.group) / 8

    @property
    def name(self) -> str:
        """Name of the format in measured rates."""
        return f"{self.bits}-bit" if self.is_quantized else self.plain

    def widened(self, *, keeps_scales: bool = False) -> WeightFormat:
        """Return the format with float32 instead of half precision, except scales if those are kept."""
        scales = self.scales or self.plain if keeps_scales else ""
        return replace(self, plain="float32", scales=scales, bits=self.bits if self.is_quantized else _FLOAT)

    def unquantized(self) -> WeightFormat:
        """Return the format of weights beside these that are not quantized."""
        return WeightFormat(self.plain_bits, plain=self.plain)


@dataclass(frozen=True, slots=True)
class WeightFormats:
    """Formats of a model's matrices: one for most, and those of named ones."""

    usual: WeightFormat
    named: Mapping[str, WeightFormat] = field(default_factory=dict[str, WeightFormat])
    """Formats by a matrix's name."""
    plain_parts: tuple[str, ...] = ()
    """Parts of the names of matrices that are not quantized."""

    def of(self, name: str, inputs: int) -> WeightFormat:
        """Return the format of a matrix by its name and number of inputs: plain if groups do not fit into a row."""
        found = self.named.get(name, self.usual)
        if not found.is_quantized:
            return found
        if any(part in name for part in self.plain_parts):
            return found.unquantized()
        fits = found.group > _LONGEST_GROUP or inputs % found.group == 0
        return found if fits else found.unquantized()

    def widened(self, *, keeps_scales: bool = False) -> WeightFormats:
        """Return the formats with float32 instead of half precision."""
        wide = {name: one.widened(keeps_scales=keeps_scales) for name, one in self.named.items()}
        return replace(self, usual=self.usual.widened(keeps_scales=keeps_scales), named=wide)


def read_formats(folder: ModelFolder) -> WeightFormats:
    """Return the formats that a configuration states: MLX's `quantization`, or others' `quantization_config`.

    Kinds: MLX's own with exceptions by name, fp8 in blocks, mxfp4, GPTQ and AWQ, compressed-tensors, bitsandbytes and
    NVIDIA's modelopt. A kind that is not known counts as unquantized, which is the safe side.
    """
    said = folder.entry("torch_dtype") or folder.entry("dtype")
    plain = said if isinstance(said, str) and said in DTYPES else "bfloat16"
    unquantized = WeightFormat(_FLOAT if plain == "float32" else _HALF, plain=plain)
    given: Mapping[str, Any] = folder.quantization or {}
    usual = _usual(given, plain)
    if usual is None:
        return WeightFormats(unquantized)
    named = {
        common_name(name): unquantized
        if value is False
        else _usual(cast("dict[str, Any]", value), plain) or usual
        for name, value in given.items()
        if value is False or isinstance(value, dict)
    }
    kept = next((given[key] for key in _KEPT if given.get(key)), ())
    named_parts = cast("list[object]", kept if isinstance(kept, list) else [kept])
    parts = [part.removeprefix("re:").strip(".*$") for part in named_parts if isinstance(part, str)]
    if given.get("quant_method") in ("gptq", "awq", "bitsandbytes", "compressed-tensors", "fp8"):
        parts += ["embed_tokens", "lm_head"]
    return WeightFormats(usual, named, tuple(part for part in parts if part))


def common_name(name: str) -> str:
    """Return the name of a matrix without a model's own prefix and words for it."""
    name = _PREFIX.sub("", name)
    for one, other in _SAME:
        name = name.replace(one, other)
    return name


def _usual(given: Mapping[str, Any], plain: str) -> WeightFormat | None:
    """Return the format of most matrices; None if nothing says that they are quantized."""
    mode, method = str(given.get("mode") or ""), str(given.get("quant_method") or "")
    if mode in _SCALES or method in _SCALES:
        bits, group, scale = _SCALES[mode if mode in _SCALES else method]
        return WeightFormat(bits, _whole(given.get("group_size")) or group, plain, scale_bits=scale)
    if method == "fp8":
        # Loading makes numbers in half precision of most.
        kind = quantization_kind(given)
        bits, group, scale = _SCALES["mxfp8"]
        is_kept = kind is not None and kind.becomes == "stored"
        return WeightFormat(bits, group, plain, scale_bits=scale) if is_kept else None
    if method in ("gptq", "awq", "auto-round", "intel/auto-round") and (
        bits := _whole(given.get("bits") or given.get("w_bit"))
    ):
        # Stored zero points have as many bits as a weight, and loading makes biases of them.
        return WeightFormat(bits, _whole(given.get("group_size")) or _GPTQ_GROUP, plain)
    if method == "bitsandbytes":
        bits = _EIGHT if given.get("load_in_8bit") else _FOUR
        return WeightFormat(bits, _GROUP, plain, scale_bits=0 if bits == _EIGHT else _EIGHT)
    if method in ("compressed-tensors", "modelopt"):
        return _grouped(given, plain)
    bits, group = _whole(given.get("bits")), _whole(given.get("group_size"))
    return WeightFormat(bits, group, plain) if bits and group else None


def _grouped(given: Mapping[str, Any], plain: str) -> WeightFormat | None:
    if str(given.get("quant_algo") or "").upper() == "NVFP4":
        return WeightFormat(_FOUR, 16, plain, scale_bits=_EIGHT)
    for entry in _object(given.get("config_groups")).values():
        weights = _object(_object(entry).get("weights"))
        bits = _whole(weights.get("num_bits"))
        if bits is None:
            continue
        group = _whole(weights.get("group_size"))
        if given.get("format") == "pack-quantized" and group:  # loading makes biases
            return WeightFormat(bits, group, plain)
        is_nvfp4 = bits == _FOUR and weights.get("type") == "float"
        return WeightFormat(
            bits,
            group or _FP8_BLOCK * _FP8_BLOCK,
            plain,
            scale_bits=_EIGHT if is_nvfp4 else _HALF if group else _FLOAT,
        )
    return None


def _object(value: object) -> Mapping[str, object]:
    return cast("dict[str, object]", value) if isinstance(value, dict) else {}


def _whole(value: object) -> int | None:
    return value if type(value) is int and value > 0 else None


def _bits_of(dtype: str) -> int:
    return _FLOAT if dtype == "float32" else _HALF
