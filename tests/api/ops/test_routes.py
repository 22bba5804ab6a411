"""Operational routes of a healthy and of an unhealthy server."""

from __future__ import annotations

import pytest
from tests.api.clients import Api, error_of, events, refusal
from tests.api.twins import TwinService
from tests.default_settings import make_policy

from mlx_ring.core.errors import NotReady, Overloaded, StepFailed, WorkerLost, WorkerStuck
from mlx_ring.engine.kv_budget import RankKv


def test_health_has_the_expected_fields(api: Api) -> None:
    response = api.get("/health")
    assert response.status_code == 200
    body = response.json()
    assert {"status": "healthy", "rank": 0, "world_size": 2, "model": "org/twin"}.items() <= body.items()
    assert body["gpu_memory_gb"] == 2.0
    assert body["distributed"] is True
    assert body["pipeline"]["stages"] == 2
    assert [worker["layers"] for worker in body["pipeline"]["workers"]] == [[0, 4], [4, 8]]
    assert body["requests"] == {"running": 0, "waiting": 0, "finished": {}}
    assert api.get("/health/live").json()["status"] == "alive"
    assert api.get("/health/ready").json() == {"status": "ready", "model": "org/twin"}


@pytest.mark.parametrize(
    ("error", "status", "code", "word"),
    [
        (NotReady("The model is loading."), 503, "not_ready", "loading"),
        (WorkerLost("Worker 1 died."), 503, "not_ready", "unhealthy"),
        (WorkerStuck("Worker 1 is stuck."), 503, "not_ready", "unhealthy"),
        (StepFailed("Out of memory."), 500, "step_failed", "unhealthy"),
    ],
)
def test_unavailable_service_gives_the_reason_on_every_route(
    api: Api, error: Exception, status: int, code: str, word: str
) -> None:
    api.service.error = error  # pyright: ignore[reportAttributeAccessIssue] - a RingError, as listed
    health = api.get("/health")
    assert health.status_code == 503
    assert (health.json()["status"], health.json()["reason"]) == (word, str(error))
    _, reason = refusal(api.get("/health/ready"), 503)
    assert reason == str(error)
    assert api.get("/health/live").status_code == 200
    for path in ("/", "/cluster/status", "/cache/stats", "/model/info", "/v1/models"):
        assert api.get(path).status_code == 200
    response = api.chat()
    _, message = refusal(response, status)
    assert message.startswith(str(error))
    assert error_of(response)["code"] == code
    assert response.headers.get("x-should-retry") == (None if code == "not_ready" else "false")


