"""Lazy passes of a step's rows through this stage's layers.

Rows arrive ragged and leave flat: between stages activations are `(tokens, hidden)`, rows in step order, without
padding. Here they are grouped into padded batches, as the KV store asks, and separated again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate

import mlx.core as mx

from mlx_ring.rpc.protos import step_pb2
from mlx_ring.worker.inputs import RowInput, StepInput, row_length
from mlx_ring.worker.kv import Batch, KVStore
from mlx_ring.worker.platform import attention
from mlx_ring.worker.shard import Output, StageModel

Head = Callable[[mx.array], mx.array]
"""Function that returns the logits of a model's head for its input."""
_MOST_LOGITS_BYTES = 1 << 26
"""Size in float32 up to which the logits of all positions are computed at once, although few are needed at a time."""


@dataclass(slots=True)
class Pass:
    """Forward pass of one batch, built and not evaluated."""

    batch: Batch
    members: list[int]
    """Indices of the batch's rows within the step."""
    offsets: list[tuple[int, ...]]
    """Offsets at which each member wants results, on the last stage."""
    positions: int
    """Number of results for each member, including padding."""
    values: mx.array
    """Activations `(members, tokens, hidden)`; on the last stage `(members, positions, vocabulary or hidden)`."""
    head: Head | None = None
    """Function that returns `(n, vocabulary)` of `(n, hidden)` values, if these are the head's input and no logits."""


class StageForward:
    """Builder of passes through a stage, which keeps the KV consistent with them."""

    def __init__(self, model: StageModel, kv: KVStore) -> None:
        self._model = model
        self._kv = kv
        self._is_slow = attention.is_slow_here()

    def stops(self, step: step_pb2.Step) -> bool:
        """Report whether building the step would also compute it, which blocks the caller."""
        return self._is_slow and any(
            _is_long(row.start, row_length(row)) for row in step.rows if row.HasField("input")
        )

    def build(self, step: StepInput, passes: list[Pass]) -> None:
        """Append the passes for all rows to `passes` one by one, so that a failure leaves those that were built."""
        rows = range(len(step.rows))
        hidden = [row for row in rows if step.rows[row].wants.hidden]
        if not hidden:
            self._build(step, rows, "own logits" if step.only_draws else "logits", passes)
            return
        logits = [row for row in rows if not step.rows[row].wants.hidden]
        if logits:
            self._build(step, logits, "logits", passes)
            # The rows that follow may move in their banks, after which these passes cannot be undone.
            evaluate(passes)
        self._build(step, hidden, "hidden", passes)

    def _build(self, step: StepInput, rows: Sequence[int], output: Output, passes: list[Pass]) -> None:
        asked = [(step.rows[row].row.sequence, len(step.rows[row].tokens)) for row in rows]
        at_once = self._is_slow and any(
            _is_long(step.rows[row].row.start, len(step.rows[row].tokens)) for row in rows
        )
        batches = self._kv.batches(asked)
        try:
            while batches:
                batch = batches[0]
                if not at_once:
                    batch.remember()
                members = [rows[index] for index in batch.rows]
                with attention.fitting(at_once=at_once) if self._is_slow else nullcontext():
                    passes.append(self._pass(step, batch, members, output))
                self._kv.begin(batch)
                del batches[0]
        except BaseException:
            self._kv.undo(batches)
            raise

    def _pass(self, step: StepInput, batch: Batch, members: list[int], output: Output) -> Pass:
        rows = [step.rows[member] for member in members]
        offsets = [row.wants.offsets for row in rows]
        width = max(batch.counts)
        count = max(map(len, offsets), default=0)
        positions = None if width == 1 or not self._model.is_last else _pad_offsets(offsets)
        later = output == "logits" and self._heads_later(rows, count)
        values = self._model.forward(
            _token_matrix(rows, width),
            _gather(step, members, width),
            batch.caches,
            positions,
            offset=batch.offset,
            output="hidden" if later else output,
        )
        head = self._model.logits_of if later else None
        return Pass(batch, members, offsets, max(1, count), values, head)

    def _heads_later(self, rows: Sequence[RowInput], count: int) -> bool:
        """Report whether the logits of `count` positions of all rows are too large to be there at once."""
        is_large = 4 * len(rows) * count * self._model.vocab_size > _MOST_LOGITS_BYTES
        return is_large and self._model.has_own_head and any(row.wants.lookups for row in rows)


