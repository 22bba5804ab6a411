"""`mlx-ring chat`: chat in the terminal with a running server, over HTTP."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import math
import re
import ssl
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from mlx_ring.cli import INTERRUPTED
from mlx_ring.cli.flags import (
    MAX_TOKENS,
    SEED,
    SYSTEM,
    TEMPERATURE,
    TOP_P,
)
from mlx_ring.cli.head_client import (
    API_KEY,
    CACERT,
    URL,
    ChatError,
    ChatServer,
    server_here,
    trust,
)
from mlx_ring.core.errors import ConfigError, ModelNotFound
from mlx_ring.core.folders import absolute_path, typed_path
from mlx_ring.models.short_names import find_hub_id
from mlx_ring.settings.settings_sources import checked_key, key_to_send, load_settings

MODEL_OR_QUESTION = typer.Argument(
    metavar="MODEL|QUESTION",
    help="Question to answer, instead of a chat; only the answer is printed. The name of a model begins a chat with it, at "
    "a terminal or with the questions from a pipe.",
)
QUESTION_TO_MODEL = typer.Argument(metavar="QUESTION", help="Question to the model that is named before it.")
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Control characters, which a model's answer must not send to the terminal."""
_WORD = re.compile(r"[^\s:]+(:[^\s:]+)?")
"""A word, which may have a tag: `qwen3:8b`, but not `qwen3:`."""
_SIZED_ID = re.compile(r"[\w.-]+/[\w.-]+-\d+(\.\d+)?[bm]([-_.][\w.-]+)?", re.IGNORECASE)
"""An id of the hub with the model's size, such as `Qwen/Qwen3-8B`, but not `TCP/IP`."""
_FAILED, _MISUSE = 1, 2
_SAMPLING = {"temperature": float, "top_p": float, "max_tokens": int, "seed": int}
"""Sampling parameters that a chat sets, by their names in requests, and how each is read."""
_COMMANDS = {"/reset", "/system", "/set", "/help"}
_HELP = """[bold]/reset[/]          start a new conversation
[bold]/system TEXT[/]    set a system prompt (or none) and start a new conversation
[bold]/set NAME VALUE[/] set temperature, top_p, max_tokens or seed; without a value, reset it
[bold]/help[/]           show this help
[bold]/exit[/], Ctrl-D   leave
Ctrl-C          stop the answer"""


@dataclass(slots=True)
class Reply:
    """Answer to one question, complete or not."""

    text: str = ""
    reasoning: str = ""
    """Reasoning before the answer, which is shown but not sent back."""
    finish_reason: str | None = None
    tokens: int | None = None
    tokens_per_second: float | None = None
    interrupted: bool = False


