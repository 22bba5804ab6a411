"""Records of heads and agents on this machine, and the end of these processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.eventually import eventually

from mlx_ring.core.errors import ConfigError
from mlx_ring.core.folders import running_folder
from mlx_ring.host import running
from mlx_ring.host.machine import make_run_folder
from mlx_ring.host.private_files import try_lock
from mlx_ring.host.running import (
    Running,
    arguments_digest,
    end_running,
    note_absence,
    own_place,
    record_file,
    recorded,
    remove_abandoned,
    running_here,
    start_mark,
)

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts start times from its boot")
RUN = """
import sys, time
from pathlib import Path
from mlx_ring.host.running import recorded
with recorded(Path(sys.argv[1]), sys.argv[2], "http://here"):
    print("up", flush=True)
    time.sleep(600)
"""


@contextmanager
def started(state: Path, kind: str) -> Generator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, str(state), kind], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        yield process
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def test_a_record_says_why_the_machine_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "_OURS", ("python", "pytest"))
    with recorded(tmp_path, "agent", ending_s=3.0):
        for why in ("its battery is low", ""):
            note_absence(tmp_path, why)
            assert [(found.away, found.ending_s) for found in running_here(tmp_path)] == [(why, 3.0)]
    note_absence(tmp_path, "it has ended")
    assert running_here(tmp_path) == []


OWN = """
import sys, time
from pathlib import Path
from mlx_ring.host.machine import make_run_folder
with make_run_folder(Path(sys.argv[1])) as folder:
    print(folder, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def short_folder() -> Generator[Path]:
    """Return a folder whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="own-", dir="/tmp") as folder:
        yield Path(folder)


def killed_owner(parent: Path) -> Path:
    """Return a folder for sockets whose process was killed."""
    with subprocess.Popen([sys.executable, "-c", OWN, parent], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        printed = process.stdout.readline().strip()
        process.kill()
    # A process that failed printed nothing, and an empty path is the working folder.
    assert printed, "the owner made no folder"
    assert Path(printed).parent == parent
    return Path(printed)


def test_the_next_start_removes_the_folder_of_a_killed_process(short_folder: Path) -> None:
    abandoned = killed_owner(short_folder)
    with make_run_folder(short_folder) as own, make_run_folder(short_folder) as other:
        assert not abandoned.exists()
        assert remove_abandoned(short_folder) == []
        assert own.is_dir()
        assert other.is_dir()
    assert list(short_folder.iterdir()) == []


def test_what_is_in_a_folder_for_sockets_never_grows_old(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "_FRESH_S", 0.01)
    with make_run_folder(short_folder) as folder, socket.socket(socket.AF_UNIX) as listener:
        (folder / "a0").mkdir()
        listener.bind(str(folder / "a0" / "agent.sock"))
        paths = [folder, folder / "owner.json", folder / "a0", folder / "a0" / "agent.sock"]
        for path in paths:
            os.utime(path, (1.0, 1.0))
        eventually(lambda: min(min(path.stat()[7:9]) for path in paths) > 1)


def test_a_folder_that_disappears_while_it_is_walked_does_not_let_the_others_grow_old(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scan = os.scandir

    def scan_unless_removed(path: str | Path = ".") -> Any:
        if str(path).endswith("removed"):
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return scan(path)

    with make_run_folder(short_folder) as folder:
        (folder / "removed").mkdir()
        monkeypatch.setattr(os, "scandir", scan_unless_removed)
        monkeypatch.setattr(running, "_FRESH_S", 0.01)
        with running.kept_fresh(folder):
            os.utime(folder / "owner.json", (1.0, 1.0))
            eventually(lambda: (folder / "owner.json").stat().st_mtime > 1)
        monkeypatch.undo()


def test_a_parent_too_long_for_sockets_is_refused(short_folder: Path) -> None:
    parent = short_folder / ("x" * 64)
    message = r"--run-dir is .*x, whose path is too long for sockets in it: use one of at most \d+ bytes"
    with pytest.raises(ConfigError, match=message), make_run_folder(parent):
        """The folder must not be made."""
    assert not parent.exists()


def test_folders_without_a_mark_or_with_another_process_s_lock_stay(short_folder: Path) -> None:
    (short_folder / "mlx-ring-plain").mkdir()
    (short_folder / "mlx-ring-file").touch()
    abandoned = killed_owner(short_folder)
    (short_folder / "mlx-ring-link").symlink_to(abandoned)
    # A lock shows that the owner lives, though its number means nothing here, as in another container.
    lock = try_lock(abandoned / "owner.json")
    assert lock is not None
    assert remove_abandoned(short_folder) == []
    os.close(lock)
    assert remove_abandoned(short_folder) == [abandoned]
    assert {path.name for path in short_folder.iterdir()} == {
        "mlx-ring-plain",
        "mlx-ring-file",
        "mlx-ring-link",
    }


def test_a_reused_process_number_does_not_protect_a_folder(short_folder: Path) -> None:
    abandoned = killed_owner(short_folder)
    mark = abandoned / "owner.json"
    record = json.loads(mark.read_text()) | {"pid": os.getpid()}
    mark.write_text(json.dumps(record))
    assert remove_abandoned(short_folder) == [abandoned]


def test_the_next_start_deletes_the_records_of_killed_processes(tmp_path: Path) -> None:
    with started(tmp_path, "agent"):
        with started(tmp_path, "head") as process:
            process.kill()
            process.wait()
        with recorded(tmp_path, "head"):
            names = {path.name for path in running_folder(tmp_path).iterdir()}
    assert not [name for name in names if name.startswith(f"head-{process.pid}")]
    assert len(names) == 2


def write(state: Path, record: Running) -> None:
    record_file(state, record).write_text(json.dumps(asdict(record)))


def test_running_processes_are_listed_with_their_arguments(tmp_path: Path) -> None:
    with started(tmp_path, "head") as process:
        (found,) = running_here(tmp_path)
        assert (found.kind, found.pid, found.url) == ("head", process.pid, "http://here")
        assert found.arguments == arguments_digest([str(tmp_path), "head"])


def test_an_agents_digest_ignores_the_head_address() -> None:
    agents = {arguments_digest(["join", head, "--listen", "[::]"]) for head in ("10.0.0.1:50051", "a:50051")}
    assert len(agents) == 1
    assert arguments_digest(["join", "--listen", "[::]"]) in agents
    assert arguments_digest(["join", "a", "--listen", "10.0.0.2"]) not in agents
    assert arguments_digest(["serve", "demo"]) != arguments_digest(["serve", "demo-moe"])


def test_killed_processes_are_dropped(tmp_path: Path) -> None:
    with started(tmp_path, "head") as process:
        process.kill()
        process.wait()
        assert list(running_folder(tmp_path).iterdir())
        assert running_here(tmp_path) == []
        assert not list(running_folder(tmp_path).iterdir())


def test_head_and_agent_are_ended_only_once(tmp_path: Path) -> None:
    with started(tmp_path, "agent") as agent, started(tmp_path, "head") as head:
        assert end_running(tmp_path) == [
            f"The head has ended (process {head.pid}).",
            f"The agent has ended (process {agent.pid}).",
        ]
        assert (head.wait(), agent.wait()) == (-signal.SIGTERM, -signal.SIGTERM)
        assert end_running(tmp_path) == []


@linux
def test_a_process_is_recognized_after_a_clock_change(tmp_path: Path) -> None:
    with started(tmp_path, "agent") as process:
        (record,) = running_here(tmp_path)
        # The start time that Linux reports moves with the clock.
        before = replace(record, started_s=record.started_s - 3600)
        write(tmp_path, before)
        assert running_here(tmp_path) == [before]
        assert end_running(tmp_path) == [f"The agent has ended (process {process.pid})."]


@linux
def test_a_process_of_an_earlier_boot_is_not_recognized(tmp_path: Path) -> None:
    with started(tmp_path, "agent"):
        (record,) = running_here(tmp_path)
        write(tmp_path, replace(record, start_mark=f"another-boot {record.start_mark.split()[1]}"))
        assert running_here(tmp_path) == []


def test_a_start_time_from_the_clock_may_differ_slightly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unmarked(_pid: int) -> str:
        return ""

    monkeypatch.setattr("mlx_ring.host.running.start_mark", unmarked)
    with started(tmp_path, "agent"):
        (record,) = running_here(tmp_path)
        write(tmp_path, replace(record, started_s=record.started_s - 1))
        assert len(running_here(tmp_path)) == 1
        write(tmp_path, replace(record, started_s=record.started_s - 3600))
        assert running_here(tmp_path) == []


def test_the_start_mark_is_read_for_any_process_name(tmp_path: Path) -> None:
    program = tmp_path / "a) (b 1 2 3"
    program.symlink_to(sys.executable)
    process = subprocess.Popen([program, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert start_mark(process.pid) == start_mark(process.pid)
        assert not start_mark(process.pid) or int(start_mark(process.pid).split()[1]) > 0
    finally:
        process.kill()
        process.communicate()


@linux
def test_a_process_with_a_reused_pid_is_left_alone(tmp_path: Path) -> None:
    with started(tmp_path, "agent") as process:
        (record,) = running_here(tmp_path)
        boot, ticks = record.start_mark.split()
        other = replace(record, start_mark=f"{boot} {int(ticks) - 1}")
        write(tmp_path, other)
        assert end_running(tmp_path) == []
        assert process.poll() is None


def test_another_program_is_left_alone(tmp_path: Path) -> None:
    process = subprocess.Popen(["sleep", "600"])
    try:
        record = Running("agent", process.pid, psutil.Process(process.pid).create_time(), "")
        running_folder(tmp_path).mkdir()
        (running_folder(tmp_path) / "agent-1.json").write_text(json.dumps(asdict(record)))
        assert end_running(tmp_path) == []
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


@linux
def test_records_of_other_machines_and_containers_are_neither_listed_nor_deleted(tmp_path: Path) -> None:
    with started(tmp_path, "agent") as process:
        (record,) = running_here(tmp_path)
        machine, boot, namespace = record.place.split()
        foreign = {
            f"{machine} {boot} pid:[1]",  # a container
            f"- {boot} pid:[1]",
            f"another-machine another-boot {namespace}",
            f"- another-boot {namespace}",
        }
        for place in foreign:
            write(tmp_path, replace(record, place=place))
        assert running_here(tmp_path) == [record]
        process.kill()
        process.wait()
        assert running_here(tmp_path) == []
        assert len(list(running_folder(tmp_path).iterdir())) == len(foreign)


@linux
def test_a_process_does_not_touch_the_record_of_one_with_its_number_in_a_container(tmp_path: Path) -> None:
    with recorded(tmp_path, "head", "http://here"):
        (own,) = running_folder(tmp_path).iterdir()
        there = Running("head", os.getpid(), 1.0, "", "http://there", place="another machine and namespace")
        write(tmp_path, there)
        assert json.loads(own.read_text())["url"] == "http://here"
    (left,) = running_folder(tmp_path).iterdir()
    assert json.loads(left.read_text())["url"] == "http://there"


@linux
def test_records_of_ended_processes_here_are_deleted_also_after_another_boot_and_from_before_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "machine-id").write_text("abc\n")
    monkeypatch.setattr(running, "_MACHINE_ID", tmp_path / "machine-id")
    _, boot, namespace = own_place().split()
    ended = Running("head", 2**30, 1.0, "")
    for place in ("", f"abc {boot} {namespace}", f"other-id {boot} {namespace}", f"abc before {namespace}"):
        running_folder(tmp_path).mkdir(exist_ok=True)
        write(tmp_path, replace(ended, place=place))
        assert running_here(tmp_path) == []
        assert not list(running_folder(tmp_path).iterdir()), place


@pytest.mark.parametrize("dropped", [("place",), ("place", "away", "start_mark", "ending_s")])
def test_records_of_earlier_and_later_versions_are_read(tmp_path: Path, dropped: tuple[str, ...]) -> None:
    with started(tmp_path, "agent") as process:
        (file,) = running_folder(tmp_path).iterdir()
        content = json.loads(file.read_text())
        earlier = {name: value for name, value in content.items() if name not in dropped}
        for text in (earlier, content | {"a_later_field": 1}):
            file.write_text(json.dumps(text))
            assert [found.pid for found in running_here(tmp_path)] == [process.pid]


def test_a_record_that_cannot_be_deleted_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, **_: object) -> None:
        raise OSError(30, "Read-only file system", str(path))

    running_folder(tmp_path).mkdir()
    write(tmp_path, Running("head", 2**30, 1.0, ""))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        assert running_here(tmp_path) == []
    assert list(running_folder(tmp_path).iterdir())


def test_a_folder_of_records_that_cannot_be_read_is_named_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> Iterator[Path]:
        raise PermissionError(13, "Permission denied", str(path))

    assert running_here(tmp_path / "nothing") == []
    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(
        ConfigError, match=r"running cannot be read \(Permission denied\): correct its .*--state-dir"
    ):
        running_here(tmp_path)
    note_absence(tmp_path, "its battery is low")
    monkeypatch.undo()


def test_a_process_is_recorded_beside_records_that_cannot_be_read(tmp_path: Path) -> None:
    (running_folder(tmp_path) / "head-1.json").mkdir(parents=True)  # reading it is an error, also for root
    with recorded(tmp_path, "agent"):
        assert list(running_folder(tmp_path).glob(f"agent-{os.getpid()}*.json"))
    with pytest.raises(ConfigError, match=r"head-1.json cannot be read"):
        running_here(tmp_path)


def test_unreadable_records_are_ignored(tmp_path: Path) -> None:
    running_folder(tmp_path).mkdir()
    for number, text in enumerate(("", "null", "[]", '{"pid": 1}', "\x00")):
        (running_folder(tmp_path) / f"head-{number}.json").write_text(text)
    assert running_here(tmp_path) == []


def test_a_process_that_ends_leaves_no_record(tmp_path: Path) -> None:
    with recorded(tmp_path, "agent"):
        (record,) = running_folder(tmp_path).iterdir()
        assert json.loads(record.read_text())["pid"] == os.getpid()
    assert not list(running_folder(tmp_path).iterdir())


def test_a_state_folder_that_is_a_file_hides_no_error(tmp_path: Path) -> None:
    state = tmp_path / "file"
    state.write_text("")
    with pytest.raises(ConfigError, match="99 stages"), recorded(state, "head"):
        raise ConfigError("99 stages were requested.")
