"""What a rank tells of its steps for requests that are traced: a span for each chunk of a prompt, one for all of decoding.

The head exports them: a worker's machine may have no way to where traces are collected. Requests that are not traced
cost a look at each step's operations.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from mlx_ring.rpc.protos import step_pb2

Span = step_pb2.StageSpan
_CHUNKS = ("tokens", "embeddings")
"""Inputs of rows that read a prompt."""


def unix_us() -> int:
    return time.time_ns() // 1000


@dataclass(slots=True)
class _Work:
    """What was done so far, as plain numbers: messages are slow to count in."""

    parent: str
    is_decode: bool
    started_us: int
    finished_us: int = 0
    steps: int = 0
    tokens: int = 0
    queue_us: int = 0
    link_wait_us: int = 0
    compute_us: int = 0
    link_send_us: int = 0

    def span(self) -> Span:
        return Span(
            traceparent=self.parent,
            is_decode=self.is_decode,
            started_unix_us=self.started_us,
            finished_unix_us=self.finished_us,
            steps=self.steps,
            tokens=self.tokens,
            queue_us=self.queue_us,
            link_wait_us=self.link_wait_us,
            compute_us=self.compute_us,
            link_send_us=self.link_send_us,
        )


class StepTraces:
    """The spans of one rank. Told of every step that is done, in order."""

    def __init__(self, clock: Callable[[], int] = unix_us) -> None:
        """`clock` gives Unix time in microseconds."""
        self._clock = clock
        self._parents: dict[int, str] = {}
        """By sequence, whose steps are traced."""
        self._decoding: dict[int, _Work] = {}

    def note(self, step: step_pb2.Step, timings: step_pb2.Timings) -> list[Span]:
        """Take in a step; gives the spans that have ended with it."""
        ended = self._heed(step) if step.operations else []
        if self._parents:
            ended += self._note_rows(step, timings)
        return [work.span() for work in ended]

    def _heed(self, step: step_pb2.Step) -> list[_Work]:
        ended: list[_Work] = []
        for operation in step.operations:
            match operation.WhichOneof("operation"):
                case "open":
                    if operation.open.traceparent:
                        self._parents[operation.open.sequence] = operation.open.traceparent
                case "park":
                    ended += self._end(operation.park.sequence)
                case "free":
                    ended += self._end(operation.free.sequence)
                case "reset":
                    ended += [work for sequence in [*self._parents] for work in self._end(sequence)]
                case _:
                    pass
        return ended

    def _end(self, sequence: int) -> list[_Work]:
        self._parents.pop(sequence, None)
        work = self._decoding.pop(sequence, None)
        return [] if work is None else [work]

    def _note_rows(self, step: step_pb2.Step, timings: step_pb2.Timings) -> list[_Work]:
        """Gives the chunks of prompts: each is a span."""
        rows = [(row, parent) for row in step.rows if (parent := self._parents.get(row.sequence)) is not None]
        if not rows:
            return []
        finished = self._clock()
        # A machine without a clock of its own may be in 1970.
        started = max(0, finished - (timings.finished_us - timings.started_us))
        spent = (timings.queue_us, timings.link_wait_us, timings.compute_us, timings.link_send_us)
        chunks: list[_Work] = []
        for row, parent in rows:
            if row.WhichOneof("input") in _CHUNKS:
                work = _Work(parent, is_decode=False, started_us=started)
                chunks.append(work)
            else:
                work = self._decoding.get(row.sequence)
                if work is None:
                    work = self._decoding[row.sequence] = _Work(parent, is_decode=True, started_us=started)
            _add(work, row, finished, spent)
        return chunks


def _add(work: _Work, row: step_pb2.Row, finished_us: int, spent: tuple[int, int, int, int]) -> None:
    queue, link_wait, compute, link_send = spent
    work.finished_us = finished_us
    work.steps += 1
    work.tokens += (len(row.tokens.ids) or 1) + len(row.draft)
    work.queue_us += queue
    work.link_wait_us += link_wait
    work.compute_us += compute
    work.link_send_us += link_send
