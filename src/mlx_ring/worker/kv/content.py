"""Keys and values of a row by layer, KV heads and tokens, for storing or transferring them.

One layer's content is a tuple of arrays `(heads, tokens, width)` in temporal order. It holds keys and values, or data,
scales and biases of each if they are quantized. A layer with several caches gives one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import mlx.core as mx

from mlx_ring.core.errors import StepFailed
from mlx_ring.worker.kv.bank import Bank, Row
from mlx_ring.worker.kv.layers import Layer, Layout, Plane, RowPart
from mlx_ring.worker.kv.row_placement import Banks

Range = tuple[int, int]
"""Half-open range."""


def row_parts(layer: Layer) -> list[RowPart]:
    """Return the layer's parts, all of which must be rows of keys and values."""
    parts = [part for part in layer.parts if isinstance(part, RowPart)]
    if len(parts) != len(layer.parts):
        raise StepFailed("A recurrent layer's state has no token ranges; it moves only as a whole.")
    return parts


def parts_with(layer: Layer, window: int | None) -> list[RowPart]:
    """Return the layer's parts with keys and values of a window, or of every token."""
    return [part for part in layer.parts if isinstance(part, RowPart) and part.window == window]


def row_planes(parts: Iterable[RowPart]) -> list[Plane]:
    """Return the arrays that parts store, in the order of their content. They are known after a first pass."""
    return [plane for part in parts for plane in part.planes]


def read_row(row: Row, parts: Iterable[RowPart], heads: Range | None, tokens: Range) -> tuple[mx.array, ...]:
    """Return an evaluated copy of a row's content, of some heads or all."""
    arrays: list[mx.array] = []
    for part in parts:
        base = row.base(part.window)
        if not base <= tokens[0] < tokens[1] <= row.length:
            raise StepFailed(
                f"Sequence {row.sequence} holds tokens [{base}, {row.length}) in that layer, "
                f"not [{tokens[0]}, {tokens[1]})."
            )
        planes = row.bank.planes[part.index] if row.bank is not None else []
        for plane in planes:
            first, last = heads or (0, plane.shape[1])
            _check_heads((first, last), plane.shape[1])
            begin, end = tokens[0] - base, tokens[1] - base
            # A sum, because MLX may let a dense slice share the plane's memory, which later rows overwrite.
            arrays.append(plane[row.slot, first:last, begin:end] + mx.zeros((), plane.dtype))
    mx.eval(arrays)
    return tuple(arrays)


def write_row(
    row: Row,
    banks: Banks,
    layout: Layout,
    parts: Sequence[RowPart],
    heads: Range | None,
    tokens: Range,
    arrays: Sequence[mx.array],
) -> None:
    """Write content of some heads, or of all, behind a row's tokens, or into an empty row; makes room for it."""
    if not 0 <= row.length <= tokens[0] < tokens[1] <= row.max_length:
        raise StepFailed(
            f"Sequence {row.sequence} has {row.length} tokens of {row.max_length}; "
            f"content for [{tokens[0]}, {tokens[1]}) does not go behind them."
        )
    bank = row.bank
    if bank is None:
        ((bank, _),) = banks.place([[row]])
    for part in parts:
        if part.window is not None and row.length == 0:
            row.bases.setdefault(part.window, tokens[0])
        _make_room(row, bank, part.window, tokens, layout)
    rest = list(arrays)
    for part in parts:
        size = 2 if part.bits is None else 6
        mine, rest = rest[:size], rest[size:]
        _write(row, bank, part, heads or (0, mine[0].shape[0]), tokens, mine)
    if rest:
        raise StepFailed(f"The layer takes {len(arrays) - len(rest)} arrays; {len(arrays)} came.")


def _make_room(row: Row, bank: Bank, window: int | None, tokens: Range, layout: Layout) -> None:
    need = tokens[1] - row.base(window)
    if tokens[0] < row.base(window) or (window is not None and need > layout.most(window)):
        raise StepFailed(
            f"Sequence {row.sequence} is filled from {row.base(window)} in a layer with a window of "
            f"{window}; tokens [{tokens[0]}, {tokens[1]}) do not fit there."
        )
    bank.memory.reserve(window, need, max(need, row.max_length))


def _write(
    row: Row, bank: Bank, part: RowPart, heads: Range, tokens: Range, arrays: Sequence[mx.array]
) -> None:
    _check_shapes(heads, tokens, arrays, 2 if part.bits is None else 6)
    if not part.planes and heads[0] == 0:
        part.planes = tuple(Plane(array.shape[0], array.shape[2], array.dtype) for array in arrays)
    _check_gap(row, part, heads, tokens)
    base = row.base(part.window)
    begin, end = tokens[0] - base, tokens[1] - base
    for plane, known, array in zip(bank.memory.ensure(part), part.planes, arrays, strict=True):
        _check_heads(heads, known.heads)
        if (array.shape[2], array.dtype) != (known.width, known.dtype):
            raise StepFailed(
                f"The content is {array.dtype} of width {array.shape[2]}; "
                f"the layer keeps {known.dtype} of width {known.width}."
            )
        plane[row.slot, heads[0] : heads[1], begin:end] = array
    mx.eval(bank.planes[part.index])
    for head in range(*heads):
        row.written[part.index, head] = max(_written(row, part, head), tokens[1])


def check_written(row: Row, parts: Sequence[RowPart], length: int) -> None:
    """Check that every head of every part has its tokens up to `length`. Raises `StepFailed` if not."""
    for part in parts:
        heads = part.planes[0].heads if part.planes else 1
        ends = [_written(row, part, head) for head in range(heads)]
        if min(ends) < length:
            raise StepFailed(
                f"Sequence {row.sequence} cannot be taken over at {length} tokens: cache {part.index} was "
                f"written up to {min(ends)} only."
            )


def _check_gap(row: Row, part: RowPart, heads: Range, tokens: Range) -> None:
    end = min(_written(row, part, head) for head in range(*heads))
    if tokens[0] > end:
        raise StepFailed(f"Content for tokens [{tokens[0]}, {tokens[1]}) leaves a gap after {end}.")


def _written(row: Row, part: RowPart, head: int) -> int:
    return row.written.get((part.index, head), max(row.length, row.base(part.window)))


def _check_heads(heads: Range, have: int) -> None:
    if not 0 <= heads[0] < heads[1] <= have:
        raise StepFailed(f"The layer has KV heads [0, {have}), not [{heads[0]}, {heads[1]}).")


def _check_shapes(heads: Range, tokens: Range, arrays: Sequence[mx.array], size: int) -> None:
    if not 0 <= heads[0] < heads[1]:
        raise StepFailed(f"[{heads[0]}, {heads[1]}) is no range of KV heads.")
    wanted = (heads[1] - heads[0], tokens[1] - tokens[0])
    if len(arrays) != size or any(array.shape[:2] != wanted or array.ndim != 3 for array in arrays):  # noqa: PLR2004 - three axes: (heads, tokens, width)
        shapes = [tuple(array.shape) for array in arrays]
        raise StepFailed(f"The layer takes {size} arrays of {wanted} heads and tokens; shapes {shapes} came.")
