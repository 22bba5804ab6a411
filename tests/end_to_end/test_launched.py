"""Workers that `mlx.launch` starts, and ranks at the addresses in a hostfile."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from tests.eventually import eventually
from tests.machines import free_pair_of_ports
from tests.ports import free_ports
from tests.processes import MLX_RING, clean_environment, client_of, run_cli, serving

pytestmark = pytest.mark.machines

REQUEST = {"prompt": [5, 6, 7], "max_tokens": 8, "ignore_eos": True, "temperature": 0}


@contextlib.contextmanager
def launched(
    folder: Path, first_port: int, *flags: str
) -> Generator[tuple[subprocess.Popen[bytes], httpx.Client]]:
    """Run `mlx.launch` with two processes; yield it and a client of the server. Kill both at the end."""
    launcher = Path(sys.executable).with_name("mlx.launch")
    log = folder / "launched.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                *(str(launcher), "-n", "2", "--backend", "ring", "--starting-port", str(first_port), "--"),
                *(*MLX_RING, "serve", "demo", "--port", "0", *flags),
            ],
            cwd=folder,
            env=clean_environment() | {"MLX_RING_STATE_DIR": str(folder / "state")},
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    family: list[psutil.Process] = []
    try:

        def address() -> str:
            assert process.poll() is None, log.read_text()
            found = re.search(r"Serving demo at (\S+)", log.read_text())
            return found[1] if found else ""

        url = eventually(address)
        family = psutil.Process(process.pid).children(recursive=True)
        with client_of(url) as client:
            yield process, client
    finally:
        for each in [*family, psutil.Process(process.pid)] if process.poll() is None else family:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        # This closes its end of the pipe, too.
        process.communicate()


def ranks(client: httpx.Client) -> list[dict[str, Any]]:
    """Return the ranks of the only instance."""
    (instance,) = client.get("/cluster/status").json()["instances"]
    return [rank for stage in instance["stages"] for rank in stage["ranks"]]


def rank_of(process: psutil.Process) -> int:
    """Return the rank that mlx.launch gave to a process."""
    return int(process.environ()["MLX_RANK"])


def test_each_process_of_mlx_launch_starts_and_restarts_its_own_rank(tmp_path: Path) -> None:
    with launched(tmp_path, free_pair_of_ports()) as (launcher, client):
        first, second = sorted(psutil.Process(launcher.pid).children(), key=rank_of)
        before = ranks(client)
        assert [rank["rank"] for rank in before] == [0, 1]
        worker = psutil.Process(before[1]["pid"])
        assert worker.ppid() == second.pid
        assert worker.environ()["MLX_RANK"] == "1"
        expected = client.post("/v1/completions", json=REQUEST).json()["choices"]
        worker.kill()
        psutil.wait_procs([worker], timeout=30)
        for code in (503, 200):
            eventually(lambda: client.get("/health/ready").status_code, code.__eq__)
        assert psutil.Process(ranks(client)[1]["pid"]).ppid() == second.pid
        assert client.post("/v1/completions", json=REQUEST).json()["choices"] == expected
        family = psutil.Process(launcher.pid).children(recursive=True)
        first.send_signal(signal.SIGINT)
        assert launcher.wait(60) == 0
        assert not psutil.wait_procs(family, timeout=30)[1]


def test_ranks_listen_at_the_addresses_of_the_hostfile(tmp_path: Path) -> None:
    ports = free_ports(2)
    hosts = tmp_path / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ports]))
    with serving("demo", "--hostfile", str(hosts), folder=tmp_path) as server:
        assert len(ranks(server.http)) == len(ports)
        assert server.http.post("/v1/completions", json=REQUEST).status_code == 200
        connected = {
            found.laddr.port
            for rank in ranks(server.http)
            for found in psutil.Process(rank["pid"]).net_connections("tcp4")
        }
        assert connected & set(ports)
        assert server.stop() == 0


def test_ranks_on_other_machines_are_refused_with_the_command_that_starts_them(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts.json"
    hosts.write_text('[["192.0.2.1:32323"], ["192.0.2.2:32324"]]')
    launched_with = {"MLX_RANK": "1", "MLX_HOSTFILE": str(hosts)}
    done = run_cli("serve", "demo", "--port", "0", folder=tmp_path, environment=launched_with)
    assert done.returncode != 0
    error = done.stderr.splitlines()[-1]
    assert "mlx.launch started ranks at 192.0.2.1, 192.0.2.2, not at 127.0.0.1 alone" in error
    assert "mlx-ring cluster start -c FILE --model MODEL" in error
