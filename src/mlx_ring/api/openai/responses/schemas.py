"""Types of what `/v1/responses` returns, as its writer makes it and `/openapi.json` shows it."""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired

from pydantic import Field

from mlx_ring.api.openai.sampling import EchoedSampling
from mlx_ring.api.openai.schemas import ScoredToken
from mlx_ring.api.openapi import JsonObject, RouteDoc
from mlx_ring.api.streaming import EVENT_STREAM

# ---- items

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputTextPart(JsonObject):
    type: Literal["output_text"]
    text: str
    annotations: list[object]
    """None: nothing is searched."""
    logprobs: list[ScoredToken]


class ReasoningPart(JsonObject):
    type: Literal["reasoning_text"]
    text: str


ResponsePart = Annotated[OutputTextPart | ReasoningPart, Field(discriminator="type")]


class _Item(JsonObject):
    id: str
    status: ItemStatus


class ResponseMessage(_Item):
    type: Literal["message"]
    role: Literal["assistant"]
    content: list[OutputTextPart]


class ResponseReasoning(_Item):
    type: Literal["reasoning"]
    summary: list[object]
    """None: the content has all of the reasoning."""
    content: list[ReasoningPart]
    encrypted_content: str | None
    """Reasoning for the next request, where `include` asks for it."""


class ResponseCall(_Item):
    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: NotRequired[str]
    """Namespace of the function, if it was offered in one."""
    arguments: str
    """JSON."""


ResponseItem = Annotated[ResponseMessage | ResponseReasoning | ResponseCall, Field(discriminator="type")]


# ---- responses


class InputDetails(JsonObject):
    cached_tokens: int
    cache_write_tokens: Literal[0]


class OutputDetails(JsonObject):
    reasoning_tokens: int


