"""Conversion of text and messages to tokens, off the event loop because long prompts take time.

A lower bound of a text's number of tokens is known without encoding it: to encode megabytes takes half a minute and a
gigabyte. A token that contains a byte is no longer than the vocabulary's longest token with that byte. So each byte
counts as at least 1 / that length of a token, and a text as at least the sum over its bytes. This holds if tokens
contain each byte of a text once. Tokenizers that drop bytes or replace texts have no bound.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import unicodedata
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar, cast
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from mlx_ring.api.chat.request import Conversation, for_template
from mlx_ring.api.chat.templates import (
    SpecialTokensAsText,
    render,
    renders_text,
    template_arguments,
    tokenizer_beneath,
)
from mlx_ring.api.service import ModelService, Tokenizer
from mlx_ring.core.errors import RequestError
from mlx_ring.core.generation import context_exceeded
from mlx_ring.core.traces import CLIENT

_SLICE = 1 << 18
"""Number of bytes that are counted at a time, so that other threads run in between."""
_WORD_START = "\u2581"
"""SentencePiece's character for a space."""
_KEEPING = frozenset({"ByteLevel", "Digits", "Metaspace"})
"""Steps that split texts and drop nothing."""
_CUTTING = frozenset({"Split", "Punctuation"})
"""Steps that can be configured to drop the separators."""
_FORMS = frozenset({"NFC", "NFD", "NFKC", "NFKD"})

Form = Literal["NFC", "NFD", "NFKC", "NFKD"]
Piece = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TokenBounds:
    """Lower bounds of one tokenizer."""

    weights: NDArray[np.float64]
    """Smallest fraction of a token for each byte; 0 if no token contains it."""
    has_word_starts: bool = False
    """True if tokens write a space as SentencePiece does."""
    swallows_space: bool = False
    """True if some tokens include all white space around them."""
    forms: tuple[Form, ...] = ()
    """Unicode forms to which texts are normalized first."""

    @classmethod
    def read(cls, tokenizer: object) -> TokenBounds | None:
        """Return the bounds of a Hugging Face tokenizer, possibly in mlx-lm's wrapper; None if there are none."""
        beneath = getattr(tokenizer, "_tokenizer", tokenizer)
        backend: Any = getattr(beneath, "backend_tokenizer", None)
        return None if backend is None else _read(json.loads(backend.to_str()))

    def of(self, text: str) -> int:
        """Return the smallest possible number of a text's tokens; 0 if there is no bound."""
        if not text.isascii() and not all(unicodedata.is_normalized(form, text) for form in self.forms):
            return 0
        if self.swallows_space:
            text = "".join(text.split())
        if self.has_word_starts:
            text = text.replace(_WORD_START, " ")
        data = np.frombuffer(text.encode(), np.uint8)
        sums = (self.weights[data[start : start + _SLICE]].sum() for start in range(0, len(data), _SLICE))
        # More than the rounding error of that many additions.
        return max(0, math.ceil(sum(sums) * (1 - 1e-9)))


def _read(tokenizer: Piece) -> TokenBounds | None:
    model: Piece = tokenizer["model"]
    vocabulary = _vocabulary(model)
    before, cutting = (
        _pieces(tokenizer["normalizer"], "normalizers"),
        _pieces(tokenizer["pre_tokenizer"], "pretokenizers"),
    )
    is_of_bytes = any(piece["type"] == "ByteLevel" for piece in cutting)
    if vocabulary is None or not all(map(_keeps, cutting)):
        return None
    if not is_of_bytes and not _falls_back(model, vocabulary):
        return None
    forms: tuple[Form, ...] = tuple(piece["type"] for piece in before if piece["type"] in _FORMS)
    if not all(piece["type"] in _FORMS or (not is_of_bytes and _marks_words(piece)) for piece in before):
        return None
    added: list[Piece] = tokenizer["added_tokens"]
    said = _said_in_bytes(vocabulary) if is_of_bytes else _said_in_words(vocabulary)
    names = (str(token["content"]) for token in added)
    said_by_name = (name if is_of_bytes else name.replace(_WORD_START, " ") for name in names)
    return TokenBounds(
        _weights([*said, *(name.encode() for name in said_by_name)]),
        has_word_starts=not is_of_bytes,
        swallows_space=any(token["lstrip"] or token["rstrip"] for token in added),
        forms=forms,
    )


