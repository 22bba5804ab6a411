"""`/v1/chat/completions`: tool calls, reasoning and response formats."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.api.chat.formats import call_marks
from tests.api.clients import Api, events, refusal
from tests.api.twins import MarkingTokenizer, TwinService

from mlx_ring.api.chat.answer import ChatAnswer
from mlx_ring.api.openai.chat import ChatCompletionWriter
from mlx_ring.api.openai.messages import check_names
from mlx_ring.core.errors import RequestError
from mlx_ring.rpc.failures import error_to_failure

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
TIME: dict[str, Any] = {"type": "function", "function": {"name": "get_time"}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'


def reasoning_api(answer: str = "Hello.") -> Api:
    """Return a client of a model that reasons, calls tools and gives this answer."""
    return Api(TwinService(tokenizer=MarkingTokenizer(), says=answer))


def message_of(api: Api, **fields: object) -> dict[str, Any]:
    return api.chat(**fields).json()["choices"][0]["message"]


def joined(chunks: list[dict[str, Any]], name: str) -> str:
    """Join the text of all deltas."""
    return "".join(chunk["choices"][0]["delta"].get(name) or "" for chunk in chunks)


def test_tool_call_message_has_no_content() -> None:
    choice = reasoning_api(CALL).chat(tools=[TOOL]).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert set(message) == {"role", "content", "refusal", "annotations", "tool_calls"}
    assert message["content"] is None
    (call,) = message["tool_calls"]
    assert call["id"].startswith("call_")
    assert call["type"] == "function"
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Zürich"}'}


def test_streamed_tool_call_sends_its_name_once_and_then_its_arguments() -> None:
    chunks = events(reasoning_api(f"Look.\n{CALL}").chat(tools=[TOOL], stream=True))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": "", "refusal": None}
    assert joined(chunks, "content") == "Look."
    calls = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert calls[0] == {
        "index": 0,
        "id": calls[0]["id"],
        "type": "function",
        "function": {"name": "get_weather", "arguments": ""},
    }
    assert len(calls) > 5
    assert all(
        set(call) == {"index", "function"} and set(call["function"]) == {"arguments"} for call in calls[1:]
    )
    assert json.loads("".join(call["function"]["arguments"] for call in calls)) == {"city": "Zürich"}
    assert deltas[-1] == {}
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_stream_of_an_answer_that_must_call_a_tool_begins_without_content() -> None:
    [first] = ChatCompletionWriter("chatcmpl-1", "twin", None, must_call=True).opening([ChatAnswer()])
    assert first["choices"][0]["delta"] == {"role": "assistant", "refusal": None}


def test_all_tools_are_passed_to_the_template() -> None:
    api = reasoning_api(CALL)
    assert api.chat(tools=[TOOL, TIME], tool_choice="auto").status_code == 200
    tools = api.service.tokenizer.template_kwargs["tools"]
    empty: dict[str, object] = {"type": "object", "properties": {}}
    assert tools == [TOOL, {"type": "function", "function": TIME["function"] | {"parameters": empty}}]


@pytest.mark.processes
def test_tools_in_the_form_of_the_responses_api_are_the_same_tools() -> None:
    api = reasoning_api(CALL)
    flat = {"type": "function", **TOOL["function"], "strict": False}
    choice = {"type": "function", "name": "get_weather"}
    assert api.chat(tools=[flat, TIME], tool_choice="auto").status_code == 200
    offered: Any = api.service.tokenizer.template_kwargs["tools"]
    assert offered[0] == TOOL
    call = message_of(api, tools=[flat, TIME], tool_choice=choice, reasoning_effort="none")["tool_calls"][0]
    assert call["function"]["name"] == "get_weather"
    param, message = refusal(api.chat(tools=[flat], tool_choice=choice | {"name": "other"}))
    assert param == "tool_choice.name"
    assert "'other'" in message
    param, _ = refusal(api.chat(tools=[{**flat, "name": "no name"}]))
    assert param == "tools[0].name"


def test_custom_tools_are_refused_and_the_error_names_functions() -> None:
    for tool in ({"type": "custom", "name": "f"}, {"type": "custom", "custom": {"name": "f"}}):
        param, message = refusal(reasoning_api().chat(tools=[TOOL, tool]))
        assert param == "tools[1].type"
        assert "'function'" in message


@pytest.mark.parametrize("without_messages", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {"input": "Hello."},
        {"input": [{"role": "user", "content": "Hello."}], "instructions": "Be brief."},
        {"instructions": "Be brief."},
        {"text": {"format": {"type": "text"}}},
        {"max_output_tokens": 9},
    ],
)
def test_fields_of_the_responses_api_are_refused_and_the_error_names_its_route(
    fields: dict[str, object], *, without_messages: bool
) -> None:
    messages = {} if without_messages else {"messages": [{"role": "user", "content": "Hello."}]}
    param, message = refusal(Api().post("/v1/chat/completions", {"model": "m", **messages, **fields}))
    assert param == next(iter(fields))
    assert "/v1/responses" in message


class CoderTokenizer(MarkingTokenizer):
    """Tokenizer of a model like Qwen3-Coder."""

    @staticmethod
    def tool_parser(text: str, tools: Any = None) -> Any:
        return call_marks("qwen3_coder").parse(text, tools)


CoderTokenizer.tool_parser.__module__ = "mlx_lm.tool_parsers.qwen3_coder"
BARE = "I look.\n\n<function=get_weather>\n<parameter=city>\n</a>\n</parameter>\n</function>\n</tool_call>"


def test_call_without_its_first_mark_is_a_call_in_every_dialect() -> None:
    api, function = Api(TwinService(tokenizer=CoderTokenizer(), says=BARE)), TOOL["function"]
    arguments = {"city": "</a>"}
    choice = api.chat(tools=[TOOL]).json()["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", "I look.")
    assert json.loads(call["function"]["arguments"]) == arguments
    chunks = events(api.chat(tools=[TOOL], stream=True))
    assert joined(chunks, "content") == "I look."
    pieces = [
        each["function"] for chunk in chunks for each in chunk["choices"][0]["delta"].get("tool_calls", [])
    ]
    assert json.loads("".join(piece["arguments"] for piece in pieces)) == arguments
    messages = [{"role": "user", "content": "Hello."}]
    tool = {"name": function["name"], "input_schema": function["parameters"]}
    anthropic = {"messages": messages, "tools": [tool], "max_tokens": 500}
    text, use = api.post("/v1/messages", anthropic).json()["content"]
    assert (text["text"], use["input"]) == ("I look.", arguments)
    responses = {"input": "Hello.", "tools": [{"type": "function", **function}]}
    said, called = api.post("/v1/responses", responses).json()["output"]
    assert (said["content"][0]["text"], json.loads(called["arguments"])) == ("I look.", arguments)
    ollama = api.post("/api/chat", {"messages": messages, "tools": [TOOL], "stream": False}).json()["message"]
    assert (ollama["content"], ollama["tool_calls"][0]["function"]["arguments"]) == ("I look.", arguments)


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "none"},
        {
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "auto",
                    "tools": [{"type": "function", "function": {"name": "get_time"}}],
                },
            }
        },
        {
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "name": "get_time"}]},
            }
        },
    ],
)
def test_disallowed_tool_call_is_content(fields: dict[str, object]) -> None:
    message = message_of(reasoning_api(CALL), tools=[TOOL, TIME], **fields)
    assert "tool_calls" not in message
    assert '"get_weather"' in message["content"]


def test_generation_stops_after_one_call_without_parallel_tool_calls() -> None:
    api = reasoning_api(f"{CALL}\n{CALL} and on" + "x" * 200)
    body = api.chat(tools=[TOOL], parallel_tool_calls=False).json()
    assert len(body["choices"][0]["message"]["tool_calls"]) == 1
    assert body["usage"]["completion_tokens"] < len(CALL.encode())
    assert api.service.engine.stats().finished == {"stop": 1}
    assert body["performance"]["generation_s"] >= 0


def test_reasoning_has_both_field_names_and_is_counted() -> None:
    api = reasoning_api("<think>\nHm.\n</think>\n\nHello.")
    body = api.chat().json()
    message = body["choices"][0]["message"]
    assert message["content"] == "Hello."
    assert message["reasoning"] == message["reasoning_content"] == "Hm."
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == len("<\nHm.\n>")
    chunks = events(api.chat(stream=True))
    assert joined(chunks, "reasoning") == joined(chunks, "reasoning_content") == "Hm."
    assert joined(chunks, "content") == "Hello."


@pytest.mark.parametrize(
    "fields", [{"chat_template_kwargs": {"enable_thinking": True}}, {"reasoning_effort": "low"}]
)
def test_answer_starts_in_reasoning_opened_by_the_template(fields: dict[str, object]) -> None:
    # The opening mark and the line break of the prompt take the place of the first two tokens of the answer.
    message = message_of(reasoning_api("..Hm.</think>Hello."), **fields)
    assert (message["reasoning"], message["content"]) == ("Hm.", "Hello.")


def test_reasoning_effort_sets_enable_thinking() -> None:
    api = reasoning_api()
    for effort, enabled in (("none", False), ("minimal", True), ("high", True)):
        assert api.chat(reasoning_effort=effort).status_code == 200
        assert api.service.tokenizer.template_kwargs == {"enable_thinking": enabled}
    param, message = refusal(api.chat(reasoning_effort="low", chat_template_kwargs={"enable_thinking": True}))
    assert param == "reasoning_effort"
    assert "chat_template_kwargs.enable_thinking" in message


def test_template_argument_unknown_to_the_template_is_refused() -> None:
    param, message = refusal(
        reasoning_api().chat(chat_template_kwargs={"enable_thinking": False, "style": "dry"})
    )
    assert param == "chat_template_kwargs.style"
    assert "chat_template_kwargs.style" in message


def test_too_many_tools_are_refused() -> None:
    tools = [{"type": "function", "function": {"name": f"f{number}"}} for number in range(1_025)]
    param, message = refusal(reasoning_api().chat(tools=tools, tool_choice="required"))
    assert param == "tools"
    assert "1024" in message


def test_duplicate_tool_names_are_found_in_linear_time() -> None:
    """Check so many names that quadratic time would take minutes."""
    names = [f"f{number}" for number in range(400_000)]
    check_names(names, "tools[{}]")
    with pytest.raises(RequestError, match="'f7'") as refused:
        check_names([*names, "f7"], "tools[{}]")
    assert refused.value.param == "tools[400000]"


def test_template_with_reasoning_effort_gets_it_unchanged() -> None:
    api = reasoning_api()
    api.service.tokenizer.chat_template = "{{ reasoning_effort }}"
    assert api.chat(reasoning_effort="high").status_code == 200
    assert api.service.tokenizer.template_kwargs == {"reasoning_effort": "high"}


def test_model_without_reasoning_accepts_only_effort_none(api: Api) -> None:
    assert api.chat(reasoning_effort="none").status_code == 200
    param, message = refusal(api.chat(reasoning_effort="high"))
    assert param == "reasoning_effort"
    assert "no setting for the reasoning effort" in message


def test_stop_string_in_reasoning_is_ignored() -> None:
    api = reasoning_api("<think>a: b</think>One: two")
    body = api.chat(stop=":").json()
    assert body["choices"][0]["message"]["content"] == "One"
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == len("<a: b>One:")
    assert api.service.engine.stats().finished == {"stop": 1}


def test_logprobs_include_special_tokens_and_arguments() -> None:
    api = reasoning_api(f"<think>Hm.</think>{CALL}")
    tokens = len("<Hm.><\n") + len('{"name": "get_weather", "arguments": {"city": "Zürich"}}'.encode()) + 3
    whole = api.chat(tools=[TOOL], logprobs=True).json()
    assert len(whole["choices"][0]["logprobs"]["content"]) == tokens == whole["usage"]["completion_tokens"]
    chunks = events(api.chat(tools=[TOOL], logprobs=True, stream=True))
    streamed = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert sum(len(scored["content"]) for scored in streamed if scored) == tokens


def test_answer_cut_off_inside_a_tool_call_ends_with_length() -> None:
    api = reasoning_api(CALL)
    choice = api.chat(tools=[TOOL], max_tokens=45).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] is None
    arguments = choice["message"]["tool_calls"][0]["function"]["arguments"]
    for parallel in (True, False):
        chunks = events(api.chat(tools=[TOOL], max_tokens=45, stream=True, parallel_tool_calls=parallel))
        deltas = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", [])]
        assert "".join(call["function"]["arguments"] for call in deltas) == arguments != ""
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("parallel", [True, False])
def test_stop_token_of_a_request_cuts_a_tool_call_off(*, parallel: bool) -> None:
    api = reasoning_api(CALL)
    body = {"tools": [TOOL], "stop_token_ids": [ord("Z")], "parallel_tool_calls": parallel}
    choice = api.chat(**body).json()["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", None)
    assert [call["function"] for call in choice["message"]["tool_calls"]] == [
        {"name": "get_weather", "arguments": '{"city": "'}
    ]
    chunks = events(api.chat(**body, stream=True))
    deltas = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", [])]
    assert "".join(call["function"]["arguments"] for call in deltas) == '{"city": "'
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert (
        api.chat(tools=[TOOL], stop_token_ids=[ord("|")]).json()["choices"][0]["finish_reason"]
        == "tool_calls"
    )


@pytest.mark.processes
@pytest.mark.parametrize("max_tokens", [1, 12, 24, 30, 45])
def test_required_tool_call_that_is_cut_off_has_no_text_in_any_dialect(max_tokens: int) -> None:
    api, function = reasoning_api(CALL), TOOL["function"]
    chat = {"tools": [TOOL], "tool_choice": "required", "reasoning_effort": "none", "max_tokens": max_tokens}
    choice = api.chat(**chat).json()["choices"][0]
    calls = [each["function"] for each in choice["message"].get("tool_calls", [])]
    assert (choice["finish_reason"], choice["message"]["content"] or "") == ("length", "")
    assert [call["name"] for call in calls] == (["get_weather"] if max_tokens >= 24 else [])
    chunks = [chunk["choices"][0] for chunk in events(api.chat(**chat, stream=True))]
    assert not any(chunk["delta"].get("content") for chunk in chunks)
    deltas = [call["function"] for chunk in chunks for call in chunk["delta"].get("tool_calls", [])]
    assert "".join(delta.get("name", "") for delta in deltas) == "".join(call["name"] for call in calls)
    assert "".join(delta["arguments"] for delta in deltas) == "".join(call["arguments"] for call in calls)

    anthropic = {
        "messages": [{"role": "user", "content": "Hello."}],
        "tools": [{"name": function["name"], "input_schema": function["parameters"]}],
        "tool_choice": {"type": "any"},
        "max_tokens": max_tokens,
    }
    message = api.post("/v1/messages", anthropic).json()
    assert message["stop_reason"] == "max_tokens"
    assert [(block["type"], block["input"]) for block in message["content"]] == [
        ("tool_use", {}) for _ in calls
    ]
    responses = {
        "input": "Hello.",
        "tools": [{"type": "function", **function}],
        "tool_choice": "required",
        "reasoning": {"effort": "none"},
        "max_output_tokens": max(16, max_tokens),
    }
    response = api.post("/v1/responses", responses).json()
    assert response["status"] == "incomplete"
    assert [(item["type"], item["arguments"]) for item in response["output"]] == [
        ("function_call", call["arguments"]) for call in calls
    ]


def test_reasoning_and_tool_calls_are_accepted_as_history_without_content() -> None:
    api = reasoning_api(f"<think>Hm.</think>{CALL}")
    first = message_of(api, tools=[TOOL])
    result = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "sunny"}
    body = {"messages": [{"role": "user", "content": "?"}, first, result], "tools": [TOOL]}
    assert api.post("/v1/chat/completions", body).status_code == 200
    sent = api.service.tokenizer.conversation[1]
    assert sent["reasoning_content"] == "Hm."
    assert sent["tool_calls"] == [
        {
            "id": first["tool_calls"][0]["id"],
            "type": "function",
            "function": {"name": "get_weather", "arguments": {"city": "Zürich"}},
        }
    ]


def test_values_that_an_sdk_parsed_and_cache_breakpoints_are_ignored_in_history(api: Api) -> None:
    function = {"name": "get_weather", "arguments": '{"city": "Rome"}', "parsed_arguments": {"city": "Rome"}}
    call = {"id": "call_1", "type": "function", "function": function}
    part = {"type": "text", "text": "Hello.", "prompt_cache_breakpoint": {"mode": "explicit"}}
    history = [
        {"role": "user", "content": [part]},
        {"role": "assistant", "content": '{"a": 1}', "parsed": {"a": 1}},
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": None, "parsed": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Sunny."},
    ]
    assert api.post("/v1/chat/completions", {"messages": history, "max_tokens": 1}).status_code == 200


def test_fields_of_other_providers_are_accepted_in_history_and_tools() -> None:
    api = Api(TwinService(tokenizer=MarkingTokenizer()))
    mark = {"cache_control": {"type": "ephemeral"}}
    encrypted: dict[str, Any] = {"type": "reasoning.encrypted", "data": "xyz", "index": 1}
    summary: dict[str, Any] = {"type": "reasoning.summary", "summary": "Or so."}
    answers: list[dict[str, Any]] = [
        {
            "reasoning_details": [
                {"type": "reasoning.text", "text": "Hm.", "signature": "s"},
                encrypted,
                summary,
            ]
        },
        {"thinking_blocks": [{"type": "thinking", "thinking": "Hm.", "signature": "s"}]},
        {"reasoning": "Own.", "reasoning_details": [summary], "provider_specific_fields": {"refusal": None}},
        {"reasoning_details": [encrypted]},
        {"reasoning_details": [encrypted], "thinking_blocks": [{"type": "thinking", "thinking": "Hm."}]},
        {"reasoning_details": [encrypted], "content": None},
        {"thinking_blocks": [{"type": "redacted_thinking", "data": "xyz"}], "content": None},
    ]
    history = [{"role": "assistant", "content": "a", **answer, **mark} for answer in answers]
    part: dict[str, Any] = {"type": "text", "text": "b", **mark}
    messages = [{"role": "system", "content": "c", **mark}, *history, {"role": "user", "content": [part]}]
    tools = [{"type": "function", **mark, "function": {"name": "f", **mark}}]
    assert api.chat(messages=messages, tools=tools).status_code == 200
    reasoning = [message.get("reasoning_content") for message in api.service.tokenizer.conversation[1:8]]
    assert reasoning == ["Hm.\nOr so.", "Hm.", "Own.", None, "Hm.", None, None]


def test_tools_are_refused_where_the_template_has_no_place_for_them(api: Api) -> None:
    param, message = refusal(api.chat(tools=[TOOL]))
    assert param == "tools"
    assert "does not support tools" in message


def function(**changes: object) -> dict[str, object]:
    return {"type": "function", "function": TOOL["function"] | changes}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tools": [function(name="two words")]}, "tools[0].function.name"),
        ({"tools": [function(name="x" * 65)]}, "tools[0].function.name"),
        ({"tools": [TOOL, TIME, TOOL]}, "tools[2].function.name"),
        ({"tools": [function(parameters={"type": "string"})]}, "tools[0].function.parameters"),
        ({"tools": [function(parameters="none")]}, "tools[0].function.parameters"),
        ({"tools": [function(strict="yes")]}, "tools[0].function.strict"),
        ({"tools": [function(mood=1)]}, "tools[0].function.mood"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
        ({"tools": {}}, "tools"),
        ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice.function.name"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
            "tool_choice.allowed_tools.tools",
        ),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "response_format.json_schema.name"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema"),
        ({"reasoning_effort": "much"}, "reasoning_effort"),
    ],
)  # fmt: skip
def test_invalid_field_is_named(fields: dict[str, object], named: str) -> None:
    param, message = refusal(reasoning_api().chat(**fields))
    assert param == named
    assert message.endswith(".")


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "video_url"])
def test_non_text_content_is_refused_by_name(kind: str) -> None:
    content: list[object] = [{"type": "text", "text": "What?"}, {"type": kind, kind: {"url": "x"}}]
    param, message = refusal(reasoning_api().chat(content=content))
    assert param == "messages[0].content[1]"
    assert f"('{kind}')" in message


@pytest.mark.parametrize("field", ["functions", "function_call"])
def test_deprecated_function_fields_are_refused_and_name_tools(field: str) -> None:
    _, message = refusal(reasoning_api().chat(**{field: "auto"}))
    assert "'tools'" in message


@pytest.mark.processes
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tools"),
    ],
)
def test_grammar_failure_in_a_worker_names_the_field(fields: dict[str, Any], param: str) -> None:
    api = reasoning_api("{}")
    api.service.executor.grammar_failure = error_to_failure(RequestError("It has too many states."))
    assert refusal(api.chat(**fields)) == (param, "It has too many states.")
    assert api.service.executor.sent == []
