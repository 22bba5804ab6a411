"""`mlx-ring bench` as a person types it."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.api.clients import serving
from tests.api.twins import TwinService
from tests.cli.bench.third_party import ThirdPartyServer, serving_third_party
from tests.default_settings import make_policy
from tests.processes import run_cli
from tests.processes import serving as serving_model

from mlx_ring.cli import app
from mlx_ring.cli.bench import command
from mlx_ring.cli.bench.workload import Range, Workload
from mlx_ring.core.errors import WorkerLost

ROOT = Path(__file__).parents[3]


@dataclass
class Done:
    code: int
    out: str
    err: str


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Return a function that runs the command in this process."""

    def run(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["mlx-ring", "bench", *arguments])
        code = app.run()
        seen = capsys.readouterr()
        return Done(code, seen.out, seen.err)

    monkeypatch.setenv("COLUMNS", "200")
    return run


def test_the_report_holds_the_settings_the_server_and_the_measurements(
    bench: Callable[..., Done], tmp_path: Path
) -> None:
    report, plot = tmp_path / "run.json", tmp_path / "run.svg"
    with serving(TwinService(policy=make_policy(max_itl_ratio=2.5))) as url:
        done = bench(
            *("--url", f"{url}/v1/", "--requests", "6", "--concurrency", "3", "--seed", "5"),
            *("--prompt-tokens", "40-60", "--output-tokens", "8", "--shared-prefix", "32"),
            *("--json", str(report), "--plot", str(plot)),
        )
    assert (done.code, done.err) == (0, "")
    assert "6 of 6 requests" in done.out
    for row in ("time to first token (TTFT)", "between tokens (ITL)", "whole request (E2E)"):
        assert re.search(re.escape(row) + r"( +[\d,]+\.\d){4}", done.out)
    results = json.loads(report.read_text())
    assert results["settings"]["prompt_tokens"] == {"low": 40, "high": 60}
    assert (results["settings"]["model"], results["settings"]["endpoint"]) == ("org/twin", "completions")
    assert results["server"]["scheduling"]["max_itl_ratio"] == 2.5
    assert (results["server"]["prompts"], results["server"]["ignore_eos"]) == ("token ids", True)
    assert results["server"]["version"] == results["mlx_ring"]
    before, after = (
        results["server"][name]["prefix_cache"]["queries"] for name in ("cache_before", "cache_after")
    )
    assert after - before == 7, "one to warm up, and six"
    assert results["summary"]["output_tokens"] == 48
    assert results["summary"]["cached_tokens"] == sum(one["cached_tokens"] for one in results["requests"])
    assert all(40 <= one["prompt_tokens"] <= 60 for one in results["requests"])
    assert all(len(one["inter_token_s"]) <= 7 for one in results["requests"])
    assert (results["interrupted"], results["notes"]) == (False, [])
    assert url.rpartition(":")[2] not in report.read_text()
    assert plot.read_text().count("<svg") == 1


def test_a_shared_prefix_is_reported_as_cached_tokens(bench: Callable[..., Done], tmp_path: Path) -> None:
    report = tmp_path / "run.json"
    with serving(TwinService()) as url:
        done = bench(
            *("--url", url, "--requests", "4", "--concurrency", "1", "--prompt-tokens", "700"),
            *("--output-tokens", "2", "--shared-prefix", "640", "--json", str(report)),
        )
    cached = [one["cached_tokens"] for one in json.loads(report.read_text())["requests"]]
    assert cached[0] == 0, "requests that warm up have another prefix"
    assert all(500 <= tokens <= 640 for tokens in cached[1:])
    assert f"{sum(cached):,} of them from the cache" in done.out


def test_a_chat_s_words_come_close_to_the_requested_tokens(
    bench: Callable[..., Done], tmp_path: Path
) -> None:
    report = tmp_path / "run.json"
    with serving(TwinService()) as url:
        done = bench(
            *("--url", url, "--requests", "3", "--rate", "200", "--endpoint", "chat"),
            *("--prompt-tokens", "300", "--output-tokens", "20", "--json", str(report)),
        )
    assert done.code == 0
    results = json.loads(report.read_text())
    assert results["server"]["prompts"] == "words"
    assert all(abs(one["prompt_tokens"] - 300) < 30 for one in results["requests"])
    assert results["summary"]["completed"] == 3


