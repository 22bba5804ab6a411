"""Load tests against a server with every kind of behaviour and fault."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from tests.cli.bench.third_party import ThirdPartyServer, serving_third_party

from mlx_ring.cli.bench.client import BenchClient, RequestOptions, Target
from mlx_ring.cli.bench.course import Run, run_load
from mlx_ring.cli.bench.summary import STOPPED, Record
from mlx_ring.cli.bench.workload import Job

TIMEOUT_S = 60.0
TEXT = "river stone lamp"


def jobs_of(count: int, output_tokens: int = 5) -> list[Job]:
    return [Job(number, TEXT, output_tokens, arrives_s=0.0) for number in range(count)]


def load(
    server: ThirdPartyServer,
    jobs: Sequence[Job],
    *,
    concurrency: int | None = 2,
    timeout_s: float = TIMEOUT_S,
    answered: list[int] | None = None,
    **options: Any,
) -> Run:
    """Send the jobs to a server that is started for them."""

    async def send(url: str) -> Run:
        client = BenchClient(url, api_key="secret", timeout_s=timeout_s)
        target = Target(url, "small", None, ignores_eos=True)
        numbers = [] if answered is None else answered
        try:
            return await run_load(
                client,
                target,
                jobs,
                RequestOptions(**options),
                concurrency=concurrency,
                run=Run(),
                on_answer=lambda record: numbers.append(record.number),
            )
        finally:
            await client.close()

    with serving_third_party(server) as url:
        return asyncio.run(send(url))


def only(run: Run) -> Record:
    (record,) = run.records
    return record


def test_a_request_has_the_api_s_fields_and_usage_counts_its_tokens() -> None:
    server = ThirdPartyServer(tokens_per_event=2)
    record = only(load(server, jobs_of(1, 6)))
    assert record.error is None
    assert (record.prompt_tokens, record.output_tokens, len(record.arrivals_s)) == (16, 6, 3)
    assert (record.finish_reason, record.status, record.has_usage) == ("length", 200, True)
    assert record.sent_s <= record.arrivals_s[0] <= record.arrivals_s[-1] <= record.ended_s
    assert server.paths == ["/v1/completions"]
    assert server.bodies == [
        {
            "model": "small",
            "prompt": TEXT,
            "max_tokens": 6,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
    ]
    assert server.headers[0]["authorization"] == "Bearer secret"
    assert server.headers[0]["accept-encoding"] == "identity"


def test_chat_sends_a_message_and_a_temperature_adds_seeds() -> None:
    server = ThirdPartyServer()
    run = load(server, jobs_of(2), endpoint="chat", temperature=0.5)
    assert [record.error for record in run.records] == [None, None]
    assert set(server.paths) == {"/v1/chat/completions"}
    assert server.bodies[0]["messages"] == [{"role": "user", "content": TEXT}]
    assert {(body["temperature"], body["seed"]) for body in server.bodies} == {(0.5, 0), (0.5, 1)}


def test_events_are_counted_if_no_usage_is_reported() -> None:
    record = only(load(ThirdPartyServer(reports_usage=False), jobs_of(1)))
    assert (record.error, record.has_usage, record.output_tokens) == (None, False, 5)


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("silence", "stream ended early"),
        ("cut", "stream ended early: RemoteProtocolError"),
        ("error", "in the stream: out of memory"),
        ("nonsense", "not understood: JSONDecodeError"),
        ("no stream", "the answer is not a stream, but application/json"),
        ("400", "HTTP 400: Status 400."),
        ("429", "HTTP 429: Status 429."),
        ("500", "HTTP 500: Status 500."),
    ],
)
def test_every_fault_is_named_and_stops_no_other_request(fault: str, error: str) -> None:
    answered: list[int] = []
    run = load(ThirdPartyServer(fault=fault), jobs_of(3), answered=answered)
    assert sorted(answered) == [0, 1, 2]
    assert len(run.records) == 3
    for record in run.records:
        assert record.error is not None
        assert record.error.startswith(error)
        assert record.ended_s >= record.sent_s


def test_a_stream_without_a_final_newline_is_complete() -> None:
    assert only(load(ThirdPartyServer(fault="no newline"), jobs_of(1))).error is None


@pytest.mark.slow
def test_a_stalled_stream_times_out() -> None:
    record = only(load(ThirdPartyServer(fault="hang"), jobs_of(1), timeout_s=0.3))
    assert (record.error, len(record.arrivals_s)) == ("timeout", 1)


def test_an_unreachable_server_is_a_connection_error() -> None:
    async def ask() -> Record:
        client = BenchClient("http://127.0.0.1:9", api_key=None, timeout_s=TIMEOUT_S)
        target = Target(client.url, "small", None, ignores_eos=False)
        run = await run_load(client, target, jobs_of(1), RequestOptions(), concurrency=1, run=Run())
        await client.close()
        return only(run)

    record = asyncio.run(ask())
    assert record.error_kind == "connection"


def test_a_closed_loop_keeps_exactly_its_concurrency_in_flight() -> None:
    # The first answers start at the third request: fewer would wait forever.
    server = ThirdPartyServer(starts_together=3)
    run = load(server, jobs_of(10), concurrency=3)
    assert [record.error for record in run.records] == [None] * 10
    assert server.max_in_flight == 3
    assert [record.number for record in run.records] == list(range(10)), "in the order of sending"
    assert run.duration_s == max(record.ended_s for record in run.records)


def test_an_open_loop_sends_however_many_are_in_flight() -> None:
    server = ThirdPartyServer(starts_together=12)
    run = load(server, jobs_of(12), concurrency=None)
    assert [record.error for record in run.records] == [None] * 12
    assert server.max_in_flight == 12


@pytest.mark.slow
def test_a_stopped_load_keeps_its_records() -> None:
    server = ThirdPartyServer(fault="hang")

    async def stop(url: str) -> Run:
        client, run = BenchClient(url, api_key=None, timeout_s=TIMEOUT_S), Run()
        target = Target(url, "small", None, ignores_eos=False)
        task = asyncio.ensure_future(
            run_load(client, target, jobs_of(5), RequestOptions(), concurrency=2, run=run)
        )
        while not (len(run.records) == 2 and all(record.arrivals_s for record in run.records)):  # noqa: ASYNC110 - no event reports it
            await asyncio.sleep(0.005)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await client.close()
        return run

    with serving_third_party(server) as url:
        run = asyncio.run(stop(url))
    assert [(record.error, len(record.arrivals_s)) for record in run.records] == [(STOPPED, 1)] * 2
    assert run.duration_s == 0
