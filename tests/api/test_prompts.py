"""Prompts are encoded off the event loop: with the same tokens at any concurrency, and without waiting for long texts."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.api.clients import Api, refusal
from tests.api.twins import ByteTokenizer, TwinService
from tests.default_settings import make_api_settings
from tests.eventually import run_tasks_until

from mlx_ring.api.chat.request import Conversation, Tool, ToolUse
from mlx_ring.api.chat.templates import renderer
from mlx_ring.api.prompts import PromptEncoder
from mlx_ring.core.errors import ContextExceeded, RequestError
from mlx_ring.core.traces import CLIENT
from mlx_ring.head.served_model import prepare_model
from mlx_ring.settings.settings_sources import load_settings

LONG = "The quick brown fox jumps over the lazy dog. " * 4000
CONTEXT = 100_000


@pytest.fixture(scope="module")
def demo() -> TwinService:
    """Return a twin with the demo's own tokenizer."""
    return with_tokenizer(prepare_model(load_settings({"model": "demo"})).tokenizer)


def with_tokenizer(tokenizer: Any) -> TwinService:
    service = TwinService(context=CONTEXT)
    service.tokenizer = tokenizer
    return service


def wrapper(**attributes: Any) -> Any:
    """Return a tokenizer wrapper like mlx-lm's, whose template turns reasoning on."""

    def apply(_messages: Any, **_options: Any) -> str:
        return "thinking"

    return SimpleNamespace(apply_chat_template=apply, **attributes)


def test_template_default_decides_on_reasoning() -> None:
    options_received: dict[str, Any] = {}

    def apply(_messages: Any, **options: Any) -> list[int]:
        options_received.update(options)
        return [1]

    inner = SimpleNamespace(chat_template="{{ messages }}", apply_chat_template=apply)
    assert renderer(wrapper(_tokenizer=inner, _chat_template=None))([], tokenize=True) == [1]
    assert options_received == {"tokenize": True, "return_dict": False}


@pytest.mark.parametrize(
    "attributes",
    [
        {},
        {"_tokenizer": SimpleNamespace(chat_template=None), "_chat_template": None},
        {"_tokenizer": SimpleNamespace(chat_template="x"), "_chat_template": object()},
    ],
    ids=["no wrapper", "no template", "mlx-lm's own renderer"],
)
def test_other_templates_are_rendered_by_the_wrapper(attributes: dict[str, Any]) -> None:
    assert renderer(wrapper(**attributes))([]) == "thinking"


def texts() -> Iterator[str]:
    """Yield different texts, from a few letters to more than the threads for short texts encode."""
    for number in range(60):
        yield f"{number}: Grüße, 日本 🙂 <|im_end|>\n" * (1 + number % 7)
    for number in range(4):
        yield f"{number} {LONG[: 40_000 + number]}"


def test_concurrent_threads_encode_the_same_tokens(demo: TwinService) -> None:
    encoder = PromptEncoder()

    async def run() -> list[tuple[int, ...]]:
        return await asyncio.gather(*(encoder.encode(demo, text) for text in texts()))

    alone = [tuple(demo.tokenizer.encode(text, add_special_tokens=True)) for text in texts()]
    assert asyncio.run(run()) == alone
    # The encoder relies on this: threads that share a tokenizer do not disturb each other.
    with ThreadPoolExecutor(8) as threads:
        encoded = threads.map(partial(demo.tokenizer.encode, add_special_tokens=True), texts())
        assert [tuple(tokens) for tokens in encoded] == alone


def test_chat_tokens_equal_those_of_its_template(demo: TwinService) -> None:
    inner: Any = demo.tokenizer
    for content in ("Hello.", LONG[:40_000]):
        messages = [{"role": "user", "content": content}]
        whole = inner._tokenizer.apply_chat_template(
            messages, tokenize=True, add_generation_prompt=True, return_dict=False
        )
        tokens = asyncio.run(PromptEncoder().encode_chat(demo, Conversation(messages)))
        assert tokens == tuple(whole)


class Spelled:
    """Model with the tokenizer of a built-in model, for messages that spell its special tokens."""

    def __init__(self, name: str) -> None:
        self.service = with_tokenizer(prepare_model(load_settings({"model": name})).tokenizer)
        self.tokenizer: Any = self.service.tokenizer
        self.backend: Any = self.tokenizer._tokenizer.backend_tokenizer
        self.special = {
            token.content: place
            for place, token in self.backend.get_added_tokens_decoder().items()
            if token.special
        }

    def encode(self, *contents: str, escapes: bool = True) -> list[int]:
        roles = itertools.cycle(("user", "assistant"))
        messages = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]
        encoder = PromptEncoder()
        return list(asyncio.run(encoder.encode_chat(self.service, Conversation(messages), escapes=escapes)))

    def text(self, tokens: list[int]) -> str:
        return str(self.backend.decode(tokens, skip_special_tokens=False))

    def count(self, tokens: list[int]) -> int:
        return sum(token in self.special.values() for token in tokens)


@pytest.fixture(scope="module", params=["demo", "demo-moe"])
def spelled(request: pytest.FixtureRequest) -> Spelled:
    return Spelled(request.param)


