"""Banks: rows side by side, so that a forward pass reads those that step together as a view.

A row that joins, leaves or moves is copied alone. Slots `[0, len(rows))` are taken.

A copy within a bank uses an evaluated temporary. A lazy view of the array that it is written to
would make MLX copy the whole array.

Rows move layer by layer. Each layer is freed where it was before the next one is copied, so that no more than one is held
twice. Over the limit of memory, room that no row needs is freed at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import mlx.core as mx

from mlx_ring.worker.kv.bank_memory import BLOCK, BankMemory, Growth, blocks
from mlx_ring.worker.kv.layers import Layout, RowPart, RowStates, write


@dataclass(slots=True, eq=False)
class Row:
    """Place and length of one sequence."""

    sequence: int
    max_length: int
    fill_length: int = 0
    """Number of tokens that it is about to hold."""
    length: int = 0
    """Number of committed tokens."""
    bank: Bank | None = None
    slot: int = 0
    bases: dict[int, int] = field(default_factory=dict[int, int])
    """Position of the first token held, by window."""
    written: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    """Number of tokens in place by part and KV head, while content comes from outside."""
    states: RowStates | None = None
    """States that no bank holds; None before the first pass."""
    lost: str = ""
    """Reason for which the content was lost; empty if it was not."""
    retained: bool = False
    """True if its sequence has ended and it is only kept for forks."""

    def base(self, window: int | None) -> int:
        return 0 if window is None else self.bases.get(window, 0)

    def held(self, window: int | None) -> int:
        """Return the number of tokens held, from the base on."""
        return self.length - self.base(window)


class Bank:
    """Group of rows, side by side."""

    def __init__(self, layout: Layout, slots: int, growth: Growth) -> None:
        """Make room for `slots` rows."""
        self.layout = layout
        self._growth = growth
        self.memory = BankMemory(layout, growth)
        self.memory.aim(slots, {})
        self.memory.take_stock()
        self.rows: list[Row] = []
        self.needed = 0
        """Tokens of the longest row in layers with full attention, those of this step included."""
        self._used = 0
        """First slot that was never written to."""

    @property
    def planes(self) -> list[list[mx.array]]:
        """Planes by part."""
        return self.memory.planes

    @planes.setter
    def planes(self, planes: list[list[mx.array]]) -> None:
        self.memory.planes = planes

    def arrays(self) -> list[mx.array]:
        return [plane for planes in self.planes for plane in planes]

    def make_room(self, rows: Sequence[Row], limits: Mapping[int | None, int]) -> bool:
        """Report whether rows that join and their next tokens have room now, or get it while they move.

        If not, they will have it some steps later. Over the limit of memory, they do not wait, because they would be held
        beside that room.

        `limits` gives, by window, the most that any row will ever hold. Until the target is reached, the rows can
        continue elsewhere.
        """
        memory, slots = self.memory, len(self.rows) + len(rows)
        needs = {
            window: min(limit, max(row.held(window) for row in rows) + 1) for window, limit in limits.items()
        }
        has_changed = slots > memory.target_slots
        if has_changed:
            memory.aim(self._growth.slots(memory.target_slots, slots, memory.more_bytes_for_slots), {})
        for window, need in needs.items():
            current = memory.target_capacity(window)
            if need > current:
                more = partial(memory.more_bytes, window)
                capacity = self._growth.capacity(current, need, limits[window], more)
                memory.aim(memory.target_slots, {window: capacity})
                has_changed = True
        if not self._growth.allows(0):
            return True
        if has_changed:
            memory.continue_resizing()
        return slots <= memory.slots and all(
            need <= memory.capacity(window) for window, need in needs.items()
        )

    def take_copy(self, row: Row, source: Bank, origin: int) -> None:
        """Give a new row a slot with a copy of another row's content."""
        slot = len(self.rows)
        for part in self.layout.row_parts:
            self.copy_in(part, slot, row, source, origin)
        self.set_slot(slot, row)

    def set_slot(self, slot: int, row: Row) -> None:
        """Give a row the next slot, which has its content."""
        self._clear(slot, row)
        row.bank, row.slot = self, slot
        self.rows.append(row)

    def copy_in(self, part: RowPart, slot: int, row: Row, source: Bank, origin: int) -> None:
        """Copy a part of the content of `row` from another bank's slot."""
        held = row.held(part.window)
        if not source.planes[part.index] or not held:
            return
        planes = self.memory.ensure(part)
        for position, (plane, other) in enumerate(zip(planes, source.planes[part.index], strict=True)):
            content = other[origin : origin + 1, :, :held]
            if content.shape == plane.shape:
                # MLX would let the plane share the other's memory, and then copy it at its next change.
                content = content + mx.zeros((), content.dtype)
            planes[position] = write(plane, content, slot, 0)
        mx.eval(planes)

    def _clear(self, slot: int, row: Row) -> None:
        """Zero a used slot behind its new row's tokens. Padding must be finite, whatever the last row left."""
        if slot >= self._used:
            self._used = slot + 1
            return
        for part in self.layout.row_parts:
            held = row.held(part.window)
            planes = self.planes[part.index]
            for position, plane in enumerate(planes):
                _, heads, capacity, width = plane.shape
                nothing = mx.zeros((1, heads, capacity - held, width), plane.dtype)
                planes[position] = write(plane, nothing, slot, held)
                mx.eval(planes[position])  # one by one, because the zeros take as much memory as the slot

    def replace(self, row: Row, successor: Row) -> None:
        """Give a row's slot, with its content, to another row."""
        row.bank, successor.bank, successor.slot = None, self, row.slot
        self.rows[successor.slot] = successor

    def aim_at(self, rows: Sequence[Row], slots: int, *, at_once: bool) -> bool:
        """Set the size that these rows need as the target; report whether it changes.

        Slots lose room for tokens if they are four times as long as any row; all that no row needs with `at_once`.
        """
        memory = self.memory
        longest = max(max(row.length, *row.written.values(), 0) for row in rows)
        capacity, need = memory.target_capacity(None), longest + 1
        if at_once:
            soon = rows[0].fill_length if len(rows) == 1 and not rows[0].retained else 0
            need = max(need, self.needed, soon)
        if capacity > (blocks(need) if at_once else 4 * (longest + BLOCK)):
            capacity = blocks(need)
        if (slots, capacity) == (memory.target_slots, memory.target_capacity(None)):
            return False
        memory.aim(slots, {None: capacity} if capacity else {})
        return True

    def tighten(self) -> None:
        """Free most of the slots' room if they are four times as long as any row."""
        if self.aim_at(self.rows, self.memory.target_slots, at_once=False):
            self.memory.continue_resizing()

    def free_room(self) -> None:
        """Free all room that no row needs, at once."""
        self.aim_at(self.rows, len(self.rows), at_once=True)
        self.memory.finish()
        self.note_size()

    def shrink_to(self, row: Row) -> None:
        """Free all room but that of its only row's tokens."""
        self.memory.aim(1, {window: row.held(window) for window in self.layout.kinds})
        self.memory.finish()
        self.note_size()

    def note_size(self) -> None:
        """Note that no slot has leftovers of earlier rows, if all are taken."""
        if not self.memory.is_changing and self.memory.slots == len(self.rows):
            self._used = len(self.rows)

    def drop(self) -> None:
        """Free the memory."""
        self._used = 0
        self.memory.drop()

    def gather(self, group: Sequence[Row]) -> None:
        """Bring rows of this bank side by side; the others keep their order."""
        members = set(map(id, group))
        inside = sorted(group, key=lambda row: row.slot)
        if inside[-1].slot - inside[0].slot == len(inside) - 1:
            return
        outside = [row for row in self.rows if id(row) not in members]
        orders = ([*inside, *outside], [*outside, *inside])
        order = min(orders, key=lambda rows: sum(row.slot != slot for slot, row in enumerate(rows)))
        moves = [(row, slot) for slot, row in enumerate(order) if row.slot != slot]
        for part in self.layout.row_parts:
            self.rearrange(part, moves)
        self.rows = order
        for row, slot in moves:
            row.slot = slot

    def rearrange(self, part: RowPart, moves: Sequence[tuple[Row, int]]) -> None:
        """Copy a part of rows to other slots of this bank, all at once, whole slots."""
        planes = self.planes[part.index]
        for position, plane in enumerate(planes):
            rows = [mx.contiguous(plane[row.slot : row.slot + 1]) for row, _ in moves]
            mx.eval(rows)
            for (_, slot), content in zip(moves, rows, strict=True):
                plane[slot : slot + 1] = content
            del rows
            planes[position] = plane
        mx.eval(planes)

    def shift(self, row: Row, window: int) -> None:
        """Move a sliding row's tokens to the front of its slot, and drop those before window and slack."""
        keep = min(row.held(window), self.layout.keep(window))
        drop = row.held(window) - keep
        if drop <= 0:
            return
        slot = row.slot
        for part in self.layout.row_parts:
            if part.window != window:
                continue
            for plane in self.planes[part.index]:
                content = mx.contiguous(plane[slot : slot + 1, :, drop : drop + keep])
                mx.eval(content)
                plane[slot : slot + 1, :, :keep] = content
                del content
        row.bases[window] = row.base(window) + drop


