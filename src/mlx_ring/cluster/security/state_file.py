"""A small JSON file that several processes change, such as a running head and a command."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import BaseModel, ValidationError

from mlx_ring.core.errors import ConfigError
from mlx_ring.host.private_files import locked, read_private, write_private

ContentT = TypeVar("ContentT", bound=BaseModel)

_ADVICE = "restore it from a backup, or remove it and have every machine join again"


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
        mark = _mark(self._path)
        if self._seen is None or self._seen[0] != mark:
            self._seen = (mark, self._parse())
        return self._seen[1]

    @contextmanager
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
        try:
            return self._kind.model_validate_json(text)
        except ValidationError as error:
            raise ConfigError(
                f"{self._path} cannot be parsed ({error.error_count()} errors): {self._advice}."
            ) from error


def _mark(path: Path) -> tuple[int, int, int] | None:
    """Return a mark that differs after every change, because each change creates a new file."""
    try:
        status = os.stat(path)  # noqa: PTH116 - Path.stat costs twice as much, and every RPC calls this
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