def _is_long(start: int, count: int) -> bool:
    """Report whether a row's attention is long enough to be computed while it is built."""
    return count > 1 and count * (start + count) >= attention.WORTH_IT


def evaluate(passes: Sequence[Pass], *others: mx.array) -> None:
    """Start computing the passes and the arrays made of them. Does not wait."""
    arrays: list[mx.array] = list(others)
    for item in passes:
        item.batch.forget()
        arrays += item.batch.arrays
    mx.async_eval(*arrays)


def end_mark(passes: Sequence[Pass]) -> mx.array:
    """Return a small array that is ready when the passes are, for a step whose values are not requested.

    It holds none of the KV, which MLX would otherwise copy for the next step where no native kernels write it.
    """
    last = passes[-1]
    arrays = last.batch.arrays or [last.values]
    return mx.sum(mx.reshape(arrays[-1], (-1,))[:1])


def flat_activations(passes: Sequence[Pass]) -> mx.array:
    """Return `(tokens, hidden)` for the next stage: rows in step order, row-major."""
    if len(passes) == 1:
        (only,) = passes
        in_order = only.members == sorted(only.members)
        if in_order and len(set(only.batch.counts)) == 1:
            return mx.contiguous(mx.flatten(only.values, 0, 1))
    pieces = {
        row: item.values[place, : item.batch.counts[place]]
        for item in passes
        for place, row in enumerate(item.members)
    }
    return mx.concatenate([pieces[row] for row in sorted(pieces)])


def _token_matrix(rows: Sequence[RowInput], width: int) -> mx.array:
    """Return (batch, width) int32, right-padded. First tokens that are being drawn come from where they are drawn."""
    lazy = [row.lazy for row in rows]
    if not any(lazy):
        return mx.array([_padded(row.tokens, width) for row in rows], mx.int32)
    first = _first_tokens(rows)[:, None]
    if width == 1:
        return first
    rest = mx.array([_padded(row.tokens, width)[1:] for row in rows], mx.int32)
    return mx.concatenate([first, rest], axis=1)


def _padded(tokens: Sequence[int], width: int) -> Sequence[int]:
    return tokens if len(tokens) == width else [*tokens, *[0] * (width - len(tokens))]


def _first_tokens(rows: Sequence[RowInput]) -> mx.array:
    """Return (batch,) int32 of lazy tokens, and of known ones among them."""
    drawn = {id(row.lazy.drawn): row.lazy.drawn for row in rows if row.lazy is not None}
    begins = dict(
        zip(drawn, accumulate((array.shape[0] for array in drawn.values()), initial=0), strict=False)
    )
    total = sum(array.shape[0] for array in drawn.values())
    places = [
        total + index if row.lazy is None else begins[id(row.lazy.drawn)] + row.lazy.index
        for index, row in enumerate(rows)
    ]
    arrays = list(drawn.values())
    if len(arrays) == 1 and places == list(range(total)):
        return arrays[0]
    if max(places) >= total:
        arrays.append(mx.array([max(row.tokens[0], 0) for row in rows], mx.int32))
    joined = arrays[0] if len(arrays) == 1 else mx.concatenate(arrays)
    return joined[mx.array(places)]


def _gather(step: StepInput, members: Sequence[int], width: int) -> mx.array | None:
    """Return the members' activations as `(batch, width, hidden)`, right-padded."""
    if step.hidden is None:
        return None
    hidden = step.hidden
    if members == list(range(len(step.rows))) and all(len(row.tokens) == width for row in step.rows):
        return mx.unflatten(hidden, 0, (len(members), width))
    begins = step.begins()
    pieces = [hidden[begins[row] : begins[row] + len(step.rows[row].tokens)] for row in members]
    return mx.stack([mx.pad(piece, [(0, width - piece.shape[0]), (0, 0)]) for piece in pieces])


def _pad_offsets(wanted: Sequence[Sequence[int]]) -> mx.array:
    """Return offsets as `(batch, most)`. Short rows repeat offset 0; those extra results are not read."""
    most = max(1, *map(len, wanted)) if wanted else 1
    return mx.array([[*offsets, *[0] * (most - len(offsets))] for offsets in wanted], mx.int32)
