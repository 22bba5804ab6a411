"""Stages linked by MLX's collectives: a worker that ends, and a backend that is not available."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from tests.interrupted import complete, interrupt
from tests.processes import run_cli, serving


def check_recovery(folder: Path, link: str, victim: str, fault: signal.Signals, *flags: str) -> None:
    """Stop or end a worker in the middle of an answer, which must continue."""
    with serving("demo-moe", "--stages", "2", "--link", link, *flags, folder=folder) as server:
        worker = server.child("mlx_ring.worker", "--stage", victim)
        expected = complete(server.http)
        assert interrupt(server.http, lambda: worker.send_signal(fault)).text == expected
        assert complete(server.http) == expected
        assert server.stop() == 0
        assert server.all_ended()


@pytest.mark.parametrize(("link", "victim"), [("ring", "0"), ("ring", "1"), ("allreduce", "1")])
def test_answer_continues_after_a_worker_is_killed(link: str, victim: str, tmp_path: Path) -> None:
    check_recovery(tmp_path, link, victim, signal.SIGKILL)


def test_backend_that_the_machine_lacks_is_refused_with_one_sentence(tmp_path: Path) -> None:
    done = run_cli("serve", "demo-moe", "--port", "0", "--stages", "2", "--link", "jaccl", folder=tmp_path)
    assert done.returncode != 0
    message = done.stderr.splitlines()[-1]
    assert "--link jaccl: MLX's backend jaccl is not available on " in message
    assert message.endswith("ring would be available.")
