"""How rows of a step become forward passes: grouped, brought together, given room and caches."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from mlx_ring.worker.kv.bank import Bank, Row
from mlx_ring.worker.kv.batch import Batch
from mlx_ring.worker.kv.grouping import SHORT_PROMPT_TOKENS, Candidate, group_even_rows, group_rows
from mlx_ring.worker.kv.layers import Layer, Layout, RowPart
from mlx_ring.worker.kv.placement import Banks
from mlx_ring.worker.kv.rows import BatchRows, row_cache
from mlx_ring.worker.kv.states import join_states


class Assembly:
    """Makes the batches of one store."""

    def __init__(self, layout: Layout, banks: Banks, *, ragged: bool) -> None:
        self._layout = layout
        self._banks = banks
        self._ragged = ragged and not any(part.chunked for part in layout.row_parts)
        self._longest_chunk = min(
            (layout.block(window) for window in layout.windows), default=SHORT_PROMPT_TOKENS
        )

    def batches(self, rows: Sequence[Row], counts: Sequence[int]) -> list[Batch]:
        """Passes that append `counts` tokens to the rows; their memory is there."""
        groups = self._groups(rows, counts)
        placed = self._banks.place([[rows[index] for index in group] for group in groups])
        indices = {id(row): index for index, row in enumerate(rows)}
        return [
            self._batch(bank, [indices[id(row)] for row in group], rows, counts) for bank, group in placed
        ]

    def _groups(self, rows: Sequence[Row], counts: Sequence[int]) -> list[list[int]]:
        if self._layout.object_parts:
            return self._groups_with_states(rows, counts)
        return self._groups_of(range(len(rows)), rows, counts)

    def _groups_with_states(self, rows: Sequence[Row], counts: Sequence[int]) -> list[list[int]]:
        """Rows with one token each go together, for padding would go into their states."""
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
