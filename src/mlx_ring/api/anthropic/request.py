"""The bodies of `/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, StringConstraints
from pydantic_core import PydanticCustomError

from mlx_ring.api.anthropic.blocks import Message, Text
from mlx_ring.api.body import Body, Refused
from mlx_ring.api.openai.sampling import Count, SamplingFields, StopString
from mlx_ring.api.openai.tools import Parameters

_MOST_STOPS = 64


def _own_tool(kind: str | None) -> str | None:
    if kind not in (None, "custom"):
        raise PydanticCustomError(
            "unsupported",
            "is '{kind}', a tool that the server would run; this one runs none: give 'name', 'description' and "
            "'input_schema' of a tool that the client runs.",
            {"kind": kind},
        )
    return kind


class Tool(Body):
    type: Annotated[
        str | None, AfterValidator(_own_tool), Field(json_schema_extra={"enum": [None, "custom"]})
    ] = None
    name: Annotated[str, StringConstraints(min_length=1)]
    description: str | None = None
    input_schema: Parameters
    strict: bool | None = None
    cache_control: dict[str, object] | None = None
    eager_input_streaming: bool | None = None
    """Arguments are streamed as they come in any case."""
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    input_examples: Annotated[list[object], Field(max_length=0)] | None = None


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    """Of a `tool`."""
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Count | None = None
    display: Literal["summarized", "omitted"] | None = None
    """Whether what was thought is shown; it is never summarized."""


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, object], Field(alias="schema")]


class OutputConfig(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class KeptTurns(Body):
    type: Literal["thinking_turns", "all"]
    value: Count = 1


class ClearThinking(Body):
    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"] | KeptTurns | None = None

    @property
    def turns(self) -> int | None:
        """How many of the last turns keep what was thought; None: all."""
        if self.keep == "all" or (self.keep is not None and self.keep.type == "all"):
            return None
        return 1 if self.keep is None else self.keep.value


class ContextManagement(Body):
    edits: list[ClearThinking] | None = None


_Stateless = Annotated[None, Refused("answers are not kept here; send the whole conversation as 'messages'.")]


class PromptFields(Body):
    """What makes the prompt. Of the fields without a meaning here, `metadata` and `service_tier` are dropped before."""

    model: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)]
    system: Text | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """Where `output_config.format` was before."""
    context_management: ContextManagement | None = None
    cache_control: dict[str, object] | None = None
    speed: Literal["standard"] | None = None
    diagnostics: dict[str, object] | None = None
    """Asks what the cache missed, where it did; `usage` says how much was found."""
    thread: _Stateless = None
    """Of a conversation that the server keeps; SDKs go on without when they are told so."""
    chat_template_kwargs: dict[str, object] | None = None
    """More of what the model's chat template knows; not Anthropic's."""


class CountTokensRequest(PromptFields):
    pass


class MessagesRequest(PromptFields, SamplingFields):
    max_tokens: Annotated[int, Field(ge=0)]
    """0: the prompt is computed and kept, for requests that begin alike; there is no answer."""
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    stop_sequences: Annotated[list[StopString], Field(max_length=_MOST_STOPS)] | None = None
    stream: bool | None = None
