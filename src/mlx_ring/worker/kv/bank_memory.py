"""Memory of a bank, and how it grows.

A bank is one array for each plane of each layer, `(slots, heads, capacity, width)`. Another size means copying
them all. So a bank has a target size, and each step resizes some arrays to it; the usable size is what all of them
have. Only tokens that have no other place are not kept waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import mlx.core as mx

from mlx_ring.worker.kv.layers import Layout, RowPart, resized

SHORT_TOKENS = 512
"""Length below which padding costs less than another pass."""
BLOCK = 256
GROWS_AHEAD = 64
"""Number of free tokens at which a bank begins to grow."""
STEP_BYTES = 32 << 20
"""Number of bytes that a step may write to resize arrays ..."""
STEPS = 32
"""... or more, if that number of steps would not suffice."""


def blocks(tokens: int) -> int:
    """Round tokens up to whole blocks."""
    return -(-tokens // BLOCK) * BLOCK


@dataclass(slots=True)
class Growth:
    """Growth of one store's banks."""

    held: Callable[[], int]
    """Function that returns the bytes of all banks at their target sizes."""
    step_bytes: int = STEP_BYTES
    limit_bytes: int | None = None
    """Bytes that banks may hold; room ahead of need stays within it."""

    def capacity(self, present: int, need: int, most: int, more: Callable[[int], int]) -> int:
        """Return the tokens for a slot that has room for `present` and is about to need more.

        It grows by a quarter, by a block or two, or by as little as it must: as much as the limit allows.

        Args:
            present: tokens of the target so far.
            need: tokens, now.
            most: tokens that any row will ever need.
            more: returns the bytes that a capacity would add.
        """
        ahead = blocks(need + GROWS_AHEAD)
        generous = max(ahead, blocks(present + max(BLOCK, present // 4)) if present else 0)
        for capacity in (min(generous, max(most, need)), min(ahead, max(most, need))):
            if self.allows(more(capacity)):
                return max(present, capacity)
        return max(present, min(blocks(need), max(most, need)))

    def slots(self, present: int, need: int, more: Callable[[int], int]) -> int:
        """Return the slots of a bank that has `present` and needs more.

        `more` returns the bytes that a number of them would add.
        """
        generous = max(need, present * 3 // 2)
        return generous if self.allows(more(generous)) else need

    def allows(self, more_bytes: int) -> bool:
        """Return True if banks may hold more bytes."""
        return self.limit_bytes is None or self.held() + more_bytes <= self.limit_bytes


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
            self.take_stock()
        return planes

    def aim(self, slots: int, capacities: Mapping[int | None, int]) -> None:
        """Set the target number of rows, and of tokens in every slot by window, without resizing anything."""
        self._target_slots = slots
        self._targets.update(capacities)

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
            self.aim(self._target_slots, {window: target})
            self.continue_resizing()
        if need > self.capacity(window):
            for planes, position, part in self._behind():
                if part.window == window:
                    self._resize(planes, position, part)
            self.take_stock()
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
            self._bring(-(-behind // steps))

    def grows(self, window: int | None, need: int, limit: int) -> bool:
        """Report whether `reserve` would copy."""
        return need > self.capacity(window) or self._target(window, need, limit) > self.target_capacity(
            window
        )

    def continue_resizing(self) -> None:
        """Resize some arrays to the target."""
        self._bring(max(self._growth.step_bytes, -(-self.nbytes // STEPS)))

    def finish(self) -> None:
        """Resize all arrays to the target, one by one."""
        self._bring(self.nbytes + self.target_bytes)

    def bring(self, part: RowPart) -> None:
        """Resize the arrays of a part to the target. Call `take_stock` after the last part."""
        for planes, position, behind in self._behind():
            if behind is part:
                self._resize(planes, position, part)

    def make_room(self, part: RowPart, slots: int, tokens: int) -> None:
        """Resize the arrays of a part to the target, if they have no room for rows or tokens."""
        if any(plane.shape[0] < slots or plane.shape[2] < tokens for plane in self.planes[part.index]):
            self.bring(part)

    def release(self, part: RowPart) -> None:
        """Free the arrays of a part."""
        self.planes[part.index] = []

    def missing_bytes(self) -> int:
        """Return the bytes of the parts without arrays, at the target size."""
        return self._target_slots * sum(
            plane.heads * plane.width * plane.dtype.size * self._targets.get(part.window, 0)
            for part in self._layout.row_parts
            if not self.planes[part.index]
            for plane in part.planes
        )

    def _bring(self, most: int) -> None:
        """Resize arrays of `most` bytes, or a little more, to the target."""
        written = 0
        for planes, position, part in self._behind():
            if written >= most:
                break
            written += self._resize(planes, position, part)
        self.take_stock()

    def drop(self) -> None:
        """Free the memory."""
        self.planes = [[] for _ in self._layout.row_parts]
        self._target_slots = 0
        self.take_stock()

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

    def take_stock(self) -> None:
        """Set the usable size to what all arrays have."""
        self.slots, self._capacities = self._target_slots, dict(self._targets)
        self.is_changing = False
        self.nbytes = sum(plane.nbytes for planes in self.planes for plane in planes)
        for planes, position, part in self._behind():
            slots, _, capacity, _ = planes[position].shape
            self.slots = min(self.slots, slots)
            self._capacities[part.window] = min(self._capacities[part.window], capacity)
            self.is_changing = True
