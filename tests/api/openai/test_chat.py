"""`/v1/chat/completions`: text, usage, sampling and errors, whole and streamed."""

from __future__ import annotations

from typing import Any

import pytest
from tests.api.clients import Api, events, refusal
from tests.api.twins import ANSWER_TEXT, VOCAB_SIZE

ANSWER_TOKENS = len(ANSWER_TEXT.encode()) + 1
PROMPT_TOKENS = len("user: Hello.\n") + 2


def test_response_has_openais_fields_and_usage(api: Api) -> None:
    response = api.chat()
    assert response.status_code == 200
    body = response.json()
    assert body["id"].startswith("chatcmpl-")
    assert (body["object"], body["model"]) == ("chat.completion", "org/twin")
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": ANSWER_TEXT, "refusal": None, "annotations": []},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert (body["service_tier"], body["system_fingerprint"].startswith("mlx-ring-")) == ("default", True)
    assert body["usage"] == {
        "prompt_tokens": PROMPT_TOKENS,
        "completion_tokens": ANSWER_TOKENS,
        "total_tokens": PROMPT_TOKENS + ANSWER_TOKENS,
        "prompt_tokens_details": {"cached_tokens": 0, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }
    assert body["performance"]["prompt_tokens_per_second"] > 0
    assert body["performance"]["generation_tokens_per_second"] > 0


def test_stream_starts_with_the_role_and_ends_with_the_finish_reason(api: Api) -> None:
    chunks = events(api.chat(stream=True))
    assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert choices[-1]["delta"] == {}
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert "".join(choice["delta"].get("content", "") for choice in choices) == ANSWER_TEXT
    assert all("\ufffd" not in choice["delta"].get("content", "") for choice in choices)
    assert all("usage" not in chunk for chunk in chunks)


def test_include_usage_adds_a_last_chunk_with_the_usage(api: Api) -> None:
    chunks = events(api.chat(stream=True, stream_options={"include_usage": True}))
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == ANSWER_TOKENS
    assert chunks[-1]["performance"]["generation_s"] > 0


def test_n_choices_are_complete_and_the_prompt_counts_once(api: Api) -> None:
    body = api.chat(n=3, seed=7).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert {choice["message"]["content"] for choice in body["choices"]} == {ANSWER_TEXT}
    assert body["usage"]["prompt_tokens"] == PROMPT_TOKENS
    assert body["usage"]["completion_tokens"] == 3 * ANSWER_TOKENS
    opened = [operation.open for step in api.service.executor.sent for operation in step.operations]
    seeds = [operation.seed for operation in opened if operation.sequence]
    assert len(set(seeds)) == 3
    assert seeds[0] == 7


def test_each_streamed_choice_has_its_role_and_finish_reason(api: Api) -> None:
    choices = [chunk["choices"][0] for chunk in events(api.chat(n=2, stream=True))]
    for index in range(2):
        mine = [choice for choice in choices if choice["index"] == index]
        assert mine[0]["delta"]["role"] == "assistant"
        assert mine[-1]["finish_reason"] == "stop"
        assert "".join(choice["delta"].get("content", "") for choice in mine) == ANSWER_TEXT


def test_seeds_of_n_choices_are_deterministic() -> None:
    def seeds() -> list[int]:
        api = Api()
        api.chat(n=4, seed=-3)
        sent = [operation.open.seed for step in api.service.executor.sent for operation in step.operations]
        return [seed for seed in sent if seed]

    assert seeds() == seeds()


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_token_limit_ends_with_length(api: Api, field: str) -> None:
    body = api.chat(**{field: 2}).json()
    assert body["choices"][0]["message"]["content"] == ANSWER_TEXT[:2]
    assert body["choices"][0]["finish_reason"] == "length"


def test_max_tokens_beyond_the_context_is_accepted(api: Api) -> None:
    assert api.chat(max_tokens=2**31 - 1).json()["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("stop", [": ", ["nowhere", ": "]])
def test_answer_ends_before_a_stop_string(api: Api, stop: object) -> None:
    body = api.chat(stop=stop).json()
    assert body["choices"][0]["message"]["content"] == "Grüße"
    assert body["choices"][0]["finish_reason"] == "stop"


def test_logprobs_have_the_bytes_of_each_token(api: Api) -> None:
    choice = api.chat(logprobs=True, top_logprobs=2, max_tokens=4).json()["choices"][0]
    content = choice["logprobs"]["content"]
    assert choice["logprobs"]["refusal"] is None
    assert bytes(byte for token in content for byte in token["bytes"]) == ANSWER_TEXT.encode()[:4]
    assert [token["token"] for token in content] == ["G", "r", "\ufffd", "\ufffd"]
    assert content[2] == content[2] | {"token": "\ufffd", "logprob": -0.5}
    assert [len(token["top_logprobs"]) for token in content] == [2] * 4


def test_streamed_logprobs_include_every_token(api: Api) -> None:
    chunks = events(api.chat(logprobs=True, stream=True))
    tokens: list[dict[str, Any]] = []
    for chunk in chunks:
        scored = chunk["choices"][0]["logprobs"]
        tokens += scored["content"] if scored else []
    answer = bytes(byte for token in tokens[:-1] for byte in token["bytes"])
    assert answer.decode() == ANSWER_TEXT


def test_top_k_above_the_vocabulary_filters_nothing(api: Api) -> None:
    for top_k in (VOCAB_SIZE, 10**30, -1, 0):
        assert api.chat(top_k=top_k).status_code == 200
    opened = [operation.open for step in api.service.executor.sent for operation in step.operations]
    assert {operation.sampling.top_k for operation in opened if operation.sequence} == {0}


def test_sampling_fields_reach_the_workers(api: Api) -> None:
    fields: dict[str, object] = {
        "temperature": 0.5,
        "top_p": 0.75,
        "top_k": 5,
        "min_p": 0.25,
        "repetition_penalty": 1.5,
        "presence_penalty": -1,
        "frequency_penalty": 2,
        "logit_bias": {"17": -100},
        "min_tokens": 3,
    }
    assert api.chat(**fields).status_code == 200
    sampling = api.service.executor.sent[0].operations[0].open.sampling
    for name, value in fields.items():
        if name != "logit_bias":
            assert getattr(sampling, name) == value
    assert dict(sampling.logit_bias) == {17: -100}


def test_top_p_of_zero_keeps_only_the_most_likely_token(api: Api) -> None:
    api.chat(top_p=0)
    assert 0 < api.service.executor.sent[0].operations[0].open.sampling.top_p < 1e-3


def test_ignore_eos_generates_up_to_max_tokens(api: Api) -> None:
    body = api.chat(ignore_eos=True, max_tokens=ANSWER_TOKENS + 5).json()
    assert body["usage"]["completion_tokens"] == ANSWER_TOKENS + 5
    assert body["choices"][0]["finish_reason"] == "length"


def test_messages_are_converted_for_the_chat_template(api: Api) -> None:
    messages = [
        {
            "role": "developer",
            "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": "kind."}],
        },
        {"role": "user", "content": "2+2?", "name": "ann"},
        {
            "role": "assistant",
            "content": None,
            "refusal": None,
            "annotations": [],
            "audio": None,
            "function_call": None,
            "reasoning": "adding",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}},
                {"id": "c2", "type": "function", "function": {"name": "add", "arguments": "no json"}},
            ],
        },
        {"role": "tool", "content": "4", "tool_call_id": "c1"},
        {"role": "function", "content": "4", "name": "add"},
    ]
    body = {"messages": messages, "chat_template_kwargs": {"enable_thinking": False}}
    assert api.post("/v1/chat/completions", body).status_code == 200
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 2}}},
        {"id": "c2", "type": "function", "function": {"name": "add", "arguments": "no json"}},
    ]
    reasoning = dict.fromkeys(("reasoning_content", "reasoning", "thinking"), "adding")
    assert api.service.tokenizer.conversation == [
        {"role": "system", "content": "Be\nkind."},
        {"role": "user", "content": "2+2?", "name": "ann"},
        {"role": "assistant", "content": "", "tool_calls": calls, **reasoning},
        {"role": "tool", "content": "4", "tool_call_id": "c1"},
        {"role": "tool", "content": "4", "name": "add"},
    ]
    assert api.service.tokenizer.template_kwargs == {"enable_thinking": False}


