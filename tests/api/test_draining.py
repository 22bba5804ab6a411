"""A server that shuts down: it finishes open requests and refuses new ones."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from tests.api.clients import Api, error_of, refusal, serving
from tests.api.test_streaming import ENDLESS
from tests.api.twins import TwinService
from tests.eventually import eventually

from mlx_ring.api.middleware.guard import Admission


@pytest.fixture
def draining(api: Api) -> Api:
    api.admission.close()
    return api


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/generate", "/models/load"])
def test_new_request_is_503_with_a_retry_time(draining: Api, path: str) -> None:
    response = draining.post(path, {})
    _, message = refusal(response, 503)
    assert "shutting down" in message
    assert (response.headers["retry-after"], response.headers["connection"]) == ("10", "close")
    assert error_of(response)["code"] == "draining"
    assert "x-should-retry" not in response.headers


def test_health_reports_draining_and_status_routes_still_answer(draining: Api) -> None:
    _, message = refusal(draining.get("/health/ready"), 503)
    assert "draining" in message
    health = draining.get("/health")
    assert (health.status_code, health.json()["status"]) == (503, "draining")
    for path in ("/health/live", "/cluster/status", "/v1/models"):
        answer = draining.get(path)
        assert (answer.status_code, answer.headers["connection"]) == (200, "close")


@pytest.mark.slow
def test_open_stream_is_finished() -> None:
    admission = Admission()
    with serving(TwinService(context=10**9), admission=admission) as url:
        with httpx.stream("POST", f"{url}/v1/completions", json=ENDLESS | {"max_tokens": 3000}) as response:
            lines = (line for line in response.iter_lines() if line)
            next(lines)
            assert admission.open == 1
            admission.close()
            assert httpx.post(f"{url}/v1/completions", json=ENDLESS).status_code == 503
            *_, reason, last = lines
        assert ('"finish_reason":"length"' in reason, last) == (True, "data: [DONE]")
        eventually(lambda: admission.open == 0)


@pytest.mark.slow
def test_open_requests_get_an_error_when_the_server_stops() -> None:
    admission = Admission()
    with ThreadPoolExecutor(1) as clients:
        with serving(TwinService(automatic=False), admission=admission) as url:
            pending = clients.submit(httpx.post, f"{url}/v1/completions", json={"prompt": "x"}, timeout=60)
            eventually(lambda: admission.open == 1)
            admission.close()
        _, message = refusal(pending.result(60), 503)
    assert message == "The server is shutting down."
