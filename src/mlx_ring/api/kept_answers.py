"""Values of the journal, their tables and their encoding: a kept request, the deltas of its answer, and its end."""

from __future__ import annotations

import array
import contextlib
import json
import logging
import sqlite3
import time
import zlib
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from mlx_ring.core import errors
from mlx_ring.core.errors import AnswerCancelled, RequestError, RingError, ServingError
from mlx_ring.core.generation import Delta, RequestTimings
from mlx_ring.core.types import TokenLogprob

log = logging.getLogger(__name__)

VERSION = 2
"""Version of the schema. Version 1 had no models."""
SCHEMA = """
CREATE TABLE IF NOT EXISTS answers (
    number INTEGER PRIMARY KEY, id TEXT UNIQUE NOT NULL, owner TEXT NOT NULL, path TEXT NOT NULL,
    created INTEGER NOT NULL, random BLOB NOT NULL, runs_alone INTEGER NOT NULL, checksum INTEGER NOT NULL, end TEXT,
    ended INTEGER, error TEXT, message TEXT, param TEXT, model TEXT NOT NULL DEFAULT '');
CREATE TABLE IF NOT EXISTS requests (number INTEGER PRIMARY KEY, body BLOB NOT NULL, prompts BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS deltas (number INTEGER PRIMARY KEY, joined BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS log (step INTEGER PRIMARY KEY, deltas BLOB NOT NULL);
CREATE TRIGGER IF NOT EXISTS removal AFTER DELETE ON answers BEGIN
    DELETE FROM requests WHERE number = OLD.number; DELETE FROM deltas WHERE number = OLD.number; END;
"""
SAVE = "INSERT OR REPLACE INTO deltas SELECT number, ?1 FROM answers WHERE number = ?2"
"""Statement that saves all deltas of an answer, unless it was removed."""

EndKind = Literal["completed", "failed", "cancelled"]


@dataclass(frozen=True, slots=True)
class End:
    """End of an answer."""

    kind: EndKind
    at: int
    """Unix seconds."""
    error: str = ""
    """Name of the error's class, if it failed."""
    message: str = ""
    param: str | None = None


@dataclass(frozen=True, slots=True)
class KeptRequest:
    """HTTP request whose answer is kept."""

    id: str
    """Id of its answer, which clients know."""
    owner: str
    """Digest of the API key that sent it; empty without one."""
    path: str
    created: int
    """Unix seconds."""
    random: bytes
    """Source of the answer's ids and of seeds that the request leaves open."""
    runs_alone: bool
    """True if the answer is computed whether or not a client reads it."""
    model: str = ""
    """Digest of the model that answers it; empty if it is unknown."""


@dataclass(frozen=True, slots=True)
class KeptAnswer:
    """Kept request, with its answer so far."""

    number: int
    """Number in the database; 0 if it is not there yet."""
    request: KeptRequest
    prompts: tuple[tuple[int, ...], ...]
    deltas: tuple[bytes, ...]
    end: End | None
    """None: it has not ended, but may be interrupted."""


@dataclass(frozen=True, slots=True)
class Totals:
    """Contents of the journal."""

    bytes: int
    answers: int
    ended: int


# ---- ends


def failed(error: RingError) -> End:
    """Return the end of an answer that failed."""
    param = error.param if isinstance(error, RequestError) else None
    return End("failed", int(time.time()), type(error).__name__, str(error), param)


def error_of(end: End) -> RingError | None:
    """Return the error that ended an answer; None if there is none."""
    match end.kind:
        case "completed":
            return None
        case "cancelled":
            return AnswerCancelled("The answer was cancelled.")
        case "failed":
            kind = getattr(errors, end.error, ServingError)
            try:
                error: RingError = kind(end.message)
            except TypeError:
                # It needs numbers that are not kept.
                error = (
                    RequestError(end.message) if issubclass(kind, RequestError) else ServingError(end.message)
                )
            if isinstance(error, RequestError):
                error.param = end.param
            return error


# ---- deltas

_Scored = list[Any]
_ENCODE = json.JSONEncoder(separators=(",", ":")).encode


