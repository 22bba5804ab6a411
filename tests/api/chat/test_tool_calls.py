"""Every tool call format of mlx-lm, each with a typical answer."""

from __future__ import annotations

import ast
import json
import pkgutil
import subprocess
import sys
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.api.chat.call_examples import ARGUMENTS, FORMATS, IDS, CallExample
from tests.api.chat.formats import call_marks, read, rules, split_at

from mlx_ring.api.chat import tool_calls
from mlx_ring.api.chat.answer import ChatAnswer
from mlx_ring.api.chat.model_format import CallMarks, ChatFormat

ANSWERS = {
    "function_gemma": "<start_function_call>call:get_weather{city:<escape>Paris, France<escape>,days:2}<end_function_call>",
    "gemma4": '<|tool_call>call:get_weather{city:<|"|>Paris, France<|"|>,days:2}<tool_call|>',
    "glm47": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris, France</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
    "json_tools": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris, France", "days": 2}}\n</tool_call>',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
    '{"city": "Paris, France", "days": 2}<|tool_call_end|><|tool_calls_section_end|>',
    "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|>'
    '<|open|>argument key="city" type="string"<|sep|>Paris, France<|close|>argument<|sep|>'
    '<|open|>argument key="days" type="number"<|sep|>2<|close|>argument<|sep|>'
    "<|close|>call<|sep|><|close|>tools<|sep|>",
    "laguna": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris, France</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
    "longcat": "<longcat_tool_call>get_weather\n<longcat_arg_key>city</longcat_arg_key>\n"
    "<longcat_arg_value>Paris, France</longcat_arg_value>\n<longcat_arg_key>days</longcat_arg_key>\n"
    "<longcat_arg_value>2</longcat_arg_value>\n</longcat_tool_call>",
    "minicpm5": '<function name="get_weather"><param name="city">Paris, France</param><param name="days">2</param></function>',
    "minimax_m2": '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris, France</parameter>\n'
    '<parameter name="days">2</parameter>\n</invoke>\n</minimax:tool_call>',
    "mistral": '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris, France", "days": 2}',
    "muse_spark": '<atem:function_calls>\n<atem:invoke name="get_weather">\n'
    '<atem:parameter name="city">Paris, France</atem:parameter>\n<atem:parameter name="days">2</atem:parameter>\n'
    "</atem:invoke>\n</atem:function_calls>",
    "pythonic": '<|tool_call_start|>[get_weather(city="Paris, France", days=2)]<|tool_call_end|>',
    "qwen3_coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis, France\n</parameter>\n"
    "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>",
}
JSON_ARGUMENTS = ("json_tools", "kimi_k2", "mistral")
"""Formats whose arguments are JSON, which are read before the call ends."""
TWO = {
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
    '{"city": "Rome"}<|tool_call_end|><|tool_call_begin|>functions.get_time:1<|tool_call_argument_begin|>'
    '{"city": "Rome"}<|tool_call_end|><|tool_calls_section_end|>',
    "minimax_m2": '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Rome</parameter>\n</invoke>\n'
    '<invoke name="get_time">\n<parameter name="city">Rome</parameter>\n</invoke>\n</minimax:tool_call>',
    "mistral": '[TOOL_CALLS]get_weather[ARGS]{"city": "Rome"}[TOOL_CALLS]get_time[ARGS]{"city": "Rome"}',
    "pythonic": '<|tool_call_start|>[get_weather(city="Rome"), get_time(city="Rome")]<|tool_call_end|>',
}


def answer_of(
    pieces: list[str], parser: str, *, early: bool = False, parallel: bool = True, cut_off: bool = False
) -> ChatAnswer:
    reading_rules = rules(ChatFormat(calls=call_marks(parser)), early=early, parallel=parallel)
    return ChatAnswer(parts=read(pieces, reading_rules, cut_off=cut_off))


def test_every_mlx_lm_parser_has_an_example() -> None:
    import mlx_lm.tool_parsers as parsers  # already imported without MLX

    assert {module.name for module in pkgutil.iter_modules(parsers.__path__)} == set(ANSWERS)


