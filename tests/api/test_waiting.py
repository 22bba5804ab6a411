"""Streams for a model that must be loaded first: they live meanwhile, and what is refused says so."""

from __future__ import annotations

import asyncio
import logging
import threading

import httpx
import pytest
from tests.api.clients import serving
from tests.api.test_streaming import CHAT
from tests.api.twins import TwinCatalog, TwinService
from tests.eventually import eventually

from mlx_ring.api.service import ModelService
from mlx_ring.api.settings import ApiSettings
from mlx_ring.core.errors import PlanError

OFTEN = ApiSettings(keep_alive_s=0.01)
TALK = {"max_tokens": 40, "messages": CHAT["messages"], "stream": True}


class SlowCatalog(TwinCatalog):
    """Loads when a test says so."""

    def __init__(self, *models: TwinService) -> None:
        super().__init__(*models)
        self.may_load = threading.Event()

    async def ready(self, model: ModelService) -> None:
        await asyncio.to_thread(self.may_load.wait)
        await super().ready(model)


def unloaded() -> tuple[TwinService, SlowCatalog]:
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
def test_a_stream_lives_while_its_model_is_loaded(path: str, last: str) -> None:
    service, catalog = unloaded()
    body = {"input": "Hello.", "stream": True} if path == "/v1/responses" else TALK
    with (
        serving(service, OFTEN, catalog=catalog) as url,
        httpx.stream("POST", f"{url}{path}", json=body, timeout=20) as got,
    ):
        lines = (line for line in got.iter_lines() if line)
        assert got.status_code == 200
        assert [next(lines), next(lines)] == [": keep-alive"] * 2
        catalog.may_load.set()
        assert list(lines)[-1] == f"data: {last}"


def test_who_leaves_while_a_model_is_loaded_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mlx_ring")
    service, catalog = unloaded()
    with serving(service, OFTEN, catalog=catalog) as url:
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=TALK, timeout=20) as got:
            next(got.iter_lines())
        eventually(lambda: caplog.records)
        catalog.may_load.set()
    (line,) = caplog.records
    assert line.getMessage().endswith("ended=client_left")


def test_what_cannot_be_loaded_is_the_stream_s_last_event_and_a_status_where_nothing_was_said_yet() -> None:
    service, catalog = unloaded()
    catalog.refusal = PlanError("There is no room.")
    with serving(service, OFTEN, catalog=catalog) as url:
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=TALK, timeout=20) as got:
            lines = (line for line in got.iter_lines() if line)
            next(lines)
            catalog.may_load.set()
            assert '"message":"There is no room."' in list(lines)[-1]
        whole = httpx.post(f"{url}/v1/chat/completions", json=TALK | {"stream": False}, timeout=20)
        assert whole.status_code == 503
    with serving(service, ApiSettings(), catalog=catalog) as url:
        assert httpx.post(f"{url}/v1/chat/completions", json=TALK, timeout=20).status_code == 503
