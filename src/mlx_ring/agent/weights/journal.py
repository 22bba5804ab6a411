"""Journal of a model's pieces on disk: lines are only appended, so a killed process cannot damage it.

    part 12 3      of piece 12, part 3 has been written
    piece 12       all of piece 12 is there, and had its digest
    forget 12      it had not, or is to be fetched again
    safe 12        piece 12 would outlive a power cut

A line counts once it has its newline. Pieces that are not safe are hashed again when the file is opened to
continue: after a kill they are there, after a power cut perhaps not.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(slots=True)
class Held:
    """Content of a journal."""

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


class Journal:
    """Journal file with its content, for any thread. Only the holder of the model's write lock may add to it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_to = 0
        self._lock = threading.RLock()
        self._held = Held()
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
        """Return the complete pieces in the part of the journal read so far."""
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
