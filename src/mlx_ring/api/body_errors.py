"""What is wrong with a request's body, in one sentence."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import cast

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from mlx_ring.core.errors import RequestError

Path = tuple[int | str, ...]

_SHOWN = 60
"""Characters of a wrong value that an error repeats."""
_SUBJECT = re.compile(r"^(Input|String|List|Dictionary|Value|Number|Tuple|Object)\b")
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
_KINDS: Mapping[str, str] = {
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "list_type": "a list",
}
"""What should have come, by pydantic's name of the error, where its own words are Python's."""


def first_error(error: ValidationError, body: object) -> RequestError:
    """Of all that is wrong with a body, what comes first; names the field."""
    detail = error.errors(include_url=False)[0]
    path = join_path(_real_path(detail, body))
    return RequestError(_sentence(detail, path), param=path or None)


def _real_path(detail: ErrorDetails, body: object) -> Path:
    """Where in the body the error is: pydantic's location less the tags of unions.

    A tag may be called as a field of what it tags: of all readings that fit the body the first that ends where pydantic's does is it.
    """
    readings = list(_readings(detail["loc"], body, missing=detail["type"] == "missing"))
    return next((path for path, ends in readings if ends), readings[0][0])


def _readings(steps: Path, body: object, *, missing: bool) -> Iterator[tuple[Path, bool]]:
    """Paths of which each step is in the body, but for a last one that is `missing`; whether they end with the last step."""
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
        case "missing":
            return f"'{path}' is missing."
        case "extra_forbidden":
            return f"'{path}' is not supported; leave it out."
        case "unsupported":
            return f"'{path}' {detail['msg']}"
        case "union_tag_invalid" | "union_tag_not_found":
            return _wrong_tag(detail, path)
        case _:
            subject = f"'{path}'" if path else "The body"
            text = _SUBJECT.sub(subject, _words(detail)).rstrip(".")
            if not text.startswith(subject):
                text = f"{subject}{' ' if text.startswith('should') else ': '}{text}"
            given = "" if ", not " in text else f", not {show(detail['input'])}"
            return f"{text}{given}."


def _wrong_tag(detail: ErrorDetails, path: str) -> str:
    context = detail.get("ctx", {})
    field = str(context.get("discriminator", "")).strip("'")
    if "tag" not in context:
        return f"'{path}.{field}' is missing."
    return f"'{path}.{field}' should be one of {context.get('expected_tags')}, not {show(context['tag'])}."


def _words(detail: ErrorDetails) -> str:
    """Pydantic's message, less what a client knows nothing of."""
    context = detail.get("ctx", {})
    if detail["type"] in _KINDS:
        return f"Input should be {_KINDS[detail['type']]}"
    if detail["type"] == "too_long" and context.get("max_length") == 0:
        return "List should be empty"
    if detail["type"] in ("literal_error", "none_required"):
        return re.sub(r"\b(True|False|None)\b", lambda word: _PYTHON_WORDS[word[0]], detail["msg"])
    return detail["msg"].replace(" after validation", "")


def join_path(path: Path) -> str:
    """`messages[0].content`, as OpenAI writes it."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return cut(text.removeprefix("."))


def show(value: object) -> str:
    """A wrong value, as an error repeats it."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    return cut(json.dumps(value, default=str, ensure_ascii=False))


def cut(text: str) -> str:
    """The beginning of what may be long."""
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"
