"""`/cluster/what-if` over twins: one M4 Mac mini with 16 GB."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from tests.api.clients import Api, refusal
from tests.default_settings import make_api_settings

from mlx_ring.api.ops import what_if as routes
from mlx_ring.core.errors import ModelNotFound, NotReady
from mlx_ring.core.types import LayerRange
from mlx_ring.models.model_source import LocalModel
from mlx_ring.planner.known_models import find_known_model
from mlx_ring.planner.request import OBJECTIVES, Demand, PlanRequest
from mlx_ring.planner.what_if import Answer


def test_a_machine_that_is_added_is_compared_with_the_cluster_as_it_is() -> None:
    reply = Api().post(
        "/cluster/what-if", {"add": ["m3-ultra-512"], "link": "tb5-rdma", "context_tokens": 4096}
    )
    before, after = reply.json()["outcomes"]
    assert (before["label"], after["label"]) == ("now", "with m3-ultra-512 over tb5-rdma")
    assert after["users"] > 10 * before["users"] > 0
    assert after["tokens_per_s"] > before["tokens_per_s"]


def test_the_model_may_be_served_or_a_short_name_or_any_popular_one() -> None:
    api = Api()

    def labels(**body: object) -> list[str]:
        return [one["label"] for one in api.post("/cluster/what-if", body).json()["outcomes"]]

    assert labels() == ["org/twin"]
    assert labels(model="twin") == ["org/twin"]
    assert labels(model="llama-70b") == ["Llama-3.3-70B 4-bit"]
    assert labels(model="demo") == ["demo"], "a model on the disk"
    assert len(labels(what_fits=True)) > 30


def test_the_request_and_the_objective_are_the_heads_own_unless_they_are_given() -> None:
    api = Api()
    api.catalog.request = replace(api.catalog.request, prompt_tokens=3000, answer_tokens=50)
    (own,) = api.post("/cluster/what-if", {}).json()["outcomes"]
    assert (own["model"], own["prompt_tokens"], own["answer_tokens"]) == ("org/twin", 3000, 50)
    body = {"prompt_tokens": 500, "answer_tokens": 400, "optimize_for": "first-token"}
    (given,) = api.post("/cluster/what-if", body).json()["outcomes"]
    assert (given["prompt_tokens"], given["answer_tokens"]) == (500, 400)
    assert given["first_token_s"] < own["first_token_s"]
    assert given["request_s"] > given["first_token_s"] + 300 / given["tokens_per_s"]
    assert given["request_s_range"][0] < given["request_s"] < given["request_s_range"][1]


def test_the_heads_own_lengths_are_not_shortened_to_the_usual_context() -> None:
    api = Api()
    api.catalog.request = replace(api.catalog.request, prompt_tokens=16000, answer_tokens=500)
    (own,) = api.post("/cluster/what-if", {"model": "llama-70b", "add": ["m3-ultra-512"]}).json()["outcomes"][
        -1:
    ]
    assert (own["prompt_tokens"], own["answer_tokens"], own["context_tokens"]) == (16000, 500, 16500)
    asked = {"model": "llama-70b", "context_tokens": 4096}
    assert api.post("/cluster/what-if", asked).json()["outcomes"][0]["context_tokens"] == 4096


def test_popular_models_are_compared_by_a_prompt_that_fills_the_usual_context() -> None:
    outcomes = Api().post("/cluster/what-if", {"what_fits": True}).json()["outcomes"]
    assert {(one["prompt_tokens"], one["context_tokens"]) for one in outcomes} == {(7936, 8192)}


def test_now_is_what_the_head_has_loaded_with_its_own_bits() -> None:
    api = Api()
    api.catalog.request = PlanRequest(Demand(8192, 1, kv_bits=4))
    halves = (
        (LayerRange(0, 20), (("m4-mac-mini-16", 1.0),)),
        (LayerRange(20, 32), (("m4-mac-mini-16", 1.0),)),
    )
    api.catalog.loaded = (halves,)
    (now,) = api.post("/cluster/what-if", {}).json()["outcomes"]
    assert (now["kv_bits"], now["stages"]) == (4, ["m4-mac-mini-16 0-19", "m4-mac-mini-16 20-31"])
    (other,) = api.post("/cluster/what-if", {"model": "8b-4bit", "kv_bits": [16]}).json()["outcomes"]
    assert (other["kv_bits"], other["stages"]) == (16, ["m4-mac-mini-16 0-31"]), "a model that is not served"


def test_users_are_those_that_the_kv_memory_of_the_head_s_workers_holds() -> None:
    api = Api()
    asked = {"model": "8b-4bit", "context_tokens": 2048}
    (free,) = api.post("/cluster/what-if", asked).json()["outcomes"]
    api.catalog.request = PlanRequest(Demand(8192, 1, kv_memory_bytes=1 << 30))
    (given,) = api.post("/cluster/what-if", asked).json()["outcomes"]
    assert free["users"] > given["users"] == 4, "each has 256 MiB of KV"
    (short,) = api.post("/cluster/what-if", {**asked, "context_tokens": 16384}).json()["outcomes"]
    assert "give a larger --kv-cache-memory" in short["why"]


def test_a_cluster_without_measurements_is_no_reason_to_try_again() -> None:
    api = Api()
    api.catalog.is_measured = False
    reply = api.post("/cluster/what-if", {})
    command = make_api_settings().profile_command
    assert command.startswith("mlx-ring profile --blas-threads ")
    assert f"No machine of the cluster is measured: run `{command}` on" in refusal(reply, 409)[1]
    assert "retry-after" not in reply.headers
    api.catalog.can_measure = True
    api.service.error = NotReady("The model is being loaded; ask again in a moment.")
    reply = api.post("/cluster/what-if", {})
    assert "being loaded" in refusal(reply, 503)[1]
    assert reply.headers["retry-after"]


@pytest.mark.parametrize("asked", ["what-if", "planning"])
def test_machine_that_was_not_measured_is_measured_for_the_first_question(asked: str) -> None:
    api = Api()
    api.catalog.is_measured, api.catalog.can_measure = False, True
    reply = api.get("/cluster/planning") if asked == "planning" else api.post("/cluster/what-if", {})
    assert reply.status_code == 200


@pytest.mark.parametrize("asked", ["what-if", "planning"])
def test_a_question_says_why_a_machine_is_not_measured_now(asked: str) -> None:
    api = Api()
    api.catalog.is_measured, api.catalog.measures_later = False, NotReady("It computes answers: ask again.")
    reply = api.get("/cluster/planning") if asked == "planning" else api.post("/cluster/what-if", {})
    assert "It computes answers: ask again." in refusal(reply, 503)[1]
    assert reply.headers["retry-after"]
    # Other machines are planned without it.
    assert api.post("/cluster/what-if", {"add": ["m4-16"], "model": "8b-4bit"}).status_code == 200


def test_planning_waits_for_no_other_question_and_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    api = Api()
    begun, may_end = threading.Event(), threading.Event()

    def answer(*_: object) -> Answer:
        begun.set()
        assert may_end.wait(60)
        return Answer((), None)

    async def measure() -> None:
        assert may_end.is_set(), "a measurement of machines that are measured"

    monkeypatch.setattr(routes, "_answer", answer)
    with ThreadPoolExecutor() as threads:
        asked = threads.submit(api.post, "/cluster/what-if", {})
        try:
            assert begun.wait(60)
            monkeypatch.setattr(api.catalog, "measure", measure)
            planning = threads.submit(api.get, "/cluster/planning").result(60)
        finally:
            may_end.set()
        assert (planning.status_code, asked.result(60).status_code) == (200, 200)


def test_added_machines_are_planned_alone_while_none_is_measured() -> None:
    api = Api()
    api.catalog.is_measured = False
    answer = api.post("/cluster/what-if", {"add": ["m3-ultra-512"], "what_fits": True}).json()
    assert len(answer["outcomes"]) > 30
    assert answer["outcomes"][0]["label"].endswith(", m3-ultra-512")
    assert answer["remarks"][0] == "No machine of the cluster is measured, so only the added ones count."
    (found,) = api.post("/cluster/what-if", {"add": ["m4-16"], "model": "8b-4bit"}).json()["outcomes"]
    assert (found["label"], found["stages"]) == ("m4-16", ["m4-16 0-31"])


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"model": "lama"}, 404, "There is no model 'lama'"),
        ({"add": ["m3-ultr-512"]}, 400, "The machine m3-ultr-512 is unknown"),
    ],
)
def test_names_are_checked_before_measurements(body: dict[str, object], status: int, said: str) -> None:
    api = Api()
    api.catalog.is_measured = False
    assert said in refusal(api.post("/cluster/what-if", body), status)[1]


def test_an_answer_says_how_a_name_is_read() -> None:
    api = Api()
    (remark,) = api.post("/cluster/what-if", {"model": "glm-5.2"}).json()["remarks"]
    assert "glm-5.2 is taken as GLM-5.2" in remark
    assert "assumed" in remark
    assert api.post("/cluster/what-if", {}).json()["remarks"] == []


def test_a_question_may_have_several_users_at_once() -> None:
    api = Api()
    (own,) = api.post("/cluster/what-if", {}).json()["outcomes"]
    (several,) = api.post("/cluster/what-if", {"users": 3}).json()["outcomes"]
    assert (own["at_once"], several["at_once"]) == (1, 3)
    assert several["first_token_s"] > 2 * own["first_token_s"]
    api.catalog.request = replace(api.catalog.request, users=3)
    assert api.post("/cluster/what-if", {}).json()["outcomes"] == [several]


def test_a_heads_replicas_count_for_machines_that_are_added() -> None:
    api = Api()
    api.catalog.count = 2
    before, after = api.post("/cluster/what-if", {"add": ["m4-16"]}).json()["outcomes"]
    assert not before["fits"]
    assert after["stages"] == ["m4-mac-mini-16 0-31", "m4-16 0-31"]


def test_a_hub_id_means_its_entry_in_the_list_or_the_configuration_on_the_hub(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def describe(name: str) -> LocalModel:
        if name != "someone/tiny":
            raise ModelNotFound(f"The hub has no model {name}.")
        return LocalModel(name, "hub", find_known_model("llama3.2:1b").folder)

    def labels(model: str) -> list[str]:
        reply = Api().post("/cluster/what-if", {"model": model})
        return [one["label"] for one in reply.json()["outcomes"]]

    monkeypatch.setattr("mlx_ring.api.ops.what_if.describe_model", describe)
    assert labels("mlx-community/Qwen3-0.6B-8bit") == ["Qwen3-0.6B 8-bit"]
    assert labels("someone/tiny") == ["someone/tiny"]
    param, message = refusal(Api().post("/cluster/what-if", {"model": "someone/private"}), 404)
    assert (param, message) == (None, "The hub has no model someone/private.")


def test_choices_are_names_that_a_question_may_use() -> None:
    choices = Api().get("/cluster/what-if").json()
    assert choices["objectives"] == list(OBJECTIVES)
    assert "tb5-rdma" in choices["links"]
    body = {"add": choices["machines"][:1], "model": choices["models"][0], "link": choices["links"][0]}
    assert Api().post("/cluster/what-if", body).status_code == 200


def test_bits_are_compared_and_curves_are_drawn_only_when_asked_for() -> None:
    api = Api()
    assert api.post("/cluster/what-if", {}).json()["curves"] is None
    reply = api.post("/cluster/what-if", {"kv_bits": [16, 4], "curves": True}).json()
    assert [one["kv_bits"] for one in reply["outcomes"]] == [16, 4]
    assert reply["curves"]["by_users"][0]["at"] == 1


@pytest.mark.parametrize(
    ("body", "status", "param", "said"),
    [
        (
            {"add": ["m3-ultr-512"]},
            400,
            "add",
            "The machine m3-ultr-512 is unknown; the nearest known ones are",
        ),
        ({"add": ["m4-16"], "link": "tb9"}, 400, "link", "The link tb9 is unknown; known links are tb5"),
        ({"link": "tb5"}, 400, "link", "link is tb5, but no machine is added"),
        (
            {"what_fits": True, "model": "twin"},
            400,
            "model",
            "what_fits lists popular models; leave twin out.",
        ),
        ({"add": ["m4-16"] * 17}, 400, "add", "16"),
        ({"kv_bits": [5]}, 400, "kv_bits[0]", "4, 8 or 16"),
        ({"context_tokens": 0}, 400, "context_tokens", "1"),
        ({"users": 0}, 400, "users", "1"),
        ({"prompt_tokens": 0}, 400, "prompt_tokens", "1"),
        ({"optimize_for": "speed"}, 400, "optimize_for", "latency"),
        (
            {"prompt_tokens": 4000, "context_tokens": 4096},
            400,
            "context_tokens",
            "A prompt of 4000 tokens and an answer of 256 need a context of 4256, which is longer than 4096;",
        ),
        ({"model": "lama"}, 404, None, "There is no model 'lama'"),
    ],
)
def test_a_wrong_question_is_refused_in_one_sentence(
    body: dict[str, object], status: int, param: str | None, said: str
) -> None:
    found, message = refusal(Api().post("/cluster/what-if", body), status)
    assert said in message
    assert found == param