def test_a_third_party_server_gets_prompts_of_the_requested_length(
    bench: Callable[..., Done], tmp_path: Path
) -> None:
    report = tmp_path / "run.json"
    third_party = ThirdPartyServer(
        rejected_fields=frozenset({"ignore_eos"}), token_limit=4, tokens_per_event=2
    )
    with serving_third_party(third_party) as url:
        done = bench("--url", url, "--prompt-tokens", "307", "--output-tokens", "9", "--json", str(report))
    assert done.code == 0
    assert "ignore_eos" in done.out
    assert "32 answers were shorter than requested" in done.out
    assert "An event carried 2.00 tokens on average" in done.out
    results = json.loads(report.read_text())
    assert {one["prompt_tokens"] for one in results["requests"]} == {307}
    assert results["server"]["scheduling"] is None
    assert results["server"]["cache_before"] is None


@pytest.mark.slow
def test_a_request_that_the_probe_sees_rejected_is_exit_code_2(bench: Callable[..., Done]) -> None:
    third_party = ThirdPartyServer()
    with serving_third_party(third_party) as url:
        healthy = bench("--url", url, "--requests", "2", "--output-tokens", "3")
        assert healthy.code == 0
        third_party.rejected_fields = frozenset({"seed"})
        third_party.names_rejected_field = False
        done = bench("--url", url, "--requests", "3", "--temperature", "0.5")
    assert done.code == 2, "the first small request shows it"
    assert "HTTP 400: Bad request." in done.err


def test_a_server_that_fails_under_load_is_exit_code_1(bench: Callable[..., Done]) -> None:
    service = TwinService()
    with serving(service) as url:
        service.error = WorkerLost("Worker 1 of stage 0 died [exit 9].")
        done = bench("--url", url, "--requests", "4")
    assert done.code == 1
    assert "0 of 4 requests" in done.out
    assert "4 x HTTP 503: Worker 1 of stage 0 died [exit 9]." in done.out


@pytest.mark.slow
def test_ctrl_c_stops_the_load_and_not_the_report(bench: Callable[..., Done], tmp_path: Path) -> None:
    report = tmp_path / "run.json"
    # The probe sends two small requests.
    third_party = ThirdPartyServer(fault="hang", healthy_requests=2 + 3)

    def press() -> None:
        while len(third_party.bodies) < 2 + 3 + 2:
            threading.Event().wait(0.005)
        os.kill(os.getpid(), signal.SIGINT)

    with serving_third_party(third_party) as url:
        presser = threading.Thread(target=press)
        presser.start()
        done = bench("--url", url, "--warmup", "0", "--concurrency", "2", "--json", str(report))
        presser.join()
    assert done.code == 130
    assert "3 of 5 requests" in done.out
    assert "2 requests were in progress when the load was stopped" in done.out
    results = json.loads(report.read_text())
    summary = results["summary"]
    assert (results["interrupted"], summary["stopped"], summary["errors"]) == (True, 2, {})
    assert summary["output_tokens"] == 3 * 64


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--requests x", "--requests is x; it must be a whole number from 1 to 1000000."),
        ("--concurrency 0", "--concurrency is 0; it must be a whole number from 1 to 4096."),
        ("--rate nan", "--rate is nan; it must be a number from 0.001 to 10000."),
        ("--rate 1 --concurrency 2", "--rate and --concurrency exclude each other; give one."),
        ("--prompt-tokens 9-3", "--prompt-tokens is 9-3; it must be a whole number from 1, or a range like"),
        ("--output-tokens 0", "--output-tokens is 0; it must be"),
        ("--shared-prefix 128", "--shared-prefix is 128; it must be shorter than the shortest prompt"),
        ("--endpoint both", "--endpoint is both; it must be completions or chat."),
        ("--temperature 3", "--temperature is 3; it must be a number from 0 to 2."),
        ("--timeout 0", "--timeout is 0; it must be a number from 0.1 to 86400."),
        ("--plot run.pdf", "--plot is run.pdf; the file's name must end in .svg or .png."),
        ("--json none/run.json", "--json is none/run.json; there is no folder"),
        ("--url here:8100", "--url is 'here:8100'; give one like http://127.0.0.1:8100."),
        ("--api-key schlüssel", "--api-key must be printable ASCII"),
        ("--nope", "No such option: --nope"),
    ],
)
def test_invalid_input_is_reported_before_any_request(
    arguments: str, said: str, bench: Callable[..., Done]
) -> None:
    done = bench(*shlex.split(arguments))
    assert (done.code, done.out) == (2, "")
    (line,) = done.err.splitlines()
    assert line.startswith(f"mlx-ring: {said}")


