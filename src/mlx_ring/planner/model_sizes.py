"""Profile of a model, from its configuration and the headers of its files if there are any. Pure.

Without headers the sizes follow from the configuration: for decoders of the usual build, dense or with
experts. Where headers are there, they say what each layer takes, whatever its build.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TypedDict

from mlx_ring.core.errors import ModelCorrupt, ModelUnsupported
from mlx_ring.models.architectures import WITHOUT_KV, batches_rows, language_module, number, quantizes_kv
from mlx_ring.models.config_limits import HEAD_NAMES
from mlx_ring.models.layer_tensors import dequantized_bytes, group_by_layers, names_head, path_of_layers
from mlx_ring.models.model_folder import ModelFolder, TensorEntry
from mlx_ring.models.tensor_shares import TensorSizes, read_tensor_sizes
from mlx_ring.planner.layer_parts import (
    ACTIVE_COUNTS,
    EXPERT_COUNTS,
    LookBack,
    WeightFormat,
    WeightFormats,
    experts_of,
    layer_matrices,
    look_back,
    read_formats,
)
from mlx_ring.planner.mixers import Matrix, Role, mixer_of_layer
from mlx_ring.planner.profiles import ClusterProfile, LayerProfile, ModelProfile

_FLOAT = 32
_EXPERT = re.compile(r"(?:^|\.)(?:experts|switch_mlp|switch_glu)\.")
"""Names of expert weights, of which a token uses some; every token uses `shared_experts`."""
_LOOKED_UP = "per_layer"
"""Names of Gemma's further embeddings, which are no output head."""
_TIED_FAMILIES = frozenset(
    {
        *(
            "afm7",
            "cohere",
            "cohere2",
            "gemma",
            "gemma2",
            "gemma3_text",
            "gemma3n",
            "gpt2",
            "lfm2",
            "lfm2_moe",
        ),
        *("openelm", "phi3small"),
    }
)
"""mlx-lm's modules whose embedding is the head, whatever a configuration says; of Gemma 3, unless a file has a head."""


def profile_folder(folder: ModelFolder, name: str, weights: WeightFormat | None = None) -> ModelProfile:
    """Return the profile of a model from its stored files, or from its configuration alone.

    Raises:
        ModelUnsupported: neither gives the sizes of its layers.
    """
    formats = read_formats(folder) if weights is None else WeightFormats(weights)
    has_files = bool(folder.tensors) and weights is None
    parts = _read_parts(folder, name)
    forms = [(formats, _AS_STORED), (formats.widened(), _WIDENED)]
    if formats.usual.is_quantized:
        forms += [
            (formats.widened(keeps_scales=True), _WITH_SCALES),
            (WeightFormats(WeightFormat(_FLOAT, plain="float32")), _DEQUANTIZED),
        ]
    stored, wide, *others = (
        _with_headers(_profile(folder, name, one, parts), folder, loading)
        if has_files
        else _profile(folder, name, one, parts)
        for one, loading in forms
    )
    stored = replace(stored, widened=None if wide == stored else wide)
    if not others:
        return stored
    with_scales, plain = others
    # Rows of an embedding are looked up as they are stored.
    plain = replace(plain, embedding_bytes=wide.embedding_bytes)
    return replace(stored, with_scales=with_scales, dequantized=plain)


def sizes_of(
    folder: ModelFolder, name: str, cluster: ClusterProfile, weights: WeightFormat | None = None
) -> ModelProfile:
    """Return a model's profile: that of `profile_folder`, without the forms that no machine of the cluster loads."""
    if weights is not None or folder.tensors or any(node.widens for node in cluster.nodes):
        return profile_folder(folder, name, weights)
    return profile_config(folder, name, read_formats(folder))


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


def profile_config(folder: ModelFolder, name: str, formats: WeightFormats) -> ModelProfile:
    """Return the profile from a configuration alone."""
    return _profile(folder, name, formats, _read_parts(folder, name))


@dataclass(frozen=True, slots=True)
class _LayerParts:
    """Parts of one layer, whatever the format of the weights."""

    matrices: Sequence[Matrix]
    experts: tuple[int, int] | None
    """Number of experts, and of those that one token uses."""
    small_numbers: int
    """Number of weights outside matrices."""
    back: LookBack


def _read_parts(folder: ModelFolder, name: str) -> Sequence[_LayerParts]:
    """Return the parts of each layer, which takes most of the time of a profile.

    Raises:
        ModelUnsupported: the configuration does not give them.
    """
    heads = number(folder, *HEAD_NAMES)
    if heads is None and language_module(folder.config) not in WITHOUT_KV:
        raise ModelUnsupported(
            f"{name} does not give its number of attention heads (num_attention_heads), so its sizes are unknown."
        )
    return [_parts_of(folder, index) for index in range(folder.num_layers)]


