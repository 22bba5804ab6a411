"""Bytes of weights that a decode step reads from each layer, from the names and sizes of tensors. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction

from mlx_ring.models.layer_tensors import dequantized_bytes, group_by_layers, names_head, path_of_layers
from mlx_ring.models.model_folder import ModelFolder, TensorEntry
from mlx_ring.planner.layer_parts import ACTIVE_COUNTS, EXPERT_COUNTS, number

_EXPERT = re.compile(r"(?:^|\.)(?:experts|switch_mlp|switch_glu)\.")
"""Names of expert weights, of which a token uses some; every token uses `shared_experts`."""
_LOOKED_UP = "per_layer"
"""Names of Gemma's further embeddings, which are no output head."""


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
