"""Files that only their owner can read."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from mlx_ring.core.errors import ConfigError
from mlx_ring.host.private_files import locked, make_private_folder, read_private, write_private


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
