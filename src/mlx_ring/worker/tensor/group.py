"""The ranks of one stage, and what they do together.

Everything here is lazy, and matches by order: each rank must build the same collectives and have them evaluated in the
same order. Where one fails the group is of no use any more; a process that was in it ends.
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

    def all_sum(self, array: mx.array) -> mx.array:
        """The sum of all ranks' arrays, bit for bit the same on each."""
        return mx.distributed.all_sum(array, group=self._joined)

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
        return mx.distributed.all_gather(array[None], group=self._joined)

    def from_first(self, array: mx.array) -> mx.array:
        """Rank 0's array. Others give one of the same shape and type, whose content does not matter."""
        if self.rank:
            # What it stands for must come first here too, with the collectives in it: they match by order.
            array = cast("mx.array", mx.depends(mx.zeros_like(array), array))
        return self.all_sum(array)
