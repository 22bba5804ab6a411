"""Forward passes over rows of a step: grouped, built, and then committed, undone or failed.

Rows share a pass if that costs less padding than a pass of their own. So decoding rows share one, and so do short
prompts or what remains of them after a cached prefix. Lengths in one batch stay within a factor of two. A row that
already lies with the others may fall back to a quarter before it is separated. So groups do not change with every
token.

A pass begins when it is built: from then on its tokens count, so that another can be built on top of it. It is
committed once it was evaluated. A pass that the device did not get can be undone completely. After a
pass has failed there, its banks are checked, and rows whose content was destroyed are lost.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import mlx.core as mx

from mlx_ring.core.errors import StepFailed
from mlx_ring.worker.kv.bank import Bank, Row, mark_lost
from mlx_ring.worker.kv.bank_memory import SHORT_TOKENS
from mlx_ring.worker.kv.content import Banks
from mlx_ring.worker.kv.layers import JoinedStates, Layer, Layout, RowPart, RowStates, join_states
from mlx_ring.worker.kv.row_views import BatchRows, row_cache

DECODE_TOKENS = 16
"""Number of tokens up to which a row counts as decoding: drafts to verify come with the last token."""
SHORT_PROMPT_TOKENS = 256
"""Length above which a chunk keeps a device busy alone."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """Row of a step."""

    index: int
    start: int
    count: int
    bank: int
    """Identity of its bank; 0: none yet."""
    bases: tuple[int, ...] = ()
    """Position of the first token held, in sliding layers."""

    @property
    def end(self) -> int:
        return self.start + self.count


def group_rows(candidates: Sequence[Candidate], longest_chunk: int = SHORT_PROMPT_TOKENS) -> list[list[int]]:
    """Return the row indices of each forward pass. A chunk of more than `longest_chunk` tokens has a pass alone."""
    decoding: list[Candidate] = []
    short: list[Candidate] = []
    alone: list[Candidate] = []
    for row in candidates:
        if row.count <= DECODE_TOKENS:
            decoding.append(row)
        elif row.count <= longest_chunk:
            short.append(row)
        else:
            alone.append(row)
    chunks = [group for rows in _by_count(short) for group in _by_length(rows)]
    groups = [*_by_length(decoding), *chunks, *([row] for row in alone)]
    return [[row.index for row in group] for group in groups]


def group_even_rows(candidates: Sequence[Candidate]) -> list[list[int]]:
    """Group rows like `group_rows`, for models that take one offset for the whole batch.

    Only rows with equal start, count and bases share a pass.
    """
    groups: dict[tuple[object, ...], list[int]] = {}
    for row in candidates:
        large = row.count > DECODE_TOKENS
        key = (row.start, row.count, row.bases, row.index if large else None)
        groups.setdefault(key, []).append(row.index)
    return list(groups.values())


def _by_count(rows: Sequence[Candidate]) -> list[list[Candidate]]:
    """Group chunks whose lengths differ by a factor of two at most, because every token of padding is computed."""
    groups: list[list[Candidate]] = []
    for row in sorted(rows, key=lambda row: -row.count):
        if groups and 2 * row.count >= groups[-1][0].count:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def _by_length(rows: Sequence[Candidate]) -> list[list[Candidate]]:
    groups: list[list[Candidate]] = []
    for row in sorted(rows, key=lambda row: -row.end):
        if groups and _belongs(row, groups[-1][0]):
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def _belongs(row: Candidate, longest: Candidate) -> bool:
    settled = row.bank != 0 and row.bank == longest.bank
    return longest.end <= SHORT_TOKENS or row.end * (4 if settled else 2) >= longest.end


@dataclass(slots=True, eq=False)
class Batch:
    """One forward pass: `(len(rows), max(counts))` tokens, padded on the right."""

    rows: tuple[int, ...]
    """Indices into the requested rows, in the order of the batch."""
    counts: tuple[int, ...]
    """Number of real tokens of each row."""
    caches: list[Any]
    """Caches of the owned layers, with mlx-lm's cache interface."""
    offset: int | mx.array
    """Position of the first token: one for all rows, or `(batch,)`."""
    members: BatchRows = field(repr=False)
    states: list[Any] = field(default_factory=list[Any], repr=False)
    states_before: list[RowStates | None] = field(default_factory=list["RowStates | None"], repr=False)
    """States of the rows when the batch began."""
    planes_before: list[list[mx.array]] | None = field(default=None, repr=False)
    """Planes of the bank when the pass was built, while it can be undone."""

    @property
    def arrays(self) -> list[mx.array]:
        """Arrays to evaluate with the outputs, so that one evaluation suffices."""
        tails = [array for tail in self.members.tails.values() for array in tail]
        states = [array for state in self.states for array in _leaves(state.state)]
        return [*self.members.bank.arrays(), *tails, *states]

    def remember(self) -> None:
        """Make the pass undoable. Call it before the forward pass is built."""
        # New handles, because a write to the bank changes the arrays that its own handles name.
        self.planes_before = [[mx.array(plane) for plane in planes] for planes in self.members.bank.planes]

    def forget(self) -> None:
        """Drop the remembered planes.

        Call it before the pass is evaluated. Without native kernels, MLX would copy them for each write; with them, the
        writes of the pass change them in place.
        """
        self.planes_before = None


def _leaves(tree: Any) -> Iterator[mx.array]:
    """Yield the arrays in the state of mlx-lm's caches."""
    if isinstance(tree, mx.array):
        yield tree
    elif isinstance(tree, list | tuple):
        for part in cast("Sequence[Any]", tree):
            yield from _leaves(part)