@pytest.mark.parametrize("early", [False, True], ids=["whole", "early"])
@pytest.mark.parametrize("parser", ANSWERS)
def test_tool_call_has_its_name_and_arguments(parser: str, *, early: bool) -> None:
    answer = answer_of([f"Let me look.\n{ANSWERS[parser]}"], parser, early=early)
    assert answer.content == "Let me look."
    assert [call.name for call in answer.calls] == ["get_weather"]
    assert json.loads(answer.calls[0].arguments) == {"city": "Paris, France", "days": 2}


@given(
    parser=st.sampled_from(sorted(ANSWERS)),
    places=st.lists(st.integers(0, 300), max_size=6),
    early=st.booleans(),
)
def test_tool_call_does_not_depend_on_how_the_text_is_split(
    parser: str, places: list[int], *, early: bool
) -> None:
    whole = answer_of([ANSWERS[parser]], parser, early=early)
    assert answer_of(split_at(ANSWERS[parser], places), parser, early=early) == whole
    assert answer_of(list(ANSWERS[parser]), parser, early=early) == whole


@given(parser=st.sampled_from(sorted(ANSWERS)), length=st.integers(1, 300))
def test_truncated_tool_call_loses_no_text(parser: str, length: int) -> None:
    text = ANSWERS[parser][:length]
    answer = answer_of([text], parser)
    assert answer.calls or answer.content == text


@given(parser=st.sampled_from(sorted(JSON_ARGUMENTS)), length=st.integers(1, 300))
def test_truncated_tool_call_is_the_same_streamed_and_whole(parser: str, length: int) -> None:
    text = ANSWERS[parser][:length]
    whole, streamed = (answer_of([text], parser, early=early, cut_off=True) for early in (False, True))
    assert whole.content == streamed.content
    assert [(call.name, call.arguments) for call in whole.calls] == [
        (call.name, call.arguments) for call in streamed.calls
    ]
    if '"city"' in text:
        assert [call.name for call in whole.calls] == ["get_weather"]


@pytest.mark.parametrize("early", [False, True], ids=["whole", "early"])
@pytest.mark.parametrize(
    ("text", "marks"),
    [
        *((each.whole(each.minimal_call), each.marks()) for each in FORMATS),
        (ANSWERS["muse_spark"], call_marks("muse_spark")),
    ],
    ids=[*IDS, "muse_spark"],
)
def test_required_call_that_is_cut_off_is_no_text(text: str, marks: CallMarks, *, early: bool) -> None:
    """Cut off a call after each of its characters."""
    format_ = ChatFormat(calls=marks)
    name_ends = text.index("get_weather") + len("get_weather") + 1
    for length in range(len(text)):
        reading_rules = rules(format_, early=early, required=True)
        answer = ChatAnswer(parts=read(text[:length], reading_rules, cut_off=True))
        assert answer.content == ""
        if length < name_ends - 1:
            assert not answer.calls
        elif length > name_ends:
            assert [call.name for call in answer.calls] == ["get_weather"]
    beginning = text[: name_ends + 1]
    (call,) = ChatAnswer(
        parts=read(beginning, rules(format_, early=early, required=True), cut_off=True)
    ).calls
    assert json.loads(call.arguments or "{}") == {}


@pytest.mark.parametrize("early", [False, True], ids=["whole", "early"])
@pytest.mark.parametrize("example", [each for each in FORMATS if each.separator is not None])
def test_required_call_keeps_its_arguments_if_the_next_one_is_cut_off(
    example: CallExample, *, early: bool
) -> None:
    """Cut off two calls after each character behind the first one."""
    text = example.two_calls()
    is_list = example.call.startswith("[")
    first_end = len(example.marks().start + example.call) - is_list
    second_end = text.rindex("get_weather") + len("get_weather") + 1
    for length in range(first_end, len(text)):
        reading_rules = rules(ChatFormat(calls=example.marks()), early=early, required=True)
        answer = ChatAnswer(parts=read(text[:length], reading_rules, cut_off=True))
        assert answer.content == ""
        assert json.loads(answer.calls[0].arguments) == json.loads(ARGUMENTS)
        if is_list:
            assert len(answer.calls) == 1 + (length >= second_end), text[:length]


