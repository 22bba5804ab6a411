"""`/v1/messages`: parsed requests, messages, and the order of stream events."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from pydantic import TypeAdapter
from tests.api.clients import Api
from tests.api.twins import TwinService
from tests.lazily import lazily

from mlx_ring.api.anthropic.request import MessagesRequest, conversation_of
from mlx_ring.api.anthropic.writer import MessageWriter, Stop, TokenCounts
from mlx_ring.api.chat.model_format import ChatFormat
from mlx_ring.api.chat.request import (
    AnswerPart,
    CallArguments,
    CallOpening,
    ContentText,
    Conversation,
    ReasoningText,
)

if TYPE_CHECKING:
    from anthropic import types
else:
    types = lazily("anthropic.types")

Events = list[Any]
ADD = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}
PARTS: tuple[AnswerPart, ...] = (
    ReasoningText("Let me see."),
    ContentText("I'll "),
    ContentText("add."),
    CallOpening(0, "call_1", "add"),
    CallArguments(0, '{"a"'),
    CallArguments(0, ": 1}"),
    CallOpening(1, "call_2", "add"),
    CallArguments(1, "{}"),
)


def conversation_from(
    messages: list[dict[str, Any]], format_: ChatFormat | None = None, **fields: object
) -> Conversation:
    body = {"max_tokens": 8, "messages": messages} | fields
    return conversation_of(MessagesRequest.model_validate(body), format_ or ChatFormat())


def all_events(writer: MessageWriter) -> Events:
    events: Events = list(writer.opening(TokenCounts(10)))
    for part in PARTS:
        events += writer.part(part)
    return [*events, *writer.closing(Stop("tool_use"), TokenCounts(10, 4, 9, 3))]


def event_outline(events: Events) -> list[tuple[str, object]]:
    """Return each event's kind, with its block's index or its delta's kind."""
    return [
        (str(event["type"]), event["delta"].get("type") if isinstance(event.get("delta"), dict) else event.get("index"))
        for event in events
    ]  # fmt: skip


def test_stream_sends_content_blocks_in_order() -> None:
    events = all_events(MessageWriter("msg_1", "twin"))
    adapter = TypeAdapter[Any](types.RawMessageStreamEvent)
    for event in events:
        if event["type"] != "ping":
            adapter.validate_python(event)
    assert event_outline(events) == [
        ("message_start", None),
        ("ping", None),
        ("content_block_start", 0),
        ("content_block_delta", "thinking_delta"),
        ("content_block_delta", "signature_delta"),
        ("content_block_stop", 0),
        ("content_block_start", 1),
        ("content_block_delta", "text_delta"),
        ("content_block_delta", "text_delta"),
        ("content_block_stop", 1),
        ("content_block_start", 2),
        ("content_block_delta", "input_json_delta"),
        ("content_block_delta", "input_json_delta"),
        ("content_block_stop", 2),
        ("content_block_start", 3),
        ("content_block_delta", "input_json_delta"),
        ("content_block_stop", 3),
        ("message_delta", None),
        ("message_stop", None),
    ]
    start = types.Message.model_validate(events[0]["message"])
    assert (start.content, start.stop_reason, start.usage.input_tokens) == ([], None, 10)
    assert events[-2]["delta"] == {"stop_reason": "tool_use"} | dict.fromkeys(
        ("stop_sequence", "stop_details", "container")
    )
    usage = types.Message.model_validate(events[0]["message"] | {"usage": events[-2]["usage"]}).usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (6, 4, 9)


def test_message_equals_its_accumulated_events() -> None:
    writer = MessageWriter("msg_1", "twin")
    for part in PARTS:
        list(writer.part(part))
    message = types.Message.model_validate(writer.whole(Stop("tool_use"), TokenCounts(10, 4, 9)))
    reasoning, text, first, second = message.content
    assert reasoning.type == "thinking"
    assert (reasoning.thinking, bool(reasoning.signature)) == ("Let me see.", True)
    assert text.to_dict() == {"type": "text", "text": "I'll add."}
    call = {"type": "tool_use", "name": "add", "caller": {"type": "direct"}}
    assert first.to_dict() == call | {"id": "toolu_1", "input": {"a": 1}}
    assert second.to_dict() == call | {"id": "toolu_2", "input": {}}


def test_omitted_reasoning_leaves_its_signature() -> None:
    events = all_events(MessageWriter("msg_1", "twin", shows_thinking=False))
    assert [
        step for step in event_outline(events) if step[1] in (0, "thinking_delta", "signature_delta")
    ] == [
        ("content_block_start", 0),
        ("content_block_delta", "signature_delta"),
        ("content_block_stop", 0),
    ]


