"""Input of a step: each row's tokens or activations, and the results that it wants.

A row with invalid input fails alone. The stages after it learn of the failure with the activations of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import mlx.core as mx

from mlx_ring.core.errors import ProtocolError, RingError
from mlx_ring.rpc.failures import failure_to_error
from mlx_ring.rpc.links import SAMPLED, Inbox, LinkKey, WireTensor
from mlx_ring.rpc.protos import step_pb2
from mlx_ring.worker.sequences import UNKNOWN_TOKEN, LazyToken, OpenSequence, SequenceTable, TokenFeedback
from mlx_ring.worker.shard import StageModel
from mlx_ring.worker.tensors import from_message, from_wire

Want = step_pb2.Want


@dataclass(frozen=True, slots=True)
class RowWants:
    """Results that a row wants of the last stage, read once."""

    offsets: tuple[int, ...] = ()
    """Offsets into the row at which the model's head runs, ascending."""
    draws: tuple[int, ...] = ()
    """Offsets at which a token is drawn, in the order of the answer."""
    hidden: bool = False
    lookups: tuple[step_pb2.Want, ...] = ()
    """Results other than tokens; they are looked up in the computed values."""


NOTHING = RowWants()
_NEXT_TOKEN = RowWants((0,), (0,))
_HIDDEN = (Want.HIDDEN, Want.HIDDEN_SUM)


def samples_token(row: step_pb2.Row) -> bool:
    """Report whether a row's result includes a sampled token."""
    return any(want.what == Want.TOKEN for want in row.wants)


def read_wants(row: step_pb2.Row, count: int) -> RowWants:
    """Return the wants of a row of `count` tokens.

    Raises:
        ProtocolError: the wants contradict each other or the row.
    """
    wants = row.wants
    if not wants:
        return NOTHING
    if count == 1 and len(wants) == 1 and wants[0].what == Want.TOKEN and wants[0].where != Want.LISTED:
        return _NEXT_TOKEN
    hidden = {want.what in _HIDDEN for want in wants}
    if len(hidden) > 1:
        raise ProtocolError(f"The row of sequence {row.sequence} requests hidden states and logits at once.")
    lookups = tuple(want for want in wants if want.what != Want.TOKEN)
    for want in lookups:
        _check_targets(want, count)
    return RowWants(
        tuple(sorted({offset for want in wants for offset in offsets_of(want, count)})),
        _draws(row, count),
        hidden == {True},
        lookups,
    )


def _draws(row: step_pb2.Row, count: int) -> tuple[int, ...]:
    wants = [want for want in row.wants if want.what == Want.TOKEN]
    if len(wants) > 1:
        raise ProtocolError(f"The row of sequence {row.sequence} requests tokens more than once.")
    if not wants:
        return ()
    if row.draft and wants[0].where != Want.ALL:
        raise ProtocolError(
            f"The row of sequence {row.sequence} has drafts but does not request every token."
        )
    return tuple(offsets_of(wants[0], count))


def _check_targets(want: step_pb2.Want, count: int) -> None:
    positions = len(offsets_of(want, count))
    if want.what == Want.LOGPROBS and len(want.targets) != positions:
        raise ProtocolError(f"{positions} positions want log-probabilities of {len(want.targets)} tokens.")


def offsets_of(want: step_pb2.Want, count: int) -> Sequence[int]:
    """Return the offsets that one want names, in its order."""
    if want.where == Want.LAST:
        return (count - 1,)
    if want.where == Want.ALL:
        return range(count)
    for offset in want.listed:
        if offset >= count:
            raise ProtocolError(f"A result is wanted at offset {offset} of a row of {count} tokens.")
    return want.listed


@dataclass(slots=True)
class RowInput:
    """A row with valid input."""

    row: step_pb2.Row
    state: OpenSequence
    tokens: list[int]
    lazy: LazyToken | None
    """The first token, while it is being drawn."""
    wants: RowWants
    """Wants, on the last stage."""
    sampled_before: int | None
    """Value of the sequence's `sampled` before this row."""

    def position(self, offset: int) -> int:
        """Return the position of the token that is drawn at an offset into the row."""
        return self.row.start + offset + 1


