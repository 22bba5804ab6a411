"""What was typed after `mlx-ring bench`, as values; what is wrong is one sentence that names the flag."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from mlx_ring.cli.bench.workload import Range
from mlx_ring.core.errors import ConfigError

_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?", re.ASCII)
_MOST_TOKENS = 10_000_000


def whole(flag: str, text: str, low: int, high: int) -> int:
    """A whole number within bounds."""
    try:
        number = int(text)
    except ValueError:
        number = low - 1
    if not low <= number <= high:
        raise ConfigError(f"{flag} is {text}; it must be a whole number from {low} to {high}.")
    return number


def decimal(flag: str, text: str, low: float, high: float) -> float:
    """A number within bounds."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not low <= number <= high:
        raise ConfigError(f"{flag} is {text}; it must be a number from {low:g} to {high:g}.")
    return number


def token_range(flag: str, text: str) -> Range:
    """`128`, or `64-256`."""
    found = _RANGE.fullmatch(text.strip())
    low, high = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= low <= high <= _MOST_TOKENS:
        raise ConfigError(f"{flag} is {text}; it must be a whole number from 1, or a range like 64-256.")
    return Range(low, high)


def address(flag: str, text: str) -> str:
    """Where a server of HTTP may be."""
    try:
        parts = urlsplit(text)
        complete = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        complete = False
    if not complete or not text.isprintable() or " " in text:
        raise ConfigError(f"{flag} is {text!r}; give one like http://127.0.0.1:8100.")
    return text


def one_of(flag: str, text: str, choices: Sequence[str]) -> str:
    if text not in choices:
        raise ConfigError(f"{flag} is {text}; it must be {' or '.join(choices)}.")
    return text


def key(flag: str, text: str | None) -> str | None:
    """What can stand in a header."""
    if text is not None and not (text.isascii() and text.isprintable() and text.strip()):
        raise ConfigError(
            f"{flag} must be printable ASCII characters; a key is neither empty nor has others."
        )
    return text


def output_file(flag: str, path: Path | None, suffixes: Sequence[str] = ()) -> Path | None:
    """A file that can be written, as far as can be told before the load."""
    if path is None:
        return None
    if suffixes and path.suffix.lower() not in suffixes:
        raise ConfigError(f"{flag} is {path}; the file's name must end in {' or '.join(suffixes)}.")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"{flag} is {path}; there is no folder {folder}.")
    if path.is_dir():
        raise ConfigError(f"{flag} is {path}; that is a folder, give a file.")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigError(f"{flag} is {path}; it may not be written.")
    return path
