"""Several models and several replicas at once, on one machine and on two."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.end_to_end.test_cluster import cluster
from tests.eventually import eventually
from tests.machines import free_pair_of_ports
from tests.processes import Server, run_cli, serving

from mlx_ring.head.served_model import memory_for_weights
from mlx_ring.models.model_source import find_model

ASKED = {"prompt": "The quick brown fox", "max_tokens": 24, "temperature": 0, "ignore_eos": True}


def answer(server: Server, model: str | None = None, **changes: object) -> httpx.Response:
    body = ASKED | changes | ({} if model is None else {"model": model})
    return server.http.post("/v1/completions", json=body)


def text(server: Server, model: str | None = None, **changes: object) -> str:
    reply = answer(server, model, **changes)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["text"]


def states(server: Server) -> dict[str, str]:
    return {model["id"]: model["state"] for model in server.http.get("/v1/models").json()["data"]}


def instances(server: Server) -> list[dict[str, Any]]:
    return [instance for model in server.status()["models"] for instance in model["instances"]]


@pytest.fixture(scope="module")
def second_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights under another name."""
    folder = tmp_path_factory.mktemp("second") / "second"
    shutil.copytree(tiny_model, folder)
    return folder


@pytest.fixture(scope="module")
def server(
    tiny_model: Path, second_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Generator[Server]:
    """Two models, each twice."""
    flags = (str(second_model), "--replicas", "2")
    with serving(tiny_model, *flags, folder=tmp_path_factory.mktemp("several")) as found:
        wait_for_state(found, "second", "ready")
        yield found


def wait_for_state(server: Server, model: str, state: str) -> None:
    eventually(lambda: states(server)[model], lambda found: found == state)


def test_two_models_with_two_replicas_each_answer_alike(server: Server, tiny_model: Path) -> None:
    assert len(instances(server)) == 4
    answers = {text(server, name, seed=seed) for name in (tiny_model.name, "second") for seed in range(3)}
    assert len(answers) == 1


def test_requests_at_once_are_shared_by_the_replicas(server: Server, tiny_model: Path) -> None:
    prompts = [f"Number {number} is another beginning. " * 4 for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(text, server, tiny_model.name, prompt=prompt) for prompt in prompts]
        together = [each.result() for each in asked]
    alone = [text(server, tiny_model.name, prompt=prompt) for prompt in prompts]
    assert together == alone
    first, second = server.status()["models"][0]["instances"]
    assert first["step_times"][0]["decode_steps"] > 0
    assert second["step_times"][0]["decode_steps"] > 0


def test_metrics_tell_the_models_and_their_replicas_apart(server: Server, tiny_model: Path) -> None:
    counted = {
        (sample.labels["model_name"], sample.labels["instance"]): sample.value
        for family in text_string_to_metric_families(server.http.get("/metrics").text)
        for sample in family.samples
        if sample.name == "mlx_ring_request_success_total" and sample.labels["finished_reason"] == "length"
    }
    assert {(name, number) for name in (tiny_model.name, "second") for number in "01"} <= set(counted)
    assert all(counted[tiny_model.name, number] > 0 for number in "01")


def test_a_prompt_that_comes_again_goes_where_it_is_cached(server: Server) -> None:
    prompt = "A long beginning that several questions share, and that need not be read again. " * 3
    for again in range(4):
        usage = answer(server, "second", prompt=prompt).json()["usage"]
        assert (usage["prompt_tokens_details"]["cached_tokens"] > 0) == (again > 0)


def test_one_that_is_unloaded_frees_its_workers_and_comes_back_when_asked(
    server: Server, tmp_path: Path
) -> None:
    before = text(server, "second")
    done = run_cli("models", "unload", "second", "--url", server.url, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert states(server)["second"] == "unloaded"
    assert len(instances(server)) == 2
    assert text(server, "second") == before
    assert states(server)["second"] == "ready"


def test_a_model_that_was_not_named_at_first_is_loaded_and_served(server: Server, tmp_path: Path) -> None:
    done = run_cli("models", "load", "demo", "--url", server.url, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert text(server, "demo")
    wrong = run_cli("models", "load", "no-such-model", "--url", server.url, folder=tmp_path)
    assert wrong.returncode == 1
    assert "There is no model 'no-such-model'" in wrong.stderr
    done = run_cli("models", "unload", "demo", "--url", server.url, folder=tmp_path)
    assert done.returncode == 0, done.stderr


def test_within_a_memory_budget_the_one_not_asked_longest_makes_way(tmp_path: Path) -> None:
    demo = find_model("demo").folder
    copy = tmp_path / "copy"
    shutil.copytree(demo.path, copy)
    budget = memory_for_weights(demo, "auto") * 3 // 2
    with serving("demo", str(copy), "--model-memory", str(budget), folder=tmp_path) as server:
        wait_for_state(server, "copy", "unloaded")
        asked = {"prompt": "Hello", "max_tokens": 8}
        first = text(server, "demo", **asked)
        assert text(server, "copy", **asked) == first
        assert states(server) == {"demo": "unloaded", "copy": "ready"}
        assert text(server, "demo", **asked) == first
        assert states(server) == {"demo": "ready", "copy": "unloaded"}
        assert server.stop() == 0
        assert server.all_ended()


def test_a_context_that_was_insisted_on_stays_whole_and_no_other_model_is_loaded_into_it(
    tiny_model: Path, second_model: Path, tmp_path: Path
) -> None:
    first = tiny_model.name
    # Its 4096 tokens take 5.2 MB of some 6.6 that are left for KV; nothing is left for as many of the second's.
    limits = ("--max-model-len", "4096", "--memory-limit", "8MiB")
    with serving(tiny_model, str(second_model), *limits, folder=tmp_path) as server:
        wait_for_state(server, "second", "unloaded")
        (before,) = instances(server)
        alone = text(server, first, max_tokens=3000)
        with ThreadPoolExecutor(1) as pool:
            under_way = pool.submit(text, server, first, max_tokens=3000)
            done = run_cli("models", "load", "second", "--url", server.url, folder=tmp_path)
            assert done.returncode == 1
            assert f"second does not fit beside {first} on " in done.stderr
            assert f"{first} keeps 5.2 MB for one request of 4096 tokens. Unload {first}, or" in done.stderr
            asked = answer(server, "second")
            assert (asked.status_code, asked.json()["error"]["code"]) == (503, "no_room")
            assert "does not fit beside" in asked.json()["error"]["message"]
            assert under_way.result() == alone
        assert [each["instance"] for each in instances(server)] == [before["instance"]]
        told = server.http.get("/model/info").json()
        assert (told["context_length"], told["kept_context_length"]) == (4096, 4096)
        assert run_cli("models", "unload", first, "--url", server.url, folder=tmp_path).returncode == 0
        assert text(server, "second")
        assert "does not fit beside second" in answer(server, first).json()["error"]["message"]
        assert server.stop() == 0
        assert server.all_ended()


def test_two_machines_each_hold_a_replica_and_one_answers_while_the_other_is_loaded_again(
    tiny_model: Path, tmp_path: Path
) -> None:
    with cluster(tiny_model, 2, tmp_path, free_pair_of_ports(), "--replicas", "2") as server:
        ready = wait_for_ready(server, 2)
        assert [len(each["nodes"]) for each in ready] == [1, 1]
        assert ready[0]["nodes"] != ready[1]["nodes"]
        first = text(server)
        victim = server.status()["devices"][1]
        os.kill(victim["pid"], signal.SIGKILL)
        wait_for_ready(server, 1)
        assert {text(server, seed=seed) for seed in range(4)} == {first}
        again = wait_for_ready(server, 2)
        assert {each["instance"] for each in again} != {each["instance"] for each in ready}
        assert {text(server, seed=seed) for seed in range(4)} == {first}
        assert server.stop() == 0


def wait_for_ready(server: Server, count: int) -> list[dict[str, Any]]:
    """Return the instances once exactly so many of them serve."""
    return eventually(
        lambda: instances(server), lambda found: sum(each["status"] == "ready" for each in found) == count
    )
