"""Chat templates: rendering of a conversation's prompt within limits of memory and time.

A template is a program from the model's folder. Jinja's sandbox keeps it from harm outside, but not from endless loops and
texts of gigabytes.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import replace
from functools import cache, lru_cache, partial, wraps
from typing import Any, cast

from jinja2 import Environment, Template, TemplateError, TemplateRuntimeError, nodes
from jinja2.filters import do_format
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from mlx_ring.api.chat.request import Conversation, in_order_of_calls, with_reasoning
from mlx_ring.api.service import Tokenizer
from mlx_ring.core.errors import RequestError


def tokenizer_beneath(tokenizer: Tokenizer) -> Any:
    """Return the tokenizer inside mlx-lm's wrapper; None where there is no wrapper."""
    return getattr(tokenizer, "_tokenizer", None)


_TEMPLATE_TROUBLE = (
    TemplateError,
    MemoryError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RecursionError,
)
"""Errors of templates on messages that they do not support."""


def renderer(tokenizer: Tokenizer) -> Callable[..., list[int] | str]:
    """Return the function that applies the chat template.

    mlx-lm's wrapper turns reasoning on if a template has a switch for it. To keep the template's own default, templates are
    applied without the wrapper, except mlx-lm's own renderers.
    """
    beneath = tokenizer_beneath(tokenizer)
    if getattr(tokenizer, "_chat_template", None) is not None or not getattr(beneath, "chat_template", None):
        return tokenizer.apply_chat_template
    _limit_templates()
    return partial(cast("Callable[..., list[int] | str]", beneath.apply_chat_template), return_dict=False)


def render(
    tokenizer: Tokenizer, conversation: Conversation, *, add_generation_prompt: bool
) -> str | tuple[int, ...]:
    """Return the prompt's text, or its tokens if the tokenizer gives no text."""
    try:
        with _spending:
            prompt = renderer(tokenizer)(
                [dict(message) for message in conversation.messages],
                tokenize=not _renders_text(tokenizer),
                add_generation_prompt=add_generation_prompt and not conversation.continues,
                **template_arguments(conversation),
            )
    except _TEMPLATE_TROUBLE as error:
        raise RequestError(
            f"The model's chat template rejects these messages: {error}",
            param=conversation.messages_param,
        ) from error
    return prompt if isinstance(prompt, str) else tuple(prompt)


def for_template(conversation: Conversation, *, calls_have_one_text: bool) -> Conversation:
    """Return the conversation with its messages as templates expect them."""
    ordered = in_order_of_calls(conversation.messages)
    return replace(conversation, messages=with_reasoning(ordered, calls_have_one_text=calls_have_one_text))


def _renders_text(tokenizer: Tokenizer) -> bool:
    """Return True if the tokens depend on the template's text alone, as with Hugging Face and mlx-lm's renderers."""
    if getattr(tokenizer, "_chat_template", None) is not None:
        return True
    # A tokenizer has already imported this module. The package would import much more, in the first thread that needs it.
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

    beneath: object = tokenizer_beneath(tokenizer)
    return getattr(type(beneath), "apply_chat_template", None) is PreTrainedTokenizerBase.apply_chat_template


def template_arguments(conversation: Conversation) -> dict[str, object]:
    """Return the template's arguments. Omitted ones keep the template's defaults."""
    tools = [tool.for_template() for tool in conversation.tool_use.tools]
    return (
        dict(conversation.template_kwargs)
        | ({"tools": tools} if tools else {})
        | ({"continue_final_message": True} if conversation.continues else {})
    )


_MOST_CHARACTERS = 1 << 26
"""Largest text or list that a chat template may make, in characters or entries; a request has fewer."""
_MOST_IN_ALL = 1 << 30
"""Largest number of characters and entries that one rendering may make in all."""
_MOST_BITS = 1 << 16
_MOST_SOURCE = 1 << 20
_CPU_S = 5.0
"""Processor time of one rendering. A prompt of 10,000 messages takes a second."""
_LARGE = 1 << 15
"""Size from which making a text or a list counts as work."""
_LOOKS = 256
"""Number of iterations after which the time is checked."""
_LONG_NUMBER = re.compile(r"[0-9]{7}")
_SIZED_FILTERS = ("center", "indent", "format", "batch", "slice", "wordwrap", "truncate", "tojson", "string")
"""Filters whose results may be as long as a number says, or contain one value many times."""


class _Spending(threading.local):
    """Resources that the rendering of this thread has used. It is reset at the start of each."""

    until_s = math.inf
    made = 0
    iterations = 0

    def __enter__(self) -> None:
        self.until_s, self.made, self.iterations = time.thread_time() + _CPU_S, 0, 0

    def __exit__(self, *_: object) -> None:
        self.until_s = math.inf

    def make(self, count: int) -> None:
        """Count a text or list before it is made."""
        self.made += count
        if count > _MOST_CHARACTERS or self.made > _MOST_IN_ALL:
            raise TemplateRuntimeError(f"it makes texts or lists of more than {_MOST_CHARACTERS} entries.")
        if count > _LARGE:
            self.check_time()

    def iterate(self) -> bool:
        """Count an iteration of a loop, or a macro's call. Return True, so that conditions may contain it."""
        self.iterations += 1
        if self.iterations % _LOOKS == 0:
            self.check_time()
        return True

    def check_time(self) -> None:
        if time.thread_time() > self.until_s:
            raise TemplateRuntimeError(f"it takes more than {_CPU_S:g} s of processor time.")


