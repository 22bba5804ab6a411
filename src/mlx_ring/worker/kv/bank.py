"""Where rows live: side by side in banks, so that a forward pass reads those that step together as a view.

A row that joins, leaves or moves is copied alone. Slots `[0, len(rows))` are taken.

A copy within a bank goes through an evaluated temporary: a lazy view of the array that it is written to
would make MLX copy the whole of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import mlx.core as mx

from mlx_ring.worker.kv.growth import BLOCK, Growth, blocks
from mlx_ring.worker.kv.layers import Layout
from mlx_ring.worker.kv.memory import BankMemory
from mlx_ring.worker.kv.states import RowStates


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
    states: RowStates | None = None
    """For the parts that no bank holds; None before its first pass."""
    lost: str = ""
    """Why the content is gone, if it is."""
    parked: bool = False
    """Whether its sequence has ended and it is kept for forks alone."""

    def base(self, window: int | None) -> int:
        return 0 if window is None else self.bases.get(window, 0)

    def held(self, window: int | None) -> int:
        """Tokens held, from the base on."""
        return self.length - self.base(window)


class Bank:
    """A group of rows, side by side."""

    def __init__(self, layout: Layout, slots: int, growth: Growth) -> None:
        """Room for `slots` rows."""
        self._layout = layout
        self._growth = growth
        self.memory = BankMemory(layout, growth)
        self.memory.aim_slots(slots)
        self.rows: list[Row] = []
        self._used = 0
        """Slots from here on were never written to."""

    @property
    def planes(self) -> list[list[mx.array]]:
        """By part."""
        return self.memory.planes

    @planes.setter
    def planes(self, planes: list[list[mx.array]]) -> None:
        self.memory.planes = planes

    def arrays(self) -> list[mx.array]:
        return [plane for planes in self.planes for plane in planes]

    def make_room(self, rows: Sequence[Row], limits: Mapping[int | None, int]) -> bool:
        """Whether there is room now for rows that join, and for their next tokens; if not, there will be some steps later.

        `limits` says, by window, the most that any row will ever hold. What is aimed at leaves them room to go on meanwhile.
        """
        memory, slots = self.memory, len(self.rows) + len(rows)
        if slots > memory.aimed_slots:
            memory.aim_slots(self._growth.slots(memory.aimed_slots, slots, memory.more_bytes_for_slots))
        needs = {
            window: min(limit, max(row.held(window) for row in rows) + 1) for window, limit in limits.items()
        }
        for window, need in needs.items():
            aimed = memory.aimed_capacity(window)
            if need > aimed:
                more = partial(memory.more_bytes, window)
                memory.aim_capacity(window, self._growth.capacity(aimed, need, limits[window], more))
        return slots <= memory.slots and all(
            need <= memory.capacity(window) for window, need in needs.items()
        )

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
            planes = self.memory.ensure(part)
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
        if len(self.rows) <= self.memory.aimed_slots // 2:
            self.memory.aim_slots(len(self.rows))
            if not self.memory.is_changing:
                self._used = len(self.rows)
        self.tighten()

    def tighten(self) -> None:
        """Give back the better part of slots that are four times as long as any row."""
        longest = max(max(row.length, *row.written.values(), 0) for row in self.rows)
        if self.memory.aimed_capacity(None) > 4 * (longest + BLOCK):
            self.memory.aim_capacity(None, blocks(longest + 1))

    def drop(self) -> None:
        """Give the memory back."""
        self._used = 0
        self.memory.drop()

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
