"""Types of what OpenAI's routes return, as their writers make it and `/openapi.json` shows it.

Single tokens as text and as bytes, for log-probabilities, are here too.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Literal, NamedTuple, NotRequired
from weakref import WeakKeyDictionary

from mlx_ring.api.chat.request import EndReason
from mlx_ring.api.openapi import JsonObject, RouteDoc
from mlx_ring.api.service import Tokenizer
from mlx_ring.api.streaming import EVENT_STREAM
from mlx_ring.core.types import TokenLogprob

_USER = {"role": "user", "content": "What is the capital of France?"}
_TAG = "OpenAI"


class PromptDetails(JsonObject):
    cached_tokens: int
    """Prompt tokens from the prefix cache."""
    audio_tokens: Literal[0]


class CompletionDetails(JsonObject):
    reasoning_tokens: int
    audio_tokens: Literal[0]
    accepted_prediction_tokens: Literal[0]
    rejected_prediction_tokens: Literal[0]


class Usage(JsonObject):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class Performance(JsonObject):
    """Seconds, and tokens per second."""

    queue_s: float
    prompt_s: float
    generation_s: float
    prompt_tokens_per_second: float | None
    generation_tokens_per_second: float | None


class Costs(JsonObject):
    usage: Usage
    performance: Performance


class ScoredAlternative(JsonObject):
    token: str
    logprob: float
    bytes: list[int]


class ScoredToken(ScoredAlternative):
    top_logprobs: list[ScoredAlternative]


class ChatLogprobs(JsonObject):
    content: list[ScoredToken]
    refusal: None


class CalledFunction(JsonObject):
    name: str
    arguments: str
    """JSON."""


class ToolCallMade(JsonObject):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ReasoningMade(JsonObject):
    """Reasoning under both names, because each client knows only one."""

    reasoning: NotRequired[str]
    reasoning_content: NotRequired[str]


class ChatMessageMade(ReasoningMade):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    annotations: list[object]
    """None: nothing is searched."""
    tool_calls: NotRequired[list[ToolCallMade]]


class ChatChoice(JsonObject):
    index: int
    message: ChatMessageMade
    logprobs: ChatLogprobs | None
    finish_reason: EndReason | None


class Origin(JsonObject):
    """Origin of an answer."""

    created: int
    """Unix seconds."""
    model: str
    system_fingerprint: str
    """Server's version. The same seed may give another answer with another version."""


class ChatOrigin(Origin):
    service_tier: Literal["default"]
    """There is no other."""


class ChatCompletion(ChatOrigin, Costs):
    id: str
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class FunctionDelta(JsonObject):
    name: NotRequired[str]
    """Whole name, in a call's first piece."""
    arguments: str
    """Piece of JSON."""


class ToolCallDelta(JsonObject):
    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionDelta


class ChatDelta(ReasoningMade):
    """Piece of a message: first the role, then pieces of `content`, `reasoning` and `tool_calls`."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    refusal: NotRequired[None]
    tool_calls: NotRequired[list[ToolCallDelta]]


class ChatChunkChoice(JsonObject):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: EndReason | None


class ChatCompletionChunk(ChatOrigin):
    """Ended by `[DONE]`, or by an event that holds an error."""

    id: str
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    """One choice; none in the chunk with the usage."""
    usage: NotRequired[Usage | None]
    performance: NotRequired[Performance]


class CompletionLogprobs(JsonObject):
    text_offset: list[int]
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(JsonObject):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class Completion(Origin, Costs):
    id: str
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class CompletionChunk(Origin):
    """Ended by `[DONE]`, or by an event that holds an error."""

    id: str
    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    """One choice with a piece of text; none in the chunk with the usage."""
    usage: NotRequired[Usage | None]
    performance: NotRequired[Performance]


class EmbeddingMade(JsonObject):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str
    """Numbers, or base64 of little-endian float32."""


class EmbeddingUsage(JsonObject):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(JsonObject):
    object: Literal["list"]
    data: list[EmbeddingMade]
    model: str
    usage: EmbeddingUsage


class Model(JsonObject):
    """Model for OpenAI's and Anthropic's clients, which request the same path."""

    id: str
    object: Literal["model"]
    created: int
    """Unix seconds."""
    owned_by: str
    type: Literal["model"]
    display_name: str
    created_at: str
    """RFC 3339."""
    lifecycle: Literal["active"]
    max_input_tokens: int
    max_tokens: int
    max_model_len: int
    """Tokens of prompt and answer together."""
    aliases: list[str]
    state: Literal["loading", "ready", "unavailable", "unloaded"]
    features: list[str]
    """Capabilities of the model under Ollama's names."""
    reasoning_efforts: list[str]
    """Values of `reasoning_effort` that make a difference."""


