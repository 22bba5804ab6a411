"""`/v1/responses`: parsed requests, responses, and the order of stream events."""

from __future__ import annotations

import functools
from dataclasses import fields
from typing import TYPE_CHECKING, Any, get_type_hints

import pytest
from pydantic import TypeAdapter
from tests.api.clients import Api, refusal
from tests.api.twins import MarkingTokenizer, TwinService
from tests.lazily import lazily

from mlx_ring.api.chat.model_format import ChatFormat
from mlx_ring.api.chat.request import AnswerPart, CallArguments, CallOpening, ContentText, ReasoningText
from mlx_ring.api.dialect import ErrorInfo
from mlx_ring.api.openai.responses.request import ResponsesRequest, conversation_of
from mlx_ring.api.openai.responses.route import response_of
from mlx_ring.api.openai.responses.schemas import ResponseMade
from mlx_ring.api.openai.responses.writer import ResponseWriter, seal, usage_of
from mlx_ring.api.openai.sampling import sampling_params
from mlx_ring.core.types import SamplingParams

if TYPE_CHECKING:
    from openai.types import responses
else:
    responses = lazily("openai.types.responses")

Events = list[Any]
ADD = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True}
PARTS: tuple[AnswerPart, ...] = (
    ReasoningText("Let me "),
    ReasoningText("see."),
    ContentText("I'll "),
    ContentText("add."),
    CallOpening(0, "call_1", "add"),
    CallArguments(0, '{"a"'),
    CallArguments(0, ": 1}"),
    CallOpening(1, "call_2", "add"),
    CallArguments(1, "{}"),
)
TEXT = ("output_item.added", "content_part.added", "{0}.delta", "{0}.delta", "{0}.done", "content_part.done", "output_item.done")  # fmt: skip
CALL = ("function_call_arguments.delta", "function_call_arguments.done", "output_item.done")


def writer(**fields: object) -> ResponseWriter:
    request = ResponsesRequest.model_validate({"input": "Hello."} | fields)
    response = response_of(request, SamplingParams(), id_="resp_1", model="twin")
    return ResponseWriter(response, seals_reasoning=request.seals_reasoning, namespaces=request.namespaces)


def kinds(events: Events) -> list[str]:
    return [str(event["type"]).removeprefix("response.") for event in events]


@functools.cache
def event_adapter() -> TypeAdapter[Any]:
    return TypeAdapter(responses.ResponseStreamEvent)


