"""Files that only their owner may read, and that several processes may change, and locks on files and folders.

A file is written whole or not at all.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import tempfile
import time
from collections.abc import Generator
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from mlx_ring.core.errors import ConfigError

if TYPE_CHECKING:
    from pydantic import BaseModel

ContentT = TypeVar("ContentT", bound="BaseModel")

_OWNER_ONLY = 0o600
_OWNER_FOLDER = 0o700
_LOOK_S, _LOOKS = 0.001, 1000
"""Pause between attempts to lock a file at which others look, and their number."""
_COUNT_FILE = "written-today"
_DAY_S = 86400
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
"""Errors of file systems that have no locks."""
_ADVICE = "restore it from a backup, or remove it and have every machine join again"


def make_private_folder(folder: Path, flag: str = "--state-dir") -> Path:
    """Make the folder if it is missing, and its parents, closed to all other users. Return it.

    `flag` is the option that chooses another one.

    Raises:
        ConfigError: it cannot be made, or belongs to another user.
    """
    try:
        for path in reversed([folder, *folder.parents]):
            path.mkdir(exist_ok=True, mode=_OWNER_FOLDER)
        folder.chmod(_OWNER_FOLDER)
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be created as a private folder ({error.strerror}): choose another with {flag}."
        ) from error
    return folder


def write_private(path: Path, content: bytes) -> None:
    """Replace the file atomically: readers see the old content or the new, also after a power cut.

    Raises:
        ConfigError: it cannot be written.
    """
    make_private_folder(path.parent)
    with _writing(path):
        # mkstemp gives mode 0600 from the first moment on.
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def _writing(path: Path) -> Generator[None]:
    """Raise errors of the operating system, such as a full disk, as `ConfigError`s that name the file."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written ({error.strerror}): free space on its disk, or correct its permissions."
        ) from error


def _open_lock(file: Path) -> int:
    with _writing(file):
        return os.open(file, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, _OWNER_ONLY)


def read_private(path: Path) -> bytes | None:
    """Return the content; None if there is no such file.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): correct its permissions.") from error


@contextlib.contextmanager
def locked(folder: Path) -> Generator[bool]:
    """Admit only one process, and one thread of it, for a folder. The lock ends with its holder.

    Yields False on a file system without locks, where others are not kept out.
    """
    make_private_folder(folder)
    descriptor = _open_lock(folder / ".lock")
    try:
        yield lock_open_file(descriptor)
    finally:
        os.close(descriptor)


def lock_open_file(file: int | FileIO, kind: int = fcntl.LOCK_EX) -> bool:
    """Call `fcntl.flock`. Return False on a file system without locks, such as some mounts of NFS, SMB and Lustre.

    Raises:
        BlockingIOError: another process holds it, and `kind` says not to wait.
        OSError: it cannot be locked.
    """
    try:
        fcntl.flock(file, kind)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
    return True


def try_lock(file: Path, note: bytes = b"") -> int | None:
    """Return a descriptor that holds the file's lock until it is closed or its process ends; None if another holds it.

    Others can read the holder's note in the file. On a file system without locks, nobody holds one.
    """
    make_private_folder(file.parent)
    descriptor = _open_lock(file)
    if not _takes(descriptor):
        os.close(descriptor)
        return None
    if note:
        with contextlib.suppress(OSError):  # a full disk
            os.ftruncate(descriptor, 0)
            os.write(descriptor, note)
    return descriptor


@contextlib.contextmanager
def sole_holder(file: Path, refusal: str, note: bytes = b"") -> Generator[None]:
    """Hold the file's lock, with a note as of `try_lock`.

    Raises:
        ConfigError: another process holds it, which `refusal` says, or the file system has no locks.
    """
    descriptor = try_lock(file, note)
    if descriptor is None:
        raise ConfigError(refusal)
    try:
        if not lock_open_file(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB):
            raise ConfigError(
                f"{file} cannot be locked, because its file system has no locks: choose a folder on another disk with "
                "--state-dir."
            )
        yield
    finally:
        os.close(descriptor)


_held: dict[Path, int] = {}
"""Open descriptors of folders that this process holds."""


def hold(folder: Path) -> None:
    """Hold a folder with others until `release` or the end of this process. Does nothing on a file system without locks."""
    if folder not in _held:
        with contextlib.suppress(OSError):
            _held[folder] = descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
            fcntl.flock(descriptor, fcntl.LOCK_SH)


def release(folder: Path) -> None:
    """Hold a folder no longer."""
    if folder in _held:
        os.close(_held.pop(folder))


def is_held(path: Path) -> bool:
    """Report whether a process holds a folder, or locks a file. This process counts too.

    On a file system without locks, nobody is seen to. Ask `may_remove` before something is removed.
    """
    return _looks_held(path) is True


def may_remove(path: Path) -> bool:
    """Report whether surely no process holds a folder, or locks a file. False also where that cannot be known."""
    return _looks_held(path) is False


def _looks_held(path: Path) -> bool | None:
    """Report whether a process holds it; None if that cannot be known."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    try:
        # Shared locks hold a folder. A file's is not, so that processes which look at it do not see each other.
        kind = fcntl.LOCK_EX if path.is_dir() else fcntl.LOCK_SH
        return False if lock_open_file(descriptor, kind | fcntl.LOCK_NB) else None
    except OSError:
        return True
    finally:
        os.close(descriptor)