def test_only_the_first_call_of_a_list_counts_if_several_are_not_allowed() -> None:
    example = next(each for each in FORMATS if each.parser == "pythonic")
    reading_rules = rules(ChatFormat(calls=example.marks()), parallel=False, required=True)
    answer = ChatAnswer(parts=read(example.two_calls()[:-30], reading_rules, cut_off=True))
    assert [json.loads(call.arguments) for call in answer.calls] == [json.loads(ARGUMENTS)]


def test_commas_within_arguments_are_no_ends_of_calls() -> None:
    example = next(each for each in FORMATS if each.parser == "pythonic")
    text = f"{example.marks().start}[get_weather(city='x), get_weather(city=1), get_weather(', days"
    reading_rules = rules(ChatFormat(calls=example.marks()), required=True)
    answer = ChatAnswer(parts=read(text, reading_rules, cut_off=True))
    assert [(call.name, call.arguments) for call in answer.calls] == [("get_weather", "")]


@pytest.mark.parametrize("entry", ['"a, get_weather(1)", ', "get_weather(1), ", "get_weather(["])
def test_a_long_list_that_is_cut_off_is_parsed_twice_at_most(
    entry: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[str] = []

    def parse(text: str) -> object:
        parsed.append(text)
        return ast.parse(text, mode="eval")

    monkeypatch.setitem(cast("dict[str, Any]", getattr(tool_calls, "_READ_LIST")), "pythonic", parse)  # noqa: B009 - private
    example = next(each for each in FORMATS if each.parser == "pythonic")
    text = f"{example.marks().start}{example.call[:-1]}, get_weather(city=[{entry * 200}"
    reading_rules = rules(ChatFormat(calls=example.marks()), required=True)
    answer = ChatAnswer(parts=read(text, reading_rules, cut_off=True))
    assert [json.loads(call.arguments or "null") for call in answer.calls] == [json.loads(ARGUMENTS), None]
    assert len(parsed) <= 2


@pytest.mark.parametrize("early", [False, True], ids=["whole", "early"])
@pytest.mark.parametrize("parser", TWO)
def test_several_tool_calls_in_one_pair_of_marks_are_all_read(parser: str, *, early: bool) -> None:
    answer = answer_of([TWO[parser]], parser, early=early)
    assert [call.name for call in answer.calls] == ["get_weather", "get_time"]
    assert answer.content == ""
    alone = answer_of([TWO[parser]], parser, early=early, parallel=False)
    assert [call.name for call in alone.calls] == ["get_weather"]


@pytest.mark.parametrize(
    "text",
    [
        '{"arguments": {}, "name": ["get_time"]}',
        '{"arguments": [], "name": "get_time"}',
        '{"arguments": {}, "name": "get_time_2"}',
        '{"name": "functions_get_time", "arguments": {}}',
        '{"arguments": {"a": NaN}, "name": "get_time"}',
        '["get_time"]',
        '{"arguments": ' + '{"a": ' * 5000 + "1" + "}" * 5001,
    ],
)
def test_json_that_is_not_a_tool_call_is_content(text: str) -> None:
    text = f"<tool_call>{text}</tool_call>"
    answer = answer_of([text], "json_tools")
    assert (answer.content, answer.calls) == (text, [])


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ("days:[1,2],city:<escape>a}, b<escape>", {"days": [1, 2], "city": "a}, b"}),
        ("city:{name:<escape>Rome<escape>,at:[1.5,2]}", {"city": {"name": "Rome", "at": [1.5, 2]}}),
        ("city:Rome,days:2", {"city": "Rome", "days": 2}),
        ('city:<escape><|"|><escape>', {"city": '<|"|>'}),
    ],
)
def test_function_gemma_arguments_may_be_nested_or_unquoted(written: str, arguments: Any) -> None:
    """Use arguments that mlx-lm's own parser cuts off at the first comma or brace."""
    text = f"<start_function_call>call:get_weather{{{written}}}<end_function_call>"
    (call,) = answer_of([text], "function_gemma").calls
    assert json.loads(call.arguments) == arguments


_CALL = "<|tool_call_begin|>{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
_ROME = '{"city": "Rome"}'