def validated(events: Events) -> Events:
    """Check each event's type with the SDK and its sequence number, and return the events."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        event_adapter().validate_python(event)
    return events


SAMPLED: dict[str, object] = {
    "temperature": 0.25,
    "top_p": 0.5,
    "presence_penalty": 0.75,
    "frequency_penalty": -0.5,
    "top_logprobs": 3,
}
"""Request fields of sampling parameters that a response repeats."""


def test_a_response_repeats_each_sampling_parameter_that_its_schema_or_the_sdk_names() -> None:
    known = get_type_hints(ResponseMade).keys() | responses.Response.model_fields.keys()
    names = known & {field.name for field in fields(SamplingParams)}
    assert names == SAMPLED.keys()
    request = ResponsesRequest.model_validate({"input": "Hello."} | SAMPLED)
    sampling = sampling_params(request, TwinService(), max_tokens=None, top_logprobs=3)
    response = response_of(request, sampling, id_="resp_1", model="twin")
    assert {name: response[name] for name in names} == SAMPLED  # pyright: ignore[reportTypedDictNotRequiredAccess, reportGeneralTypeIssues] - by name


def test_stream_sends_output_items_in_order() -> None:
    response_writer = writer(include=["reasoning.encrypted_content"])
    events: Events = list(response_writer.opening())
    for part in PARTS:
        events += response_writer.part(part)
    events += response_writer.closing("completed", usage_of(10, 4, 9, 3))
    assert kinds(validated(events)) == [
        "created",
        "in_progress",
        *(kind.format("reasoning_text") for kind in TEXT),
        *(kind.format("output_text") for kind in TEXT),
        "output_item.added",
        "function_call_arguments.delta",
        *CALL,
        "output_item.added",
        *CALL,
        "completed",
    ]
    whole = responses.Response.model_validate(events[-1]["response"])
    reasoning, message, first, second = (item.to_dict() for item in whole.output)
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Let me see."}]
    assert reasoning["encrypted_content"] == seal("Let me see.")
    assert message["content"] == [
        {"type": "output_text", "text": "I'll add.", "annotations": [], "logprobs": []}
    ]
    assert (first["call_id"], first["name"], first["arguments"]) == ("call_1", "add", '{"a": 1}')
    assert (second["call_id"], second["arguments"], second["status"]) == ("call_2", "{}", "completed")
    places = [event["output_index"] for event in events if "output_index" in event]
    assert places == sorted(places)
    assert {
        event["item_id"] for event in events if event.get("output_index") == 1 and "item_id" in event
    } == {message["id"]}


def test_response_at_the_token_limit_and_its_last_item_are_incomplete() -> None:
    response_writer = writer()
    list(response_writer.part(ContentText("Hel")))
    whole: Any = response_writer.whole("incomplete", usage_of(1, 0, 1, 0))
    assert whole["status"] == "incomplete"
    assert whole["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in whole["output"]] == ["incomplete"]


def test_failure_sends_failed_and_error_events() -> None:
    response_writer = writer()
    events: Events = [*response_writer.opening(), *response_writer.part(ContentText("Hel"))]
    events += response_writer.failing(ErrorInfo(503, "Worker 1 died.", "server_error", "worker_lost"))
    assert kinds(validated(events))[-4:] == ["content_part.done", "output_item.done", "failed", "error"]
    failed = responses.Response.model_validate(events[-2]["response"])
    assert failed.status == "failed"
    assert failed.error is not None
    assert (failed.error.code, failed.error.message) == ("server_error", "Worker 1 died.")
    assert events[-1]["error"] == events[-1]["error"] | {"message": "Worker 1 died.", "code": "worker_lost"}


def template_messages(items: object, **fields: object) -> list[Any]:
    request = ResponsesRequest.model_validate({"input": items} | fields)
    return list(conversation_of(request, ChatFormat()).messages)


def test_items_of_a_turn_become_one_template_message() -> None:
    response_writer = writer()
    for part in PARTS:
        list(response_writer.part(part))
    whole: Any = response_writer.whole("completed", usage_of(1, 0, 1, 0))
    own: Events = whole["output"]
    call = {"type": "function_call", "call_id": "c3", "name": "add", "arguments": "no json"}
    assert template_messages([{"role": "user", "content": "1+?"}, *own, call, {"type": "function_call_output", "call_id": "call_1", "output": [{"type": "input_text", "text": "2"}]}]) == [
        {"role": "user", "content": "1+?"},
        {
            "role": "assistant",
            "content": "I'll add.",
            "reasoning_content": "Let me see.",
            "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}},
                {"id": "call_2", "type": "function", "function": {"name": "add", "arguments": {}}},
                {"id": "c3", "type": "function", "function": {"name": "add", "arguments": "no json"}},
            ],
        },
        {"role": "tool", "content": "2", "tool_call_id": "call_1"},
    ]  # fmt: skip


def test_reasoning_stays_in_its_turn() -> None:
    def reasoning(text: str) -> dict[str, object]:
        return {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]}

    later = [{"role": "user", "content": "Continue."}, {"role": "assistant", "content": "Yes."}]
    assert template_messages(
        [{"role": "user", "content": "Hi."}, reasoning("One."), reasoning("Two."), *later]
    ) == [
        {"role": "user", "content": "Hi."},
        {"role": "assistant", "content": "", "reasoning_content": "One.\nTwo."},
        *later,
    ]


def test_instructions_and_first_developer_message_are_joined() -> None:
    assert template_messages([{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi."}], instructions="Be kind.") == [
        {"role": "system", "content": "Be kind.\nBe brief."},
        {"role": "user", "content": "Hi."},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("sealed", "text"), [(seal("Hm."), "Hm."), ("gAAAAB", "briefly"), ("mlx-ring:%", "briefly")]
)
def test_sealed_reasoning_is_read_and_a_foreign_seal_leaves_the_summary(sealed: str, text: str) -> None:
    reasoning: dict[str, Any] = {
        "type": "reasoning",
        "id": "rs_1",
        "content": None,
        "encrypted_content": sealed,
    }
    reasoning["summary"] = [{"type": "summary_text", "text": "briefly"}]
    answer: dict[str, Any] = {
        "type": "message",
        "id": "msg_1",
        "role": "assistant",
        "status": "completed",
        "phase": None,
    }
    answer["content"] = [{"type": "output_text", "text": "Yes.", "annotations": [], "logprobs": None}]
    [message] = template_messages([reasoning, answer])
    assert message == {"role": "assistant", "content": "Yes.", "reasoning_content": text}


def test_reasoning_at_the_end_of_the_input_is_kept() -> None:
    user = {"role": "user", "content": "Hi."}
    reasoning = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]}
    assert template_messages([user, reasoning])[1:] == [
        {"role": "assistant", "content": "", "reasoning_content": "Hm."}
    ]


def test_effort_and_enable_thinking_together_are_refused() -> None:
    body = {
        "input": "Hello.",
        "reasoning": {"effort": "low"},
        "chat_template_kwargs": {"enable_thinking": False},
    }
    param, _ = refusal(Api(TwinService(tokenizer=MarkingTokenizer())).post("/v1/responses", body))
    assert param == "reasoning.effort"


@pytest.mark.parametrize(
    ("fields", "param", "expected"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "no request continues another one"),
        ({"conversation": "conv_1"}, "conversation", "the whole conversation"),
        ({"background": True}, "background", "leave it out"),
        ({"prompt": {"id": "p"}}, "prompt", "'instructions'"),
        ({"truncation": "auto"}, "truncation", "'disabled'"),
        ({"tools": [{"type": "code_interpreter"}]}, "tools[0]", "code_interpreter"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "custom"}]}]}, "tools[0].tools[0].type", "function"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice", "no 'tools'"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "name": "sub"}}, "tool_choice.name", "sub"),
        ({"tool_choice": "required"}, "tool_choice", "no 'tools'"),
        ({"include": ["file_search_call.results"]}, "include[0]", "file_search_call.results"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation", "not padded"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary", "detailed"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type", "grammar"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", '"item_reference", which is not supported; send the item itself'),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]", "is an image ('input_image'), and only text is supported"),
        ({"input": []}, "input", "input"),
        ({"input": 3}, "input", "string or a list"),
        ({"max_output_tokens": 0}, "max_output_tokens", "1"),
        ({"n": 2}, "n", "not supported"),
    ],
)  # fmt: skip
def test_unsupported_field_is_refused_by_name(
    api: Api, fields: dict[str, object], param: str, expected: str
) -> None:
    named, message = refusal(api.post("/v1/responses", {"input": "Hello."} | fields))
    assert named == param
    assert expected in message


def test_sources_of_searches_that_are_left_out_may_be_included(api: Api) -> None:
    """Accept what Vercel's AI SDK adds to every request with a web search."""
    fields = {"tools": [SEARCH], "include": ["web_search_call.action.sources"]}
    response = api.post("/v1/responses", {"input": "Hello."} | fields)
    assert response.status_code == 200, response.text
    assert response.json()["tools"] == []


