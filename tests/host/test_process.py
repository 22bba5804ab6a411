"""Limits of containers, read from made-up control groups; signals, and output that nobody reads."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from mlx_ring.host.process import (
    CpuQuota,
    UnblockedOutput,
    cpu_quota,
    ending_signals,
    limited_cores,
    limited_memory,
    mac_footprint,
    own_memory,
    unblocked_output,
    usable_cores,
    usable_memory,
)

GB = 10**9
LINE = "x" * 99
LINES = 5_000
"""Lines that fill any pipe, and are not too many to be kept."""
UNLIMITED_V1 = str(9223372036854771712)


def tree(root: Path, own: str, files: dict[str, str]) -> Path:
    """Make a root with `/proc/self/cgroup` and files under `/sys/fs/cgroup`."""
    for name, text in {
        "proc/self/cgroup": own,
        **{f"sys/fs/cgroup/{k}": v for k, v in files.items()},
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def cgroup_v2(where: Path, own: str, **groups: dict[str, str]) -> Path:
    """Make groups by name, `a__b` for `a/b`; the one at the root is called `root`."""
    files = {"cgroup.controllers": "cpu memory"}
    for group, entries in groups.items():
        folder = "" if group == "root" else group.replace("__", "/") + "/"
        files |= {folder + name.replace("_", ".", 1): text for name, text in entries.items()}
    return tree(where, f"0::{own}", files)


def test_without_control_groups_the_machine_is_the_limit(tmp_path: Path) -> None:
    found = limited_memory(16 * GB, 9 * GB, tmp_path)
    assert (found.total_bytes, found.available_bytes, found.limited_by) == (16 * GB, 9 * GB, "the machine")
    assert cpu_quota(tmp_path) is None


def test_a_groups_memory_max_is_the_limit_and_is_named(tmp_path: Path) -> None:
    root = cgroup_v2(
        tmp_path, "/box", box={"memory_max": str(4 * GB), "memory_current": str(GB), "memory_stat": "anon 5"}
    )
    found = limited_memory(16 * GB, 9 * GB, root)
    assert (found.total_bytes, found.available_bytes) == (4 * GB, 3 * GB)
    assert found.limited_by == "the control group (/sys/fs/cgroup/box/memory.max)"


def test_the_lowest_memory_limit_of_all_parent_groups_counts(tmp_path: Path) -> None:
    root = cgroup_v2(
        tmp_path,
        "/pod/box",
        pod={"memory_max": str(2 * GB), "memory_current": str(GB)},
        pod__box={"memory_max": str(6 * GB), "memory_current": "0"},
    )
    found = limited_memory(16 * GB, 9 * GB, root)
    assert (found.total_bytes, found.available_bytes) == (2 * GB, GB)


def test_memory_high_counts_like_memory_max(tmp_path: Path) -> None:
    root = cgroup_v2(tmp_path, "/box", box={"memory_max": "max", "memory_high": str(3 * GB)})
    assert limited_memory(16 * GB, 9 * GB, root).total_bytes == 3 * GB


def test_reclaimable_pages_count_as_available(tmp_path: Path) -> None:
    root = cgroup_v2(
        tmp_path,
        "/box",
        box={
            "memory_max": str(4 * GB),
            "memory_current": str(3 * GB),
            "memory_stat": f"anon 1\ninactive_file {GB}\nactive_file {GB}",
        },
    )
    assert limited_memory(16 * GB, 9 * GB, root).available_bytes == 3 * GB


def test_max_is_no_limit(tmp_path: Path) -> None:
    root = cgroup_v2(
        tmp_path, "/box", box={"memory_max": "max", "memory_high": "max", "cpu_max": "max 100000"}
    )
    assert limited_memory(16 * GB, 9 * GB, root).limited_by == "the machine"
    assert cpu_quota(root) is None


def test_a_limit_above_the_machines_memory_is_ignored(tmp_path: Path) -> None:
    root = cgroup_v2(tmp_path, "/box", box={"memory_max": str(64 * GB)})
    assert limited_memory(16 * GB, 9 * GB, root).total_bytes == 16 * GB


@pytest.mark.parametrize("own", ["/", "/docker/0123abcd", "/../../docker/0123abcd"])
def test_a_containers_group_is_the_root_of_its_mount(own: str, tmp_path: Path) -> None:
    root = cgroup_v2(tmp_path, own, root={"memory_max": str(2 * GB), "cpu_max": "150000 100000"})
    assert limited_memory(16 * GB, 9 * GB, root).total_bytes == 2 * GB
    assert cpu_quota(root) == CpuQuota(1.5, 0.1)


@pytest.mark.parametrize("own", ["/docker/box", "/elsewhere/docker/box"])
def test_cgroup_v1_limits_are_read_per_controller_up_to_the_root(own: str, tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        f"4:memory:{own}\n3:cpu,cpuacct:/\n1:name=systemd:/\n0::/",
        {
            "memory/memory.limit_in_bytes": UNLIMITED_V1,
            "memory/docker/memory.limit_in_bytes": str(3 * GB),
            "memory/docker/memory.usage_in_bytes": str(2 * GB),
            "memory/docker/memory.stat": f"total_inactive_file {GB}",
            "memory/docker/box/memory.limit_in_bytes": str(5 * GB),
            "cpu,cpuacct/cpu.cfs_quota_us": "250000",
            "cpu,cpuacct/cpu.cfs_period_us": "100000",
        },
    )
    found = limited_memory(16 * GB, 9 * GB, root)
    assert (found.total_bytes, found.available_bytes) == (3 * GB, 2 * GB)
    assert "memory.limit_in_bytes" in found.limited_by
    assert cpu_quota(root) == CpuQuota(2.5, 0.1)


def test_cgroup_v1_without_limits_has_the_machines_limits(tmp_path: Path) -> None:
    files = {
        "memory/memory.limit_in_bytes": UNLIMITED_V1,
        "cpu/cpu.cfs_quota_us": "-1",
        "cpu/cpu.cfs_period_us": "100000",
    }
    root = tree(tmp_path, "4:memory:/\n3:cpu:/", files)
    assert limited_memory(16 * GB, 9 * GB, root).total_bytes == 16 * GB
    assert cpu_quota(root) is None


def test_the_lowest_cpu_quota_of_all_parent_groups_counts(tmp_path: Path) -> None:
    root = cgroup_v2(
        tmp_path, "/pod/box", pod={"cpu_max": "400000 100000"}, pod__box={"cpu_max": "600000 100000"}
    )
    assert cpu_quota(root) == CpuQuota(4.0, 0.1)


@pytest.mark.parametrize(("quota", "cores"), [("250000", 2), ("20000", 1), ("9900000", 8)])
def test_limited_cores_are_whole_and_at_least_one(quota: str, cores: int, tmp_path: Path) -> None:
    root = cgroup_v2(tmp_path, "/", root={"cpu_max": f"{quota} 100000"})
    assert limited_cores(8, root) == cores


@pytest.mark.parametrize("text", ["", "plenty", "1 2 3", "-5"])
def test_invalid_control_group_files_set_no_limit(text: str, tmp_path: Path) -> None:
    root = cgroup_v2(tmp_path, "/", root={"cpu_max": text, "memory_current": text, "memory_stat": text})
    assert cpu_quota(root) is None
    assert limited_memory(16 * GB, 9 * GB, root).total_bytes == 16 * GB


def test_this_machine_has_memory_and_cores() -> None:
    found = usable_memory()
    assert found.total_bytes >= found.available_bytes > 0
    assert usable_cores() >= 1


def test_a_macs_footprint_is_read_from_the_systems_structure() -> None:
    """Expect the layout of `rusage_info_v0`: 16 bytes of an id, then ten numbers, of which the eighth is the footprint."""

    def fill(pid: int, flavor: int, buffer: Any) -> int:
        assert (pid, flavor) == (os.getpid(), 0)
        ctypes.memmove(buffer, bytes(16) + struct.pack("<10Q", *range(1, 11)), 96)
        return 0

    assert mac_footprint(fill) == 8
    assert mac_footprint(lambda *_: -1) == 0


def test_memory_of_this_process_is_known() -> None:
    assert own_memory() > 1_000_000


def test_the_end_of_a_terminal_ends_a_process_unless_it_is_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        assert ending_signals() == (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        assert ending_signals() == (signal.SIGINT, signal.SIGTERM)
    finally:
        signal.signal(signal.SIGHUP, before)


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")


@contextlib.contextmanager
def printing_unblocked() -> Generator[int]:
    """Print into a pipe without a wait for its reader, and yield its reading end, which the test closes."""
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stdout, contextlib.redirect_stdout(stdout), unblocked_output():
        yield reading


def read_lines(reading: int, count: int) -> list[str]:
    """Read so many lines, and check that no text is behind them."""
    data = b""
    while data.count(b"\n") < count:
        data += os.read(reading, 1 << 16)
    assert data.endswith(b"\n")
    assert data.count(b"\n") == count
    return data.decode().splitlines()


def test_output_waits_for_no_reader_and_arrives_whole_when_it_is_read_later() -> None:
    with printing_unblocked() as reading:
        for number in range(LINES):
            say(f"{number} {LINE}")
        assert read_lines(reading, LINES) == [f"{number} {LINE}" for number in range(LINES)]
        say("at once")
        assert read_lines(reading, 1) == ["at once"]
    os.close(reading)


def test_lines_that_nobody_reads_are_dropped_at_a_limit_and_a_line_says_so() -> None:
    with printing_unblocked() as reading:
        for number in range(3 * LINES):
            say(f"{number} {LINE}")
        say("the last")
        with os.fdopen(reading) as lines:
            found = [next(lines).strip()]
            while found[-1] != "the last":
                found.append(next(lines).strip())
    [note] = [line for line in found if line.endswith("lines are missing here: nobody read them)")]
    dropped = int(note.removeprefix("(").split()[0])
    assert dropped > 0
    assert len(found) - 2 == 3 * LINES - dropped


def test_the_end_waits_for_no_reader_either_nor_does_what_is_printed_then() -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stdout, contextlib.redirect_stdout(stdout):
        with unblocked_output():
            say(LINE * LINES)
        say(LINE)
        os.close(reading)
        output = sys.stdout.buffer
        assert isinstance(output, UnblockedOutput)
        assert output.finish(), "its thread has noticed"


def test_a_reader_that_leaves_is_an_error_of_the_next_write() -> None:
    with printing_unblocked() as reading:
        say("nobody waits for this")
        os.close(reading)
        with pytest.raises(BrokenPipeError):
            say("lost")


def test_a_stopped_terminal_stops_nothing() -> None:
    reading, writing = pty.openpty()
    termios.tcflow(writing, termios.TCOOFF)  # as Ctrl-S
    with os.fdopen(writing, "w") as terminal, contextlib.redirect_stdout(terminal), unblocked_output():
        assert sys.stdout.isatty()
        say(LINE * LINES)
        termios.tcflow(writing, termios.TCOON)
        data = b""
        while not data.endswith(b"\n"):
            data += os.read(reading, 1 << 16)
    assert data.decode().strip() == LINE * LINES
    os.close(reading)


@contextlib.contextmanager
def printing_to(writing: int) -> Generator[None]:
    """Print to one file as both standard streams do, without a wait for its reader."""
    with (
        os.fdopen(writing, "w") as stdout,
        os.fdopen(os.dup(writing), "w") as stderr,
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
        unblocked_output(),
    ):
        yield


def test_lines_of_both_streams_keep_their_order_on_a_terminal() -> None:
    reading, writing = pty.openpty()
    expected = [str(number) for number in range(100)]
    with printing_to(writing):
        for number in range(0, 100, 2):
            say(str(number))
            sys.stderr.write(f"{number + 1}\n")
        assert read_lines(reading, 100) == expected
    os.close(reading)


def test_lines_of_both_streams_keep_their_order_and_stay_whole_in_a_pipe_that_was_full() -> None:
    reading, writing = os.pipe()
    expected = [f"{number} {LINE}" for number in range(LINES)]
    with printing_to(writing):
        for number in range(0, LINES, 2):
            say(expected[number])
            sys.stderr.write(f"{expected[number + 1]}\n")
        assert read_lines(reading, LINES) == expected
    os.close(reading)


def test_a_reader_that_leaves_is_an_error_of_both_streams() -> None:
    reading, writing = os.pipe()
    with printing_to(writing):
        os.close(reading)
        for stream in (sys.stdout, sys.stderr):
            with pytest.raises(BrokenPipeError):
                stream.write("lost\n")


def test_a_text_that_is_longer_than_the_limit_is_kept_when_nothing_else_waits() -> None:
    reading, writing = pty.openpty()
    text = f"{LINE}\n" * 20_000
    with printing_to(writing):
        sys.stdout.write(text)
        assert read_lines(reading, 20_000) == text.splitlines()
    os.close(reading)


def test_a_pipe_that_another_program_has_just_filled_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill a pipe that lets no writer wait, although `select` finds room in it."""
    with printing_unblocked() as reading, os.fdopen(os.dup(reading), "rb") as filled:
        os.set_blocking(sys.stdout.fileno(), False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(sys.stdout.fileno(), b"x" * 4096)
        tried = threading.Event()
        write = os.write

        def find_room(_: list[int], writing: list[int], *_others: object) -> tuple[list[int], ...]:
            return [], writing, []

        def try_to_write(descriptor: int, data: bytes) -> int:
            try:
                return write(descriptor, data)
            except BlockingIOError:
                if threading.current_thread() is not threading.main_thread():
                    tried.set()
                raise

        monkeypatch.setattr(os, "write", try_to_write)
        with monkeypatch.context() as patched:
            patched.setattr(select, "select", find_room)
            say("kept")
            assert tried.wait(10.0)
        text = filled.read1(1 << 20)
        while not text.endswith(b"\n"):
            text += filled.read1(1 << 20)
    assert text.strip(b"x") == b"kept\n"
    os.close(reading)


def test_a_process_that_ends_at_once_shows_its_last_line_in_a_terminal() -> None:
    code = """if True:
        from mlx_ring.host.process import exit_now, unblocked_output

        with unblocked_output():
            print("the last")
            exit_now(3)
    """
    reading, writing = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=writing, stderr=writing, timeout=60.0, check=False
    )
    assert (done.returncode, read_lines(reading, 1)) == (3, ["the last"])
    os.close(reading)
    os.close(writing)
