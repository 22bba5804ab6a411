"""Servers of this machine: what `ps` lists, and what `run` starts and ends."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import socket
from collections.abc import Generator
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import httpx
import pytest
import typer
from tests.api.clients import serving as api_server
from tests.api.twins import ANSWER_TEXT, TwinService
from tests.default_settings import make_api_settings
from tests.processes import run_cli, run_in_process, serving

from mlx_ring.cli import head_client, models, node, processes
from mlx_ring.cli.chat import chat as ask
from mlx_ring.cli.head_client import names_at, pull_at, server_here
from mlx_ring.cli.models import name_for
from mlx_ring.cli.node import head_to_change
from mlx_ring.cli.processes import (
    _served,  # pyright: ignore[reportPrivateUsage]
    _size,  # pyright: ignore[reportPrivateUsage]
    own_server,
    ps,
    run,
)
from mlx_ring.core.errors import ConfigError, RequestError
from mlx_ring.host.running import Running
from mlx_ring.settings.settings_sources import load_settings

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
        run(model, url=url)
    return ended.value.exit_code


def test_run_chats_with_a_server_that_has_the_model_and_leaves_it_running(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving("demo", folder=home) as server:
        assert chat(monkeypatch, "demo", server.url) == 0
        assert "Paris" in capsys.readouterr().out
        assert "demo" in names_at(server.url)


@contextlib.contextmanager
def silent_address() -> Generator[str]:
    """Yield the address of a server at a port that is taken, but at which nothing listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