@pytest.mark.parametrize("early", [False, True], ids=["whole", "early"])
@pytest.mark.parametrize(
    ("written", "call_id"),
    [
        ("functions.get_weather:0", "functions.get_weather:0"),
        ("functions_get_weather_0", "functions_get_weather_0"),
        ("get_weather:3", "get_weather:3"),
        ("get_weather", None),
        ("functions.get_weather", None),
    ],
)
@pytest.mark.parametrize("arguments", [_ROME, json.dumps(_ROME), ""])
def test_names_of_kimi_calls_are_read_however_they_are_written(
    written: str, call_id: str | None, arguments: str, *, early: bool
) -> None:
    text = f"<|tool_calls_section_begin|>{_CALL.format(written, arguments)}<|tool_calls_section_end|>"
    if arguments != _ROME and ":" not in written:
        return
    for pieces in ([text], list(text)):
        (call,) = answer_of(pieces, "kimi_k2", early=early).calls
        assert call.name == "get_weather"
        assert call.id == (call_id or "c0")
        assert json.loads(call.arguments) == (json.loads(_ROME) if arguments else {})


@pytest.mark.parametrize("early", [False, True], ids=["whole", "early"])
@pytest.mark.parametrize(
    ("start", "end"),
    [
        ("<|tool_call_section_begin|>", "<|tool_call_section_end|>"),
        ("", ""),
        ("", "<|tool_calls_section_end|>"),
    ],
)
def test_kimi_calls_without_the_marks_around_them_are_read(start: str, end: str, *, early: bool) -> None:
    calls = _CALL.format("functions.get_weather:0", _ROME) + _CALL.format("functions.get_time:1", _ROME)
    text = f"I look.{start}{calls}{end}"
    for pieces in ([text], list(text)):
        answer = answer_of(pieces, "kimi_k2", early=early)
        assert ([call.name for call in answer.calls], answer.content) == (
            ["get_weather", "get_time"],
            "I look.",
        )


@pytest.mark.parametrize("early", [False, True], ids=["whole", "early"])
@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (
            f"[TOOL_CALLS]get_weather{_ROME}[TOOL_CALLS]get_time{_ROME}",
            [("get_weather", _ROME), ("get_time", _ROME)],
        ),
        ("[TOOL_CALLS]get_weather[ARGS]", [("get_weather", "{}")]),
        (f'[TOOL_CALLS] {{"name": "get_weather", "arguments": {_ROME}}}', [("get_weather", _ROME)]),
    ],
)
def test_mistral_calls_of_other_versions_are_read(
    text: str, calls: list[tuple[str, str]], *, early: bool
) -> None:
    for pieces in ([text], list(text)):
        answer = answer_of(pieces, "mistral", early=early)
        assert [(call.name, call.arguments) for call in answer.calls] == calls
        assert answer.content == ""


@pytest.mark.parametrize("early", [False, True], ids=["whole", "early"])
@pytest.mark.parametrize(
    ("parser", "text", "content"),
    [
        ("mistral", f'[TOOL_CALLS] [{{"name": "get_time", "arguments": {_ROME}}}]\n\nDone.', "Done."),
        ("mistral", f"[TOOL_CALLS]get_time[ARGS]{_ROME}\nDone.", "Done."),
        ("kimi_k2", _CALL.format("functions.get_time:0", _ROME) + "I call it.", "I call it."),
        (
            "json_tools",
            f'<tool_call>{{"name": "get_time", "arguments": {_ROME}, "id": "c1"}}</tool_call>',
            "",
        ),
        (
            "json_tools",
            f'<tool_call>{{"name": "get_time", "arguments": {_ROME}}}\n```python\nx\n```</tool_call>',
            "```python\nx\n```</tool_call>",
        ),
    ],
)
def test_text_after_a_call_is_kept(parser: str, text: str, content: str, *, early: bool) -> None:
    for pieces in ([text], list(text)):
        answer = answer_of(pieces, parser, early=early)
        assert [(call.name, call.arguments) for call in answer.calls] == [("get_time", _ROME)]
        assert answer.content == content


@pytest.mark.parametrize("early", [False, True], ids=["whole", "early"])
def test_backslash_before_a_line_break_is_kept(*, early: bool) -> None:
    for call in (
        '{"name": "get_time", "arguments": {"city": "docker run \\\n -p"}}',
        '{"arguments": {"city": "docker run \\\n -p"}, "name": "get_time"}',
    ):
        answer = answer_of([f"<tool_call>{call}</tool_call>"], "json_tools", early=early)
        assert json.loads(answer.calls[0].arguments) == {"city": "docker run \\\n -p"}


