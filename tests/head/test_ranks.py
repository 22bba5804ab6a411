"""A stage of several ranks under `mlx-ring serve`: loss of a rank, idle ranks, and impossible shares."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Generator
from itertools import pairwise
from pathlib import Path

import httpx
import psutil
import pytest
from tests.eventually import eventually
from tests.processes import Server, serving

pytestmark = pytest.mark.alone
_LOOKS, _PAUSE_S = 20, 0.05
_LONG = {"prompt": [5, 6, 7], "max_tokens": 4000, "ignore_eos": True, "temperature": 0, "stream": True}


def ranks_of(server: Server) -> list[psutil.Process]:
    return [server.child("mlx_ring.worker", "--rank", str(rank)) for rank in (0, 1)]


def ask(server: Server) -> httpx.Response:
    body = {"prompt": [5, 6, 7], "max_tokens": 8, "ignore_eos": True}
    return server.http.post("/v1/completions", json=body)


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_ends_or_hangs_during_an_answer_is_replaced_with_its_group(
    fault: signal.Signals, tmp_path: Path
) -> None:
    with serving("demo", "--tp", "2", folder=tmp_path) as server:
        before = ranks_of(server)
        with server.http.stream("POST", "/v1/completions", json=_LONG) as answer:
            lines = (line for line in answer.iter_lines() if line)
            assert next(lines).startswith("data: ")
            before[1].send_signal(fault)
            received = list(lines)
        error = json.loads(received[-1].removeprefix("data: "))["error"]
        assert error["code"] in {"worker_lost", "worker_stuck"}
        assert any(name in error["message"] for name in ("rank 1", "worker 1 of stage 0"))
        server.wait_for_health(200)
        assert ask(server).status_code == 200
        assert not psutil.wait_procs(before, timeout=30)[1], "both ranks have ended"
        assert server.stop() == 0
        assert server.all_ended()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Generator[Server]:
    """Serve two ranks with unequal shares, after a first answer."""
    with serving("demo", "--tp-shares", "3,1", folder=tmp_path_factory.mktemp("ranks")) as server:
        assert ask(server).status_code == 200
        yield server


def test_status_reports_every_rank(two_ranks: Server) -> None:
    (instance,) = two_ranks.status()["instances"]
    (stage,) = instance["stages"]
    pids = [process.pid for process in ranks_of(two_ranks)]
    assert [(rank["rank"], rank["pid"]) for rank in stage["ranks"]] == list(enumerate(pids))
    large, small = (rank["used"]["weight_bytes"] for rank in stage["ranks"])
    assert large > 1.5 * small


def busy_looks(processes: list[psutil.Process]) -> int:
    """Look at processes `_LOOKS` times, and return how often one of them had computed since the look before."""
    seen: list[list[float]] = []
    for _ in range(_LOOKS + 1):
        seen.append([sum(process.cpu_times()[:2]) for process in processes])
        time.sleep(_PAUSE_S)
    return sum(now != before for before, now in pairwise(seen))


def test_idle_ranks_do_not_compute(two_ranks: Server) -> None:
    ranks = ranks_of(two_ranks)
    # A rank that waits in a collective loops, and has computed at every look.
    eventually(lambda: busy_looks(ranks), lambda busy: busy < _LOOKS / 3)


def test_impossible_shares_are_refused_with_the_nearest_possible_ones(tmp_path: Path) -> None:
    with (
        pytest.raises(AssertionError, match=r"5 ranks.*the nearest possible split is 1:1:1:1"),
        serving("demo", "--tp", "5", folder=tmp_path),
    ):
        pass