def _takes(descriptor: int) -> bool:
    """Lock a file; return False if a process holds it. One that only looks whether it is held does so for a moment."""
    for _ in range(_LOOKS):
        if _locks(descriptor, fcntl.LOCK_EX):
            return True
        if not _locks(descriptor, fcntl.LOCK_SH):
            return False
        lock_open_file(descriptor, fcntl.LOCK_UN)
        time.sleep(_LOOK_S)
    return False


def _locks(descriptor: int, kind: int) -> bool:
    """Lock it, unless that would have to wait; return True if it is locked."""
    try:
        lock_open_file(descriptor, kind | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


class StateFile(Generic[ContentT]):
    """A JSON file whose reads are always current and whose changes are locked and atomic."""

    def __init__(self, path: Path, kind: type[ContentT], advice: str = _ADVICE) -> None:
        """Open the file of this kind; `advice` says what to do if it cannot be parsed."""
        self._path = path
        self._kind = kind
        self._advice = advice
        self._seen: tuple[tuple[int, int, int] | None, ContentT] | None = None

    def read(self) -> ContentT:
        """Return the current content, read-only; parse the file again only after a change.

        Raises:
            ConfigError: a file that cannot be parsed.
        """
        mark = file_mark(self._path)
        if self._seen is None or self._seen[0] != mark:
            self._seen = (mark, self._parse())
        return self._seen[1]

    @contextlib.contextmanager
    def change(self) -> Generator[ContentT]:
        """Yield the content to change, and write it at the end unless an error occurs."""
        with locked(self._path.parent):
            content = self._parse()
            yield content
            write_private(self._path, content.model_dump_json(indent=1).encode())

    def _parse(self) -> ContentT:
        text = read_private(self._path)
        if text is None:
            return self._kind()
        from pydantic import ValidationError  # workers lock folders, and need no pydantic

        try:
            return self._kind.model_validate_json(text)
        except ValidationError as error:
            raise ConfigError(
                f"{self._path} cannot be parsed ({error.error_count()} errors): {self._advice}."
            ) from error


def file_mark(path: Path) -> tuple[int, int, int] | None:
    """Return a mark that differs after every change, because each change creates a new file."""
    try:
        status = os.stat(path)  # noqa: PTH116 - Path.stat costs twice as much, and every RPC calls this
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


class DailyBytes:
    """Bytes that all workers of a machine may write into a folder in a day, because writing wears flash memory.

    A small file in the folder has the day, of UTC, and the bytes that were written in it.
    """

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self._folder, self._limit = folder, limit_bytes
        self._spent_on = -1
        """Last day on which something did not fit."""

    @property
    def limit_bytes(self) -> int:
        return self._limit

    @property
    def is_spent(self) -> bool:
        """True if something did not fit today."""
        return self._spent_on == _today()

    def take(self, nbytes: int) -> bool:
        """Count bytes that are about to be written; return False if the day's bytes do not suffice.

        Raises:
            OSError: the file cannot be written.
        """
        day = _today()
        is_taken = self._add(day, nbytes)
        if not is_taken:
            self._spent_on = day
        return is_taken

    def give_back(self, nbytes: int) -> None:
        """Count bytes no longer, because they could not be written."""
        with contextlib.suppress(OSError):
            self._add(_today(), -nbytes)

    def _add(self, day: int, nbytes: int) -> bool:
        """Add to the bytes of a day; return False if the sum would exceed the limit. Raises `OSError`."""
        descriptor = os.open(self._folder / _COUNT_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with open(descriptor, "r+b") as file:  # noqa: PTH123 - an open file
            lock_open_file(file.fileno())
            written = max(0, _written_on(day, file.read(64)) + nbytes)
            if written > self._limit:
                return False
            text = b"%d %d\n" % (day, written)
            file.seek(0)
            file.write(text)
            file.truncate(len(text))
        return True


def _today() -> int:
    return int(time.time()) // _DAY_S


def _written_on(day: int, text: bytes) -> int:
    """Return the bytes of a day, by the content of the file; 0 if that is of another day or damaged."""
    numbers = text.split()
    is_known = len(numbers) == 2 and all(number.isdigit() for number in numbers)  # noqa: PLR2004 - day and bytes
    return int(numbers[1]) if is_known and int(numbers[0]) == day else 0