def _vocabulary(model: Piece) -> list[str] | None:
    match model.get("type"):
        case "BPE":
            return list(model["vocab"])
        case "Unigram":
            return [str(entry[0]) for entry in model["vocab"]]
        case _:
            return None


def _pieces(piece: Piece | None, several: str) -> list[Piece]:
    """Return the steps in their order."""
    if piece is None:
        return []
    if piece["type"] == "Sequence":
        return [inner for each in piece[several] for inner in _pieces(each, several)]
    return [piece]


def _keeps(piece: Piece) -> bool:
    return piece["type"] in _KEEPING or (piece["type"] in _CUTTING and piece.get("behavior") != "Removed")


def _falls_back(model: Piece, vocabulary: Iterable[str]) -> bool:
    """Return True if text without tokens of its own is written byte by byte."""
    names = {f"<0x{byte:02X}>" for byte in range(256)}
    return bool(model.get("byte_fallback")) and names <= set(vocabulary)


def _marks_words(piece: Piece) -> bool:
    match piece:
        case {"type": "Prepend", "prepend": "\u2581"}:
            return True
        case {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}:
            return True
        case _:
            return False


def _said_in_bytes(vocabulary: Iterable[str]) -> list[bytes]:
    """Return the bytes of a vocabulary in GPT-2's alphabet, which has a character for each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    letters = {chr(byte): byte for byte in plain} | {
        chr(256 + place): byte for place, byte in enumerate(others)
    }
    return [bytes(letters[letter] for letter in token if letter in letters) for token in vocabulary]


def _said_in_words(vocabulary: Iterable[str]) -> list[bytes]:
    names = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)}
    return [names.get(token) or token.replace(_WORD_START, " ").encode() for token in vocabulary]


def _weights(said: Iterable[bytes]) -> NDArray[np.float64]:
    longest = np.zeros(256)
    for token in said:
        places = list(token)
        longest[places] = np.maximum(longest[places], len(token))
    return np.divide(1.0, longest, out=np.zeros(256), where=longest > 0)


T = TypeVar("T")

_OURS = frozenset(
    {
        *("conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt"),
        *("continue_final_message", "tokenize", "sanitize_control_tokens", "padding", "truncation"),
        *("max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
    }
)
"""Parameters of the tokenizer's own call, refused in requests: a client's `chat_template` would be its own program."""


_LONG = 1 << 15
"""Number of characters or tokens from which a text is long. It takes a tenth of a second."""
_SHORT_THREADS = 2
_PIECE = 16
"""Number of characters that each part of a message counts as, because templates process parts one by one."""


class _Threads:
    """Threads for texts, for which clients take turns."""

    def __init__(self, count: int, name: str) -> None:
        self._pool, self._free = ThreadPoolExecutor(count, thread_name_prefix=name), count
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """Turns for which each client waits, in the order in which the clients get theirs."""

    async def run(self, work: Callable[[], T]) -> T:
        """Return the result of work, which begins at a turn of its client."""
        loop, client = asyncio.get_running_loop(), CLIENT.get()
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        self._begin_next()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self._end(client)
            raise

        def on_end(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop may have ended
                loop.call_soon_threadsafe(self._end, client)

        # The thread is busy until then, also if nobody waits for the result any more.
        (running := self._pool.submit(work)).add_done_callback(on_end)
        return await asyncio.wrap_future(running)

    def _end(self, client: str) -> None:
        """Begin another client's work, if there is some: the next turn of this one is the last."""
        self._free += 1
        if client in self._waiting:
            self._waiting.move_to_end(client)
        self._begin_next()

    def _begin_next(self) -> None:
        while self._free and self._waiting:
            client, turns = self._waiting.popitem(last=False)
            if not (turn := turns.popleft()).done():
                self._free -= 1
                turn.set_result(None)
            if turns:
                self._waiting[client] = turns


