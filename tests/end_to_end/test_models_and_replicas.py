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
from tests.end_to_end.loopback_cluster import running_cluster
from tests.eventually import eventually
from tests.machines import free_pair_of_ports
from tests.processes import Server, run_cli, run_in_process, serving
from tests.profiles import made_up_profile

from mlx_ring.agent.profiling import ProfileKey, ProfileOptions, ProfileStore
from mlx_ring.head.served_model import memory_for_weights
from mlx_ring.host.machine import share_cores
from mlx_ring.models.model_source import find_model
from mlx_ring.settings.config import Settings

REQUEST = {"prompt": "The quick brown fox", "max_tokens": 24, "temperature": 0, "ignore_eos": True}


def answer(server: Server, model: str | None = None, **changes: object) -> httpx.Response:
    body = REQUEST | changes | ({} if model is None else {"model": model})
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
    """Copy the weights, and return their folder under another name."""
    folder = tmp_path_factory.mktemp("second") / "second"
    shutil.copytree(tiny_model, folder)
    return folder


@pytest.fixture(scope="module")
def server(
    tiny_model: Path, second_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Generator[Server]:
    """Serve two replicas of each of two models."""
    folder = tmp_path_factory.mktemp("several")
    options = ProfileOptions("auto", share_cores(4))
    ProfileStore(folder / "state").save(ProfileKey.of_here(options), made_up_profile())
    flags = (str(second_model), "--replicas", "2", "--state-dir", str(folder / "state"))
    with serving(tiny_model, *flags, folder=folder) as server:
        # A model is ready with its first replica, and questions about plans leave out replicas that load.
        eventually(
            lambda: [each["status"] for each in instances(server)], lambda found: found == 4 * ["ready"]
        )
        yield server


def wait_for_state(server: Server, model: str, state: str) -> None:
    eventually(lambda: states(server)[model], lambda current: current == state)


def test_all_replicas_of_both_models_give_the_same_answer(server: Server, tiny_model: Path) -> None:
    assert len(instances(server)) == 4
    answers = {text(server, name, seed=seed) for name in (tiny_model.name, "second") for seed in range(3)}
    assert len(answers) == 1


def test_a_what_if_question_shows_all_replicas_of_the_model(server: Server) -> None:
    (now,) = server.http.post("/cluster/what-if", json={"model": "second"}).json()["outcomes"]
    assert now["model"] == "second"
    assert len(now["stages"]) == 2
    assert len(set(now["stages"])) == 1, "both replicas have all layers, on the same machine"
    assert now["users"] > 1


def test_concurrent_requests_are_spread_over_the_replicas(server: Server, tiny_model: Path) -> None:
    prompts = [f"Number {number} is another beginning. " * 4 for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(text, server, tiny_model.name, prompt=prompt) for prompt in prompts]
        together = [each.result() for each in answers]
    alone = [text(server, tiny_model.name, prompt=prompt) for prompt in prompts]
    assert together == alone
    first, second = server.status()["models"][0]["instances"]
    assert first["step_times"][0]["decode_steps"] > 0
    assert second["step_times"][0]["decode_steps"] > 0


def test_metrics_have_labels_for_each_model_and_replica(server: Server, tiny_model: Path) -> None:
    counted = {
        (sample.labels["model_name"], sample.labels["instance"]): sample.value
        for family in text_string_to_metric_families(server.http.get("/metrics").text)
        for sample in family.samples
        if sample.name == "mlx_ring_request_success_total" and sample.labels["finished_reason"] == "length"
    }
    assert {(name, number) for name in (tiny_model.name, "second") for number in "01"} <= set(counted)
    assert all(counted[tiny_model.name, number] > 0 for number in "01")


def test_repeated_prompt_goes_to_the_replica_that_has_it_cached(server: Server) -> None:
    prompt = "A long beginning that several questions share, and that need not be read again. " * 3
    for again in range(4):
        usage = answer(server, "second", prompt=prompt).json()["usage"]
        assert (usage["prompt_tokens_details"]["cached_tokens"] > 0) == (again > 0)


def test_unloaded_model_frees_its_workers_and_is_loaded_again_on_request(
    server: Server, tmp_path: Path
) -> None:
    before = text(server, "second")
    done = run_in_process("models", "unload", "second", "--url", server.url, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert states(server)["second"] == "unloaded"
    assert len(instances(server)) == 2
    assert text(server, "second") == before
    assert states(server)["second"] == "ready"


def test_model_that_the_command_did_not_name_is_loaded_and_served(server: Server, tmp_path: Path) -> None:
    done = run_in_process("models", "load", "demo", "--url", server.url, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert text(server, "demo")
    wrong = run_in_process("models", "load", "no-such-model", "--url", server.url, folder=tmp_path)
    assert wrong.returncode == 1
    assert "There is no model 'no-such-model'" in wrong.stderr
    done = run_in_process("models", "unload", "demo", "--url", server.url, folder=tmp_path)
    assert done.returncode == 0, done.stderr


def test_least_recently_used_model_is_unloaded_within_a_memory_budget(tmp_path: Path) -> None:
    demo = find_model("demo").folder
    copy = tmp_path / "copy"
    shutil.copytree(demo.path, copy)
    budget = memory_for_weights(demo, Settings()) * 3 // 2
    with serving("demo", str(copy), "--model-memory", str(budget), folder=tmp_path) as server:
        wait_for_state(server, "copy", "unloaded")
        request = {"prompt": "Hello", "max_tokens": 8}
        first = text(server, "demo", **request)
        assert text(server, "copy", **request) == first
        assert states(server) == {"demo": "unloaded", "copy": "ready"}
        assert text(server, "demo", **request) == first
        assert states(server) == {"demo": "ready", "copy": "unloaded"}
        assert server.stop() == 0
        assert server.all_ended()


def test_explicit_context_length_is_kept_and_refuses_another_model(
    tiny_model: Path, second_model: Path, tmp_path: Path
) -> None:
    first = tiny_model.name
    # 4096 tokens take 5.2 MB of about 6.6 MB for KV, so the second model's 4096 tokens do not fit.
    limits = ("--max-model-len", "4096", "--memory-limit", "8MiB")
    with serving(tiny_model, str(second_model), *limits, folder=tmp_path) as server:
        wait_for_state(server, "second", "unloaded")
        (before,) = instances(server)
        alone = text(server, first, max_tokens=700)
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(text, server, first, max_tokens=700)
            done = run_cli("models", "load", "second", "--url", server.url, folder=tmp_path)
            assert done.returncode == 1
            assert f"second does not fit beside {first} on " in done.stderr
            assert f"{first} keeps 5.2 MB for one request of 4096 tokens. Unload {first}, or" in done.stderr
            refused = answer(server, "second")
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_room")
            assert "does not fit beside" in refused.json()["error"]["message"]
            assert running.result() == alone
        assert [each["instance"] for each in instances(server)] == [before["instance"]]
        info = server.http.get("/model/info").json()
        assert (info["context_length"], info["kept_context_length"]) == (4096, 4096)
        assert run_in_process("models", "unload", first, "--url", server.url, folder=tmp_path).returncode == 0
        assert text(server, "second")
        assert "does not fit beside second" in answer(server, first).json()["error"]["message"]
        assert server.stop() == 0
        assert server.all_ended()


@pytest.mark.faults
def test_replica_of_another_machine_answers_while_a_lost_one_is_restarted(
    tiny_model: Path, tmp_path: Path
) -> None:
    with running_cluster(tiny_model, 2, tmp_path, free_pair_of_ports(), "--replicas", "2") as server:
        ready = wait_for_ready(server, 2)
        assert [len(each["nodes"]) for each in ready] == [1, 1]
        assert ready[0]["nodes"] != ready[1]["nodes"]
        first = text(server)
        victim = server.status()["devices"][1]
        os.kill(victim["pid"], signal.SIGKILL)
        wait_for_ready(server, 1)
        assert {text(server, seed=seed) for seed in range(4)} == {first}
        restarted = wait_for_ready(server, 2)
        assert {each["instance"] for each in restarted} != {each["instance"] for each in ready}
        assert {text(server, seed=seed) for seed in range(4)} == {first}
        assert server.stop() == 0


def wait_for_ready(server: Server, count: int) -> list[dict[str, Any]]:
    """Wait until exactly `count` instances are ready, and return all instances."""
    return eventually(
        lambda: instances(server),
        lambda all_instances: sum(each["status"] == "ready" for each in all_instances) == count,
    )
