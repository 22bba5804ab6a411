"""Replies of a rank: trace spans for traced requests."""

from __future__ import annotations

from mlx_ring.rpc.protos import step_pb2
from mlx_ring.worker.replies import StepTraces

TIMINGS = step_pb2.Timings(
    started_us=100, finished_us=140, queue_us=1, link_wait_us=5, compute_us=30, link_send_us=4
)
Operation = step_pb2.CacheOperation


def opened(sequence: int, traceparent: str) -> Operation:
    return Operation(open=step_pb2.Open(sequence=sequence, traceparent=traceparent))


def chunk(sequence: int, tokens: int) -> step_pb2.Row:
    return step_pb2.Row(sequence=sequence, tokens=step_pb2.Tokens(ids=range(tokens)))


def decode(sequence: int, *draft: int) -> step_pb2.Row:
    return step_pb2.Row(sequence=sequence, previous=True, draft=draft)


def step(*rows: step_pb2.Row, operations: tuple[Operation, ...] = ()) -> step_pb2.Step:
    return step_pb2.Step(rows=rows, operations=operations)


def test_each_chunk_is_a_span_and_all_decoding_is_one_span_at_the_end() -> None:
    now = [1_000]
    traces = StepTraces(lambda: now[0])
    (first,) = traces.note(step(chunk(1, 8), operations=(opened(1, "tp"),)), TIMINGS)
    (second,) = traces.note(step(chunk(1, 3)), TIMINGS)
    assert (first.tokens, second.tokens, first.is_decode) == (8, 3, False)
    assert (first.started_unix_us, first.finished_unix_us) == (960, 1_000)
    now[0] = 2_000
    assert traces.note(step(decode(1)), TIMINGS) == []
    now[0] = 3_000
    assert traces.note(step(decode(1, 7, 8)), TIMINGS) == []
    (ended,) = traces.note(step(operations=(Operation(retain=step_pb2.Retain(sequence=1)),)), TIMINGS)
    assert (ended.traceparent, ended.is_decode, ended.steps, ended.tokens) == ("tp", True, 2, 4)
    assert (ended.started_unix_us, ended.finished_unix_us) == (1_960, 3_000)
    assert (ended.queue_us, ended.link_wait_us, ended.compute_us, ended.link_send_us) == (2, 10, 60, 8)
    assert traces.note(step(decode(1)), TIMINGS) == [], "the request has ended"


def test_untraced_requests_have_no_spans() -> None:
    traces = StepTraces(lambda: 0)
    spans = traces.note(step(chunk(1, 4), chunk(2, 4), operations=(opened(1, ""), opened(2, "tp"))), TIMINGS)
    assert [span.traceparent for span in spans] == ["tp"]


def test_reset_ends_the_spans_of_decoding_requests() -> None:
    traces = StepTraces(lambda: 0)
    traces.note(step(decode(1), decode(2), operations=(opened(1, "a"), opened(2, "b"))), TIMINGS)
    ended = traces.note(step(operations=(Operation(reset=step_pb2.Reset()),)), TIMINGS)
    assert [span.traceparent for span in ended] == ["a", "b"]