class PromptEncoder:
    """Encoder of prompts, beside the event loop. Clients take turns.

    Long texts have their own thread, so that short ones do not wait for them. Hugging Face's tokenizers may encode in several
    threads at once, and release the interpreter's lock meanwhile. All other tokenizers share one thread, to be safe.
    """

    def __init__(self) -> None:
        self._short = _Threads(_SHORT_THREADS, "short texts")
        self._long, self._other = _Threads(1, "long texts"), _Threads(1, "other tokenizers")
        self._escapes: WeakKeyDictionary[Tokenizer, SpecialTokensAsText] = WeakKeyDictionary()
        self._token_bounds: WeakKeyDictionary[Tokenizer, TokenBounds | None] = WeakKeyDictionary()

    async def encode(self, model: ModelService, text: str, *, param: str = "prompt") -> tuple[int, ...]:
        """Encode a raw prompt, with the special tokens that the model requires before it.

        An empty prompt is the start of a text: the model's BOS token, or without one the EOS token, which separates texts.

        Raises:
            ContextExceeded: the prompt's length alone shows that it exceeds the model's context. `param` names its field.
        """
        await self._check(model, text, param)
        return await self._run(model.tokenizer, len(text), lambda: _encode(model.tokenizer, text))

    async def encode_whole(
        self, model: ModelService, text: str, *, ends_with_eos: bool, param: str | None = "input"
    ) -> tuple[int, ...]:
        """Encode a whole text, with the special tokens that the model requires before and after it.

        Raises:
            ContextExceeded: as in `encode`. If `param` is None, a text may have any length.
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
            ContextExceeded: as in `encode`.
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
        calls_have_one_text: bool = False,
        escapes: bool = False,
    ) -> tuple[int, ...]:
        """Encode the chat template's prompt of a conversation.

        Args:
            model: the model, with its tokenizer.
            conversation: messages and arguments of the template.
            calls_have_one_text: as in `with_reasoning`.
            escapes: True if special tokens that messages spell stay text.

        Raises:
            RequestError: there is no template, it refuses these messages, or an argument is not allowed.
            ContextExceeded: as in `encode`.
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
        escape = self._escapes.get(tokenizer) if escapes else None
        if escapes and escape is None:
            escape = await self._run(tokenizer, _LONG + 1, lambda: self._escape(tokenizer))
        prompt = await self._run(
            tokenizer,
            _letters((conversation.messages, template_arguments(conversation))),
            lambda: render(
                tokenizer,
                for_template(conversation, calls_have_one_text=calls_have_one_text),
                escape and escape.mark,
            ),
        )
        if not isinstance(prompt, str):
            return prompt
        text = prompt
        if escape is not None:
            text = await self._run(tokenizer, len(prompt), partial(escape.unmarked, prompt))
        await self._check(model, text, conversation.messages_param)
        if escape is not None and text != prompt:
            return await self._run(tokenizer, len(text), partial(escape.encode, prompt))
        return await self._run(
            tokenizer, len(text), lambda: tuple(tokenizer.encode(text, add_special_tokens=False))
        )

    def _escape(self, tokenizer: Tokenizer) -> SpecialTokensAsText:
        """Return the encoder that keeps special tokens in messages as text. The first call copies the vocabulary.

        Raises:
            RequestError: the tokenizer is none of Hugging Face's, or the template gives it tokens and no text.
        """
        if tokenizer not in self._escapes:
            backend: object = getattr(tokenizer_beneath(tokenizer), "backend_tokenizer", None)
            if backend is None or not renders_text(tokenizer):
                raise RequestError(
                    "The tokenizer of this model cannot keep special tokens in messages as text: serve it without "
                    "--special-tokens-in-chats escape."
                )
            self._escapes[tokenizer] = SpecialTokensAsText(backend)
        return self._escapes[tokenizer]

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
        return await (lane if _is_shared(tokenizer) else self._other).run(work)


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
