"""Clients who ask again as soon as they are answered, on a plain policy: the planner's question without an engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from mlx_ring.rpc.protos import step_pb2
from mlx_ring.rpc.protos.step_pb2 import Want


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of every client."""

    prompt_chunks: int = 0
    """Steps that a prompt takes; 0: there are answers only."""
    chunk_tokens: int = 1
    answer_tokens: int | None = None
    """Length of an answer; None for endless answers."""


@dataclass(slots=True, eq=False)
class _Stream:
    """One client's place in a decode group, and its present sequence."""

    sequence: int
    group: int
    chunks_left: int
    position: int = 0
    """Tokens that were sent."""
    tokens_left: int | None = None
    """Tokens of the answer that are not requested yet."""
    unanswered: int = 0


@dataclass(slots=True, eq=False)
class _Group:
    unanswered: int = 0
    last_step: int = 0
    streams: list[_Stream] = field(default_factory=list[_Stream])


class ClosedLoop:
    """Decode groups of some rows each, with some steps in flight; prompts in chunks between them.

    Groups take turns. A chunk goes out when every group that can has stepped since the last, and `stages + 1` are under
    way at most.
    """

    def __init__(
        self, stages: int, groups: Sequence[int], *, steps_ahead: int = 2, load: Load | None = None
    ) -> None:
        """Prepare the clients; `groups` has the rows of each decode group."""
        self._stages = stages
        self._load = Load() if load is None else load
        self._steps_ahead = steps_ahead
        self._groups = [_Group() for _ in groups]
        self._prompts: deque[_Stream] = deque()
        self._rows: dict[int, tuple[_Group | None, list[_Stream]]] = {}
        """Group of each step that the last stage has not answered."""
        self._sent = self._sequences = self._last_chunk = self._chunks_in_flight = 0
        for number, rows in enumerate(groups):
            for _ in range(rows):
                self._groups[number].streams.append(self._ask(number))

    def _ask(self, group: int) -> _Stream:
        self._sequences += 1
        stream = _Stream(
            self._sequences, group, self._load.prompt_chunks, tokens_left=self._load.answer_tokens
        )
        if stream.chunks_left:
            self._prompts.append(stream)
        return stream

    def schedule(self, now: float) -> list[step_pb2.Step]:
        """Return every step that can start now, in order."""
        del now
        return list(self._steps())

    def _steps(self) -> Iterator[step_pb2.Step]:
        while (step := self._decode_step() or self._chunk_step()) is not None:
            yield step

    def _decode_step(self) -> step_pb2.Step | None:
        """Return the group that has waited longest; the same group twice in a row only if no other can."""
        going = sorted(filter(self._is_going, self._groups), key=lambda group: group.last_step)
        for group in going:
            ready = [stream for stream in group.streams if _can_step(stream)]
            if group.unanswered < self._steps_ahead and ready and (not group.unanswered or group is going[0]):
                step = self._make_step(group, ready)
                group.unanswered += 1
                group.last_step = self._sent
                return step
        return None

    def _is_going(self, group: _Group) -> bool:
        return group.unanswered > 0 or any(map(_can_step, group.streams))

    def _chunk_step(self) -> step_pb2.Step | None:
        if not self._prompts or self._chunks_in_flight > self._stages:
            return None
        if any(group.last_step < self._last_chunk for group in self._groups if self._is_going(group)):
            return None
        stream = self._prompts[0]
        stream.chunks_left -= 1
        step = self._make_step(None, [stream])
        if not stream.chunks_left:
            self._prompts.popleft()
        self._chunks_in_flight += 1
        self._last_chunk = self._sent
        return step

    def _make_step(self, group: _Group | None, streams: list[_Stream]) -> step_pb2.Step:
        self._sent += 1
        self._rows[self._sent] = (group, streams)
        rows = [self._chunk(stream) if group is None else _next_token(stream) for stream in streams]
        return step_pb2.Step(step=self._sent, rows=rows)

    def _chunk(self, stream: _Stream) -> step_pb2.Row:
        tokens = self._load.chunk_tokens
        row = step_pb2.Row(
            sequence=stream.sequence, start=stream.position, tokens=step_pb2.Tokens(ids=[1] * tokens)
        )
        stream.position += tokens
        if not stream.chunks_left:
            _want_token(stream, row)
        return row

    def on_answer(self, done: step_pb2.StepDone, now: float) -> None:
        """Record an answer; only the last stage's count."""
        del now
        if done.stage != self._stages - 1:
            return
        group, streams = self._rows.pop(done.step)
        if group is None:
            self._chunks_in_flight -= 1
        else:
            group.unanswered -= 1
        for stream, result in zip(streams, done.results, strict=True):
            stream.unanswered -= len(result.tokens)
            if stream.tokens_left == 0 and not stream.unanswered:
                place = self._groups[stream.group].streams
                place[place.index(stream)] = self._ask(stream.group)


def _can_step(stream: _Stream) -> bool:
    return not stream.chunks_left and stream.tokens_left != 0


def _next_token(stream: _Stream) -> step_pb2.Row:
    row = step_pb2.Row(sequence=stream.sequence, start=stream.position, previous=True)
    stream.position += 1
    _want_token(stream, row)
    return row


def _want_token(stream: _Stream, row: step_pb2.Row) -> None:
    row.wants.append(Want(where=Want.LAST, what=Want.TOKEN))
    stream.unanswered += 1
    if stream.tokens_left is not None:
        stream.tokens_left -= 1
