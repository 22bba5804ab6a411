"""Where rows live: one array for each plane of each layer, `(slots, heads, capacity, width)`.

Rows that step together lie side by side in one bank, so that a forward pass reads them as a view. A row
that joins, leaves, grows or moves is copied alone, except when the bank itself grows, which happens in
growing steps. Slots `[0, len(rows))` are taken.

A copy within a bank goes through an evaluated temporary: a lazy view of the array that it is written to
would make MLX copy the whole of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from mlx_ring.worker.kv.layers import Layout, RowPart

BLOCK = 256


@dataclass(slots=True, eq=False)
class Row:
    """One sequence's place and length."""

    sequence: int
    max_length: int
    length: int = 0
    """Committed tokens."""
    bank: Bank | None = None
    slot: int = 0
    bases: dict[int, int] = field(default_factory=dict[int, int])
    """By window: the position of the first token held."""
    written: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    """By part and KV head, while content comes from outside: tokens up to here are in their place."""
    states: list[Any] = field(default_factory=list[Any])
    """mlx-lm's own caches for the parts that no bank holds."""
    lost: str = ""
    """Why the content is gone, if it is."""
    parked: bool = False
    """Whether its sequence has ended and it is kept for forks alone."""

    def base(self, window: int | None) -> int:
        return 0 if window is None else self.bases.get(window, 0)

    def held(self, window: int | None) -> int:
        """Tokens held, from the base on."""
        return self.length - self.base(window)


