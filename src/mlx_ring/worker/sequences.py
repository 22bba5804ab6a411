"""Sequences of a rank: their tokens by position, how they are sampled, and sampled tokens from the last stage.

The last stage sends sampled tokens to stage 0 in one small message for each step that asks for it. Stage 0 remembers
which sequences that step sampled for. It waits only when a row with `previous` needs a token that has not come.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING

import mlx.core as mx

from mlx_ring.core.errors import ProtocolError, RingError, StepFailed
from mlx_ring.rpc.failures import failure_to_error
from mlx_ring.rpc.links import SAMPLED, Inbox, LinkKey, WireTensor
from mlx_ring.rpc.protos import step_pb2, worker_pb2
from mlx_ring.worker.grammars import Allowed, AnswerGrammar, GrammarCompiler
from mlx_ring.worker.kv import KVStore
from mlx_ring.worker.sampler import History, Parameters, SamplerRow

if TYPE_CHECKING:
    from mlx_ring.worker.kv.disk import KvDisk  # it imports NumPy
    from mlx_ring.worker.kv.transfer import KvTransfers

log = logging.getLogger(__name__)

UNKNOWN_TOKEN = -1
"""Placeholder in a sequence's tokens for one that is being drawn."""


@dataclass(frozen=True, slots=True)
class LazyToken:
    """Token that a step under way draws."""

    drawn: mx.array
    """(rows,) int32, for all rows of that step."""
    index: int


@dataclass(slots=True)
class OpenSequence:
    """One sequence on this rank."""

    opened: step_pb2.Open
    tokens: list[int]
    """Tokens by position: `tokens[p]` was fed at position p."""
    sampling: Parameters
    eos: frozenset[int]
    sampled: int | None = None
    """Token that its previous step sampled: the input of a row with `previous`."""
    drawing: LazyToken | None = None
    """The same token while that step is under way."""
    redrawn: bool = False
    """True if the last sampled token differs from the lazy one."""
    retained: bool = False
    grammar: AnswerGrammar | None = None
    """Grammar of the answer, on a stage that draws."""
    history: History = field(default_factory=History)
    """Counts of its tokens for penalties."""

    @classmethod
    def from_message(
        cls, opened: step_pb2.Open, vocabulary: int, grammars: GrammarCompiler | None = None
    ) -> OpenSequence:
        """Open a sequence. Raises `RequestError` for sampling that a model of this vocabulary cannot apply."""
        sampling = Parameters.from_message(opened.sampling)
        sampling.check(vocabulary)
        grammar = grammars.begin(opened) if grammars is not None and opened.grammar else None
        return cls(opened, list(opened.tokens), sampling, frozenset(opened.eos), grammar=grammar)

    def sampler_row(self, position: int, allowed: Allowed | None = None) -> SamplerRow:
        """Return how the token at `position` is drawn, given the tokens before it.

        If its grammar only allows tokens that end the answer, the answer ends, even before its minimum length.
        """
        return SamplerRow(
            sampling=self.sampling,
            seed=self.opened.seed,
            position=position,
            tokens=self.tokens,
            prompt_length=self.opened.prompt_length,
            eos=frozenset() if allowed is not None and self._must_end(allowed) else self.eos,
            allowed=None if allowed is None else allowed.tokens,
            history=self.history,
        )

    def _must_end(self, allowed: Allowed) -> bool:
        """Return True if every allowed token ends the answer: the grammar's end, or a stop token of the request."""
        if allowed.must_end or not self.sampling.min_tokens:
            return allowed.must_end
        ends = [token for token in self.eos if token < len(allowed.tokens)]
        return bool(allowed.tokens.sum() == allowed.tokens[ends].sum())


