"""A stage of several ranks under `mlx-ring serve`: loss of a rank, idle ranks, and impossible shares."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Generator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import httpx
import psutil
import pytest
from tests.eventually import eventually
from tests.interrupted import complete, interrupt
from tests.processes import Server, serving

pytestmark = pytest.mark.alone(loops=True)
_LOOKS, _PAUSE_S = 20, 0.05


def ranks_of(server: Server) -> list[psutil.Process]:
    return [server.child("mlx_ring.worker", "--rank", str(rank)) for rank in (0, 1)]


def ask(server: Server) -> httpx.Response:
    body = {"prompt": [5, 6, 7], "max_tokens": 8, "ignore_eos": True}
    return server.http.post("/v1/completions", json=body)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Generator[Server]:
    """Serve two ranks with unequal shares, after a first answer."""
    with serving("demo", "--tp-shares", "3,1", folder=tmp_path_factory.mktemp("ranks")) as server:
        assert ask(server).status_code == 200
        yield server
        children = server.present_children()
        assert server.stop() == 0
        assert not psutil.wait_procs(children, timeout=30)[1]


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


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_an_answer_continues_when_a_rank_ends_or_hangs_and_its_group_is_replaced(
    fault: signal.Signals, two_ranks: Server
) -> None:
    before = ranks_of(two_ranks)
    expected = complete(two_ranks.http)
    answer = interrupt(two_ranks.http, lambda: before[1].send_signal(fault))
    assert answer.text == expected
    assert ": resuming" in answer.comments
    assert complete(two_ranks.http) == expected
    assert not psutil.wait_procs(before, timeout=30)[1], "both ranks have ended"


@contextmanager
def on_one_core() -> Generator[None]:
    """Let processes that start here use one core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def test_impossible_shares_are_refused_with_the_nearest_possible_ones(tmp_path: Path) -> None:
    with (
        on_one_core(),
        pytest.raises(
            AssertionError,
            match=r"(?s)--tp 5 makes 5 workers for 1 core\..*5 ranks.*the nearest possible split is 1:1:1:1",
        ),
        serving("demo", "--tp", "5", folder=tmp_path),
    ):
        pass
