"""Stages linked by MLX's collectives: a worker that ends, and a backend that is not available."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.interrupted import complete, interrupt
from tests.processes import run_cli, serving


def check_recoveries(
    folder: Path, link: str, victims: Sequence[int], fault: signal.Signals, *flags: str
) -> None:
    """Stop or end the worker of each of these stages in the middle of an answer, which must continue."""
    with serving("demo-moe", "--stages", "2", "--link", link, *flags, folder=folder) as server:
        expected = complete(server.http)
        for stage in victims:
            server.wait_for_health(200)
            (pid,) = (each["pid"] for each in server.status()["devices"] if each["stage"] == stage)
            answer = interrupt(server.http, lambda pid=pid: os.kill(pid, fault))
            assert answer.text == expected
            assert complete(server.http) == expected
        assert server.stop() == 0
        assert server.all_ended()


@pytest.mark.parametrize(
    ("link", "victims"), [("ring", (0, 1)), pytest.param("allreduce", (1,), marks=pytest.mark.faults)]
)
def test_answers_continue_after_a_worker_is_killed(link: str, victims: Sequence[int], tmp_path: Path) -> None:
    check_recoveries(tmp_path, link, victims, signal.SIGKILL)


def test_backend_that_the_machine_lacks_is_refused_with_one_sentence(tmp_path: Path) -> None:
    done = run_cli("serve", "demo-moe", "--port", "0", "--stages", "2", "--link", "jaccl", folder=tmp_path)
    assert done.returncode != 0
    message = done.stderr.splitlines()[-1]
    assert "--link jaccl: MLX's backend jaccl is not available on " in message
    assert message.endswith("ring would be available.")
