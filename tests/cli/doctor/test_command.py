"""`mlx-ring doctor`, as a person types it, on a machine with real faults."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
import socket
import subprocess
from collections.abc import Generator
from pathlib import Path

from tests.machines import running_head
from tests.processes import MLX_RING, clean_environment, run_cli, run_in_process


def findings(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, str]]:
    """Return the findings by the subject of their check."""
    return {finding["what"]: finding for finding in json.loads(done.stdout)["findings"]}


@contextlib.contextmanager
def busy_port() -> Generator[int]:
    """Listen on a port in this process, and give its number."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def refusing_port() -> int:
    with busy_port() as port:
        return port


def under_limit(command: str, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the program under a limit of the shell."""
    line = f"{command} && exec {shlex.join([*MLX_RING, *arguments])}"
    return subprocess.run(
        ["bash", "-c", line],
        cwd=folder,
        env=clean_environment() | {"MLX_RING_STATE_DIR": str(folder / "state")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_six_faults_are_found_each_with_a_fix(tmp_path: Path) -> None:
    broken_mlx = tmp_path / "broken" / "mlx"
    broken_mlx.mkdir(parents=True)
    (broken_mlx / "__init__.py").write_text("raise ImportError('libmlx is of another machine')")
    (tmp_path / "file").touch()
    refused = f"127.0.0.1:{refusing_port()}"
    with busy_port() as busy:
        done = run_cli(
            *("doctor", "--json", "--port", str(busy), "--state-dir", "file/state"),
            *("--peer", "nowhere.invalid", "--peer", refused, "127.0.0.1:1"),
            folder=tmp_path,
            environment={"PYTHONPATH": str(broken_mlx.parent)},
        )
    found = findings(done)
    assert done.returncode == 1
    broken = {what: finding["value"] for what, finding in found.items() if finding["level"] == "broken"}
    assert "held by" in broken[f"port {busy}"]
    assert "cannot be written" in broken["state folder"]
    assert "libmlx is of another machine" in broken["MLX"]
    assert "does not resolve" in broken["name nowhere.invalid"]
    assert "refused" in broken[f"way to {refused}"]
    assert "refused" in broken["way to 127.0.0.1:1"]
    assert all(finding["fix"] for finding in found.values() if finding["level"] in ("warning", "broken"))
    assert json.loads(done.stdout)["broken"] == len(broken)


def test_lowered_limits_are_found(tmp_path: Path) -> None:
    few = under_limit("ulimit -n 300", "doctor", "--json", folder=tmp_path)
    assert few.returncode == 1, few.stderr
    assert findings(few)["open files"]["level"] == "broken"
    assert "4096" in findings(few)["open files"]["fix"]
    fewer = under_limit("ulimit -n 1024", "doctor", "--json", folder=tmp_path)
    assert (findings(fewer)["open files"]["level"], findings(fewer)["MLX"]["level"]) == ("warning", "ok")
    small = under_limit("ulimit -v 30000000", "doctor", "--json", folder=tmp_path)
    assert findings(small)["address space"]["level"] == "warning"
    assert "ulimit -v unlimited" in findings(small)["address space"]["fix"]


def test_a_machine_without_a_token_is_compared_with_a_running_head(tmp_path: Path) -> None:
    async def act() -> subprocess.CompletedProcess[str]:
        async with running_head(tmp_path / "head") as head:
            return await asyncio.to_thread(run_cli, "doctor", str(head.address), folder=tmp_path)

    done = asyncio.run(act())
    lines = done.stdout.splitlines()
    assert any(line.startswith("ok      mlx-lm: ") and line.endswith(" on both") for line in lines), (
        done.stdout
    )
    assert any(line.startswith("ok      clock: the head's is ") for line in lines)
    assert any("this machine has not joined it yet" in line for line in lines)


def test_an_invalid_address_is_reported_in_one_sentence(tmp_path: Path) -> None:
    done = run_in_process("doctor", "a b", folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("mlx-ring: 'a b' is no address of a head")