def test_template_error_is_a_client_error(api: Api) -> None:
    param, message = refusal(api.chat(chat_template_kwargs={"refuse": True}))
    assert param == "messages"
    assert "roles must alternate" in message


def test_request_cannot_bring_its_own_template(api: Api) -> None:
    param, _ = refusal(api.chat(chat_template_kwargs={"chat_template": "{{ 1 }}"}))
    assert param == "chat_template_kwargs.chat_template"


def test_model_without_chat_template_points_to_completions(api: Api) -> None:
    api.service.tokenizer.has_chat_template = False
    _, message = refusal(api.chat())
    assert "/v1/completions" in message


def test_prompt_over_the_context_has_both_token_counts(api: Api) -> None:
    response = api.chat(content="x" * 5000)
    param, _ = refusal(response)
    error = response.json()["error"]
    assert param == "messages"
    assert error["code"] == "context_length_exceeded"
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (PROMPT_TOKENS + 4994, 4096)


def test_earlier_answer_is_accepted_in_the_next_prompt(api: Api) -> None:
    answer = api.chat().json()["choices"][0]["message"]
    messages = [
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": answer["content"]},
        {"role": "user", "content": ""},
    ]
    assert api.post("/v1/chat/completions", {"messages": messages}).status_code == 200


def test_fields_without_effect_are_accepted(api: Api) -> None:
    response = api.chat(
        user="u", metadata={"a": "b"}, store=True, service_tier="auto", prompt_cache_key="k",
        prompt_cache_retention="24h", safety_identifier="s", verbosity="low",
        tools=[], tool_choice="auto", response_format={"type": "text"},
        temperature=None, stop=None, logit_bias=None, stream=None, n=None,
    )  # fmt: skip
    assert response.status_code == 200


@pytest.mark.parametrize("model", [None, "org/twin", "twin"])
def test_model_is_selected_by_name_alias_or_no_name(api: Api, model: str | None) -> None:
    assert api.chat(model=model).json()["model"] == "org/twin"
