"""Grammar of an answer: optional reasoning, then content or tool calls."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import cast

from mlx_ring.api.chat.json_schemas import (
    Schema,
    in_known_keywords,
    names_as_patterns,
    without_look_around,
)
from mlx_ring.api.chat.lark import ANY_TEXT, SPACE, LarkGrammar, closed, either, options_of
from mlx_ring.api.chat.model_format import CallMarks, ChatFormat
from mlx_ring.api.chat.request import AnswerFormat, Conversation, Tool, ToolUse
from mlx_ring.api.chat.tool_call_grammars import (
    JSON_SPACE,
    JSON_TYPES,
    SPACES,
    write_calls,
    write_harmony_calls,
    write_muse_calls,
)
from mlx_ring.core.errors import Overloaded, RequestError
from mlx_ring.core.traces import CLIENT
from mlx_ring.core.types import Grammar
from mlx_ring.models.grammars import GrammarTrials

_TURN_WITHIN_S = 30.0
"""Longest wait for the trials of other grammars."""
_TRIED_WITHIN_S = 10.0
"""Longest wait for a trial that has begun, twice its CPU time."""
_RETRY_AFTER_S = 5.0
_KEPT = 256
_OPTIONS = "x-guidance"


def answer_grammar(
    format: ChatFormat,  # noqa: A002 - the field's term
    conversation: Conversation,
    *,
    thinking_open: bool,
    open_schemas: bool,
) -> Grammar | None:
    """Return the grammar of a conversation's next answer; None if any text is allowed.

    Args:
        format: format of the model's answers.
        conversation: the chat request.
        thinking_open: True if the answer starts inside reasoning.
        open_schemas: True if objects may have properties that their schema does not name, unless it forbids them.

    Raises:
        RequestError: the grammar cannot be enforced in this model's format.
    """
    if not _restricts(format, conversation):
        return None
    conversation = _with_schemas(conversation, _in_known_keywords)
    if not open_schemas:
        conversation = _with_schemas(conversation, lambda _, schema: closed(schema))
    grammar = _grammar(format, conversation, thinking_open=thinking_open)
    return None if grammar is None else replace(grammar, param=_param(conversation))


def _restricts(format: ChatFormat, conversation: Conversation) -> bool:  # noqa: A002 - as above
    """Return True if not every text is an answer."""
    use = conversation.tool_use
    strict = format.calls is not None and any(tool.strict for tool in use.callable_tools)
    return conversation.format.kind != "text" or use.choice == "required" or strict


def _in_known_keywords(tool: Tool | None, schema: Schema) -> Schema:
    """Return the schema of a tool, or the answer's, without keywords that no grammar enforces, as far as possible.

    Tools that are not strict only lose patterns with look-around, because llguidance ignores other keywords there.
    """
    return without_look_around(schema) if tool and not tool.strict else in_known_keywords(schema)


def _with_schemas(
    conversation: Conversation, change: Callable[[Tool | None, Schema], Schema]
) -> Conversation:
    """Return the conversation with changed schemas. `change` gets the tool of a schema, or None for the answer's."""
    use, content = conversation.tool_use, conversation.format
    tools = [
        tool if tool.parameters is None else replace(tool, parameters=change(tool, tool.parameters))
        for tool in use.tools
    ]
    return replace(
        conversation,
        tool_use=replace(use, tools=tools),
        format=replace(content, schema=change(None, content.schema)),
    )


def _param(conversation: Conversation) -> str:
    """Return the name of the field that restricts the answer."""
    return "tools" if conversation.format.kind == "text" else conversation.format.param


def _grammar(format: ChatFormat, conversation: Conversation, *, thinking_open: bool) -> Grammar | None:  # noqa: A002 - as above
    use, content = conversation.tool_use, conversation.format
    calls = format.calls if use.callable_tools else None
    must_call = use.choice == "required"
    grammar = LarkGrammar(format.added)
    plain = None if must_call else _content(grammar, content, calls, use)
    for tool in use.callable_tools:
        _check_options(tool)
    write_messages = _MESSAGES.get(format.calls.parser) if format.calls is not None else None
    if format.calls is not None and format.begins == "header" and write_messages is not None:
        final = None if must_call else plain or ANY_TEXT
        grammar.add("start", write_messages(grammar, format.calls, use, final))
        return Grammar("lark", grammar.write())
    _refuse_headers(format, content)
    may_think = thinking_open or not _disables_reasoning(conversation)
    reasoning = _reasoning_rule(grammar, format, is_open=thinking_open) if may_think else ""
    if calls is None and not reasoning and not format.dropped:
        return _of_format(content)
    if calls is None:
        if must_call:
            raise RequestError(
                "This model has no format for tool calls, so none can be required.",
                param="tool_choice",
            )
        body = plain or ANY_TEXT
    else:
        body = _with_calls(grammar, calls, conversation, plain)
    grammar.add(
        "start",
        " ".join(filter(None, [reasoning, _dropped(grammar, format), body, _dropped(grammar, format)])),
    )
    return Grammar("lark", grammar.write())


