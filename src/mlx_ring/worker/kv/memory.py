"""The arrays of one bank, and how they grow and shrink: a few in each step, so that no step waits for all.

A bank is one array for each plane of each layer, `(slots, heads, capacity, width)`. Another size means copying
them all. So a size is aimed at, and every step brings some arrays to it; what the bank offers is what all of
them have. Only tokens that have no place otherwise are not kept waiting.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import mlx.core as mx

from mlx_ring.worker.kv.growth import GROWS_AHEAD, STEPS, Growth
from mlx_ring.worker.kv.layers import Layout, RowPart


class BankMemory:
    """Planes of one bank. Capacities are by window, in tokens; None is for layers that see everything."""

    def __init__(self, layout: Layout, growth: Growth) -> None:
        self._layout = layout
        self._growth = growth
        self.planes: list[list[mx.array]] = [[] for _ in layout.row_parts]
        self.nbytes = 0
        self.slots = 0
        self._capacities: dict[int | None, int] = {}
        self._aimed_slots = 0
        self._aimed: dict[int | None, int] = {}
        self.is_changing = False
        """Whether some arrays have not come to the size that is aimed at."""

    @property
    def aimed_slots(self) -> int:
        return self._aimed_slots

    def capacity(self, window: int | None) -> int:
        """Tokens that every slot has room for, in the layers with this window."""
        return self._capacities.get(window, 0)

    def aimed_capacity(self, window: int | None) -> int:
        return self._aimed.get(window, 0)

    def ensure(self, part: RowPart) -> list[mx.array]:
        """The part's arrays, made when its first keys and values come."""
        planes = self.planes[part.index]
        if not planes and part.planes:
            slots, capacity = self._aimed_slots, self._aimed[part.window]
            planes = [
                mx.zeros((slots, plane.heads, capacity, plane.width), plane.dtype) for plane in part.planes
            ]
            self.planes[part.index] = planes
            self._take_stock()
        return planes

    def aim_slots(self, slots: int) -> None:
        """Have room for so many rows, soon."""
        self._aimed_slots = slots
        self.go_on()

    def aim_capacity(self, window: int | None, capacity: int) -> None:
        """Have room for so many tokens in every slot, soon."""
        self._aimed[window] = capacity
        self.go_on()

    def reserve(self, window: int | None, need: int, limit: int, count: int = 1) -> None:
        """Have room for `need` tokens now, and for more soon where few are left. No row will hold more than `limit`.

        `count` of them are this step's: the next steps may want as many each.
        """
        target = self._target(window, need, limit)
        if target > self.aimed_capacity(window):
            self.aim_capacity(window, target)
        if need > self.capacity(window):
            for planes, position, part in self._behind():
                if part.window == window:
                    self._resize(planes, position, part)
            self._take_stock()
        elif self.is_changing:
            self._hurry((self.capacity(window) - need) // count + 1)

    def _target(self, window: int | None, need: int, limit: int) -> int:
        """The capacity to aim at."""
        aimed = self.aimed_capacity(window)
        if need <= aimed and (aimed >= limit or need + GROWS_AHEAD <= aimed):
            return aimed
        return self._growth.capacity(aimed, need, limit, lambda capacity: self.more_bytes(window, capacity))

    def more_bytes(self, window: int | None, capacity: int) -> int:
        """What another capacity would add to the size that is aimed at."""
        return self._bytes(self._aimed_slots, {**self._aimed, window: capacity}) - self.aimed_bytes

    def more_bytes_for_slots(self, slots: int) -> int:
        """What another number of slots would add to the size that is aimed at."""
        return self._bytes(slots, self._aimed) - self.aimed_bytes

    @property
    def aimed_bytes(self) -> int:
        """What the arrays take at the size that is aimed at."""
        return self._bytes(self._aimed_slots, self._aimed)

    def _bytes(self, slots: int, capacities: Mapping[int | None, int]) -> int:
        """Of the parts that have arrays."""
        return slots * sum(
            plane.heads * plane.width * plane.dtype.size * capacities.get(part.window, 0)
            for part in self._layout.row_parts
            if self.planes[part.index]
            for plane in part.planes
        )

    def _hurry(self, steps: int) -> None:
        """Be done in so many steps, if the usual pace is too slow."""
        if steps < STEPS:
            behind = sum(planes[position].nbytes for planes, position, _ in self._behind())
            self._bring(behind // steps)

    def grows(self, window: int | None, need: int, limit: int) -> bool:
        """Whether `reserve` would copy."""
        return need > self.capacity(window) or self._target(window, need, limit) > self.aimed_capacity(window)

    def go_on(self) -> None:
        """Bring some arrays to the size that is aimed at."""
        self._bring(max(self._growth.step_bytes, self.nbytes // STEPS))

    def _bring(self, most: int) -> None:
        """Arrays of `most` bytes, or a little more, to the size that is aimed at."""
        written = 0
        for planes, position, part in self._behind():
            if written >= most:
                break
            written += self._resize(planes, position, part)
        self._take_stock()

    def drop(self) -> None:
        """Give the memory back."""
        self.planes = [[] for _ in self._layout.row_parts]
        self._aimed_slots = 0
        self._take_stock()

    def _behind(self) -> Iterator[tuple[list[mx.array], int, RowPart]]:
        for part in self._layout.row_parts:
            planes = self.planes[part.index]
            for position, plane in enumerate(planes):
                if (plane.shape[0], plane.shape[2]) != (self._aimed_slots, self._aimed[part.window]):
                    yield planes, position, part

    def _resize(self, planes: list[mx.array], position: int, part: RowPart) -> int:
        """One array, so that no more than one is held twice; the bytes of the new one."""
        planes[position] = _resized(planes[position], 0, self._aimed_slots)
        planes[position] = _resized(planes[position], 2, self._aimed[part.window])
        mx.eval(planes[position])
        return planes[position].nbytes

    def _take_stock(self) -> None:
        """What all arrays have is what there is."""
        self.slots, self._capacities = self._aimed_slots, dict(self._aimed)
        self.is_changing = False
        self.nbytes = sum(plane.nbytes for planes in self.planes for plane in planes)
        for planes, position, part in self._behind():
            slots, _, capacity, _ = planes[position].shape
            self.slots = min(self.slots, slots)
            self._capacities[part.window] = min(self._capacities[part.window], capacity)
            self.is_changing = True


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
