"""Request bodies: JSON with limits, checked against a schema, with one sentence for each error.

The Content-Type is ignored.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar, cast

from pydantic import ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationError, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError
from pydantic_core.core_schema import no_info_plain_validator_function
from starlette.requests import Request

from mlx_ring.api.openapi import DescribedModel, has_no_effect
from mlx_ring.core.errors import BodyTooLarge, BodyTooSlow, RequestError

T = TypeVar("T")
Path = tuple[int | str, ...]

_SHOWN = 60
"""Number of characters of a wrong value that an error shows."""
_SUBJECT = re.compile(r"^(Input|String|List|Dictionary|Value|Number|Tuple|Object)\b")
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
_KINDS: Mapping[str, str] = {
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "an object"),
    "list_type": "a list",
}
"""Expected values by pydantic's name of the error, for errors whose text in pydantic is about Python."""


def first_error(error: ValidationError, body: object) -> RequestError:
    """Return the first error of a body, with the name of its field."""
    detail = error.errors(include_url=False)[0]
    path = join_path(_real_path(detail, body))
    return RequestError(_sentence(detail, path), param=path or None)


def _real_path(detail: ErrorDetails, body: object) -> Path:
    """Return the place of an error in the body: pydantic's location without the tags of unions.

    A tag may have the name of a field, so this is the first path that fits the body and ends where pydantic's does.
    """
    readings = list(_readings(detail["loc"], body, missing=detail["type"] == "missing"))
    path = next((path for path, ends in readings if ends), readings[0][0])
    return (*path, _tag_of(detail)) if detail["type"].startswith("union_tag_") else path


def _tag_of(detail: ErrorDetails) -> str:
    """Return the name of the field that chooses between types."""
    return str(detail.get("ctx", {}).get("discriminator")).strip("'")


def _readings(steps: Path, body: object, *, missing: bool) -> Iterator[tuple[Path, bool]]:
    """Yield paths whose steps are all in the body, each with True if it ends with the last step.

    The last step of a path may be `missing`.
    """
    if not steps:
        yield (), False
        return
    first, rest = steps[0], steps[1:]
    if not rest and missing:
        yield ((first,), True) if isinstance(body, dict) and first not in body else ((), False)
    elif _has(body, first):
        inner = cast("dict[int | str, object]", body)[first]
        for path, ends in _readings(rest, inner, missing=missing):
            yield (first, *path), ends or not rest
    yield from _readings(rest, cast("object", body), missing=missing)


def _has(body: object, step: int | str) -> bool:
    if isinstance(body, list):
        return isinstance(step, int) and step < len(cast("list[object]", body))
    return isinstance(body, dict) and step in body


def _sentence(detail: ErrorDetails, path: str) -> str:
    match detail["type"]:
        case "missing" | "union_tag_not_found":
            return f"'{path}' is missing."
        case "extra_forbidden":
            return f"'{path}' is not supported; leave it out."
        case "unsupported":
            return f"'{path}' {detail['msg']}"
        case "union_tag_invalid":
            given = cast("dict[str, object]", detail["input"])[_tag_of(detail)]
            return (
                f"'{path}' should be one of {detail.get('ctx', {}).get('expected_tags')}, not {show(given)}."
            )
        case _:
            subject = f"'{path}'" if path else "The body"
            text = _SUBJECT.sub(subject, _words(detail)).rstrip(".")
            if not text.startswith(subject):
                text = f"{subject}{' ' if text.startswith('should') else ': '}{text}"
            given = "" if ", not " in text else f", not {show(detail['input'])}"
            return f"{text}{given}."


def _words(detail: ErrorDetails) -> str:
    """Return pydantic's message without details that clients do not know."""
    context = detail.get("ctx", {})
    if detail["type"] in _KINDS:
        return f"Input should be {_KINDS[detail['type']]}"
    if detail["type"] == "too_long" and context.get("max_length") == 0:
        return "List should be empty"
    if detail["type"] in ("literal_error", "none_required"):
        return re.sub(r"\b(True|False|None)\b", lambda word: _PYTHON_WORDS[word[0]], detail["msg"])
    return detail["msg"].replace(" after validation", "")