class Removal:
    """Rows that leave a bank together, one part after the other. The last rows fill their slots."""

    def __init__(self, bank: Bank, leaving: Sequence[Row], growth: Growth, more_bytes: int = 0) -> None:
        """Plan it; `more_bytes` are needed meanwhile. Over the limit of memory, each part is resized at once."""
        ids = set(map(id, leaving))
        count = len(bank.rows) - len(leaving)
        order, rest = bank.rows[:count], [row for row in bank.rows[count:] if id(row) not in ids]
        holes = [slot for slot, row in enumerate(order) if id(row) in ids]
        self.bank, self._leaving = bank, leaving
        self._moves = list(zip(rest, holes, strict=True))
        for row, slot in self._moves:
            order[slot] = row
        self._order = order
        shrinking = max(0, bank.memory.nbytes - bank.memory.target_bytes)
        self._at_once = not growth.allows(more_bytes + shrinking)
        bank.needed = 0
        slots = bank.memory.target_slots
        if self._at_once or count <= slots // 2:
            slots = count
        self._has_changed = bool(order) and bank.aim_at(order, slots, at_once=self._at_once)

    def do(self, part: RowPart) -> None:
        """Remove the rows from a part."""
        if not self._order:
            self.bank.memory.release(part)
            return
        if self._moves:
            self.bank.rearrange(part, self._moves)
        if self._at_once:
            self.bank.memory.bring(part)

    def finish(self) -> None:
        """Record that the rows are removed from every part."""
        bank, memory = self.bank, self.bank.memory
        for row in self._leaving:
            row.bank = None
        for row, slot in self._moves:
            row.slot = slot
        bank.rows = self._order
        if not bank.rows:
            bank.drop()
        elif self._at_once or not self._has_changed:
            memory.take_stock()
        else:
            memory.continue_resizing()
        bank.note_size()

    def fail(self, error: BaseException) -> None:
        """Mark all rows of the bank lost, because some parts were changed and others not."""
        mark_lost(self.bank.rows, str(error) or type(error).__name__)
        self.bank.drop()


