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
from mlx_ring.core.errors import RequestError
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
values = st.sampled_from([True, {"type": "integer"}, {"type": "string"}])
parts = st.fixed_dictionaries(
    {},
    optional={
        "properties": st.dictionaries(st.sampled_from(NAMES), values, min_size=1),
        "required": st.lists(st.sampled_from(NAMES), max_size=2, unique=True),
        "minProperties": st.integers(0, 3),
        "additionalProperties": st.booleans(),
        "patternProperties": st.just({"^[ab]$": {"type": "integer"}}),
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
    narrow = closed(schema, "tools")
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
    assert accepts(closed(schema, "tools"), {"a": 1})
    assert not accepts(closed(schema, "tools"), {"a": 1, "invented": 1})
    inside = {"type": "array", "items": schema} | {key: schema[key] for key in ("$defs",) if key in schema}
    assert not accepts(closed(inside, "tools"), [{"a": 1, "invented": 1}])


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
    assert closed(schema, "tools") == schema


def test_definition_that_refers_to_itself_is_closed_at_every_depth() -> None:
    node = {"type": "object", "properties": {"next": {"allOf": [{"$ref": "#/$defs/node"}, B]}}}
    schema = closed({"$ref": "#/$defs/node", "$defs": {"node": node}}, "tools")
    assert accepts(schema, {"next": {"b": 1, "next": {"b": 2}}})
    assert not accepts(schema, {"next": {"b": 1, "next": {"b": 2, "invented": 3}}})


def test_grammar_of_joined_objects_accepts_exactly_the_named_properties() -> None:
    schema = closed({"allOf": [{"$ref": "#/$defs/one"}, B], "$defs": {"one": A}}, "tools")
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
    schema = closed({"$ref": "#/$defs/0", "$defs": {**definitions, "60": A}, "required": ["a"]}, "tools")
    assert schema["additionalProperties"] is False


def test_schema_that_is_nested_too_deeply_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(100_000):
        schema = {"items": schema}
    with pytest.raises(RequestError, match="nested too deeply") as refused:
        closed(schema, "response_format")
    assert refused.value.param == "response_format"