def join_path(path: Path) -> str:
    """Return a path as OpenAI writes it: `messages[0].content`."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return cut(text.removeprefix("."))


def show(value: object) -> str:
    """Return a wrong value as an error shows it."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    return cut(json.dumps(value, default=str, ensure_ascii=False))


def cut(text: str) -> str:
    """Return the start of a text that may be long."""
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"


_DEEPEST = 64
"""Largest number of nested lists and objects in a body. No field needs more than a dozen."""
_MOST_NAMES = 10_000
"""Largest number of names in one object, because each wrong one adds an error."""
_MOST_BRACKETS = 500_000
"""Largest number of brackets in a body, those in strings included, because an empty list takes a hundred bytes."""
_MOST_OBJECTS = 100_000
"""Largest number of objects in a body, because each takes up to 10 µs to check and to convert."""
MOST_MESSAGES = 10_000
"""Largest number of messages of one chat. OpenAI's limit is 2,048."""
_LARGE = 256 << 10
"""Size in bytes from which a body is read outside the event loop, which sends other requests' tokens."""
_MANY = 500
"""Number of opening braces from which a body is large too."""
_LONG, _MOST_QUICK = 4 << 20, 20_000
"""Size in bytes, and number of opening brackets of both kinds, from which a large body takes a long time: 0.2 s or more."""
_DRAIN = 4
"""Limit for reading and dropping an oversized body, as a multiple of its limit.

A client that is still sending when the connection closes would see a broken pipe instead of the answer.
"""
_SLOWEST = 1024
"""Smallest rate of a body, in bytes per second."""
_INSIDE = frozenset({str, list, dict})
"""Types whose values may contain wrong values."""


def _failing_fast(schema: CoreSchema) -> CoreSchema:
    pending: list[Any] = [schema]
    while pending:
        part = pending.pop()
        if isinstance(part, dict):
            inner = cast("dict[str, Any]", part)
            if inner.get("type") == "list":
                inner["fail_fast"] = True
            pending.extend(inner.values())
        elif isinstance(part, list | tuple):
            pending.extend(cast("list[Any]", part))
    return schema


class Body(DescribedModel):
    """Base of every request body: JSON types without conversion. Unknown fields can only be null, as some clients send them."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _drop_unknown_nulls(cls, value: object) -> object:
        if not isinstance(value, dict):
            return value
        fields = cast("dict[str, object]", value)
        known = _names_of(cls) if None in fields.values() else fields
        return {name: given for name, given in fields.items() if given is not None or name in known}

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Stop at the first error of a list, because a list of millions would cost gigabytes of errors."""
        return _failing_fast(handler(source))


@cache
def _names_of(body: type[Body]) -> frozenset[str]:
    return frozenset(field.alias or name for name, field in body.model_fields.items())


BodyT = TypeVar("BodyT", bound=Body)