class Assembly:
    """Builder of one store's batches."""

    def __init__(self, layout: Layout, banks: Banks, *, ragged: bool) -> None:
        self._layout = layout
        self._banks = banks
        self._ragged = ragged and not any(part.chunked for part in layout.row_parts)
        self._longest_chunk = min(
            (layout.block(window) for window in layout.windows), default=SHORT_PROMPT_TOKENS
        )

    def batches(self, rows: Sequence[Row], counts: Sequence[int]) -> list[Batch]:
        """Return passes that append `counts` tokens to the rows, with memory for them."""
        groups = self._groups(rows, counts)
        placed = self._banks.place([[rows[index] for index in group] for group in groups])
        indices = {id(row): index for index, row in enumerate(rows)}
        batches = [
            self._batch(bank, [indices[id(row)] for row in group], rows, counts) for bank, group in placed
        ]
        self._banks.fit()
        return batches

    def _groups(self, rows: Sequence[Row], counts: Sequence[int]) -> list[list[int]]:
        if self._layout.object_parts:
            return self._groups_with_states(rows, counts)
        return self._groups_of(range(len(rows)), rows, counts)

    def _groups_with_states(self, rows: Sequence[Row], counts: Sequence[int]) -> list[list[int]]:
        """Group rows with one token each, because padding would enter their states."""
        groups: list[list[int]] = []
        by_shape: dict[Hashable, list[int]] = {}
        copies = all(part.copies for part in self._layout.object_parts)
        for index, (row, count) in enumerate(zip(rows, counts, strict=True)):
            if count == 1 and copies and row.states is not None:
                by_shape.setdefault(row.states.joined.shape, []).append(index)
            else:
                groups.append([index])
        return [
            *groups,
            *(group for alike in by_shape.values() for group in self._groups_of(alike, rows, counts)),
        ]

    def _groups_of(
        self, indices: Iterable[int], rows: Sequence[Row], counts: Sequence[int]
    ) -> list[list[int]]:
        windows = self._layout.windows
        candidates = [
            Candidate(
                index,
                rows[index].length,
                counts[index],
                0 if rows[index].bank is None else id(rows[index].bank),
                tuple(rows[index].base(window) for window in windows),
            )
            for index in indices
        ]
        if not self._ragged:
            return group_even_rows(candidates)
        return group_rows(candidates, self._longest_chunk)

    def _batch(self, bank: Bank, group: Sequence[int], rows: Sequence[Row], counts: Sequence[int]) -> Batch:
        order = sorted(group, key=lambda index: rows[index].slot)
        members = [rows[index] for index in order]
        widths = [counts[index] for index in order]
        self._banks.reserve(bank, members, widths)
        batch = BatchRows(self._layout, bank, members, widths)
        parts = self._layout.object_parts
        states = join_states(parts, [row.states for row in members]) if parts else []
        caches = [_layer_cache(layer, batch, states) for layer in self._layout.layers]
        return Batch(tuple(order), tuple(widths), caches, batch.offset, batch, states)


def _layer_cache(layer: Layer, members: BatchRows, states: Sequence[Any]) -> Any:
    return layer.assemble(
        [
            row_cache(members, part) if isinstance(part, RowPart) else states[part.index]
            for part in layer.parts
        ]
    )


class PassLedger:
    """Passes of one store that are not committed."""

    def __init__(self, layout: Layout) -> None:
        self._can_undo = all(part.copies for part in layout.object_parts)
        self._asked: list[Batch] = []
        self._begun: list[Batch] = []

    @property
    def can_undo(self) -> bool:
        """True if building a pass leaves everything before it unchanged."""
        return self._can_undo

    def clear(self) -> None:
        """Forget all passes."""
        self._asked.clear()
        self._begun.clear()

    def ask(self, batches: Iterable[Batch]) -> None:
        """Record passes that will be built."""
        self._asked += batches

    def begin(self, batch: Batch) -> None:
        """Count a pass's tokens, because its forward pass is built."""
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
        """Commit an evaluated pass; others may have been built on top of it. Begin it first if necessary."""
        if batch not in self._begun:
            mx.eval(batch.arrays)
            self.begin(batch)
        self._begun.remove(batch)
        batch.members.store_tails()

    def undo(self, batches: Sequence[Batch]) -> None:
        """Undo the passes that were built last, whether begun or not, without leaving anything of them."""
        for batch in reversed(batches):
            was_begun = batch in self._begun
            self._roll_back(batch)
            if batch.planes_before is not None:
                batch.members.bank.planes = batch.planes_before
                batch.forget()
            elif not was_begun:
                self._check(batch.members.bank)
            self._lose_changed(batch)

    def fail(self, batches: Sequence[Batch]) -> None:
        """Handle passes that failed while they were evaluated: restore their sequences, or mark them lost."""
        for batch in reversed(batches):
            self._roll_back(batch)
            batch.forget()
        self._asked += batches
        self.settle()

    def settle(self) -> None:
        """Check the banks of passes that never began because they failed."""
        failed, self._asked = self._asked, []
        for batch in failed:
            self._check(batch.members.bank)
            self._lose_changed(batch)

    @staticmethod
    def _check(bank: Bank) -> None:
        """Check a bank after a pass was interrupted."""
        try:
            mx.eval(bank.arrays())
        except Exception as error:  # noqa: BLE001 - MLX raises any error of the failed pass
            mark_lost(bank.rows, str(error))
            bank.drop()

    def _roll_back(self, batch: Batch) -> None:
        """Subtract a batch's tokens from its rows."""
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
        """Mark rows lost whose states the pass changed in place."""
        if not self._can_undo:
            mark_lost(
                [row for row in batch.members.rows if row.states is not None], "its state cannot go back"
            )
