"""Banks: rows side by side, so that a forward pass reads those that step together as a view.

A row that joins, leaves or moves is copied alone. Slots `[0, len(rows))` are taken.

A copy within a bank uses an evaluated temporary. A lazy view of the array that it is written to
would make MLX copy the whole array.

A bank is one array for each plane of each layer, `(slots, heads, capacity, width)`. Another size means copying
them all. So a bank has a target size, and each step resizes some arrays to it; the usable size is what all of them
have. Only tokens that have no other place are not kept waiting.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import mlx.core as mx

from mlx_cpu_kernels.decoder_layers import append
from mlx_ring.worker.kv.grouping import BLOCK, GROWS_AHEAD, STEPS, Growth, blocks
from mlx_ring.worker.kv.layers import Layout, RowPart, RowStates


def write(plane: mx.array, rows: mx.array, slot: int, begin: int) -> mx.array:
    """Write `(slots, heads, tokens, width)` into a plane, from a slot and an index in it on.

    Return the plane to use from then on. The native kernels change it in place, whatever else has it: a slot is read
    only up to its row's length.
    """
    written = append(plane, rows.astype(plane.dtype), slot, begin)
    if written is not None:
        return written
    plane[slot : slot + rows.shape[0], :, begin : begin + rows.shape[2]] = rows
    return plane


def write_each(plane: mx.array, rows: mx.array, slots: mx.array, begins: mx.array) -> mx.array:
    """Write one token of each row, `(rows, heads, 1, width)`, at its own slot and index. Return the plane to use.

    It is one operation, which a GPU starts sooner than one for each row.
    """
    plane[slots, :, begins] = rows[:, :, 0].astype(plane.dtype)
    return plane


class BankMemory:
    """Planes of one bank. Capacities are by window, in tokens; the window None is for full attention."""

    def __init__(self, layout: Layout, growth: Growth) -> None:
        self._layout = layout
        self._growth = growth
        self.planes: list[list[mx.array]] = [[] for _ in layout.row_parts]
        self.nbytes = 0
        self.slots = 0
        self._capacities: dict[int | None, int] = {}
        self._target_slots = 0
        self._targets: dict[int | None, int] = {}
        self.is_changing = False
        """True if some arrays do not have the target size."""

    @property
    def target_slots(self) -> int:
        return self._target_slots

    def capacity(self, window: int | None) -> int:
        """Return the number of tokens for which every slot has room, in the layers with this window."""
        return self._capacities.get(window, 0)

    def target_capacity(self, window: int | None) -> int:
        return self._targets.get(window, 0)

    def ensure(self, part: RowPart) -> list[mx.array]:
        """Return the part's arrays; make them when its first keys and values come."""
        planes = self.planes[part.index]
        if not planes and part.planes:
            slots, capacity = self._target_slots, self._targets[part.window]
            planes = [
                mx.zeros((slots, plane.heads, capacity, plane.width), plane.dtype) for plane in part.planes
            ]
            self.planes[part.index] = planes
            self._take_stock()
        return planes

    def set_target_slots(self, slots: int) -> None:
        """Set the target number of rows."""
        self._target_slots = slots
        self.continue_resizing()

    def set_target_capacity(self, window: int | None, capacity: int) -> None:
        """Set the target number of tokens in every slot."""
        self._targets[window] = capacity
        self.continue_resizing()

    def reserve(self, window: int | None, need: int, limit: int, count: int = 1, soon: int = 0) -> None:
        """Make room for `need` tokens now, and for more soon if few are left. No row will hold more than `limit`.

        Args:
            window: the window of the layers.
            need: tokens, those of this step included.
            limit: the most that a row will ever hold.
            count: tokens of this step; the next steps may need as many each.
            soon: tokens that are about to be needed. There is room for them at once, if memory allows it.
        """
        target = self._target(window, need, limit)
        ahead = min(limit, blocks(soon + GROWS_AHEAD))
        if need < soon and target < ahead and self._growth.allows(self._new_bytes(window, ahead)):
            target = ahead
        if target > self.target_capacity(window):
            self.set_target_capacity(window, target)
        if need > self.capacity(window):
            for planes, position, part in self._behind():
                if part.window == window:
                    self._resize(planes, position, part)
            self._take_stock()
        elif self.is_changing:
            self._hurry((self.capacity(window) - need) // count + 1)

    def _target(self, window: int | None, need: int, limit: int) -> int:
        """Return the target capacity."""
        current = self.target_capacity(window)
        if need <= current and (current >= limit or need + GROWS_AHEAD <= current):
            return current
        return self._growth.capacity(current, need, limit, lambda capacity: self.more_bytes(window, capacity))

    def more_bytes(self, window: int | None, capacity: int) -> int:
        """Return the bytes that another capacity would add to the target size."""
        return self._bytes(self._target_slots, {**self._targets, window: capacity}) - self.target_bytes

    def _new_bytes(self, window: int | None, capacity: int) -> int:
        """Return the bytes that a larger capacity would add, those of parts without arrays included."""
        return sum(
            self._target_slots * plane.heads * plane.width * plane.dtype.size * (capacity - present)
            for part in self._layout.row_parts
            if part.window == window
            for present in [self._targets.get(window, 0) if self.planes[part.index] else 0]
            for plane in part.planes
        )

    def more_bytes_for_slots(self, slots: int) -> int:
        """Return the bytes that another number of slots would add to the target size."""
        return self._bytes(slots, self._targets) - self.target_bytes

    @property
    def target_bytes(self) -> int:
        """Bytes of the arrays at the target size."""
        return self._bytes(self._target_slots, self._targets)

    def _bytes(self, slots: int, capacities: Mapping[int | None, int]) -> int:
        """Return the bytes of the parts that have arrays."""
        return slots * sum(
            plane.heads * plane.width * plane.dtype.size * capacities.get(part.window, 0)
            for part in self._layout.row_parts
            if self.planes[part.index]
            for plane in part.planes
        )

    def _hurry(self, steps: int) -> None:
        """Finish within a number of steps, if the usual speed is too slow."""
        if steps < STEPS:
            behind = sum(planes[position].nbytes for planes, position, _ in self._behind())
            self._bring(behind // steps)

    def grows(self, window: int | None, need: int, limit: int) -> bool:
        """Report whether `reserve` would copy."""
        return need > self.capacity(window) or self._target(window, need, limit) > self.target_capacity(
            window
        )

    def continue_resizing(self) -> None:
        """Resize some arrays to the target."""
        self._bring(max(self._growth.step_bytes, self.nbytes // STEPS))

    def _bring(self, most: int) -> None:
        """Resize arrays of `most` bytes, or a little more, to the target."""
        written = 0
        for planes, position, part in self._behind():
            if written >= most:
                break
            written += self._resize(planes, position, part)
        self._take_stock()

    def drop(self) -> None:
        """Free the memory."""
        self.planes = [[] for _ in self._layout.row_parts]
        self._target_slots = 0
        self._take_stock()

    def _behind(self) -> Iterator[tuple[list[mx.array], int, RowPart]]:
        for part in self._layout.row_parts:
            planes = self.planes[part.index]
            for position, plane in enumerate(planes):
                if (plane.shape[0], plane.shape[2]) != (self._target_slots, self._targets[part.window]):
                    yield planes, position, part

    def _resize(self, planes: list[mx.array], position: int, part: RowPart) -> int:
        """Resize one array, so that no more than one is held twice. Return the new one's bytes."""
        planes[position] = resized(planes[position], 0, self._target_slots)
        planes[position] = resized(planes[position], 2, self._targets[part.window])
        mx.eval(planes[position])
        return planes[position].nbytes

    def _take_stock(self) -> None:
        """Set the usable size to what all arrays have."""
        self.slots, self._capacities = self._target_slots, dict(self._targets)
        self.is_changing = False
        self.nbytes = sum(plane.nbytes for planes in self.planes for plane in planes)
        for planes, position, part in self._behind():
            slots, _, capacity, _ = planes[position].shape
            self.slots = min(self.slots, slots)
            self._capacities[part.window] = min(self._capacities[part.window], capacity)
            self.is_changing = True


def resized(plane: mx.array, axis: int, size: int) -> mx.array:
    """Cut off or pad with zeros along an axis."""
    present = plane.shape[axis]
    if size == present:
        return plane
    if size < present:
        return mx.contiguous(plane[:size] if axis == 0 else plane[:, :, :size])
    shape = list(plane.shape)
    shape[axis] = size - present
    return mx.concatenate([plane, mx.zeros(shape, plane.dtype)], axis=axis)


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
        self._layout = layout
        self._growth = growth
        self.memory = BankMemory(layout, growth)
        self.memory.set_target_slots(slots)
        self.rows: list[Row] = []
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
        """Report whether rows that join and their next tokens have room now.

        If not, they will have it some steps later.

        `limits` gives, by window, the most that any row will ever hold. Until the target is reached, the rows can
        continue elsewhere.
        """
        memory, slots = self.memory, len(self.rows) + len(rows)
        if slots > memory.target_slots:
            memory.set_target_slots(
                self._growth.slots(memory.target_slots, slots, memory.more_bytes_for_slots)
            )
        needs = {
            window: min(limit, max(row.held(window) for row in rows) + 1) for window, limit in limits.items()
        }
        for window, need in needs.items():
            current = memory.target_capacity(window)
            if need > current:
                more = partial(memory.more_bytes, window)
                memory.set_target_capacity(window, self._growth.capacity(current, need, limits[window], more))
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
        self._set_slot(slot, row)

    def take_copy(self, row: Row, source: Bank, origin: int) -> None:
        """Give a new row a slot with a copy of another row's content."""
        slot = len(self.rows)
        self._copy_in(slot, row, source, origin)
        self._set_slot(slot, row)

    def _set_slot(self, slot: int, row: Row) -> None:
        self._clear(slot, row)
        row.bank, row.slot = self, slot
        self.rows.append(row)

    def _copy_in(self, slot: int, row: Row, source: Bank, origin: int) -> None:
        """Copy the content of `row` from another bank's slot."""
        for part in self._layout.row_parts:
            held = row.held(part.window)
            if not source.planes[part.index] or not held:
                continue
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
        for part in self._layout.row_parts:
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

    def remove(self, row: Row) -> None:
        """Remove a row; the last row fills its slot."""
        last = self.rows.pop()
        row.bank = None
        if last is not row:
            self._rearrange([(last, row.slot)])
            self.rows[row.slot] = last
            last.slot = row.slot
        if not self.rows:
            self.drop()
            return
        if len(self.rows) <= self.memory.target_slots // 2:
            self.memory.set_target_slots(len(self.rows))
            if not self.memory.is_changing:
                self._used = len(self.rows)
        self.tighten()

    def tighten(self) -> None:
        """Free most of the slots' room if they are four times as long as any row."""
        longest = max(max(row.length, *row.written.values(), 0) for row in self.rows)
        if self.memory.target_capacity(None) > 4 * (longest + BLOCK):
            self.memory.set_target_capacity(None, blocks(longest + 1))

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
        """Move a sliding row's tokens to the front of its slot, and drop those before window and slack."""
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