def test_run_and_chat_find_a_server_of_this_machine_on_another_port(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    heads: list[Running] = []
    monkeypatch.setattr(head_client, "heads_here", lambda: heads)
    with silent_address() as usual, api_server(TwinService()) as url:
        monkeypatch.setattr(head_client, "DEFAULT_URL", usual)
        assert server_here(None) == usual
        own = Running("head", os.getpid(), 0.0, "", url)
        heads += [replace(own, url="http://127.0.0.1:1"), own]
        assert server_here(None) == url
        for given in (usual, "http://127.0.0.1:9"):
            assert server_here(given) == given, "an address that was given"
        with pytest.raises(typer.Exit) as ended:
            ask("Hello.")
        assert (ended.value.exit_code, capsys.readouterr().out) == (0, f"{ANSWER_TEXT}\n")
        with api_server(TwinService()) as answering:
            monkeypatch.setattr(head_client, "DEFAULT_URL", answering)
            assert server_here(None) == url, "the other one may be another user's"
            assert server_here(None, "org/twin") == url
            heads.append(replace(own, url=answering))
            assert server_here(None) == answering


@pytest.mark.parametrize(
    "words",
    [
        "models load org/twin",
        "models unload org/twin",
        "replan --dry-run",
        "node drain mini",
        "cluster status",
        "plan --add m4-max-128",
        "capacity org/absent",
    ],
)
def test_commands_find_a_head_of_this_machine_on_another_port(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with silent_address() as usual, api_server(TwinService()) as url:
        monkeypatch.setattr(head_client, "DEFAULT_URL", usual)
        monkeypatch.setattr(head_client, "heads_here", lambda: [Running("head", os.getpid(), 0.0, "", url)])
        answered = run_in_process(*words.split(), folder=tmp_path)
    assert answered.returncode == 0 or url in answered.stderr, answered.stderr


def test_a_head_that_serves_the_model_is_preferred_and_one_that_refuses_is_skipped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    heads: list[Running] = []
    monkeypatch.delenv("MLX_RING_API_KEY", raising=False)
    monkeypatch.setattr(head_client, "heads_here", lambda: heads)
    with (
        silent_address() as usual,
        api_server(TwinService(names=("org/other",))) as other,
        api_server(TwinService(names=("org/twin",))) as own,
        api_server(TwinService(names=("org/twin",)), make_api_settings(api_keys=("k",))) as locked,
    ):
        monkeypatch.setattr(processes, "own_server", Mock(return_value=contextlib.nullcontext(own)))
        monkeypatch.setattr(head_client, "DEFAULT_URL", usual)
        head = Running("head", os.getpid(), 0.0, "", "")
        # Another scheme is refused as an untrusted certificate is.
        heads += [replace(head, url=url) for url in (own.replace("http:", "https:"), locked, other)]
        assert server_here(None, "org/twin") == other, "the only one that answers"
        assert server_here(None, "org/twin", api_key="k") == locked
        heads.append(replace(head, url=own))
        assert server_here(None, "org/twin") == own
        with _served("org/twin", None, load_settings({}), None, None) as found:
            assert found == (own, "org/twin", None)
        del heads[2:]
        for address in (usual, locked):
            monkeypatch.setattr(head_client, "DEFAULT_URL", address)
            with _served("org/twin", None, load_settings({}), None, None) as found:
                assert found == (own, "org/twin", None), "a server of its own"
        for given in (usual, locked):
            with (
                pytest.raises((ConfigError, RequestError)),
                _served("org/twin", given, load_settings({}), None, None),
            ):
                pass
    said = capsys.readouterr().err
    assert said.count("org/twin is served for this chat alone.") == 2, "each time that a head refuses"
    assert "asks for an API key" in said


def test_without_an_answer_the_error_is_about_the_head_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    heads: list[Running] = []
    monkeypatch.delenv("MLX_RING_API_KEY", raising=False)
    monkeypatch.setattr(head_client, "heads_here", lambda: heads)
    with silent_address() as usual, api_server(TwinService(), make_api_settings(api_keys=("k",))) as locked:
        monkeypatch.setattr(head_client, "DEFAULT_URL", usual)
        starting = Running("head", os.getpid(), 0.0, "", "http://127.0.0.1:1")
        heads.append(starting)
        assert server_here(None) == starting.url
        heads.append(replace(starting, url=locked))
        assert server_here(None) == locked, "it asks for a key"
        monkeypatch.setattr(head_client, "DEFAULT_URL", locked)
        assert server_here(None) == locked


def test_commands_that_change_a_head_take_no_other_one_than_is_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, locked_twin = TwinService(), TwinService(), TwinService()
    with (
        silent_address() as usual,
        api_server(first) as one,
        api_server(second) as other,
        api_server(locked_twin, make_api_settings(api_keys=("k",))) as locked,
    ):
        heads = [Running("head", os.getpid(), 0.0, "", url) for url in (one, other)]
        monkeypatch.setattr(head_client, "heads_here", lambda: heads)

        def change(address: str, words: str) -> str:
            monkeypatch.setattr(head_client, "DEFAULT_URL", address)
            monkeypatch.setattr(node, "DEFAULT_URL", address)
            return run_in_process(*words.split(), folder=tmp_path).stderr

        commands = ("models load org/twin", "models unload org/twin", "replan", "node drain mini")
        for words in commands:
            for unknown in (usual, locked):
                assert f"Heads run on this machine at {one} and {other}: choose one" in change(unknown, words)
        heads.append(replace(heads[0], url=locked))
        for words in commands:
            assert f"The head at {locked} asks for an API key" in change(locked, words)
        assert change(locked, f"models load org/twin --url {one}") == ""
        heads[:] = heads[1:2]
        assert f"The head at {locked}" not in change(locked, "models load org/twin"), (
            "the only one of one's own"
        )
        heads[:] = [replace(heads[0], url=url) for url in (one, other)]
        for _ in range(2):
            assert change(one, "models unload org/twin") == ""
        assert [twin.is_loaded for twin in (first, second, locked_twin)] == [False, True, True]


def test_a_program_that_accepts_connections_at_the_usual_port_and_never_answers_is_asked_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heads: list[Running] = []
    monkeypatch.setattr(head_client, "heads_here", lambda: heads)
    monkeypatch.setattr(head_client, "_OTHER_ANSWER_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent, api_server(TwinService()) as url:
        monkeypatch.setattr(head_client, "DEFAULT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert server_here(None) == head_client.DEFAULT_URL
        heads.append(Running("head", os.getpid(), 0.0, "", url))
        assert [server_here(None), server_here(None, "org/twin"), head_to_change(None)] == [url] * 3
        silent.settimeout(0.0)
        with pytest.raises(BlockingIOError):
            silent.accept()
        assert server_here(None, "org/absent") == url
        silent.accept()[0].close()


def test_server_of_another_chat_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with silent_address() as usual, own_server("demo", None) as url:
        monkeypatch.setattr(head_client, "DEFAULT_URL", usual)
        assert [each.url for each in head_client.heads_here()] == [url]
        assert server_here(None) == usual


def test_run_without_a_place_for_files_prints_its_answer_alone_and_sends_its_server_the_key_of_a_file(
    tmp_path: Path,
) -> None:
    (tmp_path / "nowhere").symlink_to(tmp_path / "missing")
    (tmp_path / ".env").write_text("MLX_RING_API_KEY=k\n")
    state = {"MLX_RING_STATE_DIR": str(tmp_path / "nowhere" / "state")}
    done = run_cli("run", "demo", "What is the capital of France?", folder=tmp_path, environment=state)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Paris" in done.stdout


def test_run_ends_the_server_that_it_started_and_ps_lists_it_until_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with own_server("demo", None) as url:
        ps(as_json=False, api_key=None, cacert=None, state_dir=None)
        shown = capsys.readouterr().out
        assert f" {url} " in shown, "the address is whole in a narrow terminal"
        assert re.search(r" \d\d MB ", shown), shown
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


def test_ps_on_a_machine_that_has_joined_says_that_it_computes_for_its_head(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    joined = Running("agent", 4711, 0.0, "", "10.0.0.1:8101")
    monkeypatch.setattr(processes, "running_here", lambda _: [joined])  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    ps(as_json=False, api_key=None, cacert=None, state_dir=None)
    said = capsys.readouterr().out
    assert (
        said
        == "This machine serves nothing itself: it computes for the head at 10.0.0.1:8101. Run mlx-ring ps there.\n"
    )


def test_ps_says_why_a_joined_machine_is_away_and_speaks_of_its_own_head_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = [Running("agent", 4711, 0.0, "", away="the head at 10.0.0.1:8101 cannot be reached")]
    monkeypatch.setattr(processes, "running_here", lambda _: here)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    ps(as_json=False, api_key=None, cacert=None, state_dir=None)
    assert capsys.readouterr().out == (
        "This machine serves nothing itself: it computes for the head that it joined, but is away just now: the head at "
        "10.0.0.1:8101 cannot be reached.\n"
    )
    with api_server(TwinService()) as url:
        here.append(Running("head", 4712, 0.0, "", url))
        monkeypatch.setattr(processes, "_served_by", lambda *_: ())  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
        ps(as_json=False, api_key=None, cacert=None, state_dir=None)
    assert capsys.readouterr().out == "Nothing is served by this machine. Start with: mlx-ring run MODEL\n"


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (0, "0 MB"),
        (400_000, "1 MB"),
        (12_000_000, "12 MB"),
        (999_700_000, "1.00 GB"),
        (2_500_000_000, "2.50 GB"),
    ],
)
def test_a_size_is_never_rounded_to_nothing_or_to_a_thousand(count: int, said: str) -> None:
    assert _size(count) == said


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
        with _served("org/twin", url, load_settings({}), None, None) as found:
            assert found == (url, "org/twin", None)
        with (
            pytest.raises(RequestError, match="There is no model 'nobody/knows'"),
            _served("nobody/knows", url, load_settings({}), None, None),
        ):
            pass
    assert progress[0] == ("downloading", 0)
    assert progress[-1] == ("done", 100)
    assert "Loading" not in capsys.readouterr().out, "a refused download loads nothing"


def test_a_model_that_a_chat_has_loaded_is_unloaded_after_each_chat_and_not_needed_by_others(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving("demo", folder=home) as server:
        for _ in range(2):
            assert chat(monkeypatch, "demo-moe", server.url) == 0
            assert {name: each.is_loaded for name, each in names_at(server.url).items()} == {
                "demo": True,
                "demo-moe": False,
            }
        question = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
        answer = server.http.post("/v1/chat/completions", json=question).raise_for_status().json()
        assert answer["model"] == "demo", "the one that the server was started with"
    assert "Paris" in capsys.readouterr().out


def test_a_folder_here_is_the_same_one_for_a_server_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "demo").mkdir()
    monkeypatch.chdir(tmp_path)
    assert name_for("http://127.0.0.1:8100", "./m") == str(tmp_path / "m")
    assert name_for("http://mini.local:8100", "./m") == "./m"
    for name in ("demo", "org/name", "m" * 5000, "~nobody-here/m", ""):
        assert name_for("http://localhost:8100", name) == name


def test_a_program_that_never_answers_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_client, "QUICK_ANSWER_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        for ask in (partial(names_at, url), partial(models.load, "demo", url)):
            with pytest.raises(ConfigError, match="something accepts connections there, but does not answer"):
                ask()


@pytest.mark.parametrize("listed", ["[]", '{"data": null}', '{"data": ["x"]}', '{"data": [{}]}'])
def test_another_program_is_named_whatever_it_answers(listed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(*_: object, **__: object) -> object:
        return json.loads(listed)

    monkeypatch.setattr(head_client, "ask_head", answer)
    with pytest.raises(
        ConfigError, match=r"No head answers at http://here \(another program answers there\)"
    ):
        names_at("http://here")


def test_another_program_s_stream_is_no_progress_of_a_download(monkeypatch: pytest.MonkeyPatch) -> None:
    def send(_: object, _request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=b'data: {"choices": []}\n\n')

    monkeypatch.setattr(httpx.HTTPTransport, "handle_request", send)
    with pytest.raises(ConfigError, match=r"ended the download \(another program answers there\)"):
        list(pull_at("http://here", "org/new"))
