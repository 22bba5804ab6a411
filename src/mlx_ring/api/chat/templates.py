"""Chat templates: rendering of a conversation's prompt, in an environment that counts what a template does."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache, partial, wraps
from itertools import chain
from typing import Any, cast

from jinja2 import Environment, Template, TemplateError, TemplateRuntimeError, nodes
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer
from markupsafe import Markup

from mlx_ring.api.chat.request import Conversation, simpler_forms
from mlx_ring.api.chat.template_limits import (
    GIVES_BACK,
    MOST_NODES,
    MOST_SOURCE,
    LimitedEscapeFormatter,
    LimitedFormatter,
    check_bits,
    check_call,
    check_comparison,
    check_filter,
    check_operands,
    checked,
    compare,
    counted,
    cut,
    join,
    limited_sum,
    listed,
    spending,
)
from mlx_ring.api.service import Tokenizer
from mlx_ring.core.errors import RequestError


def tokenizer_beneath(tokenizer: Tokenizer) -> Any:
    """Return the tokenizer inside mlx-lm's wrapper; None where there is no wrapper."""
    return getattr(tokenizer, "_tokenizer", None)


_TEMPLATE_ERRORS = (
    TemplateError,
    MemoryError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RecursionError,
    SyntaxError,
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
    tokenizer: Tokenizer, conversation: Conversation, change: Callable[[str], str] | None = None
) -> str | tuple[int, ...]:
    """Return the prompt's text, or its tokens if the tokenizer gives no text.

    A template that rejects the messages gets them in simpler forms, within one limit of time for all.

    Args:
        tokenizer: the model's.
        conversation: messages and arguments of the template.
        change: function for every string in them, also for names of fields.
    """
    refusals: list[RequestError] = []
    with spending:
        for messages in chain((conversation.messages,), simpler_forms(conversation.messages)):
            try:
                return _render(tokenizer, replace(conversation, messages=messages), change)
            except RequestError as error:
                refusals.append(error)
                # Simpler messages do not help a template that takes too much.
                if type(error.__cause__) is TemplateRuntimeError:
                    break
    raise refusals[0]


def _render(
    tokenizer: Tokenizer, conversation: Conversation, change: Callable[[str], str] | None
) -> str | tuple[int, ...]:
    messages: Any = [dict(message) for message in conversation.messages]
    arguments: Any = template_arguments(conversation)
    if change is not None:
        messages, arguments = _changed(messages, change), _changed(arguments, change)
    try:
        spending.start_rendering()
        prompt = renderer(tokenizer)(
            messages,
            tokenize=not renders_text(tokenizer),
            add_generation_prompt=conversation.adds_generation_prompt and not conversation.continues,
            **arguments,
        )
    except _TEMPLATE_ERRORS as error:
        raise RequestError(
            f"The model's chat template rejects these messages: {error}",
            param=conversation.messages_param,
        ) from error
    return prompt if isinstance(prompt, str) else tuple(prompt)


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        pairs = cast("Mapping[str, Any]", value).items()
        return {change(name): _changed(each, change) for name, each in pairs}
    if isinstance(value, list | tuple):
        return [_changed(each, change) for each in cast("Sequence[Any]", value)]
    return value


class SpecialTokensAsText:
    """Encoder of chats in which special tokens that messages spell stay text, and those of the template do not.

    While the template is applied, marks stand for the former. Then stand-ins, which a copy of the tokenizer knows as
    tokens of their own, replace the latter. Clients cannot guess either, because both contain a random number.
    """

    def __init__(self, backend: Any) -> None:
        """Prepare a copy of a tokenizer of Hugging Face's library."""
        number = secrets.token_hex(16)
        special = {place: each for place, each in backend.get_added_tokens_decoder().items() if each.special}
        names = sorted((each.content for each in special.values()), key=len, reverse=True)
        self._any = re.compile("|".join(map(re.escape, names)) or "(?!)")
        self._marked = re.compile(f"q{number}q([0-9]+)q")
        self._names = {f"q{number}q{place}q": each.content for place, each in special.items()}
        self._marks = {name: mark for mark, name in self._names.items()}
        self._copy: Any = type(backend).from_str(backend.to_str())
        # It would otherwise make tokens of the names again.
        self._copy.encode_special_tokens = True
        self._stand_ins, self._tokens = dict[str, str](), dict[int, int]()
        for place, each in special.items():
            self._stand_ins[each.content] = stand_in = f"t{number}t{place}t"
            sides = {"single_word": each.single_word, "lstrip": each.lstrip, "rstrip": each.rstrip}
            self._copy.add_tokens([type(each)(stand_in, normalized=False, **sides)])
            self._tokens[self._copy.token_to_id(stand_in)] = place

    def mark(self, text: str) -> str:
        """Replace special tokens that a message spells."""
        return self._any.sub(lambda found: self._marks[found[0]], text)

    def unmarked(self, prompt: str) -> str:
        """Return the prompt as it reads."""
        return self._marked.sub(lambda found: self._names[found[0]], prompt)

    def encode(self, prompt: str) -> tuple[int, ...]:
        """Return the tokens of a prompt that a template made of marked messages."""
        kept = self._any.sub(lambda found: self._stand_ins[found[0]], prompt)
        tokens: list[int] = self._copy.encode(self.unmarked(kept), add_special_tokens=False).ids
        return tuple(self._tokens.get(token, token) for token in tokens)


def renders_text(tokenizer: Tokenizer) -> bool:
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


