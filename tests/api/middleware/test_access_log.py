"""The access log: one line for each request, without private data of clients."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from tests.api.clients import Api, serving
from tests.api.test_streaming import CHAT
from tests.api.twins import TwinService
from tests.default_settings import make_api_settings

LOGGER = "mlx_ring.api.middleware.access_log"
Lines = Callable[[], list[logging.LogRecord]]


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Lines:
    caplog.set_level(logging.DEBUG, LOGGER)
    return lambda: [record for record in caplog.records if record.name == LOGGER]


def fields(record: logging.LogRecord) -> dict[str, Any]:
    return defaultdict(lambda: None, vars(record))


@pytest.mark.parametrize("stream", [False, True])
def test_request_has_one_line_with_its_model_and_tokens(api: Api, lines: Lines, *, stream: bool) -> None:
    answer = api.chat(model="twin", max_tokens=3, stream=stream)
    (line,) = lines()
    logged = fields(line)
    assert (logged["method"], logged["path"], logged["status"]) == ("POST", "/v1/chat/completions", 200)
    assert (logged["model"], logged["completion_tokens"], logged["ended"]) == ("org/twin", 3, None)
    assert logged["prompt_tokens"] > 3
    assert logged["request_id"] == answer.headers["x-request-id"]
    assert logged["client"] == "127.0.0.1:12345"
    assert line.getMessage().startswith("127.0.0.1:12345 POST /v1/chat/completions 200 duration_s=")


def test_logged_tokens_equal_the_usage_of_several_answers(api: Api, lines: Lines) -> None:
    usages = [
        api.chat(n=3, max_tokens=2).json()["usage"],
        api.complete(prompt=["ab", "ab"], n=2, max_tokens=2).json()["usage"],
    ]
    for line, usage in zip(lines(), usages, strict=True):
        logged = fields(line)
        assert logged["prompt_tokens"] == usage["prompt_tokens"]
        assert logged["completion_tokens"] == usage["completion_tokens"]


def test_draft_tokens_beyond_a_stop_string_are_not_logged(lines: Lines) -> None:
    api = Api(TwinService(says="ab" * 20))
    for stop in ("ab" * 8, "ab" * 8 + "a", "ab" * 9):
        used = api.chat(stop=stop).json()["usage"]["completion_tokens"]
        assert fields(lines()[-1])["completion_tokens"] == used == len(stop)


def test_keys_prompts_and_queries_are_not_logged(lines: Lines) -> None:
    api = Api(settings=make_api_settings(api_keys=("secret-key",)))
    api.post("/v1/completions", {"prompt": "a private prompt"}, **{"x-api-key": "secret-key"})
    api.post("/v1/completions?key=secret-key", {}, authorization="Bearer secret-kez")
    assert [fields(line)["status"] for line in lines()] == [200, 401]
    text = "".join(f"{line.getMessage()}{line.__dict__}" for line in lines())
    assert "secret" not in text
    assert "private" not in text


def test_path_cannot_break_a_log_line(api: Api, lines: Lines) -> None:
    api.get("/v1/models/x%0aINFO%20forged%1b[2J")
    (line,) = lines()
    assert "%0aINFO" in line.getMessage()
    assert line.getMessage().isprintable()


def test_health_requests_are_logged_at_debug_level(api: Api, lines: Lines) -> None:
    api.get("/health/ready")
    api.get("/healthy")
    assert [line.levelname for line in lines()] == ["DEBUG", "INFO"]


def test_disconnect_is_logged(lines: Lines) -> None:
    service = TwinService(automatic=False)
    with serving(service) as url, httpx.stream("POST", f"{url}/v1/chat/completions", json=CHAT):
        pass
    (line,) = lines()
    assert (fields(line)["status"], fields(line)["ended"]) == (200, "client_left")


def test_access_log_can_be_switched_off(lines: Lines) -> None:
    Api(settings=make_api_settings(access_log=False)).chat()
    assert not lines()
