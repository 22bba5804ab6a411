"""One forward pass over rows of a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import mlx.core as mx

from mlx_ring.worker.kv.rows import BatchRows
from mlx_ring.worker.kv.states import RowStates


@dataclass(slots=True, eq=False)
class Batch:
    """One forward pass: `(len(rows), max(counts))` tokens, padded on the right."""

    rows: tuple[int, ...]
    """Indices into the rows that were asked for, in the order of the batch."""
    counts: tuple[int, ...]
    """Real tokens of each row."""
    caches: list[Any]
    """One for each owned layer, with mlx-lm's cache interface."""
    offset: int | mx.array
    """Position of the first token: one for all rows, or `(batch,)`."""
    members: BatchRows = field(repr=False)
    states: list[Any] = field(default_factory=list[Any], repr=False)
    states_before: list[RowStates | None] = field(default_factory=list["RowStates | None"], repr=False)
    """The rows' states when the batch was begun."""
    planes_before: list[list[mx.array]] | None = field(default=None, repr=False)
    """The bank's planes when the pass was built, while it can be undone."""

    @property
    def arrays(self) -> list[mx.array]:
        """What to evaluate with the outputs, so that one evaluation does all."""
        tails = [array for tail in self.members.tails.values() for array in tail]
        states = [array for state in self.states for array in _leaves(state.state)]
        return [*self.members.bank.arrays(), *tails, *states]

    def remember(self) -> None:
        """Before the forward pass is built: make it possible to undo it."""
        # New handles: a write to the bank's own changes what those name.
        self.planes_before = [[mx.array(plane) for plane in planes] for planes in self.members.bank.planes]

    def forget(self) -> None:
        """Before the pass is evaluated: while the planes are remembered, MLX copies them to write to them."""
        self.planes_before = None


def _leaves(tree: Any) -> Iterator[mx.array]:
    """The arrays in what mlx-lm's caches call their state."""
    if isinstance(tree, mx.array):
        yield tree
    elif isinstance(tree, list | tuple):
        for part in cast("Sequence[Any]", tree):
            yield from _leaves(part)
