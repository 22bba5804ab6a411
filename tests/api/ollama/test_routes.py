"""`/api/chat` and `/api/generate`, called by Ollama's own client over a socket."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import closing
from typing import TYPE_CHECKING, Any, cast

import pytest
from tests.api.clients import Api, serving
from tests.api.twins import ANSWER_TEXT, MarkingTokenizer, TwinService
from tests.lazily import lazily

from mlx_ring.api.errors import error_info
from mlx_ring.api.ollama.dialect import OLLAMA
from mlx_ring.core.errors import StepFailed

if TYPE_CHECKING:
    import ollama
else:
    ollama = lazily("ollama")

REASONING, CALL = "Let me see.", '{"name": "add", "arguments": {"a": 1}}'
MESSAGES = [{"role": "user", "content": "Hello."}]
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}


def reasoning_service() -> TwinService:
    """Return a twin that reasons, and then calls a tool twice."""
    calls = f"<tool_call>{CALL}</tool_call>" * 2
    return TwinService(tokenizer=MarkingTokenizer(), says=f"<think>\n{REASONING}</think>Now.{calls}")


@pytest.fixture(scope="module")
def client() -> Generator[ollama.Client]:
    with serving(TwinService()) as url, closing(ollama.Client(url)) as client:
        yield client


def test_chat_and_its_stream(client: ollama.Client) -> None:
    whole = client.chat("org/twin:latest", MESSAGES)
    assert (whole.message.content, whole.done, whole.done_reason) == (ANSWER_TEXT, True, "stop")
    pieces = list(client.chat("twin", MESSAGES, stream=True))
    assert "".join(piece.message.content or "" for piece in pieces) == ANSWER_TEXT
    assert [piece.done for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    for last in (whole, pieces[-1]):
        assert (last.prompt_eval_count, last.eval_count) == (15, len(ANSWER_TEXT.encode()) + 1)
        assert last.total_duration is not None
        assert last.load_duration is not None
        assert 0 <= last.load_duration <= last.total_duration
        assert last.eval_duration is not None


def test_chat_streams_json_lines_by_default(api: Api) -> None:
    response = api.post("/api/chat", {"messages": MESSAGES})
    assert response.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in response.text.splitlines()]
    assert {line["model"] for line in lines} == {"org/twin"}
    assert lines[-1]["done_reason"] == "stop"


def test_options_reach_the_sampler(client: ollama.Client) -> None:
    options = ollama.Options(
        num_predict=4, stop=["x"], seed=-1, temperature=0, repeat_last_n=-1, num_thread=4, num_ctx=4096
    )
    answer = client.chat("twin", MESSAGES, options=options)
    assert (answer.message.content, answer.done_reason, answer.eval_count) == ("Grü", "length", 4)
    whole = {"num_predict": 4.0, "num_ctx": 4096.0, "top_k": 0.0, "seed": -1.0, "num_thread": 4.0}
    assert client.chat("twin", MESSAGES, options=whole).eval_count == answer.eval_count == 4
    stopped = client.chat("twin", MESSAGES, options={"stop": [":"]})
    assert (stopped.message.content, stopped.done_reason) == ("Grüße", "stop")


def test_logprobs_of_every_token_are_returned_on_request(client: ollama.Client) -> None:
    five = ollama.Options(num_predict=5)
    whole = client.chat("twin", MESSAGES, logprobs=True, top_logprobs=2, options=five)
    pieces = list(client.chat("twin", MESSAGES, stream=True, logprobs=True, top_logprobs=2, options=five))
    streamed = [scored for piece in pieces for scored in piece.logprobs or ()]
    assert whole.logprobs is not None
    assert [scored.token for scored in streamed] == [scored.token for scored in whole.logprobs]
    assert [scored.logprob for scored in streamed] == [-0.5] * 5
    assert [len(scored.top_logprobs or ()) for scored in streamed] == [2] * 5


def test_reasoning_and_whole_tool_calls_are_separate_from_content() -> None:
    service = reasoning_service()
    with serving(service) as url, closing(ollama.Client(url)) as client:
        whole = client.chat("twin", MESSAGES, tools=[ADD], think=True)
        pieces = list(client.chat("twin", MESSAGES, tools=[ADD], think=True, stream=True))
    assert service.tokenizer.template_kwargs["enable_thinking"] is True
    streamed = [call for piece in pieces for call in piece.message.tool_calls or ()]
    for calls in (whole.message.tool_calls, streamed):
        assert calls is not None
        assert [(call.function.name, call.function.arguments) for call in calls] == [("add", {"a": 1})] * 2
    assert (whole.message.thinking, whole.message.content) == (REASONING, "Now.")
    assert "".join(piece.message.thinking or "" for piece in pieces) == REASONING
    assert "".join(piece.message.content or "" for piece in pieces) == "Now."


def test_arguments_as_text_and_parts_of_text_are_accepted(api: Api) -> None:
    """Accept what clients of OpenAI's API send to Ollama's, because it stays in all later requests."""
    called: dict[str, Any] = {"role": "assistant", "tool_calls": []}
    for arguments in ('{"a": 1}', "", {"a": 1}):
        called["tool_calls"].append({"function": {"name": "add", "arguments": arguments}})
    parts = [{"type": "text", "text": "Hello."}, {"type": "text", "text": "Add."}]
    body = {"messages": [{"role": "user", "content": parts}, called], "stream": False}
    assert api.post("/api/chat", body).status_code == 200
    user, assistant = api.service.tokenizer.conversation
    assert user["content"] == "Hello.\nAdd."
    calls = cast("list[dict[str, Any]]", assistant["tool_calls"])
    assert [call["function"]["arguments"] for call in calls] == [{"a": 1}, {}, {"a": 1}]


@pytest.mark.parametrize("name", ["tool_name", "name"])
def test_tool_calls_and_results_reach_the_template(api: Api, name: str) -> None:
    called = {
        "role": "assistant",
        "content": "",
        "thinking": "Hm.",
        "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}],
    }
    result = {"role": "tool", "content": "1", name: "add"}
    assert api.post("/api/chat", {"messages": [*MESSAGES, called, result]}).status_code == 200
    assert api.service.tokenizer.conversation[1:] == [
        {
            "role": "assistant",
            "content": "",
            **dict.fromkeys(("reasoning_content", "reasoning", "thinking"), "Hm."),
            "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "content": "1", "name": "add"},
    ]


def test_prompt_uses_the_chat_template_unless_raw(client: ollama.Client) -> None:
    assert client.generate("twin", "Hello.", system="Be kind.").response == ANSWER_TEXT
    pieces = list(client.generate("twin", "Hello.", stream=True, raw=True, options={"num_predict": 3}))
    assert "".join(piece.response or "" for piece in pieces) == "hij"
    assert (pieces[-1].done, pieces[-1].done_reason, pieces[-1].eval_count) == (True, "length", 3)


@pytest.mark.processes
def test_format_reaches_the_sampler_from_every_route(api: Api) -> None:
    fields = {"format": "json", "stream": False, "options": {"num_predict": 1}}
    api.post("/api/chat", {"messages": MESSAGES} | fields)
    api.post("/api/generate", {"prompt": "x"} | fields)
    api.post("/api/generate", {"prompt": "x", "raw": True} | fields)
    assert [wanted.kind for wanted in api.service.executor.wanted] == ["json_object"] * 3
    refused = api.post("/api/chat", {"messages": MESSAGES, "format": {"not": {"type": "null"}}})
    assert (refused.status_code, '"not"' in refused.json()["error"]) == (400, True)


def test_request_without_input_loads_or_unloads_the_model(api: Api) -> None:
    assert api.post("/api/generate", {"model": "twin", "keep_alive": 0}).json()["done_reason"] == "unload"
    refused = api.post("/api/generate", {"model": "twin", "keep_alive": "a while"})
    assert refused.status_code == 400
    assert refused.json()["error"].startswith("'keep_alive' is not a duration; ")
    assert api.service.state == "unloaded"
    loaded = api.post("/api/chat", {"model": "twin", "messages": list[object]()}).json()
    assert (loaded["done"], loaded["done_reason"]) == (True, "load")
    assert api.service.state == "ready"


def test_errors_have_ollamas_format_also_in_mid_stream(client: ollama.Client, api: Api) -> None:
    with pytest.raises(ollama.ResponseError) as unknown:
        client.chat("nobody", MESSAGES)
    assert unknown.value.status_code == 404
    assert "'nobody'" in unknown.value.error
    refused = api.post("/api/chat", {"messages": MESSAGES, "options": {"num_ctx": 5000}})
    assert refused.status_code == 400
    failed = OLLAMA.error_body(error_info(StepFailed("It broke.")), "-")
    assert OLLAMA.stream_failure(failed) == b'{"error":"It broke."}\n'
    assert refused.json() == {"error": "'options.num_ctx' is 5000; this model's context is 4096 tokens here."}


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        ("chat", {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "images"),
        ("chat", {"messages": MESSAGES, "think": True}, "think"),
        (
            "chat",
            {"messages": MESSAGES, "think": "a lot"},
            "'think' should be true, false, 'low', 'medium' or 'high'",
        ),
        ("chat", {"messages": MESSAGES, "tools": [ADD]}, "tools"),
        ("chat", {"messages": MESSAGES, "options": {"mirostat": 2}}, "options.mirostat"),
        ("chat", {"messages": MESSAGES, "options": {"num_ctx": 4096.5}}, "options.num_ctx"),
        ("chat", {"messages": MESSAGES, "options": {"tfs_z": 0.5}}, "options.tfs_z"),
        ("chat", {"messages": MESSAGES, "truncate": True}, "truncate"),
        ("chat", {"messages": MESSAGES, "best_of": 2}, "best_of"),
        ("chat", {"messages": MESSAGES, "top_logprobs": 2}, "logprobs"),
        ("generate", {"prompt": "x", "suffix": "y"}, "suffix"),
        ("generate", {"prompt": "x", "template": "y"}, "template"),
        ("generate", {"prompt": "x", "context": [1]}, "context"),
        ("generate", {"prompt": "x", "raw": True, "system": "y"}, "system"),
    ],
)
def test_unsupported_field_is_refused_by_name(
    api: Api, path: str, fields: dict[str, object], named: str
) -> None:
    response = api.post(f"/api/{path}", fields)
    assert response.status_code == 400, response.text
    assert named in response.json()["error"]
