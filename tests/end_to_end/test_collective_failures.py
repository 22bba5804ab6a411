"""Stages linked by MLX's collectives: a worker that ends, and a backend that is not available."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from tests.processes import run_cli, serving


def check_recovery(folder: Path, link: str, victim: str, fault: signal.Signals, *flags: str) -> str:
    """Stop or end a worker in the middle of an answer. Return the error's code once the server answers again."""
    with serving("demo-moe", "--stages", "2", "--link", link, *flags, folder=folder) as server:
        body = {"prompt": "Once", "max_tokens": 1500, "ignore_eos": True, "stream": True}
        with server.http.stream("POST", "/v1/completions", json=body) as stream:
            events = stream.iter_lines()
            next(events)
            server.child("mlx_ring.worker", "--stage", victim).send_signal(fault)
            last = [line for line in events if line.startswith("data: {")][-1]
        server.wait_for_health(200)
        short = {"prompt": "Once", "max_tokens": 8}
        assert server.http.post("/v1/completions", json=short).status_code == 200
        assert server.stop() == 0
        assert server.all_ended()
    return json.loads(last.removeprefix("data: "))["error"]["code"]


@pytest.mark.parametrize(("link", "victim"), [("ring", "0"), ("ring", "1"), ("allreduce", "1")])
def test_answer_ends_with_a_killed_worker_and_the_server_recovers(
    link: str, victim: str, tmp_path: Path
) -> None:
    assert check_recovery(tmp_path, link, victim, signal.SIGKILL) == "worker_lost"


def test_backend_that_the_machine_lacks_is_refused_with_one_sentence(tmp_path: Path) -> None:
    done = run_cli("serve", "demo-moe", "--port", "0", "--stages", "2", "--link", "jaccl", folder=tmp_path)
    assert done.returncode != 0
    message = done.stderr.splitlines()[-1]
    assert "--link jaccl: MLX's backend jaccl is not available on " in message
    assert message.endswith("ring would be available.")
