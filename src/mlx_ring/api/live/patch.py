"""What changed in a JSON document, as RFC 6902 writes it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

Json = dict[str, object]


def json_patch(before: object, after: object) -> list[Json]:
    """The operations that make `after` of `before`. A list of another length is replaced whole."""
    return list(_changes("", before, after))


def _changes(path: str, before: object, after: object) -> Iterator[Json]:
    if isinstance(before, dict) and isinstance(after, dict):
        yield from _of_objects(path, cast("Json", before), cast("Json", after))
    elif isinstance(before, list) and isinstance(after, list) and _same_length(before, after):
        pairs = zip(cast("list[object]", before), cast("list[object]", after), strict=True)
        for place, (old, new) in enumerate(pairs):
            yield from _changes(f"{path}/{place}", old, new)
    elif before != after or type(before) is not type(after):
        yield {"op": "replace", "path": path, "value": after}


def _of_objects(path: str, before: Json, after: Json) -> Iterator[Json]:
    for name in before.keys() - after.keys():
        yield {"op": "remove", "path": f"{path}/{_escaped(name)}"}
    for name, value in after.items():
        inner = f"{path}/{_escaped(name)}"
        if name in before:
            yield from _changes(inner, before[name], value)
        else:
            yield {"op": "add", "path": inner, "value": value}


def _same_length(before: list[object], after: list[object]) -> bool:
    return len(before) == len(after)


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
