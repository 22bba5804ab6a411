"""A stage of several ranks as `mlx-ring serve` runs it: their loss, their idling, and what cannot be shared out."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import httpx
import psutil
import pytest
from tests.processes import Server, serving

pytestmark = pytest.mark.alone
_LONG = {"prompt": [5, 6, 7], "max_tokens": 4000, "ignore_eos": True, "temperature": 0, "stream": True}


def ranks_of(server: Server) -> list[psutil.Process]:
    return [server.child("mlx_ring.worker", "--rank", str(rank)) for rank in (0, 1)]


def ask(server: Server) -> httpx.Response:
    question = {"prompt": [5, 6, 7], "max_tokens": 8, "ignore_eos": True}
    return server.http.post("/v1/completions", json=question)


@pytest.mark.parametrize("trouble", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_ends_or_hangs_in_mid_answer_takes_its_group_along_and_all_comes_back(
    trouble: signal.Signals, tmp_path: Path
) -> None:
    with serving("demo", "--tp", "2", folder=tmp_path) as server:
        before = ranks_of(server)
        with server.http.stream("POST", "/v1/completions", json=_LONG) as answer:
            lines = (line for line in answer.iter_lines() if line)
            assert next(lines).startswith("data: ")
            before[1].send_signal(trouble)
            said = list(lines)
        error = json.loads(said[-1].removeprefix("data: "))["error"]
        assert error["code"] in {"worker_lost", "worker_stuck"}
        assert any(name in error["message"] for name in ("rank 1", "worker 1 of stage 0"))
        server.wait_for_health(200)
        assert ask(server).status_code == 200
        assert not psutil.wait_procs(before, timeout=30)[1], "both ranks are gone"
        assert server.stop() == 0
        assert server.all_ended()


def test_status_tells_of_every_rank(tmp_path: Path) -> None:
    with serving("demo", "--tp-shares", "3,1", folder=tmp_path) as server:
        assert ask(server).status_code == 200
        (instance,) = server.status()["instances"]
        (stage,) = instance["stages"]
        pids = [process.pid for process in ranks_of(server)]
        assert [(rank["rank"], rank["pid"]) for rank in stage["ranks"]] == list(enumerate(pids))
        large, small = (rank["used"]["weight_bytes"] for rank in stage["ranks"])
        assert large > 1.5 * small


def test_ranks_that_wait_for_work_leave_the_processors_alone(tmp_path: Path) -> None:
    """A rank that waited in a collective would use a processor whole: over three seconds that is 3.0."""
    with serving("demo", "--tp", "2", folder=tmp_path) as server:
        assert ask(server).status_code == 200
        ranks = ranks_of(server)

        def used() -> float:
            return sum(sum(rank.cpu_times()[:2]) for rank in ranks)

        before = used()
        time.sleep(3.0)
        assert used() - before < 1.0


def test_shares_that_cannot_be_made_are_refused_with_the_nearest(tmp_path: Path) -> None:
    with (
        pytest.raises(AssertionError, match=r"5 ranks.*the nearest that can be made is 1:1:1:1"),
        serving("demo", "--tp", "5", folder=tmp_path),
    ):
        pass
