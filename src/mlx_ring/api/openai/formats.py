"""`response_format`: what an answer's text must be."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from mlx_ring.api.body import Body
from mlx_ring.api.conversation.asked import AnswerFormat


class TextFormat(Body):
    type: Literal["text"]


class JsonObjectFormat(Body):
    type: Literal["json_object"]


class SchemaFields(Body):
    name: Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    schema_: Annotated[dict[str, object] | None, Field(alias="schema")] = None
    """None: any object."""
    strict: bool | None = None
    """The schema is enforced either way."""


class SchemaFormat(Body):
    type: Literal["json_schema"]
    json_schema: SchemaFields


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | SchemaFormat, Field(discriminator="type")]


def read_format(given: ResponseFormat | None) -> AnswerFormat:
    """What it comes to."""
    if isinstance(given, SchemaFormat) and given.json_schema.schema_ is not None:
        return AnswerFormat("json_schema", given.json_schema.schema_, "response_format.json_schema.schema")
    if isinstance(given, SchemaFormat | JsonObjectFormat):
        return AnswerFormat("json_object")
    return AnswerFormat()
