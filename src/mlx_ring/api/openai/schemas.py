"""Types of what OpenAI's routes return, for `/openapi.json`."""

from __future__ import annotations

from typing import Literal, NotRequired

from mlx_ring.api.openapi import JsonObject, RouteDoc
from mlx_ring.api.streaming import EVENT_STREAM

_USER = {"role": "user", "content": "What is the capital of France?"}
_TAG = "OpenAI"

EndWord = Literal["stop", "length", "tool_calls"]


class PromptDetails(JsonObject):
    cached_tokens: int
    """That were not computed again."""
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


class ChatMessageMade(JsonObject):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    annotations: list[object]
    """None: nothing is searched."""
    reasoning: NotRequired[str | None]
    reasoning_content: NotRequired[str | None]
    tool_calls: NotRequired[list[ToolCallMade] | None]


class ChatChoice(JsonObject):
    index: int
    message: ChatMessageMade
    logprobs: ChatLogprobs | None
    finish_reason: EndWord


class _Answered(JsonObject):
    id: str
    created: int
    """Unix seconds."""
    model: str
    system_fingerprint: str


class _ChatAnswered(_Answered):
    service_tier: Literal["default"]
    """There is no other."""


class ChatCompletion(_ChatAnswered):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    performance: Performance


class ChatChunkChoice(JsonObject):
    index: int
    delta: dict[str, object]
    """First the role, then pieces of `content`, `reasoning` and `tool_calls`."""
    logprobs: ChatLogprobs | None
    finish_reason: EndWord | None


class ChatCompletionChunk(_ChatAnswered):
    """Ended by `[DONE]`, or by an event that holds an error."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | None]


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


class Completion(_Answered):
    """Streamed, each event has a piece; the last is `[DONE]`, or holds an error."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]
    performance: NotRequired[Performance | None]


class EmbeddingMade(JsonObject):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str
    """A string is base64 of little-endian float32."""


class EmbeddingUsage(JsonObject):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(JsonObject):
    object: Literal["list"]
    data: list[EmbeddingMade]
    model: str
    usage: EmbeddingUsage


class Model(JsonObject):
    """A model for OpenAI's and Anthropic's clients, which ask at the same path."""

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
    capabilities: list[str]
    """Capabilities of the model, by Ollama's names."""
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


class ResponseItem(JsonObject):
    type: Literal["message", "reasoning", "function_call"]
    id: str


class ResponseUsage(JsonObject):
    input_tokens: int
    output_tokens: int
    total_tokens: int


class ResponseMade(JsonObject):
    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["completed", "incomplete", "in_progress", "failed"]
    output: list[ResponseItem]
    usage: ResponseUsage | None


class ResponseEvent(JsonObject):
    type: str
    """`response.created`, `response.output_text.delta` and so on; an error is one of them."""
    sequence_number: int


CHAT = RouteDoc(
    "A chat answer, whole or streamed",
    ChatCompletion,
    {EVENT_STREAM: ChatCompletionChunk},
    {"messages": [_USER], "max_completion_tokens": 64},
    tag=_TAG,
)
RESPONSE = RouteDoc(
    "A chat answer in items, whole or streamed; nothing is kept",
    ResponseMade,
    {EVENT_STREAM: ResponseEvent},
    {"input": "What is the capital of France?", "max_output_tokens": 64},
    tag=_TAG,
)
COMPLETION = RouteDoc(
    "A continuation, whole or streamed",
    Completion,
    {EVENT_STREAM: Completion},
    {"prompt": "The capital of France is", "max_tokens": 16},
    tag=_TAG,
)
EMBEDDINGS = RouteDoc(
    "Vectors of texts",
    EmbeddingList,
    example={"input": ["one text", "another"], "encoding_format": "float"},
    tag=_TAG,
)
MODELS = RouteDoc("The models that are served", ModelList, tag=_TAG)
MODEL = RouteDoc("One of the models", Model, more_statuses=(404,), tag=_TAG)
TOKENIZE = RouteDoc("Text or messages to tokens", Tokenized, example={"prompt": "Hello there"}, tag=_TAG)
DETOKENIZE = RouteDoc("Tokens to text", Detokenized, example={"tokens": [1, 2, 3]}, tag=_TAG)
