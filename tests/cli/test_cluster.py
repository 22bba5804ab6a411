"""`mlx-ring cluster` and `mlx-ring stop` as a person types them, without other machines."""

from __future__ import annotations

import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.cli.test_main import complaint
from tests.processes import run_cli, run_in_process, serving

from mlx_ring.cli.cluster import logs, speed
from mlx_ring.cluster.lifecycle import verbs
from mlx_ring.core.errors import HostFailed


@pytest.mark.parametrize(
    ("text", "arguments", "said"),
    [
        (None, ("start",), "--config is cluster.json, which cannot be read"),
        ("machines: [m4-mac-mini-16]", ("start",), "has no `devices`, and is no hostfile"),
        ("[{ssh: localhost}]", ("start",), "cluster.json names no model: give --model."),
        ("[{ssh: localhost}]", ("logs", "--lines", "0"), "--lines is 0; it must be"),
        ("[{ssh: localhost}]", ("status", "--url", "http://x"), "--config and --url were both given"),
        ("[{ssh: nowhere.invalid}]", ("restart",), "cluster.json names no model: give --model."),
        (
            "{devices: [{hostname: nowhere.invalid}], model: demo, serve: {blas: fast}}",
            ("restart",),
            "blas under `serve` is fast; it must be auto, openblas or off.",
        ),
        ("[{ssh: localhost}]", ("restart", "--force"), "--force is for one machine: give its name"),
        ("[{ssh: localhost}]", ("restart", "mini", "--model", "demo"), "--model and mini are given"),
        (
            "[{ssh: localhost}, {ssh: b}]",
            ("restart", "mini"),
            "mini is no machine of the file: it has localhost, b.",
        ),
        (
            "[{ssh: localhost}, {ssh: b}]",
            ("restart", "localhost"),
            "localhost has the head, so that all would end",
        ),
        (
            "{devices: [{hostname: localhost}], model: demo, serve: {nodes: 2}}",
            ("start",),
            "`serve` has the key nodes",
        ),
        (
            "{devices: [{hostname: nowhere.invalid}], model: demo, serve: {blas: fast}}",
            ("start",),
            "blas under `serve` is fast; it must be auto, openblas or off.",
        ),
        (
            "{devices: [{hostname: nowhere.invalid}], model: demo, wheels: missing}",
            ("start",),
            "cluster.json: wheels is missing, which is no folder on this machine",
        ),
        (
            "{devices: [{hostname: nowhere.invalid, gpu_memory_utilization: 90}], model: demo}",
            ("stop",),
            "cluster.json: gpu_memory_utilization of nowhere.invalid is 90; it must be a number above 0, at most 1.",
        ),
    ],
)
def test_invalid_input_is_reported_in_one_sentence(
    text: str | None, arguments: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / "cluster.json").write_text(text)
    verb, *flags = arguments
    assert said in complaint("cluster", verb, "-c", "cluster.json", *flags, folder=tmp_path)