@dataclass(slots=True)
class ChatSession:
    """One conversation with one model."""

    server: ChatServer
    model: str
    console: Console
    notes: Console
    """Where to print everything but the answers: the same one for a person at a terminal."""
    system: str | None = None
    sampling: dict[str, float | None] = field(default_factory=dict[str, "float | None"])
    """Sampling parameters of each request, by their names there; None for those not set."""
    shows_reasoning: bool = True
    messages: list[dict[str, str]] = field(default_factory=list[dict[str, str]])
    has_failed: bool = False
    """True once a question got no complete answer."""

    def reset(self, system: str | None) -> None:
        self.system = system
        self.messages.clear()

    def ask(self, question: str) -> Reply:
        """Print the answer as it arrives.

        A partial answer stays in the conversation; a question without any answer is removed from it.

        Raises:
            ChatError: the server refused the request, or the stream broke off.
        """
        self.messages.append({"role": "user", "content": question})
        reply = Reply()
        try:
            self._print_stream(reply)
        except KeyboardInterrupt:
            reply.interrupted = True
        finally:
            if reply.text or reply.reasoning:
                self.console.print()
            if reply.text:
                self.messages.append({"role": "assistant", "content": reply.text})
            else:
                self.messages.pop()
        return reply

    def _print_stream(self, reply: Reply) -> None:
        instructions = [{"role": "system", "content": self.system}] if self.system else []
        messages = instructions + self.messages
        with contextlib.closing(self.server.stream(self.model, messages, self.sampling)) as chunks:
            for chunk in chunks:
                try:
                    self._take(chunk, reply)
                except (AttributeError, LookupError, TypeError):
                    raise ChatError(f"{self.server.url} answers, but not as an OpenAI API does.") from None

    def _take(self, chunk: dict[str, Any], reply: Reply) -> None:
        for choice in chunk.get("choices") or ():
            delta: dict[str, Any] = choice.get("delta") or {}
            # Other servers have the second name for it.
            reasoning = delta.get("reasoning") or delta.get("reasoning_content") or ""
            reasoning = reasoning if self.shows_reasoning else ""
            text = delta.get("content") or ""
            if text and reply.reasoning and not reply.text:
                self.console.print("\n")
            reply.reasoning += reasoning
            reply.text += text
            reply.finish_reason = choice.get("finish_reason") or reply.finish_reason
            self._show(reasoning, style="dim")
            self._show(text)
        if chunk.get("usage"):
            reply.tokens = chunk["usage"].get("completion_tokens")
            performance: dict[str, Any] = chunk.get("performance") or {}
            reply.tokens_per_second = performance.get("generation_tokens_per_second")

    def _show(self, text: str, style: str | None = None) -> None:
        shown = _UNPRINTABLE.sub("", text)
        self.console.print(
            shown, end="", style=style, markup=False, highlight=False, emoji=False, soft_wrap=True
        )


def run_chat(
    base_url: str,
    model: str | None = None,
    system: str | None = None,
    api_key: str | None = None,
    *,
    sampling: Mapping[str, float | None] | None = None,
    question: str | None = None,
    trusted: ssl.SSLContext | None = None,
    console: Console | None = None,
    read_line: Callable[[], str] | None = None,
) -> int:
    """Chat until the user leaves, or answer one question.

    Args:
        base_url: address of the server, with or without `/v1`.
        model: name of the model; None for the first one served.
        system: system prompt.
        sampling: sampling parameters by their names in requests; None for those not set.
        question: only this is asked. Only the answer is printed, as for questions from a pipe. Errors and counts go to
            standard error, and reasoning is left out if the output is no terminal. For a person, a model's name chooses
            it instead.
        trusted: TLS context for an HTTPS server.
        console: where to print.
        read_line: returns the next line, or raises `EOFError` at the end.

    Returns:
        The exit code: 0, 1 if the question, or one from a pipe, got no complete answer, 2 without such a server or model,
        or `INTERRUPTED` if Ctrl-C ended it.
    """
    console = console or Console()
    # A script may have its question in a variable, and its own input for something else.
    is_for_person = read_line is not None or sys.stdin.isatty()
    is_piped = question is None and not is_for_person
    # Other programs read these answers, so that nothing else may stand among them.
    notes = Console(stderr=True) if is_piped or question is not None else console
    server = ChatServer(base_url, api_key, trusted)
    try:
        served = server.served()
        if model is None and question is not None and _is_model(question, served):
            if is_for_person:
                model, question, notes = question, None, console
            elif (lines := _piped_lines()) is not None:
                model, question, read_line, is_piped = question, None, lines, True
        conversation = ChatSession(
            server, _choose(model, served, server.url), console, notes, system, {**(sampling or {})}
        )
        conversation.shows_reasoning = notes is console or console.is_terminal
        if question is not None:
            return _answer_once(conversation, question)
        if not is_piped:
            console.print(
                f"[bold]{escape(conversation.model)}[/] at {escape(server.url)}. "
                "Type /help for commands, Ctrl-D to leave.",
                highlight=False,
                soft_wrap=True,
            )
        if _converse(conversation, read_line or _read_line, is_piped=is_piped):
            return INTERRUPTED
    except ChatError as error:
        _print_error(notes, error)
        return _MISUSE
    else:
        return _FAILED if is_piped and conversation.has_failed else 0
    finally:
        server.close()