_spending = _Spending()


class _LimitedEnvironment(ImmutableSandboxedEnvironment):
    """Environment of chat templates that stops one that takes too much memory or time."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})
    iterate = staticmethod(_spending.iterate)

    def concat(self, pieces: Iterable[str]) -> str:  # pyright: ignore[reportIncompatibleVariableOverride] - jinja calls it the same way
        texts: list[str] = []
        for piece in pieces:
            texts.append(piece)
            _spending.make(len(piece))
        return "".join(texts)

    def join(self, *values: object) -> str:
        """Join the operands of `~`."""
        texts = [str(_checked(value)) for value in values]
        _spending.make(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _check_operands(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride] - the same positions
        _check_arguments((*args, *kwargs.values()))
        return super().call(context, obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_format(value.__self__)
        return wrapped

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        if len(source) > _MOST_SOURCE:
            raise TemplateRuntimeError(f"it is longer than {_MOST_SOURCE} characters.")
        tree = super()._parse(source, name, filename)
        _CountedLoops(self).visit(tree)
        return tree


class _CountedLoops(NodeTransformer):
    """Transformer of a template that counts its iterations, and the texts that `~` makes."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802 - the visitor's name
        self.generic_visit(node)
        return self._call("join", node, node.nodes)

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - as above
        self.generic_visit(node)
        if node.test is not None:
            node.test = nodes.And(self._call("iterate", node), node.test, lineno=node.lineno)
        return self._count(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:  # noqa: N802 - as above
        self.generic_visit(node)
        return self._count(node)

    def _count(self, node: nodes.For | nodes.Macro) -> nodes.Node:
        node.body.insert(0, nodes.ExprStmt(self._call("iterate", node), lineno=node.lineno))
        return node

    def _call(self, name: str, at: nodes.Node, arguments: Sequence[nodes.Expr] = ()) -> nodes.Call:
        function = nodes.EnvironmentAttribute(name, lineno=at.lineno)
        call = nodes.Call(function, list(arguments), [], None, None, lineno=at.lineno)
        call.set_environment(self._environment)
        return call


def _check_operands(operator: str, left: Any, right: Any) -> None:
    if operator == "%" and isinstance(left, str):
        _check_format(left)
        _check_arguments(cast("tuple[Any, ...]", right) if isinstance(right, tuple) else (right,))
    elif operator == "+" and isinstance(left, Sized) and isinstance(right, Sized):
        _spending.make(len(left) + len(right))
    elif operator == "*":
        count, unit = (left, right) if isinstance(left, int) else (right, left)
        if isinstance(count, int) and isinstance(unit, Sized):
            _spending.make(max(0, count) * len(unit))
    if operator in {"*", "**"} and isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
        if bits > _MOST_BITS:
            raise TemplateRuntimeError(f"it makes a number of more than {_MOST_BITS} bits.")


_CONTAINERS: tuple[type[Any], ...] = (list, tuple, dict)


def _checked(value: Any) -> Any:
    """Return a value, after counting all that its text contains. Lists that contain one list many times grow fast."""
    if isinstance(value, _CONTAINERS):
        found, pending = 0, [value]
        while pending and found <= _MOST_CHARACTERS and _spending.iterate():
            each = pending.pop()
            parts: Iterable[Any] = cast("dict[Any, Any]", each).values() if isinstance(each, dict) else each
            for part in parts:
                found += len(part) + 1 if isinstance(part, str) else 1
                if isinstance(part, _CONTAINERS):
                    pending.append(part)
        _spending.make(found)
    return value


def _check_arguments(given: Iterable[Any]) -> None:
    if any(type(value) is int and value > _MOST_CHARACTERS for value in given):
        raise TemplateRuntimeError(f"it calls a function with a number above {_MOST_CHARACTERS}.")


def _check_format(text: str) -> None:
    if _LONG_NUMBER.search(text):
        raise TemplateRuntimeError("it formats texts with a number of seven digits or more.")


@cache
def _limit_templates() -> None:
    """Limit the chat templates of transformers, whose environments otherwise stay as they are."""
    # A tokenizer has already imported this module.
    from transformers.utils import chat_template_utils as own

    compile_plain: Any = own._compile_jinja_template  # pyright: ignore[reportPrivateUsage]  # noqa: SLF001 - there is no public place
    make = getattr(compile_plain, "__wrapped__", compile_plain)

    @lru_cache
    def compile_limited(source: str) -> Template:
        environment: Any = make("").environment
        environment.__class__ = _LimitedEnvironment
        for name in _SIZED_FILTERS:
            environment.filters[name] = _limited_filter(environment.filters[name])
        environment.finalize = _checked
        return environment.from_string(source)

    own._compile_jinja_template = compile_limited  # pyright: ignore[reportPrivateUsage]  # noqa: SLF001 - as above


def _limited_filter(plain: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(plain)
    def limited(*args: Any, **kwargs: Any) -> Any:
        _check_arguments((*args, *kwargs.values()))
        for value in args:
            _checked(value)
            if plain is do_format and isinstance(value, str):
                _check_format(value)
        return plain(*args, **kwargs)

    return limited
