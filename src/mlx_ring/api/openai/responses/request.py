"""The body of `/v1/responses`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from mlx_ring.api.body import Body, Refused
from mlx_ring.api.openai.formats import JsonObjectFormat, TextFormat
from mlx_ring.api.openai.responses.items import AnyItem
from mlx_ring.api.openai.sampling import Count, Obfuscated, SamplingFields, one_or_many
from mlx_ring.api.openai.tools import FunctionName, Parameters

_LOGPROBS = "message.output_text.logprobs"
_SEALED = "reasoning.encrypted_content"


_Stateless = Annotated[None, Refused("answers are not kept here; send the whole conversation as 'input'.")]
_Waited = Annotated[None, Refused("answers are given while the client waits; leave it out.", (False,))]
_Prompt = Annotated[
    None, Refused("prompts are not kept here; send what it says as 'instructions' and 'input'.")
]


def _own_tool(kind: str) -> str:
    if kind != "function":
        raise PydanticCustomError(
            "unsupported",
            "is '{kind}', a tool that the server would run; this one runs none: only 'function' is supported.",
            {"kind": kind},
        )
    return kind


class FunctionTool(Body):
    type: Annotated[str, AfterValidator(_own_tool), Field(json_schema_extra={"const": "function"})]
    name: FunctionName
    description: str | None = None
    parameters: Parameters | None = None
    strict: bool | None = None
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None


class NamedTool(Body):
    type: Literal["function"]
    name: str


class AllowedTools(Body):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1)]


class JsonSchemaFormat(Body):
    type: Literal["json_schema"]
    name: str
    schema_: Annotated[dict[str, object], Field(alias="schema")]
    description: str | None = None
    strict: bool | None = None


class TextConfig(Body):
    format: (
        Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")] | None
    ) = None
    verbosity: Literal["low", "medium", "high"] | None = None
    """Without effect, as in chats."""


class Reasoning(Body):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto"] | None = None
    """All that was thought is in the answer, which is more than a summary; one of a given length is not made."""
    generate_summary: Literal["auto"] | None = None
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None


class StreamOptions(Body):
    include_obfuscation: Obfuscated = None


ToolChoiceWord = Literal["none", "auto", "required"]
ToolChoice = Annotated[
    Annotated[ToolChoiceWord, Tag("one")]
    | Annotated[Annotated[NamedTool | AllowedTools, Field(discriminator="type")], Tag("many")],
    Discriminator(lambda value: "one" if isinstance(value, str) else "many"),
]


class ResponsesRequest(SamplingFields):
    input: Annotated[
        Annotated[str, Tag("one")] | Annotated[list[AnyItem], Field(min_length=1), Tag("many")],
        Discriminator(
            one_or_many,
            custom_error_type="one_or_many",
            custom_error_message="Input should be a string or a list of items",
        ),
    ]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Count | None = None
    """Of tools that a server runs: this one runs none, and so keeps to any number."""
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    truncation: Literal["disabled"] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    chat_template_kwargs: dict[str, object] | None = None
    previous_response_id: _Stateless = None
    conversation: _Stateless = None
    background: _Waited = None
    prompt: _Prompt = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None
    """These, and `store`, are without effect; the answer repeats them."""

    @property
    def wanted_logprobs(self) -> int | None:
        """How many alternatives beside each token's own; None: no log-probabilities."""
        if self.top_logprobs or _LOGPROBS in (self.include or ()):
            return self.top_logprobs or 0
        return None

    @property
    def seals_reasoning(self) -> bool:
        return _SEALED in (self.include or ())