def test_full_queue_is_429_with_a_retry_time(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise Overloaded("16 requests wait already; try again in 2 s.", retry_after_s=2)

    monkeypatch.setattr(api.service.engine, "submit_all", refuse)
    for stream in (False, True):
        response = api.chat(stream=stream)
        refusal(response, 429)
        assert response.headers["retry-after"] == "2"


def test_unexpected_error_is_500_without_internal_details(
    api: Api, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise LookupError("secret detail")

    monkeypatch.setattr(api.service.engine, "submit_all", fail)
    _, message = refusal(api.chat(), 500)
    assert "secret" not in message
    assert "secret detail" in caplog.text


def test_models_are_listed_and_found_by_name_with_and_without_v1(api: Api) -> None:
    for prefix in ("/v1", ""):
        listed = api.get(f"{prefix}/models").json()
        assert listed["object"] == "list"
        model = listed["data"][0]
        assert {"id": "org/twin", "object": "model", "max_model_len": 4096}.items() <= model.items()
        for name in ("org/twin", "twin"):
            assert api.get(f"{prefix}/models/{name}").json() == model
        refusal(api.get(f"{prefix}/models/org/other"), 404)


def test_openai_routes_answer_without_v1(api: Api) -> None:
    assert api.post("/chat/completions", {"messages": [{"role": "user", "content": "x"}]}).status_code == 200
    assert api.post("/completions", {"prompt": "x"}).status_code == 200


def test_cluster_status_shows_the_layers_of_each_device(api: Api) -> None:
    body = api.get("/cluster/status").json()
    assert [(device["role"], device["layers"]) for device in body["devices"]] == [
        ("first", [0, 4]),
        ("last", [4, 8]),
    ]
    assert (body["world_size"], body["stages"], body["layers"]) == (2, 2, 8)


def test_ended_sequence_stays_in_the_prefix_cache_and_its_reuse_is_counted(api: Api) -> None:
    first, second = (api.chat(content="Tell me a long story.").json()["usage"] for _ in range(2))
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["prompt_tokens_details"]["cached_tokens"] == second["prompt_tokens"] - 1
    stats = api.get("/cache/stats").json()
    assert (stats["running"], stats["waiting"], stats["num_preemptions"]) == (0, 0, 0)
    cache = stats["prefix_cache"]
    assert (cache["enabled"], cache["queries"], cache["hits"]) == (True, 2, 1)
    assert cache["hit_tokens"] == second["prompt_tokens"] - 1
    assert (cache["entries"], stats["sequences"]) == (1, 1)
    assert [worker["stage"] for worker in stats["workers"]] == [0, 1]


def test_every_kind_of_response_reports_cached_tokens(api: Api) -> None:
    prompt = "One prompt, four times over."
    responses = [
        api.complete(prompt=prompt).json(),
        api.complete(prompt=prompt).json(),
        events(api.complete(prompt=prompt, stream=True, stream_options={"include_usage": True}))[-1],
        api.post("/generate", {"prompt": prompt}).json(),
    ]
    counted = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in responses]
    assert counted == [0, *[responses[0]["usage"]["prompt_tokens"] - 1] * 3]


def test_cache_stats_show_the_kv_budget_of_each_worker() -> None:
    kv = RankKv(limit_bytes=3 * 4096 * 8 + 3 * 100, bytes_per_token=8, bytes_per_sequence=100)
    api = Api(TwinService(kv=kv))
    api.complete(prompt="x" * 600, max_tokens=1)
    for worker in api.get("/cache/stats").json()["workers"]:
        assert (worker["limit_bytes"], worker["sequences_allowed"]) == (kv.limit_bytes, 3)
        assert (worker["bytes_per_token"], worker["bytes_per_sequence"]) == (8, 100)
        assert worker["context_tokens"] == 4096
        assert worker["used_bytes"] == 3 * 256 * 8 + 100, "600 tokens take three blocks of 256"
        assert worker["held_bytes"] == worker["kv_bytes"] == 601 * 8


def test_disabled_prefix_cache_keeps_nothing() -> None:
    api = Api(TwinService(policy=make_policy(prefix_cache=False)))
    for _ in range(2):
        assert api.chat().json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    stats = api.get("/cache/stats").json()
    assert (stats["prefix_cache"]["enabled"], stats["kv_bytes"], stats["sequences"]) == (False, 0, 0)


def test_cluster_status_shows_the_scheduler_configuration(api: Api) -> None:
    scheduling = api.get("/cluster/status").json()["scheduling"]
    assert scheduling["max_itl_ratio"] > 1
    assert {
        *("max_num_seqs", "max_waiting", "prefill_chunk", "max_itl_ratio", "steps_ahead"),
        *("draft_tokens", "prefix_cache", "request_timeout_s", "kv_bits"),
    } <= set(scheduling)


def test_root_lists_the_documented_endpoints(api: Api) -> None:
    body = api.get("/").json()
    documented = api.get("/openapi.json").json()["paths"]
    for endpoint in body["endpoints"]:
        method, path = endpoint.split(" ")
        assert path == "/openapi.json" or method.lower() in documented[path]
    listed = {endpoint.split(" ")[1] for endpoint in body["endpoints"]} | {"/"}
    aliases = {
        path for path in documented if f"/v1{path}" in documented or path.removeprefix("/v1") in listed
    }
    assert set(documented) - listed - aliases == set()
    assert api.get("/model/info").json()["device_count"] == 2


def test_chat_request_schema_is_in_the_openapi_document(api: Api) -> None:
    document = api.get("/openapi.json").json()
    route = document["paths"]["/v1/chat/completions"]["post"]
    named = route["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
    assert document["components"]["schemas"][named]["required"] == ["messages"]
    assert {"400", "404", "408", "429", "503"} <= set(route["responses"])


def test_cluster_status_is_described_in_the_openapi_document(api: Api) -> None:
    document = api.get("/openapi.json").json()
    answer = document["paths"]["/cluster/status"]["get"]["responses"]["200"]["content"]["application/json"]
    assert answer["schema"]["$ref"].endswith("/ClusterStatus")
    schemas = document["components"]["schemas"]
    assert {"nodes", "instances"} <= set(schemas["ClusterStatus"]["properties"])
    for name in ("NodeStatus", "NodeMemory", "StageStatus", "PromisedMemory", "StepStatus", "StreamStatus"):
        assert schemas[name]["description"]
    assert "description" in schemas["NodeStatus"]["properties"]["stages"]