class SequenceTable:
    """Open sequences and their KV. Cache operations run on both."""

    def __init__(
        self,
        kv: KVStore,
        vocabulary: int,
        grammars: GrammarCompiler | None = None,
        disk: KvDisk | None = None,
    ) -> None:
        """Start without sequences; `grammars` is only for the stage that draws, and `disk` only where KV is saved."""
        self._kv = kv
        self._disk = disk
        self.transfers: KvTransfers | None = None
        """Keys and values from other workers."""
        self._vocabulary = vocabulary
        self._grammars = grammars
        self._open: dict[int, OpenSequence] = {}
        self._refused: dict[int, RingError] = {}
        """Sequences that could not be opened, until they are freed."""

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._open

    def __getitem__(self, sequence: int) -> OpenSequence:
        try:
            return self._open[sequence]
        except KeyError:
            pass
        refused = self._refused.get(sequence)
        raise refused or ProtocolError(f"Sequence {sequence} is not open here.")

    def apply(
        self, operations: Iterable[step_pb2.CacheOperation], epoch: int | None = None
    ) -> dict[int, RingError]:
        """Run the cache operations of a step of an epoch in their order; a reset of None is one of all epochs.

        Returns:
            The error of each sequence whose operation failed. The other operations were run.
        """
        failed: dict[int, RingError] = {}
        for frees, several in groupby(operations, lambda each: each.HasField("free")):
            if frees:
                failed |= self._free([each.free.sequence for each in several]) | failed
                continue
            for operation in several:
                try:
                    self._apply(operation, epoch)
                except Exception as error:
                    sequences = self._concerned(operation)
                    if not sequences:
                        raise
                    for sequence in sequences:
                        failed.setdefault(sequence, _failure(error))
        return failed

    def _apply(self, operation: step_pb2.CacheOperation, epoch: int | None) -> None:
        match operation.WhichOneof("operation"):
            case "open":
                self._start(operation.open)
            case "fork":
                self._fork(operation.fork)
            case "trim":
                self._trim(operation.trim)
            case "retain":
                self._retain(operation.retain.sequence)
            case "reset":
                self._forget_fetches(epoch)
                self.reset()
            case "save":
                self._save(operation.save)
            case "adopt":
                self._adopt(operation.adopt)
            case _:
                raise ProtocolError("A cache operation is empty.")

    def _concerned(self, operation: step_pb2.CacheOperation) -> tuple[int, ...]:
        """Return the sequences that fail with an operation, or none if all do.

        A retained source that cannot be forked is among them.
        """
        match operation.WhichOneof("operation"):
            case "open":
                return (operation.open.sequence,)
            case "fork":
                fork = operation.fork
                source = self._open.get(fork.source)
                is_kept = source is not None and source.retained
                return (fork.destination, fork.source) if is_kept else (fork.destination,)
            case "trim":
                return (operation.trim.sequence,)
            case "retain" | "adopt" as name:
                return (getattr(operation, name).sequence,)
            case _:
                return ()

    def _start(self, opened: step_pb2.Open) -> None:
        sequence = opened.sequence
        if sequence in self._open:
            raise ProtocolError(f"Sequence {sequence} is open already.")
        try:
            state = OpenSequence.from_message(opened, self._vocabulary, self._grammars)
            self._kv.open(sequence, opened.max_length, opened.fill_tokens)
        except RingError as error:
            self._refused[sequence] = error
            raise
        self._refused.pop(sequence, None)
        self._open[sequence] = state

    def _fork(self, fork: step_pb2.Fork) -> None:
        source, destination = self[fork.source], self[fork.destination]
        try:
            self._kv.fork(fork.source, fork.destination, fork.length, take=fork.take)
        except Exception as error:
            if fork.take:
                # The head has given up the source already.
                self._free([fork.source])
            # The head then prefills the sequence from its start.
            raise ProtocolError(str(error) or type(error).__name__) from error
        destination.tokens = source.tokens[: fork.length]
        if fork.take:
            del self._open[fork.source]

    def _trim(self, trim: step_pb2.Trim) -> None:
        state = self[trim.sequence]
        self._kv.trim(trim.sequence, trim.length)
        del state.tokens[trim.length :]
        state.history.cut(trim.length)

    def _retain(self, sequence: int) -> None:
        state = self[sequence]
        self._kv.retain(sequence)
        state.retained = True
        # It draws no more, and its matcher's state may take many megabytes.
        state.grammar, state.history = None, History()

    def _save(self, save: step_pb2.Save) -> None:
        """Save blocks, if this rank has a disk for them. No failure concerns anything else."""
        if self._disk is not None:
            try:
                self._disk.save(self._kv, save)
            except Exception as error:  # noqa: BLE001 - it must not fail the step of other requests
                log.warning("The KV of sequence %d is not saved: %s", save.sequence, error)

    def _adopt(self, adopt: step_pb2.Adopt) -> None:
        if adopt.moved:
            self._append(adopt)
        elif self._disk is not None:
            self._disk.adopt(self._kv, adopt)
        elif adopt.length:
            raise StepFailed("This rank reads no KV from a disk.")

    def _append(self, adopt: step_pb2.Adopt) -> None:
        """Append KV from other workers to a sequence, or forget what was fetched."""
        if self.transfers is None:
            raise StepFailed("This rank has fetched no KV from other workers.")
        if not adopt.length:
            self.transfers.forget(adopt.fetch)
            return
        self.transfers.adopt(self._kv, adopt)
        if adopt.tokens:
            self.feed(self[adopt.sequence], adopt.start, adopt.tokens)

    def _free(self, sequences: Iterable[int]) -> dict[int, RingError]:
        """Free sequences, all at once, so that rows leave a batch together. Return the errors."""
        failed: dict[int, RingError] = {}
        found: dict[int, None] = {}
        for sequence in sequences:
            if self._refused.pop(sequence, None) is not None:
                continue
            self._open.pop(sequence, None)
            if sequence in found or sequence not in self._kv.sequences:
                failed[sequence] = ProtocolError(f"Sequence {sequence} is not open here.")
            else:
                found[sequence] = None
        try:
            self._kv.free(*found)
        except Exception as error:  # noqa: BLE001 - MLX raises any error of the copies
            failed |= dict.fromkeys(found, _failure(error))
        return failed

    def _forget_fetches(self, epoch: int | None) -> None:
        if self._disk is not None:
            self._disk.reset(epoch)
        if self.transfers is not None:
            self.transfers.reset(epoch)

    def reset(self, kept: Sequence[worker_pb2.KeptSequence] = (), *, moves: bool = False) -> None:
        """Free every sequence, except the part to keep of some. Fetches of KV stay: a new head may have begun some.

        Args:
            kept: what to keep, and as which sequences.
            moves: whether each of them gets memory of its own.
        """
        before, self._open = self._open, {}
        self._refused.clear()
        if not kept:
            self._kv.reset()
            return
        left = self._kv.keep([each for each in kept if each.sequence in before], moves=moves)
        for each in kept:
            if each.kept_as in left:
                state = self._open[each.kept_as] = before[each.sequence]
                self.feed(state, each.length, ())
                state.grammar = None

    def check(self, row: step_pb2.Row, count: int) -> OpenSequence:
        """Return the sequence of a row of `count` tokens.

        Raises:
            ProtocolError: it cannot step, its KV is lost, or the head expects another length.
        """
        state = self[row.sequence]
        if state.retained:
            raise ProtocolError(f"Sequence {row.sequence} is retained: it can be forked, and steps no more.")
        length = self._kv.length(row.sequence)
        if length != row.start:
            raise ProtocolError(
                f"Sequence {row.sequence} has {length} tokens of KV here; the step expects {row.start}."
            )
        try:
            self._kv.check(row.sequence, count)
        except StepFailed as error:
            # The row differs from what the head expects; only this row is computed again.
            raise ProtocolError(str(error)) from error
        return state

    @staticmethod
    def feed(state: OpenSequence, start: int, tokens: Sequence[int]) -> None:
        """Record the tokens that a row feeds, from its start on, and forget the sampled one."""
        state.tokens[start:] = tokens
        state.history.cut(start)
        state.sampled = state.drawing = None


