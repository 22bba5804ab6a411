"""Formats of calls that mlx-lm does not read: they are known by the model's chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.api.chat.call_examples import DSML, deepseek, own_format
from tests.api.chat.formats import TOOLS, read, rules, split_at
from tests.api.twins import ByteTokenizer

from mlx_ring.api.chat import tool_calls
from mlx_ring.api.chat.answer import ChatAnswer
from mlx_ring.api.chat.model_format import JSON_SPELLINGS, read_format
from mlx_ring.api.chat.reader import AnswerReader
from mlx_ring.api.chat.request import CallArguments, ContentText, Tool


def answer_of(name: str, pieces: Sequence[str], *, early: bool, parallel: bool = True) -> ChatAnswer:
    return ChatAnswer(parts=read(pieces, rules(own_format(name), early=early, parallel=parallel)))


def _list(start: str, end: str, names: tuple[str, str] = ("name", "arguments")) -> Callable[[str, str], str]:
    return lambda tool, arguments: f'{start}[{{"{names[0]}": "{tool}", "{names[1]}": {arguments}}}]{end}'


def _seed(tool: str, arguments: str) -> str:
    inside = "".join(
        f"<parameter={key}>{value}</parameter>\n" for key, value in json.loads(arguments).items()
    )
    return f"<seed:tool_call>\n<function={tool}>\n{inside}</function>\n</seed:tool_call>"


_DEEPSEEK: list[Callable[[str, str], str]] = [
    lambda tool, arguments: (
        f"{deepseek('calls begin')}{deepseek('call begin')}function{deepseek('sep')}{tool}\n"
        f"```json\n{arguments}\n```{deepseek('call end')}{deepseek('calls end')}"
    ),
    lambda tool, arguments: (
        f"{deepseek('calls begin')}{deepseek('call begin')}{tool}{deepseek('sep')}{arguments}"
        f"{deepseek('call end')}{deepseek('calls end')}"
    ),
]


def _dsml(tool: str, arguments: str) -> str:
    inside = "".join(
        f'<{DSML}parameter name="{key}" string="{str(isinstance(value, str)).lower()}">{value}</{DSML}parameter>\n'
        for key, value in json.loads(arguments).items()
    )
    return f'<{DSML}function_calls>\n<{DSML}invoke name="{tool}">\n{inside}</{DSML}invoke>\n</{DSML}function_calls>'


WRITTEN: dict[str, list[Callable[[str, str], str]]] = {
    "seed_oss": [_seed, lambda tool, arguments: _seed(tool, arguments).partition("\n")[2]],
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v31": _DEEPSEEK,
    "deepseek_v32": [_dsml],
    "nemotron": [_list("<TOOLCALL>", "</TOOLCALL>")],
    "command": [_list("<|START_ACTION|>\n", "\n<|END_ACTION|>", ("tool_name", "parameters"))],
    "granite": [_list("<|tool_call|>", "")],
    "smollm": [
        lambda tool, arguments: f'<tool_call>\n{{"name": "{tool}", "arguments": {arguments}}}\n</tool_call>'
    ],
    "llama": [
        lambda tool, arguments: f'{{"name": "{tool}", "parameters": {arguments}}}',
        lambda tool, arguments: f'<|python_tag|>{{"name": "{tool}", "parameters": {arguments}}}',
        lambda tool, arguments: f'{{"name": "functions.{tool}", "arguments": {arguments}}}',
        lambda tool, arguments: f'{{"name":"{tool}","parameters":{arguments}}}',
        lambda tool, arguments: (
            f'\n{{\n  "type": "function",\n  "name": "{tool}",\n  "parameters": {arguments}\n}}\n'
        ),
    ],
}
CASES = [(name, write) for name, each in WRITTEN.items() for write in each]
IDS = [f"{name}-{each.index(write)}" for name, each in WRITTEN.items() for write in each]


@pytest.mark.parametrize("early", [False, True], ids=["whole", "early"])
@pytest.mark.parametrize("before", ["", "I look.\n\n"])
@pytest.mark.parametrize(("name", "write"), CASES, ids=IDS)
def test_call_is_read(name: str, write: Callable[[str, str], str], before: str, *, early: bool) -> None:
    call = write("get_weather", '{"city": "Rome", "days": 2}')
    # Behind other text, only a mark makes JSON a call.
    before = "" if call.lstrip().startswith("{") else before
    text = before + call
    for pieces in ([text], list(text)):
        answer = answer_of(name, pieces, early=early)
        (call,) = answer.calls
        assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Rome", "days": 2})
        assert answer.content == before.strip()


@given(
    case=st.sampled_from(CASES),
    before=st.sampled_from(["", "Well.\n"]),
    tool=st.sampled_from(["get_weather", "unknown"]),
    places=st.lists(st.integers(0, 300), max_size=6),
    length=st.integers(1, 300),
    early=st.booleans(),
)
def test_parts_do_not_depend_on_how_the_text_is_split(
    case: Any, before: str, tool: str, places: list[int], length: int, *, early: bool
) -> None:
    name, write = case
    text = (before + write(tool, '{"city": "Rome"}'))[:length]
    whole = answer_of(name, [text], early=early)
    assert answer_of(name, split_at(text, places), early=early) == whole
    assert answer_of(name, list(text), early=early) == whole
    assert whole.calls or whole.content == text


def test_several_calls_are_read() -> None:
    call = '{{"name": "{}", "parameters": {{}}}}'
    text = f"{call.format('get_weather')}; {call.format('get_time')}"
    assert [each.name for each in answer_of("llama3", [text], early=False).calls] == [
        "get_weather",
        "get_time",
    ]
    calls = "".join(
        f"{deepseek('call begin')}{tool.name}{deepseek('sep')}{{}}{deepseek('call end')}" for tool in TOOLS
    )
    text = f"{deepseek('calls begin')}{calls}{deepseek('calls end')}"
    assert [each.name for each in answer_of("deepseek_v31", [text], early=True).calls] == [
        "get_weather",
        "get_time",
    ]


@pytest.mark.parametrize(
    "text",
    [
        'It is {"name": "get_weather", "parameters": {}}.',
        'It is\n{"name": "get_weather", "parameters": {}}\nin JSON.',
        'My tools:\n[\n {"name": "get_weather", "parameters": {}}]',
        '{"name": "get_weather", "parameters": {}, "description": "Say the weather."}',
        '{"name": "get_weather", "parameters": {}',
        '{"name": "get_weather", "parameters": {} and so on',
        '{"name": "Rome", "parameters": {}}',
        '{"name": "get_weather", "age": 3}',
        '```json\n{"name": "get_weather", "parameters": {}}\n```',
        '{"name": "get_weather"}',
    ],
)
def test_other_json_of_llama_is_content(text: str) -> None:
    for pieces in ([text], list(text)):
        answer = answer_of("llama", pieces, early=False)
        assert (answer.content, answer.calls) == (text, [])


def test_json_of_llama_is_held_only_while_it_may_be_a_call() -> None:
    reader = AnswerReader(rules(own_format("llama")))
    assert reader.push('{"name": "get_weather", "par') == []
    assert reader.push('ts": 1}') == [ContentText('{"name": "get_weather", "parts": 1}')]


@pytest.mark.parametrize("early", [False, True], ids=["whole", "early"])
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("llama3", '{"name": "get_weather", "parameters": {}}'),
        ("llama3", '<|python_tag|>{"name": "get_weather", "parameters": {}}; '),
        ("deepseek_v31", f"{deepseek('calls begin')}get_weather{deepseek('sep')}{{}}{deepseek('call end')}"),
        ("deepseek_v31", f"{deepseek('calls begin')}get_weather\n```json\n{{}}\n```"),
    ],
)
def test_text_after_a_call_is_given_out_at_once(name: str, call: str, *, early: bool) -> None:
    reader = AnswerReader(rules(own_format(name), early=early))
    reader.push(call)
    assert reader.push("\n```python") == [ContentText("```python")]
    assert reader.calls == 1
    assert answer_of(name, [f"{call}\n```python"], early=early).content == "```python"


@pytest.mark.parametrize("begun", ["", f"get_weather{deepseek('sep')}", f"get_weather{deepseek('sep')}{{}}"])
def test_long_white_space_is_read_in_linear_time(begun: str) -> None:
    """Read so much that cubic time would take hours."""
    text = deepseek("calls begin") + begun
    answer = answer_of("deepseek_v31", list(text + "\n" * 12_000), early=False)
    assert answer.calls or answer.content.startswith(text)


@dataclass
class CountingPattern:
    """Pattern that counts the characters that it reads."""

    pattern: re.Pattern[str]
    read: int = 0

    def match(self, text: str, start: int = 0) -> re.Match[str] | None:
        found = self.pattern.match(text, start)
        self.read += 1 if found is None else found.end() - start
        return found


@pytest.mark.parametrize("early", [False, True], ids=["whole", "early"])
@pytest.mark.parametrize(
    ("name", "call", "space"),
    [
        ("nemotron", '<TOOLCALL>[{"name": "get_time", "arguments": {}}]', "\n"),
        ("nemotron", '<TOOLCALL>[{"name": "get_time", "arguments": {}}', " ]\n"),
        ("granite", '<|tool_call|>[{"name": "get_time", "arguments": {}}]', "\n"),
        ("granite", '<|tool_call|>{"name": "get_time", "arguments": {}}', ", "),
        ("granite", '<|tool_call|>```json\n[{"name": "get_time", "arguments": {}}]', "\n"),
        ("command", '<|START_ACTION|>[{"tool_name": "get_time", "parameters": {}}]', "\n"),
        ("llama3", '{"name": "get_time", "parameters": {}}', ";\n"),
        ("smollm", '<tool_call>{"name": "get_time", "arguments": {}}', "\n"),
        (
            "deepseek_v31",
            f"{deepseek('calls begin')}get_time{deepseek('sep')}{{}}{deepseek('call end')}",
            "\n",
        ),
        ("deepseek_v3", f"{deepseek('calls begin')}get_time{deepseek('sep')}```json\n{{}}\n```", "\n"),
    ],
)
def test_text_that_closes_a_call_is_read_once(
    name: str, call: str, space: str, monkeypatch: pytest.MonkeyPatch, *, early: bool
) -> None:
    format_ = own_format(name)
    parser = format_.calls.parser if format_.calls is not None else ""
    closing = CountingPattern(JSON_SPELLINGS[parser].closing)
    spelling = replace(JSON_SPELLINGS[parser], closing=cast("Any", closing))
    monkeypatch.setattr(tool_calls, "JSON_SPELLINGS", {**JSON_SPELLINGS, parser: spelling})
    text = call + space * 500
    answer = ChatAnswer(parts=read(list(text), rules(format_, early=early)))
    assert ([made.name for made in answer.calls], answer.content) == (["get_time"], "")
    assert closing.read < 2 * len(text)


def test_template_that_refuses_several_calls_gets_one() -> None:
    single, several = own_format("llama").calls, own_format("llama3").calls
    assert single is not None
    assert several is not None
    assert (single.is_single, several.is_single) == (True, False)


def test_template_without_a_known_format_has_no_calls() -> None:
    tokenizer: Any = ByteTokenizer()
    tokenizer.chat_template = "{{ tools }}{{ messages }}"
    assert read_format(tokenizer).calls is None


_ROME = '{"city": "Rome"}'
_LISTED = {"nemotron": ("<TOOLCALL>", "</TOOLCALL>"), "granite": ("<|tool_call|>", "")}


@pytest.mark.parametrize("early", [False, True], ids=["whole", "early"])
@pytest.mark.parametrize("name", _LISTED)
@pytest.mark.parametrize(
    "written",
    [
        '[{"name": "get_weather", "arguments": {"city": "Rome"}}, {"name": "get_time", "arguments": {}}]',
        '[{{"name": "get_weather", "arguments": {"city": "Rome"}}}, {{"name": "get_time", "arguments": {}}}]',
        '[{"name": "get_weather", "arguments": {"city": "Rome"}}, {"arguments": {}, "name": "get_time"}]',
        '[{"name": "get_weather", "arguments": {"city": "Rome"}}, {"name": "get_time", "arguments": "{}"}]',
        '[{"name": "get_weather", "arguments": "{\\"city\\": \\"Rome\\"}"}, {"name": "get_time", "arguments": {}}]',
        '[{"name": "get_weather", "arguments": {"city": "Rome"}}, {"name": "get_time", "arguments": {}}',
        '\n[\n  {"name": "get_weather", "arguments": {"city": "Rome"}},\n  {"name": "get_time", "arguments": {}}\n]\n',
        '```json\n[{"name": "get_weather", "arguments": {"city": "Rome"}}, {"name": "get_time", "arguments": {}}]\n```',
        '{"name": "get_weather", "arguments": {"city": "Rome"}}\n{"name": "get_time", "arguments": {}}',
        '[{"name": "get_weather", "arguments": {"city": "Rome"}}][{"name": "get_time", "arguments": {}}]',
    ],
)
def test_listed_calls_in_other_spellings_are_read(name: str, written: str, *, early: bool) -> None:
    start, end = _LISTED[name]
    text = f"I look.\n{start}{written}{end}"
    for pieces in ([text], list(text)):
        answer = answer_of(name, pieces, early=early)
        assert [(call.name, call.arguments) for call in answer.calls] == [
            ("get_weather", _ROME),
            ("get_time", "{}"),
        ]
        assert answer.content == "I look."
        alone = answer_of(name, pieces, early=early, parallel=False)
        assert [call.name for call in alone.calls] == ["get_weather"]


@pytest.mark.parametrize("name", _LISTED)
def test_block_of_code_after_listed_calls_is_content(name: str) -> None:
    start, end = _LISTED[name]
    call = '[{"name": "get_time", "arguments": {}}]'
    for pieces in ([text := f"{start}{call}, ```json\n{call}\n```{end}"], list(text)):
        answer = answer_of(name, pieces, early=False)
        assert [call.name for call in answer.calls] == ["get_time"]
        assert answer.content.startswith(f"```json\n{call}")


def test_listed_arguments_are_streamed_as_they_arrive() -> None:
    reader = AnswerReader(rules(own_format("granite"), early=True))
    reader.push('<|tool_call|>[{"name": "get_weather", "arguments": {"city":')
    assert reader.push(' "Ro') == [CallArguments(0, ' "Ro')]


@pytest.mark.parametrize("early", [False, True], ids=["whole", "early"])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("granite", f'<tool_call>[{{"name": "get_weather", "arguments": {_ROME}}}]'),
        (
            "deepseek_v31",
            f"{deepseek('call begin')}get_weather{deepseek('sep')}{_ROME}{deepseek('call end')}",
        ),
        (
            "deepseek_v3",
            f"{deepseek('call begin')}function{deepseek('sep')}get_weather\n```json\n{_ROME}\n```{deepseek('call end')}",
        ),
    ],
)
def test_calls_behind_other_first_marks_are_read(name: str, text: str, *, early: bool) -> None:
    for pieces in ([text], list(text)):
        answer = answer_of(name, pieces, early=early)
        assert [(call.name, call.arguments) for call in answer.calls] == [("get_weather", _ROME)]
        assert answer.content == ""


@pytest.mark.parametrize("city", ["5", "null", '"Rome"', " Rome ", "\nRome\n", "<b>Rome</b>", '{"a": 1}'])
def test_argument_whose_tag_says_that_it_is_a_string_stays_as_it_is(city: str) -> None:
    tool = Tool(
        "find", parameters={"type": "object", "properties": {"where": {"type": ["integer", "string"]}}}
    )
    text = _dsml("find", json.dumps({"where": city}))
    for pieces in ([text], list(text)):
        (call,) = ChatAnswer(parts=read(pieces, rules(own_format("deepseek_v32"), tools=[tool]))).calls
        assert json.loads(call.arguments) == {"where": city}
    (number,) = ChatAnswer(
        parts=read([_dsml("find", '{"where": 5}')], rules(own_format("deepseek_v32"), tools=[tool]))
    ).calls
    assert json.loads(number.arguments) == {"where": 5}


def test_command_reasons_and_answers_between_marks() -> None:
    call = '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_time", "parameters": {}}\n]<|END_ACTION|>'
    for text, content, calls in (
        (f"<|START_THINKING|>I look.<|END_THINKING|>{call}", "", ["get_time"]),
        ("<|START_THINKING|>I look.<|END_THINKING|><|START_RESPONSE|>Hi.<|END_RESPONSE|>", "Hi.", []),
    ):
        for pieces in ([text], list(text)):
            answer = answer_of("command", pieces, early=True)
            assert (answer.reasoning, answer.content) == ("I look.", content)
            assert [call.name for call in answer.calls] == calls
