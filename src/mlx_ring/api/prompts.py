"""Conversion of text and messages to tokens, off the event loop because long prompts take time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar, cast
from weakref import WeakKeyDictionary

from mlx_ring.api.chat.request import Conversation
from mlx_ring.api.chat.templates import for_template, render, template_arguments, tokenizer_beneath
from mlx_ring.api.service import ModelService, Tokenizer
from mlx_ring.api.token_bounds import TokenBounds
from mlx_ring.core.errors import RequestError
from mlx_ring.core.generation import context_exceeded

T = TypeVar("T")

_OURS = frozenset(
    {
        "conversation",
        "messages",
        "tools",
        "documents",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "sanitize_control_tokens",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
    }
)
"""Parameters of the tokenizer's own call, refused in requests: a client's `chat_template` would be its own program."""


_LONG = 1 << 15
"""Number of characters or tokens from which a text is long. It takes a tenth of a second."""
_SHORT_THREADS = 2
_PIECE = 16
"""Number of characters that each part of a message counts as, because templates process parts one by one."""


class PromptEncoder:
    """Encoder of prompts, beside the event loop.

    Long texts have their own thread, so that short ones do not wait for them. Hugging Face's tokenizers may encode in several
    threads at once, and release the interpreter's lock meanwhile. All other tokenizers share one thread, to be safe.
    """

    def __init__(self) -> None:
        self._short = _threads(_SHORT_THREADS, "short texts")
        self._long = _threads(1, "long texts")
        self._other = _threads(1, "other tokenizers")
        self._token_bounds: WeakKeyDictionary[Tokenizer, TokenBounds | None] = WeakKeyDictionary()

    async def encode(self, model: ModelService, text: str, *, param: str = "prompt") -> tuple[int, ...]:
        """Encode a raw prompt, with the special tokens that the model requires before it.

        An empty prompt is the start of a text: the model's BOS token, or without one the EOS token, which separates texts.

        Raises:
            ContextExceeded: The prompt's length alone shows that it exceeds the model's context. `param` names its field.
        """
        await self._check(model, text, param)
        return await self._run(model.tokenizer, len(text), lambda: _encode(model.tokenizer, text))

    async def encode_whole(
        self, model: ModelService, text: str, *, ends_with_eos: bool, param: str | None = "input"
    ) -> tuple[int, ...]:
        """Encode a whole text, with the special tokens that the model requires before and after it.

        Raises:
            ContextExceeded: As in `encode`. If `param` is None, a text may have any length.
        """
        if param is not None:
            await self._check(model, text, param)
        tokenizer = model.tokenizer
        return await self._run(
            tokenizer, len(text), lambda: _encode_whole(tokenizer, text, ends_with_eos=ends_with_eos)
        )

    async def encode_plain(
        self, model: ModelService, text: str, *, add_special_tokens: bool
    ) -> tuple[int, ...]:
        """Encode a text as the tokenizer does. Nothing replaces an empty text.

        Raises:
            ContextExceeded: As in `encode`.
        """
        await self._check(model, text, "prompt")
        encode = partial(model.tokenizer.encode, text, add_special_tokens=add_special_tokens)
        return await self._run(model.tokenizer, len(text), lambda: tuple(encode()))

    async def names(self, tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
        """Return the vocabulary's name of each token."""
        return await self._run(
            tokenizer,
            len(tokens),
            lambda: [tokenizer.convert_ids_to_tokens(token) or "" for token in tokens],
        )

    async def decode(self, tokenizer: Tokenizer, tokens: list[int]) -> str:
        """Return the text of tokens, special ones included."""
        return await self._run(
            tokenizer,
            len(tokens),
            lambda: tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False),
        )

    async def encode_chat(
        self,
        model: ModelService,
        conversation: Conversation,
        *,
        add_generation_prompt: bool = True,
        calls_have_one_text: bool = False,
    ) -> tuple[int, ...]:
        """Encode the chat template's prompt for the next answer; without `add_generation_prompt` the messages alone.

        `calls_have_one_text` is explained in `with_reasoning`.

        Raises:
            RequestError: There is no template, it refuses these messages, or an argument is not allowed.
            ContextExceeded: As in `encode`.
        """
        tokenizer = model.tokenizer
        for name in conversation.template_kwargs:
            if name in _OURS:
                param = f"{conversation.kwargs_param}.{name}"
                raise RequestError(f"'{param}' cannot be set by a request; leave it out.", param=param)
        if not tokenizer.has_chat_template:
            raise RequestError(
                "This model has no chat template; send the prompt to /v1/completions.",
                param=conversation.messages_param,
            )
        if (count := len(conversation.messages)) > model.context_length:
            # Templates write at least one token for each message.
            raise context_exceeded(
                count, model.context_length, param=conversation.messages_param, is_counted=False
            )
        prompt = await self._run(
            tokenizer,
            _letters((conversation.messages, template_arguments(conversation))),
            lambda: render(
                tokenizer,
                for_template(conversation, calls_have_one_text=calls_have_one_text),
                add_generation_prompt=add_generation_prompt,
            ),
        )
        if not isinstance(prompt, str):
            return prompt
        await self._check(model, prompt, conversation.messages_param)
        return await self._run(
            tokenizer, len(prompt), lambda: tuple(tokenizer.encode(prompt, add_special_tokens=False))
        )

    async def _check(self, model: ModelService, text: str, param: str) -> None:
        """Raise `ContextExceeded` for a text whose length shows that its tokens cannot fit."""
        most = model.context_length
        if len(text) <= most:
            return
        fewest = await self._run(
            model.tokenizer, len(text), lambda: self._least_tokens(model.tokenizer, text)
        )
        if fewest > most:
            raise context_exceeded(fewest, most, param=param, is_counted=False)

    def _least_tokens(self, tokenizer: Tokenizer, text: str) -> int:
        if tokenizer not in self._token_bounds:
            self._token_bounds[tokenizer] = TokenBounds.read(tokenizer)
        known = self._token_bounds[tokenizer]
        return 0 if known is None else known.of(text)

    async def _run(self, tokenizer: Tokenizer, size: int, work: Callable[[], T]) -> T:
        lane = self._long if size > _LONG else self._short
        threads = lane if _is_shared(tokenizer) else self._other
        return await asyncio.get_running_loop().run_in_executor(threads, work)


