"""Parts of a layer's matrices, lazily: nothing is read before the part itself is evaluated.

A part is a copy of its own, for a view would hold the whole matrix in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx
from mlx import nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from mlx_ring.core.errors import ModelUnsupported, PlanError
from mlx_ring.core.types import MemberRange

_MATRICES = ("weight", "scales", "biases")
"""Of a layer, quantized or not: (outputs, inputs), and (experts, outputs, inputs)."""
_QUANTIZED = (nn.QuantizedLinear, QuantizedSwitchLinear, nn.QuantizedEmbedding)
_FLOAT = (nn.Linear, SwitchLinear, nn.Embedding)
_BITS_IN_WORD = 32


def keep_rows(layer: nn.Module, *extents: MemberRange) -> None:
    """Leave a layer those of its outputs, in this order; of an embedding those tokens."""
    _require_known(layer)
    for name in (*_MATRICES, "bias"):
        matrix = _parameter(layer, name)
        if matrix is not None:
            axis = matrix.ndim - (1 if name == "bias" else 2)
            layer[name] = _cut(matrix, axis, extents)


def keep_columns(layer: nn.Module, extent: MemberRange) -> None:
    """Leave a layer those of its inputs. Its bias, which all ranks' parts have once between them, stays whole."""
    _require_known(layer)
    _require_whole_groups(layer, extent)
    for name in _MATRICES:
        matrix = _parameter(layer, name)
        if matrix is not None:
            layer[name] = _cut(matrix, matrix.ndim - 1, (_stored(layer, name, extent),))


def rows_of(layer: nn.Module, extent: MemberRange) -> dict[str, mx.array]:
    """Views of a layer's matrices: what keeps them keeps the whole."""
    found = {name: _parameter(layer, name) for name in _MATRICES}
    return {name: matrix[extent.start : extent.end] for name, matrix in found.items() if matrix is not None}


def _cut(matrix: mx.array, axis: int, extents: Sequence[MemberRange]) -> mx.array:
    parts = [matrix[(slice(None),) * axis + (slice(extent.start, extent.end),)] for extent in extents]
    return mx.contiguous(parts[0] if len(parts) == 1 else mx.concatenate(parts, axis))


def _stored(layer: nn.Module, name: str, columns: MemberRange) -> MemberRange:
    """Where a matrix has what belongs to these inputs."""
    if not isinstance(layer, _QUANTIZED):
        return columns
    of_layer = cast("Any", layer)
    words, inputs = (of_layer.bits, _BITS_IN_WORD) if name == "weight" else (1, of_layer.group_size)
    return MemberRange(columns.start * words // inputs, columns.end * words // inputs)


def _require_whole_groups(layer: nn.Module, columns: MemberRange) -> None:
    size = cast("int", cast("Any", layer).group_size) if isinstance(layer, _QUANTIZED) else 1
    if columns.start % size or columns.end % size:
        raise PlanError(
            f"Columns {columns} of a matrix that is quantized in groups of {size} cannot be had without parting a group: "
            "make the shares for this model anew."
        )


def _require_known(layer: nn.Module) -> None:
    if not isinstance(layer, (*_FLOAT, *_QUANTIZED)):
        raise ModelUnsupported(
            f"A layer of kind {type(layer).__name__} cannot be split over several ranks: its weights must be plain, or "
            "quantized by weight alone."
        )


def _parameter(layer: nn.Module, name: str) -> mx.array | None:
    return cast("mx.array | None", layer.get(name))