def encode_delta(index: int, delta: Delta) -> bytes:
    """Encode a delta of the sequence with that index. A prompt's vector is left out, because chats have none."""
    timings = delta.timings
    values: list[object] = [
        *(index, delta.token_ids, delta.pieces, delta.prompt_tokens, delta.completion_tokens),
        *(delta.cached_tokens, delta.finish_reason, delta.stop_match),
        list(map(_encode_logprob, delta.logprobs)),
        None if delta.prompt_logprobs is None else list(map(_encode_logprob, delta.prompt_logprobs)),
        None if timings is None else (timings.queue_s, timings.prefill_s, timings.decode_s),
    ]
    while not values[-1]:
        values.pop()
    return _ENCODE(values).encode()


def decode_delta(data: bytes) -> tuple[int, Delta]:
    """Return the index and the delta that `encode_delta` encoded."""
    values: list[Any] = json.loads(data)
    values += [None] * (11 - len(values))
    index, tokens, pieces, prompt, completion, cached, reason, stop_match, logprobs, scored, timings = values
    return index or 0, Delta(
        text="".join(pieces or ()),
        token_ids=tuple(tokens or ()),
        logprobs=tuple(_decode_logprob(each) for each in logprobs or ()),
        prompt_tokens=prompt or 0,
        completion_tokens=completion or 0,
        cached_tokens=cached or 0,
        finish_reason=reason,
        stop_match=stop_match,
        prompt_logprobs=None if scored is None else tuple(map(_decode_scored, scored)),
        timings=None if timings is None else RequestTimings(*timings),
        pieces=tuple(pieces or ()),
    )


def _encode_logprob(scored: TokenLogprob | None) -> _Scored | None:
    return None if scored is None else [scored.token, scored.logprob, scored.top]


def _decode_logprob(scored: _Scored) -> TokenLogprob:
    token, logprob, top = scored
    return TokenLogprob(token, logprob, tuple((other, score) for other, score in top))


def _decode_scored(scored: _Scored | None) -> TokenLogprob | None:
    return None if scored is None else _decode_logprob(scored)


def by_token(delta: Delta) -> Iterator[Delta]:
    """Yield a delta as one for each of its tokens. Only the last has its end."""
    last = len(delta.token_ids) - 1
    if last < 1:
        yield delta
        return
    for place, token in enumerate(delta.token_ids):
        is_last = place == last
        pieces = delta.pieces[place:] if is_last else delta.pieces[place : place + 1]
        yield replace(
            delta,
            text="".join(pieces),
            token_ids=(token,),
            logprobs=delta.logprobs[place : place + 1],
            completion_tokens=delta.completion_tokens - last + place,
            finish_reason=delta.finish_reason if is_last else None,
            stop_match=delta.stop_match if is_last else None,
            prompt_logprobs=delta.prompt_logprobs if place == 0 else None,
            timings=delta.timings if is_last else None,
            pieces=pieces,
        )


# ---- on the disk


def join_deltas(deltas: Iterable[bytes]) -> bytes:
    """Return deltas as one value: a line for each, with its checksum."""
    return b"".join(b"%b\n" % checked(delta) for delta in deltas)


def checked(delta: bytes) -> bytes:
    """Return a delta behind its checksum."""
    return b"%08x%b" % (zlib.crc32(delta), delta)