def test_a_prompt_that_is_too_long_is_refused_in_anthropics_words() -> None:
    api = Api(TwinService(context=64))
    long = [{"role": "user", "content": "a" * 100}]
    error = api.post("/v1/messages", {"max_tokens": 1, "messages": long}).json()["error"]
    count = error["n_prompt_tokens"]
    assert error["message"].startswith(f"prompt is too long: {count} tokens > 64 maximum. ")


def test_the_prefix_of_the_path_is_optional(api: Api) -> None:
    body = {"max_tokens": 1, "messages": [{"role": "user", "content": "1+1?"}]}
    assert api.post("/messages", body).json()["type"] == "message"
    del body["max_tokens"]
    assert api.post("/messages/count_tokens", body).json()["input_tokens"] > 0
    assert api.post("/messages", {}).json()["error"]["type"] == "invalid_request_error"


def test_results_of_tools_come_before_the_text_of_their_message() -> None:
    calls: list[dict[str, Any]] = [
        {"type": "tool_use", "id": each, "name": "add", "input": {}} for each in ("t1", "t2")
    ]
    results = [{"type": "tool_result", "tool_use_id": each, "content": each} for each in ("t1", "t2")]
    texts = [{"type": "text", "text": text} for text in ("Mind this.", "And this.")]
    conversation = conversation_from(
        [
            {"role": "user", "content": "Add."},
            {"role": "assistant", "content": calls},
            {"role": "user", "content": [texts[0], results[0], texts[1], results[1]]},
        ]
    )
    assert [(message["role"], message["content"]) for message in conversation.messages[2:]] == [
        ("tool", "t1"),
        ("tool", "t2"),
        ("user", "Mind this.\nAnd this."),
    ]


def test_blocks_about_tools_become_text() -> None:
    """Accept what Claude Code sends when it finds tools later, because the block stays in all later requests."""
    added, removed = (
        {"type": kind, "tool": {"type": "tool_reference", "name": "add"}}
        for kind in ("tool_addition", "tool_removal")
    )
    found = [{"type": "text", "text": "Found:"}, {"type": "tool_reference", "tool_name": "add"}]
    conversation = conversation_from(
        [
            {"role": "user", "content": "1+1?"},
            {"role": "system", "content": [{"type": "text", "text": "New tools:"}, added]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "find", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": found}]},
            {"role": "system", "content": [removed]},
        ],
        tools=[ADD | {"defer_loading": True}],
    )
    assert [message["content"] for message in conversation.messages] == [
        "1+1?",
        "New tools:\nThe tool add is available.",
        "",
        "Found:\nThe tool add is available.",
        "The tool add is no longer available.",
    ]
    assert [tool.name for tool in conversation.tool_use.tools] == ["add"]


def test_a_system_message_for_one_turn_is_left_out_of_the_next() -> None:
    once = {"role": "system", "content": "Be quick.", "clear_at": "next_user_message"}
    kept = {"role": "system", "content": "Be kind.", "clear_at": "never"}
    user, answer = {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}
    assert [message["content"] for message in conversation_from([user, kept, once]).messages] == [
        "1+1?",
        "Be kind.\nBe quick.",
    ]
    messages = conversation_from([user, kept, once, answer, user]).messages
    assert [message["content"] for message in messages] == ["1+1?", "Be kind.", "2", "1+1?"]
    assert [message["content"] for message in conversation_from([once]).messages] == ["Be quick."]


def test_content_blocks_become_chat_template_messages() -> None:
    conversation = conversation_from(
        [
            {"role": "user", "content": [{"type": "text", "text": "1+1?"}, {"type": "text", "text": "And 2+2?", "cache_control": {"type": "ephemeral"}}]},
            {"role": "user", "content": "Quick."},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "of another server"},
                    {"type": "redacted_thinking", "data": "xyz"},
                    {"type": "text", "text": "I add."},
                    {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "no"}], "is_error": True},
                    {"type": "tool_result", "tool_use_id": "t0"},
                    {"type": "text", "text": "Well?"},
                ],
            },
            {"role": "assistant", "content": "It is"},
        ],
        system=[
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2"},
            {"type": "text", "text": "Be kind."},
            {"type": "text", "text": "Be brief."},
        ],
        tools=[ADD],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
    )  # fmt: skip
    call = {"id": "t1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    assert conversation.messages == [
        {"role": "system", "content": "Be kind.\nBe brief."},
        {"role": "user", "content": "1+1?\nAnd 2+2?\nQuick."},
        {"role": "assistant", "content": "I add.", "tool_calls": [call], "reasoning_content": "Hm."},
        {"role": "tool", "content": "Error: no", "tool_call_id": "t1", "name": "add"},
        {"role": "tool", "content": "", "tool_call_id": "t0"},
        {"role": "user", "content": "Well?"},
        {"role": "assistant", "content": "It is"},
    ]
    assert conversation.continues
    use = conversation.tool_use
    assert (use.choice, use.parallel, use.tools[0].name) == ("required", False, "add")