def _of_format(content: AnswerFormat) -> Grammar:
    if content.kind == "json_object":
        return Grammar("json_object", "")
    try:
        return Grammar("json_schema", json.dumps(names_as_patterns(_own(content))))
    except (RecursionError, TypeError, ValueError) as error:
        raise RequestError(f"The schema cannot be read: {error}.", param=content.param) from error


def _own(content: AnswerFormat) -> Mapping[str, object]:
    if _OPTIONS in content.schema:
        raise RequestError(
            f"'{_OPTIONS}' in a schema cannot be set by a request; leave it out.", param=content.param
        )
    return content.schema


def _content(
    grammar: LarkGrammar, content: AnswerFormat, calls: CallMarks | None, use: ToolUse
) -> str | None:
    """Return the rule of the answer's text; None if any text is allowed."""
    match content.kind:
        case "text":
            return None
        case "json_object":
            return _json(grammar, {"type": "object"}, calls, use.callable_tools)
        case "json_schema":
            return _json(grammar, _own(content), calls, use.callable_tools)


def _json(grammar: LarkGrammar, schema: Schema, marks: CallMarks | None, tools: Sequence[Tool] = ()) -> str:
    """Return an expression of an answer in JSON that is not read as a call of a strict tool."""
    names = [f"{before}{tool.name}" for tool in tools if tool.strict for before in ("", "functions.")]
    if marks is None or not marks.is_bare_json or not names:
        return grammar.json(schema)
    other = {"type": "string", "pattern": f"^{_other_than(names)}$"}
    heading = {"type": {}, "name": {"anyOf": [{"type": [*JSON_TYPES, "null"]}, other]}}
    own = schema.get("allOf")
    parts = [*(cast("list[object]", own) if isinstance(own, list) else []), {"properties": heading}]
    options = [grammar.json({**schema, "allOf": parts})]
    if schema == {"type": "object"}:  # its members may be in any order
        first = grammar.terminal(rf'/"([^"\\\x00-\x1f]|\\["\\\/bfnrt])*"/ & ~/"({"|".join(heading)})"/')
        value = grammar.json({})
        more = grammar.fresh(
            f'"," ~ {grammar.json({"type": "string"})} ~ ":" ~ {value} ~'.replace("~", f"{JSON_SPACE}?")
        )
        options.append(f'"{{" ~ {first} ~ ":" ~ {value} ~ {more}* "}}"'.replace("~", f"{JSON_SPACE}?"))
    return either(options)


def _other_than(texts: Iterable[str]) -> str:
    """Return the pattern of every text but these."""
    followed: dict[str, list[str]] = {}
    ends = False
    for text in texts:
        ends |= not text
        if text:
            followed.setdefault(text[0], []).append(text[1:])
    others = f"[^{''.join(map(re.escape, followed))}](?s:.*)" if followed else "(?s:.+)"
    options = [f"{re.escape(first)}{_other_than(rests)}" for first, rests in followed.items()]
    return f"({'|'.join([*([] if ends else ['']), others, *options])})"


def _refuse_headers(format: ChatFormat, content: AnswerFormat) -> None:  # noqa: A002 - as above
    if format.turns:
        raise RequestError(
            "This model writes a header before every part of its answers, so no schema can be enforced.",
            param=content.param if content.kind != "text" else "tool_choice",
        )


def _reasoning_rule(grammar: LarkGrammar, format: ChatFormat, *, is_open: bool) -> str:  # noqa: A002 - as above
    """Return the rule of the reasoning at the start: the rest of open reasoning, or optional reasoning."""
    if format.thinking is None:
        return ""
    rest = f"{grammar.until(format.thinking.end)} {SPACE}?"
    return rest if is_open else f"({grammar.exactly(format.thinking.start)} {rest})?"


def _disables_reasoning(conversation: Conversation) -> bool:
    """Return True if the request turns reasoning off.

    The grammar then forbids reasoning, because it could evade a schema that restricts every other token.
    """
    kwargs = conversation.template_kwargs
    return (
        kwargs.get("enable_thinking") is False
        or kwargs.get("thinking") is False
        or kwargs.get("reasoning_effort") == "none"
    )


