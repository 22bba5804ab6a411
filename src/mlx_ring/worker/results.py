"""Results of the last stage: tokens drawn in one pass over all rows, and other requested results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlx_ring.core.errors import RingError
from mlx_ring.rpc.protos import step_pb2
from mlx_ring.worker.forward import Head, Pass
from mlx_ring.worker.grammars import Drawing, StepMasks
from mlx_ring.worker.inputs import RowInput, StepInput, Want, offsets_of
from mlx_ring.worker.sampler import LazyLogprobs, LazySample, prompt_logprobs
from mlx_ring.worker.sequences import LazyToken
from mlx_ring.worker.tensor import Group, SplitHead
from mlx_ring.worker.tensors import to_message

NO_MASKS = StepMasks()


@dataclass(frozen=True, slots=True)
class _Draw:
    """One row's part of the sampling pass."""

    row: RowInput
    begin: int
    """Index of its first position among all that draw."""
    places: Sequence[int]
    """Indices of its positions among the pass's flattened values."""


@dataclass(frozen=True, slots=True)
class DrawnRow:
    """Tokens that a row sampled."""

    row: RowInput
    token: int
    """The last token, from which the sequence continues."""
    results: list[step_pb2.TokenLogprobs]
    is_redrawn: bool
    """True if the last token differs from the lazy one."""

    @property
    def sequence(self) -> int:
        return self.row.row.sequence

    def settle(self, *, used: bool) -> None:
        """Update the sequence. `used` says that its next row was built on the lazy token."""
        state = self.row.state
        state.redrawn = self.is_redrawn
        if used:
            state.tokens[self.row.row.start + len(self.row.tokens)] = self.token
        else:
            state.sampled = self.token


class StepDraws:
    """Tokens that a step draws: lazy until `read`."""

    def __init__(
        self,
        step: StepInput,
        passes: Sequence[Pass],
        group: Group | None = None,
        head: SplitHead | None = None,
        masks: StepMasks = NO_MASKS,
    ) -> None:
        """Build the draws of a step.

        In a group all ranks use rank 0's tokens. With `head`, the passes' values are each rank's part of the logits.
        """
        self._draws: list[_Draw] = []
        parts = [part for item in passes if (part := self._take(step, item)) is not None]
        self._sample: LazySample | None = None
        self._logprobs: LazyLogprobs | None = None
        if not parts:
            return
        logits = parts[0] if len(parts) == 1 else mx.concatenate(parts)
        rows = [
            draw.row.state.sampler_row(
                draw.row.position(offset),
                masks.allowed.get((draw.row.row.sequence, draw.row.position(offset))),
            )
            for draw in self._draws
            for offset in draw.row.wants.draws
        ]
        self._sample = LazySample(logits, rows, head, group)
        self._logits = logits
        self._logprobs = self._look(self._sample.tokens)
        self._publish(self._sample.tokens)

    def _take(self, step: StepInput, item: Pass) -> mx.array | None:
        """Return the logits at a pass's positions that draw, `(positions, vocabulary)`, or None without any."""
        begin = first = sum(len(draw.places) for draw in self._draws)
        places: list[int] = []
        for place, member in enumerate(item.members):
            row = step.rows[member]
            if not row.wants.draws:
                continue
            where = {offset: index for index, offset in enumerate(item.offsets[place])}
            theirs = [place * item.positions + where[offset] for offset in row.wants.draws]
            self._draws.append(_Draw(row, begin, theirs))
            places += theirs
            begin += len(theirs)
        if begin == first:
            return None
        values = mx.flatten(item.values, 0, 1)
        chosen = values if places == list(range(values.shape[0])) else values[mx.array(places)]
        return chosen if item.head is None else item.head(chosen)

    def _look(self, tokens: mx.array) -> LazyLogprobs | None:
        """Return log-probabilities of the drawn tokens, if a row wants them."""
        asked = [(draw.row.state.opened.sampling, len(draw.places)) for draw in self._draws]
        if not any(sampling.logprobs for sampling, _ in asked):
            return None
        tops = [sampling.top_logprobs for sampling, count in asked for _ in range(count)]
        return LazyLogprobs(self._logits, tokens, tops)

    def _publish(self, tokens: mx.array) -> None:
        """Let the sequences' next rows be built on the tokens that are being drawn."""
        for draw in self._draws:
            if not draw.row.row.draft:
                draw.row.state.drawing = LazyToken(tokens, draw.begin + len(draw.places) - 1)

    @property
    def arrays(self) -> list[mx.array]:
        """Arrays to evaluate."""
        sample = self._sample.arrays if self._sample is not None else []
        return [*sample, *(self._logprobs.arrays if self._logprobs is not None else [])]

    def read(self) -> list[DrawnRow]:
        """Evaluate, and return the tokens of each row that draws."""
        if self._sample is None:
            return []
        tokens, changed = self._sample.read()
        if changed and self._logprobs is not None:
            self._logprobs = self._look(mx.array(tokens, mx.int32))
        logprobs = self._logprobs.read() if self._logprobs is not None else None
        return [self._drawn(draw, tokens, changed, logprobs) for draw in self._draws]

    @staticmethod
    def _drawn(
        draw: _Draw,
        tokens: Sequence[int],
        changed: Sequence[int],
        logprobs: Sequence[step_pb2.TokenLogprobs] | None,
    ) -> DrawnRow:
        end = draw.begin + len(draw.places)
        accepted = _accept(tokens[draw.begin : end], draw.row.row.draft)
        if logprobs is not None and draw.row.state.opened.sampling.logprobs:
            results = list(logprobs[draw.begin : draw.begin + len(accepted)])
        else:
            results = [step_pb2.TokenLogprobs(token=token) for token in accepted]
        return DrawnRow(draw.row, accepted[-1], results, is_redrawn=end - 1 in changed)

    def withdraw(self) -> None:
        """Forbid further rows to be built on these tokens."""
        for draw in self._draws:
            drawing = draw.row.state.drawing
            if self._sample is not None and drawing is not None and drawing.drawn is self._sample.tokens:
                draw.row.state.drawing = None


