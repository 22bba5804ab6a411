"""Start by launchd, with stand-ins for `sudo` and `launchctl` that read what the real ones would get. Not run on a Mac."""

from __future__ import annotations

import os
import plistlib
import stat
import sys
from pathlib import Path

import pytest
from tests.eventually import eventually

from mlx_ring.cluster.lifecycle import host_side
from mlx_ring.cluster.lifecycle.host_side import (
    MacDaemon,
    may_start_daemons,
    out_file,
    run_detached,
    wait_until_ready,
)
from mlx_ring.core.errors import ConfigError
from mlx_ring.host.running import end_running

SUDO = """#!/bin/sh
[ "$1" = -n ] && shift
[ -e "$STAND_INS/asks" ] && { echo "sudo: a password is required" >&2; exit 1; }
echo "$*" >> "$STAND_INS/commands"
exec "$@"
"""
LAUNCHCTL = r"""#!PYTHON
import os, plistlib, subprocess, sys, time
from pathlib import Path

folder = Path(os.environ["STAND_INS"])
verb, target = sys.argv[1], sys.argv[2]
if verb == "bootstrap":
    job = plistlib.loads(Path(sys.argv[3]).read_bytes())
    with open(job["StandardOutPath"], "ab") as out:
        child = subprocess.Popen(
            job["ProgramArguments"], cwd=job["WorkingDirectory"], env=job["EnvironmentVariables"],
            stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
        )
    (folder / job["Label"]).write_text(str(child.pid))
elif verb == "print":
    record = folder / target.removeprefix("system/")
    if not record.exists():
        sys.exit("Could not find service")
    pid = record.read_text()
    state = Path(f"/proc/{pid}/stat")
    if state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z":
        print(f"\tstate = running\n\tpid = {pid}\n\tlast exit code = (never exited)")
    else:
        print("\tstate = not running\n\tlast exit code = 1")
else:
    sys.exit(3)
"""


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "stand-ins"
    folder.mkdir()
    for name, text in (("sudo", SUDO), ("launchctl", LAUNCHCTL.replace("PYTHON", sys.executable))):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    monkeypatch.setenv("STAND_INS", str(folder))
    monkeypatch.setattr(host_side, "DAEMON_FOLDER", folder)
    return folder


@pytest.mark.processes
def test_daemons_need_a_mac_and_no_password(stand_ins: Path) -> None:
    assert may_start_daemons("darwin")
    assert not may_start_daemons("linux")
    (stand_ins / "asks").touch()
    assert not may_start_daemons("darwin")


@pytest.mark.processes
def test_a_daemon_runs_as_its_user_until_it_ends(stand_ins: Path, tmp_path: Path) -> None:
    daemon = MacDaemon("mlx-ring.test")
    assert (daemon.pid(), daemon.has_ended()) == (None, False), "nothing has begun"
    out = tmp_path / "out"
    command = [sys.executable, "-c", "import os; print(os.getcwd(), os.environ['WORD'])"]
    daemon.start(command, folder=tmp_path, out=out, environment={"WORD": "word"})
    eventually(daemon.has_ended, bool)
    assert out.read_text() == f"{tmp_path} word\n"
    path = stand_ins / "mlx-ring.test.plist"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600, "arguments may hold a token"
    job = plistlib.loads(path.read_bytes())
    assert job["UserName"]
    assert "KeepAlive" not in job
    commands = (stand_ins / "commands").read_text().splitlines()
    assert "launchctl bootout system/mlx-ring.test" in commands
    assert f"launchctl bootstrap system {path}" in commands


@pytest.mark.processes
def test_a_refused_daemon_is_reported_in_one_sentence(stand_ins: Path, tmp_path: Path) -> None:
    (stand_ins / "launchctl").write_text(
        "#!/bin/sh\necho 'Bootstrap failed: 5: Input/output error' >&2; exit 5\n"
    )
    with pytest.raises(ConfigError, match=r"launchd did not start `x` as a daemon \(Bootstrap failed: 5"):
        MacDaemon("mlx-ring.test").start(["x"], folder=tmp_path, out=tmp_path / "out", environment={})


@pytest.mark.processes
def test_a_head_starts_as_a_daemon_on_a_mac(
    stand_ins: Path, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(host_side, "may_start_daemons", lambda: True)
    state = ("--state-dir", str(tmp_path), "--log-dir", str(tmp_path / "logs"))
    with pytest.raises(ConfigError, match=r"`mlx-ring serve` has ended: --port is http; it must be"):
        run_detached(tmp_path, ("serve", "--port", "http", *state), 120.0)
    pid = run_detached(tmp_path, ("serve", str(tiny_model), "--port", "0", *state), 120.0)
    assert wait_until_ready(tmp_path, pid, 120.0)
    assert "bootstrap" in (stand_ins / "commands").read_text()
    assert "Serving" in out_file(tmp_path, "serve").read_text(), (
        "launchd writes the output of the start there"
    )
    assert end_running(tmp_path) == [f"The head has ended (process {pid})."]
