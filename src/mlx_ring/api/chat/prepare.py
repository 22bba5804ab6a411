"""Preparation of a chat request for the engine: the prompt, the constraints, and the rules for reading answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mlx_ring.api.chat.answer_grammars import answer_grammar
from mlx_ring.api.chat.model_format import ChatFormat, Marks
from mlx_ring.api.chat.reader import ReadingRules
from mlx_ring.api.chat.request import Conversation
from mlx_ring.api.chat.tool_calls import CallRules
from mlx_ring.api.context import ApiContext
from mlx_ring.api.service import ModelService, Tokenizer
from mlx_ring.api.streaming import recorded_prompt
from mlx_ring.core.errors import RequestError
from mlx_ring.core.generation import GenerateRequest
from mlx_ring.core.types import SamplingParams

_MOST_TOOLS = 1024
"""Largest number of tools, because templates and grammars grow with each. OpenAI's limit is 128."""
_NEVER = -100.0
"""Bias that excludes a token, greater than any model's preference for one."""

_PROMPTS_END = 32
"""Number of tokens at a prompt's end in which a template may open reasoning."""


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """Chat that is ready for an engine."""

    requests: tuple[GenerateRequest, ...]
    """Requests to the engine, one for each answer."""
    rules: tuple[ReadingRules, ...]
    """Rules for reading each answer."""
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
    """Make the prompt, the engine's requests, and the rules for reading the answers.

    Args:
        context: context of the route.
        service: the model.
        conversation: the chat request.
        sampling: parameters of each answer. Stop strings apply to content only.
        request_id: id of the request, for logs.
        early_arguments: True to send arguments of calls as they arrive. The arguments of an invalid call are then no JSON;
            otherwise such a call becomes text of the answer.

    Raises:
        RequestError: the model's template refuses the conversation, or does not support a part of it.
    """
    format_ = context.formats[service.tokenizer]
    prompt = recorded_prompt(0) or await encode_conversation(context, service, conversation)
    thinking_open = _opens_thinking(format_, conversation, prompts_end(service.tokenizer, prompt))
    grammar = answer_grammar(
        format_, conversation, thinking_open=thinking_open, open_schemas=context.settings.open_schemas
    )
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
        ReadingRules(
            format_,
            calls,
            thinking_open,
            params.stop,
            params.min_tokens,
            continues=conversation.continues,
            stop_tokens=frozenset(params.stop_token_ids),
        )
        for params in sampling
    )
    return PreparedChat(requests, rules, conversation.messages_param)


async def encode_conversation(
    context: ApiContext, service: ModelService, conversation: Conversation
) -> tuple[int, ...]:
    """Return the prompt of the model.

    Raises:
        RequestError: the model's template refuses the conversation.
    """
    format_ = context.formats[service.tokenizer]
    _check_tools(format_, conversation)
    _check_continues(conversation)
    _check_kwargs(format_, conversation)
    is_harmony = format_.calls is not None and format_.calls.parser == "harmony"
    return await context.prompts.encode_chat(
        service,
        conversation,
        calls_have_one_text=is_harmony,
        escapes=context.settings.escapes_special_tokens,
    )


def with_effort(
    format_: ChatFormat, own: Mapping[str, object] | None, effort: str | None, *, param: str
) -> Mapping[str, object]:
    """Return the client's template arguments and those for the reasoning effort.

    Raises:
        RequestError: both set the same thing, or the template does not support it.
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

    A template that has only a switch treats all efforts but `none` the same.

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
    """Refuse arguments that the template does not mention, because they would silently have no effect.

    A template that cannot be read accepts every argument.
    """
    for name in conversation.template_kwargs if format_.words else ():
        if not format_.knows(name):
            param = f"{conversation.kwargs_param}.{name}"
            raise RequestError(
                f"'{param}' is unknown to this model's chat template; leave it out.", param=param
            )


def _opens_thinking(format_: ChatFormat, conversation: Conversation, end: str) -> bool:
    """Return True if the template or the continued message opens reasoning in which the answer starts."""
    if format_.thinking is None:
        return False
    return _is_open(format_.thinking, end) if conversation.continues else format_.opens_thinking(end)


def _is_open(marks: Marks, text: str) -> bool:
    return text.rfind(marks.start) > text.rfind(marks.end)


def _call_rules(format_: ChatFormat, conversation: Conversation, *, early: bool) -> CallRules | None:
    use = conversation.tool_use
    if format_.calls is None or not use.callable_tools:
        return None
    return CallRules(
        format_.calls,
        use.callable_tools,
        parallel=use.parallel and not format_.calls.is_single,
        required=use.choice == "required",
        early=early,
    )


def _barred_tokens(format_: ChatFormat, conversation: Conversation) -> tuple[tuple[int, float], ...]:
    """Return biases that prevent tool calls of a model with tools, if one token opens a call.

    Without them it would write its call as text. The prompt still lists the tools, so that its cached prefix matches.
    """
    use = conversation.tool_use
    if format_.calls is None or not use.tools or use.callable_tools:
        return ()
    opening = format_.added.get(format_.calls.start)
    return () if opening is None else ((opening, _NEVER),)


def prompts_end(tokenizer: Tokenizer, prompt: Sequence[int]) -> str:
    """Return the text of a prompt's last tokens, special ones included."""
    return tokenizer.decode(
        list(prompt[-_PROMPTS_END:]), skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
