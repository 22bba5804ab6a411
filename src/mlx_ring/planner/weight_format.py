"""Number formats of a model's weights, from its configuration. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from mlx_ring.core.types import DTYPES
from mlx_ring.models.config_limits import quantization_kind
from mlx_ring.models.model_folder import ModelFolder

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
