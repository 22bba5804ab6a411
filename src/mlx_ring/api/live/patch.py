"""What changed in a JSON document, as RFC 6902 writes it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

Json = dict[str, object]


def json_patch(before: object, after: object) -> list[Json]:
    """The operations that make `after` of `before`. A list of another length is replaced whole.

    What Python takes for equal is not told, so a number must not become a truth value.
    """
    return list(_changes("", before, after))


def _changes(path: str, before: object, after: object) -> Iterator[Json]:
    if before == after:
        return
    if isinstance(before, dict) and isinstance(after, dict):
        yield from _of_objects(path, cast("Json", before), cast("Json", after))
    elif isinstance(before, list) and isinstance(after, list):
        yield from _of_lists(path, cast("list[object]", before), cast("list[object]", after))
    else:
        yield _replaced(path, after)


def _of_objects(path: str, before: Json, after: Json) -> Iterator[Json]:
    for name in before.keys() - after.keys():
        yield {"op": "remove", "path": f"{path}/{_escaped(name)}"}
    for name, value in after.items():
        inner = f"{path}/{_escaped(name)}"
        if name in before:
            yield from _changes(inner, before[name], value)
        else:
            yield {"op": "add", "path": inner, "value": value}


def _of_lists(path: str, before: list[object], after: list[object]) -> Iterator[Json]:
    if len(before) != len(after):
        yield _replaced(path, after)
        return
    for place, (old, new) in enumerate(zip(before, after, strict=True)):
        yield from _changes(f"{path}/{place}", old, new)


def _replaced(path: str, value: object) -> Json:
    return {"op": "replace", "path": path, "value": value}


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
