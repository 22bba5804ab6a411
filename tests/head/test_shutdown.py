"""Shutdown of a head: running requests are finished first, and those that take too long end with an error."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
from tests.eventually import eventually
from tests.processes import Server, serving


def stream(stack: ExitStack, server: Server, tokens: int) -> Iterator[str]:
    body = {"prompt": "Answer me.", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    answer = stack.enter_context(httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60))
    lines = (line for line in answer.iter_lines() if line and not line.startswith(":"))
    next(lines)
    return lines


def test_shutdown_finishes_running_requests_refuses_new_ones_and_a_second_signal_ends_all(
    tiny_model: Path, tmp_path: Path
) -> None:
    with serving(tiny_model, folder=tmp_path) as server, ExitStack() as stack:
        short, long = stream(stack, server, 60), stream(stack, server, 10**9)
        server.process.send_signal(signal.SIGTERM)
        eventually(lambda: httpx.get(f"{server.url}/health/ready").status_code == 503)
        assert httpx.get(f"{server.url}/health").json()["status"] == "draining"
        refused = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"})
        assert (refused.status_code, refused.headers["connection"]) == (503, "close")
        assert refused.headers["retry-after"]
        assert list(short)[-1] == "data: [DONE]"
        server.process.send_signal(signal.SIGTERM)
        last = list(long)[-1]
        assert '{"error":{"message":"The server is shutting down."' in last
        assert server.process.wait(60) == 0
        assert server.all_ended()


def test_request_that_is_not_finished_in_time_ends_with_an_error(tiny_model: Path, tmp_path: Path) -> None:
    with serving(tiny_model, "--shutdown-timeout", "0.5", folder=tmp_path) as server, ExitStack() as stack:
        long = stream(stack, server, 10**9)
        server.process.send_signal(signal.SIGINT)
        assert '"error"' in list(long)[-1]
        assert server.process.wait(60) == 0
    assert "Ending 1 unfinished requests" in (tmp_path / "logs" / "head.log").read_text()


def test_a_server_under_nohup_does_not_end_with_its_terminal(tiny_model: Path, tmp_path: Path) -> None:
    flags = ("--shutdown-timeout", "0")
    with serving(tiny_model, *flags, folder=tmp_path, within=("nohup",)) as server, ExitStack() as stack:
        long = stream(stack, server, 10**9)
        server.process.send_signal(signal.SIGHUP)
        for _ in range(10):
            next(long)
        assert server.http.get("/health").json()["status"] == "healthy"
        assert server.stop() == 0


_NOT_UNDER_NOHUP = """
import os, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)
os.execvp(sys.argv[1], sys.argv[1:])
"""
"""Program that runs a command as if the tests themselves did not run under `nohup`."""


def test_a_server_ends_with_its_terminal(tiny_model: Path, tmp_path: Path) -> None:
    with serving(tiny_model, folder=tmp_path, within=(sys.executable, "-c", _NOT_UNDER_NOHUP)) as server:
        server.process.send_signal(signal.SIGHUP)
        assert server.process.wait(60) == 0
