"""`/v1/completions` and `/generate`."""

from __future__ import annotations

from typing import Any

import pytest
from tests.api.clients import Api, events, refusal
from tests.api.twins import BOS, EOS, ByteTokenizer
from tests.engine.small_tokenizers import byte_fallback

from mlx_ring.api.generation import Answer
from mlx_ring.api.openai.completions import CompletionRequest, CompletionWriter
from mlx_ring.core.types import TokenLogprob

PROMPT = "Hello."
AFTER_PROMPT = "hijklmnopqrstuvwxyz"
"""The twin's continuation after BOS and six bytes."""


def test_max_tokens_defaults_to_sixteen(api: Api) -> None:
    body = api.complete().json()
    assert body["id"].startswith("cmpl-")
    assert body["object"] == "text_completion"
    assert body["choices"] == [
        {"index": 0, "text": AFTER_PROMPT[:16], "logprobs": None, "finish_reason": "length"}
    ]
    assert body["usage"]["prompt_tokens"] == 7
    assert body["usage"]["completion_tokens"] == 16


def test_stream_has_the_same_text(api: Api) -> None:
    choices = [chunk["choices"][0] for chunk in events(api.complete(stream=True, echo=True))]
    assert "".join(choice["text"] for choice in choices) == PROMPT + AFTER_PROMPT[:16]
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]


def test_several_prompts_are_streamed_concurrently(api: Api) -> None:
    choices = [
        chunk["choices"][0]
        for chunk in events(api.complete(stream=True, prompt=["a", "bc"], n=2, max_tokens=3))
    ]
    texts = {
        index: "".join(choice["text"] for choice in choices if choice["index"] == index) for index in range(4)
    }
    assert texts == {0: "cde", 1: "cde", 2: "def", 3: "def"}
    assert sorted(choice["index"] for choice in choices if choice["finish_reason"]) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("Hello.", ["hi"]),
        (["Hello.", "Hello, you."], ["hi", "mn"]),
        ([65, 66, 67], ["de"]),
        ([[65], [BOS, 66, 67, 68]], ["bc", "ef"]),
    ],
)
def test_each_form_of_prompt_is_answered_in_order(api: Api, prompt: object, texts: list[str]) -> None:
    body = api.complete(prompt=prompt, max_tokens=2).json()
    assert [choice["text"] for choice in body["choices"]] == texts
    assert [choice["index"] for choice in body["choices"]] == list(range(len(texts)))


def test_n_answers_each_prompt_n_times_and_counts_each_prompt_once(api: Api) -> None:
    body = api.complete(prompt=["a", "bc"], n=2, max_tokens=1).json()
    assert [choice["text"] for choice in body["choices"]] == ["c", "c", "d", "d"]
    assert body["usage"]["prompt_tokens"] == 2 + 3
    assert body["usage"]["completion_tokens"] == 4


def test_echo_with_logprobs_scores_prompt_and_answer(api: Api) -> None:
    choice = api.complete(prompt="AB", echo=True, logprobs=1, max_tokens=2).json()["choices"][0]
    assert choice["text"] == "ABde"
    scored = choice["logprobs"]
    assert scored["tokens"] == ["<bos>", "A", "B", "d", "e"]
    assert scored["token_logprobs"] == [None, -1.0, -1.0, -0.5, -0.5]
    assert scored["top_logprobs"][0] is None
    assert scored["top_logprobs"][3]["d"] == -0.5
    assert len(scored["text_offset"]) == 5
    assert choice["text"][scored["text_offset"][3]] == "d"


def test_streamed_echo_has_the_same_logprobs(api: Api) -> None:
    fields: dict[str, object] = {"prompt": "AB", "echo": True, "logprobs": 1, "max_tokens": 2}
    whole = api.complete(**fields).json()["choices"][0]
    choices = [chunk["choices"][0] for chunk in events(api.complete(stream=True, **fields))]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        pieces = [choice["logprobs"][name] for choice in choices if choice["logprobs"]]
        assert [value for piece in pieces for value in piece] == whole["logprobs"][name]