def _choose(wanted: str | None, served: Mapping[str, set[str]], url: str) -> str:
    """Return the id of the model to ask. Raises `ChatError` if the server does not have it."""
    if not served:
        raise ChatError(f"{url} serves no model.")
    if wanted is None:
        return next(iter(served))
    found = _find(wanted, served)
    if found is not None:
        return found
    close = difflib.get_close_matches(wanted, {each for names in served.values() for each in names}, n=1)
    meant = f" Did you mean {close[0]!r}?" if close else ""
    raise ChatError(f"{url} does not serve '{wanted}'; it has {', '.join(served)}.{meant}")


def _find(text: str, served: Mapping[str, set[str]]) -> str | None:
    """Return the id of the served model that a text names: by any of its names, a short name, or the path of its folder."""
    wanted = {text, str(absolute_path(typed_path(text))), _hub_id(text)}
    for model, names in served.items():
        if wanted & names:
            return model
    plain = _plain(text)
    return next((model for model, names in served.items() if plain in map(_plain, names)), None)


def _plain(name: str) -> str:
    """Return a name without case and the tag that stands for none."""
    return name.lower().removesuffix(":latest")


def _is_model(text: str, served: Mapping[str, set[str]]) -> bool:
    """Report whether a text can only be the name of a model: a served one's, or a word of the form that only models have."""
    if _find(text, served) is not None:
        return True
    if not _WORD.fullmatch(text):
        return False
    from mlx_ring.models.model_source import builtin_names  # most chats do without it

    if text in builtin_names() or text.startswith(("./", "../")) or text.lower().endswith(":latest"):
        return True
    return _SIZED_ID.fullmatch(text) is not None or (":" in text and _hub_id(text) is not None)


def _hub_id(name: str) -> str | None:
    """Return the hub's id that a short name means; None for any other name."""
    with contextlib.suppress(ModelNotFound):
        return find_hub_id(name) if _WORD.fullmatch(name) and "/" not in name else None
    return None


def sampling_of(
    temperature: float | None, top_p: float | None, max_tokens: int | None, seed: int | None
) -> dict[str, float | None]:
    """Return the parameters by their names in requests. Raises `ConfigError` if one is not finite, which JSON cannot say."""
    given = {"temperature": temperature, "top_p": top_p, "max_tokens": max_tokens, "seed": seed}
    for name, value in given.items():
        if value is not None and not math.isfinite(value):
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must be a finite number.")
    return given


def _answer_once(conversation: ChatSession, question: str) -> int:
    """Print an answer without anything else, and return the exit code."""
    try:
        reply = conversation.ask(question)
    except ChatError as error:
        _print_error(conversation.notes, error)
        return _FAILED
    return INTERRUPTED if reply.interrupted else 0


def _converse(conversation: ChatSession, read_line: Callable[[], str], *, is_piped: bool) -> bool:
    """Answer until the user leaves. Return true if Ctrl-C ended it, as it does from a pipe."""
    while True:
        try:
            line = read_line().strip()
        except KeyboardInterrupt:
            if is_piped:
                return True
            conversation.console.print("\n[dim]Ctrl-D leaves.[/]")
            continue
        except EOFError:
            if conversation.notes is conversation.console:
                conversation.console.print()
            return False
        if line in {"/exit", "/quit"}:
            return False
        # Others write their questions without a look at the help: one may begin with a path.
        if line.startswith("/") and (not is_piped or line.partition(" ")[0] in _COMMANDS):
            _run_command(conversation, line)
        elif line and _answer(conversation, line).interrupted and is_piped:
            return True


