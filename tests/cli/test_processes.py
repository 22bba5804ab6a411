"""Servers of this machine: what `ps` lists, and what `run` starts and ends."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import typer
from tests.api.clients import serving as api_server
from tests.api.twins import TwinService
from tests.default_settings import make_api_settings
from tests.processes import serving

from mlx_ring.cli import processes
from mlx_ring.cli.heads import names_at, pull_at
from mlx_ring.cli.processes import _served, own_server, ps, run  # pyright: ignore[reportPrivateUsage]
from mlx_ring.core.errors import ConfigError, RequestError
from mlx_ring.host.running import Running

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
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with own_server("demo", None) as url:
        ps(as_json=False, api_key=None, cacert=None, state_dir=None)
        assert f" {url} " in capsys.readouterr().out, "the address is whole in a narrow terminal"
        ps(as_json=True, api_key=None, cacert=None, state_dir=None)
        [row] = json.loads(capsys.readouterr().out)
        assert (row["model"], row["url"], row["state"]) == ("demo", url, "ready")
        assert row["memory_bytes"] > 0
    with pytest.raises(ConfigError):
        names_at(url)
    ps(as_json=False, api_key=None, cacert=None, state_dir=None)
    assert capsys.readouterr().out.endswith(
        "Nothing is served by this machine. Start with: mlx-ring run MODEL\n"
    )


def test_ps_asks_a_server_with_a_key_and_fails_without_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("MLX_RING_API_KEY", raising=False)
    with api_server(TwinService(names=("org/twin",)), make_api_settings(api_keys=("k",))) as url:
        served = Running("head", 4711, 0.0, "", url)
        monkeypatch.setattr(processes, "running_here", lambda _: [served])  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
        ps(as_json=True, api_key="k", cacert=None, state_dir=None)
        assert json.loads(capsys.readouterr().out)[0]["model"] == "org/twin"
        with pytest.raises(typer.Exit) as ended:
            ps(as_json=False, api_key=None, cacert=None, state_dir=None)
    assert ended.value.exit_code == 1
    said = capsys.readouterr().err
    assert "Process 4711 cannot be asked" in said
    assert "asks for an API key: give it with --api-key, or set MLX_RING_API_KEY." in said


def test_run_lets_a_server_download_a_model_before_it_loads_it(capsys: pytest.CaptureFixture[str]) -> None:
    with api_server(TwinService(names=("org/twin",))) as url:
        progress = [(each["status"], each["done_bytes"]) for each in pull_at(url, "org/new")]
        with pytest.raises(RequestError, match="There is no model 'nobody/knows'"):
            list(pull_at(url, "nobody/knows"))
        with _served("org/twin", url, None, None) as found:
            assert found == (url, "org/twin")
        with (
            pytest.raises(RequestError, match="There is no model 'nobody/knows'"),
            _served("nobody/knows", url, None, None),
        ):
            pass
    assert progress[0] == ("downloading", 0)
    assert progress[-1] == ("done", 100)
    assert "Loading" not in capsys.readouterr().out, "a refused download loads nothing"
