"""`/tokenize` and `/detokenize`."""

from __future__ import annotations

import pytest
from tests.api.clients import Api, refusal
from tests.api.twins import ANSWER, BOS

MESSAGES = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_tokenize_and_detokenize_are_inverse(api: Api, prefix: str) -> None:
    body = api.post(f"{prefix}/tokenize", {"prompt": "Hi", "return_token_strs": True}).json()
    assert body == {
        "count": 3,
        "max_model_len": 4096,
        "tokens": [BOS, 72, 105],
        "token_strs": ["<bos>", "H", "i"],
    }
    plain = api.post(f"{prefix}/tokenize", {"prompt": "Hi", "add_special_tokens": False}).json()
    assert (plain["tokens"], plain["token_strs"]) == ([72, 105], None)
    assert api.post(f"{prefix}/detokenize", {"tokens": body["tokens"]}).json() == {"prompt": "<bos>Hi"}


def test_messages_are_tokenized_as_the_prompt_of_a_chat(api: Api) -> None:
    body = api.post("/tokenize", {"messages": MESSAGES}).json()
    assert body["tokens"] == [BOS, *b"user: x\n", ANSWER]
    assert (
        body["count"]
        == api.post("/v1/chat/completions", {"messages": MESSAGES}).json()["usage"]["prompt_tokens"]
    )
    alone = api.post("/tokenize", {"messages": MESSAGES, "add_generation_prompt": False}).json()
    assert alone["tokens"] == [BOS, *b"user: x\n"]


@pytest.mark.parametrize(
    "fields",
    [
        {"continue_final_message": True},
        {"continue_final_message": True, "add_generation_prompt": False},
        {"add_generation_prompt": False},
    ],
    ids=str,
)
def test_chat_has_the_same_prompt_as_its_tokens(api: Api, fields: dict[str, object]) -> None:
    body = {"messages": [*MESSAGES, {"role": "assistant", "content": "It is"}], **fields}
    tokens = api.post("/tokenize", body).json()["tokens"]
    answer = api.post("/v1/chat/completions", {**body, "max_tokens": 1}).json()
    assert answer["usage"]["prompt_tokens"] == len(tokens)


def test_chat_neither_begins_nor_continues_both(api: Api) -> None:
    body = {"messages": MESSAGES, "add_generation_prompt": True, "continue_final_message": True}
    assert refusal(api.post("/v1/chat/completions", body))[0] == "add_generation_prompt"


def test_input_of_a_response_is_counted_like_its_prompt(api: Api) -> None:
    body = {"input": "x", "instructions": "Be kind."}
    counted = api.post("/v1/responses/input_tokens", body).json()
    answer = api.post("/v1/responses", {**body, "max_output_tokens": 1}).json()
    assert counted == {"object": "response.input_tokens", "input_tokens": answer["usage"]["input_tokens"]}


def test_empty_text_has_no_tokens(api: Api) -> None:
    assert api.post("/tokenize", {"prompt": "", "add_special_tokens": False}).json()["tokens"] == []
    assert api.post("/detokenize", {"tokens": list[int]()}).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/tokenize", dict[str, object](), "prompt"),
        ("/tokenize", {"prompt": "x", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": "x", "add_generation_prompt": True}, "add_generation_prompt"),
        ("/tokenize", {"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"prompt": ["x"]}, "prompt"),
        (
            "/tokenize",
            {"messages": MESSAGES, "add_generation_prompt": True, "continue_final_message": True},
            "add_generation_prompt",
        ),
        ("/detokenize", dict[str, object](), "tokens"),
        ("/detokenize", {"tokens": [1, 320]}, "tokens[1]"),
    ],
)
def test_invalid_field_is_named(api: Api, path: str, body: dict[str, object], named: str) -> None:
    param, message = refusal(api.post(path, body))
    assert param == named
    assert named in message