def test_max_tokens_zero_with_echo_scores_only_the_prompt(api: Api) -> None:
    body = api.complete(prompt="AB", echo=True, logprobs=0, max_tokens=0).json()
    assert body["choices"][0]["text"] == "AB"
    assert body["choices"][0]["logprobs"]["token_logprobs"] == [None, -1.0, -1.0]
    assert body["usage"]["completion_tokens"] == 0


def test_echoed_token_ids_are_returned_as_text(api: Api) -> None:
    assert api.complete(prompt=[65, 66], echo=True, max_tokens=1).json()["choices"][0]["text"] == "ABc"


def test_special_tokens_of_a_prompt_of_ids_are_echoed(api: Api) -> None:
    fields: dict[str, object] = {"prompt": [BOS, 65, EOS, 66], "echo": True, "logprobs": 0, "max_tokens": 1}
    choice = api.complete(**fields).json()["choices"][0]
    assert choice["text"] == "<bos>A<eos>Be"
    assert choice["logprobs"]["text_offset"] == [0, 5, 6, 11, 12]


def test_empty_prompt_starts_with_bos(api: Api) -> None:
    body = api.complete(prompt="", max_tokens=2).json()
    assert body["choices"][0]["text"] == "bc"
    assert body["usage"]["prompt_tokens"] == 1


def test_incomplete_utf8_is_escaped_in_logprobs(api: Api) -> None:
    choice = api.complete(prompt=[0xE2, 0x82], echo=True, logprobs=0, max_tokens=1).json()["choices"][0]
    assert choice["logprobs"]["tokens"][:2] == ["bytes:\\xe2", "bytes:\\x82"]


def test_prompt_over_the_context_names_the_prompt_field(api: Api) -> None:
    response = api.complete(prompt=[65] * 4096)
    param, _ = refusal(response)
    assert param == "prompt"
    assert response.json()["error"]["n_ctx"] == 4096


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"prompt": list[int]()}, "prompt"),
        ({"prompt": [list[int]()]}, "prompt[0]"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt[1]"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": [320]}, "prompt"),
        ({"logprobs": 6}, "logprobs"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"n": 100, "prompt": ["a", "b"]}, "prompt"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"min_tokens": 17}, "min_tokens"),
    ],
)
def test_invalid_field_is_named(api: Api, fields: dict[str, object], named: str) -> None:
    param, message = refusal(api.complete(**fields))
    assert param == named
    assert named in message


def test_generate_continues_a_prompt(api: Api) -> None:
    body = api.post("/generate", {"prompt": PROMPT, "max_tokens": 3}).json()
    assert (body["text"], body["finish_reason"]) == ("hij", "length")
    assert body["usage"]["total_tokens"] == 10
    assert body["performance"]["prompt_s"] >= 0


def test_text_offsets_skip_the_leading_space_of_sentencepiece() -> None:
    tokenizer: Any = byte_fallback()
    tokens = tuple(tokenizer.convert_tokens_to_ids(["\u2581hello", "\u2581the"]))
    request = CompletionRequest.model_validate({"prompt": "hello the", "echo": True, "logprobs": 0})
    answer = Answer(text=" a", prompt_logprobs=(None, TokenLogprob(tokens[1], -1.0)))
    choice: Any = CompletionWriter(tokenizer, request, [tokens]).whole(0, answer)
    assert choice["logprobs"]["tokens"] == [" hello", " the"]
    assert [choice["text"][place:] for place in choice["logprobs"]["text_offset"]] == [
        "hello the a",
        " the a",
    ]


