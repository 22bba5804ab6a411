"""States that mlx-lm's own caches keep, which no bank holds: recurrent layers' and those of kinds not known here.

Rows that decode together share a pass: their states are put side by side, and stay so as long as the same rows go on
together. Each row knows its place in them.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Sequence
from typing import Any

import mlx.core as mx

from mlx_ring.worker.kv.layers import ObjectPart


class JoinedStates:
    """One state for each object part, of one row or of several side by side."""

    def __init__(self, states: list[Any], rows: int) -> None:
        self.states = states
        self.rows = rows
        self._shape: Hashable = None

    @property
    def nbytes(self) -> int:
        return sum(int(state.nbytes) for state in self.states)

    @property
    def shape(self) -> Hashable:
        """What rows must have alike to be put side by side; for mlx-lm's caches of plain arrays."""
        if self._shape is None:
            self._shape = tuple(
                None if array is None else (array.shape[1:], array.dtype)
                for state in self.states
                for array in state.cache
            )
        return self._shape


class RowStates:
    """One row's place in joined states."""

    __slots__ = ("index", "joined")

    def __init__(self, joined: JoinedStates, index: int) -> None:
        self.joined = joined
        self.index = index

    @property
    def nbytes(self) -> int:
        return self.joined.nbytes // self.joined.rows

    def alone(self, parts: Sequence[ObjectPart]) -> list[Any]:
        """States of this row only, which go on by themselves."""
        if self.joined.rows == 1:
            return [part.copied(state) for part, state in zip(parts, self.joined.states, strict=True)]
        return [_picked(state, self.index) for state in self.joined.states]

    def owned(self, parts: Sequence[ObjectPart]) -> RowStates:
        """The same in memory of its own, so that it keeps no other row's."""
        if self.joined.rows == 1:
            return self
        states = self.alone(parts)
        for state in states:
            # MLX would let a slice share the memory that it is of.
            state.cache = [
                None if array is None else array + mx.zeros((), array.dtype) for array in state.cache
            ]
        mx.eval([array for state in states for array in state.cache if array is not None])
        return RowStates(JoinedStates(states, 1), 0)


def join_states(parts: Sequence[ObjectPart], rows: Sequence[RowStates | None]) -> list[Any]:
    """States for a pass over these rows, which have one shape if they are several. None: a row that begins."""
    if len(rows) == 1:
        (row,) = rows
        if row is None:
            return [part.fresh() for part in parts]
        return row.alone(parts) if all(part.copies for part in parts) else row.joined.states
    known = [row for row in rows if row is not None]
    joined = known[0].joined
    if joined.rows == len(rows) and all(
        row.joined is joined and row.index == index for index, row in enumerate(known)
    ):
        return [part.copied(state) for part, state in zip(parts, joined.states, strict=True)]
    return [_side_by_side(states) for states in zip(*(row.alone(parts) for row in known), strict=True)]


def _picked(state: Any, index: int) -> Any:
    one = copy.copy(state)
    one.cache = [None if array is None else array[index : index + 1] for array in state.cache]
    return one


def _side_by_side(states: Sequence[Any]) -> Any:
    joined = copy.copy(states[0])
    joined.cache = [
        None if arrays[0] is None else mx.concatenate(list(arrays))
        for arrays in zip(*(state.cache for state in states), strict=True)
    ]
    return joined
