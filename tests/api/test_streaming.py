"""Over a socket: streams as they are sent, clients that leave, errors in mid-stream."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from functools import partial

import httpx
import pytest
from tests.api.clients import serving
from tests.api.twins import ANSWER_TEXT, TwinService
from tests.eventually import eventually

from mlx_ring.api.settings import ApiSettings
from mlx_ring.core.engine_stats import Policy
from mlx_ring.core.errors import WorkerLost

CHAT = {"messages": [{"role": "user", "content": "Hello."}], "stream": True}
ENDLESS = {"prompt": "Hello.", "max_tokens": 10**9, "stream": True}
PATIENCE_S = 20.0


@pytest.fixture
def stuck() -> Iterator[tuple[TwinService, str]]:
    """Yield a server whose workers never answer, and which keeps streams alive every few milliseconds."""
    service = TwinService(automatic=False)
    with serving(service, ApiSettings(keep_alive_s=0.005)) as url:
        yield service, url


def waiting(service: TwinService) -> int:
    stats = service.engine.stats().scheduler
    return stats.running + stats.waiting


def test_a_stream_ends_with_its_reason_and_done() -> None:
    with serving(TwinService()) as url, httpx.stream("POST", f"{url}/v1/chat/completions", json=CHAT) as got:
        assert got.headers["content-type"].startswith("text/event-stream")
        assert got.headers["cache-control"] == "no-cache"
        lines = [line for line in got.iter_lines() if line]
    assert '"finish_reason":"stop"' in lines[-2]
    assert lines[-1] == "data: [DONE]"


def test_a_stream_begins_and_stays_alive_before_the_first_token(stuck: tuple[TwinService, str]) -> None:
    _, url = stuck
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=CHAT) as got:
        lines = (line for line in got.iter_lines() if line)
        assert '"role":"assistant"' in next(lines)
        assert [next(lines), next(lines)] == [": keep-alive"] * 2


@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_leaves_a_stream_stops_every_sequence(n: int) -> None:
    service = TwinService(context=10**9)
    with serving(service) as url:
        with httpx.stream("POST", f"{url}/v1/completions", json=ENDLESS | {"n": n}) as got:
            lines = got.iter_lines()
            for _ in range(5):
                next(lines)
            eventually(lambda: service.sequences_held == n)
            assert httpx.get(f"{url}/cache/stats").json()["kv_bytes"] > 0
        eventually(lambda: service.sequences_held == 0)
        assert waiting(service) == 0
        assert httpx.get(f"{url}/health").json()["kv_bytes"] == 0
        assert service.engine.stats().finished == {"abort": n}
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "x"}).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_before_the_first_token_stops_its_sequence(
    stuck: tuple[TwinService, str], *, stream: bool
) -> None:
    service, url = stuck
    address = httpx.URL(url)
    body = httpx.Request("POST", f"{url}/v1/chat/completions", json=CHAT | {"stream": stream})
    with socket.create_connection((address.host, address.port or 0)) as connection:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body.content)}\r\n\r\n"
        connection.sendall(head.encode() + body.content)
        eventually(lambda: waiting(service) == 1)
    eventually(lambda: waiting(service) == 0)
    assert service.engine.stats().finished == {"abort": 1}


def test_an_error_in_mid_stream_is_an_event_and_the_last(stuck: tuple[TwinService, str]) -> None:
    service, url = stuck
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=CHAT) as got:
        lines = (line for line in got.iter_lines() if line and not line.startswith(":"))
        assert got.status_code == 200
        next(lines)
        service.executor.lose(WorkerLost("Worker 0 of stage 1 was ended by signal 9."))
        rest = list(lines)
    assert len(rest) == 1
    assert '{"error":{"message":"Worker 0 of stage 1 was ended by signal 9."' in rest[0]
    assert '"code":"worker_lost"' in rest[0]


def test_a_request_over_its_time_ends_with_408_and_frees_its_place() -> None:
    service = TwinService(automatic=False, policy=Policy(request_timeout_s=0.05))
    with serving(service) as url:
        answer = httpx.post(f"{url}/v1/chat/completions", json=CHAT | {"stream": False}, timeout=PATIENCE_S)
    assert (answer.status_code, answer.headers["x-should-retry"]) == (408, "false")
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("timeout_error", "request_timeout")
    assert "0.05 s (--request-timeout-s)" in error["message"]
    assert waiting(service) == 0
    assert service.engine.stats().finished == {"error": 1}


def test_a_stream_over_its_time_ends_with_the_error_as_its_last_event() -> None:
    service = TwinService(automatic=False, policy=Policy(request_timeout_s=0.05))
    with (
        serving(service) as url,
        httpx.stream("POST", f"{url}/v1/chat/completions", json=CHAT, timeout=PATIENCE_S) as got,
    ):
        lines = [line for line in got.iter_lines() if line]
    assert len(lines) == 2
    assert '"role":"assistant"' in lines[0]
    assert '"code":"request_timeout"' in lines[1]


def test_a_request_in_time_is_not_ended_later() -> None:
    service = TwinService(policy=Policy(request_timeout_s=PATIENCE_S))
    with serving(service) as url:
        answer = httpx.post(f"{url}/v1/chat/completions", json=CHAT | {"stream": False})
    assert answer.json()["choices"][0]["message"]["content"] == ANSWER_TEXT
    assert service.engine.stats().finished == {"stop": 1}


def test_over_the_places_to_wait_429_says_when_to_come_again_until_one_is_free() -> None:
    service = TwinService(automatic=False, policy=Policy(max_num_seqs=1, max_queued_requests=1))
    with serving(service) as url, httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
        chat = partial(client.stream, "POST", "/v1/chat/completions", json=CHAT)
        with chat(), chat() as second:
            assert (waiting(service), second.status_code) == (2, 200)
            refused = client.post("/v1/chat/completions", json=CHAT)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert refused.json()["error"]["code"] == "overloaded"
            assert "1 request waits already" in refused.json()["error"]["message"]
            second.close()
            eventually(lambda: waiting(service) == 1)
            with chat() as third:
                assert third.status_code == 200


def test_streams_run_side_by_side() -> None:
    service = TwinService(context=10**9)
    with (
        serving(service) as url,
        httpx.stream("POST", f"{url}/v1/completions", json=ENDLESS) as endless,
    ):
        lines = endless.iter_lines()
        next(lines)
        answer = httpx.post(f"{url}/v1/chat/completions", json=CHAT | {"stream": False})
        assert answer.json()["choices"][0]["message"]["content"] == ANSWER_TEXT
        assert next(line for line in lines if line)


def test_a_client_that_leaves_in_the_middle_of_its_body_harms_nobody() -> None:
    with serving(TwinService()) as url:
        address = httpx.URL(url)
        with socket.create_connection((address.host, address.port or 0)) as connection:
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99\r\n\r\n{"
            )
        assert httpx.get(f"{url}/health").status_code == 200


def test_a_body_far_over_the_limit_is_answered_and_not_cut_off() -> None:
    with serving(TwinService(), ApiSettings(max_body_bytes=10_000)) as url:
        response = httpx.post(f"{url}/v1/completions", content=b"x" * 35_000)
    assert response.status_code == 413