def _threads(most: int, name: str) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=most, thread_name_prefix=name)


def _is_shared(tokenizer: Tokenizer) -> bool:
    """Return True if several threads may use the tokenizer at once."""
    return bool(getattr(tokenizer_beneath(tokenizer), "is_fast", False))


def _letters(given: object) -> int:
    """Return the number of characters of the values. Stop counting when they make a long text."""
    found, pending = 0, [given]
    while pending and found <= _LONG:
        value = pending.pop()
        found += len(value) if isinstance(value, str) else _PIECE
        if isinstance(value, Mapping):
            pending.extend(cast("Mapping[object, object]", value).values())
        elif isinstance(value, list | tuple):
            pending.extend(cast("Sequence[object]", value))
    return found


def _encode(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    has_bos = tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)
    return _or_start(tokenizer, tokenizer.encode(text, add_special_tokens=not has_bos))


def _encode_whole(tokenizer: Tokenizer, text: str, *, ends_with_eos: bool) -> tuple[int, ...]:
    tokens = tokenizer.encode(text, add_special_tokens=True)
    end = tokenizer.eos_token_id
    if ends_with_eos and end is not None and tokens[-1:] != [end]:
        tokens = [*tokens, end]
    return _or_start(tokenizer, tokens)


def _or_start(tokenizer: Tokenizer, tokens: list[int]) -> tuple[int, ...]:
    """Return the tokens; for an empty text, the token at the start of any text."""
    if not tokens:
        start = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        tokens = [] if start is None else [start]
    if not tokens:
        raise RequestError(
            "The prompt is empty, and this model has no start token; give it text.", param="prompt"
        )
    return tuple(tokens)
