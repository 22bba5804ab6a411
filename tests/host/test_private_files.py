"""Files that only their owner can read."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from mlx_ring.core.errors import ConfigError
from mlx_ring.host import private_files
from mlx_ring.host.private_files import (
    DailyBytes,
    hold,
    is_held,
    locked,
    make_private_folder,
    may_remove,
    read_private,
    release,
    sole_holder,
    try_lock,
    write_private,
)

LOOKS = """
import sys
from pathlib import Path
from mlx_ring.host.private_files import is_held
print("looks", flush=True)
while True:
    is_held(Path(sys.argv[1]))
"""


def test_private_files_are_readable_by_the_owner_only(tmp_path: Path) -> None:
    file = tmp_path / "state" / "node" / "key.pem"
    write_private(file, b"key")
    assert file.read_bytes() == b"key"
    modes = [path.stat().st_mode & 0o777 for path in (file, file.parent, file.parent.parent)]
    assert modes == [0o600, 0o700, 0o700]


def test_a_write_restricts_the_mode_of_an_existing_file(tmp_path: Path) -> None:
    file = tmp_path / "key.pem"
    file.write_bytes(b"old")
    file.chmod(0o644)
    write_private(file, b"new")
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_failed_write_leaves_only_the_old_content(tmp_path: Path) -> None:
    file = tmp_path / "file"
    write_private(file, b"old")
    with pytest.raises(TypeError):
        write_private(file, "no bytes")  # pyright: ignore[reportArgumentType] - to fail in the middle
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert read_private(file) == b"old"


def test_a_missing_file_is_none_and_an_unreadable_one_is_named(tmp_path: Path) -> None:
    assert read_private(tmp_path / "none") is None
    with pytest.raises(ConfigError, match=str(tmp_path)):
        read_private(tmp_path)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--state-dir"):
        make_private_folder(tmp_path / "file" / "folder")


def test_on_a_file_system_without_locks_nobody_holds_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    hold(tmp_path)
    assert not is_held(tmp_path)
    assert not may_remove(tmp_path), "a process may hold it"
    release(tmp_path)
    descriptor = try_lock(tmp_path / "lock")
    assert descriptor is not None
    assert not may_remove(tmp_path / "lock")
    os.close(descriptor)
    with locked(tmp_path / "state") as is_alone:
        assert not is_alone
    refused = pytest.raises(ConfigError, match="lock cannot be locked, because its file system has no locks")
    with refused, sole_holder(tmp_path / "lock", "Another head runs."):
        """It may have another holder."""


def test_only_what_nobody_holds_may_be_removed(tmp_path: Path) -> None:
    assert may_remove(tmp_path)
    hold(tmp_path)
    assert not may_remove(tmp_path)
    release(tmp_path)
    assert may_remove(tmp_path)
    assert may_remove(tmp_path / "missing")


def test_only_one_thread_is_inside_a_locked_folder(tmp_path: Path) -> None:
    counter = tmp_path / "counter"
    counter.write_text("0")

    def count() -> None:
        for _ in range(20):
            with locked(tmp_path):
                counter.write_text(str(int(counter.read_text()) + 1))

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counter.read_text() == "80"


def test_a_lock_is_not_refused_because_other_processes_look_at_it(tmp_path: Path) -> None:
    file = tmp_path / "agent.lock"
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            looking = stack.enter_context(
                subprocess.Popen([sys.executable, "-c", LOOKS, str(file)], stdout=subprocess.PIPE)
            )
            stack.callback(looking.kill)
            assert looking.stdout is not None
            assert looking.stdout.readline()
        for _ in range(2000):
            lock = try_lock(file)
            assert lock is not None
            os.close(lock)


def test_a_held_lock_is_refused_and_seen_by_all_who_look(tmp_path: Path) -> None:
    file = tmp_path / "agent.lock"
    lock = try_lock(file, b"note")
    assert lock is not None
    assert try_lock(file) is None
    assert is_held(file)
    os.close(lock)
    assert not is_held(file)


@pytest.mark.parametrize("fault", [errno.ENOSPC, errno.EROFS])
def test_a_file_that_cannot_be_written_is_named_with_the_reason(
    fault: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> tuple[int, str]:
        raise OSError(fault, os.strerror(fault))

    monkeypatch.setattr(tempfile, "mkstemp", fail)
    with pytest.raises(
        ConfigError, match=f"{tmp_path}/file cannot be written .{os.strerror(fault)}.: free space"
    ):
        write_private(tmp_path / "file", b"new")


def test_a_lock_that_cannot_be_made_is_named_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / ".lock").mkdir()
    with pytest.raises(ConfigError, match=f"{tmp_path}/.lock cannot be written"), locked(tmp_path):
        raise AssertionError


# ---- bytes in a day


def test_all_workers_of_a_folder_share_the_bytes_of_a_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    today = [100]
    monkeypatch.setattr(private_files, "_today", lambda: today[0])
    one, two = (DailyBytes(tmp_path, 1000) for _ in range(2))
    assert one.take(600)
    assert not two.take(600)
    assert (one.is_spent, two.is_spent) == (False, True)
    assert two.take(400)
    assert not DailyBytes(tmp_path, 1000).take(1)
    today[0] = 101
    assert not two.is_spent
    assert two.take(1000)
    (file,) = tmp_path.iterdir()
    assert (file.read_text(), file.stat().st_mode & 0o777) == ("101 1000\n", 0o600)


@pytest.mark.parametrize("text", [b"", b"100", b"x y", b"100 \xff", b"\0" * 70])
def test_damaged_count_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: bytes) -> None:
    monkeypatch.setattr(private_files, "_today", lambda: 100)
    (tmp_path / "written-today").write_bytes(text)
    assert DailyBytes(tmp_path, 1000).take(7)
    assert (tmp_path / "written-today").read_bytes() == b"100 7\n"