def test_cluster_test_asks_for_the_likeliest_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[dict[str, Any]] = []

    def ask(_file: object, method: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        sent.append({"method": method, "path": path, **body})
        usage = {"prompt_tokens": 9, "completion_tokens": 2}
        return {"choices": [{"message": {"content": "Paris."}}], "usage": usage, "performance": {}}

    monkeypatch.setattr(verbs, "ask", ask)
    (tmp_path / "cluster.json").write_text("[{ssh: localhost}]")
    done = run_in_process("cluster", "test", "-c", "cluster.json", folder=tmp_path)
    assert done.stdout == "Paris.\n", done.stderr
    (request,) = sent
    assert (request["path"], request["temperature"]) == ("/v1/chat/completions", 0)


def test_cluster_start_refuses_settings_in_the_environment(tmp_path: Path) -> None:
    (tmp_path / "cluster.json").write_text("[{ssh: localhost}]")
    done = run_in_process(
        *("cluster", "start", "-c", "cluster.json"), folder=tmp_path, environment={"MLX_RING_BLAS": "off"}
    )
    assert done.returncode == 2
    assert "The environment reaches no other machine (MLX_RING_BLAS): give settings under" in done.stderr


def test_logs_of_other_machines_are_printed_when_one_is_out_of_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def program(machine: Any) -> Any:
        if machine.name == "dead":
            raise HostFailed("dead cannot be reached")
        words = (sys.executable, "-c", "print('a line')")
        return SimpleNamespace(machine=machine, program=words, installation=SimpleNamespace(state="s"))

    monkeypatch.setattr(verbs, "_program", program)
    config = tmp_path / "cluster.json"
    config.write_text(
        '{"devices": [{"device_id": "h", "hostname": "localhost", "role": "coordinator"},'
        ' {"device_id": "dead", "hostname": "nowhere.invalid"}]}'
    )
    with pytest.raises(HostFailed, match="dead cannot be reached"):
        logs(config)
    assert capfd.readouterr().out == "h | a line\n"


@pytest.mark.parametrize("failure", ["", "b cannot be reached"])
def test_status_names_unlisted_machines_only_if_all_listed_ones_are_known(
    failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = SimpleNamespace(kind="head", pid=1)
    standings = [
        SimpleNamespace(machine=SimpleNamespace(name="a"), node="a-1", running=(head,), failure=""),
        SimpleNamespace(
            machine=SimpleNamespace(name="b"), node="" if failure else "b-1", running=(), failure=failure
        ),
    ]
    nodes: list[dict[str, Any]] = [
        {"id": name, "name": name, "address": "10.0.0.2", "is_head": name == "a-1", "stages": []}
        | {"state": "attending", "reason": None, "memory": None}
        for name in ("a-1", "b-1", "c-1")
    ]

    def stand(_file: object) -> Any:
        return standings

    def ask(*_: object) -> dict[str, Any]:
        return {"status": "ready", "models": [], "nodes": nodes, "instances": [], "links": []}

    monkeypatch.setattr(verbs, "standings", stand)
    monkeypatch.setattr(verbs, "ask", ask)
    (tmp_path / "cluster.json").write_text("[{ssh: localhost}, {ssh: b}]")
    done = run_in_process("cluster", "status", "-c", "cluster.json", folder=tmp_path)
    assert "b-1 (b-1 at" not in done.stderr
    # The machine that is out of reach may be either of the two.
    named = "c-1 (c-1 at 10.0.0.2) belongs to the cluster, but the file does not list it."
    assert (named in done.stderr) == (failure == "")


def test_status_without_a_head_names_the_address(tmp_path: Path) -> None:
    said = complaint("cluster", "status", "--url", "http://127.0.0.1:1", folder=tmp_path)
    assert "No head answers at http://127.0.0.1:1 (Connection refused): give --url" in said


@pytest.mark.parametrize("url", ["127.0.0.1:8100", "mini.local", "ftp://mini", "http://[::1"])
def test_an_address_without_http_is_named_as_such(url: str, tmp_path: Path) -> None:
    said = complaint("cluster", "status", "--url", url, folder=tmp_path)
    assert said == f"'{url}' is no address of a server; give one like http://127.0.0.1:8100."


def test_another_program_at_a_head_s_address_is_named_as_such(tmp_path: Path) -> None:
    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<p>It works!</p>")

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name in the base class
            del format, args

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            url = f"http://127.0.0.1:{server.server_port}"
            said = complaint("cluster", "status", "--url", url, folder=tmp_path)
        finally:
            server.shutdown()
            thread.join()
    assert said.startswith(f"No head answers at {url} (another program answers there): give --url")


def test_stop_ends_a_server_that_was_started_by_hand(tmp_path: Path) -> None:
    state = ("--state-dir", str(tmp_path / "state"))
    with serving("demo", *state, folder=tmp_path) as server:
        stopped = run_cli("stop", *state, folder=tmp_path)
        assert stopped.stdout == f"The head has ended (process {server.process.pid}).\n"
        assert server.process.wait(30) == 0
        assert server.all_ended()
    assert run_in_process("stop", *state, folder=tmp_path).stdout == "No mlx-ring process runs here.\n"


def test_speed_shows_only_known_rates() -> None:
    answer = {
        "usage": {"prompt_tokens": 7, "completion_tokens": 3},
        "performance": {"prompt_tokens_per_second": 70.04, "generation_tokens_per_second": None},
    }
    assert speed(answer) == "7 + 3 tokens, 70.0 tokens/s of the prompt"
