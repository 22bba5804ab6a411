"""What a rank tells of its steps for requests that are traced: a span for each chunk of a prompt, one for all of decoding.

The head exports them: a worker's machine may have no way to where traces are collected. Requests that are not traced
cost a look at each step's operations.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from mlx_ring.rpc.protos import step_pb2

Span = step_pb2.StageSpan


def unix_us() -> int:
    return time.time_ns() // 1000


class StepTraces:
    """The spans of one rank. Told of every step that is done, in order."""

    def __init__(self, clock: Callable[[], int] = unix_us) -> None:
        """`clock` gives Unix time in microseconds."""
        self._clock = clock
        self._parents: dict[int, str] = {}
        """By sequence, whose steps are traced."""
        self._decoding: dict[int, Span] = {}

    def note(self, step: step_pb2.Step, timings: step_pb2.Timings) -> list[Span]:
        """Take in a step; gives the spans that have ended with it."""
        ended = self._heed(step) if step.operations else []
        if self._parents:
            ended += self._note_rows(step, timings)
        return ended

    def _heed(self, step: step_pb2.Step) -> list[Span]:
        ended: list[Span] = []
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
                    ended += [span for sequence in [*self._parents] for span in self._end(sequence)]
                case _:
                    pass
        return ended

    def _end(self, sequence: int) -> list[Span]:
        self._parents.pop(sequence, None)
        span = self._decoding.pop(sequence, None)
        return [] if span is None else [span]

    def _note_rows(self, step: step_pb2.Step, timings: step_pb2.Timings) -> list[Span]:
        finished = self._clock()
        started = finished - (timings.finished_us - timings.started_us)
        chunks: list[Span] = []
        for row in step.rows:
            parent = self._parents.get(row.sequence)
            if parent is None:
                continue
            is_chunk = row.WhichOneof("input") in ("tokens", "embeddings")
            span = None if is_chunk else self._decoding.get(row.sequence)
            if span is None:
                span = Span(traceparent=parent, is_decode=not is_chunk, started_unix_us=started)
                if is_chunk:
                    chunks.append(span)
                else:
                    self._decoding[row.sequence] = span
            span.finished_unix_us = finished
            _add(span, row, timings)
        return chunks


def _add(span: Span, row: step_pb2.Row, timings: step_pb2.Timings) -> None:
    span.steps += 1
    span.tokens += (len(row.tokens.ids) or 1) + len(row.draft)
    span.queue_us += timings.queue_us
    span.link_wait_us += timings.link_wait_us
    span.compute_us += timings.compute_us
    span.link_send_us += timings.link_send_us