def _failure(error: Exception) -> RingError:
    return error if isinstance(error, RingError) else StepFailed(f"{type(error).__name__}: {error}")


class TokenFeedback:
    """Sampled tokens that reach stage 0 from the last stage."""

    def __init__(self, inbox: Inbox, sequences: SequenceTable) -> None:
        self._inbox = inbox
        self._sequences = sequences
        self._expected: dict[LinkKey, tuple[int, ...]] = {}
        self._sampled_by: dict[int, LinkKey] = {}
        self._failed: dict[int, RingError] = {}
        """Errors of sequences whose row failed on a later stage, until they are sampled for again."""
        self._failed_steps: set[LinkKey] = set()
        """Steps without tokens. A later stage may fail, and report it, before this one has built the step."""

    def expect(self, key: LinkKey, sequences: Iterable[int]) -> None:
        """Record for which sequences the last stage will send tokens under `key`."""
        self.forget_before(key)
        self._expected[key] = tuple(sequences)
        self._sampled_by.update(dict.fromkeys(self._expected[key], key))
        for sequence in self._expected[key]:
            self._failed.pop(sequence, None)
        if key in self._failed_steps:
            self._forget(key)

    def forget_before(self, key: LinkKey) -> None:
        """Forget failures of earlier steps, which are all built."""
        self._failed_steps = {failed for failed in self._failed_steps if failed.step >= key.step}

    def has(self, sequence: int) -> bool:
        """Report whether the sequence's token has come, so that `token` would not wait."""
        self.collect()
        return (
            sequence in self._sequences
            and sequence not in self._sampled_by
            and self._sequences[sequence].sampled is not None
        )

    def wait(self, sequence: int, deadline: float | None) -> None:
        """Wait until the step that samples for the sequence has sent its tokens.

        Raises:
            RingError: that step failed, the deadline passed, or the link broke.
        """
        self.collect()
        key = self._sampled_by.get(sequence)
        if key is None:
            return
        try:
            message = self._inbox.recv(key, deadline)
        except RingError:
            self._failed_steps.add(key)
            self._forget(key)
            raise
        self._file(key, message)

    def token(self, sequence: int) -> int:
        """Return the token that the sequence's previous step sampled.

        Raises:
            ProtocolError: no step sampled one, or it was not sent.
            RingError: the sequence's row failed on a later stage.
        """
        token = self._sequences[sequence].sampled
        if token is None:
            raise self._failed.get(sequence) or ProtocolError(
                f"No sampled token was fed back for sequence {sequence}."
            )
        return token

    def collect(self) -> None:
        """Store tokens that have come, so that unused ones do not pile up."""
        for key, message in self._inbox.take_arrived(SAMPLED):
            if isinstance(message, RingError):
                self._failed_steps.add(key)
                self._forget(key)
            else:
                self._file(key, message)

    def reset(self) -> None:
        """Forget every sequence."""
        self._expected.clear()
        self._sampled_by.clear()
        self._failed.clear()
        self._failed_steps.clear()

    def _file(self, key: LinkKey, message: WireTensor) -> None:
        if key not in self._expected:
            return
        sequences, latest = self._forget(key)
        failed = frozenset(message.failure.sequences if message.failure is not None else ())
        if message.failure is not None:
            self._failed.update(dict.fromkeys(failed & latest, failure_to_error(message.failure)))
            self._failed = {
                sequence: error for sequence, error in self._failed.items() if sequence in self._sequences
            }
        sampled = [sequence for sequence in sequences if sequence not in failed]
        if len(sampled) != len(message.tokens):
            raise ProtocolError(f"{len(message.tokens)} tokens were fed back for {len(sampled)} sequences.")
        for sequence, token in zip(sampled, message.tokens, strict=True):
            if sequence in latest and sequence in self._sequences:
                self._sequences[sequence].sampled = token

    def _forget(self, key: LinkKey) -> tuple[tuple[int, ...], frozenset[int]]:
        """Stop expecting a step's tokens. Return its sequences, and those that no later step samples for."""
        sequences = self._expected.pop(key, ())
        latest = frozenset(sequence for sequence in sequences if self._sampled_by.get(sequence) == key)
        for sequence in latest:
            del self._sampled_by[sequence]
        return sequences, latest
