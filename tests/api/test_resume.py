"""Answers whose instance is lost, as clients of each dialect see them: a pause, then the rest."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import httpx
import pytest
from tests.api.twins import VOCAB_SIZE, ByteTokenizer, TwinCatalog, TwinService
from tests.default_settings import make_api_settings, make_policy
from tests.eventually import run_tasks_until

from mlx_ring.api.app import DIALECTS, build_app
from mlx_ring.core.engine_stats import Meter
from mlx_ring.core.errors import WorkerLost
from mlx_ring.engine.sequence import Limits
from mlx_ring.engine.streams import Vocabulary
from mlx_ring.engine.takeover import HeldRequests

MESSAGES = [{"role": "user", "content": "Hello."}]
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "Hello.", "max_tokens": 40},
    "/v1/responses": {"input": "Hello."},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 100},
    "/api/chat": {"messages": MESSAGES},
    "/api/generate": {"prompt": "Hello."},
}
"""Requests of each API that streams."""
PAUSES = {
    "/v1/messages": 'event: ping\ndata: {"type":"ping"}\n\n',
    "/api/chat": '"message":{"role":"assistant","content":""},"done":false}\n',
    "/api/generate": '"response":"","done":false}\n',
}
"""Text that informs a client of an API that its answer is paused; else a comment does."""


def answer(path: str, *, stream: bool, is_lost: bool) -> httpx.Response:
    """Return the answer to a request, whose instance is lost after some tokens and replaced by another one."""
    held = HeldRequests(
        Vocabulary.of(ByteTokenizer()),
        Limits(4096, VOCAB_SIZE, frozenset()),
        make_policy(),
        within_s=60.0,
        meter=Meter(),
    )
    service = TwinService(automatic=not is_lost, held=held)
    app = build_app(TwinCatalog(service), make_api_settings())

    async def lose_and_replace() -> None:
        first = service.engine
        await run_tasks_until(lambda: first.stats().scheduler.running == 1)
        while first.stats().generated_tokens < 5:
            for rank in service.executor.runnable():
                service.executor.run(rank)
            for rank in service.executor.answering():
                service.executor.deliver(rank)
        service.executor.lose(WorkerLost("Worker 0 of stage 1 was ended by signal 9."))
        assert [request.state for request in held.requests()] == ["paused"]
        # The other tasks inform the client before there is another instance.
        for _ in range(100):
            await asyncio.sleep(0)
        service.engine = TwinService().engine
        service.engine.take_over(held.take())

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost:8100") as client:
            asked = asyncio.create_task(client.post(path, json={**REQUESTS[path], "stream": stream}))
            if is_lost:
                await lose_and_replace()
            return await asked

    return asyncio.run(run())


def text_of(response: httpx.Response) -> str:
    """Join the texts of an answer, streamed or whole."""
    return "".join(re.findall(r'"(?:content|text|delta|response)":"((?:[^"\\]|\\.)*)"', response.text))


def test_every_dialect_has_a_request_here() -> None:
    assert {DIALECTS.of(path).name for path in REQUESTS} == {dialect.name for dialect in DIALECTS}


@pytest.mark.parametrize("path", REQUESTS)
def test_a_stream_has_a_pause_and_then_the_rest(path: str) -> None:
    lost, undisturbed = (answer(path, stream=True, is_lost=is_lost) for is_lost in (True, False))
    assert lost.status_code == 200
    pause = PAUSES.get(path, ": resuming\n\n")
    assert lost.text.count(pause) == undisturbed.text.count(pause) + 1
    assert text_of(lost) == text_of(undisturbed)
    assert '"error":{' not in lost.text


@pytest.mark.parametrize("path", REQUESTS)
def test_a_whole_answer_has_a_header_after_a_pause(path: str) -> None:
    lost, undisturbed = (answer(path, stream=False, is_lost=is_lost) for is_lost in (True, False))
    assert (lost.status_code, lost.headers["x-mlx-ring-resumed"]) == (200, "true")
    assert "x-mlx-ring-resumed" not in undisturbed.headers
    assert text_of(lost) == text_of(undisturbed)
    assert text_of(lost)