@pytest.mark.parametrize("text", ["<|tool_calls_section_begin|>", "<|tool_call_begin|>functions.get_time:0"])
def test_long_white_space_around_a_name_is_read_in_linear_time(text: str) -> None:
    """Read so much that cubic time would take hours."""
    answer = answer_of(list(text + "\n" * 12_000), "kimi_k2")
    assert answer.content.startswith(text)


@pytest.mark.parametrize("early", [False, True], ids=["whole", "early"])
@pytest.mark.parametrize(
    "call",
    [
        '{"name": "functions.get_weather", "arguments": {}}',
        '{"name": "get_weather", "arguments": ""}',
        '{"type": "function", "function": {"name": "get_weather", "arguments": {}}}',
        '{"function": "get_weather", "arguments": {}}',
    ],
)
def test_json_calls_of_other_shapes_are_read(call: str, *, early: bool) -> None:
    text = f"<tool_call>\n{call}\n</tool_call>"
    for pieces in ([text], list(text)):
        answer = answer_of(pieces, "json_tools", early=early)
        assert [(call.name, call.arguments) for call in answer.calls] == [("get_weather", "{}")]
        assert answer.content == ""


@pytest.mark.parametrize("early", [False, True], ids=["whole", "early"])
@pytest.mark.parametrize(
    "call",
    [
        '{"name": "get_weather", "arguments": {"city": "True, ", "days": 2, "sky": True, "at": [1, 2e1, ], "x": None,\n}}',
        "{'name': 'get_weather', 'arguments': {'city': 'True, ', 'days': 2, 'sky': True, 'at': [1, 20], 'x': None}}",
        '{{"name": "get_weather", "arguments": {"city": "True, ", "days": 2, "sky": true, "at": [1, 20], "x": null}}}',
        '{"name": "get_weather", "arguments": {"city": "True, ", "days": 2, "sky": true, "at": [1, 20], "x": null}}}',
        '```json\n{"name": "get_weather", "arguments": {"city": "True, ", "days": 2, "sky": true, "at": [1, 20], "x": null}}\n```',
    ],
)
def test_json_calls_with_common_faults_are_mended(call: str, *, early: bool) -> None:
    text = f"<tool_call>\n{call}\n</tool_call>"
    for pieces in ([text], list(text)):
        answer = answer_of(pieces, "json_tools", early=early)
        assert answer.content == ""
        (made,) = answer.calls
        assert json.loads(made.arguments) == {
            "city": "True, ",
            "days": 2,
            "sky": True,
            "at": [1, 20],
            "x": None,
        }


@pytest.mark.parametrize("word", ["Truth", "tru", "Nan", "NaN", "nullx", "true1", "1true", "eE", "Infinity"])
@pytest.mark.parametrize("early", [False, True], ids=["whole", "early"])
def test_other_words_in_arguments_are_no_values(word: str, *, early: bool) -> None:
    text = f'<tool_call>{{"name": "get_time", "arguments": {{"city": {word}}}}}</tool_call>'
    for pieces in ([text], list(text)):
        answer = answer_of(pieces, "json_tools", early=early)
        if early:
            assert answer.calls[0].arguments.startswith(f'{{"city": {word}')
        else:
            assert (answer.content, answer.calls) == (text, [])