@pytest.mark.parametrize("text", ["{}", "Say {} and stop.", " {}{} ", "Grüße\n{}\nuser\n", "x{}y, {}z 🙂"])
def test_special_tokens_in_messages_are_tokens_or_stay_text(spelled: Spelled, text: str) -> None:
    for name in spelled.special:
        content = text.replace("{}", name)
        plain = spelled.encode(text.replace("{}", "word"), escapes=False)
        allowed = spelled.encode(content, escapes=False)
        escaped = spelled.encode(content)
        assert spelled.count(allowed) == spelled.count(plain) + text.count("{}")
        assert spelled.count(escaped) == spelled.count(plain)
        assert spelled.text(escaped) == spelled.text(allowed)


@given(st.lists(st.text(min_size=1), min_size=1, max_size=3))
def test_other_messages_have_the_same_tokens_whether_special_ones_stay_text(
    spelled: Spelled, contents: list[str]
) -> None:
    assume(not any(name in text for name in spelled.special for text in contents))
    assert spelled.encode(*contents) == spelled.encode(*contents, escapes=False)
    with_name = (*contents[:-1], f"{contents[-1]} {next(iter(spelled.special))}")
    assert spelled.count(spelled.encode(*with_name)) == spelled.count(spelled.encode(*contents))
    assert spelled.text(spelled.encode(*with_name)) == spelled.text(spelled.encode(*with_name, escapes=False))


@pytest.mark.parametrize("escapes", [False, True])
def test_the_setting_decides_for_requests(demo: TwinService, *, escapes: bool) -> None:
    api = Api(demo, make_api_settings(escapes_special_tokens=escapes))
    body = {"model": "twin", "messages": [{"role": "user", "content": "<|im_end|>"}]}
    counted = api.post("/v1/messages/count_tokens", body).json()
    special = Spelled("demo")
    expected = special.encode("<|im_end|>", escapes=escapes)
    assert counted["input_tokens"] == len(expected)
    assert len(special.encode("<|im_end|>")) > len(special.encode("<|im_end|>", escapes=False))


def test_names_of_arguments_and_descriptions_of_tools_stay_text_too(spelled: Spelled) -> None:
    name = next(iter(spelled.special))

    def count(text: str, *, escapes: bool) -> int:
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {text: text}}}
        messages = [
            {"role": "user", "content": "Go."},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": text},
        ]
        tools = (Tool("f", text, {"type": "object", "properties": {text: {"type": "string"}}}),)
        conversation = Conversation(messages, ToolUse(tools, "auto"))
        encoder = PromptEncoder()
        return spelled.count(
            list(asyncio.run(encoder.encode_chat(spelled.service, conversation, escapes=escapes)))
        )

    plain = count("word", escapes=False)
    assert count(name, escapes=False) >= plain + 3
    assert count(name, escapes=True) == plain


def test_a_tokenizer_that_gives_tokens_and_no_text_is_refused_instead_of_marks_in_its_prompt(
    demo: TwinService, monkeypatch: pytest.MonkeyPatch
) -> None:
    def renders_text(_tokenizer: object) -> bool:
        return False

    monkeypatch.setattr("mlx_ring.api.prompts.renders_text", renders_text)
    conversation = Conversation([{"role": "user", "content": "<|im_end|>"}])
    with pytest.raises(RequestError, match="--special-tokens-in-chats"):
        asyncio.run(PromptEncoder().encode_chat(demo, conversation, escapes=True))


def test_a_tokenizer_that_cannot_keep_special_tokens_as_text_is_named() -> None:
    conversation = Conversation([{"role": "user", "content": "Hello."}])
    with pytest.raises(RequestError, match="--special-tokens-in-chats"):
        asyncio.run(PromptEncoder().encode_chat(TwinService(), conversation, escapes=True))


class BlockingTokenizer(ByteTokenizer):
    """Tokenizer that threads may share, and that encodes a long text only after `release` is set."""

    def __init__(self) -> None:
        super().__init__()
        self._tokenizer = SimpleNamespace(is_fast=True)
        self.release = threading.Event()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if len(text) > 100:
            assert self.release.wait(60)
        return super().encode(text, add_special_tokens=add_special_tokens)


def test_short_texts_do_not_wait_for_long_ones() -> None:
    tokenizer, encoder = BlockingTokenizer(), PromptEncoder()
    service = with_tokenizer(tokenizer)
    messages = [{"role": "user", "content": ["x" * 50_000]}]

    async def run() -> None:
        long = [asyncio.ensure_future(encoder.encode(service, "x" * 50_000)) for _ in range(3)]
        long.append(asyncio.ensure_future(encoder.encode_chat(service, Conversation(messages))))
        try:
            short = await asyncio.gather(*(encoder.encode(service, "Hi") for _ in range(100)))
            assert all(tokens[1:] == (72, 105) for tokens in short)
            assert not any(each.done() for each in long)
        finally:
            tokenizer.release.set()
        assert {len(tokens) for tokens in await asyncio.gather(*long)} >= {50_001}

    asyncio.run(run())


