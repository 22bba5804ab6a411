"""Rank of a twin: its KV cache is a list of tokens, and its model a function."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from mlx_ring.core.errors import ProtocolError
from mlx_ring.core.types import RankId
from mlx_ring.engine.prefix_cache import shared_length
from mlx_ring.rpc.protos import step_pb2, worker_pb2

NextToken = Callable[[Sequence[int]], int]
"""The token that follows a history of tokens."""

Reach = Callable[[int, int, int], bool]
"""Test for a possible trim or fork of a sequence.

Its arguments: the sequence's length, its maximum length so far, and the requested length.
"""

KV_BYTES_PER_TOKEN = 8


def anywhere(_present: int, _reached: int, _length: int) -> bool:
    """Allow every trim and fork, as for a model that attends to every token."""
    return True


def hash_token(vocab_size: int) -> NextToken:
    """Return a model with that vocabulary: a hash of the history gives the next token, on every machine."""

    def next_token(history: Sequence[int]) -> int:
        return zlib.crc32(",".join(map(str, history)).encode()) % vocab_size

    return next_token


@dataclass(slots=True)
class HeldSequence:
    """Sequence on a rank."""

    opened: step_pb2.Open
    tokens: list[int]
    reached: int = 0
    """Maximum number of tokens so far."""
    retained: bool = False


@dataclass(slots=True)
class TwinRank:
    """Queued steps, undelivered answers and KV cache of a rank."""

    id: RankId
    reach: Reach
    pads: bool
    queue: deque[step_pb2.Step] = field(default_factory=deque[step_pb2.Step])
    answers: deque[step_pb2.StepDone] = field(default_factory=deque[step_pb2.StepDone])
    held: dict[int, HeldSequence] = field(default_factory=dict[int, HeldSequence])
    executed: int = 0
    disk: dict[bytes, list[int]] = field(default_factory=dict[bytes, "list[int]"])
    """Saved tokens by a block's digest."""
    ends: set[bytes] = field(default_factory=set[bytes])
    """Last blocks at whose end layers that forget were saved."""
    listed: dict[bytes, list[int]] = field(default_factory=dict[bytes, "list[int]"])
    """Tokens of listed blocks by their place."""
    fetched: dict[int, list[int]] = field(default_factory=dict[int, "list[int]"])
    moved: dict[int, list[int]] = field(default_factory=dict[int, "list[int]"])
    """Tokens that were fetched from another twin."""

    def apply(self, operations: Sequence[step_pb2.CacheOperation]) -> None:
        for operation in operations:
            end = operation.end_stage or self.id.stage + 1
            if not operation.first_stage <= self.id.stage < end:
                continue
            match operation.WhichOneof("operation"):
                case "open":
                    if operation.open.sequence in self.held:
                        raise ProtocolError(f"Sequence {operation.open.sequence} is open already.")
                    self.held[operation.open.sequence] = HeldSequence(
                        operation.open, list(operation.open.tokens)
                    )
                case "fork":
                    self._fork(operation.fork)
                case "trim":
                    self._trim(operation.trim)
                case "retain":
                    self.find(operation.retain.sequence).retained = True
                case "free":
                    self.find(operation.free.sequence)
                    del self.held[operation.free.sequence]
                case "reset":
                    self.held.clear()
                case _:
                    self._use_disk(operation)

    def _use_disk(self, operation: step_pb2.CacheOperation) -> None:
        match operation.WhichOneof("operation"):
            case "save":
                self._save(operation.save)
            case "adopt":
                self._adopt(operation.adopt)
            case other:
                raise ProtocolError(f"The twin knows no operation {other}.")

    def _save(self, save: step_pb2.Save) -> None:
        size, held = save.blocks.block_tokens, self.find(save.sequence)
        if save.end:
            length = size * len(save.blocks.digests)
            if length <= len(held.tokens) and self.reach(len(held.tokens), held.reached, length):
                self.ends.add(save.blocks.digests[-1])
            return
        tokens, last = held.tokens, len(save.blocks.digests) - 1
        missing = [
            (number, digest)
            for number, digest in enumerate(save.blocks.digests)
            if number >= save.first and digest not in self.disk
        ]
        for number, digest in missing[: save.most or None]:
            own = save.blocks.last_tokens or size if number == last else size
            self.disk[digest] = tokens[number * size : number * size + own]
        self.listed.update({listed.place: self.disk[listed.digest] for listed in save.listed})

    def _append(self, adopt: step_pb2.Adopt) -> None:
        is_last = adopt.part + 1 >= adopt.parts
        moved = self.moved.pop(adopt.fetch, []) if is_last else self.moved.get(adopt.fetch, [])
        if adopt.length:
            held = self.find(adopt.sequence)
            if (len(held.tokens), adopt.length) != (adopt.start, adopt.start + len(moved)):
                raise ProtocolError(f"Sequence {adopt.sequence} cannot be appended to.")
            if not is_last:
                return
            if moved != list(adopt.tokens):
                raise ProtocolError(f"Sequence {adopt.sequence} has other tokens than what was fetched.")
            held.tokens += moved
            held.reached = max(held.reached, adopt.length)

    def _adopt(self, adopt: step_pb2.Adopt) -> None:
        if adopt.moved:
            self._append(adopt)
            return
        is_last = adopt.part + 1 >= adopt.parts
        fetched = self.fetched.pop(adopt.fetch, []) if is_last else self.fetched.get(adopt.fetch, [])
        if adopt.length:
            held = self.find(adopt.sequence)
            if held.tokens != fetched[: adopt.length]:
                raise ProtocolError(f"Sequence {adopt.sequence} has other tokens than what was fetched.")
            held.reached = adopt.length if is_last else 0

    def fetch(self, wanted: worker_pb2.FetchKv) -> worker_pb2.KvFetched:
        """Read blocks from the disk, or count them; return the answer."""
        found = [*takewhile(self.disk.__contains__, wanted.blocks.digests)]
        if wanted.for_save:
            return worker_pb2.KvFetched(id=wanted.id, blocks=len(found))
        ends = [place + 1 for place, digest in enumerate(found) if digest in self.ends]
        if self.reach is anywhere:
            ends = []
        elif not wanted.only_looks:
            ends = ends[-1:] if ends[-1:] == [len(wanted.blocks.digests)] else []
            found = found[: len(ends) and ends[0]]
        else:
            found = found[: max(ends, default=0)]
        next_tokens = 0
        if found and not wanted.only_looks:
            self.fetched[wanted.id] = [token for digest in found for token in self.disk[digest]]
            if len(found) == len(wanted.blocks.digests):
                listed = self.listed.get(wanted.next.place, [])
                next_tokens = shared_length(tuple(listed), tuple(wanted.next.tokens))
                self.fetched[wanted.id] += listed
        return worker_pb2.KvFetched(id=wanted.id, blocks=len(found), ends=ends, next_tokens=next_tokens)

    def rows(self, step: step_pb2.Step) -> Sequence[step_pb2.Row]:
        """Return the rows that this rank runs."""
        return step.rows if not step.end_stage or self.id.stage < step.end_stage else ()

    def keep(self, held: Mapping[int, HeldSequence], kept: worker_pb2.KeptKv) -> None:
        """Keep KV of a rank of the epoch before, whose sequences were `held`."""
        for each in kept.sequences if self.id.stage >= kept.first_stage else ():
            self.held[each.kept_as] = held[each.sequence]
            self._trim(step_pb2.Trim(sequence=each.kept_as, length=each.length))

    def find(self, sequence: int) -> HeldSequence:
        held = self.held.get(sequence)
        if held is None:
            raise ProtocolError(f"Sequence {sequence} is not open.")
        return held

    def _fork(self, fork: step_pb2.Fork) -> None:
        source, destination = self.find(fork.source), self.find(fork.destination)
        present = len(source.tokens)
        can_fork = fork.length <= present and self.reach(present, source.reached, fork.length)
        if destination.tokens or not can_fork:
            raise ProtocolError(
                f"Sequence {fork.source} has not {fork.length} tokens for {fork.destination}."
            )
        destination.tokens, destination.reached = source.tokens[: fork.length], source.reached
        if fork.take:
            del self.held[fork.source]

    def _trim(self, trim: step_pb2.Trim) -> None:
        held = self.find(trim.sequence)
        present = len(held.tokens)
        if trim.length > present or not self.reach(present, held.reached, trim.length):
            raise ProtocolError(f"Sequence {trim.sequence} has {len(held.tokens)} tokens, not {trim.length}.")
        del held.tokens[trim.length :]

    def feed(self, row: step_pb2.Row, sampled: dict[int, int]) -> HeldSequence:
        """Append a row's tokens to its sequence; `sampled` maps positions to the tokens sampled so far."""
        held = self.find(row.sequence)
        if held.retained:
            raise ProtocolError(f"Sequence {row.sequence} has ended; it steps no more.")
        if len(held.tokens) != row.start:
            raise ProtocolError(f"Sequence {row.sequence} has {len(held.tokens)} tokens, not {row.start}.")
        if row.previous and row.start not in sampled:
            raise ProtocolError(f"The row before sampled no token for sequence {row.sequence}.")
        given = row.tokens.ids or [sampled[row.start] if row.previous else row.token]
        held.tokens += [*given, *row.draft]
        held.reached = max(held.reached, len(held.tokens))
        if len(held.tokens) > held.opened.max_length:
            raise ProtocolError(f"Sequence {row.sequence} outgrows its {held.opened.max_length} tokens.")
        return held

    @property
    def kv_bytes(self) -> int:
        lengths = [len(held.tokens) for held in self.held.values() if not held.retained]
        retained = sum(len(held.tokens) for held in self.held.values() if held.retained)
        running = max(lengths, default=0) * len(lengths) if self.pads else sum(lengths)
        return KV_BYTES_PER_TOKEN * (running + retained)