def test_prompts_beyond_the_context_are_refused_before_any_request(bench: Callable[..., Done]) -> None:
    third_party = ThirdPartyServer()
    with serving_third_party(third_party) as url:
        done = bench("--url", url, "--prompt-tokens", "4990", "--output-tokens", "11")
    assert done.code == 2
    assert "up to 5001 tokens; the context of small has 5000" in done.err
    assert third_party.bodies == []


def test_a_missing_server_is_exit_code_1_with_advice(bench: Callable[..., Done]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    done = bench("--url", f"http://127.0.0.1:{port}")
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith(f"mlx-ring: No server answers at http://127.0.0.1:{port} (")
    assert done.err.endswith("Start one with: mlx-ring serve\n")


def documented_commands() -> list[str]:
    texts = [(ROOT / name).read_text() for name in ("README.md", "docs/benchmarking.md")]
    lines = [line for text in texts for line in re.findall(r"^mlx-ring bench.*$", text, re.MULTILINE)]
    return [line.partition("#")[0].strip() for line in lines]


@pytest.mark.parametrize("line", documented_commands())
def test_documented_commands_are_accepted(
    line: str, bench: Callable[..., Done], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def run(*given: Any) -> dict[str, Any]:
        loads.extend(one for one in given if isinstance(one, Workload))
        return {"interrupted": False, "summary": {"errors": {}}}

    loads: list[Workload] = []
    monkeypatch.setattr(command, "_run", run)
    monkeypatch.chdir(tmp_path)
    done = bench(*shlex.split(line)[2:])
    assert (done.code, done.err) == (0, "")
    assert len(loads) == 1


def test_the_documents_hold_commands() -> None:
    assert len(documented_commands()) >= 5


def test_the_defaults_are_the_documented_ones(
    bench: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(url: str, *given: Any) -> dict[str, Any]:
        seen.append((url, *given))
        return {"interrupted": False, "summary": {"errors": {"timeout": 1}}}

    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(command, "_run", run)
    assert bench().code == 1
    assert seen[0][0].url == "http://127.0.0.1:8100"
    assert seen[0][2] == Workload(32, Range(128, 128), Range(64, 64), concurrency=4)


def test_the_key_of_this_machine_s_settings_is_sent_to_its_server_unless_another_is_given(
    bench: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(connect: command.Connect, *_: object) -> dict[str, Any]:
        keys.append(connect.key)
        return {"interrupted": False, "summary": {"errors": {}}}

    keys: list[str | None] = []
    monkeypatch.setattr(command, "_run", run)
    bench()
    monkeypatch.setenv("MLX_RING_API_KEY", "own")
    bench()
    bench("--api-key", "other")
    elsewhere = "--url", "http://10.0.0.9:8000"
    bench(*elsewhere)
    bench(*elsewhere, "--api-key", "theirs")
    assert keys == [None, "own", "other", None, "theirs"]


def test_a_real_server_is_measured_from_another_process(tiny_model: Path, tmp_path: Path) -> None:
    with serving_model(tiny_model, "--stages", "2", folder=tmp_path) as server:
        done = run_cli(
            *("bench", "--url", server.url, "--requests", "4", "--prompt-tokens", "20-40"),
            *("--output-tokens", "6", "--json", "run.json", "--plot", "run.png"),
            folder=tmp_path,
        )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "4 of 4 requests" in done.stdout
    results = json.loads((tmp_path / "run.json").read_text())
    assert results["summary"]["output_tokens"] == 24
    assert results["server"]["scheduling"]["max_itl_ratio"] > 1
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
