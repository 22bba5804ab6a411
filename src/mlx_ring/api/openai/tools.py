"""Tools as OpenAI's chat has them, and what the answer may do with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, cast

from pydantic import AfterValidator, Discriminator, Field, StringConstraints, Tag
from pydantic_core import PydanticCustomError

from mlx_ring.api.chat.request import Tool, ToolUse
from mlx_ring.api.request_body import Body, show
from mlx_ring.core.errors import RequestError

FunctionName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


def check_parameters(schema: dict[str, object] | None) -> dict[str, object] | None:
    """Arguments are an object, whether or not their schema says so; no schema, or an empty one, has none."""
    if not schema:
        return schema
    kind = schema.get("type", "object")
    if kind != "object":
        raise PydanticCustomError(
            "schema", "should be a JSON schema of type 'object', not {kind}", {"kind": show(kind)}
        )
    return {"type": "object", **schema}


Parameters = Annotated[
    dict[str, object],
    AfterValidator(check_parameters),
    Field(json_schema_extra={"properties": {"type": {"const": "object"}}}),
]


class FunctionFields(Body):
    name: FunctionName
    description: str | None = None
    parameters: Parameters | None = None
    strict: bool | None = None


class FunctionTool(Body):
    type: Literal["function"]
    function: FunctionFields


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Body):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1)]


class AllowedChoice(Body):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _choice_kind(value: object) -> str | None:
    if isinstance(value, str):
        return "word"
    if isinstance(value, NamedTool | AllowedChoice):
        return value.type
    kind = cast("dict[str, object]", value).get("type") if isinstance(value, dict) else None
    return kind if kind in ("function", "allowed_tools") else None


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("word")]
    | Annotated[NamedTool, Tag("function")]
    | Annotated[AllowedChoice, Tag("allowed_tools")],
    Discriminator(
        _choice_kind,
        custom_error_type="tool_choice",
        custom_error_message="Input should be 'none', 'auto', 'required', or an object of type 'function' or 'allowed_tools'",
    ),
]


def read_tool_use(
    tools: Sequence[FunctionTool] | None, choice: ToolChoice | None, *, parallel: bool | None
) -> ToolUse:
    """What the chat may do.

    Raises:
        RequestError: a name that is there twice, or a choice of what is not there.
    """
    read = [
        Tool(given.name, given.description, given.parameters, bool(given.strict))
        for given in (tool.function for tool in tools or ())
    ]
    check_names([tool.name for tool in read], "tools[{}].function.name")
    asked = ToolUse(tools=read, parallel=parallel is not False)
    if choice is None or isinstance(choice, str):
        return choose(asked, choice or "auto", None, "tool_choice")
    if isinstance(choice, NamedTool):
        return choose(asked, "required", [choice.function.name], "tool_choice.function.name")
    allowed = choice.allowed_tools
    names = [tool.function.name for tool in allowed.tools]
    return choose(asked, allowed.mode, names, "tool_choice.allowed_tools.tools")


def check_names(names: Sequence[str], place: str) -> None:
    """No two tools have one name. `place` is where a name stands, with `{}` for its number."""
    known = set[str]()
    for number, name in enumerate(names):
        if name in known:
            raise RequestError(
                f"Two tools have the name '{name}'; give each its own.", param=place.format(number)
            )
        known.add(name)


def choose(
    use: ToolUse, choice: Literal["none", "auto", "required"], names: Sequence[str] | None, param: str
) -> ToolUse:
    """The tools with a choice among them; `names` are those that may be called, None: all.

    Raises:
        RequestError: it names a tool that is not there, or there is none to be called.
    """
    known = {tool.name for tool in use.tools}
    for name in names or ():
        if name not in known:
            there = ", ".join(f"'{tool}'" for tool in sorted(known)) or "none"
            raise RequestError(f"'{param}' names '{name}'; of 'tools' there is {there}.", param=param)
    if choice == "required" and not known:
        raise RequestError(
            f"'{param}' demands a call, and there are no 'tools' that could be called.", param=param
        )
    allowed = None if names is None else frozenset(names)
    return ToolUse(use.tools, choice, allowed, use.parallel)