def _parts_of(folder: ModelFolder, index: int) -> _LayerParts:
    matrices = layer_matrices(folder, index)
    small = _small_numbers(folder, index, matrices)
    return _LayerParts(matrices, experts_of(folder, index), small, look_back(folder, index))


def _profile(
    folder: ModelFolder, name: str, formats: WeightFormats, parts: Sequence[_LayerParts]
) -> ModelProfile:
    hidden, vocabulary = folder.hidden_size, folder.vocab_size
    weights = formats.usual
    alike: dict[LayerProfile, LayerProfile] = {}
    layers = tuple(alike.setdefault(layer, layer) for layer in (_layer(each, formats) for each in parts))
    embedding, head = (
        int(vocabulary * hidden * formats.of(table, hidden).nbytes)
        for table in ("model.embed_tokens", "lm_head")
    )
    is_tied = _is_tied(folder)
    return ModelProfile(
        name=name,
        layers=layers,
        embedding_bytes=embedding,
        head_bytes=embedding if is_tied else head,
        is_tied=is_tied,
        hidden_size=hidden,
        vocabulary=vocabulary,
        context_tokens=folder.context_length,
        quantizes_kv=quantizes_kv(folder),
        batches=batches_rows(folder),
        weights=weights.name,
        has_byte_scales=weights.has_byte_scales,
        number_bytes=weights.plain_bits // 8,
        widest=max(matrix.inputs for each in (parts[0], parts[-1]) for matrix in each.matrices),
        routed=_routed(parts[-1], hidden),
        shared=_shared(folder, weights),
    )


def _routed(parts: _LayerParts, hidden: int) -> int:
    """Return the numbers of a token's experts: their inputs, and both results of the first products and those of both."""
    wide = max(
        (matrix.inputs for matrix in parts.matrices if matrix.role == "experts" and matrix.outputs == hidden),
        default=0,
    )
    return parts.experts[1] * (hidden + 3 * wide) if parts.experts is not None else 0


def _is_tied(folder: ModelFolder) -> bool:
    """Report whether the embedding is the head: if the files have no head, else as mlx-lm reads the configuration."""
    module, given = language_module(folder.config), folder.entry("tie_word_embeddings")
    # Files of RecurrentGemma have no head, and its configurations leave this out.
    is_tied = module in _TIED_FAMILIES or bool(module == "recurrent_gemma" if given is None else given)
    if not folder.tensors:
        return is_tied
    _, outside = group_by_layers(folder.tensors)
    has_head = any(names_head(entry.name) and entry.shape[:1] == (folder.vocab_size,) for entry in outside)
    return not has_head or (is_tied and module != "gemma3_text")


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


def _layer(parts: _LayerParts, formats: WeightFormats) -> LayerProfile:
    weights = formats.usual
    sizes = _layer_nbytes(parts.matrices, formats)
    counts: Counter[Role] = Counter()
    for matrix in parts.matrices:
        counts[matrix.role] += matrix.weights
    experts, back = parts.experts, parts.back
    share = experts[1] / experts[0] if experts else 0.0
    plain_bytes = weights.plain_bits // 8
    small = parts.small_numbers * plain_bytes
    kv = back.kept_per_token * plain_bytes
    state_bytes = back.state * plain_bytes + back.state_floats * _FLOAT // 8
    held = sum(sizes.values()) + small
    active = sum(counts.values()) - counts["experts"] * (1 - share)
    return LayerProfile(
        weight_bytes=int(held),
        read_bytes=int(held - sizes["experts"] * (1 - share)) if experts else int(held),
        flops_per_token=2 * int(active),
        kv_bytes_per_token=0 if back.window is not None else kv,
        kv_bytes_per_sequence=state_bytes + (0 if back.window is None else kv * back.window),
        query_width=back.query_width,
        score_width=back.score_width,
        index_width=back.index_width,
        window=back.selected if back.window is None else back.window,
        expert_share=share,
        attention_bytes=int(sizes["attention"]),
        whole_bytes=int(sizes["router"]) + small,
    )


def _small_numbers(folder: ModelFolder, index: int, matrices: Iterable[Matrix]) -> int:
    """Return the number of weights outside matrices: norms, biases and convolutions, approximately."""
    biases = sum(
        matrix.count * matrix.outputs
        for matrix in matrices
        if folder.model_type == "gpt_oss"
        or (folder.model_type.startswith("qwen2") and matrix.name.endswith(("q_proj", "k_proj", "v_proj")))
    )
    mixer = mixer_of_layer(folder, index)
    return 2 * folder.hidden_size + biases + (0 if mixer is None else mixer.numbers)


def _layer_nbytes(matrices: Iterable[Matrix], formats: WeightFormats) -> dict[Role, float]:
    """Return the bytes of a layer's matrices by role, in their formats."""
    found: dict[Role, float] = {"attention": 0.0, "mlp": 0.0, "experts": 0.0, "router": 0.0}
    for matrix in matrices:
        found[matrix.role] += matrix.weights * formats.of(matrix.name, matrix.inputs).nbytes
    return found


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