AGENTS = {
    "type": "namespace",
    "name": "agents",
    "description": "Helpers.",
    "tools": [ADD, ADD | {"name": "end"}],
}
SEARCH = {"type": "web_search", "external_web_access": False, "search_context_size": "low"}


def test_functions_of_a_namespace_are_offered_with_its_name_and_searches_are_left_out() -> None:
    request = ResponsesRequest.model_validate({"input": "Hello.", "tools": [ADD, AGENTS, SEARCH]})
    tools = conversation_of(request, ChatFormat()).tool_use.tools
    assert [tool.name for tool in tools] == ["add", "agents__add", "agents__end"]
    response = response_of(request, SamplingParams(), id_="resp_1", model="twin")
    assert [tool["name"] for tool in response["tools"]] == ["add", "agents"]


def test_a_call_of_a_namespace_names_it_and_is_read_back() -> None:
    response_writer = writer(tools=[ADD, AGENTS])
    events: Events = []
    for part in (
        CallOpening(0, "call_1", "agents__end"),
        CallArguments(0, "{}"),
        CallOpening(1, "call_2", "add"),
    ):
        events += response_writer.part(part)
    events += response_writer.closing("completed", usage_of(1, 0, 1, 0))
    validated(events)
    first, second = events[-1]["response"]["output"]
    assert (first["name"], first["namespace"], second["name"]) == ("end", "agents", "add")
    assert "namespace" not in second
    (message,) = template_messages([first])
    assert message["tool_calls"][0]["function"]["name"] == "agents__end"


def test_what_codex_adds_to_a_request_is_accepted() -> None:
    free = ADD | {"strict": False}
    tools = [free, AGENTS | {"tools": [free]}, SEARCH]
    body = {"input": "Hello.", "tools": tools, "client_metadata": {"turn_id": "1"}}
    answer = Api(TwinService(tokenizer=MarkingTokenizer())).post("/v1/responses", body)
    assert answer.status_code == 200, answer.text
    assert "client_metadata" not in answer.json()


def test_two_functions_with_the_same_offered_name_are_refused() -> None:
    tools = [AGENTS, ADD | {"name": "agents__end"}]
    param, said = refusal(
        Api(TwinService(tokenizer=MarkingTokenizer())).post("/v1/responses", {"input": "Hi.", "tools": tools})
    )
    assert (param, "'agents__end'" in said) == ("tools", True)


def test_output_schema_of_a_function_has_no_effect() -> None:
    api = Api(TwinService(tokenizer=MarkingTokenizer()))
    tool: dict[str, object] = {"type": "function", "name": "f", "strict": False}
    for schema in ({"type": "object"}, None):
        body = {"input": "x", "tools": [tool | {"output_schema": schema}], "max_output_tokens": 2}
        assert api.post("/v1/responses", body).status_code == 200
