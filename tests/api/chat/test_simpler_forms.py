"""Conversations that a strict chat template rejects, and the simpler forms that it then gets."""

from __future__ import annotations

import time
from collections.abc import Mapping
from itertools import count
from typing import Any

import pytest

from mlx_ring.api.chat.request import Conversation, arguments_of, for_template, simpler_forms, template_call
from mlx_ring.api.chat.templates import render
from mlx_ring.core.errors import RequestError
from mlx_ring.head.served_model import prepare_model
from mlx_ring.settings.settings_sources import load_settings

SYSTEM_FIRST = """
{%- for m in messages %}
    {%- if m.role == 'system' and not loop.first %}{{ raise_exception('System message must be at the beginning.') }}{% endif %}
    {{- '[' ~ m.role ~ ':' ~ m.content ~ ']' }}
{%- endfor %}
"""
"""Template with the rule of Qwen3.5's."""
ALTERNATING = """
{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for m in messages %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate.') }}{% endif %}
    {{- '[' ~ m.role ~ ':' ~ m.content ~ ']' }}
{%- endfor %}
"""
"""Template with the rules of Gemma 2's."""
SHORT_IDS = """
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {%- if m.tool_call_id is not defined or m.tool_call_id | length != 9 %}{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}
        {{- '[result ' ~ m.tool_call_id ~ ':' ~ m.content ~ ']' }}
    {%- elif m.tool_calls is defined %}{% for call in m.tool_calls %}
        {%- if call.id is not defined or call.id | length != 9 %}{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}
        {{- '[call ' ~ call.id ~ ']' }}
    {%- endfor %}{% endif %}
{%- endfor %}
"""
"""Template with the rules of Mistral's, of versions 3 to 7."""
ITEMS = """
{%- for m in messages %}{% for call in m.tool_calls or [] %}
    {{- '<' ~ call.function.name ~ '>' }}
    {%- for name, value in call.function.arguments | items %}{{ name ~ '=' ~ value }}{% endfor %}
{%- endfor %}{% endfor %}
"""
"""Loop of Qwen3-Coder's and GLM's templates."""

JOINED = """
{%- for m in messages %}
    {%- if m.role == 'system' and not loop.first %}{{ raise_exception('System message must be at the beginning.') }}{% endif %}
    {{- '[' ~ m.role ~ ':' ~ m.content ~ ']' }}
    {%- for call in m.tool_calls or [] %}{{ '<' + call.function.name + ':' + call.function.arguments + '>' }}{% endfor %}
{%- endfor %}
"""
"""Template that joins arguments with other text, as DeepSeek's do, and has the rule of Qwen3.5's."""

Message = Mapping[str, object]
SYSTEM: Message = {"role": "system", "content": "Be brief."}
USER: Message = {"role": "user", "content": "Hello."}
ANSWER: Message = {"role": "assistant", "content": "Hi."}
REMINDER: Message = {"role": "system", "content": "Answer in French."}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return prepare_model(load_settings({"model": "demo"})).tokenizer


def rendered(tokenizer: Any, source: str, messages: list[Message], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(tokenizer._tokenizer, "chat_template", source)
    text = render(tokenizer, for_template(Conversation(messages), calls_have_one_text=False))
    assert isinstance(text, str)
    return text


def called(arguments: object, *ids: str | None) -> Message:
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [template_call("f", arguments, each) for each in ids],
    }


def result(content: str, call_id: str | None) -> Message:
    return {"role": "tool", "content": content} | ({} if call_id is None else {"tool_call_id": call_id})


