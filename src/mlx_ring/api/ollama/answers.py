"""What Ollama's routes answer, as schemas for `/openapi.json`."""

from __future__ import annotations

from typing import Literal

from mlx_ring.api.openapi import About, Told

_LINES = "application/x-ndjson"
_TAG = "Ollama"


class _Piece(Told):
    """Durations are nanoseconds; they and the counts come with the last piece."""

    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load", "unload"] | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None


class CalledTool(Told):
    id: str
    function: dict[str, object]
    """`name`, and `arguments` as an object."""


class OllamaMessage(Told):
    role: Literal["assistant"]
    content: str
    thinking: str | None = None
    tool_calls: list[CalledTool] | None = None


class OllamaChat(_Piece):
    message: OllamaMessage


class OllamaGenerated(_Piece):
    response: str
    thinking: str | None = None


class OllamaEmbeddings(Told):
    model: str
    embeddings: list[list[float]]
    prompt_eval_count: int
    total_duration: int
    load_duration: int


class OllamaEmbedding(Told):
    embedding: list[float]


class OllamaModel(Told):
    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: dict[str, object]


class OllamaModels(Told):
    models: list[OllamaModel]


class OllamaShown(Told):
    details: dict[str, object]
    model_info: dict[str, object]
    capabilities: list[str]
    parameters: str
    modified_at: str


class OllamaVersion(Told):
    version: str


class OllamaStatus(Told):
    status: Literal["success"]


CHAT = About(
    "A chat answer, streamed unless `stream` is false",
    OllamaChat,
    {_LINES: OllamaChat},
    {"messages": [{"role": "user", "content": "Hello"}], "stream": False, "options": {"num_predict": 64}},
    more_statuses=(409,),
    tag=_TAG,
)
GENERATE = About(
    "An answer to a prompt, streamed unless `stream` is false",
    OllamaGenerated,
    {_LINES: OllamaGenerated},
    {"prompt": "Hello", "stream": False, "options": {"num_predict": 64}},
    more_statuses=(409,),
    tag=_TAG,
)
EMBED = About("Vectors of texts", OllamaEmbeddings, example={"input": ["one text", "another"]}, tag=_TAG)
EMBEDDINGS = About("A text's vector", OllamaEmbedding, example={"prompt": "one text"}, tag=_TAG)
TAGS = About("The models that are served", OllamaModels, tag=_TAG)
RUNNING = About("The models that are loaded", OllamaModels, tag=_TAG)
SHOW = About("What a model is and can", OllamaShown, example={}, tag=_TAG)
VERSION = About("Which version of Ollama's API this is", OllamaVersion, tag=_TAG)
PULL = About(
    "Whether a model is served: nothing is fetched",
    OllamaStatus,
    {_LINES: OllamaStatus},
    example={},
    tag=_TAG,
)
