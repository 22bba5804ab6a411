"""Several models: selection by name, load and unload."""

from __future__ import annotations

import asyncio
import json

import pytest
from tests.api.clients import Api, error_of, refusal
from tests.api.twins import TwinCatalog, TwinService
from tests.default_settings import make_api_settings

from mlx_ring.api.ops.models import pulling
from mlx_ring.api.streaming import QuietReason
from mlx_ring.core.errors import PlanError
from mlx_ring.core.generation import GenerateRequest
from mlx_ring.core.types import SamplingParams
from mlx_ring.models.model_folder import PullProgress, Report

OTHER = ("org/other", "other")


@pytest.fixture
def api() -> Api:
    return Api(None, None, TwinService(names=OTHER))


@pytest.mark.parametrize(("name", "answers"), [("org/twin", 0), ("twin", 0), ("org/other", 1), ("other", 1)])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/completions", {"prompt": "x"}),
        ("/generate", {"prompt": "x"}),
    ],
)
def test_request_is_served_by_the_model_it_names(
    api: Api, name: str, answers: int, path: str, body: dict[str, object]
) -> None:
    reply = api.post(path, body | {"model": name})
    assert reply.json()["model"] == ("org/twin", "org/other")[answers]
    generated = [model.engine.stats().generated_tokens for model in api.catalog.models]
    assert (generated[answers] > 0, generated[1 - answers]) == (True, 0)


def test_model_name_is_optional_only_with_a_single_model(api: Api) -> None:
    param, message = refusal(api.chat(), 400)
    assert (param, message) == (
        "model",
        "'model' is missing; this server has 'org/twin', 'org/other': name one.",
    )
    assert Api().chat().json()["model"] == "org/twin"
    assert api.get("/model/info").json()["model"] == "org/twin"


def test_unknown_model_is_refused_with_the_served_names(api: Api) -> None:
    param, message = refusal(api.chat(model="third"), 404)
    assert param == "model"
    assert "'org/twin', 'org/other'" in message


def test_models_are_listed_with_their_state(api: Api) -> None:
    api.catalog.models[1].is_loaded = False
    listed = {model["id"]: model["state"] for model in api.get("/v1/models").json()["data"]}
    assert listed == {"org/twin": "ready", "org/other": "unloaded"}
    assert api.get("/v1/models/other").json()["id"] == "org/other"


def test_unloaded_model_is_loaded_on_request(api: Api) -> None:
    other = api.catalog.models[1]
    other.is_loaded = False
    assert api.chat(model="other").status_code == 200
    assert other.is_loaded


def test_model_without_room_is_503_and_others_still_answer(api: Api) -> None:
    api.catalog.models[1].is_loaded = False
    api.catalog.refusal = PlanError("It needs 3 GB more.")
    reply = api.chat(model="other")
    assert (reply.status_code, error_of(reply)["code"]) == (503, "no_room")
    assert api.chat(model="twin").status_code == 200
    assert api.get("/health/ready").status_code == 200


def test_model_is_unloaded_and_loaded_by_request(api: Api) -> None:
    reply = api.post("/models/unload", {"model": "other"})
    assert (reply.status_code, reply.json()["state"]) == (200, "unloaded")
    assert api.get("/cluster/status").json()["models"][1]["instances"] == []
    reply = api.post("/models/load", {"model": "org/other"})
    assert (reply.status_code, reply.json()["state"]) == (200, "ready")


def test_loading_an_unknown_model_is_404_with_the_reason(api: Api) -> None:
    reply = api.post("/models/load", {"model": "nobody/knows"})
    assert (reply.status_code, error_of(reply)["code"]) == (404, "model_not_found")
    assert "nobody/knows" in error_of(reply)["message"]


def test_busy_model_is_unloaded_only_with_force() -> None:
    busy = Api(TwinService(automatic=False))
    busy.service.engine.submit_all(_request())
    assert busy.post("/models/unload", {"model": "twin"}).status_code == 409
    assert busy.post("/models/unload", {"model": "twin", "force": True}).status_code == 200


