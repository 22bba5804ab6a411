"""Conversations prepared for the engine, and their answers."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from tests.api.chat.formats import WEATHER
from tests.api.twins import ANSWER, ByteTokenizer, MarkingTokenizer, TwinCatalog, TwinService
from tests.default_settings import make_api_settings

from mlx_ring.api.chat.answer import ChatGeneration
from mlx_ring.api.chat.prepare import PreparedChat, encode_conversation, prepare_chat
from mlx_ring.api.chat.request import AnswerFormat, Conversation, ToolUse
from mlx_ring.api.context import ApiContext
from mlx_ring.api.generation import Generation
from mlx_ring.core.errors import ContextExceeded, RequestError
from mlx_ring.core.types import SamplingParams

USER = {"role": "user", "content": "Hello."}


def prepare(conversation: Conversation, service: TwinService | None = None) -> PreparedChat:
    service = service or TwinService(tokenizer=MarkingTokenizer())
    context = ApiContext(TwinCatalog(service), make_api_settings())
    return asyncio.run(
        prepare_chat(context, service, conversation, [SamplingParams(stop=("x",))], request_id="r")
    )


def test_stop_strings_are_applied_by_the_reader_not_the_engine() -> None:
    chat = prepare(Conversation([USER]))
    assert chat.requests[0].sampling.stop == ()
    assert chat.rules[0].stops == ("x",)


def test_call_tokens_are_shown_only_where_tools_can_be_called() -> None:
    assert prepare(Conversation([USER])).requests[0].shown_tokens == {259, 260}
    use = ToolUse([WEATHER])
    assert prepare(Conversation([USER], use)).requests[0].shown_tokens == {259, 260, 261, 262}
    assert prepare(Conversation([USER], replace(use, choice="none"))).requests[0].shown_tokens == {259, 260}


@pytest.mark.processes
def test_tool_choice_none_bars_the_token_that_opens_a_call() -> None:
    use = ToolUse([WEATHER])
    for choice, logit_bias in (("none", ((261, -100.0),)), ("auto", ()), ("required", ())):
        sampling = prepare(Conversation([USER], replace(use, choice=choice))).requests[0].sampling
        assert sampling.logit_bias == logit_bias
    assert prepare(Conversation([USER])).requests[0].sampling.logit_bias == ()


@pytest.mark.parametrize(
    ("prefix", "opened"), [("One and", False), ("<think>Hm", True), ("<think>Hm</think>One", False)]
)
def test_last_assistant_message_is_continued(prefix: str, *, opened: bool) -> None:
    chat = prepare(Conversation([USER, {"role": "assistant", "content": prefix}], continues=True))
    prompt = list(chat.requests[0].prompt_tokens)
    assert prompt.index(ANSWER) == 1
    assert chat.rules[0].thinking_open is opened


CALL: dict[str, object] = {"type": "function", "function": {"name": "f", "arguments": {}}}
REASONING: dict[str, object] = {"reasoning_content": "Hm.", "reasoning": "Hm.", "thinking": "Hm."}


def test_template_gets_reasoning_under_each_of_its_names() -> None:
    """Use the field names of Qwen, Gemma and gpt-oss."""
    service = TwinService(tokenizer=MarkingTokenizer())
    called: dict[str, object] = {"role": "assistant", "content": "I look.", "tool_calls": [CALL]}
    plain = {"role": "assistant", "content": "One."}
    prepare(Conversation([USER, {**called, "reasoning_content": "Hm."}, plain]), service)
    assert service.tokenizer.conversation == [USER, {**called, **REASONING}, plain]


def gpt_oss_tokenizer() -> ByteTokenizer:
    tokenizer = ByteTokenizer()
    names = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>", "<|call|>")
    tokenizer.special = dict(enumerate(names, start=256))
    return tokenizer


ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|>"
START = "<|start|>assistant"


@pytest.mark.parametrize(
    ("content", "reasoning", "text", "calls"),
    [
        (f"{ANALYSIS}{START}<|channel|>final<|message|>Yes.<|return|>", "Hm.", "Yes.", []),
        ("<|channel|>final<|message|>Yes.", None, "Yes.", []),
        ("<|channel|>analysis<|message|>Hm.<|channel|>final<|message|>Yes.", "Hm.", "Yes.", []),
        ("<|channel|>analysis<|message|>Hm.", "Hm.", "", []),
        (
            f'{ANALYSIS}{START}<|channel|>commentary to=functions.f <|constrain|>json<|message|>{{"a": 1}}<|call|>',
            "Hm.",
            "",
            [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}],
        ),
        (
            f"{START} to=functions.f<|channel|>commentary json<|message|>{{}}<|call|>",
            None,
            "",
            [{"type": "function", "function": {"name": "f", "arguments": dict[str, object]()}}],
        ),
        (
            "It writes <|channel|>final<|message|>Yes.<|end|>",
            None,
            "It writes <|channel|>final<|message|>Yes.<|end|>",
            [],
        ),
        ("It writes <|channel|> first.", None, "It writes <|channel|> first.", []),
    ],
)
def test_gpt_oss_gets_no_channels_in_earlier_answers(
    content: str, reasoning: str | None, text: str, calls: list[Any]
) -> None:
    """Send back raw answers, which its template refuses."""
    tokenizer = gpt_oss_tokenizer()
    given: dict[str, object] = {"role": "assistant", "content": content}
    prepare(Conversation([{"role": "user", "content": content}, given]), TwinService(tokenizer=tokenizer))
    asked, answer = tokenizer.conversation
    assert asked["content"] == content
    assert (answer["content"], answer.get("thinking"), answer.get("tool_calls", [])) == (
        text,
        reasoning,
        calls,
    )


def test_reasoning_of_gpt_oss_has_no_channels() -> None:
    tokenizer = gpt_oss_tokenizer()
    given: dict[str, object] = {"role": "assistant", "content": "Yes.", "reasoning_content": ANALYSIS}
    prepare(Conversation([USER, given]), TwinService(tokenizer=tokenizer))
    assert (tokenizer.conversation[1]["content"], tokenizer.conversation[1]["thinking"]) == ("Yes.", "Hm.")


def test_other_models_get_channels_as_text() -> None:
    tokenizer = ByteTokenizer()
    given: dict[str, object] = {"role": "assistant", "content": ANALYSIS}
    prepare(Conversation([USER, given]), TwinService(tokenizer=tokenizer))
    assert tokenizer.conversation[1]["content"] == ANALYSIS


def test_gpt_oss_gets_one_reasoning_text_beside_a_tool_call() -> None:
    """Join both texts, because its template refuses content next to reasoning there."""
    tokenizer = gpt_oss_tokenizer()
    service = TwinService(tokenizer=tokenizer)
    both: dict[str, object] = {"role": "assistant", "content": "I look.", "reasoning_content": "Hm."}
    prepare(Conversation([USER, both | {"tool_calls": [CALL]}, both]), service)
    _, call, answer = tokenizer.conversation
    assert (call["content"], call["thinking"]) == ("", "Hm.\nI look.")
    assert (answer["content"], answer["thinking"]) == ("I look.", "Hm.")


def test_response_format_is_refused_for_a_continued_answer() -> None:
    continued = Conversation([USER, {"role": "assistant", "content": "{"}], continues=True)
    with pytest.raises(RequestError, match="whole answer") as refused:
        prepare(replace(continued, format=AnswerFormat("json_object", param="format")))
    assert refused.value.param == "format"


def test_only_an_assistant_message_can_be_continued() -> None:
    with pytest.raises(RequestError, match="not the assistant's") as refused:
        prepare(Conversation([USER], continues=True, messages_param="input"))
    assert refused.value.param == "input"


def test_errors_name_the_fields_of_the_dialect() -> None:
    plain = TwinService(tokenizer=ByteTokenizer(), context=8)
    with pytest.raises(RequestError) as refused:
        prepare(Conversation([USER], template_kwargs={"tools": []}, kwargs_param="options"))
    assert refused.value.param == "options.tools"
    chat = prepare(Conversation([USER], messages_param="input"), plain)

    async def run() -> None:
        async with Generation(plain.engine, chat.requests, chat.prompt_field):
            pass

    with pytest.raises(ContextExceeded) as exceeded:
        asyncio.run(run())
    assert exceeded.value.param == "input"


def test_prompt_is_counted_without_generation() -> None:
    service = TwinService(tokenizer=MarkingTokenizer())
    context = ApiContext(TwinCatalog(service), make_api_settings())
    prompt = asyncio.run(encode_conversation(context, service, Conversation([USER])))
    assert len(prompt) == prepare(Conversation([USER])).prompt_tokens
    assert not service.executor.sent


def test_concurrent_answers_are_parsed_independently() -> None:
    service = TwinService(tokenizer=MarkingTokenizer(), says="<think>Hm.</think>One. Two.")
    context = ApiContext(TwinCatalog(service), make_api_settings())
    sampling = [SamplingParams(), SamplingParams(stop=(" ",)), SamplingParams(max_tokens=2)]

    async def run() -> ChatGeneration:
        chat = await prepare_chat(context, service, Conversation([USER]), sampling, request_id="r")
        async with Generation(service.engine, chat.requests, chat.prompt_field) as generation:
            chat_generation = ChatGeneration(generation, chat)
            async for _ in chat_generation.batches():
                pass
            return chat_generation

    whole, stopped, cut_off = asyncio.run(run()).answers
    assert (whole.reasoning, whole.content, whole.end) == ("Hm.", "One. Two.", "stop")
    assert (stopped.content, stopped.end, stopped.stop_match) == ("One.", "stop", " ")
    assert (cut_off.reasoning, cut_off.content, cut_off.end) == ("H", "", "length")
    assert [answer.completion_tokens for answer in (whole, stopped, cut_off)] == [15, 10, 2]
    assert [answer.reasoning_tokens for answer in (whole, stopped, cut_off)] == [5, 5, 2]
    assert all(answer.timings is not None for answer in (whole, stopped, cut_off))
