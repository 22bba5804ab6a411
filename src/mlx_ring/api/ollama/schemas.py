"""Types of what Ollama's routes return, as their writers make it and `/openapi.json` shows it."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from mlx_ring.api.openai.schemas import ScoredToken
from mlx_ring.api.openapi import JsonObject, RouteDoc

LINES = "application/x-ndjson"
_TAG = "Ollama"


class OllamaOrigin(JsonObject):
    model: str
    created_at: str


class OllamaDurations(JsonObject):
    """Durations in nanoseconds."""

    total_duration: int
    load_duration: int


class OllamaEnd(JsonObject):
    """End of a piece. Only the last piece of an answer has durations, in nanoseconds, and counts."""

    done: bool
    done_reason: NotRequired[Literal["stop", "length", "load", "unload"]]
    total_duration: NotRequired[int]
    load_duration: NotRequired[int]
    prompt_eval_count: NotRequired[int]
    prompt_eval_duration: NotRequired[int]
    eval_count: NotRequired[int]
    eval_duration: NotRequired[int]


class OllamaPiece(OllamaOrigin, OllamaEnd):
    logprobs: NotRequired[list[ScoredToken]]


class CalledFunction(JsonObject):
    name: str
    arguments: dict[str, object]


class CalledTool(JsonObject):
    id: str
    function: CalledFunction


class OllamaMessage(JsonObject):
    role: Literal["assistant"]
    content: str
    thinking: NotRequired[str]
    tool_calls: NotRequired[list[CalledTool]]


class OllamaChat(OllamaPiece):
    message: OllamaMessage


class OllamaText(JsonObject):
    response: str
    thinking: NotRequired[str]


class OllamaGenerated(OllamaPiece, OllamaText):
    """Piece of an answer to a prompt."""


class OllamaEmbeddings(OllamaDurations):
    model: str
    embeddings: list[list[float]]
    prompt_eval_count: int


class OllamaEmbedding(JsonObject):
    embedding: list[float]


class OllamaDetails(JsonObject):
    parent_model: str
    format: Literal["safetensors", "gguf"]
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(JsonObject):
    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetails


class OllamaModels(JsonObject):
    models: list[OllamaModel]


class OllamaRunningModel(OllamaModel):
    """Loaded model. Its memory is freed when other models need it, never after a timeout."""

    size_vram: int
    expires_at: str
    context_length: int


class OllamaRunningModels(JsonObject):
    models: list[OllamaRunningModel]


class OllamaShown(JsonObject):
    details: OllamaDetails
    model_info: dict[str, object]
    capabilities: list[str]
    parameters: str
    modified_at: str


class OllamaVersion(JsonObject):
    version: str
    """Version of Ollama that the API corresponds to."""
    mlx_ring: str
    """Version of this server."""


class OllamaStatus(JsonObject):
    status: str
    """State of a pull; "success" at its end."""
    digest: NotRequired[str]
    """Name of the download."""
    total: NotRequired[int]
    """Bytes of all files."""
    completed: NotRequired[int]
    """Bytes that are here."""


CHAT = RouteDoc(
    "Answer a chat in Ollama's format, streamed unless `stream` is false",
    OllamaChat,
    {LINES: OllamaChat},
    {"messages": [{"role": "user", "content": "Hello"}], "stream": False, "options": {"num_predict": 64}},
    more_statuses=(409,),
    tag=_TAG,
)
GENERATE = RouteDoc(
    "Answer one prompt in Ollama's format, streamed unless `stream` is false",
    OllamaGenerated,
    {LINES: OllamaGenerated},
    {"prompt": "Hello", "stream": False, "options": {"num_predict": 64}},
    more_statuses=(409,),
    tag=_TAG,
)
EMBED = RouteDoc(
    "Compute embeddings in Ollama's format",
    OllamaEmbeddings,
    example={"input": ["one text", "another"]},
    tag=_TAG,
)
EMBEDDINGS = RouteDoc(
    "Compute the embedding of one prompt in Ollama's format",
    OllamaEmbedding,
    example={"prompt": "one text"},
    tag=_TAG,
)
TAGS = RouteDoc("List the models in Ollama's format", OllamaModels, tag=_TAG)
RUNNING = RouteDoc("List the loaded models in Ollama's format", OllamaRunningModels, tag=_TAG)
SHOW = RouteDoc("Describe a model and its capabilities in Ollama's format", OllamaShown, example={}, tag=_TAG)
VERSION = RouteDoc("Return the version of Ollama's API", OllamaVersion, tag=_TAG)
PULL = RouteDoc(
    "Download a model in Ollama's format, with progress unless `stream` is false, and list it",
    OllamaStatus,
    {LINES: OllamaStatus},
    {"model": "qwen3:0.6b"},
    more_statuses=(409,),
    tag=_TAG,
)
DELETE: RouteDoc[Any, Any] = RouteDoc(
    "Remove a model that is not loaded from the disk, in Ollama's format",
    example={"model": "qwen3:0.6b"},
    more_statuses=(409,),
    tag=_TAG,
)