@pytest.mark.parametrize(
    ("choice", "chosen"),
    [("auto", ("auto", None)), ("none", ("none", None)), ("tool", ("required", frozenset({"add"})))],
)
def test_tool_choice_is_parsed(choice: str, chosen: object) -> None:
    named = {"name": "add"} if choice == "tool" else {}
    conversation = conversation_from(
        [{"role": "user", "content": "x"}], tools=[ADD], tool_choice={"type": choice} | named
    )
    assert (conversation.tool_use.choice, conversation.tool_use.allowed) == chosen


@pytest.mark.parametrize(
    ("thinking", "known", "kwargs"),
    [
        ({"type": "enabled", "budget_tokens": 2048}, "enable_thinking thinking_budget", {"enable_thinking": True, "thinking_budget": 2048}),
        ({"type": "adaptive"}, "thinking", {"thinking": True}),
        ({"type": "disabled"}, "enable_thinking", {"enable_thinking": False}),
        ({"type": "enabled", "budget_tokens": 2048}, "messages", {}),
        (None, "enable_thinking", {}),
    ],
)  # fmt: skip
def test_template_gets_only_the_thinking_arguments_it_uses(
    thinking: dict[str, object] | None, known: str, kwargs: dict[str, object]
) -> None:
    format_ = ChatFormat(words=frozenset(known.split()))
    conversation = conversation_from([{"role": "user", "content": "x"}], format_, thinking=thinking)
    assert conversation.template_kwargs == kwargs


@pytest.mark.parametrize(
    ("keep", "left"), [("all", 2), (None, 1), ({"type": "thinking_turns", "value": 2}, 2)]
)
def test_earlier_reasoning_is_cleared_on_request(keep: object, left: int) -> None:
    turn = {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": ""}]}
    edit = {"type": "clear_thinking_20251015"} | ({} if keep is None else {"keep": keep})
    conversation = conversation_from(
        [{"role": "user", "content": "x"}, turn, {"role": "user", "content": "y"}, turn, {"role": "user", "content": "z"}],
        context_management={"edits": [edit]},
    )  # fmt: skip
    assert sum("reasoning_content" in message for message in conversation.messages) == left


USER = {"role": "user", "content": "Hello."}


def test_max_tokens_zero_caches_the_prompt_for_the_next_request(api: Api) -> None:
    body = {"messages": [{"role": "user", "content": "Hello. " * 20}]}
    ahead = api.post("/v1/messages", body | {"max_tokens": 0}).json()
    assert (ahead["content"], ahead["stop_reason"]) == ([], "max_tokens")
    assert ahead["usage"]["output_tokens"] == 0
    following = api.post("/v1/messages", body | {"max_tokens": 1}).json()
    assert following["usage"]["cache_read_input_tokens"] == ahead["usage"]["input_tokens"] - 1


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "'max_tokens'"),
    ({"temperature": 1.5}, "'temperature'"),
    ({"messages": []}, "'messages'"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": None}]}]}, "is an image ('image'), and only text is supported"),
    ({"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "Hi"}}]}]}, "is a document; send its text as a text block."),
    ({"messages": [{"role": "user", "content": [{"type": "document", "source": None}]}]}, "is a document ('document'), and only text is supported"),
    ({"messages": [USER, {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "add", "input": {}}]}]}, "'messages[1]'"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "is 'bash_20250124', a tool of Anthropic's own"),
    ({"tools": [{"name": "add"}]}, "'tools[0].input_schema'"),
    ({"tools": [ADD], "tool_choice": {"type": "tool", "name": "sub"}}, "'sub'"),
    ({"tool_choice": {"type": "any"}}, "no 'tools'"),
    ({"tools": [ADD], "tool_choice": {"type": "any", "name": "add"}}, "'tool_choice.name'"),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "clear_thinking"),
    ({"mcp_servers": []}, "'mcp_servers'"),
    ({"speed": "fast"}, "'speed'"),
    ({"stop_sequences": [""]}, "'stop_sequences[0]'"),
    ({"thinking": {"type": "disabled", "budget_tokens": 1024}}, "'thinking.budget_tokens'"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "expected"), REFUSED)
def test_unsupported_field_is_named_in_an_anthropic_error(
    api: Api, fields: dict[str, object], expected: str
) -> None:
    response = api.post("/v1/messages", {"max_tokens": 8, "messages": [USER]} | fields)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert expected in error["message"]
    assert error["message"].endswith(".")