@dataclass(slots=True)
class StepInput:
    """Rows of a step with valid input, and the `(tokens, hidden)` that enters this stage's layers, if any."""

    rows: list[RowInput]
    hidden: mx.array | None

    @property
    def only_draws(self) -> bool:
        """True if the logits are only used to draw tokens."""
        return not any(row.wants.lookups or row.state.opened.sampling.logprobs for row in self.rows)

    @property
    def has_grammars(self) -> bool:
        """True if a row draws under a grammar, which needs every token before."""
        return any(row.state.grammar is not None and row.wants.draws for row in self.rows)

    def begins(self) -> list[int]:
        """Return the index of each row's first token in the flat activations."""
        begins: list[int] = []
        total = 0
        for row in self.rows:
            begins.append(total)
            total += len(row.tokens)
        return begins


class StepInputs:
    """Reader of steps' inputs."""

    def __init__(
        self, model: StageModel, inbox: Inbox, sequences: SequenceTable, token_feedback: TokenFeedback
    ) -> None:
        self._model = model
        self._inbox = inbox
        self._sequences = sequences
        self._token_feedback = token_feedback

    def is_ready(self, step: step_pb2.Step, patience_s: float) -> bool:
        """Report whether all inputs of the step have come, are being drawn, or come within `patience_s`."""
        if not self._model.is_first:
            return self._inbox.holds(step_key(step), patience_s)
        return all(self._has_tokens(row) for row in step.rows)

    def _has_tokens(self, row: step_pb2.Row) -> bool:
        if not row.previous:
            return True
        if not self._model.is_last:
            return self._token_feedback.has(row.sequence)
        if row.sequence not in self._sequences:
            return False
        state = self._sequences[row.sequence]
        if state.drawing is None:
            return state.sampled is not None
        # Penalties need the token itself. So does a row that had to draw again last time.
        return not (state.sampling.penalizes or state.redrawn)

    def receive(self, step: step_pb2.Step, deadline: float | None) -> WireTensor | None:
        """Wait for the step's input from other stages: activations, or tokens for rows with `previous`.

        Raises:
            RingError: the step failed there, the deadline passed, or the link broke.
        """
        if not self._model.is_first:
            return self._inbox.recv(step_key(step), deadline)
        if not self._model.is_last:
            self._token_feedback.forget_before(sampled_key(step))
            self._token_feedback.collect()
            for row in step.rows:
                if row.previous:
                    self._token_feedback.wait(row.sequence, deadline)
        return None

    def feed(
        self, step: step_pb2.Step, message: WireTensor | None, failed: dict[int, RingError]
    ) -> StepInput:
        """Return the rows with valid input, and record their tokens. Errors of the others are added to `failed`."""
        sent = self._sent(step, message, failed)
        fed = [row_input for row in sent if (row_input := self._try_row(row, failed)) is not None]
        hidden = _embeddings(step, fed) if message is None else _received(message, sent, fed)
        for row_input in fed:
            self._sequences.feed(row_input.state, row_input.row.start, row_input.tokens)
        return StepInput(fed, hidden)

    @staticmethod
    def _sent(
        step: step_pb2.Step, message: WireTensor | None, failed: dict[int, RingError]
    ) -> Sequence[step_pb2.Row]:
        """Return the rows that did not fail on a stage before."""
        if message is None or message.failure is None:
            return step.rows
        failed.update(dict.fromkeys(message.failure.sequences, failure_to_error(message.failure)))
        return [row for row in step.rows if row.sequence not in message.failure.sequences]

    def _try_row(self, row: step_pb2.Row, failed: dict[int, RingError]) -> RowInput | None:
        if row.sequence in failed:
            return None
        try:
            return self._row(row)
        except RingError as error:
            failed[row.sequence] = error
            return None

    def _row(self, row: step_pb2.Row) -> RowInput:
        count = row_length(row)
        if not count:
            raise ProtocolError(f"The row of sequence {row.sequence} has no tokens.")
        if row.draft and row.HasField("tokens"):
            raise ProtocolError(f"The row of sequence {row.sequence} has drafts after more than one token.")
        state = self._sequences.check(row, count)
        wants = read_wants(row, count) if self._model.is_last else NOTHING
        tokens, lazy = _named_tokens(row, count), None
        if row.previous and self._model.is_first:
            tokens[0], lazy = self._previous(row.sequence, state)
        return RowInput(row, state, tokens, lazy, wants, state.sampled)

    def _previous(self, sequence: int, state: OpenSequence) -> tuple[int, LazyToken | None]:
        if state.drawing is not None:
            return UNKNOWN_TOKEN, state.drawing
        return self._token_feedback.token(sequence), None


