"""What becomes of the passes that were asked for: begun, committed, undone or failed.

A pass is begun when it is built: from then on its tokens count, so that another can be built on top of it. It is
committed once it was evaluated. What was built and not given to the device can be undone without a
trace; after a pass has failed there, its banks are looked at, and rows whose content is gone are lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import mlx.core as mx

from mlx_ring.core.errors import StepFailed
from mlx_ring.worker.kv.bank import Bank, Row
from mlx_ring.worker.kv.batch import Batch
from mlx_ring.worker.kv.layers import Layout
from mlx_ring.worker.kv.states import JoinedStates, RowStates


class PassLedger:
    """The passes of one store that are not committed."""

    def __init__(self, layout: Layout) -> None:
        self._can_undo = all(part.copies for part in layout.object_parts)
        self._asked: list[Batch] = []
        self._begun: list[Batch] = []

    @property
    def can_undo(self) -> bool:
        """Whether a pass that was built leaves everything before it as it was."""
        return self._can_undo

    def clear(self) -> None:
        """Forget all."""
        self._asked.clear()
        self._begun.clear()

    def ask(self, batches: Iterable[Batch]) -> None:
        """Note passes that will be built."""
        self._asked += batches

    def begin(self, batch: Batch) -> None:
        """The forward pass is built: its tokens count."""
        if batch not in self._asked:
            raise StepFailed("The batch was not the last one asked for; its tokens are not kept.")
        self._asked.remove(batch)
        self._begun.append(batch)
        batch.states_before = [row.states for row in batch.members.rows]
        joined = JoinedStates(batch.states, len(batch.rows)) if batch.states else None
        for index, (row, count) in enumerate(zip(batch.members.rows, batch.counts, strict=True)):
            row.length += count
            if joined is not None:
                row.states = RowStates(joined, index)

    def commit(self, batch: Batch) -> None:
        """The pass was evaluated; others may have been built on top of it. One that was not begun is, first."""
        if batch not in self._begun:
            mx.eval(batch.arrays)
            self.begin(batch)
        self._begun.remove(batch)
        batch.members.store_tails()

    def undo(self, batches: Sequence[Batch]) -> None:
        """Take back passes that were built last, whether they were begun or not: nothing of them is kept."""
        for batch in reversed(batches):
            was_begun = batch in self._begun
            self._take_back(batch)
            if batch.planes_before is not None:
                batch.members.bank.planes = batch.planes_before
                batch.forget()
            elif not was_begun:
                self._check(batch.members.bank)
            self._lose_changed(batch)

    def fail(self, batches: Sequence[Batch]) -> None:
        """Passes failed while they were evaluated: sequences stand as before, or are lost."""
        for batch in reversed(batches):
            self._take_back(batch)
            batch.forget()
        self._asked += batches
        self.settle()

    def settle(self) -> None:
        """Passes that were asked for and never begun failed: make sure that their banks are sound."""
        failed, self._asked = self._asked, []
        for batch in failed:
            self._check(batch.members.bank)
            self._lose_changed(batch)

    @staticmethod
    def _check(bank: Bank) -> None:
        """Make sure that a bank is sound after a pass was broken off."""
        try:
            mx.eval(bank.arrays())
        except Exception as error:  # noqa: BLE001 - MLX raises whatever the failed pass did
            _lose(bank.rows, str(error))
            bank.drop()

    def _take_back(self, batch: Batch) -> None:
        """Uncount a batch's tokens."""
        if batch in self._asked:
            self._asked.remove(batch)
        if batch not in self._begun:
            return
        self._begun.remove(batch)
        rows = zip(batch.members.rows, batch.counts, batch.states_before, strict=True)
        for row, count, states in rows:
            row.length -= count
            row.states = states

    def _lose_changed(self, batch: Batch) -> None:
        """States that a pass changes in place are gone with it."""
        if not self._can_undo:
            _lose([row for row in batch.members.rows if row.states is not None], "its state cannot go back")


def _lose(rows: Sequence[Row], reason: str) -> None:
    for row in rows:
        row.lost = (
            f"Sequence {row.sequence} lost its KV in a step that failed ({reason}). "
            "Free it and prefill again."
        )
