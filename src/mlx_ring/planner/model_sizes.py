"""Profile of a model, from its configuration and the headers of its files if there are any. Pure.

Without headers the sizes follow from the configuration: for decoders of the usual build, dense or with
experts. Where headers are there, they say what each layer takes, whatever its build.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypedDict, cast

from mlx_ring.core.errors import ModelCorrupt, ModelUnsupported
from mlx_ring.core.types import DTYPES
from mlx_ring.models.config_limits import HEAD_NAMES, KV_HEAD_NAMES
from mlx_ring.models.model_folder import ModelFolder
from mlx_ring.models.tensor_shares import TensorSizes, read_tensor_sizes
from mlx_ring.planner.decode_bytes import decode_bytes, layer_bytes
from mlx_ring.planner.profiles import LayerProfile, ModelProfile

_GROUP = 64
_HALF, _FLOAT = 16, 32
"""Bits of a number, by dtype."""


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """Number format of weights."""

    bits: int
    group: int = _GROUP
    plain: str = "bfloat16"
    """Dtype of unquantized numbers: activations, keys and values."""
    scales: str = ""
    """Dtype of scales and biases of quantized weights, if they have another than unquantized numbers."""

    @property
    def is_quantized(self) -> bool:
        return self.bits < _HALF

    @property
    def plain_bits(self) -> int:
        return _bits_of(self.plain)

    @property
    def nbytes(self) -> float:
        scales = 2 * _bits_of(self.scales or self.plain) / self.group if self.is_quantized else 0
        return (self.bits + scales) / 8

    @property
    def name(self) -> str:
        """Name of the format in measured rates."""
        return f"{self.bits}-bit" if self.is_quantized else self.plain

    def widened(self, *, keeps_scales: bool = False) -> WeightFormat:
        """Return the format with float32 instead of half precision, except scales if those are kept."""
        scales = self.scales or self.plain if keeps_scales else ""
        return replace(self, plain="float32", scales=scales, bits=self.bits if self.is_quantized else _FLOAT)


def _bits_of(dtype: str) -> int:
    return _FLOAT if dtype == "float32" else _HALF


def profile_folder(folder: ModelFolder, name: str, weights: WeightFormat | None = None) -> ModelProfile:
    """Return the profile of a model from its stored files, or from its configuration alone.

    Raises:
        ModelUnsupported: neither tells the sizes of its layers.
    """
    kind = weights or _format_of(folder)
    has_files = bool(folder.tensors) and weights is None
    forms = [(kind, _AS_STORED), (kind.widened(), _WIDENED)]
    if kind.is_quantized:
        forms += [
            (kind.widened(keeps_scales=True), _WITH_SCALES),
            (WeightFormat(_FLOAT, plain="float32"), _DEQUANTIZED),
        ]
    stored, wide, *others = (
        _with_headers(profile_config(folder, name, one), folder, loading)
        if has_files
        else profile_config(folder, name, one)
        for one, loading in forms
    )
    stored = replace(stored, widened=None if wide == stored else wide)
    if not others:
        return stored
    with_scales, plain = others
    # Rows of an embedding are looked up as they are stored.
    plain = replace(plain, embedding_bytes=wide.embedding_bytes)
    return replace(stored, with_scales=with_scales, dequantized=plain)


class _Loading(TypedDict):
    widened: bool
    keeps_scales: bool
    dequantized: bool


_AS_STORED: _Loading = {"widened": False, "keeps_scales": False, "dequantized": False}
_WIDENED: _Loading = {"widened": True, "keeps_scales": False, "dequantized": False}
_WITH_SCALES: _Loading = {"widened": True, "keeps_scales": True, "dequantized": False}
_DEQUANTIZED: _Loading = {"widened": True, "keeps_scales": False, "dequantized": True}


def _with_headers(by_config: ModelProfile, folder: ModelFolder, loading: _Loading) -> ModelProfile:
    """Return the profile with the real sizes of tensors, if their names contain their layers."""
    read, whole = decode_bytes(folder, **loading), layer_bytes(folder, **loading)
    if read is None or whole is None:
        return by_config
    layers = tuple(
        replace(layer, weight_bytes=size, read_bytes=once)
        for layer, size, once in zip(by_config.layers, whole, read.layers, strict=True)
    )
    embedding = sum(
        entry.loaded_bytes(widened=loading["widened"], keeps_scales=loading["keeps_scales"])
        for entry in folder.tensors
        if "embed" in entry.name and "layers." not in entry.name and "position" not in entry.name
    )
    tied = by_config.is_tied
    return replace(
        by_config, layers=layers, head_bytes=read.head, embedding_bytes=read.head if tied else embedding
    )


def profile_config(folder: ModelFolder, name: str, weights: WeightFormat) -> ModelProfile:
    """Return the profile from a configuration alone."""
    hidden, vocabulary, count = folder.hidden_size, folder.vocab_size, folder.num_layers
    heads = _number(folder, *HEAD_NAMES)
    if heads is None:
        raise ModelUnsupported(
            f"{name} does not give its number of attention heads (num_attention_heads), so its sizes are unknown."
        )
    layers = tuple(_layer(folder, index, hidden, heads, weights) for index in range(count))
    tied = folder.entry("tie_word_embeddings")
    table = int(vocabulary * hidden * weights.nbytes)
    return ModelProfile(
        name=name,
        layers=layers,
        embedding_bytes=table,
        head_bytes=table,
        is_tied=bool(tied),
        hidden_size=hidden,
        vocabulary=vocabulary,
        context_tokens=folder.context_length,
        weights=weights.name,
        number_bytes=weights.plain_bits // 8,
        widest=max(
            hidden, heads * (_number(folder, "head_dim") or hidden // heads), _intermediate(folder, hidden)
        ),
        shared=_shared(folder, weights),
    )


def _shared(folder: ModelFolder, weights: WeightFormat) -> TensorSizes | None:
    try:
        sizes = read_tensor_sizes(folder)
    except (ModelUnsupported, ModelCorrupt):
        return None
    return (
        sizes
        if folder.quantization
        else replace(sizes, group_size=weights.group if weights.is_quantized else 1)
    )


def _layer(folder: ModelFolder, index: int, hidden: int, heads: int, weights: WeightFormat) -> LayerProfile:
    width = _number(folder, "head_dim") or hidden // heads
    kv_heads = _number(folder, *KV_HEAD_NAMES) or heads
    attention = hidden * width * (heads + 2 * kv_heads) + heads * width * hidden
    dense = 3 * hidden * _intermediate(folder, hidden)
    held = read = dense
    router = 0
    if (experts := _experts(folder, index, hidden)) is not None:
        held, read, router = experts
    window = _window(folder, index)
    kv = 2 * kv_heads * width
    queries = heads * width
    if (latent := _number(folder, "kv_lora_rank")) is not None:
        kv = latent + (_number(folder, "qk_rope_head_dim") or 0)
        queries = heads * kv
    kv *= weights.plain_bits // 8
    plain_bytes = weights.plain_bits // 8
    return LayerProfile(
        weight_bytes=int((attention + held) * weights.nbytes),
        read_bytes=int((attention + read) * weights.nbytes),
        flops_per_token=2 * (attention + read),
        kv_bytes_per_token=0 if window is not None else kv,
        kv_bytes_per_sequence=0 if window is None else kv * window,
        query_width=queries,
        window=window,
        attention_bytes=int(attention * weights.nbytes),
        whole_bytes=int(router * weights.nbytes) + 2 * hidden * plain_bytes,
    )


def _intermediate(folder: ModelFolder, hidden: int) -> int:
    return _number(folder, "intermediate_size", "n_inner") or 4 * hidden


def _experts(folder: ModelFolder, index: int, hidden: int) -> tuple[int, int, int] | None:
    """Return the weights of all experts, of those that one token uses, and of the router; None for a dense layer."""
    count = _number(folder, "num_experts", "num_local_experts", "n_routed_experts")
    active = _number(folder, "num_experts_per_tok", "num_experts_per_token", "experts_per_token")
    if count is None or active is None or index < (_number(folder, "first_k_dense_replace") or 0):
        return None
    dense = folder.entry("mlp_only_layers")
    if isinstance(dense, list) and index in dense:
        return None
    every = _number(folder, "decoder_sparse_step") or 1
    if (index + 1) % every:
        return None
    size = 3 * hidden * (_number(folder, "moe_intermediate_size", "intermediate_size") or hidden)
    shared = _number(folder, "shared_expert_intermediate_size")
    beside = 3 * hidden * shared if shared else (_number(folder, "n_shared_experts") or 0) * size
    router = hidden * count
    return count * size + beside + router, active * size + beside + router, router


def _window(folder: ModelFolder, index: int) -> int | None:
    """Return the attention window of a layer; None if it is unlimited."""
    window = _number(folder, "sliding_window")
    kinds = folder.entry("layer_types")
    if window is None or folder.entry("use_sliding_window") is False:
        return None
    if isinstance(kinds, list):
        return window if cast("list[object]", kinds)[index] == "sliding_attention" else None
    pattern = _number(folder, "sliding_window_pattern")
    if pattern is not None:
        return None if (index + 1) % pattern == 0 else window
    return window


def _format_of(folder: ModelFolder) -> WeightFormat:
    quantization: Mapping[str, Any] = folder.quantization or {}
    bits, group = quantization.get("bits"), quantization.get("group_size")
    said = folder.entry("torch_dtype") or folder.entry("dtype")
    plain = said if said in DTYPES else "bfloat16"
    if type(bits) is int and type(group) is int:
        return WeightFormat(bits, group, plain)
    return WeightFormat(_FLOAT if plain == "float32" else _HALF, plain=plain)


def _number(folder: ModelFolder, *names: str) -> int | None:
    for name in names:
        if type(value := folder.entry(name)) is int:
            return value
    return None