@pytest.mark.parametrize("early", [False, True], ids=["whole", "early"])
@pytest.mark.parametrize("parser", ["json_tools", "kimi_k2", "qwen3_coder"])
def test_mark_after_a_call_may_be_missing_before_the_next_one(parser: str, *, early: bool) -> None:
    marks = call_marks(parser)
    text = f"{ANSWERS[parser].removesuffix(marks.end)}{ANSWERS[parser]}\nDone."
    for pieces in ([text], list(text)):
        answer = answer_of(pieces, parser, early=early)
        assert [call.name for call in answer.calls] == ["get_weather", "get_weather"]
        assert answer.content == "Done."


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('get_weather(city="Rome")', {"city": "Rome"}),
        ('[get_weather("Rome", 2)]', {"city": "Rome", "days": 2}),
        ('[get_weather("Rome", sky=true)]', {"city": "Rome", "sky": True}),
        ('[get_weather({"city": "Rome, it\'s"})]', {"city": "Rome, it's"}),
        ('[functions.get_weather(city="Rome")]', {"city": "Rome"}),
        ('[{"name": "get_weather", "arguments": {"city": "Rome"}}]', {"city": "Rome"}),
        ('[get_weather(**{"city": "Rome"}, days=2)]', {"city": "Rome", "days": 2}),
        ('[get_weather(city="a\nb", from="c", d="\\d")]', {"city": "a\nb", "from": "c", "d": "\\d"}),
        ('[get_weather({"lat": 1})]', {"city": {"lat": 1}}),
    ],
)
def test_pythonic_calls_in_other_spellings_are_read(written: str, arguments: Any) -> None:
    (call,) = answer_of([f"<|tool_call_start|>{written}<|tool_call_end|>"], "pythonic").calls
    assert (call.name, json.loads(call.arguments)) == ("get_weather", arguments)


@pytest.mark.parametrize(
    "arguments",
    ['"Rome", 2, True, 4', '"Rome", city="Paris"', '**{"planet": 1}', "**more", 'city="Rome", f(x)', "*all"],
)
def test_pythonic_arguments_that_fit_no_parameter_are_no_call(arguments: str) -> None:
    text = f"<|tool_call_start|>[get_weather({arguments})]<|tool_call_end|>"
    answer = answer_of([text], "pythonic")
    assert (answer.content, answer.calls) == (text, [])


def test_unknown_escapes_give_no_warning() -> None:
    code = "import ast; from mlx_ring.api.chat.argument_values import parsed_json; print(parsed_json(r\"{'a': '\\d'}\"))"
    done = subprocess.run(
        [sys.executable, "-W", "always", "-c", code], capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("{'a': '\\\\d'}\n", "")


@pytest.mark.parametrize("parser", ["gemma4", "function_gemma"])
@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ("call:functions.get_weather{city:<Q>Rome<Q>}", {"city": "Rome"}),
        ("call:get_weather{city: <Q>a, b: {c<Q>, days: 2}", {"city": "a, b: {c", "days": 2}),
        ('call:get_weather{"city":"a,b:c"}', {"city": "a,b:c"}),
        (
            "call:get_weather{my-key:[1,{a:<Q>b<Q>}],sky:True,x:None}",
            {"my-key": [1, {"a": "b"}], "sky": True, "x": None},
        ),
    ],
)
def test_gemma_calls_in_other_spellings_are_read(parser: str, written: str, arguments: Any) -> None:
    marks = call_marks(parser)
    quote = '<|"|>' if parser == "gemma4" else "<escape>"
    (call,) = answer_of([f"{marks.start}{written.replace('<Q>', quote)}{marks.end}"], parser).calls
    assert (call.name, json.loads(call.arguments)) == ("get_weather", arguments)


def test_lone_surrogate_in_arguments_can_be_sent() -> None:
    text = '<tool_call>{"arguments": {"city": "\\ud83d é"}, "name": "get_time"}</tool_call>'
    (call,) = answer_of([text], "json_tools").calls
    assert call.arguments.encode()
    assert json.loads(call.arguments) == {"city": "\ud83d é"}


def test_tool_call_id_of_the_model_is_kept() -> None:
    assert answer_of([ANSWERS["kimi_k2"]], "kimi_k2").calls[0].id == "functions.get_weather:0"


def test_early_arguments_equal_those_of_mlx_lms_parser() -> None:
    for parser in ("json_tools", "kimi_k2", "mistral"):
        parsed: Any = call_marks(parser).parse(_between(parser), [])
        first: Any = parsed[0] if parser == "kimi_k2" else parsed
        early = answer_of(list(ANSWERS[parser]), parser, early=True).calls[0]
        assert (early.name, json.loads(early.arguments)) == (first["name"], first["arguments"])


def _between(parser: str) -> str:
    marks = call_marks(parser)
    return ANSWERS[parser].removeprefix(marks.start).removesuffix(marks.end)
