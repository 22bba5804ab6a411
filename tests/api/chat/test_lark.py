"""Schemas that are closed: objects of answers have only the properties that their schema names."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from llguidance import LLMatcher
from tests.api.chat.call_examples import tokenizer

from mlx_ring.api.chat.lark import closed
from mlx_ring.models.grammars import to_llguidance

NO_REFERENCE: dict[str, Any] = {}
NAMES = ("a", "b", "c")
A = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
B = {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}


def accepts(schema: Any, value: Any) -> bool:
    return jsonschema.Draft202012Validator(schema).is_valid(value)


def instances() -> Iterator[dict[str, object]]:
    """Yield every object of up to three properties, with two values each."""
    for count in range(len(NAMES) + 1):
        for names in itertools.combinations(NAMES, count):
            for values in itertools.product((1, "x"), repeat=count):
                yield dict(zip(names, values, strict=True))


OBJECTS = list(instances())
values = st.sampled_from([True, False, {"type": "integer"}, {"type": "string"}])
parts = st.fixed_dictionaries(
    {},
    optional={
        "properties": st.dictionaries(st.sampled_from(NAMES), values, min_size=1),
        "required": st.lists(st.sampled_from(NAMES), max_size=2, unique=True),
        "minProperties": st.integers(0, 3),
        "additionalProperties": st.booleans(),
        "patternProperties": st.just({"^[ab]$": {"type": "integer"}}),
        "dependentRequired": st.just({"a": ["b"]}),
    },
)
references = st.sampled_from([{"$ref": "#/$defs/one"}, {"$ref": "#/definitions/other~1one"}])


def joined(*schemas: dict[str, Any]) -> dict[str, Any]:
    return {key: value for schema in schemas for key, value in schema.items()}


def with_parts(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    several = st.lists(inner | references, min_size=1, max_size=2)
    more = st.fixed_dictionaries({}, optional={"allOf": several, "anyOf": several, "oneOf": several})
    return st.tuples(parts, more, st.just(NO_REFERENCE) | references).map(
        lambda given: {**given[0], **given[1], **given[2]}
    )


def with_definitions(schema: Any, one: Any, other: Any) -> dict[str, Any]:
    return {**schema, "$defs": {"one": one}, "definitions": {"other/one": other}}


schemas = st.builds(
    with_definitions,
    st.recursive(parts, with_parts, max_leaves=6),
    parts,
    parts | st.just({"allOf": [{"$ref": "#/$defs/one"}]}),
)


@given(schemas)
@example({"allOf": [A, B]})
@example({"allOf": [{"$ref": "#/$defs/one"}, B], "$defs": {"one": A}})
def test_closed_schema_accepts_a_part_of_what_its_original_accepts_and_never_nothing(schema: Any) -> None:
    narrow = closed(schema)
    before = [value for value in OBJECTS if accepts(schema, value)]
    after = [value for value in OBJECTS if accepts(narrow, value)]
    assert all(value in before for value in after)
    assert bool(after) == bool(before)


@pytest.mark.parametrize(
    "schema",
    [
        A,
        {"$ref": "#/$defs/A", "$defs": {"A": A}},
        {"allOf": [A]},
        {"anyOf": [A, {"type": "null"}]},
        {"allOf": [{"$ref": "#/$defs/A"}, {"properties": {"d": True}}], "$defs": {"A": A}},
        {
            "properties": {"a": {"type": "integer"}},
            "anyOf": [{"required": ["a"]}, {"properties": {"d": True}}],
        },
    ],
    ids=json.dumps,
)
def test_object_has_no_property_that_its_schema_does_not_name(schema: Any) -> None:
    assert accepts(closed(schema), {"a": 1})
    assert not accepts(closed(schema), {"a": 1, "invented": 1})
    inside = {"type": "array", "items": schema} | {key: schema[key] for key in ("$defs",) if key in schema}
    assert not accepts(closed(inside), [{"a": 1, "invented": 1}])


@pytest.mark.parametrize(
    "schema",
    [
        {**A, "additionalProperties": True},
        {**A, "unevaluatedProperties": True},
        {"allOf": [{**A, "additionalProperties": True}, B]},
        {**A, "required": ["b"]},
        {**A, "minProperties": 3},
        {**A, "anyOf": [{"required": ["b"]}, {"required": ["c"]}]},
        {"type": "object"},
        {"properties": {"a": {}}, "allOf": [{"$ref": "#/$defs/missing"}]},
    ],
    ids=json.dumps,
)
def test_object_stays_open_where_its_schema_says_so_or_needs_it(schema: Any) -> None:
    assert closed(schema) == schema


def test_definition_that_refers_to_itself_is_closed_but_values_within_its_parts_are_not() -> None:
    node = {"type": "object", "properties": {"next": {"allOf": [{"$ref": "#/$defs/node"}, B]}}}
    schema = closed({"$ref": "#/$defs/node", "$defs": {"node": node}})
    assert accepts(schema, {"next": {"b": 1, "next": {"b": 2}}})
    assert accepts(schema, {"next": {"b": 1, "next": {"b": 2, "more": 3}}})
    assert not accepts(schema, {"next": {"b": 1, "invented": 3}})


def test_grammar_of_joined_objects_accepts_exactly_the_named_properties() -> None:
    schema = closed({"allOf": [{"$ref": "#/$defs/one"}, B], "$defs": {"one": A}})
    known = tokenizer(())[0]
    for text, is_accepted in (('{"a": 1, "b": 2}', True), ('{"a": 1, "b": 2, "c": 3}', False)):
        matcher = LLMatcher(known, to_llguidance("json_schema", json.dumps(schema)), log_level=0)
        assert matcher.get_error() == ""
        tokens = known.tokenize_str(text)
        assert (matcher.try_consume_tokens(tokens) == len(tokens)) == is_accepted


def test_parts_that_many_others_have_are_read_once() -> None:
    definitions: dict[str, Any] = {
        str(level): {"allOf": [{"$ref": f"#/$defs/{level + 1}"}] * 2} for level in range(60)
    }
    schema = closed({"$ref": "#/$defs/0", "$defs": {**definitions, "60": A}, "required": ["a"]})
    assert schema["additionalProperties"] is False


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"properties": {"n": A}, "required": ["n"]}, {"properties": {"n": B}}]},
        {"$defs": {"one": {"properties": {"n": A}, "required": ["n"]}}, "allOf": [{"$ref": "#/$defs/one"}, {"properties": {"n": B}}]},
        {"properties": {"n": A}, "required": ["n"], "patternProperties": {"^n": B}},
        {"required": ["n"], "properties": {"n": {"type": "array", "minItems": 1, "items": A, "allOf": [{"items": B}]}}},
        {"required": ["n"], "properties": {"n": {"type": "array", "minItems": 1, "allOf": [{"items": A}, {"items": B}]}}},
    ],
    ids=json.dumps,
)  # fmt: skip
def test_value_that_several_schemas_describe_may_have_the_properties_of_all(schema: Any) -> None:
    both = {"a": 1, "b": 1}
    assert any(accepts(closed(schema), {"n": value}) for value in (both, [both]))


@pytest.mark.parametrize(
    "schema",
    [
        {"$defs": {"A": {**A, "$anchor": "A"}}, "allOf": [{"$ref": "#A"}, B]},
        {"$id": "https://e.x/s", "$defs": {"A": A}, "allOf": [{"$ref": "https://e.x/s#/$defs/A"}, B]},
        {"$defs": [], "allOf": [A, B]},
    ],
    ids=json.dumps,
)
def test_schema_whose_references_are_no_paths_is_returned_as_it_is(schema: Any) -> None:
    assert closed(schema) == schema


@pytest.mark.parametrize(
    "schema",
    [
        {"$defs": {"A": A}, "$ref": "#/$defs/A", "additionalProperties": True},
        {"allOf": [{"patternProperties": {"^x-": True}}, A]},
        {**A, "dependentRequired": {"a": ["b"]}},
        {"oneOf": [{"properties": {"a": {"type": "integer"}}}, {"properties": {"b": {"type": "integer"}}}]},
    ],
    ids=json.dumps,
)
def test_schema_that_may_need_further_properties_accepts_what_it_did(schema: Any) -> None:
    for value in (*OBJECTS, {"a": 1, "x-y": 1}, {"a": 1, "z": 1}):
        assert accepts(closed(schema), value) == accepts(schema, value)


def test_pattern_properties_beside_a_reference_stay_allowed() -> None:
    schema = closed({"$defs": {"A": A}, "$ref": "#/$defs/A", "patternProperties": {"^x-": True}})
    assert accepts(schema, {"a": 1, "x-y": 1})
    assert not accepts(schema, {"a": 1, "invented": 1})


def test_alternatives_are_closed_one_by_one_if_a_constant_distinguishes_them() -> None:
    kinds = {
        kind: {"properties": {"kind": {"const": kind}, kind: {"type": "integer"}}, "required": ["kind", kind]}
        for kind in ("a", "b")
    }
    schema = closed({"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": kinds})
    assert accepts(schema, {"kind": "a", "a": 1})
    assert not accepts(schema, {"kind": "a", "a": 1, "b": 1})


def test_hostile_schema_is_returned_as_it_is() -> None:
    spellings = {
        "".join(
            f"%{ord(letter):02x}" if number >> place & 1 else letter
            for place, letter in enumerate("abcdefghij")
        )
        for number in range(1000)
    }
    wide: dict[str, Any] = {"properties": {f"p{number}": {"type": "integer"} for number in range(200)}}
    schema = {"$defs": {"abcdefghij": wide}, "allOf": [{"$ref": f"#/$defs/{each}"} for each in spellings]}
    assert len(json.dumps(closed(schema))) < 2 * len(json.dumps(schema))
    deep: dict[str, Any] = {}
    for _ in range(5_000):
        deep = {"items": deep}
    assert closed(deep) is deep
    many: dict[str, Any] = {"anyOf": [{}] * 100_000}
    assert closed(many) is many