def whole_deltas(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the deltas of lines up to the first damaged one."""
    for line in lines:
        if checked(line[8:]) != line:
            return
        yield line[8:]


def logged_deltas(rows: Iterable[bytes]) -> dict[int, list[bytes]]:
    """Return the lines of a log by the number of their answers. Each has a delta behind its place."""
    found: dict[int, list[bytes]] = {}
    for row in rows:
        for line in row.splitlines():
            number, _, rest = line.partition(b" ")
            if number.isdigit():
                found.setdefault(int(number), []).append(rest)
    return found


def with_logged(joined: bytes, logged: Iterable[bytes]) -> bytes:
    """Return joined deltas with those that were logged since."""
    lines = joined.splitlines()
    for entry in logged:
        place, _, line = entry.partition(b" ")
        # A failed write leaves a gap: deltas after it are computed again.
        if place.isdigit() and int(place) == len(lines):
            lines.append(line)
    return b"".join(b"%b\n" % line for line in lines)


def checksum_of(request: KeptRequest, body: bytes, prompts: bytes) -> int:
    """Return the checksum of a request, the JSON of its body and its encoded prompts."""
    parts = (request.id, request.owner, request.path, request.created, request.random, request.runs_alone)
    # Earlier versions kept no model.
    parts += (request.model,) * bool(request.model)
    return zlib.crc32(prompts, zlib.crc32(body, zlib.crc32(repr(parts).encode())))


def encode_prompts(prompts: Iterable[Sequence[int]]) -> bytes:
    """Encode prompts as int32: the number of each one's tokens, then the tokens. A repeated prompt is a -1."""
    encoded, last = array.array("i"), None
    for prompt in prompts:
        if prompt == last:
            encoded.append(-1)
        else:
            encoded.append(len(prompt))
            encoded.extend(prompt)
        last = prompt
    return encoded.tobytes()


def decode_prompts(data: bytes) -> tuple[tuple[int, ...], ...]:
    """Return the prompts that `encode_prompts` encoded."""
    encoded = array.array("i")
    encoded.frombytes(data)
    prompts: list[tuple[int, ...]] = []
    at = 0
    while at < len(encoded):
        length, at = encoded[at], at + 1
        if length < 0:
            prompts.append(prompts[-1])
        else:
            prompts.append(tuple(encoded[at : at + length]))
            at += length
    return tuple(prompts)


# ---- tables


def used_pages(db: sqlite3.Connection) -> int:
    """Return the number of pages that hold something."""
    pages: int = db.execute("PRAGMA page_count").fetchone()[0]
    free: int = db.execute("PRAGMA freelist_count").fetchone()[0]
    return pages - free


@contextlib.contextmanager
def transaction(db: sqlite3.Connection) -> Generator[None]:
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            db.execute("ROLLBACK")
        raise


@contextlib.contextmanager
def unless_full() -> Generator[None]:
    """Leave for later what a full disk has no room for."""
    try:
        yield
    except sqlite3.OperationalError as error:
        if "full" not in str(error):
            raise
        log.warning("The journal can keep no more answers until there is room: %s", error)


def check_version(db: sqlite3.Connection) -> None:
    """Refuse the file of another version as damaged, convert one of the version before, and mark a new one."""
    is_new = db.execute("PRAGMA schema_version").fetchone()[0] == 0
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if not is_new and version not in (1, VERSION):
        raise sqlite3.DatabaseError("it is of another version")
    if version != VERSION:
        with transaction(db):
            if not is_new:
                db.execute("ALTER TABLE answers ADD COLUMN model TEXT NOT NULL DEFAULT ''")
            db.execute(f"PRAGMA user_version = {VERSION}")


def grow_ahead(db: sqlite3.Connection, spare: int, most: int) -> None:
    """Keep half of so many pages of the file free, unless it would have more than `most`.

    SQLite can then copy its log into the file also after something else fills the disk.
    """
    pages, free = (db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count"))
    if free >= spare // 2 or pages + spare > most:
        return
    with unless_full():
        with transaction(db):
            size = db.execute("PRAGMA page_size").fetchone()[0]
            db.execute("INSERT INTO requests VALUES (0, zeroblob(?), x'')", (spare * size,))
            db.execute("DELETE FROM requests WHERE number = 0")
        db.execute("PRAGMA wal_checkpoint(RESTART)").fetchall()


def fold_log(db: sqlite3.Connection) -> None:
    """Save the logged deltas of each answer that has not ended, and empty the log."""
    more = logged_deltas(row for (row,) in db.execute("SELECT deltas FROM log ORDER BY step"))
    if not more:  # a full disk has no room for a write
        return
    with transaction(db):
        for number, entries in more.items():
            open_ = db.execute("SELECT 1 FROM answers WHERE number = ? AND end IS NULL", (number,)).fetchone()
            if open_ is None:
                continue
            found = db.execute("SELECT joined FROM deltas WHERE number = ?", (number,)).fetchone()
            joined = with_logged(b"" if found is None else found[0], entries)
            db.execute("INSERT OR REPLACE INTO deltas VALUES (?, ?)", (number, joined))
        db.execute("DELETE FROM log")
