"""Units of systemd and launchd: their own tools accept them, and they hold no secret."""

from __future__ import annotations

import plistlib
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_ring.cli.os_service import (
    Scope,
    Service,
    check_service,
    launchd_plist,
    start_commands,
    stop_commands,
    systemd_unit,
    unit_path,
    unit_text,
)
from mlx_ring.core.errors import ConfigError

JOIN = Service(
    (sys.executable,),
    ("join", "mini.local", "--state-dir", "/var/my state"),
    Path("/"),
    "user",
    "root",
    Path("/root"),
)
TOKEN = "mlxring1" + "a" * 96


def lines_of(service: Service) -> list[str]:
    return systemd_unit(service).splitlines()


def verify(service: Service, folder: Path) -> subprocess.CompletedProcess[str]:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    unit = folder / "mlx-ring-test.service"
    unit.write_text(systemd_unit(service))
    return subprocess.run(
        ["systemd-analyze", f"--{service.scope}", "--man=no", "verify", str(unit)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={"PATH": "/usr/bin:/bin", "HOME": str(folder), "XDG_RUNTIME_DIR": str(folder)},
    )


@pytest.mark.parametrize("scope", ["user", "system"])
@pytest.mark.parametrize(
    "arguments",
    [
        ("join", "[fe80::1%eth0]:50051", "--state-dir", "/var/my state"),
        ("serve", 'a "model"', "--name", "50% of $HOME\\n", "--empty", "", "ünï"),
    ],
)
def test_systemd_accepts_the_unit_without_a_warning(
    scope: Scope, arguments: tuple[str, ...], tmp_path: Path
) -> None:
    done = verify(replace(JOIN, scope=scope, arguments=arguments), tmp_path)
    ours = [line for line in done.stderr.splitlines() if "mlx-ring" in line]
    assert (done.returncode, ours) == (0, [])


def test_systemd_rejects_an_invalid_unit(tmp_path: Path) -> None:
    done = verify(replace(JOIN, program=("/nowhere/mlx-ring",)), tmp_path)
    assert done.returncode != 0


@given(
    st.lists(st.text(st.characters(exclude_categories=["C", "Z"]) | st.just(" "), max_size=20), max_size=5)
)
def test_systemd_reads_every_argument_unchanged(words: list[str]) -> None:
    (line,) = [
        line for line in lines_of(replace(JOIN, arguments=("join", *words))) if line.startswith("ExecStart=")
    ]
    assert _split_as_systemd(line.removeprefix("ExecStart=")) == [sys.executable, "join", *words]


def _split_as_systemd(line: str) -> list[str]:
    """Split a line by systemd.syntax(7), as far as units use it: quotes, backslashes, doubled `%` and `$`."""
    words: list[str] = []
    rest = line
    while rest:
        quoted = rest.startswith('"')
        word, at = "", int(quoted)
        while at < len(rest) and rest[at] != ('"' if quoted else " "):
            step = 2 if rest[at] in "\\%$" else 1
            assert step == 1 or rest[at] == "\\" or rest[at + 1] == rest[at]
            word += rest[at + step - 1]
            at += step
        words.append(word)
        rest = rest[at + int(quoted) :].removeprefix(" ")
    return words


def test_a_unit_restarts_logs_to_the_journal_and_lets_the_program_end_its_children() -> None:
    agent, head = lines_of(JOIN), lines_of(replace(JOIN, arguments=("serve", "demo")))
    assert {"Restart=always", "StandardOutput=journal", "OOMPolicy=continue", "CPUWeight=100"} <= set(
        agent
    ) & set(head)
    assert "KillMode=mixed" in agent
    assert "KillMode=process" in head


def test_a_system_unit_runs_as_a_user_and_waits_for_the_network() -> None:
    lines = lines_of(replace(JOIN, scope="system", user="ring"))
    assert {"User=ring", "After=network-online.target", "WantedBy=multi-user.target"} <= set(lines)
    assert not any(line.startswith("User=") for line in lines_of(JOIN))


def test_launchd_reads_every_argument_unchanged() -> None:
    service = replace(JOIN, arguments=("serve", "<&>", "ünï", ""), scope="system", user="ring")
    read = plistlib.loads(launchd_plist(service).encode())
    assert read["ProgramArguments"] == [sys.executable, "serve", "<&>", "ünï", ""]
    assert (read["UserName"], read["KeepAlive"], read["RunAtLoad"]) == ("ring", True, True)
    assert (read["Label"], read["AbandonProcessGroup"]) == ("mlx-ring.serve", True)
    assert "UserName" not in plistlib.loads(launchd_plist(JOIN).encode())


def test_a_launchd_service_writes_no_log_to_stderr() -> None:
    read = plistlib.loads(launchd_plist(JOIN).encode())
    assert read["EnvironmentVariables"]["MLX_RING_LOG_STDERR"] == "off"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("join", "mini", "--token", TOKEN), "--token is a secret.*has joined needs no token"),
        (("join", "mini", f"--token={TOKEN}"), "--token is a secret"),
        (("join", "mini", TOKEN.upper()), "--token is a secret"),
        (("serve", "--api-key", "k"), "--api-key is a secret.*--api-key-file FILE"),
        (("serve", "--api-key=k"), "--api-key is a secret"),
        (("chat",), "A service runs `mlx-ring join …` or `mlx-ring serve …`, not 'chat'"),
        ((), "and none was given"),
        (("join", "a\nUser=root"), "has a line break"),
    ],
)
def test_secrets_and_commands_that_are_no_service_are_refused(arguments: tuple[str, ...], said: str) -> None:
    for manager in ("systemd", "launchd"):
        with pytest.raises(ConfigError, match=said) as caught:
            unit_text(manager, replace(JOIN, arguments=arguments))
        assert TOKEN not in str(caught.value).lower()


def test_an_api_key_file_is_accepted() -> None:
    service = replace(JOIN, arguments=("serve", "--api-key-file", "/keys"))
    assert check_service(service) is service


def test_unit_paths_and_commands_fit_each_service_manager() -> None:
    home = Path("/home/a")
    assert unit_path("systemd", "user", "join", home) == home / ".config/systemd/user/mlx-ring-join.service"
    assert unit_path("systemd", "system", "serve", home) == Path("/etc/systemd/system/mlx-ring-serve.service")
    assert unit_path("launchd", "user", "join", home) == home / "Library/LaunchAgents/mlx-ring.join.plist"
    assert unit_path("launchd", "system", "join", home) == Path("/Library/LaunchDaemons/mlx-ring.join.plist")
    assert start_commands("systemd", "user", "join", home)[0] == ["systemctl", "--user", "daemon-reload"]
    assert stop_commands("systemd", "system", "join", home) == [
        ["systemctl", "disable", "--now", "mlx-ring-join.service"]
    ]
    assert start_commands("launchd", "user", "join", home)[-1][:3] == ["launchctl", "load", "-w"]
