"""Ranks of one stage, and their collectives.

Everything here is lazy, and matches by order: each rank must build the same collectives in the same order. They are
also computed in that order, because each depends on the one built before. MLX only orders dependent arrays, and may
walk two graphs that differ in a node in different ways. If a collective fails, the group is unusable and its processes
end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import mlx.core as mx


class Group:
    """Place of this process among ranks that MLX has joined."""

    def __init__(self, joined: mx.distributed.Group) -> None:
        self.joined = joined
        self.rank = joined.rank()
        self.size = joined.size()
        self._last: mx.array | None = None
        """Result of the last collective of this step."""

    def all_sum(self, array: mx.array) -> mx.array:
        """Return the sum of all ranks' arrays, with the same bits on each."""
        self._last = mx.distributed.all_sum(self.in_turn(array), group=self.joined)
        return self._last

    def end_step(self) -> None:
        """Drop what was built and not computed. All ranks do this alike, because all wait for the end of a step.

        Otherwise the next step would compute the rest of a pass of which only the KV was needed, and keep
        some of it alive.
        """
        self._last = None

    def follow(self, array: mx.array) -> None:
        """Take an array that is computed by sums of its own, after those so far."""
        self._last = array

    def in_turn(self, array: mx.array) -> mx.array:
        """Return the array as computed after all collectives so far."""
        return array if self._last is None else cast("mx.array", mx.depends(array, self._last))

    def all_gather(self, array: mx.array, widths: Sequence[int]) -> mx.array:
        """Return all ranks' arrays side by side along the last axis, in rank order.

        Args:
            array: (..., own width).
            widths: of every rank, in order; the collective itself takes equal ones.
        """
        longest = max(widths)
        if array.shape[-1] < longest:
            array = mx.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, longest - array.shape[-1])])
        parts = self.stack(array)
        return mx.concatenate([parts[rank, ..., :width] for rank, width in enumerate(widths)], axis=-1)

    def stack(self, array: mx.array) -> mx.array:
        """Return (ranks, ...): all ranks' arrays, which have one shape."""
        self._last = mx.distributed.all_gather(self.in_turn(array[None]), group=self.joined)
        return self._last

    def from_first(self, array: mx.array) -> mx.array:
        """Return rank 0's array. Others pass one of the same shape and type, whose content does not matter."""
        return self.all_sum(mx.zeros_like(array) if self.rank else array)
