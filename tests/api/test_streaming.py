"""Streams over a socket: events, disconnects, errors in mid-stream, and models that must be loaded first."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
from collections.abc import Iterator, Mapping
from functools import partial
from types import SimpleNamespace

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message
from tests.api.clients import serving
from tests.api.twins import ANSWER_TEXT, MarkingTokenizer, TwinCatalog, TwinService
from tests.default_settings import make_api_settings, make_policy
from tests.eventually import LeapingLoop, eventually

from mlx_ring.api.app import build_app
from mlx_ring.api.service import ModelService
from mlx_ring.api.streaming import StreamFormat, note_read, note_stream, start_in_time
from mlx_ring.core.errors import PlanError, WorkerLost

CHAT = {"messages": [{"role": "user", "content": "Hello."}], "stream": True}
ENDLESS = {"prompt": "Hello.", "max_tokens": 10**9, "stream": True}
TIMEOUT_S = 20.0


@pytest.fixture
def stuck() -> Iterator[tuple[TwinService, str]]:
    """Yield a server whose workers never answer and which sends a keep-alive every few milliseconds."""
    service = TwinService(automatic=False)
    with serving(service, make_api_settings(keep_alive_s=0.005)) as url:
        yield service, url


@pytest.fixture(scope="module")
def twin_url() -> Iterator[str]:
    """Serve a twin, and yield its URL."""
    with serving(TwinService()) as url:
        yield url


def open_requests(service: TwinService) -> int:
    """Return the number of running and waiting requests."""
    stats = service.engine.stats().scheduler
    return stats.running + stats.waiting


def sent(url: str, path: str, body: Mapping[str, object]) -> socket.socket:
    """Send a request over a connection of its own, and return that."""
    address, content = httpx.URL(url), json.dumps(body).encode()
    connection = socket.create_connection((address.host, address.port or 0))
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(content)}\r\n\r\n"
    connection.sendall(head.encode() + content)
    return connection


def test_stream_ends_with_its_finish_reason_and_done(twin_url: str) -> None:
    with httpx.stream("POST", f"{twin_url}/v1/chat/completions", json=CHAT) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["cache-control"] == "no-cache"
        lines = [line for line in response.iter_lines() if line]
    assert '"finish_reason":"stop"' in lines[-2]
    assert lines[-1] == "data: [DONE]"


def test_stream_starts_and_sends_keep_alives_before_the_first_token(stuck: tuple[TwinService, str]) -> None:
    _, url = stuck
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=CHAT) as response:
        lines = (line for line in response.iter_lines() if line)
        # On a busy machine, a keep-alive may come before the first chunk.
        assert '"role":"assistant"' in next(line for line in lines if line != ": keep-alive")
        assert [next(lines), next(lines)] == [": keep-alive"] * 2


@pytest.mark.parametrize("n", [1, 3])
def test_disconnect_in_mid_stream_aborts_every_sequence(n: int) -> None:
    service = TwinService(context=10**9)
    request = ENDLESS | {"prompt": "Hello. " * 5}
    with serving(service) as url:
        with httpx.stream("POST", f"{url}/v1/completions", json=request | {"n": n}) as response:
            lines = response.iter_lines()
            for _ in range(5):
                next(lines)
            eventually(lambda: service.sequences_held == n)
            assert httpx.get(f"{url}/cache/stats").json()["kv_bytes"] > 0
        eventually(lambda: open_requests(service) == 0)
        # The engine's thread may be between the end of a request and what is kept of it.
        eventually(lambda: service.engine.stats().finished == {"abort": n})
        # Equal answers are kept once, for a later request.
        eventually(lambda: service.engine.stats().scheduler.sequences_held == 1)
        assert httpx.post(f"{url}/v1/completions", json=request | {"max_tokens": 1}).status_code == 200
        assert httpx.get(f"{url}/cache/stats").json()["prefix_cache"]["hits"] > 0


@pytest.mark.parametrize("stream", [True, False])
def test_disconnect_before_the_first_token_aborts_the_sequence(
    stuck: tuple[TwinService, str], *, stream: bool
) -> None:
    service, url = stuck
    with sent(url, "/v1/chat/completions", CHAT | {"stream": stream}):
        eventually(lambda: open_requests(service) == 1)
    eventually(lambda: open_requests(service) == 0)
    assert service.engine.stats().finished == {"abort": 1}


def test_error_in_mid_stream_is_the_last_event(stuck: tuple[TwinService, str]) -> None:
    service, url = stuck
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=CHAT) as response:
        lines = (line for line in response.iter_lines() if line and not line.startswith(":"))
        assert response.status_code == 200
        next(lines)
        service.executor.lose(WorkerLost("Worker 0 of stage 1 was ended by signal 9."))
        rest = list(lines)
    assert len(rest) == 1
    assert '{"error":{"message":"Worker 0 of stage 1 was ended by signal 9."' in rest[0]
    assert '"code":"worker_lost"' in rest[0]


def test_request_timeout_is_408_and_frees_the_place() -> None:
    service = TwinService(automatic=False, policy=make_policy(request_timeout_s=0.05))
    with serving(service) as url:
        answer = httpx.post(f"{url}/v1/chat/completions", json=CHAT | {"stream": False}, timeout=TIMEOUT_S)
    assert (answer.status_code, answer.headers["x-should-retry"]) == (408, "false")
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("timeout_error", "request_timeout")
    assert "0.05 s (--request-timeout-s)" in error["message"]
    assert open_requests(service) == 0
    assert service.engine.stats().finished == {"error": 1}


def test_request_timeout_is_the_last_event_of_a_stream() -> None:
    service = TwinService(automatic=False, policy=make_policy(request_timeout_s=0.05))
    with (
        serving(service) as url,
        httpx.stream("POST", f"{url}/v1/chat/completions", json=CHAT, timeout=TIMEOUT_S) as response,
    ):
        lines = [line for line in response.iter_lines() if line]
    assert len(lines) == 2
    assert '"role":"assistant"' in lines[0]
    assert '"code":"request_timeout"' in lines[1]


def test_request_within_the_timeout_completes() -> None:
    service = TwinService(policy=make_policy(request_timeout_s=TIMEOUT_S))
    with serving(service) as url:
        answer = httpx.post(f"{url}/v1/chat/completions", json=CHAT | {"stream": False})
    assert answer.json()["choices"][0]["message"]["content"] == ANSWER_TEXT
    assert service.engine.stats().finished == {"stop": 1}


def test_full_queue_is_429_with_a_retry_time_until_a_place_is_free() -> None:
    service = TwinService(automatic=False, policy=make_policy(max_num_seqs=1, max_queued_requests=1))
    with serving(service) as url, httpx.Client(base_url=url, timeout=TIMEOUT_S) as client:
        chat = partial(client.stream, "POST", "/v1/chat/completions", json=CHAT)
        with chat(), chat() as second:
            assert (open_requests(service), second.status_code) == (2, 200)
            refused = client.post("/v1/chat/completions", json=CHAT)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert refused.json()["error"]["code"] == "overloaded"
            assert "1 request waits already" in refused.json()["error"]["message"]
            second.close()
            eventually(lambda: open_requests(service) == 1)
            with chat() as third:
                assert third.status_code == 200


def test_streams_run_concurrently() -> None:
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


def test_disconnect_in_mid_body_does_not_affect_other_requests(twin_url: str) -> None:
    address = httpx.URL(twin_url)
    with socket.create_connection((address.host, address.port or 0)) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99\r\n\r\n{")
    assert httpx.get(f"{twin_url}/health").status_code == 200


def test_body_far_over_the_limit_gets_a_response() -> None:
    with serving(TwinService(), make_api_settings(max_body_bytes=10_000)) as url:
        response = httpx.post(f"{url}/v1/completions", content=b"x" * 35_000)
    assert response.status_code == 413


FREQUENT_KEEP_ALIVE = make_api_settings(keep_alive_s=0.01)
SHORT_CHAT = {"max_tokens": 40, "messages": CHAT["messages"], "stream": True}


class SlowCatalog(TwinCatalog):
    """Catalog that loads a model only after `may_load` is set."""

    def __init__(self, *models: TwinService) -> None:
        super().__init__(*models)
        self.may_load = threading.Event()

    async def ready(self, model: ModelService) -> None:
        await asyncio.to_thread(self.may_load.wait)
        await super().ready(model)


def unloaded_model() -> tuple[TwinService, SlowCatalog]:
    service = TwinService()
    service.is_loaded = False
    return service, SlowCatalog(service)


@pytest.mark.parametrize(
    ("path", "last"),
    [
        ("/v1/chat/completions", "[DONE]"),
        ("/v1/responses", "[DONE]"),
        ("/v1/messages", '{"type":"message_stop"}'),
    ],
)
def test_stream_sends_keep_alives_while_its_model_is_loaded(path: str, last: str) -> None:
    service, catalog = unloaded_model()
    body = {"input": "Hello.", "stream": True} if path == "/v1/responses" else SHORT_CHAT
    with (
        serving(service, FREQUENT_KEEP_ALIVE, catalog=catalog) as url,
        httpx.stream("POST", f"{url}{path}", json=body, timeout=20) as response,
    ):
        lines = (line for line in response.iter_lines() if line)
        try:
            assert response.status_code == 200
            assert [next(lines), next(lines)] == [": keep-alive"] * 2
        finally:
            catalog.may_load.set()
        assert list(lines)[-1] == f"data: {last}"


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_stream_of_ollama_sends_lines_without_text_while_its_model_is_loaded(path: str) -> None:
    service, catalog = unloaded_model()
    body = (
        {"model": "twin", "prompt": "Hello."}
        if path == "/api/generate"
        else {"model": "twin", "messages": [USER]}
    )
    with (
        serving(service, FREQUENT_KEEP_ALIVE, catalog=catalog) as url,
        httpx.stream("POST", f"{url}{path}", json=body, timeout=20) as response,
    ):
        lines = map(json.loads, response.iter_lines())
        try:
            assert response.headers["content-type"].startswith("application/x-ndjson")
            quiet = [next(lines), next(lines)]
        finally:
            catalog.may_load.set()
        *_, last = lines
    assert [(line["model"], line["done"]) for line in quiet] == [("twin", False)] * 2
    assert [line["message"]["content"] if "message" in line else line["response"] for line in quiet] == [
        "",
        "",
    ]
    assert (last["done"], last["done_reason"]) == (True, "stop")


def test_load_failure_is_the_last_line_of_an_ollama_stream() -> None:
    service, catalog = unloaded_model()
    catalog.refusal = PlanError("There is no room.")
    with (
        serving(service, FREQUENT_KEEP_ALIVE, catalog=catalog) as url,
        httpx.stream(
            "POST", f"{url}/api/chat", json={"model": "twin", "messages": []}, timeout=20
        ) as response,
    ):
        lines = map(json.loads, response.iter_lines())
        next(lines)
        catalog.may_load.set()
        *_, last = lines
    assert last == {"error": "There is no room."}


class WaitingCatalog(TwinCatalog):
    """Catalog that loads no model, and unloads one only after `may_unload` is set."""

    def __init__(self, *models: TwinService) -> None:
        super().__init__(*models)
        self.may_unload = threading.Event()
        self.begun, self.left = 0, 0
        """Numbers of requests that began to wait, and that left."""

    async def ready(self, model: ModelService) -> None:
        del model
        self.begun += 1
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self.left += 1

    async def unload(self, model: ModelService, *, force: bool) -> None:
        self.begun += 1
        await asyncio.to_thread(self.may_unload.wait)
        await super().unload(model, force=force)

    async def delete(self, name: str) -> tuple[str, int]:
        self.begun += 1
        await asyncio.to_thread(self.may_unload.wait)
        return await super().delete(name)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": CHAT["messages"]}),
        ("/v1/completions", {"prompt": "Hello."}),
        ("/v1/responses", {"input": "Hello."}),
        ("/v1/messages", {"messages": CHAT["messages"], "max_tokens": 9}),
        ("/api/chat", {"model": "twin", "messages": CHAT["messages"]}),
        ("/api/generate", {"model": "twin", "prompt": "Hello."}),
    ],
)
def test_disconnect_ends_the_preparation_of_an_answer(
    path: str, body: dict[str, object], *, stream: bool
) -> None:
    service = TwinService()
    service.is_loaded = False
    catalog = WaitingCatalog(service)
    with serving(service, catalog=catalog) as url:
        with sent(url, path, body | {"stream": stream}):
            eventually(lambda: catalog.begun == 1)
        eventually(lambda: catalog.left == 1)


def test_a_client_that_leaves_while_its_stream_is_handed_over_ends_the_work() -> None:
    """Cancel it while the watch over its connection ends, after which the work would belong to the stream."""

    async def run() -> None:
        handing_over, ended = asyncio.Event(), asyncio.Event()

        async def endpoint(request: Request) -> Response:
            note_read(request, object())
            note_stream(request, StreamFormat("application/x-ndjson", lambda _: b"{}"))
            try:
                return await asyncio.get_running_loop().create_future()
            finally:
                ended.set()

        async def receive() -> Message:
            try:
                return await asyncio.get_running_loop().create_future()
            except asyncio.CancelledError:
                handing_over.set()
                return await asyncio.get_running_loop().create_future()

        app = SimpleNamespace(state=SimpleNamespace(keep_alive_s=0.005))
        request = Request({"type": "http", "headers": [], "app": app}, receive)
        answering = asyncio.ensure_future(start_in_time(endpoint, has_events=False)(request))
        await handing_over.wait()
        assert not ended.is_set()
        answering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await answering
        await ended.wait()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/models/unload", {"model": "twin"}),
        ("/api/chat", {"model": "twin", "messages": [], "keep_alive": 0}),
        ("/api/generate", {"model": "twin", "keep_alive": 0}),
        ("/models/delete", {"model": "someone/unused"}),
    ],
)
def test_work_on_models_is_completed_when_its_client_leaves(path: str, body: dict[str, object]) -> None:
    service = TwinService()
    catalog = WaitingCatalog(service)
    with (
        serving(service, FREQUENT_KEEP_ALIVE, catalog=catalog) as url,
        httpx.Client(base_url=url, headers={"connection": "close"}, verify=False) as client,  # noqa: S501 - HTTP
    ):
        with sent(url, path, body):
            eventually(lambda: catalog.begun == 1)
            for _ in range(20):  # longer than a stream may be silent
                client.get("/health")
        # The server notices the disconnect no later than that of a request that it answers after it.
        client.get("/health")
        catalog.may_unload.set()
        eventually(lambda: not service.is_loaded or catalog.deleted)


def test_disconnect_while_a_model_is_loaded_is_logged_as_such(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mlx_ring")
    service, catalog = unloaded_model()
    with serving(service, FREQUENT_KEEP_ALIVE, catalog=catalog) as url:
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=SHORT_CHAT, timeout=20) as response:
            next(response.iter_lines())
        eventually(lambda: caplog.records)
        catalog.may_load.set()
    (line,) = caplog.records
    assert line.getMessage().endswith("ended=client_left")


def test_load_failure_is_the_last_event_or_the_status_before_any_event() -> None:
    service, catalog = unloaded_model()
    catalog.refusal = PlanError("There is no room.")
    with serving(service, FREQUENT_KEEP_ALIVE, catalog=catalog) as url:
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=SHORT_CHAT, timeout=20) as response:
            lines = (line for line in response.iter_lines() if line)
            next(lines)
            catalog.may_load.set()
            assert '"message":"There is no room."' in list(lines)[-1]
        whole = httpx.post(f"{url}/v1/chat/completions", json=SHORT_CHAT | {"stream": False}, timeout=20)
        assert whole.status_code == 503
    with serving(service, make_api_settings(), catalog=catalog) as url:
        assert httpx.post(f"{url}/v1/chat/completions", json=SHORT_CHAT, timeout=20).status_code == 503


CALL = '<tool_call>{"name": "write", "arguments": {"text": "%s"}}</tool_call>' % ("x" * 20)
REASONED = f"<think>\n{'hm ' * 10}\n</think>\n\nYes."
USER = {"role": "user", "content": "Hello."}
WRITE = {"name": "write", "input_schema": {"type": "object"}}
WRITE_FUNCTION = {"type": "function", "function": {"name": "write", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("says", "path", "body", "sign"),
    [
        (CALL, "/v1/messages", {"max_tokens": 99, "tools": [WRITE]}, "event: ping"),
        (
            REASONED,
            "/v1/messages",
            {"max_tokens": 99, "thinking": {"type": "enabled", "budget_tokens": 9, "display": "omitted"}},
            "event: ping",
        ),
        (CALL, "/api/chat", {"tools": [WRITE_FUNCTION]}, '"content":""},"done":false'),
    ],
    ids=["arguments", "omitted reasoning", "ollama"],
)
def test_stream_is_kept_alive_while_tokens_make_no_event(
    says: str, path: str, body: dict[str, object], sign: str
) -> None:
    """Let the clock leap by less than the longest silence after each token."""
    service = TwinService(automatic=False, tokenizer=MarkingTokenizer(), says=says)
    app = build_app(TwinCatalog(service), make_api_settings(keep_alive_s=10.0))
    content = body | {"model": "twin", "messages": [USER], "stream": True}

    async def run() -> str:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, LeapingLoop)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            answer = asyncio.ensure_future(client.post(path, json=content))
            tokens = 0
            while not answer.done():
                for rank in service.executor.runnable():
                    service.executor.run(rank)
                for rank in service.executor.answering():
                    service.executor.deliver(rank)
                for _ in range(10):
                    await asyncio.sleep(0)
                made = service.engine.stats().generated_tokens
                loop.leapt_s += 6.0 * (made - tokens)
                tokens = made
            return answer.result().text

    with asyncio.Runner(loop_factory=LeapingLoop) as runner:
        assert runner.run(run()).count(sign) > 9
