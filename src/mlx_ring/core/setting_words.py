"""What a setting takes, in words."""

from __future__ import annotations

from pathlib import Path
from types import UnionType
from typing import Annotated, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le
from pydantic.fields import FieldInfo

from mlx_ring.core.config import Settings

_IN_WORDS = {
    ("kv_cache_memory", "weights_limit", "memory_limit", "model_memory"): (
        "a size of 1MiB or more, such as 2GiB, 500MB or a number of bytes"
    ),
    ("otlp_traces_endpoint",): "an address that begins with http:// or https://",
    ("proportions",): "shares with commas between them, as 0.7,0.3",
    ("tp_shares",): "numbers above 0 with commas between them, as 3,1",
    (
        "trusted_interface",
    ): "names of interfaces or networks with commas between them, as thunderbolt0 or 10.0.8.0/24",
}
"""What some settings take, which their types do not tell."""


def allowed_values(field: FieldInfo) -> str:
    """What a field takes, in words: "a whole number from 0 to 65535"."""
    for names, words in _IN_WORDS.items():
        if any(field is Settings.model_fields[name] for name in names):
            return words
    kind, constraints = _unwrap(field.annotation, list(field.metadata))
    if get_origin(kind) is Literal:
        *most, last = (str(choice) for choice in get_args(kind))
        return f"{', '.join(most)} or {last}"
    if kind is int:
        return _number_range("a whole number", constraints)
    if kind is float:
        return _number_range("a number", constraints)
    if kind is Path:
        return "a path"
    return "names separated by commas" if get_origin(kind) is tuple else "a text that is not empty"


def _unwrap(annotation: object, constraints: list[object]) -> tuple[object, list[object]]:
    """The type inside `Annotated[... | None, ...]`, and every constraint on the way."""
    if get_origin(annotation) is Annotated:
        inner, *more = get_args(annotation)
        found: list[object] = []
        for item in more:
            found += item.metadata if isinstance(item, FieldInfo) else [item]
        return _unwrap(inner, constraints + found)
    if get_origin(annotation) in (Union, UnionType):
        return _unwrap(next(part for part in get_args(annotation) if part is not type(None)), constraints)
    return annotation, constraints


def _number_range(noun: str, constraints: list[object]) -> str:
    low = next((str(item.ge) for item in constraints if isinstance(item, Ge)), "")
    above = next((str(item.gt) for item in constraints if isinstance(item, Gt)), "")
    high = next((str(item.le) for item in constraints if isinstance(item, Le)), "")
    return f"{noun} above {above}, at most {high}" if above else f"{noun} from {low} to {high}"
