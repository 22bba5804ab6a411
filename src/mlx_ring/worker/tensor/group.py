"""The ranks of one stage, and what they do together.

Everything here is lazy, and matches by order: each rank must build the same collectives in the same order. They are
computed in that order too, for each waits for the one that was built before it: MLX alone orders what hangs together,
and two graphs that differ in a node may be walked in different ways. Where a collective fails the group is of no use any
more; a process that was in it ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import mlx.core as mx


class Group:
    """The place of this process among ranks that MLX has joined."""

    def __init__(self, joined: mx.distributed.Group) -> None:
        self._joined = joined
        self.rank = joined.rank()
        self.size = joined.size()
        self._last: mx.array | None = None
        """What the last collective of this step gives."""

    def all_sum(self, array: mx.array) -> mx.array:
        """The sum of all ranks' arrays, bit for bit the same on each."""
        self._last = mx.distributed.all_sum(self._in_turn(array), group=self._joined)
        return self._last

    def end_step(self) -> None:
        """What was built and not computed never will be: to every rank alike, for all wait for the end of a step.

        Without this the next step would compute the rest of a pass of which nobody wanted more than the KV, and find that
        it still holds some.
        """
        self._last = None

    def _in_turn(self, array: mx.array) -> mx.array:
        return array if self._last is None else cast("mx.array", mx.depends(array, self._last))

    def all_gather(self, array: mx.array, widths: Sequence[int]) -> mx.array:
        """All ranks' arrays side by side along the last axis, in rank order.

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
        """(ranks, ...): all ranks' arrays, which have one shape."""
        self._last = mx.distributed.all_gather(self._in_turn(array[None]), group=self._joined)
        return self._last

    def from_first(self, array: mx.array) -> mx.array:
        """Rank 0's array. Others give one of the same shape and type, whose content does not matter."""
        return self.all_sum(mx.zeros_like(array) if self.rank else array)