def remove(rows: Sequence[Row], growth: Growth) -> None:
    """Remove rows from their banks, of each bank all at once."""
    _carry([], [Removal(bank, leaving, growth) for bank, leaving in _by_bank(rows)])


def move(places: Sequence[tuple[Row, Bank]], growth: Growth) -> None:
    """Move rows to banks with room for them, or give new ones a slot there.

    If that fails, the rows and those of the banks that they leave are lost.
    """
    count = Counter[int]()
    slots: list[tuple[Row, Bank, int]] = []
    for row, bank in places:
        slots.append((row, bank, len(bank.rows) + count[id(bank)]))
        count[id(bank)] += 1
    more = sum(bank.memory.missing_bytes() for bank in {id(bank): bank for _, bank in places}.values())
    rows = [row for row, _ in places]
    removals = [Removal(bank, leaving, growth, more) for bank, leaving in _by_bank(rows)]
    _carry(slots, removals)
    for row, bank, slot in slots:
        bank.memory.take_stock()
        bank.set_slot(slot, row)


def _carry(slots: Sequence[tuple[Row, Bank, int]], removals: Sequence[Removal]) -> None:
    banks = [*(bank for _, bank, _ in slots), *(removal.bank for removal in removals)]
    parts = banks[0].layout.row_parts if banks else ()
    try:
        for part in parts:
            for row, bank, slot in slots:
                bank.memory.make_room(part, slot + 1, row.held(part.window))
                if row.bank is not None:
                    bank.copy_in(part, slot, row, row.bank, row.slot)
            for removal in removals:
                removal.do(part)
    except BaseException as error:
        for removal in removals:
            removal.fail(error)
        raise
    for removal in removals:
        removal.finish()


def _by_bank(rows: Sequence[Row]) -> list[tuple[Bank, list[Row]]]:
    banks = {id(row.bank): row.bank for row in rows if row.bank is not None}.values()
    return [(bank, [row for row in rows if row.bank is bank]) for bank in banks]


def mark_lost(rows: Sequence[Row], reason: str) -> None:
    """Mark rows lost."""
    for row in rows:
        row.lost = (
            f"Sequence {row.sequence} lost its KV in a step that failed ({reason}). "
            "Free it and prefill again."
        )
