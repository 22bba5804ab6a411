"""Runs of `mlx-ring serve` with real processes: start, answers, faults, end, and no leftovers."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.eventually import eventually, run_tasks_until
from tests.frozen_thread import frozen_thread
from tests.interrupted import BODY, complete, interrupt
from tests.processes import Server, command_of, serving
from tests.profiles import COSTS, RATES, made_up_profile

from mlx_ring.agent.profiling import ProfileKey, ProfileOptions, ProfileStore
from mlx_ring.core.types import RankId
from mlx_ring.head import head
from mlx_ring.head.head import LanUrls
from mlx_ring.head.instance_watch import Watched
from mlx_ring.host.interfaces import LanAddress
from mlx_ring.host.machine import share_cores
from mlx_ring.rpc.protos import agent_pb2, hello_pb2, worker_pb2

PIPE_BYTES = 100_000
"""More than a pipe holds."""
ENDLESS = {"prompt": "x", "max_tokens": 10**9, "ignore_eos": True, "stream": True}


def ask(server: Server) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "ignore_eos": True}
    return server.http.post("/v1/chat/completions", json=body)


@pytest.fixture(scope="module")
def two_stages(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[Server]:
    """Run a server of two stages, whose workers and agent tests end. Each leaves others in their place."""
    folder = tmp_path_factory.mktemp("run")
    with serving(tiny_model, "--stages", "2", "--run-dir", str(folder / "r"), folder=folder) as server:
        yield server


def test_addresses_for_other_machines_follow_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[LanAddress] = []
    monkeypatch.setattr(head, "LAN_LOOK_S", 0.0)
    monkeypatch.setattr(head, "lan_addresses", lambda: found)
    monkeypatch.setattr(head, "own_names", tuple)

    async def act(listener: socket.socket) -> None:
        urls, port = LanUrls(listener, "http"), listener.getsockname()[1]
        assert urls.present == ()
        following = asyncio.create_task(urls.follow())
        for address in ("192.168.1.7", "192.168.1.8"):
            found[:] = [LanAddress("eth0", 2, address, "wired")]
            await run_tasks_until(lambda address=address: urls.present == (f"http://{address}:{port}",))
        following.cancel()

    with socket.create_server(("0.0.0.0", 0)) as listener:  # noqa: S104 - all networks are the case
        asyncio.run(act(listener))


def test_workers_are_ready_once_every_node_has_reported_each_as_ready() -> None:
    ready = worker_pb2.WorkerStatus(phase="ready", memory_bytes=7)
    states = [agent_pb2.WorkerState(instance="a", stage=stage, status=ready) for stage in range(2)]
    other = agent_pb2.WorkerState(instance="b")
    event = agent_pb2.AgentEvent(workers=[*states, other], hello=hello_pb2.Hello(node="here"))
    here = {("here", RankId(0, 0)): ready, ("here", RankId(1, 0)): ready}
    assert Watched("a", 1).record(event) == here
    assert Watched("c", 1).record(event) is None
    there = agent_pb2.AgentEvent(
        workers=[agent_pb2.WorkerState(instance="a", stage=2, status=ready)],
        hello=hello_pb2.Hello(node="there"),
    )
    watched = Watched("a", 2)
    assert watched.record(event) is None, "another node has not reported yet"
    assert watched.record(there) == {**here, ("there", RankId(2, 0)): ready}
    event.workers[1].ClearField("status")
    assert Watched("a", 1).record(event) is None, "it was too busy to answer"


def test_a_small_kv_budget_shortens_the_context_and_status_shows_both(
    tiny_model: Path, tmp_path: Path
) -> None:
    flags = (
        "--kv-cache-memory",
        "1MiB",
        "--no-prefix-cache",
        "--max-itl-ratio",
        "3",
        "--num-speculative-tokens",
        "0",
    )
    with serving(tiny_model, *flags, folder=tmp_path) as server:
        client = server.http
        (model,) = client.get("/v1/models").json()["data"]
        (worker,) = client.get("/cache/stats").json()["workers"]
        assert model["max_model_len"] == worker["context_tokens"] == 768
        assert (worker["limit_bytes"], worker["sequences_allowed"]) == (1 << 20, 1)
        assert worker["bytes_per_token"] == 5 * 2 * 2 * 16 * 4, (
            "layers, keys and values, heads, width, float32"
        )
        scheduling = client.get("/cluster/status").json()["scheduling"]
        assert scheduling["max_itl_ratio"] == 3.0
        assert (scheduling["prefix_cache"], scheduling["draft_tokens"]) == (False, 0)
        too_long = {"prompt": "x" * 800, "max_tokens": 1}
        assert client.post("/v1/completions", json=too_long).json()["error"]["n_ctx"] == 768
    assert "The KV cache holds 768 tokens of one request" in (tmp_path / "logs" / "head.log").read_text()


def test_a_single_machine_predicts_from_its_stored_profile(tiny_model: Path, tmp_path: Path) -> None:
    options = ProfileOptions("auto", share_cores(1))
    ProfileStore(tmp_path / "state").save(ProfileKey.of_here(options), made_up_profile())
    with serving(tiny_model, "--state-dir", str(tmp_path / "state"), folder=tmp_path) as server:
        assert ask(server).status_code == 200
        status = server.status()
        (node,), (instance,) = status["nodes"], status["instances"]
        (now,) = server.http.post("/cluster/what-if", json={}).json()["outcomes"]
        assert now["model"] == server.http.get("/v1/models").json()["data"][0]["id"]
        assert now["stages"] == [f"{node['name']} 0-{instance['layers'] - 1}"]
        assert (now["is_measured"], now["left_out"]) == (True, [])
        assert (node["is_head"], node["stages"]) == (True, [f"{instance['name']}/0"])
        assert node["memory"]["promised_bytes"] == instance["stages"][0]["memory"]["promised"]["total_bytes"]
        (decode,), (prefill,) = instance["stages"][0]["times"].values()
        assert (decode["rows"], prefill["rows"]) == (1, 1)
        assert decode["steps"] > 1
        for step in (decode, prefill):
            assert step["measured_ms"] > 0
            assert step["predicted_ms"] > 0
        assert instance["stream"]["tokens"] > 1
        assert instance["stream"]["measured_tokens_per_s"] > 0
        assert instance["stream"]["predicted_tokens_per_s"] > 0


def test_the_next_plan_counts_how_long_steps_took(tiny_model: Path, tmp_path: Path) -> None:
    """Serve twice with the profile of a machine that is faster than any."""
    options = ProfileOptions("auto", share_cores(1))
    rates = tuple(rate.model_copy(update={"bandwidth": 1e15, "row_s": 0.0, "flops": 1e18}) for rate in RATES)
    costs = COSTS.model_copy(update=dict.fromkeys(COSTS.model_dump(exclude={"starts_ahead"}), 1e-9))
    ProfileStore(tmp_path / "state").save(
        ProfileKey.of_here(options), made_up_profile(rates=rates, costs=costs)
    )

    def serve_once(*flags: str) -> tuple[dict[str, Any], float]:
        with serving(tiny_model, "--state-dir", str(tmp_path / "state"), *flags, folder=tmp_path) as server:
            status = server.status()  # before a step, which counts at once where it is far off
            body = {"prompt": "x", "max_tokens": 60, "ignore_eos": True}
            assert server.http.post("/v1/completions", json=body).status_code == 200
            server.stop()
        (node,), (instance,) = status["nodes"], status["instances"]
        return node["step_time_ratios"], instance["stream"]["predicted_tokens_per_s"]

    first, predicted = serve_once()
    second, corrected = serve_once()
    assert (first["decode"], second["decode"]) == (1.0, 2.0)
    assert corrected < 0.7 * predicted
    third, uncorrected = serve_once("--learn-speeds", "off")
    assert (third["decode"], uncorrected) == (1.0, pytest.approx(predicted, rel=0.05))


def test_agent_and_workers_end_with_a_killed_head(tiny_model: Path, tmp_path: Path) -> None:
    with serving(tiny_model, "--stages", "2", folder=tmp_path) as server:
        server.process.kill()
        assert server.all_ended()


def test_server_serves_although_a_worker_was_killed_in_the_first_load(
    tiny_model: Path, tmp_path: Path
) -> None:
    def workers() -> list[psutil.Process]:
        running = (each for each in psutil.Process().children(recursive=True) if command_of(each))
        return [
            each for each in running if "mlx_ring.worker" in command_of(each) and each.cwd() == str(tmp_path)
        ]

    def kill_first() -> None:
        eventually(workers)[0].kill()

    with ThreadPoolExecutor(1) as pool:
        killed = pool.submit(kill_first)
        with serving(tiny_model, folder=tmp_path) as server:
            killed.result()
            assert ask(server).status_code == 200
    log = (tmp_path / "logs" / "head.log").read_text()
    assert log.count("ended by signal 9 (SIGKILL) while the instance was loaded") == 1
    assert log.count(" again in 1 s") == 1


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_an_answer_continues_when_a_worker_ends_or_hangs_which_is_named_and_replaced(
    fault: signal.Signals, tiny_model: Path, two_stages: Server
) -> None:
    server = two_stages
    worker, other = (server.child("mlx_ring.worker", "--stage", stage) for stage in ("1", "0"))
    expected = complete(server.http)
    read_bytes = other.io_counters().read_chars
    answer = interrupt(server.http, lambda: worker.send_signal(fault))
    assert answer.text == expected
    assert ": resuming" in answer.comments
    assert complete(server.http) == expected
    pids = {process.pid for process in server.present_children()}
    assert worker.pid not in pids
    assert other.pid in pids, "the worker that was not lost stays"
    weights = (tiny_model / "model.safetensors").stat().st_size
    assert other.io_counters().read_chars - read_bytes < weights / 2, "it loaded nothing again"
    reason = "ended by signal 9 (SIGKILL)" if fault == signal.SIGKILL else "it is stuck"
    log = (server.folder / "logs" / "head.log").read_text().splitlines()
    assert any(f"(pid {worker.pid})" in line and reason in line for line in log)


def test_server_serves_on_after_a_loss_when_nobody_reads_its_output_any_more(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Stop reading once it serves, as programs do that start a server, and terminals that are closed."""
    with serving(tiny_model, folder=tmp_path) as server:
        expected = complete(server.http)
        assert server.process.stdout is not None
        server.process.stdout.close()
        answer = interrupt(server.http, server.child("mlx_ring.worker").kill)
        assert answer.text == expected
        assert server.stop() == 0
    log = (tmp_path / "logs" / "head.log").read_text()
    assert log.count("The output of `mlx-ring serve` cannot be written any more (Broken pipe)") == 1
    assert "Traceback" not in log


