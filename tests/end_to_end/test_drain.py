"""Machines that are wanted back while they serve: their layers move, and no answer changes or ends."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import threading
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.end_to_end.loopback_cluster import end_head_members, joining_head, running_head
from tests.eventually import eventually
from tests.faults.injection import Stopped, stopping_at_steps
from tests.machines import free_pair_of_ports
from tests.processes import Server, client_of

pytestmark = pytest.mark.machines

TOKENS = 160
STREAMS = 6
FLAGS = ("--strategy", "uniform", "--max-model-len", "2048", "--kv-cache-memory", "64MiB")


class Streams:
    """Streams of completions, each read by a thread of its own."""

    def __init__(self, server: Server, tokens: int = TOKENS) -> None:
        self.texts = [""] * STREAMS
        self.ends: list[str | None] = [None] * STREAMS
        self.begun = threading.Barrier(STREAMS + 1)
        self._server, self._tokens = server, tokens
        self._threads = [threading.Thread(target=self._read, args=(number,)) for number in range(STREAMS)]
        for thread in self._threads:
            thread.start()
        self.begun.wait(60)

    def _read(self, number: int) -> None:
        with (
            client_of(str(self._server.http.base_url)) as client,
            client.stream(
                "POST", "/v1/completions", json=body_of(number, self._tokens, stream=True)
            ) as answer,
        ):
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                if not self.texts[number]:
                    self.begun.wait(60)
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    self.ends[number] = "error"
                    continue
                choice = event["choices"][0]
                self.texts[number] += choice["text"]
                self.ends[number] = choice["finish_reason"] or self.ends[number]

    def join(self) -> list[str | None]:
        """Wait for all, and return the reasons of their ends."""
        for thread in self._threads:
            thread.join(120)
        return self.ends

    def finish(self) -> list[str]:
        assert self.join() == ["length"] * STREAMS
        return self.texts


def body_of(number: int, tokens: int, **more: object) -> dict[str, object]:
    sampling = {"temperature": 0} if number % 2 else {"temperature": 1, "seed": number}
    prompt = f"Once upon a time, {number} machines " * (1 + number)
    return {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, **sampling, **more}


def expected(server: Server, tokens: int = TOKENS) -> list[str]:
    answers = (server.http.post("/v1/completions", json=body_of(number, tokens)) for number in range(STREAMS))
    return [answer.raise_for_status().json()["choices"][0]["text"] for answer in answers]


def ask(server: Server, prompt: str) -> tuple[str, int]:
    """Return a short answer, and the number of its prompt's tokens that were computed."""
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    answer = server.http.post("/v1/completions", json=body).raise_for_status().json()
    usage = answer["usage"]
    computed = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
    return answer["choices"][0]["text"], computed


def moved_tokens(server: Server) -> int:
    """Return the tokens whose KV came from the workers of another instance."""
    return server.http.get("/cache/stats").raise_for_status().json()["prefix_cache"]["moved_tokens"]


def nodes_in_use(server: Server) -> set[str]:
    return {device["node"] for device in server.status()["devices"]}


def nodes(server: Server) -> list[dict[str, Any]]:
    return server.status()["nodes"]


@contextmanager
def three_machines(
    folder: Path, *flags: str, join_flags: Sequence[str] = (), speed: float = 1.0
) -> Generator[tuple[Server, Sequence[subprocess.Popen[str]]]]:
    """Run a head and two machines that have joined, with the arguments of `running_cluster`."""
    joined: list[subprocess.Popen[str]] = []
    with ExitStack() as stack:

        def read(line: str) -> None:
            _, found, token = line.partition("--token ")
            if found and not joined:
                for number in (1, 2):
                    place = folder / f"node-{number}"
                    node = joining_head(port, token.split()[0], place, *join_flags, speed=speed)
                    joined.append(stack.enter_context(node))

        port = free_pair_of_ports()
        stack.callback(end_head_members, folder)
        head = running_head("demo", 3, folder, port, *flags, on_line=read, speed=speed)
        yield stack.enter_context(head), joined


@dataclass(frozen=True, slots=True)
class Cluster:
    """Three machines, whose workers can be stopped at a step."""

    server: Server
    joined: Sequence[subprocess.Popen[str]]
    folder: Path
    hook: Path

    @property
    def log(self) -> str:
        return (self.folder / "logs" / "head.log").read_text()

    def stop_worker(self, texts: Sequence[str]) -> tuple[Stopped, Streams, psutil.Process]:
        """Start streams, and stop the first stage's worker when the one with the longest prompt is in its answer."""
        first = self.server.status()["instances"][0]["stages"][0]
        stopped = Stopped(self.hook, first["pid"])
        longest = self.server.http.post("/v1/completions", json=body_of(STREAMS - 1, 1)).json()["usage"]
        stopped.set(longest["prompt_tokens"], longest["prompt_tokens"] + 20)
        assert len(texts) == STREAMS
        streams = Streams(self.server)
        stopped.wait()
        return stopped, streams, psutil.Process(first["pid"])

    def wait_for_the_move(self) -> None:
        """Wait until another instance serves beside the first one, to which requests move at once."""

        def ready() -> int:
            return [each["state"] for each in self.server.status()["instances"]].count("ready")

        eventually(ready, lambda count: count == 2)
        self.server.status()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Generator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    with (
        stopping_at_steps() as hook,
        three_machines(folder, *FLAGS, "--step-deadline-s", "0") as (server, joined),
    ):
        yield Cluster(server, joined, folder, hook)


@pytest.fixture(scope="module")
def texts(cluster: Cluster) -> list[str]:
    """Return the texts of undisturbed answers: before the first drain, one after the other."""
    return expected(cluster.server)