def _dropped(grammar: LarkGrammar, format: ChatFormat) -> str:  # noqa: A002 - as above
    """Return the rule of marks without meaning, which may surround the answer."""
    return f"({' | '.join(map(grammar.exactly, format.dropped))})*" if format.dropped else ""


def _with_calls(grammar: LarkGrammar, marks: CallMarks, conversation: Conversation, plain: str | None) -> str:
    use = conversation.tool_use
    parallel = use.parallel and not marks.is_single
    opening, rest = write_calls(
        grammar, marks, use.callable_tools, parallel=parallel, beside_json=plain is not None
    )
    calls = rest if marks.is_bare_json else f"{grammar.exactly(opening)} {rest}"
    if use.choice == "required":
        return calls
    if plain is not None:
        return f"({plain} | {calls})"
    others = _other_openings(marks, use.callable_tools)
    text = grammar.text_besides(others)
    then = grammar.fresh(f"{grammar.until(opening, besides=others)} {rest}")
    if not marks.end:  # text after such calls might continue them
        return either([calls, then, text] if marks.is_bare_json else [then, text])
    return f"{then}* {text}" if parallel else f"({then} {SPACE}? | {text})"


def _other_openings(marks: CallMarks, tools: Sequence[Tool]) -> str:
    """Return the pattern of texts that open a call otherwise than with the first mark; empty if there are none."""
    names = [tool.name for tool in tools]
    found = [
        rf"(?s:.*){re.escape(start)}(?s:.*)" for start in marks.other_starts(names) if start != marks.start
    ]
    if marks.is_bare_json:
        known = "|".join(map(re.escape, names))
        opening = rf'~\{{~("type"~:~"function"~,~)?"name"~:~"(functions\.)?({known})"(?s:.*)'
        found.append(opening.replace("~", SPACES))
    return "|".join(found)


def _harmony(grammar: LarkGrammar, marks: CallMarks, use: ToolUse, final: str | None) -> str:
    """Write the rules of gpt-oss: messages that each have a channel, first reasoning, then `final` or a call."""
    start = grammar.exactly("<|start|>assistant")
    reasoning = f"{grammar.exactly('<|channel|>analysis<|message|>')} {grammar.until('<|end|>')} {start}"
    last = write_harmony_calls(grammar, marks, use.callable_tools)
    if final is not None:
        last.append(f"{grammar.exactly('<|channel|>final<|message|>')} {final}")
    return f"({reasoning})* ({' | '.join(last)})"


def _muse(grammar: LarkGrammar, marks: CallMarks, use: ToolUse, final: str | None) -> str:
    """Write the rules of Muse: messages that each have a recipient: itself for reasoning, then the user or tools."""
    asides = ["self"] if final is None else ["self", "commentary"]
    begins = either(grammar.exactly(f"to={whom}<|message|>") for whom in asides)
    aside = f'" "? {begins} {grammar.until("<|eom|>")} {grammar.exactly("<|start|>assistant")}'
    last: list[str] = []
    if use.callable_tools:
        last.append(write_muse_calls(grammar, marks, use.callable_tools, parallel=use.parallel))
    if final is not None:
        last.append(f"{grammar.exactly('to=user<|message|>')} {final}")
    return f'({aside})* " "? {either(last)} ({grammar.exactly("<|eot|>")})?'


_MESSAGES: Mapping[str, Callable[[LarkGrammar, CallMarks, ToolUse, str | None], str]] = {
    "harmony": _harmony,
    "muse_spark": _muse,
}
"""Functions for formats whose answers are messages with headers, by the name of the calls' parser."""


def _check_options(tool: Tool) -> None:
    if _OPTIONS in (tool.parameters or {}):
        raise RequestError(
            f"'{_OPTIONS}' in the parameters of tool '{tool.name}' cannot be set by a request; leave it out.",
            param="tools",
        )


@dataclass(slots=True, eq=False)
class _Trial:
    """Trial of one grammar for every request that waits for it."""

    grammar: Grammar
    result: asyncio.Future[str]
    """Its problem; empty if there is none."""
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    waiting: Counter[str] = field(default_factory=Counter[str])
    """Number of requests that wait for it, by client."""