def test_status_and_cache_stats_list_every_model(api: Api) -> None:
    status = api.get("/cluster/status").json()
    assert [model["model"] for model in status["models"]] == ["org/twin", "org/other"]
    assert {device["model"] for device in status["devices"]} == {"org/twin", "org/other"}
    assert status["world_size"] == 4
    workers = api.get("/cache/stats").json()["workers"]
    assert [worker["model"] for worker in workers] == ["org/twin"] * 2 + ["org/other"] * 2


def test_a_pull_streams_its_progress_until_the_model_is_complete(api: Api) -> None:
    streamed = api.post("/models/pull", {"model": "org/new", "stream": True})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    events = [json.loads(line.removeprefix("data: ")) for line in streamed.text.splitlines() if line]
    assert [(each["status"], each["done_bytes"]) for each in events] == [
        *[("downloading", done) for done in (0, 50, 100)],
        ("verifying", 100),
        ("done", 100),
    ]
    assert api.post("/models/pull", {"model": "org/new"}).json() == events[-1]


def test_a_pull_that_cannot_begin_is_refused_with_a_status(api: Api) -> None:
    for fields, status in (({"model": "nobody/knows"}, 404), ({"model": "org/large"}, 503)):
        assert api.post("/models/pull", fields | {"stream": True}).status_code == status
    error = api.post("/models/pull", {"model": "org/large", "stream": True}).json()["error"]
    assert error["code"] == "exceeds_memory"
    assert api.post("/models/pull", {"model": "org/large", "force": True}).status_code == 200


def test_a_pull_is_cancelled_for_all_clients_by_a_request(api: Api) -> None:
    ended = api.post("/models/pull", {"model": "org/other", "cancel": True})
    assert ended.json() == {"model": "org/other", "status": "downloading", "done_bytes": 1, "total_bytes": 2}
    assert api.post("/models/pull", {"model": "org/new", "cancel": True}).status_code == 409


class SlowCatalog(TwinCatalog):
    """Catalog whose pulls hash a large file once they begin."""

    def __init__(self) -> None:
        super().__init__()
        self.hashed = asyncio.Event()

    async def pull(self, name: str, *, force: bool, report: Report, lasts: bool = True) -> str:
        del force, lasts
        report(PullProgress("verifying", 1, 1))
        await self.hashed.wait()
        return name


def test_a_pull_without_progress_yields_reasons_to_keep_the_connection() -> None:
    async def act() -> list[object]:
        catalog = SlowCatalog()
        async with pulling(catalog, "org/new", quiet_s=0.001) as progress:
            seen: list[object] = [await anext(progress) for _ in range(3)]
            catalog.hashed.set()
            return [*seen, *[each async for each in progress if each is not QuietReason.QUIET]]

    quiet = QuietReason.QUIET
    assert asyncio.run(act()) == [
        PullProgress("verifying", 1, 1),
        *(quiet, quiet),
        PullProgress("done", 1, 1),
    ]


def test_models_on_disk_are_listed_and_deleted_unless_they_are_loaded(api: Api) -> None:
    listed = api.get("/cluster/models").json()
    assert [model["name"] for model in listed["models"]] == ["demo"]
    assert listed["pulls"][0]["model"] == "org/other"
    assert listed["interrupted"] == [{"name": "org/half", "bytes": 5 * 10**9}], "without those in progress"
    assert api.post("/models/delete", {"model": "org/kept"}).json() == {
        "model": "org/kept",
        "freed_bytes": 100,
    }
    assert api.post("/models/delete", {"model": "org/twin"}).status_code == 409


@pytest.mark.parametrize("path", ["/models/load", "/models/unload", "/models/pull", "/models/delete"])
def test_remote_client_needs_a_key_to_manage_models(path: str) -> None:
    stranger = Api(client="192.168.1.9")
    reply = stranger.post(path, {"model": "twin"})
    assert reply.status_code == 403
    assert "192.168.1.9" in error_of(reply)["message"]
    assert stranger.chat().status_code == 200, "requests to a model need no key"
    known = Api(None, make_api_settings(api_keys=("k",)), client="192.168.1.9")
    assert known.post(path, {"model": "org/twin"}, authorization="Bearer k").status_code in (200, 409)


def _request() -> GenerateRequest:
    return GenerateRequest("busy", (1, 2, 3), SamplingParams(seed=1))