@dataclass(frozen=True, slots=True)
class Unsupported:
    """Mark of a known field that is not supported, with the reason and a remedy. Its value is always `None`."""

    why: str
    empty: tuple[object, ...] = ()
    """Accepted values without a meaning, besides null."""

    def __get_pydantic_core_schema__(self, _source: Any, _handler: GetCoreSchemaHandler) -> CoreSchema:
        return no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(
        self, _core: CoreSchema, _handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {"enum": [None, *self.empty], "description": f"Not supported: {self.why}"}

    def _check(self, given: object) -> None:
        if given is not None and not any(
            type(given) is type(empty) and given == empty for empty in self.empty
        ):
            raise PydanticCustomError("unsupported", "is not supported: {why}", {"why": self.why})


async def read_body(request: Request, schema: type[BodyT], max_bytes: int, timeout_s: float) -> BodyT:
    """Read the request's body as `schema`.

    Args:
        request: a request with an unread body.
        schema: type of the body.
        max_bytes: longest accepted body.
        timeout_s: longest silence of the client.

    Raises:
        BodyTooLarge: the body is longer than `max_bytes`.
        BodyTooSlow: the client was silent for too long.
        RequestError: the body is compressed, is not JSON, or does not match the schema. The error names the field.
    """
    _check_headers(request, max_bytes)
    data = await read_bytes(request, max_bytes, timeout_s)
    request.scope[_LANE], request.scope[BODY] = _lane_of(data), data
    return await convert(request, lambda: _read(data, schema))


async def convert(request: Request, work: Callable[[], T], *, kept: bytes | None = None) -> T:
    """Return the result of `work` on a request's body, or on one that is `kept`; for a large one, outside the event loop."""
    lane: ThreadPoolExecutor | None = request.scope.get(_LANE) if kept is None else _lane_of(kept)
    return work() if lane is None else await asyncio.get_running_loop().run_in_executor(lane, work)


BODY = "mlx_ring.body"
"""Key of a request's scope: the bytes of its body."""
_LANE = "mlx_ring.body_lane"
"""Key of a request's scope: the executor that reads its body; None for the event loop."""
_quick = ThreadPoolExecutor(max_workers=1, thread_name_prefix="bodies")
_long = ThreadPoolExecutor(max_workers=1, thread_name_prefix="long bodies")
"""Executors that read one large body at a time. No other body waits for those that take long."""


def _lane_of(data: bytes) -> ThreadPoolExecutor | None:
    """Return the executor that reads a body; None if it is read in the event loop."""
    braces = data.count(b"{")
    if len(data) >= _LONG or braces + data.count(b"[") >= _MOST_QUICK:
        return _long
    return _quick if len(data) >= _LARGE or braces >= _MANY else None


def _read(data: bytes, schema: type[BodyT]) -> BodyT:
    if not data:
        raise RequestError("The body is empty; send a JSON object.")
    value = parse_json(data.removeprefix(BOM_UTF8), once=True)
    if not isinstance(value, dict):
        raise RequestError(f"The body must be a JSON object, not {show(value)}.")
    fields = cast("dict[str, object]", value)
    known = schema.model_fields
    fields = {name: given for name, given in fields.items() if name in known or not has_no_effect(name)}
    try:
        return schema.model_validate(fields)
    except ValidationError as error:
        raise first_error(error, fields) from None


def parse_json(data: bytes, *, once: bool = False) -> object:
    """Parse strict JSON in UTF-8: no NaN, no infinity, no lone surrogate, no deep nesting.

    With `once`, a name that occurs twice in an object is an error, because programs could read different values.
    """
    brackets = data.count(b"[") + data.count(b"{")
    if brackets > _MOST_BRACKETS:
        raise RequestError(f"The body has {brackets} brackets; it may have {_MOST_BRACKETS} at most.")
    try:
        value: object = json.loads(
            data.decode(),
            parse_constant=_refuse_constant,
            parse_float=_finite,
            object_pairs_hook=_objects(_object_of_different_names if once else _object),
        )
    except UnicodeDecodeError as error:
        raise RequestError(f"The body is not UTF-8: byte {error.start} is wrong.") from None
    except json.JSONDecodeError as error:
        raise RequestError(
            f"The body is not valid JSON: {error.msg} (line {error.lineno}, column {error.colno})."
        ) from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError:
        raise RequestError("The body holds a number with too many digits.") from None
    if brackets > _DEEPEST or b"\\u" in data:
        _check_inside(value)
    return value


def _check_headers(request: Request, max_bytes: int) -> None:
    """Refuse a request that its headers show to be wrong.

    A body that is too large is refused before the client sends it.
    """
    coding = request.headers.get("content-encoding", "identity")
    if coding.lower() != "identity":
        raise RequestError(
            f"The body comes with Content-Encoding '{cut(coding)}', which is not supported; send the body without it."
        )
    length = request.headers.get("content-length", "0")
    most = max_bytes if "expect" in request.headers else max_bytes * _DRAIN
    if length.isdecimal() and int(length) > most:
        raise _too_large(max_bytes)


async def read_bytes(request: Request, max_bytes: int, timeout_s: float) -> bytes:
    """Read a body. A slow client times out as a silent one does.

    Each KiB adds a second to the deadline, which is never more than `timeout_s` away.
    """
    chunks: list[bytes] = []
    size = 0
    now_s = asyncio.get_running_loop().time
    latest_s = now_s() + timeout_s
    try:
        async with asyncio.timeout_at(latest_s) as timeout:
            async for chunk in request.stream():
                size += len(chunk)
                latest_s = min(latest_s + len(chunk) / _SLOWEST, now_s() + timeout_s)
                timeout.reschedule(latest_s)
                if size <= max_bytes:
                    chunks.append(chunk)
                elif size > max_bytes * _DRAIN:
                    break
    except TimeoutError:
        raise BodyTooSlow(
            f"The body is incomplete: {size} bytes arrived, too few within {timeout_s:g} s."
        ) from None
    if size > max_bytes:
        raise _too_large(max_bytes)
    return b"".join(chunks)


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"The body is over {max_bytes} bytes, the server's limit.")