def _run_command(conversation: ChatSession, line: str) -> None:
    command, _, rest = line.partition(" ")
    match command:
        case "/reset":
            conversation.reset(conversation.system)
            conversation.notes.print("[dim]New conversation.[/]")
        case "/system":
            conversation.reset(rest.strip() or None)
            conversation.notes.print(
                f"[dim]New conversation with {'this' if conversation.system else 'no'} system prompt.[/]"
            )
        case "/set":
            conversation.notes.print(f"[dim]{escape(_set(conversation.sampling, rest))}[/]", highlight=False)
        case "/help":
            conversation.notes.print(_HELP, highlight=False)
        case _:
            conversation.notes.print(
                f"[dim]There is no {command}; /help lists the commands.[/]", highlight=False
            )


def _set(sampling: dict[str, float | None], given: str) -> str:
    """Change a sampling parameter, and return what was done, in a sentence."""
    name, _, text = given.strip().partition(" ")
    if name not in _SAMPLING:
        return f"/set takes {', '.join(_SAMPLING)}, not '{name}'."
    try:
        value = _SAMPLING[name](text) if text else None
    except ValueError:
        value = math.nan
    if value is not None and not math.isfinite(value):
        return f"'{text}' is no number for {name}."
    sampling[name] = value
    return f"{name} is {text}." if text else f"{name} is not set: the model's or the API's is used."


def _answer(conversation: ChatSession, question: str) -> Reply:
    try:
        reply = conversation.ask(question)
    except ChatError as error:
        conversation.has_failed = True
        _print_error(conversation.notes, error)
        return Reply()
    conversation.notes.print(f"[dim]{_footnote(reply)}[/]", highlight=False)
    return reply


def _footnote(reply: Reply) -> str:
    if reply.interrupted:
        return "stopped"
    parts = [] if reply.tokens is None else [f"{reply.tokens} tokens"]
    if reply.tokens_per_second is not None:
        parts.append(f"{reply.tokens_per_second:.1f} tok/s")
    if reply.finish_reason == "length":
        parts.append("cut at the token limit")
    return ", ".join(parts)


def _print_error(console: Console, error: ChatError) -> None:
    console.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)


def _piped_lines() -> Callable[[], str] | None:
    """Return what reads the lines of the input; None if it has none."""
    try:
        first = [_read_line()]
    except EOFError:
        return None
    return lambda: first.pop() if first else _read_line()


def _read_line() -> str:
    """Read a line, with history and editing at a terminal, and without a prompt from a pipe."""
    if not sys.stdin.isatty():
        try:
            return input()
        except UnicodeDecodeError:
            raise ChatError("The input is not text in UTF-8: convert it.") from None
    with contextlib.suppress(ImportError):
        importlib.import_module("readline")  # gives `input` its editing
    return input("> ")


def chat(
    first: Annotated[str | None, MODEL_OR_QUESTION] = None,
    question: Annotated[str | None, QUESTION_TO_MODEL] = None,
    url: Annotated[str | None, URL] = None,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Model to ask; the first one served by default.")
    ] = None,
    system: Annotated[str | None, SYSTEM] = None,
    temperature: Annotated[float | None, TEMPERATURE] = None,
    top_p: Annotated[float | None, TOP_P] = None,
    max_tokens: Annotated[int | None, MAX_TOKENS] = None,
    seed: Annotated[int | None, SEED] = None,
    api_key: Annotated[str | None, API_KEY] = None,
    cacert: Annotated[Path | None, CACERT] = None,
) -> None:
    """Chat with a served model in this terminal.

    From a pipe, each line is a question or a command such as /reset, and only the answers are printed. The exit code is 1 if one of them, or the given question, got no complete answer.
    """
    if question is None:
        question = first
    elif model is None:
        model = first
    else:
        raise ConfigError(f"{first} and --model {model} were both given: name the model once.")
    sampling = sampling_of(temperature, top_p, max_tokens, seed)
    settings = load_settings({"api_key": api_key})
    checked_key(next(iter(settings.api_key), None))
    trusted = trust(cacert, settings.ssl_certfile)
    place = server_here(url, model, api_key=api_key, cacert=cacert)
    key = key_to_send(place, settings, api_key)
    raise typer.Exit(
        run_chat(place, model, system, key, sampling=sampling, question=question, trusted=trusted)
    )