_SHALLOW = frozenset(
    [
        "length",
        "count",
        "first",
        "last",
        "list",
        "reverse",
        "map",
        "select",
        "selectattr",
        "reject",
        "rejectattr",
        "items",
        "default",
        "d",
        "attr",
        "batch",
        "slice",
        "random",
        "sum",
    ]
)
"""Filters that do not look into the entries of a list."""
_TESTS_OF_ITSELF = frozenset(
    [
        "boolean",
        "callable",
        "defined",
        "escaped",
        "false",
        "float",
        "integer",
        "iterable",
        "mapping",
        "none",
        "number",
        "sameas",
        "sequence",
        "string",
        "true",
        "undefined",
    ]
)
"""Tests that do not look into the entries of a list."""


def _limited_filter(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    at = int(hasattr(plain, "jinja_pass_arg"))

    @wraps(plain)
    def limited(*args: Any, **kwargs: Any) -> Any:
        value, given = args[at], args[at + 1 :]
        if name not in _SHALLOW:
            value = checked(listed(cast("Iterator[Any]", value)) if isinstance(value, Iterator) else value)
            for each in (*given, *kwargs.values()):
                checked(each)
        spending.read((value, *given))
        check_filter(name, value, given, kwargs)
        result = plain(*args[:at], value, *given, **kwargs)
        if isinstance(result, Iterator):
            return counted(cast("Iterator[Any]", result))
        if name not in GIVES_BACK:
            spending.make_like(result)
        return result

    return limited


def _limited_test(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    at = int(hasattr(plain, "jinja_pass_arg"))

    @wraps(plain)
    def limited(*args: Any, **kwargs: Any) -> Any:
        if name == "divisibleby":
            check_bits(*args, *kwargs.values())
        elif len(args) - at == 2 and name != "sameas":  # noqa: PLR2004 - the value and its other
            check_comparison("in" if name == "in" else "eq", args[at], args[at + 1])
        elif name not in _TESTS_OF_ITSELF:
            for each in args[at:]:
                checked(each)
        return plain(*args, **kwargs)

    return limited


class _LimitedEnvironment(ImmutableSandboxedEnvironment):
    """Environment of chat templates that stops one that takes too much memory or time."""

    intercepted_binops = frozenset({"*", "**", "+", "%", "//", "/"})
    iterate = staticmethod(spending.iterate)
    checked = staticmethod(checked)
    compare = staticmethod(compare)
    cut = staticmethod(cut)
    join = staticmethod(join)

    def concat(self, pieces: Iterable[str]) -> str:  # pyright: ignore[reportIncompatibleVariableOverride] - jinja calls it the same way
        texts: list[str] = []
        for piece in pieces:
            texts.append(piece)
            spending.make(len(piece), piece)
        return "".join(texts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        check_operands(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride] - the same positions
        if id(obj) in _OWN:
            return obj(*args)
        if isinstance(obj, Macro):
            return super().call(context, obj, *args, **kwargs)
        if isinstance(getattr(obj, "__self__", None), (str, bytes)) or obj is dict:
            args = tuple(
                listed(cast("Iterator[Any]", each)) if isinstance(each, Iterator) else each for each in args
            )
        check_call(obj, args, kwargs)
        result = super().call(context, obj, *args, **kwargs)
        if getattr(obj, "__name__", "") not in GIVES_BACK:
            spending.make_like(result)
        return result

    def getitem(self, obj: Any, argument: Any) -> Any:
        return super().getitem(obj, checked(argument) if isinstance(argument, tuple) else argument)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        plain = super().wrap_str_format(value)
        if plain is None:
            return None
        text: str = value.__self__
        formatter: Any = (
            LimitedEscapeFormatter(self, escape=text.escape)
            if isinstance(text, Markup)
            else LimitedFormatter(self)
        )

        @wraps(plain)
        def limited(*args: Any, **kwargs: Any) -> str:
            if value.__name__ == "format_map":
                args, kwargs = (), args[0]
            return type(text)(formatter.vformat(text, args, kwargs))

        return limited

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        if len(source) > MOST_SOURCE:
            raise TemplateRuntimeError(f"it is longer than {MOST_SOURCE} characters.")
        tree = super()._parse(source, name, filename)
        _Counting(self).visit(tree)
        return tree


_OWN = frozenset(map(id, (checked, compare, cut, join, _LimitedEnvironment.iterate)))


class _Counting(NodeTransformer):
    """Transformer of a template that counts its iterations, and what its operators make and compare."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._visited = 0

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        self._visited += 1
        if self._visited > MOST_NODES:
            raise TemplateRuntimeError(f"it has more than {MOST_NODES} expressions and statements.")
        return super().visit(node, *args, **kwargs)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802 - the visitor's name
        self.generic_visit(node)
        return self._call("join", node, node.nodes)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802 - as above
        self.generic_visit(node)
        if len(node.ops) == 1:
            operand = node.ops[0]
            return self._call("compare", node, [nodes.Const(operand.op), node.expr, operand.expr])
        for operand in node.ops:
            operand.expr = self._call("checked", operand, [operand.expr])
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802 - as above
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        ends = (node.arg.start, node.arg.stop, node.arg.step)
        return self._call(
            "cut", node, [node.node, *(nodes.Const(None) if end is None else end for end in ends)]
        )

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:  # noqa: N802 - as above
        self.generic_visit(node)
        if not isinstance(node.key, nodes.Const):
            node.key = self._call("checked", node, [node.key])
        return node

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


def _limit(environment: Any) -> None:
    """Limit the templates that are compiled in an environment of the sandbox from now on."""
    environment.__class__ = _LimitedEnvironment
    environment.filters["sum"] = limited_sum
    environment.filters = {name: _limited_filter(name, each) for name, each in environment.filters.items()}
    environment.tests = {name: _limited_test(name, each) for name, each in environment.tests.items()}
    environment.finalize = checked


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
        _limit(environment)
        return environment.from_string(source)

    own._compile_jinja_template = compile_limited  # pyright: ignore[reportPrivateUsage]  # noqa: SLF001 - as above