def test_a_system_message_amid_the_chat_becomes_the_users_where_the_template_wants_it_first(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = [SYSTEM, USER, ANSWER, REMINDER, USER]
    assert rendered(tokenizer, SYSTEM_FIRST, chat, monkeypatch) == (
        "[system:Be brief.][user:Hello.][assistant:Hi.][user:Answer in French.\nHello.]"
    )
    # This form writes the messages before it as the template did when it took them, so the cached prefix matches.
    assert (
        rendered(tokenizer, SYSTEM_FIRST, chat[:3], monkeypatch)
        == "[system:Be brief.][user:Hello.][assistant:Hi.]"
    )
    assert rendered(tokenizer, SYSTEM_FIRST, [SYSTEM, REMINDER, USER], monkeypatch) == (
        "[system:Be brief.\nAnswer in French.][user:Hello.]"
    )


def test_roles_alternate_and_are_two_where_the_template_wants_it(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = rendered(tokenizer, ALTERNATING, [SYSTEM, USER, USER, ANSWER, ANSWER, REMINDER, USER], monkeypatch)
    assert text == "[user:Be brief.\nHello.\nHello.][assistant:Hi.\nHi.][user:Answer in French.\nHello.]"


def test_ids_of_calls_have_nine_characters_where_the_template_wants_it(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = [USER, called({}, "call_0123456789abcdef", "toolu_02"), result("2", "toolu_02")]
    text = rendered(tokenizer, SHORT_IDS, [*chat, result("1", "call_0123456789abcdef")], monkeypatch)
    first, second = [piece.removeprefix("call ") for piece in text[1:-1].split("][")[:2]]
    assert first != second
    assert text == f"[call {first}][call {second}][result {first}:1][result {second}:2]"
    assert rendered(
        tokenizer, SHORT_IDS, [USER, called({}, "abcDEF123"), result("1", "abcDEF123")], monkeypatch
    ) == ("[call abcDEF123][result abcDEF123:1]")


def test_arguments_are_json_where_the_template_joins_them_with_text(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = [USER, called({"city": "Zürich", "days": 2}, "abcDEF123"), result("1", "abcDEF123")]
    text = '[user:Hello.][assistant:]<f:{"city": "Zürich", "days": 2}>[tool:1]'
    assert rendered(tokenizer, JOINED, chat, monkeypatch) == text
    assert rendered(tokenizer, JOINED, [*chat, REMINDER], monkeypatch) == f"{text}[user:Answer in French.]"


def test_calls_without_ids_get_some_where_the_template_wants_it(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = [
        USER,
        called({}, None, None),
        result("1", None),
        result("2", None),
        called({}, None),
        result("3", None),
    ]
    pieces = rendered(tokenizer, SHORT_IDS, chat, monkeypatch)[1:-1].split("][")
    first, second, third = (pieces[place].removeprefix("call ") for place in (0, 1, 4))
    assert len({first, second, third}) == 3
    assert [pieces[2], pieces[3], pieces[5]] == [
        f"result {first}:1",
        f"result {second}:2",
        f"result {third}:3",
    ]


def test_arguments_that_are_no_object_do_not_block_the_rest_of_a_chat(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Send a call back that a limit cut off, as clients do in every later request."""
    for text, shown in (
        ('{"path": "/tm', 'arguments={"path": "/tm'),
        ("[1]", "arguments=[1]"),
        ("", ""),
        ("null", ""),
    ):
        chat = [USER, called(arguments_of(text), "call_1")]
        assert rendered(tokenizer, ITEMS, chat, monkeypatch) == f"<f>{shown}"


def test_a_template_that_takes_messages_gets_them_unchanged(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
    assert rendered(tokenizer, plain, [SYSTEM, USER, USER, REMINDER], monkeypatch) == (
        "[system:Be brief.][user:Hello.][user:Hello.][system:Answer in French.]"
    )


def test_the_template_s_first_refusal_is_the_answer_if_no_form_helps(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "{{ raise_exception('no ' ~ messages | length) }}"
    with pytest.raises(RequestError, match="rejects these messages: no 3"):
        rendered(tokenizer, source, [USER, USER, REMINDER], monkeypatch)


def test_a_template_that_takes_too_much_is_not_tried_again(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "{% if messages | length == 3 %}{{ 10 ** 9999999 }}{% endif %}"
    with pytest.raises(RequestError, match="makes a number"):
        rendered(tokenizer, source, [USER, USER, REMINDER], monkeypatch)


def test_all_forms_share_one_limit_of_time(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # Each form looks at the clock three times, each a second later, so there is time for less than two.
    late = "{% for i in range(512) %}{% endfor %}{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}{{ messages | length }}"
    chat = [SYSTEM, USER, ANSWER, ANSWER]
    monkeypatch.setattr(time, "thread_time", lambda: 0.0)
    assert rendered(tokenizer, late, chat, monkeypatch) == "2"
    monkeypatch.setattr(time, "thread_time", count().__next__)
    with pytest.raises(RequestError, match="rejects these messages: no"):
        rendered(tokenizer, late, chat, monkeypatch)


def test_no_form_follows_one_that_takes_too_much(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "{% if messages | length == 4 %}{{ raise_exception('no') }}{% elif messages[0].role == 'system' %}{{ 10 ** 9999999 }}{% endif %}"
    with pytest.raises(RequestError, match="rejects these messages: no"):
        rendered(tokenizer, source, [SYSTEM, USER, ANSWER, ANSWER], monkeypatch)


def test_forms_that_change_nothing_are_left_out() -> None:
    assert list(simpler_forms([SYSTEM, USER, ANSWER])) == [
        [{"role": "user", "content": "Be brief.\nHello."}, ANSWER]
    ]
    assert list(simpler_forms([USER, ANSWER])) == []
