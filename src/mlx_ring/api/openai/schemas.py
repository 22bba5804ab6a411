"""Types of what OpenAI's routes return, as their writers make it and `/openapi.json` shows it."""

from __future__ import annotations

from typing import Literal, NotRequired

from mlx_ring.api.chat.request import EndReason
from mlx_ring.api.openapi import JsonObject, RouteDoc
from mlx_ring.api.streaming import EVENT_STREAM

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
