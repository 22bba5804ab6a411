"""What OpenAI's routes answer, as schemas for `/openapi.json`."""

from __future__ import annotations

from typing import Literal

from mlx_ring.api.openapi import About, Told
from mlx_ring.api.streaming import EVENT_STREAM

_USER = {"role": "user", "content": "What is the capital of France?"}
_TAG = "OpenAI"

EndWord = Literal["stop", "length", "tool_calls"]


class PromptDetails(Told):
    cached_tokens: int
    """That were not computed again."""
    audio_tokens: Literal[0]


class CompletionDetails(Told):
    reasoning_tokens: int
    audio_tokens: Literal[0]
    accepted_prediction_tokens: Literal[0]
    rejected_prediction_tokens: Literal[0]


class Usage(Told):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class Performance(Told):
    """Seconds, and tokens per second."""

    queue_s: float
    prompt_s: float
    generation_s: float
    prompt_tokens_per_second: float | None
    generation_tokens_per_second: float | None


class ScoredAlternative(Told):
    token: str
    logprob: float
    bytes: list[int]


class ScoredToken(ScoredAlternative):
    top_logprobs: list[ScoredAlternative]


class ChatLogprobs(Told):
    content: list[ScoredToken]
    refusal: None


class CalledFunction(Told):
    name: str
    arguments: str
    """JSON."""


class ToolCallMade(Told):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessageMade(Told):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    annotations: list[object]
    """None: nothing is searched."""
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallMade] | None = None


class ChatChoice(Told):
    index: int
    message: ChatMessageMade
    logprobs: ChatLogprobs | None
    finish_reason: EndWord


class _Answered(Told):
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


class ChatChunkChoice(Told):
    index: int
    delta: dict[str, object]
    """First the role, then pieces of `content`, `reasoning` and `tool_calls`."""
    logprobs: ChatLogprobs | None
    finish_reason: EndWord | None


class ChatCompletionChunk(_ChatAnswered):
    """Ended by `[DONE]`, or by an event that holds an error."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class CompletionLogprobs(Told):
    text_offset: list[int]
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(Told):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class Completion(_Answered):
    """Streamed, each event has a piece; the last is `[DONE]`, or holds an error."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage | None = None
    performance: Performance | None = None


class EmbeddingMade(Told):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str
    """A string is base64 of little-endian float32."""


class EmbeddingUsage(Told):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(Told):
    object: Literal["list"]
    data: list[EmbeddingMade]
    model: str
    usage: EmbeddingUsage


class Model(Told):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    """Tokens of prompt and answer together."""
    aliases: list[str]
    state: Literal["loading", "ready", "unavailable", "unloaded"]


class ModelList(Told):
    object: Literal["list"]
    data: list[Model]


class Tokenized(Told):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(Told):
    prompt: str


class ResponseItem(Told):
    type: Literal["message", "reasoning", "function_call"]
    id: str


class ResponseUsage(Told):
    input_tokens: int
    output_tokens: int
    total_tokens: int


class ResponseMade(Told):
    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["completed", "incomplete", "in_progress", "failed"]
    output: list[ResponseItem]
    usage: ResponseUsage | None


class ResponseEvent(Told):
    type: str
    """`response.created`, `response.output_text.delta` and so on; an error is one of them."""
    sequence_number: int


CHAT = About(
    "A chat answer, whole or streamed",
    ChatCompletion,
    {EVENT_STREAM: ChatCompletionChunk},
    {"messages": [_USER], "max_completion_tokens": 64},
    tag=_TAG,
)
RESPONSE = About(
    "A chat answer in items, whole or streamed; nothing is kept",
    ResponseMade,
    {EVENT_STREAM: ResponseEvent},
    {"input": "What is the capital of France?", "max_output_tokens": 64},
    tag=_TAG,
)
COMPLETION = About(
    "A continuation, whole or streamed",
    Completion,
    {EVENT_STREAM: Completion},
    {"prompt": "The capital of France is", "max_tokens": 16},
    tag=_TAG,
)
EMBEDDINGS = About(
    "Vectors of texts",
    EmbeddingList,
    example={"input": ["one text", "another"], "encoding_format": "float"},
    tag=_TAG,
)
MODELS = About("The models that are served", ModelList, tag=_TAG)
MODEL = About("One of the models", Model, more_statuses=(404,), tag=_TAG)
TOKENIZE = About("Text or messages to tokens", Tokenized, example={"prompt": "Hello there"}, tag=_TAG)
DETOKENIZE = About("Tokens to text", Detokenized, example={"tokens": [1, 2, 3]}, tag=_TAG)
