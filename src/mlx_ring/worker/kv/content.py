"""Keys and values of a row by layer, KV heads and tokens, for storing or transferring them.

One layer's content is a tuple of arrays `(heads, tokens, width)` in temporal order. It holds keys and values, or data,
scales and biases of each if they are quantized. A layer with several caches gives one after the other.
"""

from __future__ import annotations

import struct
import zlib
from array import array as number_array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

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


def row_planes(layer: Layer) -> list[Plane]:
    """Return the arrays that a layer stores, in the order of its content. They are known after a first pass."""
    return [plane for part in row_parts(layer) for plane in part.planes]


def row_heads(layer: Layer) -> int:
    """Return the number of a layer's KV heads. Raises `StepFailed` if its caches differ in it, or before a first pass."""
    heads = {plane.heads for plane in row_planes(layer)}
    if len(heads) != 1:
        raise StepFailed(
            f"The layer's caches have {sorted(heads)} KV heads, so its content is not one range of them."
        )
    return heads.pop()


def read_row(row: Row, layer: Layer, heads: Range, tokens: Range) -> tuple[mx.array, ...]:
    """Return an evaluated copy of a row's content."""
    arrays: list[mx.array] = []
    for part in row_parts(layer):
        base = row.base(part.window)
        if not base <= tokens[0] < tokens[1] <= row.length:
            raise StepFailed(
                f"Sequence {row.sequence} holds tokens [{base}, {row.length}) in that layer, "
                f"not [{tokens[0]}, {tokens[1]})."
            )
        planes = row.bank.planes[part.index] if row.bank is not None else []
        for plane in planes:
            _check_heads(heads, plane.shape[1])
            begin, end = tokens[0] - base, tokens[1] - base
            # A sum, because MLX may let a dense slice share the plane's memory, which later rows overwrite.
            arrays.append(plane[row.slot, heads[0] : heads[1], begin:end] + mx.zeros((), plane.dtype))
    mx.eval(arrays)
    return tuple(arrays)


def write_row(
    row: Row,
    banks: Banks,
    layout: Layout,
    layer: int,
    heads: Range,
    tokens: Range,
    arrays: Sequence[mx.array],
) -> None:
    """Write content behind a row's tokens, or into an empty row; makes room for it."""
    if not 0 <= row.length <= tokens[0] < tokens[1] <= row.max_length:
        raise StepFailed(
            f"Sequence {row.sequence} has {row.length} tokens of {row.max_length}; "
            f"content for [{tokens[0]}, {tokens[1]}) does not go behind them."
        )
    parts = row_parts(layout.layers[layer])
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
        _write(row, bank, part, heads, tokens, mine)
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


# ---- listed blocks

_LIST_MAGIC = b"mlx-ring KV list 1\n"
_CHECKSUM = struct.Struct("<I")
_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class ListedTokens:
    """A block that texts can use which share only the first of its tokens."""

    digest: bytes
    tokens: tuple[int, ...]

    def shared(self, text: Sequence[int]) -> int:
        """Return the number of first tokens that a text shares."""
        differs = (
            place for place, pair in enumerate(zip(self.tokens, text, strict=False)) if pair[0] != pair[1]
        )
        return next(differs, min(len(self.tokens), len(text)))

    def encode(self) -> bytes:
        """Return the content of its file, with a checksum."""
        content = self.digest + number_array("I", self.tokens).tobytes()
        return _LIST_MAGIC + _CHECKSUM.pack(zlib.crc32(content)) + content


def read_listed(path: Path) -> ListedTokens | None:
    """Return what `encode` encoded; None if the file is missing or damaged."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    begin = len(_LIST_MAGIC) + _CHECKSUM.size
    content, tokens = data[begin:], number_array("I")
    is_whole = _LIST_MAGIC + _CHECKSUM.pack(zlib.crc32(content)) == data[:begin]
    if not is_whole or len(content) < _DIGEST_BYTES or (len(content) - _DIGEST_BYTES) % tokens.itemsize:
        return None
    tokens.frombytes(content[_DIGEST_BYTES:])
    return ListedTokens(content[:_DIGEST_BYTES], tuple(tokens))
