"""Text or tokens, one or many: what completions call `prompt` and embeddings `input`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, cast

from pydantic import Discriminator, Field, Tag

TokenId = Annotated[int, Field(ge=0)]
Tokens = Annotated[list[TokenId], Field(min_length=1)]


def _kind(value: object) -> str | None:
    if isinstance(value, str):
        return "text"
    if not isinstance(value, list):
        return None
    first = cast("list[object]", value)[0] if value else 0
    return "texts" if isinstance(first, str) else "ids" if isinstance(first, list) else "tokens"


TextOrTokens = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[str], Field(min_length=1), Tag("texts")]
    | Annotated[Tokens, Tag("tokens")]
    | Annotated[list[Tokens], Field(min_length=1), Tag("ids")],
    Discriminator(
        _kind,
        custom_error_type="text_or_tokens",
        custom_error_message="Input should be a string, a list of strings, token ids or a list of such lists",
    ),
]


def each(given: str | list[str] | list[int] | list[list[int]]) -> Sequence[str | list[int]]:
    """One text, or the tokens of one, after the other."""
    if isinstance(given, str):
        return [given]
    if isinstance(given[0], int):
        return [cast("list[int]", given)]
    return cast("list[str | list[int]]", given)