def other_node(server: Server) -> str:
    """Return a machine with layers that is not the head's."""
    return next(
        node["id"] for node in nodes(server) if not node["is_head"] and node["id"] in nodes_in_use(server)
    )


def test_worker_that_dies_while_its_kv_moves_changes_no_answer(cluster: Cluster, texts: list[str]) -> None:
    """Kill a worker from which others wait to read KV. No earlier move lets tokens be computed instead."""
    server = cluster.server
    other = other_node(server)
    stopped, streams, worker = cluster.stop_worker(texts)
    with ThreadPoolExecutor(1) as pool:
        draining = pool.submit(server.http.post, "/cluster/drain", json={"node": other}, timeout=120)
        cluster.wait_for_the_move()
        worker.kill()
        stopped.close()
        assert streams.finish() == texts
        assert draining.result().status_code == 200
    assert other not in nodes_in_use(server)
    assert re.search("KV of .* is computed again, because it was not moved: ", cluster.log)
    assert expected(server) == texts
    assert server.http.post("/cluster/readmit", json={"node": other}).status_code == 200


def test_drained_machine_has_no_layers_and_no_answer_changes(cluster: Cluster, texts: list[str]) -> None:
    server = cluster.server
    other = other_node(server)
    stopped, streams, _ = cluster.stop_worker(texts)
    with ThreadPoolExecutor(1) as pool:
        draining = pool.submit(server.http.post, "/cluster/drain", json={"node": other}, timeout=120)
        cluster.wait_for_the_move()
        stopped.close()
        drained = draining.result()
    assert drained.status_code == 200, drained.text
    (moved,) = drained.json()["moved"]
    assert (moved["model"], moved["way"], moved["why"]) == ("demo", "beside", None)
    assert moved["requests"] >= 1
    # Over TLS, and within a machine.
    assert moved_tokens(server) > 0
    assert re.search(r"Ways back of \S+: move \(1\), predicted .* took .* recompute: ", cluster.log)
    assert other not in nodes_in_use(server)
    assert [node["state"] for node in nodes(server) if node["id"] == other] == ["drained"]
    assert streams.finish() == texts
    assert expected(server) == texts
    assert server.http.post("/cluster/readmit", json={"node": other}).status_code == 200
    assert [node["state"] for node in nodes(server) if node["id"] == other] == ["attending"]


def test_conversation_at_rest_continues_after_a_move_without_being_computed(tmp_path: Path) -> None:
    """Let nothing else move: what that took might make it slower to move this than to compute it."""
    with three_machines(tmp_path, *FLAGS) as (server, _):
        resting = "They talk for hours. " * 200
        text, computed = ask(server, resting)
        assert computed > 1024
        drained = server.http.post("/cluster/drain", json={"node": other_node(server)}, timeout=120)
        assert [moved["way"] for moved in drained.raise_for_status().json()["moved"]] == ["beside"]
        assert moved_tokens(server) >= computed
        assert ask(server, resting) == (text, 1)


def test_model_that_is_unloaded_by_force_while_it_moves_does_not_hold_up_the_drain(
    cluster: Cluster, texts: list[str]
) -> None:
    """Let the requests never move: the worker that computes them is stopped in a step."""
    server = cluster.server
    other = other_node(server)
    stopped, streams, _ = cluster.stop_worker(texts)
    with ThreadPoolExecutor(1) as pool:
        draining = pool.submit(server.http.post, "/cluster/drain", json={"node": other}, timeout=120)
        cluster.wait_for_the_move()
        unloaded = server.http.post("/models/unload", json={"model": "demo", "force": True}, timeout=120)
        assert unloaded.status_code == 200, unloaded.text
        drained = draining.result()
        stopped.close()
    assert (drained.status_code, drained.json()["moved"]) == (200, [])
    assert streams.join() == ["error"] * STREAMS
    # The next request loads it, on the machines that are left.
    assert expected(server) == texts
    assert other not in nodes_in_use(server)
    assert server.http.post("/cluster/readmit", json={"node": other}).status_code == 200


def losses(server: Server) -> float:
    """Return the number of instances that were lost."""
    lines = server.http.get("/metrics").text.splitlines()
    found = [line for line in lines if line.startswith("mlx_ring_instance_losses_total{")]
    assert found
    return sum(float(line.split()[-1]) for line in found)


def test_machine_that_ends_hands_over_its_layers_first(cluster: Cluster, texts: list[str]) -> None:
    server, joined = cluster.server, cluster.joined
    used, before = nodes_in_use(server), losses(server)
    streams = Streams(server)
    # Whichever machine has layers, and is not the head's.
    for process in joined:
        process.send_signal(signal.SIGINT)
        process.wait(60)
        if nodes_in_use(server) != used:
            break
    assert streams.finish() == texts
    assert losses(server) == before
    eventually(lambda: server.http.get("/health").status_code, lambda code: code == 200)


def test_answers_pause_if_no_second_instance_fits_beside_the_first(tmp_path: Path, texts: list[str]) -> None:
    """Let the models have memory for one instance, but not for two."""
    with three_machines(tmp_path, *FLAGS, "--model-memory", "30MiB") as (server, _):
        used = nodes_in_use(server)
        other = next(node["id"] for node in nodes(server) if not node["is_head"])
        streams = Streams(server)
        drained = server.http.post("/cluster/drain", json={"node": other}, timeout=120).raise_for_status()
        assert streams.finish() == texts
        (moved,) = drained.json()["moved"]
        assert (moved["way"], moved["requests"]) == ("after", STREAMS)
        assert "--model-memory" in moved["why"]
        assert nodes_in_use(server) == used - {other}
        assert server.http.post("/cluster/drain", json={"node": "nobody"}).status_code == 400
