"""Text and messages to tokens, off the event loop: a long prompt takes the tokenizer a while."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar, cast

from jinja2 import TemplateError

from mlx_ring.api.conversation.asked import Conversation
from mlx_ring.api.service import Tokenizer
from mlx_ring.core.errors import RequestError

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
"""Parameters of the tokenizer's own call: a client's `chat_template` would be a program of its making."""


class PromptEncoder:
    """Makes prompts, one at a time, in one thread: tokenizers are not made for several."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer")

    async def encode(self, tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
        """A raw prompt, with the special tokens that the model wants before it.

        An empty prompt is the beginning of a text: the model's BOS token, or where it has
        none the EOS token, which stands between texts.
        """
        return await self._run(lambda: _encode(tokenizer, text))

    async def encode_whole(self, tokenizer: Tokenizer, text: str, *, ends_with_eos: bool) -> tuple[int, ...]:
        """A whole text, with the special tokens that the model wants before and behind it."""
        return await self._run(lambda: _encode_whole(tokenizer, text, ends_with_eos=ends_with_eos))

    async def encode_plain(
        self, tokenizer: Tokenizer, text: str, *, add_special_tokens: bool
    ) -> tuple[int, ...]:
        """Text as the tokenizer has it, nothing put in the place of an empty one."""
        return await self._run(lambda: tuple(tokenizer.encode(text, add_special_tokens=add_special_tokens)))

    async def names(self, tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
        """What the vocabulary calls each of the tokens."""
        return await self._run(lambda: [tokenizer.convert_ids_to_tokens(token) or "" for token in tokens])

    async def decode(self, tokenizer: Tokenizer, tokens: list[int]) -> str:
        """The text of tokens, special ones included."""
        return await self._run(
            lambda: tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )

    async def encode_chat(
        self, tokenizer: Tokenizer, conversation: Conversation, *, add_generation_prompt: bool = True
    ) -> tuple[int, ...]:
        """The chat template's prompt for the next answer; without `add_generation_prompt` the messages alone.

        Raises:
            RequestError: no template, one that refuses these messages, or an argument it may not have.
        """
        for name in conversation.template_kwargs:
            if name in _OURS:
                param = f"{conversation.kwargs_param}.{name}"
                raise RequestError(f"'{param}' is not for the request to set; leave it out.", param=param)
        if not tokenizer.has_chat_template:
            raise RequestError(
                "This model has no chat template; send the prompt to /v1/completions.",
                param=conversation.messages_param,
            )
        return await self._run(
            lambda: _encode_chat(tokenizer, conversation, add_generation_prompt=add_generation_prompt)
        )

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


_TEMPLATE_TROUBLE = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RecursionError,
)
"""What a template raises, of itself or by stumbling, over messages that it was not written for."""


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
    """The tokens; for those of an empty text the one that a text begins with."""
    if not tokens:
        start = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        tokens = [] if start is None else [start]
    if not tokens:
        raise RequestError(
            "The prompt is empty, and this model has no token to start from; give it text.", param="prompt"
        )
    return tuple(tokens)


def _renderer(tokenizer: Tokenizer) -> Callable[..., list[int] | str]:
    """What applies the chat template.

    mlx-lm's wrapper switches thinking on wherever a template knows of it. A template's own
    default is its maker's word, so templates are applied beneath the wrapper; the renderers that mlx-lm
    brings itself are applied by it.
    """
    beneath: Any = getattr(tokenizer, "_tokenizer", None)
    if getattr(tokenizer, "_chat_template", None) is not None or not getattr(beneath, "chat_template", None):
        return tokenizer.apply_chat_template
    return partial(cast("Callable[..., list[int] | str]", beneath.apply_chat_template), return_dict=False)


def _encode_chat(
    tokenizer: Tokenizer, conversation: Conversation, *, add_generation_prompt: bool
) -> tuple[int, ...]:
    try:
        tokens = _renderer(tokenizer)(
            [dict(message) for message in conversation.messages],
            tokenize=True,
            add_generation_prompt=add_generation_prompt and not conversation.continues,
            **_template_arguments(conversation),
        )
    except _TEMPLATE_TROUBLE as error:
        raise RequestError(
            f"The model's chat template does not take these messages: {error}",
            param=conversation.messages_param,
        ) from error
    if isinstance(tokens, str):
        tokens = tokenizer.encode(tokens, add_special_tokens=False)
    return tuple(tokens)


def _template_arguments(conversation: Conversation) -> dict[str, object]:
    """What is not said is left to the template's own default."""
    tools = [tool.for_template() for tool in conversation.tool_use.tools]
    return (
        dict(conversation.template_kwargs)
        | ({"tools": tools} if tools else {})
        | ({"continue_final_message": True} if conversation.continues else {})
    )
