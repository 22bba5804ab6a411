"""Schemas in keywords that grammars enforce mean what the client's own mean, and are about as long."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer

from mlx_ring.api.chat.json_schemas import in_known_keywords, names_as_patterns, schema_at
from mlx_ring.core.types import Grammar
from mlx_ring.models.grammars import GrammarTrials, grammar_limits, to_llguidance

EMPTY: dict[str, Any] = {}
COLOUR = {"$defs": {"Colour": {"type": "string", "title": "Colour", "enum": ["red", "green"]}}}
DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"
EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
FLAGS = {"type": "object", "additionalProperties": {"type": "boolean"}}
NAMED = {"type": "object", "properties": {"a": {"type": "boolean"}}}

SCORES = {
    "type": "object",
    "propertyNames": {"enum": ["art", "music"]},
    "additionalProperties": {"type": "integer"},
}


def enforced(schema: dict[str, Any]) -> dict[str, Any]:
    return names_as_patterns(in_known_keywords(schema))


def problem(schema: dict[str, Any]) -> str:
    return GrammarTrials().problem(Grammar("json_schema", json.dumps(schema)))


def accepts(schema: dict[str, Any], text: str) -> bool:
    """Return True if an answer under the schema may begin with this text and continue."""
    grammar = to_llguidance("json_schema", json.dumps(schema))
    matcher = LLMatcher(LLTokenizer("byte"), grammar, limits=grammar_limits(), log_level=0)
    consumed = matcher.try_consume_tokens(list(text.encode()))
    matcher.compute_bitmask()
    return consumed == len(text.encode()) and not matcher.get_error()


@pytest.mark.parametrize(
    ("schema", "matching", "others"),
    [
        ({**FLAGS, "propertyNames": {"type": "string"}}, [{}, {"any": True}], [{"any": 1}]),
        ({**FLAGS, "propertyNames": True}, [{"any": True}], [{"any": 1}]),
        ({**FLAGS, "propertyNames": {"enum": ["x", "y"]}}, [{}, {"y": True}], [{"z": True}, {"x": 1}]),
        ({**FLAGS, "propertyNames": {"const": "x"}}, [{"x": True}], [{"y": True}]),
        (
            {**COLOUR, **FLAGS, "propertyNames": {"$ref": "#/$defs/Colour"}, "required": ["red"]},
            [{"red": True}, {"red": True, "green": False}],
            [{"green": True}, {"red": True, "blue": True}],
        ),
        ({**NAMED, "propertyNames": {"enum": ["a", "b"]}}, [{"a": True, "b": 1}], [{"a": 1}, {"c": 1}]),
        ({**NAMED, "propertyNames": {"enum": ["b"]}}, [{"b": 1}], [{"a": True}]),
        ({**FLAGS, "propertyNames": {"pattern": "^x[0-9]$"}}, [{}, {"x1": True}], [{"y": True}, {"x1": 1}]),
        ({**FLAGS, "propertyNames": {"enum": []}}, [EMPTY], [{"x": True}]),
        (
            {
                "$defs": {"Decimal": {"type": "string", "pattern": DECIMAL}},
                **FLAGS,
                "propertyNames": {"$ref": "#/$defs/Decimal"},
            },
            [{"1.5": True}],
            [{"x": True}, {"1.5": 1}],
        ),
        (
            {
                "type": "object",
                "patternProperties": {DECIMAL: {"type": "null"}},
                "additionalProperties": False,
            },
            [{"1.5": None}],
            [{"x": None}, {"1.5": 1}],
        ),
        (
            {
                "type": "object",
                "properties": {
                    "scores": SCORES,
                    "best": {"$ref": "#/properties/scores/additionalProperties"},
                },
                "required": ["best"],
            },
            [{"scores": {"art": 1}, "best": 2}],
            [{"best": "2"}, {"scores": {"sport": 1}, "best": 2}],
        ),
        (
            {
                "type": "object",
                "properties": {
                    "map": {**NAMED, "propertyNames": {"enum": ["b"]}},
                    "a": {"$ref": "#/properties/map/properties/a"},
                },
                "required": ["a"],
            },
            [{"map": {"b": 1}, "a": True}],
            [{"map": {"a": True}, "a": True}, {"a": 1}],
        ),
        ({**NAMED, "unevaluatedProperties": False}, [{"a": True}], [{"b": True}]),
        ({**NAMED, "unevaluatedProperties": {"type": "null"}}, [{"b": None}], [{"b": True}]),
        (
            {"type": "array", "prefixItems": [{"type": "null"}], "unevaluatedItems": False},
            [[], [None]],
            [[None, 1]],
        ),
        ({"type": "array", "uniqueItems": False, "minContains": 2}, [[1, 1]], [1]),
        ({"type": "string", "format": "password"}, ["any"], [1]),
        ({"type": "string", "format": "e164", "pattern": r"^\+[0-9]{7,15}$"}, ["+441234567"], ["441234567"]),
        (
            {"type": "string", "pattern": DECIMAL},
            ["1", "-0.5", "+12.", ".5", "007"],
            ["", ".", "+", "1.2.3", "--1", "1e3"],
        ),
        (
            {"type": "string", "pattern": EMAIL},
            ["a@b.org", "a.b'c+d@x-y.z.com", "_@b.org"],
            [".a@b.org", "a..b@c.org", "a.@b.org", "a'@b.org", "a@b", "@b.org", "a@b..org"],
        ),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else "",
)
def test_schema_in_known_keywords_is_enforced_and_means_the_same(
    schema: dict[str, Any], matching: list[Any], others: list[Any]
) -> None:
    trials = GrammarTrials()
    known = enforced(schema)
    assert trials.problem(Grammar("json_schema", json.dumps(schema)))
    assert trials.problem(Grammar("json_schema", json.dumps(known))) == ""
    for meaning in (schema, known):
        validator = jsonschema.Draft202012Validator(meaning)
        assert [value for value in matching if not validator.is_valid(value)] == []
        assert [value for value in others if validator.is_valid(value)] == []
    assert enforced(known) == known


@pytest.mark.parametrize(
    "schema",
    [
        {**FLAGS, "propertyNames": {"maxLength": 3}},
        {**FLAGS, "propertyNames": {"$ref": "#/$defs/none"}},
        {"properties": {"map": SCORES, "one": {"$ref": "#/properties/map/propertyNames"}}},
        {"properties": {"map": SCORES, "one": {"$ref": "#one"}}, "$defs": {"a": {"$anchor": "one"}}},
        {
            "$defs": {"Name": {"enum": ["outer"]}},
            "properties": {
                "map": {
                    "$id": "https://example.org/map",
                    "$defs": {"Name": {"enum": ["inner"]}},
                    "propertyNames": {"$ref": "#/$defs/Name"},
                }
            },
        },
        {
            "properties": {
                "list": {"type": "array", "unevaluatedItems": {"type": "null"}},
                "one": {"$ref": "#/properties/list/unevaluatedItems"},
            }
        },
        {"anyOf": [{"uniqueItems": False}] * 20_000},
        {**FLAGS, "propertyNames": {"$ref": "#/allOf/" + "1" * 5000}, "allOf": [NAMED]},
        {**FLAGS, "propertyNames": {"$ref": "#/allOf/" + "1" * 900}, "allOf": [NAMED]},
        {**FLAGS, "propertyNames": {"$ref": "#/$defs/a"}, "$defs": {"a": {"$ref": "#/$defs/a"}}},
        {**FLAGS, "propertyNames": {"enum": [f"name {at}" for at in range(10_000)]}},
        {**FLAGS, "propertyNames": {"enum": [f"名前名前名前{at}" for at in range(2000)]}},
        {"allOf": [NAMED], "unevaluatedProperties": False},
        {"type": "array", "uniqueItems": True},
        {"type": "string", "format": "iban"},
        {"const": {"uniqueItems": False, "propertyNames": True}},
        {"properties": {"propertyNames": {"type": "boolean"}, "format": {"type": "null"}}},
        {"type": "array", "contains": {"const": 1}, "minContains": 2},
        {"type": "string", "format": {}, "pattern": []},
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_keywords_without_an_equal_one_and_values_stay(schema: dict[str, Any]) -> None:
    assert enforced(schema) == schema


def test_own_properties_are_no_reason_to_leave_a_pattern_of_names() -> None:
    known = enforced({**NAMED, "propertyNames": {"pattern": "^[ab]$"}})
    assert problem(known) == ""
    assert accepts(known, '{"a": true, "b": 1}')
    assert not accepts(known, '{"c"')


def test_nested_maps_do_not_multiply() -> None:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(5):
        names = {"enum": [f"n{at}" for at in range(10)]}
        schema = {"type": "object", "propertyNames": names, "additionalProperties": schema}
    known = enforced(schema)
    assert len(json.dumps(known)) < 2 * len(json.dumps(schema))
    assert problem(known) == ""
    assert accepts(known, '{"n1": {"n2": {"n3": {"n4": {"n9": null}}}}}')
    assert not accepts(known, '{"n1": {"n2": {"m')


def test_maps_by_one_long_list_of_names_do_not_multiply() -> None:
    names = [f"n{at}" for at in range(500)]
    maps = [{"propertyNames": {"$ref": "#/$defs/%4E"}}, {"propertyNames": {"$ref": "#/$defs/N"}}]
    schema = {"$defs": {"N": {"enum": names}}, "anyOf": maps * 250}
    assert len(json.dumps(enforced(schema))) < 4 * len(json.dumps(schema))


@pytest.mark.parametrize(("links", "is_followed"), [(10, True), (100, False)])
def test_chain_of_references_is_followed_unless_it_is_long(*, links: int, is_followed: bool) -> None:
    definitions: dict[str, Any] = {f"d{at}": {"$ref": f"#/$defs/d{at + 1}"} for at in range(links)}
    definitions[f"d{links}"] = {"enum": ["a"]}
    known = enforced({"$defs": definitions, **FLAGS, "propertyNames": {"$ref": "#/$defs/d0"}})
    assert ("propertyNames" not in known) == is_followed


def test_map_by_many_names_in_any_order_is_enforced_to_its_end() -> None:
    names = [f"Area/City {at}" for at in range(600)]
    known = enforced({**FLAGS, "propertyNames": {"enum": names}})
    assert problem(known) == ""
    assert accepts(known, "{")
    assert accepts(known, '{"Area/City 599": true, "Area/City 7": false}')
    assert not accepts(known, '{"Area/City 600')


def test_index_in_a_reference_is_one_of_a_list() -> None:
    root = {"allOf": [{"const": at} for at in range(12)]}
    assert schema_at(root, "#/allOf/11") == {"const": 11}
    for index in ("12", "01", "\N{ARABIC-INDIC DIGIT THREE}", "-1", "1" * 5000):
        assert schema_at(root, f"#/allOf/{index}") is None