def test_text_offsets_count_special_tokens_spelled_out_in_the_prompt() -> None:
    request = CompletionRequest.model_validate({"prompt": "<eos>A", "echo": True, "logprobs": 0})
    answer = Answer(text="b", prompt_logprobs=(None, *(TokenLogprob(token, -1.0) for token in (EOS, 65))))
    answer.logprobs = [TokenLogprob(token, -1.0) for token in (ord("b"), EOS)]
    choice: Any = CompletionWriter(ByteTokenizer(), request, [(BOS, EOS, 65)]).whole(0, answer)
    assert choice["logprobs"]["tokens"] == ["<bos>", "<eos>", "A", "b", "<eos>"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 5, 6, 7]


def seeds_of(api: Api) -> list[int]:
    """Return the seeds of the sequences that the twin opened, in order."""
    return [
        operation.open.seed
        for step in api.service.executor.sent
        for operation in step.operations
        if operation.open.sequence
    ]


@pytest.mark.parametrize("seed", [None, -1])
def test_without_a_seed_equal_prompts_are_sampled_differently(seed: int | None) -> None:
    api = Api()
    api.complete(prompt=["a"] * 3, n=2, seed=seed, max_tokens=1)
    assert len(set(seeds_of(api))) == 6
    assert -1 not in seeds_of(api)


def test_a_given_seed_is_that_of_every_prompt() -> None:
    api = Api()
    api.complete(prompt=["a"] * 3, n=2, seed=7, max_tokens=1)
    first, second, *others = seeds_of(api)
    assert first == 7
    assert others == [7, second] * 2
    assert second != 7


def test_max_tokens_of_minus_one_is_no_limit(api: Api) -> None:
    for answer in (
        api.complete(prompt="x" * 4000, max_tokens=-1, ignore_eos=True),
        api.chat(content="x" * 4000, max_tokens=-1, ignore_eos=True),
    ):
        body = answer.json()
        assert body["usage"]["total_tokens"] == api.service.context_length
    assert "at least 1, or -1 for no limit" in refusal(api.chat(max_tokens=0))[1]


def test_stop_token_ids_end_an_answer_without_them(api: Api) -> None:
    choice = api.complete(stop_token_ids=[ord("k"), ord("m")]).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("hij", "stop")
    assert refusal(api.complete(stop_token_ids=[9999]))[0] == "stop_token_ids"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_continuous_usage_counts_in_every_chunk_of_tokens(api: Api, path: str) -> None:
    prompt = (
        {"prompt": "a"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
    )
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(api.post(path, prompt | {"stream": True, "max_tokens": 5, "stream_options": options}))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk["usage"] is not None]
    assert counts == sorted(counts)
    assert (counts[0] > 0, counts[-1]) == (True, 5)
    assert len(counts) >= len(chunks) - 1, "a chat's first chunk has no token"
    several = {"stream": True, "n": 3, "max_tokens": 2, "stream_options": options}
    written = 0
    for chunk in events(api.post(path, prompt | several)):
        for choice in chunk["choices"]:
            written += len(choice.get("text") or choice.get("delta", {}).get("content") or "")
            assert (chunk["usage"] or {"completion_tokens": 0})["completion_tokens"] == written
    assert written == 6, "each token is a character"
    without = events(
        api.post(path, prompt | {"stream": True, "stream_options": {"continuous_usage_stats": True}})
    )
    assert all("usage" not in chunk for chunk in without)


def test_cache_prompt_is_accepted_if_it_is_true(api: Api) -> None:
    assert api.complete(cache_prompt=True, max_tokens=1).status_code == 200
    param, message = refusal(api.chat(cache_prompt=False))
    assert param == "cache_prompt"
    assert "prefix cache" in message


@pytest.mark.parametrize("stream", [True, False])
def test_token_outside_the_vocabulary_is_refused(api: Api, *, stream: bool) -> None:
    param, message = refusal(api.complete(prompt=[[65], [2**31]], stream=stream))
    assert param == "prompt"
    assert message.startswith("'prompt' holds token id 2147483648; this model's token ids are 0 to ")