class ModelList(JsonObject):
    object: Literal["list"]
    data: list[Model]
    has_more: Literal[False]
    first_id: str | None
    last_id: str | None


class Tokenized(JsonObject):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(JsonObject):
    prompt: str


CHAT = RouteDoc(
    "Answer a chat, whole or streamed",
    ChatCompletion,
    {EVENT_STREAM: ChatCompletionChunk},
    {"messages": [_USER], "max_completion_tokens": 64},
    tag=_TAG,
)
COMPLETION = RouteDoc(
    "Continue a prompt, whole or streamed",
    Completion,
    {EVENT_STREAM: CompletionChunk},
    {"prompt": "The capital of France is", "max_tokens": 16},
    tag=_TAG,
)
EMBEDDINGS = RouteDoc(
    "Compute an embedding of each text",
    EmbeddingList,
    example={"input": ["one text", "another"], "encoding_format": "float"},
    tag=_TAG,
)
MODELS = RouteDoc("List the served models", ModelList, tag=_TAG)
MODEL = RouteDoc("Describe one of the served models", Model, more_statuses=(404,), tag=_TAG)
TOKENIZE = RouteDoc(
    "Split text or messages into tokens", Tokenized, example={"prompt": "Hello there"}, tag=_TAG
)
DETOKENIZE = RouteDoc("Join tokens to text", Detokenized, example={"tokens": [1, 2, 3]}, tag=_TAG)


# ---- tokens

_NO_LOGPROB = -9999.0
"""OpenAI's value for an impossible token, because JSON has no infinity."""
_REPLACEMENT = "\ufffd"
_SENTENCEPIECE_SPACE = "\u2581"
_BYTE_PIECE = 6
"""Length of `<0x0A>`, SentencePiece's name of a byte."""


class TokenText(NamedTuple):
    text: str
    data: bytes
    special: bool
    """True for a token that answers and echoed prompts omit."""

    @property
    def name(self) -> str:
        """Unique name of the token, unlike `text`. Bytes that are no text are spelt out, as in OpenAI's API."""
        if _REPLACEMENT not in self.text:
            return self.text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.data)


_KNOWN: WeakKeyDictionary[Tokenizer, dict[int, TokenText]] = WeakKeyDictionary()


class TokenTexts:
    """Tokens of one tokenizer. If a token contains a part of a character, its text shows U+FFFD.

    All objects of one tokenizer share a cache.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known = _KNOWN.setdefault(tokenizer, {})

    def __getitem__(self, token: int) -> TokenText:
        known = self._known.get(token)
        if known is None:
            known = self._known[token] = self._look_up(token)
        return known

    def scored(self, scored: TokenLogprob) -> ScoredToken:
        """Return a token with its log-probability and its alternatives."""
        return {
            **self._alternative(scored.token, scored.logprob),
            "top_logprobs": [self._alternative(token, logprob) for token, logprob in scored.top],
        }

    def _alternative(self, token: int, logprob: float) -> ScoredAlternative:
        text = self[token]
        return {"token": text.text, "logprob": finite_logprob(logprob), "bytes": list(text.data)}

    def _look_up(self, token: int) -> TokenText:
        text = self._tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        piece = self._tokenizer.convert_ids_to_tokens(token) or ""
        if _REPLACEMENT in text:
            return TokenText(text, _bytes_of(piece, text), special=False)
        if piece.startswith(_SENTENCEPIECE_SPACE):
            # Decoded alone it starts a text, so the tokenizer drops one space.
            text = piece.replace(_SENTENCEPIECE_SPACE, " ")
        shown = self._tokenizer.decode([token], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return TokenText(text, text.encode(errors="replace"), special=bool(text.strip(" ")) and not shown)


def finite_logprob(logprob: float) -> float:
    return max(_NO_LOGPROB, logprob)


def _bytes_of(piece: str, text: str) -> bytes:
    """Return the bytes that a token's name stands for: `<0x0A>` in SentencePiece, GPT-2's alphabet in byte-level BPE."""
    if len(piece) == _BYTE_PIECE and piece.startswith("<0x") and piece.endswith(">"):
        return bytes([int(piece[3:5], 16)])
    alphabet = _byte_alphabet()
    if piece and all(character in alphabet for character in piece):
        return bytes(alphabet[character] for character in piece)
    return text.encode(errors="replace")


@lru_cache(maxsize=1)
def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's alphabet: a printable byte stands for itself, the others are numbered from U+0100."""
    return {character: byte for byte, character in _spelt_bytes()}


def _spelt_bytes() -> Iterator[tuple[int, str]]:
    unprintable = 0
    for byte in range(256):
        if ord("!") <= byte <= ord("~") or ord("¡") <= byte <= ord("¬") or ord("®") <= byte:
            yield byte, chr(byte)
        else:
            yield byte, chr(256 + unprintable)
            unprintable += 1
