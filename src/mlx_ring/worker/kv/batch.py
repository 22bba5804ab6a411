"""One forward pass over rows of a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from mlx_ring.worker.kv.rows import BatchRows


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

    @property
    def arrays(self) -> list[mx.array]:
        """What to evaluate with the outputs, so that one evaluation does all."""
        tails = [array for tail in self.members.tails.values() for array in tail]
        return [*self.members.bank.arrays(), *tails]
