"""One step's rows through this stage's layers.

Rows arrive ragged and leave flat: between stages activations are `(tokens,
hidden)`, rows in step order, without padding. Here they are grouped into padded
batches, as the KV store asks, and taken apart again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlx_ring.rpc.protos import step_pb2
from mlx_ring.worker.kv import Batch, KVStore
from mlx_ring.worker.results import RowOutput, wanted_offsets, wants_hidden
from mlx_ring.worker.shard import Output, StageModel


@dataclass(frozen=True, slots=True)
class StepInput:
    """What one step feeds: each row's tokens, and `(tokens, hidden)` activations but on the first stage."""

    rows: Sequence[step_pb2.Row]
    tokens: Sequence[Sequence[int]]
    hidden: mx.array | None

    def begins(self) -> list[int]:
        """Where each row begins in the flat activations."""
        begins: list[int] = []
        total = 0
        for ids in self.tokens:
            begins.append(total)
            total += len(ids)
        return begins


class StageForward:
    """Runs steps' rows through a stage and keeps its KV in step."""

    def __init__(self, model: StageModel, kv: KVStore) -> None:
        self._model = model
        self._kv = kv

    def activations(self, step: StepInput) -> mx.array:
        """Run a stage that is not the last: `(tokens, hidden)` for the next one, evaluated."""
        pieces: list[mx.array | None] = [None] * len(step.rows)
        for batch, members in self._batches(step, range(len(step.rows))):
            output = self._run(step, batch, members, None, "hidden")
            for place, row in enumerate(members):
                pieces[row] = output[place, : batch.counts[place]]
        flat = [piece for piece in pieces if piece is not None]
        return flat[0] if len(flat) == 1 else mx.concatenate(flat)

    def outputs(self, step: StepInput) -> list[RowOutput]:
        """Run the last stage: each row's values at the offsets it wants, evaluated."""
        outputs = [
            RowOutput(row, len(ids), wanted_offsets(row, len(ids)))
            for row, ids in zip(step.rows, step.tokens, strict=True)
        ]
        hidden_rows = [index for index, row in enumerate(step.rows) if wants_hidden(row)]
        logit_rows = [index for index in range(len(step.rows)) if index not in set(hidden_rows)]
        kinds: tuple[tuple[Output, list[int]], ...] = (("logits", logit_rows), ("hidden", hidden_rows))
        for kind, rows in kinds:
            for batch, members in self._batches(step, rows):
                wanted = [outputs[row].offsets for row in members]
                values = self._run(step, batch, members, wanted, kind)
                for place, row in enumerate(members):
                    if wanted[place]:
                        outputs[row].values = values[place, : len(wanted[place])]
        return outputs

    def _batches(self, step: StepInput, rows: Sequence[int]) -> list[tuple[Batch, list[int]]]:
        """The forward passes for some of the step's rows, each with its members' indices in the step."""
        asked = [(step.rows[row].sequence, len(step.tokens[row])) for row in rows]
        return [(batch, [rows[index] for index in batch.rows]) for batch in self._kv.batches(asked)]

    def _run(
        self,
        step: StepInput,
        batch: Batch,
        members: Sequence[int],
        wanted: Sequence[Sequence[int]] | None,
        output: Output,
    ) -> mx.array:
        """One forward pass, evaluated and committed."""
        width = max(batch.counts)
        tokens = mx.array(
            [[*step.tokens[row], *[0] * (width - len(step.tokens[row]))] for row in members], mx.int32
        )
        hidden = self._gather(step, members, width)
        positions = None if wanted is None else _pad_offsets(wanted)
        values = self._model.forward(
            tokens, hidden, batch.caches, positions, offset=batch.offset, output=output
        )
        mx.eval(values, *batch.arrays)
        self._kv.commit(batch)
        return values

    def _gather(self, step: StepInput, members: Sequence[int], width: int) -> mx.array | None:
        """The members' activations as `(batch, width, hidden)`, right-padded."""
        if step.hidden is None:
            return None
        begins = step.begins()
        pieces = [step.hidden[begins[row] : begins[row] + len(step.tokens[row])] for row in members]
        if len(pieces) == 1:
            return pieces[0][None]
        return mx.stack([mx.pad(piece, [(0, width - piece.shape[0]), (0, 0)]) for piece in pieces])


def _pad_offsets(wanted: Sequence[Sequence[int]]) -> mx.array:
    """Offsets as `(batch, most)`: short rows repeat offset 0, whose surplus results nobody reads."""
    most = max(1, *(len(offsets) for offsets in wanted)) if wanted else 1
    return mx.array([[*offsets, *[0] * (most - len(offsets))] for offsets in wanted], mx.int32)