def grown(present: int, need: int) -> int:
    """A capacity of at least `need`: by blocks, and by a quarter where a block is less than that."""
    wanted = max(need, present + max(BLOCK, present // 4)) if present else need
    return -(-wanted // BLOCK) * BLOCK


class Bank:
    """A group of rows, side by side."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self.rows: list[Row] = []
        self.slots = 0
        self.capacities: dict[int | None, int] = {}
        self.planes: list[list[mx.array]] = [[] for _ in layout.row_parts]
        self._used = 0

    @property
    def nbytes(self) -> int:
        return sum(plane.nbytes for planes in self.planes for plane in planes)

    def arrays(self) -> list[mx.array]:
        return [plane for planes in self.planes for plane in planes]

    def ensure_planes(self, part: RowPart) -> list[mx.array]:
        """The part's arrays, made when its first keys and values come."""
        planes = self.planes[part.index]
        if not planes and part.planes:
            capacity = self.capacities[part.window]
            planes = [
                mx.zeros((self.slots, plane.heads, capacity, plane.width), plane.dtype)
                for plane in part.planes
            ]
            self.planes[part.index] = planes
        return planes

    def reserve(self, window: int | None, need: int, limit: int) -> None:
        """Make room for `need` tokens in every row of the layers with this window.

        `limit` is the most that any row will ever hold.
        """
        present = self.capacities.get(window, 0)
        if need > present:
            self._set_capacity(window, min(grown(present, need), max(limit, need)))

    def _set_capacity(self, window: int | None, capacity: int) -> None:
        self.capacities[window] = capacity
        for part in self._layout.row_parts:
            if part.window == window:
                self._resize(part.index, 2, capacity)

    def _resize(self, index: int, axis: int, size: int) -> None:
        """One plane at a time, so that no more than one is held twice."""
        planes = self.planes[index]
        for position in range(len(planes)):
            planes[position] = _resized(planes[position], axis, size)
            mx.eval(planes[position])

    def set_slots(self, slots: int) -> None:
        """Hold room for this many rows. Copies the bank, so it is asked for in growing steps."""
        if slots == self.slots:
            return
        self.slots = slots
        self._used = min(self._used, slots)
        for index in range(len(self.planes)):
            self._resize(index, 0, slots)

    def take(self, row: Row) -> None:
        """Move a row in from its bank, or give a new row a slot. The caller has made room."""
        source, origin = row.bank, row.slot
        slot = len(self.rows)
        if source is not None:
            self._copy_in(slot, row, source, origin)
            source.remove(row)
        self._seat(slot, row)

    def take_copy(self, row: Row, source: Bank, origin: int) -> None:
        """Give a new row a slot with what it holds of another's."""
        slot = len(self.rows)
        self._copy_in(slot, row, source, origin)
        self._seat(slot, row)

    def _seat(self, slot: int, row: Row) -> None:
        self._clear(slot, row)
        row.bank, row.slot = self, slot
        self.rows.append(row)

    def _copy_in(self, slot: int, row: Row, source: Bank, origin: int) -> None:
        """Copy what `row` holds from another bank's slot."""
        for part in self._layout.row_parts:
            held = row.held(part.window)
            if not source.planes[part.index] or not held:
                continue
            planes = self.ensure_planes(part)
            for plane, other in zip(planes, source.planes[part.index], strict=True):
                content = other[origin : origin + 1, :, :held]
                if content.shape == plane.shape:
                    # MLX would let the plane share the other's memory, which would then be copied at its next change.
                    content = content + mx.zeros((), content.dtype)
                plane[slot : slot + 1, :, :held] = content
            mx.eval(planes)

    def _clear(self, slot: int, row: Row) -> None:
        """Zero a used slot behind its new row's tokens: padding must be finite, whatever the last row left."""
        if slot >= self._used:
            self._used = slot + 1
            return
        for part in self._layout.row_parts:
            held = row.held(part.window)
            for plane in self.planes[part.index]:
                plane[slot : slot + 1, :, held:] = mx.zeros((), plane.dtype)
            mx.eval(self.planes[part.index])

    def replace(self, row: Row, successor: Row) -> None:
        """Give a row's slot, with all that is in it, to another."""
        row.bank, successor.bank, successor.slot = None, self, row.slot
        self.rows[successor.slot] = successor

    def remove(self, row: Row) -> None:
        """Let a row go; the last row fills its slot."""
        last = self.rows.pop()
        row.bank = None
        if last is not row:
            self._rearrange([(last, row.slot)])
            self.rows[row.slot] = last
            last.slot = row.slot
        if not self.rows:
            self.drop()
            return
        if len(self.rows) <= self.slots // 2:
            self.set_slots(len(self.rows))
        self.tighten()

    def tighten(self) -> None:
        """Give back the better part of slots that are four times as long as any row."""
        longest = max(row.length for row in self.rows)
        if self.capacities.get(None, 0) > 4 * (longest + BLOCK):
            self._set_capacity(None, grown(0, longest + 1))

    def drop(self) -> None:
        """Give the memory back."""
        self.slots = self._used = 0
        self.planes = [[] for _ in self._layout.row_parts]

    def gather(self, group: Sequence[Row]) -> None:
        """Bring rows of this bank side by side, the others keeping their order."""
        members = set(map(id, group))
        inside = sorted(group, key=lambda row: row.slot)
        if inside[-1].slot - inside[0].slot == len(inside) - 1:
            return
        outside = [row for row in self.rows if id(row) not in members]
        orders = ([*inside, *outside], [*outside, *inside])
        order = min(orders, key=lambda rows: sum(row.slot != slot for slot, row in enumerate(rows)))
        moves = [(row, slot) for slot, row in enumerate(order) if row.slot != slot]
        self._rearrange(moves)
        self.rows = order
        for row, slot in moves:
            row.slot = slot

    def _rearrange(self, moves: list[tuple[Row, int]]) -> None:
        """Copy rows to other slots of this bank, all at once, whole slots."""
        for index, planes in enumerate(self.planes):
            for position, plane in enumerate(planes):
                rows = [mx.contiguous(plane[row.slot : row.slot + 1]) for row, _ in moves]
                mx.eval(rows)
                for (_, slot), content in zip(moves, rows, strict=True):
                    plane[slot : slot + 1] = content
                del rows
                self.planes[index][position] = plane
            mx.eval(planes)

    def shift(self, row: Row, window: int) -> None:
        """Move a sliding row's tokens to the front of its slot, dropping what is past window and slack."""
        keep = min(row.held(window), self._layout.keep(window))
        drop = row.held(window) - keep
        if drop <= 0:
            return
        slot = row.slot
        for part in self._layout.row_parts:
            if part.window != window:
                continue
            for plane in self.planes[part.index]:
                content = mx.contiguous(plane[slot : slot + 1, :, drop : drop + keep])
                mx.eval(content)
                plane[slot : slot + 1, :, :keep] = content
                del content
        row.bases[window] = row.base(window) + drop


def _resized(plane: mx.array, axis: int, size: int) -> mx.array:
    """Cut off or pad with zeros along an axis."""
    present = plane.shape[axis]
    if size == present:
        return plane
    if size < present:
        return mx.contiguous(plane[:size] if axis == 0 else plane[:, :, :size])
    shape = list(plane.shape)
    shape[axis] = size - present
    return mx.concatenate([plane, mx.zeros(shape, plane.dtype)], axis=axis)