class GrammarChecks:
    """Trial of grammars before their prompts are computed, one at a time and off the event loop.

    Clients take turns, and equal grammars share a trial. A trial that has begun is completed and remembered, also if
    nobody waits for it any more.
    """

    def __init__(self) -> None:
        self.turn_within_s = _TURN_WITHIN_S
        self.tried_within_s = _TRIED_WITHIN_S
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")
        self._trials = GrammarTrials()
        self._known: OrderedDict[bytes, str] = OrderedDict()
        """Problems of grammars; empty if there is none. The keys are digests, because grammars may be of any length."""
        self._open: dict[bytes, _Trial] = {}
        """Trials that have not ended, by the same keys, the oldest first."""
        self._turns: OrderedDict[str, None] = OrderedDict()
        """Clients that may wait for a trial to begin, in the order of their turns."""

    async def check(self, grammar: Grammar | None, conversation: Conversation) -> None:
        """Try a grammar, and if it cannot be enforced, find the part of the request that is the reason.

        Raises:
            RequestError: it cannot be enforced. The error has the request's field.
            Overloaded: other trials took too long, or this one did.
        """
        if grammar is None or not (problem := await self._problem(grammar)):
            return
        content = conversation.format
        if content.kind != "text" and (alone := await self._problem(_of_format_alone(content))):
            raise RequestError(alone, param=content.param)
        for number, tool in enumerate(conversation.tool_use.tools):
            if tool.parameters is not None and (
                alone := await self._problem(_of_tool(tool, tool.parameters))
            ):
                raise RequestError(
                    f"Tool '{tool.name}': {alone}", param=f"tools[{number}].function.parameters"
                )
        raise RequestError(problem, param=_param(conversation))

    async def _problem(self, grammar: Grammar) -> str:
        key = blake2b(
            f"{grammar.kind}:{grammar.text}".encode(errors="surrogatepass"), digest_size=16
        ).digest()
        known = self._known.get(key)
        return await self._try(key, grammar) if known is None else known

    async def _try(self, key: bytes, grammar: Grammar) -> str:
        """Wait for the trial of a grammar, which other requests may have started."""
        trial, client = self._open.get(key), CLIENT.get()
        if trial is None:
            trial = self._open[key] = _Trial(grammar, asyncio.get_running_loop().create_future())
        trial.waiting[client] += 1
        self._turns.setdefault(client)
        try:
            self._begin_next()
            await self._until_tried(trial)
            return trial.result.result()
        finally:
            trial.waiting -= Counter((client,))
            if not trial.waiting and not trial.begun.is_set():
                del self._open[key]

    async def _until_tried(self, trial: _Trial) -> None:
        retry = f"try again in {_RETRY_AFTER_S:g} s."
        try:
            async with asyncio.timeout(self.turn_within_s):
                await trial.begun.wait()
        except TimeoutError:
            raise Overloaded(
                f"The server is too busy with other schemas to check this one; {retry}",
                retry_after_s=_RETRY_AFTER_S,
            ) from None
        await asyncio.wait((trial.result,), timeout=self.tried_within_s)
        if not trial.result.done():
            raise Overloaded(
                f"The server could not check this schema within {self.tried_within_s:g} s; simplify it, or {retry}",
                retry_after_s=_RETRY_AFTER_S,
            )

    def _begin_next(self) -> None:
        """Begin the oldest trial of the client whose turn it is, unless one is in progress."""
        if any(trial.begun.is_set() for trial in self._open.values()):
            return
        while self._turns:
            client, _ = self._turns.popitem(last=False)
            for key, trial in self._open.items():
                if client in trial.waiting:
                    self._begin(key, trial, client)
                    return

    def _begin(self, key: bytes, trial: _Trial, client: str) -> None:
        trial.begun.set()
        work = asyncio.get_running_loop().run_in_executor(self._thread, self._trials.problem, trial.grammar)
        work.add_done_callback(lambda done: self._end(key, trial, client, done))

    def _end(self, key: bytes, trial: _Trial, client: str, work: asyncio.Future[str]) -> None:
        """Remember a trial, unless it failed, and begin the next one. The client's next turn is the last."""
        del self._open[key]
        self._turns[client] = None
        self._turns.move_to_end(client)
        error = work.exception()
        if error is None:
            trial.result.set_result(work.result())
            self._known[key] = work.result()
            while len(self._known) > _KEPT:
                self._known.popitem(last=False)
        else:
            trial.result.set_exception(error)
            trial.result.exception()  # so that asyncio does not log it if nobody waits
        self._begin_next()


def _of_format_alone(content: AnswerFormat) -> Grammar:
    return _of_format(replace(content, schema=_in_known_keywords(None, content.schema)))


def _of_tool(tool: Tool, parameters: Schema) -> Grammar:
    grammar = LarkGrammar({})
    grammar.add("start", grammar.json(_in_known_keywords(tool, parameters), **options_of(tool)))
    return Grammar("lark", grammar.write())