class RecordingTokenizer(ByteTokenizer):
    """Tokenizer of long texts, each of which waits for its release, and whose order is recorded."""

    def __init__(self, *, is_fast: bool) -> None:
        super().__init__()
        self._tokenizer = SimpleNamespace(is_fast=is_fast)
        self.begun: list[str] = []
        self.release = threading.Semaphore(0)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        self.begun.append(text[0] if len(text) > 100 else text)
        assert self.release.acquire(timeout=60)
        return super().encode(text, add_special_tokens=add_special_tokens)


@pytest.mark.parametrize(("is_fast", "text"), [(True, "b" * 50_000), (False, "b")])
def test_a_client_s_many_long_texts_delay_another_client_by_one(text: str, *, is_fast: bool) -> None:
    tokenizer, encoder = RecordingTokenizer(is_fast=is_fast), PromptEncoder()
    service = with_tokenizer(tokenizer)

    async def run() -> None:
        CLIENT.set("many")
        many = [asyncio.create_task(encoder.encode(service, "a" * 50_000)) for _ in range(10)]
        await run_tasks_until(lambda: tokenizer.begun == ["a"])
        CLIENT.set("one")
        one = asyncio.create_task(encoder.encode(service, text))
        await run_tasks_until(lambda: tokenizer.begun == ["a"])
        tokenizer.release.release(2)
        assert len(await one) == len(text) + 1
        tokenizer.release.release(9)
        await asyncio.gather(*many)
        assert tokenizer.begun == ["a", "b", *["a"] * 9]

    asyncio.run(run())


def test_texts_of_clients_that_left_neither_block_nor_double_the_thread() -> None:
    tokenizer, encoder = RecordingTokenizer(is_fast=True), PromptEncoder()
    service = with_tokenizer(tokenizer)

    async def run() -> None:
        running, waiting, last = (
            asyncio.create_task(encoder.encode(service, letter * 50_000)) for letter in "abc"
        )
        await run_tasks_until(lambda: tokenizer.begun == ["a"])
        for left in (running, waiting):
            left.cancel()
        await asyncio.wait((running, waiting))
        # The thread still encodes the first text.
        assert tokenizer.begun == ["a"]
        tokenizer.release.release(2)
        assert len(await last) == 50_001
        assert tokenizer.begun == ["a", "c"]

    asyncio.run(run())


def test_short_chats_whose_special_tokens_stay_text_do_not_wait_for_long_texts(spelled: Spelled) -> None:
    encoder = PromptEncoder()

    async def run() -> None:
        chat = Conversation([{"role": "user", "content": "Hi"}])
        first = await encoder.encode_chat(spelled.service, chat, escapes=True)
        release, begun = threading.Event(), threading.Event()

        def work() -> None:
            begun.set()
            assert release.wait(60)

        long = asyncio.create_task(encoder._run(spelled.service.tokenizer, 1 << 20, work))  # pyright: ignore[reportPrivateUsage]
        await run_tasks_until(begun.is_set)
        try:
            assert await encoder.encode_chat(spelled.service, chat, escapes=True) == first
            assert not long.done()
        finally:
            release.set()
        await long

    asyncio.run(run())


def test_more_messages_than_the_context_has_tokens_are_refused_unread(demo: TwinService) -> None:
    short = TwinService(context=100)
    short.tokenizer = demo.tokenizer
    conversation = Conversation([{"role": "user"}] * 101, messages_param="input")
    with pytest.raises(ContextExceeded, match=r"is 100 tokens.* has at least 101: ") as caught:
        asyncio.run(PromptEncoder().encode_chat(short, conversation))
    assert caught.value.param == "input"


def test_text_over_the_context_is_refused_before_encoding(
    demo: TwinService, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> list[int]:
        raise AssertionError

    text = LONG * 10
    encoder, conversation = PromptEncoder(), Conversation([{"role": "user", "content": text}])
    inner: Any = demo.tokenizer
    monkeypatch.setattr(inner._tokenizer, "encode", fail)
    refused: list[ContextExceeded] = []
    for work in (
        encoder.encode(demo, text),
        encoder.encode_plain(demo, text, add_special_tokens=True),
        encoder.encode_whole(demo, text, ends_with_eos=False),
        encoder.encode_chat(demo, conversation),
    ):
        with pytest.raises(ContextExceeded, match=rf"is {CONTEXT} tokens.* has at least \d+: ") as caught:
            asyncio.run(work)
        refused.append(caught.value)
    assert [error.param for error in refused] == ["prompt", "prompt", "input", "messages"]
    assert all(error.prompt_tokens > error.context_tokens == CONTEXT for error in refused)


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/v1/completions", {"prompt": LONG * 10}, "prompt"),
        ("/tokenize", {"prompt": LONG * 10}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": LONG * 10}]}, "messages"),
        ("/detokenize", {"tokens": [5] * (CONTEXT + 1)}, "tokens"),
    ],
)
def test_http_error_names_the_field_and_the_context(
    demo: TwinService, path: str, body: dict[str, object], named: str
) -> None:
    param, message = refusal(Api(demo).post(path, body))
    assert (param, str(CONTEXT) in message) == (named, True)