def test_server_serves_on_and_ends_although_its_output_is_a_full_pipe_that_nobody_reads(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Keep the pipe open, as supervisors do that only wait for the process's end."""
    one_pipe = ("sh", "-c", 'exec "$@" 2>&1', "sh")
    with serving(tiny_model, folder=tmp_path, within=one_pipe) as server:
        expected = complete(server.http)
        log = tmp_path / "logs" / "head.log"
        while log.stat().st_size < PIPE_BYTES:
            server.http.get("/v1/models", headers={"x-request-id": "x" * 128}).raise_for_status()
        assert complete(server.http) == expected
        assert server.stop() == 0
        assert server.process.stdout is not None
        assert "access_log" in server.process.stdout.read()


def test_server_serves_without_stderr(tiny_model: Path, tmp_path: Path) -> None:
    """Close stderr, whose number the first socket would take."""
    closed = ("sh", "-c", 'exec "$@" 2>&-', "sh")
    with serving(tiny_model, folder=tmp_path, within=closed) as server:
        assert ask(server).status_code == 200
        assert server.stop() == 0


def test_workers_end_with_a_killed_agent_and_all_are_restarted(two_stages: Server) -> None:
    server, before, lost = two_stages, two_stages.status(), two_stages.present_children()
    server.child("mlx_ring.agent").kill()
    assert not psutil.wait_procs(lost, timeout=30)[1]
    eventually(server.status, lambda status: status["epoch"] != before["epoch"])
    server.wait_for_health(200)
    assert ask(server).status_code == 200


@dataclass(frozen=True, slots=True)
class Run:
    """Results of the server of two stages, which answered, lost processes, and was ended by Ctrl-C."""

    folder: Path
    processes: int
    answer: int
    exit_code: int
    all_ended: bool
    sockets_left: list[Path]


@pytest.fixture(scope="module")
def run(two_stages: Server) -> Run:
    """End the server. Its other tests come before those of its end."""
    server, folder = two_stages, two_stages.folder
    answer, children = ask(server).status_code, server.present_children()
    code = server.stop()
    _, left = psutil.wait_procs(children, timeout=30)
    return Run(folder, len(children), answer, code, not left, list((folder / "r").iterdir()))


def test_two_stages_run_as_an_agent_and_two_workers(run: Run) -> None:
    assert (run.processes, run.answer) == (3, 200)


def test_ctrl_c_ends_every_process_and_leaves_no_socket(run: Run) -> None:
    assert run.exit_code == 0
    assert run.all_ended
    assert run.sockets_left == []


def test_every_log_line_has_node_process_rank_and_epoch(run: Run) -> None:
    logs = sorted(path.name for path in (run.folder / "logs").iterdir())
    assert logs == ["agent.log", "head.log", "worker-0-0.log", "worker-1-0.log"]
    lines = [line for name in logs for line in (run.folder / "logs" / name).read_text().splitlines()]
    lines += [line for line in (run.folder / "stderr.txt").read_text().splitlines() if line]
    assert any("mlx_ring.api.middleware.access_log" in line for line in lines)
    untagged = [
        line for line in lines if not all(f" {key}=" in line for key in ("node", "process", "rank", "epoch"))
    ]
    assert untagged == []


def test_losses_in_a_recovery_are_recoveries_of_their_own(tiny_model: Path, tmp_path: Path) -> None:
    """Kill a worker that serves, one of the next while they start, and one during the replay."""
    body = {**BODY, "prompt": [*range(5, 205)]}
    # One token in a step: the replay takes long enough to be seen.
    with serving(tiny_model, "--stages", "2", "--prefill-chunk", "1", folder=tmp_path) as server:
        expected, first = complete(server.http, body), workers_of(server)

        def lose_three_times() -> None:
            first[0].kill()
            eventually(lambda: [each for each in workers_of(server) if each not in first])[-1].kill()
            replaying = eventually(server.status, is_replaying)
            psutil.Process(replaying["devices"][1]["pid"]).kill()

        assert interrupt(server.http, lose_three_times, body).text == expected
        assert server.status()["instances"][0]["recovery"] is None
        assert losses_of(server) == 3
        assert server.stop() == 0
    log = (tmp_path / "logs" / "head.log").read_text()
    assert log.count("Recovered tiny in ") == 1
    assert "; 1 request resumed" in log


def losses_of(server: Server) -> float:
    """Return the number of times that the instance was lost or could not be loaded."""
    families = text_string_to_metric_families(server.http.get("/metrics").text)
    return sum(
        sample.value
        for family in families
        if family.name == "mlx_ring_instance_losses"
        for sample in family.samples
    )


def is_replaying(status: dict[str, Any]) -> bool:
    recovery = status["instances"][0]["recovery"]
    return recovery is not None and recovery["phase"] == "replaying"


def workers_of(server: Server) -> list[psutil.Process]:
    """Return the workers that run now."""
    return [
        child
        for child in psutil.Process(server.process.pid).children(recursive=True)
        # A process that has ended, and is not yet waited for, has no command line either.
        if "mlx_ring.worker" in command_of(child)
    ]


def test_answers_of_a_lost_replica_continue_on_the_other(tiny_model: Path, tmp_path: Path) -> None:
    with serving(tiny_model, "--replicas", "2", folder=tmp_path) as server:
        expected = complete(server.http)
        eventually(
            server.status, lambda status: [each["state"] for each in status["instances"]] == ["ready"] * 2
        )
        worker = server.child("mlx_ring.worker")
        with ThreadPoolExecutor() as threads:
            other = threads.submit(interrupt, server.http, lambda: None)
            first = interrupt(server.http, worker.kill)
            assert (first.text, other.result().text) == (expected, expected)
        assert server.stop() == 0


def test_a_worker_that_answers_but_does_not_compute_is_replaced(tiny_model: Path, tmp_path: Path) -> None:
    flags = ("--stages", "2", "--step-deadline-s", "2")
    with serving(tiny_model, *flags, folder=tmp_path) as server:
        assert ask(server).status_code == 200
        worker = server.child("mlx_ring.worker", "--stage", "1")
        # The first thread of a process computes, and its id is the process's.
        with frozen_thread(worker.pid):
            assert ask(server).status_code == 200, "the answer waits for the other worker"
        assert not psutil.pid_exists(worker.pid)
        assert server.stop() == 0
    log = (tmp_path / "logs" / "head.log").read_text()
    assert "Stage 1, rank 0" in log
    assert "has made no progress on step" in log
    assert "has not answered for" not in log, "its heartbeats continued"


def test_a_spare_worker_waits_for_a_loss_and_ends_with_a_server_that_is_terminated(
    tiny_model: Path, tmp_path: Path
) -> None:
    with serving(tiny_model, "--spare-worker", "on", folder=tmp_path) as server:
        first = server.child("mlx_ring.worker")
        found = eventually(lambda: workers_of(server), lambda workers: len(workers) == 2)
        (spare,) = (worker for worker in found if worker != first)
        assert "--spare" in spare.cmdline()
        assert ask(server).status_code == 200
        children = server.present_children()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
        assert spare in children
        assert not psutil.wait_procs(children, timeout=30)[1]