def own_part(step: step_pb2.Step, stage: int) -> step_pb2.Step:
    """Return a stage's part of a step: without the operations of other stages, and without rows that end before it."""
    runs_rows = not step.end_stage or stage < step.end_stage
    if runs_rows and not any(one.first_stage or one.end_stage for one in step.operations):
        return step
    return step_pb2.Step(
        instance=step.instance,
        epoch=step.epoch,
        step=step.step,
        operations=[one for one in step.operations if is_run_by(one, stage)],
        rows=step.rows if runs_rows else (),
        deadline_s=step.deadline_s,
        feed_back_tokens=step.feed_back_tokens,
        end_stage=step.end_stage,
    )


def is_run_by(operation: step_pb2.CacheOperation, stage: int) -> bool:
    """Report whether a stage runs a cache operation."""
    return operation.first_stage <= stage and (not operation.end_stage or stage < operation.end_stage)


def ends_at(step: step_pb2.Step, stage: int) -> bool:
    """Report whether no stage after this one runs the step's rows, although there may be some."""
    return 0 < step.end_stage <= stage + 1


def step_key(step: step_pb2.Step) -> LinkKey:
    """Return the key of the step's activations."""
    return LinkKey(step.instance, step.epoch, step.step)


def sampled_key(step: step_pb2.Step) -> LinkKey:
    """Return the key of the tokens that the step samples."""
    return LinkKey(step.instance, step.epoch, step.step, SAMPLED)


def row_length(row: step_pb2.Row) -> int:
    """Return the number of tokens that a row feeds. Raises `ProtocolError` if it has no input."""
    match row.WhichOneof("input"):
        case "token" | "previous":
            return 1 + len(row.draft)
        case "tokens":
            return len(row.tokens.ids) + len(row.draft)
        case "embeddings":
            return row.embeddings.shape[0]
        case _:
            raise ProtocolError(f"The row of sequence {row.sequence} has no input.")


def _named_tokens(row: step_pb2.Row, count: int) -> list[int]:
    """Return the tokens that the step names. Zeros stand for embeddings and for tokens that it does not name."""
    match row.WhichOneof("input"):
        case "tokens":
            return list(row.tokens.ids)
        case "token" | "previous":
            return [row.token, *row.draft]
        case _:
            return [0] * count


def _received(message: WireTensor, sent: Sequence[step_pb2.Row], fed: Sequence[RowInput]) -> mx.array:
    """Return the activations from the stage before, for the rows that are fed.

    Their tokens also come from there if it sent any.
    """
    begins = dict(
        zip((row.sequence for row in sent), accumulate(map(row_length, sent), initial=0), strict=False)
    )
    hidden = from_wire(message)
    total = sum(map(row_length, sent))
    if hidden.shape[0] != total or len(message.tokens) not in {0, total}:
        raise ProtocolError(
            f"The stage before sent {hidden.shape[0]} activations and {len(message.tokens)} tokens "
            f"for rows of {total} tokens."
        )
    spans = [(begins[row.row.sequence], begins[row.row.sequence] + len(row.tokens)) for row in fed]
    if message.tokens:
        for row_input, (begin, end) in zip(fed, spans, strict=True):
            row_input.tokens = list(message.tokens[begin:end])
    if len(fed) == len(sent):
        return hidden
    return mx.concatenate([hidden[:0], *(hidden[begin:end] for begin, end in spans)])


def _embeddings(step: step_pb2.Step, fed: Sequence[RowInput]) -> mx.array | None:
    """Return the `(tokens, hidden)` that enters layer 0 if the rows are embeddings."""
    given = [row.row.HasField("embeddings") for row in fed]
    if not any(given):
        return None
    if not all(given):
        raise ProtocolError(f"Step {step.step} mixes rows of embeddings with rows of tokens.")
    return mx.concatenate([from_message(row.row.embeddings) for row in fed])
