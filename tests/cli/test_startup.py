"""Text that `mlx-ring serve` prints once a model is served."""

# A lost output and live bars are states that no message shows.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Literal, cast

import pytest
from rich.console import Console
from tests.cli.qr_reader import read_qr

from mlx_ring.cli import startup as subject
from mlx_ring.cli.startup import StartupMessages, network_lines, products_of, qr_lines, sample_commands
from mlx_ring.core.types import LayerRange
from mlx_ring.core.worker_status import WorkerInfo, WorkerMemory
from mlx_ring.host.addresses import HeadAddress
from mlx_ring.rpc.protos import agent_pb2

if TYPE_CHECKING:
    from mlx_ring.head.placing import Placement


def test_example_commands_name_the_certificate_and_the_key_variable() -> None:
    plain = sample_commands("http://127.0.0.1:8100", "demo", None, asks_for_key=False)
    assert plain[0] == "Ask it:"
    assert plain[1].startswith("  curl http://127.0.0.1:8100/v1/chat/completions -H 'Content-Type")
    assert plain[3].endswith(" chat")
    guarded = sample_commands("https://127.0.0.1:8200", "demo", Path("/etc/my server.pem"), asks_for_key=True)
    assert "MLX_RING_API_KEY" in guarded[0]
    assert " --cacert '/etc/my server.pem' -H \"Authorization: Bearer $MLX_RING_API_KEY\" " in guarded[1]
    assert guarded[3].endswith(" chat --url https://127.0.0.1:8200 --cacert '/etc/my server.pem'")


@pytest.mark.parametrize("model", ["demo", "Anna's model", "modèle"])
def test_the_example_request_names_the_model_which_several_models_need(model: str) -> None:
    command = shlex.split(sample_commands("http://127.0.0.1:8100", model, None, asks_for_key=False)[1])
    assert json.loads(command[command.index("-d") + 1])["model"] == model


@pytest.mark.parametrize(
    ("kernels", "weights", "expected"),
    [
        ("AVX2", "quantized", "OpenBLAS"),
        ("", "", "OpenBLAS"),
        ("", "float32", "OpenBLAS. Quantized weights take seven times the memory, as float32."),
        ("", "quantized", "OpenBLAS. With quantized weights, a token takes many times as long."),
    ],
)
def test_one_line_says_what_quantized_weights_cost_without_kernels(
    kernels: str, weights: str, expected: str
) -> None:
    names = ("weight_bytes", "device_memory_bytes", "peak_memory_bytes", "rss_bytes", "kv_bytes")
    memory: WorkerMemory = dict.fromkeys(names, 0)  # pyright: ignore[reportAssignmentType]
    worker = WorkerInfo(
        *(0, 0, LayerRange(0, 2), "here", 1, "cpu", "float32"),
        alive=True,
        phase="ready",
        memory=memory,
        blas="OpenBLAS",
        kernels=kernels,
        cpu_weights=weights,
    )
    assert products_of(worker) == expected


def test_a_server_for_the_network_names_its_addresses_and_warns_without_a_key() -> None:
    assert network_lines((), asks_for_key=False) == []
    urls = ("http://mini.local:8100", "http://192.168.1.7:8100")
    open_to_all = network_lines(urls, asks_for_key=False)
    assert open_to_all[1:3] == ["  http://mini.local:8100", "  http://192.168.1.7:8100"]
    assert "No API key is set" in open_to_all[3]
    assert network_lines(urls, asks_for_key=True) == open_to_all[:3]


COLOURS = "\x1b[38;5;16;48;5;231m", "\x1b[0m"
MODULES = {" ": (0, 0), "\u2580": (1, 0), "\u2584": (0, 1), "\u2588": (1, 1)}
"""Upper and lower module of each character; 1 is dark."""


def terminal(
    width: int, colours: Literal["standard", "256", "truecolor"] = "256", **options: bool
) -> Console:
    file = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    return Console(file=file, force_terminal=True, width=width, color_system=colours, **options)  # pyright: ignore[reportArgumentType]


def modules_of(lines: list[str]) -> list[list[int]]:
    before, after = COLOURS
    shown = [line.removeprefix(before).removesuffix(after) for line in lines]
    assert lines == [f"{before}{line}{after}" for line in shown]
    return [[MODULES[char][half] for char in line] for line in shown for half in (0, 1)]


