"""Schemas of tools, as formats of calls read them whose arguments are not JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from mlx_ring.api.conversation.asked import Tool
from mlx_ring.core.errors import RequestError

Schema = Mapping[str, object]

NOTHING: Schema = {"type": "object", "properties": {}, "additionalProperties": False}
"""Of a tool that takes no arguments."""
STRING_KEYS = frozenset({"type", "enum", "const", "title", "description", "default", "examples", "$comment"})
"""Of a schema whose texts are known, or free."""
_LENIENT = {"lenient": True, "coerce_one_of": True}
"""For tools that are not strict: what cannot be enforced is left out."""
_DEFINITIONS = ("$defs", "definitions")
_PLAIN_KEYS = frozenset(
    {
        *("type", "properties", "required", "additionalProperties", *_DEFINITIONS),
        *("title", "description", "$schema", "$id", "$comment", "default", "examples"),
    }
)
"""Of a schema of arguments that can be written one by one."""


def options_of(tool: Tool) -> Mapping[str, object]:
    """What llguidance is told of JSON under a tool's schema."""
    return {} if tool.strict else _LENIENT


def properties_of(tool: Tool) -> Mapping[str, Schema]:
    """Of a tool whose arguments come one by one.

    Raises:
        RequestError: it is strict, and says more of its arguments than what each of them is.
    """
    schema = tool.parameters or NOTHING
    others = sorted(schema.keys() - _PLAIN_KEYS)
    if others and tool.strict:
        raise RequestError(
            f"'{others[0]}' in the parameters of tool '{tool.name}' cannot be enforced in this model's format.",
            param="tools",
        )
    properties = schema.get("properties", {})
    if not isinstance(properties, Mapping):
        raise RequestError(f"'properties' of tool '{tool.name}' is no object.", param="tools")
    given = cast("Mapping[str, object]", properties)
    missing = [name for name in required_of(tool) if name not in given]
    if missing and tool.strict:
        raise RequestError(f"Tool '{tool.name}' requires '{missing[0]}', which has no schema.", param="tools")
    return {
        name: cast("Schema", value) if isinstance(value, Mapping) else {} for name, value in given.items()
    }


def required_of(tool: Tool) -> list[str]:
    """Names of arguments that have to be there."""
    required = (tool.parameters or NOTHING).get("required", [])
    return [str(name) for name in cast("list[object]", required)] if isinstance(required, list) else []


def alone_of(tool: Tool, schema: Schema) -> Schema:
    """A property's schema with the definitions that it may refer to."""
    given = tool.parameters or {}
    return {**{key: given[key] for key in _DEFINITIONS if key in given}, **schema}


def texts_of(schema: Schema) -> list[str] | None:
    """The texts of which a property is one, where that is so."""
    if not schema.keys() <= STRING_KEYS:
        return None
    given = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(given, list) or not given:
        return None
    values = cast("list[object]", given)
    return [str(value) for value in values] if all(isinstance(value, str) for value in values) else None