def grammar_masks(step: StepInput, vocabulary: int, failed: dict[int, RingError]) -> StepMasks:
    """Return the tokens that rows with a grammar may draw.

    Rows whose grammar fails are added to `failed`, and their draws are ignored.
    """
    drawing = [
        Drawing(row.row.sequence, row.state.grammar, row.state.tokens, [*map(row.position, row.wants.draws)])
        for row in step.rows
        if row.state.grammar is not None and row.wants.draws
    ]
    if not drawing:
        return StepMasks()
    from mlx_ring.worker.grammars.masks import make_masks  # imported with NumPy when the grammar was compiled

    masks = make_masks(drawing, vocabulary)
    failed.update(masks.failed)
    return masks


def _accept(sampled: Sequence[int], draft: Sequence[int]) -> list[int]:
    """Return the sampled tokens that hold: each one up to the first that differs from its draft token."""
    accepted: list[int] = []
    for index, token in enumerate(sampled):
        accepted.append(token)
        if index >= len(draft) or token != draft[index]:
            break
    return accepted


def add_lookups(step: StepInput, passes: Sequence[Pass], results: Mapping[int, step_pb2.RowResult]) -> None:
    """Evaluate, and add to the rows' results what they want besides tokens."""
    for item in passes:
        for place, member in enumerate(item.members):
            row = step.rows[member]
            for want in row.wants.lookups:
                values = _values_at(item, place, offsets_of(want, len(row.tokens)))
                _add(want, values, results[row.row.sequence], item.head)


def _values_at(item: Pass, place: int, offsets: Sequence[int]) -> mx.array:
    """Return a member's values at some offsets: a view if those are all that were computed."""
    computed = item.offsets[place]
    if tuple(offsets) == computed:
        return item.values[place, : len(computed)]
    where = {offset: index for index, offset in enumerate(computed)}
    return item.values[place, mx.array([where[offset] for offset in offsets])]


def _add(want: step_pb2.Want, values: mx.array, result: step_pb2.RowResult, head: Head | None) -> None:
    """Add values to a row's result; with a `head`, they are its input."""
    if want.what == Want.LOGPROBS:
        result.logprobs.extend(prompt_logprobs(values, want.targets, want.top_logprobs, head))
    elif want.what == Want.LOGITS:
        result.logits.CopyFrom(to_message(values if head is None else head(values)))
    elif want.what == Want.HIDDEN_SUM:
        result.hidden.CopyFrom(to_message(mx.sum(values.astype(mx.float32), axis=0)))
    else:
        result.hidden.CopyFrom(to_message(values))
