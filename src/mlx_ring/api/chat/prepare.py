"""Preparation of a chat request for the engine: the prompt, the constraints, and the rules for reading answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mlx_ring.api.chat.grammars import answer_grammar
from mlx_ring.api.chat.model_format import ChatFormat, Marks, prompts_end
from mlx_ring.api.chat.reader import ReadingRules
from mlx_ring.api.chat.request import Conversation, in_order_of_calls, with_reasoning
from mlx_ring.api.chat.tool_calls import CallRules
from mlx_ring.api.context import ApiContext
from mlx_ring.api.service import ModelService
from mlx_ring.core.errors import RequestError
from mlx_ring.core.generation import GenerateRequest
from mlx_ring.core.types import SamplingParams

_MOST_TOOLS = 1024
"""Templates and grammars are written tool by tool; OpenAI takes 128."""
_NEVER = -100.0
"""As a bias, more than any model prefers one token to all others by."""


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """A chat that only wants an engine."""

    requests: tuple[GenerateRequest, ...]
    """One for each answer."""
    rules: tuple[ReadingRules, ...]
    """How each is read."""
    prompt_field: str
    """Name of the request's field that holds the prompt, for errors."""

    @property
    def prompt_tokens(self) -> int:
        return len(self.requests[0].prompt_tokens)


async def prepare_chat(
    context: ApiContext,
    service: ModelService,
    conversation: Conversation,
    sampling: Sequence[SamplingParams],
    *,
    request_id: str,
    early_arguments: bool = False,
) -> PreparedChat:
    """Make the prompt and all that follows from it.

    Args:
        context: what routes have at hand.
        service: the model.
        conversation: what is asked.
        sampling: of each answer. Stop strings count in content alone.
        request_id: for logs.
        early_arguments: whether arguments of calls go out as they come. A call that then ends badly has arguments that are
            no JSON, and is text of the answer otherwise.

    Raises:
        RequestError: the model's template cannot take it, or has no place for what is asked for.
    """
    format_ = context.formats[service.tokenizer]
    prompt = await encode_conversation(context, service, conversation)
    thinking_open = _opens_thinking(format_, conversation, prompts_end(service.tokenizer, prompt))
    grammar = answer_grammar(format_, conversation, thinking_open=thinking_open)
    await context.grammars.check(grammar, conversation)
    calls = _call_rules(format_, conversation, early=early_arguments)
    shown = format_.shown_tokens(calls=calls is not None)
    barred = _barred_tokens(format_, conversation)
    requests = tuple(
        GenerateRequest(
            f"{request_id}-{index}",
            prompt,
            replace(params, stop=(), grammar=grammar, logit_bias=params.logit_bias + barred),
            shown_tokens=shown,
        )
        for index, params in enumerate(sampling)
    )
    rules = tuple(
        ReadingRules(format_, calls, thinking_open, params.stop, params.min_tokens) for params in sampling
    )
    return PreparedChat(requests, rules, conversation.messages_param)


async def encode_conversation(
    context: ApiContext,
    service: ModelService,
    conversation: Conversation,
    *,
    add_generation_prompt: bool = True,
) -> tuple[int, ...]:
    """Return the prompt as the model reads it; without `add_generation_prompt` it does not begin an answer.

    Raises:
        RequestError: the model's template cannot take it.
    """
    format_ = context.formats[service.tokenizer]
    _check_tools(format_, conversation)
    _check_continues(conversation)
    _check_kwargs(format_, conversation)
    is_harmony = format_.calls is not None and format_.calls.parser == "harmony"
    messages = with_reasoning(in_order_of_calls(conversation.messages), calls_have_one_text=is_harmony)
    return await context.prompts.encode_chat(
        service, replace(conversation, messages=messages), add_generation_prompt=add_generation_prompt
    )


def with_effort(
    format_: ChatFormat, own: Mapping[str, object] | None, effort: str | None, *, param: str
) -> Mapping[str, object]:
    """Return the client's own template arguments and those that stand for the effort.

    Raises:
        RequestError: both say the same thing, or the template knows nothing of it.
    """
    arguments = {} if effort is None else effort_arguments(format_, effort, param=param)
    for name in arguments:
        if own and name in own:
            raise RequestError(
                f"'{param}' and 'chat_template_kwargs.{name}' set the same option; give one of them.",
                param=param,
            )
    return {**(own or {}), **arguments}


def effort_arguments(format_: ChatFormat, effort: str, *, param: str) -> dict[str, object]:
    """Return the template arguments that set the reasoning effort; `none` turns reasoning off.

    A template with a switch only treats every effort but `none` alike.

    Raises:
        RequestError: the template has no such setting.
    """
    if format_.knows("reasoning_effort"):
        return {"reasoning_effort": effort}
    for switch in ("enable_thinking", "thinking"):
        if format_.knows(switch):
            return {switch: effort != "none"}
    if effort == "none" and format_.thinking is None:
        return {}
    raise RequestError(
        f"'{param}' is '{effort}', but this model's chat template has no setting for the reasoning effort; leave it out.",
        param=param,
    )


def _check_tools(format_: ChatFormat, conversation: Conversation) -> None:
    tools = len(conversation.tool_use.tools)
    if not tools:
        return
    if tools > _MOST_TOOLS:
        raise RequestError(
            f"'tools' has {tools} tools; one request may have {_MOST_TOOLS} at most.", param="tools"
        )
    if format_.calls is None or not format_.knows("tools"):
        raise RequestError(
            "This model's chat template does not support tools; leave 'tools' out.",
            param="tools",
        )


def _check_continues(conversation: Conversation) -> None:
    if not conversation.continues:
        return
    if conversation.messages[-1].get("role") != "assistant":
        raise RequestError(
            "The last message cannot be continued, because it is not the assistant's.",
            param=conversation.messages_param,
        )
    if conversation.format.kind != "text":
        raise RequestError(
            f"'{conversation.format.param}' needs a whole answer, but the last message begins one: leave out one of them.",
            param=conversation.format.param,
        )


def _check_kwargs(format_: ChatFormat, conversation: Conversation) -> None:
    """Refuse arguments that the template never mentions, because they would silently do nothing.

    A template that cannot be read takes every argument.
    """
    for name in conversation.template_kwargs if format_.words else ():
        if not format_.knows(name):
            param = f"{conversation.kwargs_param}.{name}"
            raise RequestError(
                f"'{param}' is unknown to this model's chat template; leave it out.", param=param
            )


def _opens_thinking(format_: ChatFormat, conversation: Conversation, end: str) -> bool:
    """Return True where the answer begins inside reasoning, opened by the template or by the continued message."""
    if format_.thinking is None:
        return False
    return _is_open(format_.thinking, end) if conversation.continues else format_.opens_thinking(end)


def _is_open(marks: Marks, text: str) -> bool:
    return text.rfind(marks.start) > text.rfind(marks.end)


def _call_rules(format_: ChatFormat, conversation: Conversation, *, early: bool) -> CallRules | None:
    use = conversation.tool_use
    if format_.calls is None or not use.callable_tools:
        return None
    return CallRules(format_.calls, use.callable_tools, parallel=use.parallel, early=early)


def _barred_tokens(format_: ChatFormat, conversation: Conversation) -> tuple[tuple[int, float], ...]:
    """Return biases that keep a model with tools from calling any, where one token opens a call.

    Without them it would write its call as text. The prompt still lists the tools, so that its cached prefix fits.
    """
    use = conversation.tool_use
    if format_.calls is None or not use.tools or use.callable_tools:
        return ()
    opening = format_.added.get(format_.calls.start)
    return () if opening is None else ((opening, _NEVER),)
