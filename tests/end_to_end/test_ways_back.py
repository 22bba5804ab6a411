"""Ways back of answers to their next token, of real processes: each is in the log and in the metrics."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.eventually import eventually
from tests.processes import Server, serving

from mlx_ring.head.instance_watch import WORKER_SILENCE_S

pytestmark = pytest.mark.machines

BODY = {"model": "demo", "prompt": "abcdefgh" * 50, "max_tokens": 300, "temperature": 0, "ignore_eos": True}
_AFTER = 20
"""Number of events of a stream before it is disturbed."""
_RUNS = 4
"""Most silences that are caused until one ends in time."""


def ways(server: Server) -> dict[str, tuple[int, float, float]]:
    """Return the number of ways back that were taken, and their predicted and taken seconds, by way."""
    text = server.http.get("/metrics").text

    def sums(name: str) -> dict[str, float]:
        found = re.findall(rf'^mlx_ring_way_back_{name}{{.*way="(\w+)".*}} (\S+)$', text, re.MULTILINE)
        values: dict[str, float] = {}
        for way, value in found:
            values[way] = values.get(way, 0.0) + float(value)
        return values

    counts, predicted, taken = (
        sums(name) for name in ("taken_seconds_count", "predicted_seconds_sum", "taken_seconds_sum")
    )
    return {way: (int(count), predicted[way], taken[way]) for way, count in counts.items() if count}


def text_of(server: Server) -> str:
    reply: dict[str, Any] = server.http.post("/v1/completions", json=BODY).raise_for_status().json()
    return reply["choices"][0]["text"]


def disturbed(server: Server, disturb: Callable[[], None]) -> str:
    """Return the text of a stream that is disturbed while it runs."""
    text, events = "", 0
    with server.http.stream("POST", "/v1/completions", json={**BODY, "stream": True}, timeout=120) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            found = re.search(r'"text": ?("(?:[^"\\]|\\.)*")', line)
            text += "" if found is None else str(json.loads(found[1]))
            events += 1
            if events == _AFTER:
                disturb()
    return text


def places_of(server: Server) -> list[tuple[int, str]]:
    """Return the process and the instance of every worker."""
    return [(device["pid"], device["instance"]) for device in server.status()["devices"]]


def losses_of(server: Server) -> float:
    text = server.http.get("/metrics").text
    return sum(map(float, re.findall(r"^mlx_ring_instance_losses_total{.*} (\S+)$", text, re.MULTILINE)))


def lines_of(folder: Path) -> list[str]:
    log = (folder / "logs" / "head.log").read_text()
    return re.findall(r"Ways back of .*", log)


def check(server: Server, folder: Path, way: str, what: str) -> None:
    """Check that one sequence took a way, as the metrics and the log say. A busy machine may also have had to wait."""
    found = eventually(lambda: ways(server), lambda now: way in now)
    count, predicted, taken = found[way]
    assert count == 1
    assert predicted > 0.0
    assert taken > 0.0
    times = f"predicted {predicted:.2f} s, took {taken:.2f} s"
    pattern = rf"Ways back of {what}: {way} \(1\), {times}"
    eventually(lambda: [line for line in lines_of(folder) if re.match(pattern, line)])


@pytest.mark.parametrize(("victim", "way"), [(0, "kept"), (1, "recompute")])
def test_lost_worker_leaves_the_way_that_its_place_allows(tmp_path: Path, victim: int, way: str) -> None:
    with serving("demo", "--stages", "2", folder=tmp_path) as server:
        expected = text_of(server)
        pids = [device["pid"] for device in server.status()["devices"]]
        assert disturbed(server, lambda: os.kill(pids[victim], signal.SIGKILL)) == expected
        check(server, tmp_path, way, "demo")


def test_another_replica_continues_an_answer_at_once(tmp_path: Path) -> None:
    with serving("demo", "--replicas", "2", folder=tmp_path) as server:
        with ThreadPoolExecutor(2) as pool:
            first, second = pool.map(text_of, [server] * 2)
        assert first == second
        status = server.status()
        instances = [each["instance"] for each in status["models"][0]["instances"]]
        pids = {device["instance"]: device["pid"] for device in status["devices"]}

        def kill_the_busy_one() -> None:
            # While the workers are stopped, the answer cannot end before the busy one is known.
            for pid in pids.values():
                os.kill(pid, signal.SIGSTOP)
            text = server.http.get("/metrics").text
            (number,) = re.findall(
                r'^mlx_ring_num_requests_running{.*instance="(\d)".*} 1.0$', text, re.MULTILINE
            )
            os.kill(pids[instances[int(number)]], signal.SIGKILL)
            os.kill(pids[instances[1 - int(number)]], signal.SIGCONT)

        assert disturbed(server, kill_the_busy_one) == first
        check(server, tmp_path, "replica", "demo")


def test_suspect_that_answers_in_time_is_waited_for_and_everything_continues_in_place(tmp_path: Path) -> None:
    # A machine that is too busy lets the silence last until its limit, which is a loss. Then it is caused again.
    runs = (is_waited_for(tmp_path / str(number)) for number in range(_RUNS))
    assert any(runs), f"Each of {_RUNS} silences became a loss."


def is_waited_for(folder: Path) -> bool:
    """Silence a machine until it is suspect. Check that it is waited for, or return False if the silence reached its limit."""
    folder.mkdir()
    with serving("demo", "--stages", "2", folder=folder) as server:
        expected = text_of(server)
        before = places_of(server)
        agent = server.child("mlx_ring.agent")
        worker = server.child("mlx_ring.worker", "--stage", "1")

        def is_suspect() -> bool:
            reasons = [each["reason"] or "" for each in server.status()["instances"]]
            return any("Suspect" in why for why in reasons) or losses_of(server) > 0

        def stop_until_suspect() -> None:
            worker.suspend()
            agent.suspend()
            try:
                eventually(is_suspect)
            finally:
                for process in (agent, worker):
                    # One that counts as lost may have been ended.
                    with suppress(psutil.NoSuchProcess):
                        process.resume()

        assert disturbed(server, stop_until_suspect) == expected
        if losses_of(server):
            log = (folder / "logs" / "head.log").read_text()
            given_up = re.findall(r"waits no longer for what is silent for (\S+) s", log)
            assert min(map(float, given_up), default=0.0) >= WORKER_SILENCE_S
            return False
        check(server, folder, "wait", r"demo-\w+")
        assert ways(server).keys() == {"wait"}
        assert places_of(server) == before
    return True
