"""A small JSON file that several processes change: a running head, and commands beside it."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import BaseModel, ValidationError

from mlx_ring.core.errors import ConfigError
from mlx_ring.host.private_files import locked, read_private, write_private

Content = TypeVar("Content", bound=BaseModel)

_ADVICE = "restore it from a backup, or remove it and have every machine join again"


class StateFile(Generic[Content]):
    """What is read is as fresh as the file; a change is made under a lock, and is whole or not at all."""

    def __init__(self, path: Path, kind: type[Content], advice: str = _ADVICE) -> None:
        """`advice` is what to do with a file that cannot be understood."""
        self._path = path
        self._kind = kind
        self._advice = advice
        self._seen: tuple[tuple[int, int, int] | None, Content] | None = None

    def read(self) -> Content:
        """The content now, which is not to be changed; it is parsed again only after the file was.

        Raises:
            ConfigError: the file cannot be read.
        """
        mark = _mark(self._path)
        if self._seen is None or self._seen[0] != mark:
            self._seen = (mark, self._parse())
        return self._seen[1]

    @contextmanager
    def change(self) -> Generator[Content]:
        """The content to be changed; it is written at the end, unless an error leaves first."""
        with locked(self._path.parent):
            content = self._parse()
            yield content
            write_private(self._path, content.model_dump_json(indent=1).encode())

    def _parse(self) -> Content:
        text = read_private(self._path)
        if text is None:
            return self._kind()
        try:
            return self._kind.model_validate_json(text)
        except ValidationError as error:
            raise ConfigError(
                f"{self._path} cannot be understood ({error.error_count()} errors): {self._advice}."
            ) from error


def _mark(path: Path) -> tuple[int, int, int] | None:
    """Differs after every change: each is a new file under the old name."""
    try:
        status = os.stat(path)  # noqa: PTH116 - Path.stat costs twice as much, and every call asks
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
