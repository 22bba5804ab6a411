"""The models that this node keeps for its stages: a folder for each manifest, with files that are mostly holes.

ROOT/DIGEST/manifest.json    whose SHA-256 is DIGEST
ROOT/DIGEST/model/           files of the model's own names and sizes; unwritten ranges are holes
ROOT/DIGEST/journal          which pieces are there and have been checked
ROOT/DIGEST/in-use           locked, shared, by whoever reads; who evicts wants it alone
ROOT/DIGEST/writing          locked by the one who fetches
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
import threading
from collections import defaultdict
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from mlx_ring.core.errors import ModelCorrupt, PlanError, ProtocolError
from mlx_ring.host.private_files import lock_open_file, locked, make_private_folder, may_remove
from mlx_ring.models.weights_manifest import Piece, WeightsManifest, decode_manifest, hash_range, is_digest

log = logging.getLogger(__name__)

PART_BYTES = 8 << 20
"""A larger tensor is fetched, and noted, in parts."""
_SYNC_BYTES = 256 << 20
_DISK_RESERVE_BYTES = 256 << 20
_BLOCK_BYTES = 512
"""Unit of `st_blocks`, on every file system."""
_CANNOT_EVICT = (
    " None is removed, because its file system has no locks that would show their use: end all agents, and remove models "
    "there yourself."
)


class StoredModel:
    """One model's folder in the store. Made by `WeightStore`."""

    def __init__(self, entry: Path, manifest: WeightsManifest) -> None:
        self.entry = entry
        self.manifest = manifest
        self.folder = entry / "model"
        """Folder from which a worker loads once its pieces are present."""
        self._log = PieceLog(entry / "journal")
        self._unsynced_bytes = 0

    @property
    def have(self) -> frozenset[int]:
        """Indexes of the pieces that are present and verified."""
        self._log.read_on()
        return self._log.pieces() | self._empty

    @cached_property
    def _empty(self) -> frozenset[int]:
        return frozenset(index for index, piece in enumerate(self.manifest.pieces) if not piece.nbytes)

    def parts(self, index: int) -> frozenset[int]:
        """Return the present parts of an incomplete piece."""
        return self._log.parts(index)

    def write(self, file: str, offset: int, data: bytes) -> None:
        """Fill some bytes of a file; nothing is noted."""
        descriptor = os.open(self.folder / file, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            while data:
                written = os.pwrite(descriptor, data, offset)
                data, offset = data[written:], offset + written
        finally:
            os.close(descriptor)

    def note_parts(self, parts: Iterable[tuple[int, int]]) -> None:
        """Remember that parts have been written: pieces, and the parts' numbers."""
        self._log.add(f"part {index} {part}" for index, part in parts)

    def check(self, indexes: Iterable[int]) -> set[int]:
        """Hash pieces on disk. Record the right ones as present, and return the others."""
        pieces = {index: self.manifest.pieces[index] for index in indexes}
        right = [
            index
            for index, piece in pieces.items()
            if self.digest_of(piece.file, piece.offset, piece.end) == piece.digest
        ]
        self._log.add(f"piece {index}" for index in right)
        self._unsynced_bytes += self.manifest.nbytes(right)
        if self._unsynced_bytes > _SYNC_BYTES:
            self.sync()
        return pieces.keys() - set(right)

    def digest_of(self, file: str, start: int, end: int) -> str:
        """Return the digest of some bytes of a file on disk."""
        with (self.folder / file).open("rb", buffering=0) as stream:
            return hash_range(stream, start, end - start, lambda _count: None)

    def forget(self, indexes: Iterable[int]) -> None:
        """Remove pieces from the journal, so that they are fetched again."""
        self._log.add(f"forget {index}" for index in indexes)

    def recheck(self) -> None:
        """Hash the pieces again that a power failure may have damaged, and forget the damaged ones."""
        self._log.read_on()
        self.forget(self.check(self._log.unsynced()))
        self.sync()

    def sync(self) -> None:
        """Wait until the disk has what was written, and note it."""
        unsynced = self._log.unsynced()
        for file in sorted({self.manifest.pieces[index].file for index in unsynced}):
            _sync_file(self.folder / file)
        self._log.add([*(f"safe {index}" for index in unsynced)], sync=True)
        self._unsynced_bytes = 0

    def disk_bytes(self) -> int:
        """Return the entry's size on disk in bytes, without holes."""
        return sum(path.stat().st_blocks * _BLOCK_BYTES for path in self.entry.rglob("*") if path.is_file())

    @contextlib.contextmanager
    def in_use(self) -> Generator[None]:
        """Protect it from eviction by any process, for a worker that has not loaded yet or may load again."""
        descriptor = _lock(self.entry / "in-use", fcntl.LOCK_SH)
        try:
            os.utime(self.entry / "in-use")
            yield
        finally:
            os.close(descriptor)

    def lock_for_writing(self) -> int | None:
        """Return a descriptor that holds the write lock until it is closed; None if another holds it."""
        return _try_lock(self.entry / "writing")

    @property
    def last_used_ns(self) -> int:
        mark = self.entry / "in-use"
        return mark.stat().st_mtime_ns if mark.exists() else 0


class WeightStore:
    """All of a node's stored models, within a limit.

    Args:
        root: private to this user; several processes may share it.
        limit_bytes: on disk, for all models together; None: what the disk has.
    """

    def __init__(self, root: Path, limit_bytes: int | None = None) -> None:
        self.root = root
        self.limit_bytes = limit_bytes
        self._open: dict[str, tuple[tuple[int, int], StoredModel]] = {}

    def find(self, digest: str) -> StoredModel | None:
        """Return the model if it is kept here, in part or whole."""
        if not is_digest(digest):
            return None
        entry = self.root / digest
        try:
            mark = _mark(entry / "manifest.json")
            known = self._open.get(digest)
            if known is None or known[0] != mark:
                manifest = decode_manifest((entry / "manifest.json").read_bytes(), digest)
                known = self._open[digest] = (mark, StoredModel(entry, manifest))
        except FileNotFoundError:
            self._open.pop(digest, None)
            return None
        except (OSError, ProtocolError) as error:
            log.warning("%s is no longer a stored model: %s", entry, error)
            return None
        return known[1]

    def models(self) -> list[StoredModel]:
        """Return the models, the least recently used first."""
        names = [path.name for path in self.root.iterdir()] if self.root.is_dir() else []
        found = [model for name in names if (model := self.find(name)) is not None]
        return sorted(found, key=lambda model: model.last_used_ns)

    def hold(self, digest: str, hold: contextlib.ExitStack) -> StoredModel | None:
        """Find a model, and keep it from being removed until `hold` is closed."""
        with locked(self.root):
            model = self.find(digest)
            if model is not None:
                hold.enter_context(model.in_use())
        return model

    def create(self, manifest: WeightsManifest, hold: contextlib.ExitStack | None = None) -> StoredModel:
        """Create the model with all its files in their sizes; existing data is kept. See `hold`."""
        with locked(self.root) as is_alone:
            self._clear_leftovers(is_alone=is_alone)
            model = self.find(manifest.digest)
            if model is None:
                model = self._make(manifest)
            if hold is not None:
                hold.enter_context(model.in_use())
        return model

    def make_room(self, needed_bytes: int, keep: StoredModel | None = None) -> None:
        """Remove unused models, the least recently used first, until `needed_bytes` more bytes fit.

        Raises:
            PlanError: they do not fit.
        """
        if not needed_bytes:
            return
        with locked(self.root) as is_alone:
            self._clear_leftovers(is_alone=is_alone)
            models = self.models()
            others = [model for model in models if keep is None or model.entry != keep.entry]
            while self._excess(models, needed_bytes) > 0:
                evicted = next((model for model in others if self._evict(model)), None)
                if evicted is None:
                    raise PlanError(self._no_room(models, needed_bytes))
                models, others = _without(models, evicted), _without(others, evicted)

    def _excess(self, models: Iterable[StoredModel], needed_bytes: int) -> int:
        """Return the excess bytes, by the limit or by the disk."""
        free = shutil.disk_usage(self.root).free
        excess = needed_bytes + _DISK_RESERVE_BYTES - free
        if self.limit_bytes is None:
            return excess
        return max(excess, sum(model.disk_bytes() for model in models) + needed_bytes - self.limit_bytes)

    def _no_room(self, models: Iterable[StoredModel], needed_bytes: int) -> str:
        used = sum(model.disk_bytes() for model in models)
        limit, remedy = "no limit", ""
        if self.limit_bytes is not None:
            limit, remedy = f"a limit of {self.limit_bytes / 1e9:.2f} GB", ", or raise --weights-limit"
        free = shutil.disk_usage(self.root).free
        return (
            f"{needed_bytes / 1e9:.2f} GB of weights do not fit {self.root}: it has {limit}, {used / 1e9:.2f} GB are "
            f"kept and in use, and the disk has {free / 1e9:.2f} GB free, while {_DISK_RESERVE_BYTES / 1e9:.2f} GB must "
            f"stay free. Free some space{remedy}."
            f"{'' if may_remove(self.root) else _CANNOT_EVICT}"
        )

    def _make(self, manifest: WeightsManifest) -> StoredModel:
        """Create the entry aside and move it into place, so that it exists whole or not at all."""
        entry = self.root / manifest.digest
        if entry.exists():
            _remove(entry)
        aside = Path(tempfile.mkdtemp(prefix=".new-", dir=self.root))
        make_private_folder(aside / "model")
        for name, size in manifest.files.items():
            with (aside / "model" / name).open("wb") as stream:
                stream.truncate(size)
        (aside / "manifest.json").write_bytes(manifest.encoded)
        (aside / "in-use").touch()
        _sync_file(aside / "manifest.json")
        aside.rename(entry)
        return StoredModel(entry, manifest)

    def _evict(self, model: StoredModel) -> bool:
        descriptor = _try_lock(model.entry / "in-use")
        if descriptor is None:
            return False
        try:
            # Without locks, a model that a worker loads would look unused.
            if not lock_open_file(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB):
                return False
            log.info("Removing the stored weights in %s to make room", model.entry)
            _remove(model.entry)
        finally:
            os.close(descriptor)
        return True

    def _clear_leftovers(self, *, is_alone: bool) -> None:
        """Remove leftovers of processes that were killed while they created or removed an entry."""
        for path in self.root.glob(".new-*") if is_alone else ():
            shutil.rmtree(path, ignore_errors=True)


def _mark(path: Path) -> tuple[int, int]:
    """Return a mark that differs if an entry was removed and created again."""
    status = path.stat()
    return status.st_ino, status.st_mtime_ns


def _without(models: list[StoredModel], removed: StoredModel) -> list[StoredModel]:
    return [model for model in models if model is not removed]


def _remove(entry: Path) -> None:
    """Remove it, after moving it away, so that a kill leaves no partial model."""
    aside = Path(tempfile.mkdtemp(prefix=".new-", dir=entry.parent))
    entry.rename(aside / "gone")
    shutil.rmtree(aside, ignore_errors=True)


def _sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _lock(path: Path, kind: int) -> int:
    """Return a descriptor that holds the lock; raise `ModelCorrupt` if the entry was evicted meanwhile."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileNotFoundError as error:
        raise _removed(path.parent) from error
    try:
        lock_open_file(descriptor, kind)
    except BaseException:
        os.close(descriptor)
        raise
    if os.fstat(descriptor).st_nlink == 0:
        os.close(descriptor)
        raise _removed(path.parent)
    return descriptor


def _removed(entry: Path) -> ModelCorrupt:
    return ModelCorrupt(f"{entry} was removed to make room for other models: fetch the weights again.")


def _try_lock(path: Path) -> int | None:
    try:
        return _lock(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None


def missing_bytes(model: StoredModel, wanted: Iterable[int]) -> int:
    """Return the missing bytes of the wanted pieces."""
    have = model.have
    return model.manifest.nbytes(index for index in wanted if index not in have)


def parts_of(piece: Piece) -> list[tuple[int, int]]:
    """Return the ranges of a piece's parts, in its file."""
    starts = range(piece.offset, piece.end, PART_BYTES)
    return [(start, min(start + PART_BYTES, piece.end)) for start in starts]


@dataclass(slots=True)
class _Held:
    """Content of a log of pieces."""

    pieces: set[int] = field(default_factory=set[int])
    parts: defaultdict[int, set[int]] = field(default_factory=lambda: defaultdict(set[int]))
    unsynced: set[int] = field(default_factory=set[int])

    def take(self, line: str) -> None:
        """Apply one line; an invalid one is ignored."""
        word, *numbers = line.split()
        if not all(number.isdecimal() for number in numbers):
            return
        match word, *map(int, numbers):
            case "part", piece, part:
                self.parts[piece].add(part)
            case "piece", piece:
                self.pieces.add(piece)
                self.unsynced.add(piece)
                self.parts.pop(piece, None)
            case "forget", piece:
                self.pieces.discard(piece)
                self.unsynced.discard(piece)
                self.parts.pop(piece, None)
            case "safe", piece:
                self.unsynced.discard(piece)
            case _:
                pass


class PieceLog:
    """Log of a model's pieces, for any thread. Its lines are only appended, so that a killed process cannot damage it.

        part 12 3      of piece 12, part 3 has been written
        piece 12       all of piece 12 is there, and had its digest
        forget 12      it had not, or is to be fetched again
        safe 12        piece 12 would outlive a power cut

    A line counts once it has its newline. Pieces that are not safe are hashed again when the file is opened to
    continue: after a kill they are there, after a power cut perhaps not. Only the
    holder of the model's write lock may add to it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_to = 0
        self._lock = threading.RLock()
        self._held = _Held()
        self.read_on()

    def read_on(self) -> None:
        """Read the entries that any process has added since."""
        with self._lock:
            added = self._added()
            whole = added[: added.rfind(b"\n") + 1]
            self._read_to += len(whole)
            for line in whole.decode("ascii", "replace").splitlines():
                if line.strip():
                    self._held.take(line)

    def pieces(self) -> frozenset[int]:
        """Return the complete pieces in the part of the log read so far."""
        with self._lock:
            return frozenset(self._held.pieces)

    def parts(self, piece: int) -> frozenset[int]:
        """Return the present parts of an incomplete piece."""
        with self._lock:
            return frozenset(self._held.parts.get(piece, ()))

    def unsynced(self) -> list[int]:
        """Return the pieces that a power cut might lose."""
        with self._lock:
            return sorted(self._held.unsynced)

    def _added(self) -> bytes:
        try:
            with self._path.open("rb") as stream:
                stream.seek(self._read_to)
                return stream.read()
        except FileNotFoundError:
            return b""

    def add(self, lines: Iterable[str], *, sync: bool = False) -> None:
        """Add lines; with `sync`, wait until the disk has them."""
        text = "".join(f"{line}\n" for line in lines).encode()
        with self._lock:
            self.read_on()
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                # A line that its writer left unfinished is cut off first.
                os.ftruncate(descriptor, self._read_to)
                os.pwrite(descriptor, text, self._read_to)
                if sync:
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)
            self.read_on()
