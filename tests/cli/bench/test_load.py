"""Loads against a server with manners and faults of every kind."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from tests.cli.bench.foreign import Foreign, serving_foreign

from mlx_ring.cli.bench.client import BenchClient, RequestOptions, Target
from mlx_ring.cli.bench.course import Run, run_load
from mlx_ring.cli.bench.summary import STOPPED, Record
from mlx_ring.cli.bench.workload import Job

TIMEOUT_S = 60.0
TEXT = "river stone lamp"


def jobs_of(count: int, output_tokens: int = 5) -> list[Job]:
    return [Job(number, TEXT, output_tokens, arrives_s=0.0) for number in range(count)]


def load(
    foreign: Foreign,
    jobs: Sequence[Job],
    *,
    concurrency: int | None = 2,
    timeout_s: float = TIMEOUT_S,
    told: list[int] | None = None,
    **options: Any,
) -> Run:
    """Send the jobs to a server that is started for them."""

    async def send(url: str) -> Run:
        client = BenchClient(url, api_key="secret", timeout_s=timeout_s)
        target = Target(url, "small", None, ignores_eos=True)
        heard = [] if told is None else told
        try:
            return await run_load(
                client,
                target,
                jobs,
                RequestOptions(**options),
                concurrency=concurrency,
                run=Run(),
                on_answer=lambda record: heard.append(record.number),
            )
        finally:
            await client.close()

    with serving_foreign(foreign) as url:
        return asyncio.run(send(url))


def only(run: Run) -> Record:
    (record,) = run.records
    return record


def test_a_request_is_what_the_interface_says_and_its_answer_is_counted_by_usage() -> None:
    foreign = Foreign(per_event=2)
    record = only(load(foreign, jobs_of(1, 6)))
    assert record.error is None
    assert (record.prompt_tokens, record.output_tokens, len(record.arrivals_s)) == (16, 6, 3)
    assert (record.finish_reason, record.status, record.has_usage) == ("length", 200, True)
    assert record.sent_s <= record.arrivals_s[0] <= record.arrivals_s[-1] <= record.ended_s
    assert foreign.paths == ["/v1/completions"]
    assert foreign.bodies == [
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
    assert foreign.headers[0]["authorization"] == "Bearer secret"
    assert foreign.headers[0]["accept-encoding"] == "identity"


def test_chat_sends_a_message_and_a_temperature_brings_seeds() -> None:
    foreign = Foreign()
    run = load(foreign, jobs_of(2), endpoint="chat", temperature=0.5)
    assert [record.error for record in run.records] == [None, None]
    assert set(foreign.paths) == {"/v1/chat/completions"}
    assert foreign.bodies[0]["messages"] == [{"role": "user", "content": TEXT}]
    assert {(body["temperature"], body["seed"]) for body in foreign.bodies} == {(0.5, 0), (0.5, 1)}


def test_events_are_counted_where_no_usage_is_told() -> None:
    record = only(load(Foreign(reports_usage=False), jobs_of(1)))
    assert (record.error, record.has_usage, record.output_tokens) == (None, False, 5)


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("silence", "stream ended early"),
        ("cut", "stream ended early: RemoteProtocolError"),
        ("error", "in the stream: out of memory"),
        ("nonsense", "not understood: JSONDecodeError"),
        ("no stream", "no stream: the answer is application/json"),
        ("400", "HTTP 400: Status 400."),
        ("429", "HTTP 429: Status 429."),
        ("500", "HTTP 500: Status 500."),
    ],
)
def test_every_fault_has_a_name_and_stops_no_other_request(fault: str, error: str) -> None:
    told: list[int] = []
    run = load(Foreign(fault=fault), jobs_of(3), told=told)
    assert sorted(told) == [0, 1, 2]
    assert len(run.records) == 3
    for record in run.records:
        assert record.error is not None
        assert record.error.startswith(error)
        assert record.ended_s >= record.sent_s


def test_a_stream_whose_last_line_lacks_its_end_is_whole() -> None:
    assert only(load(Foreign(fault="no newline"), jobs_of(1))).error is None


def test_a_server_that_stops_talking_runs_into_the_timeout() -> None:
    record = only(load(Foreign(fault="hang"), jobs_of(1), timeout_s=0.3))
    assert (record.error, len(record.arrivals_s)) == ("timeout", 1)


def test_nobody_there_is_an_error_of_the_connection() -> None:
    async def ask() -> Record:
        client = BenchClient("http://127.0.0.1:9", api_key=None, timeout_s=TIMEOUT_S)
        target = Target(client.url, "small", None, ignores_eos=False)
        run = await run_load(client, target, jobs_of(1), RequestOptions(), concurrency=1, run=Run())
        await client.close()
        return only(run)

    record = asyncio.run(ask())
    assert record.error_kind == "connection"


def test_a_closed_loop_keeps_exactly_so_many_under_way() -> None:
    foreign = Foreign(together=3)  # The first answers begin when three have come: fewer would wait for ever.
    run = load(foreign, jobs_of(10), concurrency=3)
    assert [record.error for record in run.records] == [None] * 10
    assert foreign.most_under_way == 3
    assert [record.number for record in run.records] == list(range(10)), "in the order of sending"
    assert run.duration_s == max(record.ended_s for record in run.records)


def test_an_open_loop_sends_however_many_are_under_way() -> None:
    foreign = Foreign(together=12)
    run = load(foreign, jobs_of(12), concurrency=None)
    assert [record.error for record in run.records] == [None] * 12
    assert foreign.most_under_way == 12


def test_a_load_that_is_stopped_tells_what_was_seen() -> None:
    foreign = Foreign(fault="hang")

    async def stop(url: str) -> Run:
        client, run = BenchClient(url, api_key=None, timeout_s=TIMEOUT_S), Run()
        target = Target(url, "small", None, ignores_eos=False)
        task = asyncio.ensure_future(
            run_load(client, target, jobs_of(5), RequestOptions(), concurrency=2, run=run)
        )
        while not (len(run.records) == 2 and all(record.arrivals_s for record in run.records)):  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.005)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await client.close()
        return run

    with serving_foreign(foreign) as url:
        run = asyncio.run(stop(url))
    assert [(record.error, len(record.arrivals_s)) for record in run.records] == [(STOPPED, 1)] * 2
    assert run.duration_s == 0
