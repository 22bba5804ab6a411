"""Random JSON schemas of every kind that is enforced, each made from a seed. Their answers are short."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

_PATTERNS = ("^[a-z]{2,6}$", "^(red|green|blue)-[0-9]{1,3}$", "^[A-Z][a-z]{1,4}$", "^[^x]{1,5}$", "[0-9]{2}")
_FORMATS = ("date", "time", "uuid", "ipv4")
_NAMES = ("name", "kind", "size", "tags", "next", "when", "a b", "\u00e9", 'q"uote', "x-y")


def random_schema(seed: int) -> Schema:
    chance = random.Random(seed)
    if chance.random() < 0.1:
        return _linked_list(chance)
    schema = _any(chance, 3)
    if chance.random() < 0.3:
        shared = {"$ref": "#/$defs/inner"}
        return {
            "type": "object",
            "properties": {"first": shared, "second": shared, "rest": schema},
            "required": ["first", "rest"],
            "additionalProperties": False,
            "$defs": {"inner": _any(chance, 1)},
        }
    return schema


def _any(chance: random.Random, depth: int) -> Schema:
    makers: list[Callable[[random.Random, int], Schema]] = [_string, _integer, _number, _scalar, _enum]
    if depth:
        makers += [_object, _object, _object, _array, _tuple, _choice, _discriminated, _intersection]
    return chance.choice(makers)(chance, depth - 1)


def _string(chance: random.Random, _depth: int) -> Schema:
    match chance.randrange(3):
        case 0:
            least = chance.randrange(3)
            return {"type": "string", "minLength": least, "maxLength": least + chance.randrange(12)}
        case 1:
            return {"type": "string", "pattern": chance.choice(_PATTERNS), "maxLength": 24}
        case _:
            return {"type": "string", "format": chance.choice(_FORMATS)}


def _integer(chance: random.Random, _depth: int) -> Schema:
    least = chance.randint(-1000, 1000)
    schema: Schema = {"type": "integer", "minimum": least, "maximum": least + chance.randrange(2000)}
    if chance.random() < 0.3:
        return {"type": "integer", "multipleOf": chance.randint(2, 9), "minimum": 0, "maximum": 500}
    return schema


def _number(chance: random.Random, _depth: int) -> Schema:
    least = round(chance.uniform(-50, 50), 2)
    if chance.random() < 0.7:
        return {"type": "number", "multipleOf": 0.25, "exclusiveMinimum": -5, "maximum": 99.5}
    return {"type": "number", "minimum": least, "exclusiveMaximum": least + 10}


def _scalar(chance: random.Random, _depth: int) -> Schema:
    return {"type": chance.choice(["boolean", "null", ["boolean", "null"]])}


def _enum(chance: random.Random, _depth: int) -> Schema:
    values: list[object] = [
        "red",
        "dark red",
        'a "b"',
        "\u00fc\u2603",
        "",
        3,
        -1.5,
        None,
        True,
        [1, 2],
        {"k": []},
    ]
    return {"enum": chance.sample(values, chance.randint(1, 5))}


def _object(chance: random.Random, depth: int) -> Schema:
    names = chance.sample(_NAMES, chance.randint(1, 4))
    schema: Schema = {
        "type": "object",
        "properties": {name: _any(chance, depth) for name in names},
        "required": [name for name in names if chance.random() < 0.6],
        "additionalProperties": False,
    }
    if chance.random() < 0.2:
        schema["patternProperties"] = {"^z_[a-z]{1,3}$": _integer(chance, 0)}
    return schema


def _array(chance: random.Random, depth: int) -> Schema:
    least = chance.randrange(3)
    return {
        "type": "array",
        "items": _any(chance, depth),
        "minItems": least,
        "maxItems": least + chance.randrange(3),
    }


def _tuple(chance: random.Random, depth: int) -> Schema:
    first = [_any(chance, depth) for _ in range(chance.randint(1, 3))]
    return {"type": "array", "prefixItems": first, "items": False, "minItems": chance.randint(0, len(first))}


def _choice(chance: random.Random, depth: int) -> Schema:
    return {"anyOf": [_any(chance, depth) for _ in range(chance.randint(2, 3))]}


def _discriminated(chance: random.Random, depth: int) -> Schema:
    return {"oneOf": [_tagged(kind, _any(chance, depth)) for kind in chance.sample(_NAMES, 2)]}


def _tagged(kind: str, value: Schema) -> Schema:
    properties = {"kind": {"const": kind}, "value": value}
    return {
        "type": "object",
        "properties": properties,
        "required": ["kind", "value"],
        "additionalProperties": False,
    }


def _intersection(chance: random.Random, depth: int) -> Schema:
    """Return a schema of both of two objects, each with a property of its own."""
    first, second = chance.sample(_NAMES, 2)
    return {
        "allOf": [
            {"type": "object", "properties": {name: _any(chance, depth)}, "required": [name]}
            for name in (first, second)
        ],
        "properties": {first: True, second: True},
        "additionalProperties": False,
    }


def _linked_list(chance: random.Random) -> Schema:
    node: Schema = {
        "type": "object",
        "properties": {
            "value": _any(chance, 0),
            "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
        },
        "required": ["value", "next"],
        "additionalProperties": False,
    }
    return {"$ref": "#/$defs/node", "$defs": {"node": node}}