@pytest.mark.parametrize(
    ("urls", "chosen"),
    [
        (("http://mini.local:8100", "http://192.168.1.7:8100", "http://10.0.0.2:8100"), 1),
        (("https://mini.local:8100", "https://[fd00:1234:5678:9abc:def0:1234:5678:9abc]:8100"), 1),
        (("http://a:1",), 0),
        ((f"http://{'a-long-name-of-a-machine.' * 3}example:65535",), 0),
    ],
)
def test_a_phone_reads_the_address_of_the_code_on_the_terminal(urls: tuple[str, ...], chosen: int) -> None:
    heading, *lines = qr_lines(urls, terminal(80))
    assert heading == f"Scan it with a phone, for {urls[chosen]}:"
    shown = modules_of(lines)
    size = len(shown[0])
    # The last character may show one row more.
    code = [row[4 : size - 4] for row in shown[4 : size - 4]]
    around = [*shown[:4], *shown[size - 4 :], *[[*row[:4], *row[size - 4 :]] for row in shown]]
    assert {module for row in around for module in row} == {0}
    assert read_qr(code) == urls[chosen]


def test_no_code_is_shown_where_it_cannot_be_read() -> None:
    urls = ("http://192.168.1.7:8100",)
    width = len(modules_of(qr_lines(urls, terminal(80))[1:])[0])
    assert qr_lines(urls, terminal(width))
    assert qr_lines(urls, terminal(width - 1)) == []
    assert qr_lines((), terminal(80)) == []
    assert qr_lines(urls, terminal(80, "standard")) == []
    assert qr_lines(urls, terminal(80, no_color=True)) == []
    assert qr_lines(urls, Console(file=io.TextIOWrapper(io.BytesIO(), "latin-1"), color_system="256")) == []


@pytest.mark.parametrize("columns", [60, 80])
def test_a_long_name_leaves_room_for_the_figures_of_a_load(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("FORCE_COLOR", "1"), ("TERM", "xterm"), ("COLUMNS", str(columns))):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    instance = "Llama-3.3-70B-Instruct-Some-Long-Name-4bit-DWQ-0dec8a"
    with StartupMessages() as messages:
        messages.planned(instance, cast("Placement", SimpleNamespace(plan=None, ranges=[LayerRange(0, 1)])))
        progress = agent_pb2.StageProgress(stage=0)
        progress.progress.bytes_loaded, progress.progress.bytes_total = 23_400_000_000, 39_700_000_000
        messages.loading(instance, progress)
    frames = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().err).splitlines()
    assert max(map(len, frames)) <= columns
    assert any("-0dec8a, stage 0 " in frame and "23.4/39.7 GB" in frame for frame in frames), frames


def test_bars_of_an_instance_that_was_lost_in_its_load_do_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    placement = cast("Placement", SimpleNamespace(plan=None, ranges=[LayerRange(0, 1)]))
    with StartupMessages() as messages:
        bars = messages._progress
        assert bars is not None
        messages.planned("demo-1", placement)
        messages.ended("demo-1")
        assert (bars.tasks, bars.live.is_started) == ([], False)
        # The next epoch may have the same name, if it replaces only the lost workers.
        for _ in range(2):
            messages.planned("demo-2", placement)
        assert [task.description for task in bars.tasks] == ["demo-2, stage 0"]
        assert bars.live.is_started


def test_bars_end_and_the_cursor_is_shown_although_the_output_is_lost(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(subject, "discard_output", lambda: None)
    with StartupMessages() as messages:
        messages.planned("demo", cast("Placement", SimpleNamespace(plan=None, ranges=[LayerRange(0, 1)])))
        messages._lose("Broken pipe")
        assert messages._progress is not None
        assert messages._progress.live.is_started
    assert not messages._progress.live.is_started
    shown = capsys.readouterr().err
    assert shown.count("\x1b[?25h") == shown.count("\x1b[?25l") == 1


def test_a_full_pipe_that_does_not_let_writers_wait_is_lost(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, bytes(1 << 16))
    with os.fdopen(reader, "rb"), os.fdopen(writer, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        with StartupMessages() as messages:
            for _ in range(2):
                messages.joining(HeadAddress("192.0.2.1", 50051), "token", 1)
    assert caplog.text.count("cannot be written any more (") == 1
