"""How rows of a step become forward passes: grouped, brought together, given room and caches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlx_ring.worker.kv.bank import Bank, Row
from mlx_ring.worker.kv.batch import Batch
from mlx_ring.worker.kv.grouping import SHORT_PROMPT_TOKENS, Candidate, group_even_rows, group_rows
from mlx_ring.worker.kv.layers import Layer, Layout, RowPart
from mlx_ring.worker.kv.placement import Banks
from mlx_ring.worker.kv.rows import BatchRows, row_cache


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
            return [[index] for index in range(len(rows))]
        windows = self._layout.windows
        candidates = [
            Candidate(
                index,
                row.length,
                count,
                id(row.bank) if row.bank is not None else 0,
                tuple(row.base(window) for window in windows),
            )
            for index, (row, count) in enumerate(zip(rows, counts, strict=True))
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
        states: list[Any] = []
        for part in self._layout.object_parts:
            (row,) = members
            state = row.states[part.index] if row.states else part.fresh()
            states.append(part.copied(state) if part.copies else state)
        caches = [_layer_cache(layer, batch, states) for layer in self._layout.layers]
        return Batch(tuple(order), tuple(widths), caches, batch.offset, batch, states)


def _layer_cache(layer: Layer, members: BatchRows, states: Sequence[Any]) -> Any:
    return layer.assemble(
        [
            row_cache(members, part) if isinstance(part, RowPart) else states[part.index]
            for part in layer.parts
        ]
    )