def _objects(
    make: Callable[[list[tuple[str, object]]], dict[str, object]],
) -> Callable[[list[tuple[str, object]]], dict[str, object]]:
    """Return a function that makes the objects of one body, up to the limit of their number."""
    numbers = itertools.count(1)

    def made(pairs: list[tuple[str, object]]) -> dict[str, object]:
        if next(numbers) > _MOST_OBJECTS:
            raise RequestError(f"The body has more than {_MOST_OBJECTS} objects, the server's limit.")
        return make(pairs)

    return made


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    if len(pairs) > _MOST_NAMES:
        raise RequestError(
            f"The body has an object of {len(pairs)} names; an object may have {_MOST_NAMES} at most."
        )
    return dict(pairs)


def _object_of_different_names(pairs: list[tuple[str, object]]) -> dict[str, object]:
    made = _object(pairs)
    if len(made) != len(pairs):
        known = set[str]()
        for name, _ in pairs:
            if name in known:
                shown = cut(name.encode(errors="backslashreplace").decode())
                raise RequestError(f"The body has '{shown}' twice in one object; give it once.", param=shown)
            known.add(name)
    return made


def _refuse_constant(name: str) -> float:
    raise RequestError(f"The body holds {name}, which is not JSON; give a finite number.")


def _finite(digits: str) -> float:
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise RequestError(f"The number {cut(digits)} is too large.")
    return value


def _check_inside(value: object) -> None:
    """Check all texts and the depth of a value, without recursion. Errors name the path."""
    pending: list[tuple[tuple[int | str, ...], object]] = [((), value)]
    while pending:
        path, value = pending.pop()
        if isinstance(value, str):
            _check_text(value, path)
        elif isinstance(value, list | dict):
            if len(path) >= _DEEPEST:
                raise _too_deep()
            children = _children(cast("list[object] | dict[str, object]", value))
            pending.extend(((*path, key), inner) for key, inner in children if type(inner) in _INSIDE)


def _children(value: list[object] | dict[str, object]) -> Iterator[tuple[int | str, object]]:
    if isinstance(value, list):
        return iter(enumerate(value))
    for key in value:
        _check_text(key, ())
    return iter(value.items())


def _check_text(text: str, path: tuple[int | str, ...]) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        place = f"'{join_path(path)}'" if path else "A name in the body"
        raise RequestError(
            f"{place} holds \\u{code:04x}, half of a surrogate pair, which is no character; leave it out.",
            param=join_path(path) or None,
        ) from None


def _too_deep() -> RequestError:
    return RequestError(f"The body is nested more than {_DEEPEST} levels deep.")
