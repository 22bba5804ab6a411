"""Keys and values of a row by layer, KV heads and tokens, for storing or transferring them.

One layer's content is a tuple of arrays `(heads, tokens, width)` in temporal order. It holds keys and values, or data,
scales and biases of each if they are quantized. A layer with several caches gives one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx

from mlx_ring.core.errors import StepFailed
from mlx_ring.worker.kv.bank import Bank, Row, move, remove
from mlx_ring.worker.kv.bank_memory import BLOCK, SHORT_TOKENS, Growth
from mlx_ring.worker.kv.layers import CachePart, Layer, Layout, ObjectPart, Plane, RowPart

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
    # The rest follows at once, and growing would copy what has come.
    soon = row.max_length if window is None else 0
    bank.memory.reserve(window, need, max(need, row.max_length), soon=soon)


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


class Banks:
    """Banks of a store."""

    def __init__(self, layout: Layout, growth: Growth) -> None:
        self._layout = layout
        self._growth = growth
        self._banks: list[Bank] = []

    @property
    def nbytes(self) -> int:
        return sum(bank.memory.nbytes for bank in self._banks)

    @property
    def target_bytes(self) -> int:
        """Bytes of all banks at their target sizes."""
        return sum(bank.memory.target_bytes for bank in self._banks)

    def clear(self) -> None:
        """Free all memory."""
        self._banks.clear()

    def place(self, groups: Sequence[Sequence[Row]]) -> list[tuple[Bank, list[Row]]]:
        """Bring each group side by side into one bank. Rows that lie elsewhere are copied once.

        If a bank has no room yet for those that join, they stay separate until it has grown.

        First all rows join, because a row that leaves a bank changes the order there. Then each bank is put in order,
        which separates no group.
        """
        placed = [place for group in groups for place in self._join(group)]
        self._banks = [bank for bank in self._banks if bank.rows]
        for bank, group in placed:
            bank.gather(group)
        return placed

    def stay(self, rows: Sequence[Row], counts: Sequence[int]) -> bool:
        """Report whether rows have room for `counts` more tokens side by side in their bank, or have no bank yet."""
        bank = rows[0].bank if rows else None
        if any(row.bank is not bank for row in rows):
            return False
        if bank is None:
            return True
        slots = [row.slot for row in rows]
        if max(slots) - min(slots) >= len(slots) or bank.memory.is_changing:
            return False
        return not any(
            bank.memory.grows(window, row.held(window) + count, self._limit(bank, window))
            for window in self._layout.kinds
            for row, count in zip(rows, counts, strict=True)
        )

    def _join(self, group: Sequence[Row]) -> list[tuple[Bank, list[Row]]]:
        bank = self._target(group)
        if bank.memory.is_changing:
            bank.memory.continue_resizing()
        residents = [row for row in group if row.bank is bank]
        strangers = [row for row in group if row.bank is not bank]
        limits = {window: self._limit(bank, window, strangers) for window in self._layout.kinds}
        if strangers and not bank.make_room(strangers, limits):
            return [(bank, residents), *self._apart(strangers)]
        move([(row, bank) for row in strangers], self._growth)
        return [(bank, list(group))]

    def _apart(self, rows: Sequence[Row]) -> list[tuple[Bank, list[Row]]]:
        """Group rows by their banks; those without a bank get one."""
        banks = {id(row.bank): row.bank for row in rows if row.bank is not None}.values()
        placed = [(bank, [row for row in rows if row.bank is bank]) for bank in banks]
        homeless = [row for row in rows if row.bank is None]
        return [*placed, *self._join(homeless)] if homeless else placed

    def place_alone(self, row: Row, room: int) -> Bank:
        """Place a row in a new bank, with room for a number of further tokens."""
        bank = self._new_bank(1)
        self.reserve(bank, [row], [room])
        return bank

    def retain(self, rows: Sequence[Row]) -> None:
        """Move each row into a bank of its own that has no more room than it needs, in this order."""
        rows = [row for row in rows if row.bank is not None]
        places: list[tuple[Row, Bank]] = []
        for row in rows:
            if row.bank is not None and row.bank.rows == [row]:
                if not self._is_exact(row.bank, row):
                    row.bank.shrink_to(row)
            else:
                places.append((row, Bank(self._layout, 1, self._growth)))
        for row, bank in places:
            bank.memory.aim(1, {window: row.held(window) for window in self._layout.kinds})
        move(places, self._growth)
        own = {id(row.bank) for row in rows}
        self._banks = [bank for bank in self._banks if bank.rows and id(bank) not in own]
        self._banks += [row.bank for row in rows if row.bank is not None]

    def _is_exact(self, bank: Bank, row: Row) -> bool:
        """Return True if a bank has one row, and no more room than that needs."""
        memory = bank.memory
        return (
            bank.rows == [row]
            and memory.slots == memory.target_slots == 1
            and all(
                row.held(window) == memory.capacity(window) == memory.target_capacity(window)
                for window in self._layout.kinds
            )
        )

    def reserve(self, bank: Bank, rows: Sequence[Row], counts: Sequence[int]) -> None:
        """Make room for the rows' tokens and `counts` more in every layer, for a row alone also for its next ones.

        Over the limit of memory, a bank that grows loses its free slots first.
        """
        alone = rows[0] if len(rows) == 1 and all(row is rows[0] for row in bank.rows) else None
        for window in self._layout.kinds:
            if window is None:
                need = max(row.length + count for row, count in zip(rows, counts, strict=True))
                bank.needed = max(bank.needed, need)
            else:
                need = self._slide(bank, rows, counts, window)
            limit = self._limit(bank, window, rows)
            soon = 0 if alone is None else min(limit, alone.fill_length)
            memory = bank.memory
            if need > memory.target_capacity(window) and not self._growth.allows(
                memory.more_bytes(window, need)
            ):
                memory.aim(max(len(bank.rows), len(rows)), {})
            memory.reserve(window, need, limit, max(counts), soon)

    def _limit(self, bank: Bank, window: int | None, rows: Sequence[Row] = ()) -> int:
        """Return the most tokens that a slot will ever hold, for present and joining rows."""
        longest = max(row.max_length for row in [*rows, *bank.rows])
        return longest if window is None else min(longest, self._layout.most(window))

    def _slide(self, bank: Bank, rows: Sequence[Row], counts: Sequence[int], window: int) -> int:
        """Shift the rows whose slots are full. Return the capacity that all of them need."""
        most = self._layout.most(window)
        needs = [0]
        for row, count in zip(rows, counts, strict=True):
            if row.bank is bank and row.held(window) + count > most:
                bank.shift(row, window)
            needs.append(min(most, row.held(window) + count))
        return max(needs)

    def leave(self, rows: Sequence[Row]) -> None:
        """Remove rows from their banks, from each bank all at once; drop banks without rows."""
        remove(rows, self._growth)
        self._banks = [bank for bank in self._banks if bank.rows]

    def fit(self) -> None:
        """Free room that no row needs as far as the limit of memory demands it. The step then has its room."""
        for bank in self._banks:
            if bank.rows and not self._growth.allows(max(0, self.nbytes - self.target_bytes)):
                bank.free_room()
            bank.needed = 0

    def _target(self, group: Sequence[Row]) -> Bank:
        """Return the bank with most of the group's tokens, unless its slots are far too long for the others."""
        banks = list({id(row.bank): row.bank for row in group if row.bank is not None}.values())
        if len(group) == 1 and banks:
            return banks[0]
        longest = 4 * (max(row.length for row in group) + BLOCK)
        fitting = [bank for bank in banks if bank.memory.capacity(None) <= max(SHORT_TOKENS, longest)]
        if not fitting:
            return self._new_bank(len(group))
        return max(fitting, key=lambda bank: sum(row.length + 1 for row in group if row.bank is bank))

    def _new_bank(self, slots: int) -> Bank:
        bank = Bank(self._layout, slots, self._growth)
        self._banks.append(bank)
        return bank


def object_parts(parts: Iterable[CachePart]) -> list[ObjectPart]:
    """Return the parts that have states."""
    return [part for part in parts if isinstance(part, ObjectPart)]


def as_stored(array: Any, plane: Plane) -> mx.array:
    """Return a host array in the type of a plane: it may hold the bits of a type that the host lacks."""
    given = as_device_array(array)
    return given if given.dtype == plane.dtype else given.view(plane.dtype)


def as_device_array(array: Any) -> mx.array:
    """Return a host array as MLX's: one of bfloat16 is here an array of two bytes without a type."""
    return mx.array(array.view("u2")).view(mx.bfloat16) if array.dtype.kind == "V" else mx.array(array)
