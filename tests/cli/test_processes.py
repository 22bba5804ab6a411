"""Servers of this machine: what `ps` lists, and what `run` starts and ends."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import typer
from tests.processes import serving

from mlx_ring.cli.heads import names_at
from mlx_ring.cli.processes import _own_server, ps, run
from mlx_ring.core.errors import ConfigError

pytestmark = pytest.mark.processes


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give this process and its children an empty home."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("XDG_DATA_HOME", "XDG_CACHE_HOME", "HF_HOME"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def chat(monkeypatch: pytest.MonkeyPatch, model: str, url: str) -> int:
    """Let `run` ask one question, and return its exit code."""
    monkeypatch.setattr("sys.stdin", io.StringIO("What is the capital of France?\n"))
    with pytest.raises(typer.Exit) as ended:
        run(model, url)
    return ended.value.exit_code


def test_run_chats_with_a_server_that_has_the_model_and_leaves_it_running(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving("demo", folder=home) as server:
        assert chat(monkeypatch, "demo", server.url) == 0
        assert "Paris" in capsys.readouterr().out
        assert "demo" in names_at(server.url)


def test_run_ends_the_server_that_it_started_and_ps_lists_it_until_then(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with _own_server("demo", None) as url:
        ps(as_json=True, state_dir=None)
        [row] = json.loads(capsys.readouterr().out)
        assert (row["model"], row["url"], row["state"]) == ("demo", url, "ready")
        assert row["memory_bytes"] > 0
    with pytest.raises(ConfigError):
        names_at(url)
    ps(as_json=False, state_dir=None)
    assert capsys.readouterr().out.endswith(
        "Nothing is served by this machine. Start with: mlx-ring run MODEL\n"
    )
