"""Commands that run on each machine of a cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlx_ring.cluster.lifecycle.host_side import (
    ask_head,
    installation_here,
    last_output,
    log_command,
    out_file,
    run_detached,
    wait_until_ready,
    whole_path,
)
from mlx_ring.core.errors import ConfigError, HostFailed
from mlx_ring.core.logs import is_tagged
from mlx_ring.host.private_files import write_private
from mlx_ring.host.running import end_running


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it printed nothing"),
        ("Waiting\n2026 INFO node=a\nmlx-ring: The port is held.\n", "The port is held."),
        ("a\nb\n\nc\nd\n", "b / c / d"),
    ],
)
def test_the_last_output_gives_the_reason(text: str, said: str) -> None:
    assert last_output(text) == said


def test_a_program_that_cannot_start_is_reported_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    arguments = ("serve", "--port", "http", "--state-dir", str(tmp_path), "--log-dir", str(tmp_path / "logs"))
    with pytest.raises(ConfigError, match=r"`mlx-ring serve` has ended: --port is http; it must be"):
        run_detached(tmp_path, arguments, 120.0)
    assert (tmp_path / ".local/share/mlx-ring/bin/mlx-ring").exists(), (
        "other commands find the running program"
    )


def test_a_detached_head_logs_to_its_log_files_alone(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".env").write_text(f"MODEL_REPO={tiny_model}\n")
    logs = ("--state-dir", str(tmp_path), "--log-dir", str(tmp_path / "logs"))
    pid = run_detached(tmp_path, ("serve", "--port", "0", *logs), 120.0)
    assert wait_until_ready(tmp_path, pid, 120.0)
    startup_output = out_file(tmp_path, "serve").read_text()
    ask_head(tmp_path, "POST", "/v1/completions", '{"prompt": "a", "max_tokens": 4}', ())
    assert end_running(tmp_path) == [f"The head has ended (process {pid})."]
    printed, log = out_file(tmp_path, "serve").read_text(), (tmp_path / "logs" / "head.log").read_text()
    assert "Serving tiny" in printed
    assert printed.startswith(startup_output)
    assert [line for line in printed.splitlines() if is_tagged(line)] == []
    assert "/v1/completions" in log
    assert f"MODEL_REPO in {tmp_path / '.env'} is read as MLX_RING_MODEL={tiny_model}." in log


def test_an_id_is_created_only_on_request(tmp_path: Path) -> None:
    assert installation_here(tmp_path, identity=False).node == ""
    assert not (tmp_path / "node").exists()
    node = installation_here(tmp_path, identity=True).node
    assert installation_here(tmp_path, identity=False).node == node != ""


def test_without_a_head_no_request_is_sent(tmp_path: Path) -> None:
    with pytest.raises(HostFailed, match="No head runs here"):
        ask_head(tmp_path, "GET", "/health", "", ())


def test_logs_come_from_the_state_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="There are no log files in"):
        log_command(tmp_path, 20, follow=False)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "agent.log").write_text("a\n")
    assert log_command(tmp_path, 20, follow=True) == [
        *("tail", "-q", "-n", "20", "-F", str(tmp_path / "logs" / "agent.log")),
    ]


def test_a_local_folder_becomes_an_absolute_path(tmp_path: Path) -> None:
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    (tmp_path / "demo").mkdir()
    assert whole_path("models/tiny", [tmp_path / "none", tmp_path]) == str(tmp_path / "models" / "tiny")
    assert whole_path("someone/tiny", [tmp_path]) == "someone/tiny"
    assert whole_path("demo", [tmp_path]) == "demo", "the name of a built-in model"


def test_members_of_one_cluster_report_the_same_digest(tmp_path: Path) -> None:
    assert installation_here(tmp_path, identity=True).cluster == ""
    for name in ("a", "b"):
        (tmp_path / name / "node").mkdir(parents=True, mode=0o700)
        write_private(tmp_path / name / "node" / "authority.pem", b"one")
    assert (
        len({installation_here(tmp_path / name, identity=False).cluster for name in ("a", "b")} - {""}) == 1
    )