class ResponseUsage(JsonObject):
    """Token counts. Cached tokens are part of the input, and reasoning is part of the output."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseFailure(JsonObject):
    code: str
    message: str


class IncompleteDetails(JsonObject):
    reason: Literal["max_output_tokens"]


class ReasoningConfig(JsonObject):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None
    summary: Literal["auto"] | None


class PlainFormat(JsonObject):
    type: Literal["text", "json_object"]


class SchemaFormat(JsonObject):
    type: Literal["json_schema"]
    name: str
    schema: dict[str, object]
    description: str | None
    strict: bool | None


class TextFormatConfig(JsonObject):
    format: PlainFormat | SchemaFormat
    verbosity: Literal["low", "medium", "high"]


class ChosenTool(JsonObject):
    type: Literal["function"]
    name: str


class ChosenTools(JsonObject):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[ChosenTool]


class ResponseTool(JsonObject):
    type: Literal["function"]
    name: str
    description: str | None
    parameters: dict[str, object] | None
    strict: bool


class ResponseNamespace(JsonObject):
    type: Literal["namespace"]
    name: str
    description: str | None
    tools: list[ResponseTool]


class ResponseMade(EchoedSampling):
    """Response, with the parameters of its request."""

    id: str
    model: str
    created_at: int
    """Unix seconds."""
    object: Literal["response"]
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool
    completed_at: int | None
    """Unix seconds."""
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    output: list[ResponseItem]
    """Items that have ended."""
    parallel_tool_calls: bool
    previous_response_id: None
    prompt_cache_key: str | None
    reasoning: ReasoningConfig
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: bool
    """True if a journal keeps it."""
    text: TextFormatConfig
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | ChosenTools
    tools: list[Annotated[ResponseTool | ResponseNamespace, Field(discriminator="type")]]
    top_logprobs: int
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    """Null until the end."""
    user: str | None


# ---- events of a streamed response


class _Event(JsonObject):
    sequence_number: int


StateKind = Literal[
    "response.created",
    "response.queued",
    "response.in_progress",
    "response.completed",
    "response.incomplete",
    "response.failed",
]


class StateEvent(_Event):
    type: StateKind
    response: ResponseMade


class ItemPlace(JsonObject):
    output_index: int
    item_id: str


class PartPlace(ItemPlace):
    content_index: Literal[0]


class ItemEvent(_Event):
    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: ResponseItem


class PartEvent(_Event, PartPlace):
    type: Literal["response.content_part.added", "response.content_part.done"]
    part: ResponsePart


class TextDeltaEvent(_Event, PartPlace):
    type: Literal["response.output_text.delta"]
    delta: str
    logprobs: list[ScoredToken]


class TextDoneEvent(_Event, PartPlace):
    type: Literal["response.output_text.done"]
    text: str
    logprobs: list[ScoredToken]


class ReasoningDeltaEvent(_Event, PartPlace):
    type: Literal["response.reasoning_text.delta"]
    delta: str


class ReasoningDoneEvent(_Event, PartPlace):
    type: Literal["response.reasoning_text.done"]
    text: str


class ArgumentsDeltaEvent(_Event, ItemPlace):
    type: Literal["response.function_call_arguments.delta"]
    delta: str


class ArgumentsDoneEvent(_Event, ItemPlace):
    type: Literal["response.function_call_arguments.done"]
    name: str
    arguments: str


class ErrorFields(JsonObject):
    code: str | None
    message: str
    param: str | None


class TypedErrorFields(ErrorFields):
    type: str


class ErrorEvent(_Event, ErrorFields):
    type: Literal["error"]
    error: TypedErrorFields
    """The same for SDKs, which raise it."""


ResponseEvent = Annotated[
    StateEvent
    | ItemEvent
    | PartEvent
    | TextDeltaEvent
    | TextDoneEvent
    | ReasoningDeltaEvent
    | ReasoningDoneEvent
    | ArgumentsDeltaEvent
    | ArgumentsDoneEvent
    | ErrorEvent,
    Field(discriminator="type"),
]


Included = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]
"""Names of optional parts of a response. Clients with a web search ask for its sources, of which there are none here."""


class CountedInput(JsonObject):
    object: Literal["response.input_tokens"]
    input_tokens: int


INPUT_TOKENS = RouteDoc(
    "Count the input tokens of a response, without an answer",
    CountedInput,
    example={"input": "What is the capital of France?"},
    tag="OpenAI",
)
RESPONSE = RouteDoc(
    "Answer a chat in items, whole or streamed; only a journal stores it",
    ResponseMade,
    {EVENT_STREAM: ResponseEvent},
    {"input": "What is the capital of France?", "max_output_tokens": 64},
    tag="OpenAI",
)
KEPT_RESPONSE = RouteDoc(
    "Return a response that the journal keeps, or the rest of its stream",
    ResponseMade,
    {EVENT_STREAM: ResponseEvent},
    query={
        "stream": "`true`: return its events. A response that was interrupted continues.",
        "starting_after": "`sequence_number` of the last event that the client has.",
    },
    more_statuses=(404,),
    tag="OpenAI",
)


class InputItems(JsonObject):
    object: Literal["list"]
    data: list[dict[str, object]]
    first_id: str | None
    last_id: str | None
    has_more: bool


INPUT_ITEMS: RouteDoc[InputItems] = RouteDoc(
    "List the input items of a response that the journal keeps",
    InputItems,
    query={
        "limit": "Most items of a page: 1 to 100, by default 20.",
        "order": "`desc`, the default: the last item first. `asc`: as in the request.",
        "after": "Id of the item before the page.",
    },
    more_statuses=(404,),
    tag="OpenAI",
)
CANCELLED_RESPONSE: RouteDoc[ResponseMade] = RouteDoc(
    "End a response that runs in the background", ResponseMade, more_statuses=(404,), tag="OpenAI"
)


class ResponseDeleted(JsonObject):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


DELETED_RESPONSE: RouteDoc[ResponseDeleted] = RouteDoc(
    "Remove a response from the journal", ResponseDeleted, more_statuses=(404,), tag="OpenAI"
)
