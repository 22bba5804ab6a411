"""Calls whose arguments are text between tags, as models write them, with and without the mark before a call."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.api.chat.formats import THINKING, TIME, TOOLS, WEATHER, call_marks, read, rules, split_at
from tests.examples import examples

from mlx_ring.api.chat.answer import ChatAnswer
from mlx_ring.api.chat.model_format import ChatFormat
from mlx_ring.api.chat.reader import AnswerReader
from mlx_ring.api.chat.request import ContentText, Tool

WRITE = Tool(
    "write_file",
    parameters={
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "content": {"type": "string"},
            "mode": {"type": "integer"},
        },
        "required": ["path", "content"],
    },
)
ALL = (*TOOLS, WRITE)
FORMATS = {
    parser: ChatFormat(THINKING, call_marks(parser))
    for parser in ("qwen3_coder", "minimax_m2", "glm47", "longcat", "muse_spark", "minicpm5")
}
QWEN = FORMATS["qwen3_coder"]


def answer_of(
    text: str, format_: ChatFormat = QWEN, *, pieces: Sequence[str] | None = None, **more: Any
) -> ChatAnswer:
    reading_rules = rules(format_, tools=more.pop("tools", ALL), **more)
    return ChatAnswer(parts=read([text] if pieces is None else pieces, reading_rules))


def calls_of(answer: ChatAnswer) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in answer.calls]


def qwen(name: str = "get_weather", **arguments: str) -> str:
    inside = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in arguments.items())
    return f"<function={name}>\n{inside}</function>"


def call_in(parser: str, name: str, **arguments: str) -> str:
    if parser == "qwen3_coder":
        return f"<tool_call>\n{qwen(name, **arguments)}\n</tool_call>"
    if parser in ("minimax_m2", "muse_spark"):
        prefix, marks = ("atem:" if parser == "muse_spark" else ""), call_marks(parser)
        inside = "".join(
            f'<{prefix}parameter name="{key}">{text}</{prefix}parameter>\n' for key, text in arguments.items()
        )
        return f'{marks.start}\n<{prefix}invoke name="{name}">\n{inside}</{prefix}invoke>\n{marks.end}'
    if parser == "minicpm5":
        inside = "".join(f'<param name="{key}">{text}</param>\n' for key, text in arguments.items())
        return f'<function name="{name}">{inside}</function>'
    prefix = "longcat_" if parser == "longcat" else ""
    inside = "".join(
        f"<{prefix}arg_key>{key}</{prefix}arg_key>\n<{prefix}arg_value>{text}</{prefix}arg_value>\n"
        for key, text in arguments.items()
    )
    return f"<{prefix}tool_call>{name}\n{inside}</{prefix}tool_call>"


# ---- without the mark before a call


@pytest.mark.parametrize("end", ["\n</tool_call>", "", "\n"])
@pytest.mark.parametrize("before", ["", "I look.\n\n", "I look:\n", "<think>Hm.</think>\n\n", "\n\n"])
def test_call_without_its_first_mark_is_a_call(before: str, end: str) -> None:
    text = before + qwen(city="Paris", days="2") + end
    for pieces in ([text], list(text), split_at(text, [9, 20, 31])):
        answer = answer_of(text, pieces=pieces)
        assert calls_of(answer) == [("get_weather", {"city": "Paris", "days": 2})]
        assert answer.content == before.partition("</think>")[2].strip() or before.strip() == answer.content


def test_several_calls_without_marks_are_all_read() -> None:
    first, second = qwen(city="Paris"), qwen("get_time", city="Rome")
    for between in ("\n", "\n</tool_call>\n", "\n</tool_call>\n<tool_call>\n", ""):
        text = f"{first}{between}{second}\n</tool_call>\nDone."
        for pieces in ([text], list(text)):
            answer = answer_of(text, pieces=pieces)
            assert calls_of(answer) == [("get_weather", {"city": "Paris"}), ("get_time", {"city": "Rome"})]
            assert answer.content == "Done."
    alone = answer_of(f"{first}\n{second}", parallel=False)
    assert [call.name for call in alone.calls] == ["get_weather"]
    assert alone.content == ""


CALL = qwen(city="Rome")


@pytest.mark.parametrize(
    "text",
    [
        f"Write {CALL} to call it.",
        f"```xml\n{CALL}\n```\nThat is it.",
        f"~~~~\n~~~\n{CALL}\n~~~~",
        f"- So:\n  ```\n{CALL}\n  ```",
        f"    {CALL}",
        f"> {CALL}",
        qwen("unknown", city="Rome"),
        "<function=get_weather> is how it begins.",
        "<function=get_weather>\nThen come its arguments.",
        "<function=get_weather>\n<parameter=city>\nRome\n</parameter>\nand so on",
        "<function=get_weather>\n<parameter=city>\nRome\n",
        "<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n",
        "<function=get_weather>",
        "A <function",
        "<function=",
        "<function=get_weathers>\n</function>",
    ],
)
def test_text_about_calls_is_content(text: str) -> None:
    for pieces in ([text], list(text)):
        answer = answer_of(text, pieces=pieces)
        assert (answer.content, answer.calls) == (text, [])


def test_call_after_a_block_of_code_is_a_call() -> None:
    text = f"```\n{CALL}\n```\n{CALL}\n</tool_call>"
    for pieces in ([text], list(text)):
        answer = answer_of(text, pieces=pieces)
        assert answer.content == f"```\n{CALL}\n```"
        assert calls_of(answer) == [("get_weather", {"city": "Rome"})]


def test_call_without_its_first_mark_is_no_call_in_reasoning_and_without_tools() -> None:
    assert answer_of(f"<think>\n{CALL}\n</think>Yes.").reasoning == CALL
    assert answer_of(CALL, tools=()).content == CALL
    other = ChatFormat(calls=call_marks("json_tools"))
    assert answer_of(CALL, other).content == CALL


@pytest.mark.parametrize(
    ("held", "following"),
    [
        ("<", "p>"),
        ("<function=get_", "x"),
        ("<function=get_weather", " >"),
        ("<function=get_weather>\n", "W"),
        ("<function=get_weather>\n<param", " "),
        ("<function=get_weather>\n<parameter=city", "\n"),
    ],
)
def test_text_is_held_only_while_it_may_be_a_call(held: str, following: str) -> None:
    reader = AnswerReader(rules(QWEN, tools=ALL))
    assert reader.push(f"A\n{held}") == [ContentText("A")]
    assert reader.push(following) == [ContentText(f"\n{held}{following}".rstrip())]


def test_text_that_cannot_begin_a_call_is_not_held() -> None:
    reader = AnswerReader(rules(QWEN, tools=ALL))
    assert reader.push("Is a <func") == [ContentText("Is a <func")]
    assert reader.push("\n```\n<func") == [ContentText("\n```\n<func")]
    assert reader.push("\n```\n<func") == [ContentText("\n```")]


# ---- arguments

VALUES = [
    "<b>bold</b>",
    "</parameter>",
    "a </parameter> b",
    "</function>",
    "<parameter=x>1</parameter>",
    "<parameter=mode>1</parameter>\n<parameter=path>\nx\n</parameter>",
    "<function=demo>\n</function>\n</tool_call>",
    f"<tool_call>\n{CALL}\n</tool_call>",
    f"Call:\n<tool_call>\n{CALL}\n</tool_call>\n</parameter> ends it.",
    '<invoke name="get_time">\n<parameter name="city">Rome</parameter>\n</invoke>\n</minimax:tool_call>',
    "<tool_call>f<arg_key>city</arg_key>\n<arg_value>Rome</arg_value></tool_call>",
    "</tool_call>",
    "<arg_value>",
    "</arg_value>",
    "    indented\n\ttext  ",
    "caf\u00e9 \\u00e9 \\n \U0001f600",
    "x" * 3000 + "<" + "y" * 700,
    "",
]


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("parser", FORMATS)
def test_argument_that_contains_tags_stays_whole(parser: str, value: str) -> None:
    text = call_in(parser, "write_file", path="a.xml", content=value, mode="6")
    expected = [("write_file", {"path": "a.xml", "content": value, "mode": 6})]
    last = call_in(parser, "write_file", path="a.xml", content=value)
    for pieces in ([text], list(text)):
        answer = answer_of(text, FORMATS[parser], pieces=pieces)
        assert calls_of(answer) == expected
        assert answer.content == ""
    two = answer_of(f"{last}\n{call_in(parser, 'get_time', city='Rome')}", FORMATS[parser])
    assert calls_of(two) == [
        ("write_file", {"path": "a.xml", "content": value}),
        ("get_time", {"city": "Rome"}),
    ]


@pytest.mark.parametrize(
    "inside",
    [
        "<parameter=mode>",
        "<function=f>",
        "</parameter>",
        "</function>",
        "<parameter=x></function>",
        "<function=f></parameter>",
    ],
)
def test_many_tags_in_an_argument_are_read_in_linear_time(inside: str) -> None:
    """Read so many that quadratic time would take minutes."""
    value = f"{inside}\n" * 40_000
    answer = answer_of(call_in("qwen3_coder", "write_file", path="a", content=value))
    assert [call.name for call in answer.calls] == ["write_file"]


@pytest.mark.parametrize("value", ["The mark <function=f> begins it.", "A <parameter=x> without its end"])
def test_argument_with_tags_that_do_not_come_in_pairs_stays_whole(value: str) -> None:
    text = call_in("qwen3_coder", "write_file", path="a", content=value)
    for pieces in ([text], list(text)):
        assert calls_of(answer_of(text, pieces=pieces)) == [("write_file", {"path": "a", "content": value})]


@pytest.mark.parametrize(
    ("inside", "arguments"),
    [
        ("<parameter=path>\na\n<parameter=content>\nb\n</parameter>\n", {"path": "a", "content": "b"}),
        (
            "<parameter=path>\na\n<parameter=content>\nb\n</parameter>\n<parameter=mode>\n1\n</parameter>\n",
            {"path": "a", "content": "b", "mode": 1},
        ),
        ("<parameter=path>\na\n</parameter>\n<parameter=content>\nb\n", {"path": "a", "content": "b"}),
        ("<parameter=path>\na\n<parameter=content>\nb\n", {"path": "a", "content": "b"}),
    ],
)
def test_arguments_without_their_closing_tags_are_read(inside: str, arguments: dict[str, Any]) -> None:
    for text in (
        f"<tool_call>\n<function=write_file>\n{inside}</function>\n</tool_call>",
        f"<function=write_file>\n{inside}</function>\n</tool_call>",
        f"<function=write_file>\n{inside}</function>",
    ):
        for pieces in ([text], list(text)):
            answer = answer_of(text, pieces=pieces)
            assert (calls_of(answer), answer.content) == ([("write_file", arguments)], "")


@pytest.mark.parametrize("stray", [",", ";", "\nNow the content:"])
@pytest.mark.parametrize("parser", FORMATS)
def test_text_between_arguments_belongs_to_none(parser: str, stray: str) -> None:
    text = call_in(parser, "write_file", path="a", content="x", mode="1")
    end = next(
        each for each in ("</parameter>", "</arg_value>", "_value>", "parameter>", "</param>") if each in text
    )
    place = text.index(end, text.index(">a<") if ">a<" in text else text.index("\na\n")) + len(end)
    text = f"{text[:place]}{stray}{text[place:]}"
    for pieces in ([text], list(text)):
        answer = answer_of(text, FORMATS[parser], pieces=pieces)
        assert calls_of(answer) == [("write_file", {"path": "a", "content": "x", "mode": 1})]
        assert answer.content == ""


@pytest.mark.parametrize(
    "value",
    [
        "End it with </parameter> before <parameter=mode>.",
        "a\n</parameter>,\n<parameter=other>\nb\n",
        "a\n</parameter>,\n<parameter=path>\nb\n",
    ],
)
def test_other_text_behind_a_closing_tag_belongs_to_the_argument(value: str) -> None:
    text = call_in("qwen3_coder", "write_file", path="a", content=value)
    assert calls_of(answer_of(text)) == [("write_file", {"path": "a", "content": value})]


@pytest.mark.parametrize("end", ["\n</tool_call>", "</function>", "\n", ""])
def test_call_without_some_closing_tags_is_a_call(end: str) -> None:
    text = f"<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>{end}"
    for pieces in ([text], list(text)):
        assert calls_of(answer_of(text, pieces=pieces)) == [("get_weather", {"city": "Rome"})]


@pytest.mark.parametrize("cut_off", [False, True])
@pytest.mark.parametrize("parser", FORMATS)
def test_call_that_ends_within_an_argument_is_text(parser: str, *, cut_off: bool) -> None:
    """End it at each character behind its first argument."""
    whole = call_in(parser, "write_file", path="a", content="half")
    for length in range(whole.index("content") - 8, whole.index("half") + 4):
        text = whole[:length]
        for pieces in ([text], list(text)):
            answer = ChatAnswer(parts=read(pieces, rules(FORMATS[parser], tools=ALL), cut_off=cut_off))
            assert (answer.content, answer.calls) == (text, [])
        required = rules(FORMATS[parser], tools=ALL, required=True)
        if cut_off and parser in ("glm47", "qwen3_coder"):
            (call,) = ChatAnswer(parts=read([text], required, cut_off=True)).calls
            assert (call.name, call.arguments) == ("write_file", "")


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>',
        "<tool_call><function=functions.get_weather><parameter=city>Rome</parameter></function></tool_call>",
        '<tool_call>\n<function="get_weather">\n<parameter="city">\nRome\n</parameter>\n</function></tool_call>',
        "<function=functions.get_weather>\n<parameter=city>\nRome\n</parameter>\n</function>",
    ],
)
def test_other_spellings_of_a_call_are_read(text: str) -> None:
    for pieces in ([text], list(text)):
        assert calls_of(answer_of(text, pieces=pieces)) == [("get_weather", {"city": "Rome"})]


TYPED = Tool(
    "typed",
    parameters={
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "needed": {"type": "string"},
            "count": {"type": "integer"},
            "share": {"type": "number"},
            "flag": {"type": "boolean"},
            "list": {"type": "array", "items": {"type": "integer"}},
            "map": {"type": "object"},
            "maybe": {"type": ["string", "null"]},
            "optional": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "either": {"anyOf": [{"type": "string"}, {"type": "array"}]},
            "both": {"type": ["integer", "string"]},
            "word": {"enum": ["1", "2"]},
            "size": {"enum": [1, 2]},
            "point": {"$ref": "#/$defs/point"},
            "any": {},
        },
        "required": ["needed"],
        "$defs": {"point": {"properties": {"x": {"type": "number"}}}},
    },
)


@pytest.mark.parametrize("parser", FORMATS)
@pytest.mark.parametrize(
    ("key", "written", "value"),
    [
        ("text", "12", "12"),
        ("text", "true", "true"),
        ("text", '{"a": 1}', '{"a": 1}'),
        ("text", "null", None),
        ("needed", "null", "null"),
        ("count", "5", 5),
        ("count", "5.0", 5),
        ("count", "five", "five"),
        ("share", "0.5", 0.5),
        ("share", "2", 2),
        ("share", "1e999", "1e999"),
        ("flag", "True", True),
        ("flag", "false", False),
        ("flag", "perhaps", "perhaps"),
        ("list", "[1, 2]", [1, 2]),
        ("list", "(1, 2)", [1, 2]),
        ("list", "[" * 6000, "[" * 6000),
        ("map", '{"a": {"b": [true, null]}}', {"a": {"b": [True, None]}}),
        ("map", "{'a': True}", {"a": True}),
        ("map", '{"a": NaN}', '{"a": NaN}'),
        ("map", '{"a": "x\ny"}', {"a": "x\ny"}),
        ("maybe", "12", "12"),
        ("maybe", "null", None),
        ("maybe", "none", "none"),
        ("optional", "3", 3),
        ("optional", "null", None),
        ("either", '["a"]', ["a"]),
        ("either", "a", "a"),
        ("both", "7", 7),
        ("both", "007", "007"),
        ("word", "1", "1"),
        ("size", "1", 1),
        ("point", '{"x": 1}', {"x": 1}),
        ("any", '{"a": 1}', {"a": 1}),
    ],
)
def test_arguments_have_the_types_of_the_schema(parser: str, key: str, written: str, value: Any) -> None:
    text = call_in(parser, "typed", **{key: written})
    assert calls_of(answer_of(text, FORMATS[parser], tools=(TYPED,))) == [("typed", {key: value})]


@pytest.mark.parametrize(
    ("parser", "key", "value"),
    [
        ("glm47", "maybe", "12"),
        ("glm47", "either", "12"),
        ("glm47", "text", '"12"'),
        ("muse_spark", "text", "12"),
        ("qwen3_coder", "maybe", '"12"'),
        ("minimax_m2", "text", '"12"'),
    ],
)
def test_string_in_json_is_read_where_the_format_has_it(parser: str, key: str, value: str) -> None:
    text = call_in(parser, "typed", **{key: '"12"'})
    assert calls_of(answer_of(text, FORMATS[parser], tools=(TYPED,))) == [("typed", {key: value})]


def test_references_to_a_schema_within_itself_are_followed_once() -> None:
    """Read a schema with so many that following each would take years."""
    node = {"anyOf": [*({"$ref": "#/$defs/node"} for _ in range(12)), {"type": "integer"}]}
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/node"}}, "$defs": {"node": node}}
    text = qwen("nested", a="3")
    assert calls_of(answer_of(text, tools=(Tool("nested", parameters=schema),))) == [("nested", {"a": 3})]


@pytest.mark.parametrize("parser", FORMATS)
def test_call_without_arguments_has_an_empty_object(parser: str) -> None:
    clock = Tool("clock")
    text = call_in(parser, "clock")
    for pieces in ([text], list(text)):
        assert calls_of(answer_of(text, FORMATS[parser], pieces=pieces, tools=(clock,))) == [("clock", {})]


# ---- in any pieces

FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<function=get_weather>", "<function=unknown>", "</function>", "</parameter>",
    "<parameter=city>", "<parameter=days>", "<parameter=other>", "\n", " ", "Rome", "2", "```", "```\n", "<", "<function",
    "<think>", "</think>", "=", ">", qwen(city="Rome", days="2"), qwen("get_time", city="<b>"), "STOP",
    '{"name": "get_time", "arguments": {}}',
]  # fmt: skip
OTHER_FRAGMENTS = [
    "<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="get_weather">', "</invoke>", "</parameter>",
    '<parameter name="city">', '<parameter name="days">', "\n", "Rome", "2", "<", "<tool_call>", "</tool_call>", "get_weather",
    "<arg_key>city</arg_key>", "<arg_value>", "</arg_value>", "<arg_key>", call_in("glm47", "get_time", city="Rome"),
    call_in("minimax_m2", "get_time", city="Rome"),
]  # fmt: skip


@examples(2)
@given(
    parser=st.sampled_from(sorted(FORMATS)),
    fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=14),
    others=st.lists(st.sampled_from(OTHER_FRAGMENTS), max_size=14),
    places=st.lists(st.integers(0, 400), max_size=8),
    settings=st.fixed_dictionaries(
        {
            "early": st.booleans(),
            "parallel": st.booleans(),
            "thinking_open": st.booleans(),
            "stops": st.sampled_from([(), ("STOP",)]),
            "tools": st.sampled_from([(), (TIME,), (WEATHER, TIME)]),
        }
    ),
)
def test_parts_do_not_depend_on_how_the_text_is_split(
    parser: str, fragments: list[str], others: list[str], places: list[int], settings: dict[str, Any]
) -> None:
    text = "".join(fragments if parser == "qwen3_coder" else others)
    format_ = FORMATS[parser]
    whole = read([text], rules(format_, **settings))
    assert read(split_at(text, places), rules(format_, **settings)) == whole
    assert read(text, rules(format_, **settings)) == whole
    for call in ChatAnswer(parts=whole).calls:
        assert isinstance(json.loads(call.arguments), dict)


@given(fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=14), places=st.lists(st.integers(0, 400)))
def test_text_without_a_call_of_a_tool_is_kept_whole(fragments: list[str], places: list[int]) -> None:
    text = "".join(fragments).replace("think>", "b>")
    clock = Tool("clock")
    answer = answer_of(text, pieces=split_at(text, places), tools=(clock,))
    assert (answer.content, answer.calls) == (text, [])


@given(
    value=st.text(st.sampled_from("<>/=\n a\"'{}[]&;\u00e9`")) | st.sampled_from(VALUES),
    places=st.lists(st.integers(0, 400), max_size=6),
    is_bare=st.booleans(),
)
def test_any_text_is_an_argument(value: str, places: list[int], *, is_bare: bool) -> None:
    text = qwen("write_file", path="a", content=value)
    text = f"{text}\n</tool_call>" if is_bare else f"<tool_call>\n{text}\n</tool_call>"
    answer = answer_of(text, pieces=split_at(text, places))
    assert calls_of(answer) == [("write_file", {"path": "a", "content": value})]
    assert answer.content == ""


# ---- arguments in CDATA


@pytest.mark.parametrize("early", [False, True], ids=["whole", "early"])
@pytest.mark.parametrize(
    ("written", "content"),
    [
        ("<![CDATA[<a>\n</function>\n]]>", "<a>\n</function>\n"),
        ('\n<![CDATA[</param><param name="mode">1</param>]]>\n', '</param><param name="mode">1</param>'),
        ("<![CDATA[if a[0]]]]><![CDATA[> 1:]]>", "if a[0]]> 1:"),
        ("<![CDATA[]]>", ""),
        ("a <![CDATA[b]]>", "a <![CDATA[b]]>"),
    ],
)
def test_tags_in_cdata_are_text(written: str, content: str, *, early: bool) -> None:
    call = call_in("minicpm5", "write_file", path="a", content=written)
    text = f"I write.\n{call}\n{call_in('minicpm5', 'get_time')}\nDone."
    for pieces in ([text], list(text)):
        answer = answer_of(text, FORMATS["minicpm5"], pieces=pieces, early=early)
        assert calls_of(answer) == [("write_file", {"path": "a", "content": content}), ("get_time", {})]
        assert answer.content == "I write.Done."


def test_long_cdata_is_read_in_linear_time() -> None:
    """Read so much that quadratic time would take minutes."""
    content = "<a>]]" * 8_000
    text = call_in("minicpm5", "write_file", path="a", content=f"<![CDATA[{content}]]>")
    answer = answer_of(text, FORMATS["minicpm5"], pieces=list(text))
    assert calls_of(answer) == [("write_file", {"path": "a", "content": content})]
