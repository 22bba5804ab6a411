"""`mlx-ring chat`: chat in the terminal with a running server, over HTTP."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import json
import re
import ssl
import sys
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from mlx_ring.cli.heads import CACERT, DEFAULT_URL, QUICK_ANSWER_S, distrust, key_to_send, trust
from mlx_ring.core.errors import ModelNotFound
from mlx_ring.host.addresses import plain_url
from mlx_ring.models.short_names import find_hub_id
from mlx_ring.settings.settings_sources import load_settings

if TYPE_CHECKING:
    import httpx

_CONNECT_S = 5.0
_SILENCE_S = 60.0
"""Maximum pause of a stream. A live server sends a comment far more often."""
_TRY_EVERY_S, _COMES_BACK_S = 1.0, 120.0
"""Time between two tries to get the rest of an answer, and longest time of all tries."""
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Control characters, which a model's answer must not send to the terminal."""
_FAILED, _MISUSE = 1, 2
_HELP = """[bold]/reset[/]          start a new conversation
[bold]/system TEXT[/]    set a system prompt (or none) and start a new conversation
[bold]/help[/]           show this help
[bold]/exit[/], Ctrl-D   leave
Ctrl-C          stop the answer"""


class ChatError(Exception):
    """Error whose message is one sentence for the user."""


class ConnectionBroke(ChatError):
    """The server is out of reach, or not ready, and may come back."""


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


class ChatServer:
    """Client of a running server. Every failure is a `ChatError`."""

    def __init__(
        self, base_url: str, api_key: str | None = None, trusted: ssl.SSLContext | None = None
    ) -> None:
        import httpx  # slow to import, and `--help` does without it

        self.url = plain_url(base_url.rstrip("/").removesuffix("/v1"))
        timeout = httpx.Timeout(_SILENCE_S, connect=_CONNECT_S)
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._client = httpx.Client(timeout=timeout, headers=headers, trust_env=False, verify=trusted or True)

    def close(self) -> None:
        self._client.close()

    def find_model(self, wanted: str | None) -> str:
        """Return the name of the model to ask."""
        with self._clear_errors():
            response = self._client.get(f"{self.url}/v1/models", timeout=QUICK_ANSWER_S)
            _check(response)
            served = _models(response)
        if not served:
            raise ChatError(f"{self.url} serves no model.")
        if wanted is None:
            return next(iter(served))
        hub_id = _hub_id(wanted)
        for model, names in served.items():
            if wanted in names or hub_id in names:
                return model
        close = difflib.get_close_matches(
            wanted or "", {each for names in served.values() for each in names}, n=1
        )
        meant = f" Did you mean {close[0]!r}?" if close else ""
        raise ChatError(f"{self.url} does not serve '{wanted}'; it has {', '.join(served)}.{meant}")

    def stream(self, model: str, messages: list[dict[str, str]]) -> Generator[dict[str, Any]]:
        """Yield the chunks of an answer; closing the iterator stops it.

        If the connection breaks, a server with a journal gives the rest, also after it was started again.
        """
        body = {
            "model": model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        last_event, broke_at = LastEvent(), 0.0
        while True:
            try:
                with (
                    self._clear_errors(),
                    self._client.stream(
                        "POST", f"{self.url}/v1/chat/completions", json=body, headers=last_event.headers
                    ) as response,
                ):
                    if response.is_error:
                        response.read()
                    _check(response)
                    for chunk in _chunks(response, last_event):
                        broke_at = 0.0
                        yield chunk
            except ConnectionBroke:
                broke_at = broke_at or time.monotonic()
                if not last_event.id or time.monotonic() > broke_at + _COMES_BACK_S:
                    raise
                time.sleep(_TRY_EVERY_S)
            else:
                return

    @contextlib.contextmanager
    def _clear_errors(self) -> Generator[None]:
        import httpx

        try:
            yield
        except httpx.ConnectError as error:
            refusal = distrust(error, self.url)
            if refusal:
                raise ChatError(refusal) from None
            raise ConnectionBroke(
                f"No server answers at {self.url}. Start one with: mlx-ring serve"
            ) from None
        except (httpx.UnsupportedProtocol, httpx.InvalidURL):
            raise ChatError(
                f"'{self.url}' is no address of a server; give one like http://127.0.0.1:8100."
            ) from None
        except httpx.TimeoutException:
            raise ConnectionBroke(f"{self.url} does not answer.") from None
        except httpx.HTTPError as error:
            raise ConnectionBroke(f"The connection to {self.url} broke: {error}.") from None
        except UnicodeEncodeError:
            raise ChatError("The text is not UTF-8: convert it, or set the terminal's encoding.") from None
        except ValueError:
            raise ChatError(f"{self.url} answers, but not as an OpenAI API does.") from None


@dataclass(slots=True)
class ChatSession:
    """One conversation with one model."""

    server: ChatServer
    model: str
    console: Console
    system: str | None = None
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
        with contextlib.closing(self.server.stream(self.model, instructions + self.messages)) as chunks:
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
    trusted: ssl.SSLContext | None = None,
    console: Console | None = None,
    read_line: Callable[[], str] | None = None,
) -> int:
    """Chat until the user leaves.

    Args:
        base_url: address of the server, with or without `/v1`.
        model: name of the model; None for the first one served.
        system: system prompt.
        trusted: TLS context for an HTTPS server.
        console: where to print.
        read_line: returns the next line, or raises `EOFError` at the end.

    Returns:
        The exit code: 0, 1 if questions came from a pipe and one got no complete answer, or 2 without such a server or
        model.
    """
    console = console or Console()
    is_piped = read_line is None and not sys.stdin.isatty()
    read_line = read_line or _read_line
    server = ChatServer(base_url, api_key, trusted)
    try:
        conversation = ChatSession(server, server.find_model(model), console, system)
        console.print(
            f"[bold]{escape(conversation.model)}[/] at {escape(server.url)}. Type /help for commands, Ctrl-D to leave.",
            highlight=False,
            soft_wrap=True,
        )
        _converse(conversation, read_line)
    except ChatError as error:
        _print_error(console, error)
        return _MISUSE
    finally:
        server.close()
    return _FAILED if is_piped and conversation.has_failed else 0


def _converse(conversation: ChatSession, read_line: Callable[[], str]) -> None:
    while True:
        try:
            line = read_line().strip()
        except KeyboardInterrupt:
            conversation.console.print("\n[dim]Ctrl-D leaves.[/]")
            continue
        except EOFError:
            conversation.console.print()
            return
        if line in {"/exit", "/quit"}:
            return
        if line.startswith("/"):
            _run_command(conversation, line)
        elif line:
            _answer(conversation, line)


def _run_command(conversation: ChatSession, line: str) -> None:
    command, _, rest = line.partition(" ")
    match command:
        case "/reset":
            conversation.reset(conversation.system)
            conversation.console.print("[dim]New conversation.[/]")
        case "/system":
            conversation.reset(rest.strip() or None)
            conversation.console.print(
                f"[dim]New conversation with {'this' if conversation.system else 'no'} system prompt.[/]"
            )
        case "/help":
            conversation.console.print(_HELP, highlight=False)
        case _:
            conversation.console.print(
                f"[dim]There is no {command}; /help lists the commands.[/]", highlight=False
            )


def _answer(conversation: ChatSession, question: str) -> None:
    try:
        reply = conversation.ask(question)
    except ChatError as error:
        conversation.has_failed = True
        _print_error(conversation.console, error)
        return
    conversation.console.print(f"[dim]{_footnote(reply)}[/]", highlight=False)


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


def _check(response: httpx.Response) -> None:
    """Raise `ChatError` with the server's message if it answered with an error."""
    if not response.is_error:
        return
    kind = ConnectionBroke if response.status_code == HTTPStatus.SERVICE_UNAVAILABLE else ChatError
    if response.status_code == HTTPStatus.UNAUTHORIZED and "authorization" not in response.request.headers:
        raise ChatError("This server requires an API key: give it with --api-key, or set MLX_RING_API_KEY.")
    try:
        message = _message_of(response.json()["error"])
    except (ValueError, KeyError, TypeError):
        message = (
            f"Another program answers at {response.url}: {response.status_code} {response.reason_phrase}."
        )
    raise kind(message)


def _message_of(error: Any) -> str:
    """Return the message of an error, which some servers write as a text alone."""
    message = error.get("message") if isinstance(error, dict) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return str(error if message is None else message)  # pyright: ignore[reportUnknownArgumentType]


def _hub_id(name: str | None) -> str | None:
    """Return the hub's id that a short name means; None for any other name."""
    with contextlib.suppress(ModelNotFound):
        return None if name is None or "/" in name else find_hub_id(name)
    return None


def _models(response: httpx.Response) -> dict[str, set[str]]:
    """Return all names of each model, by its id."""
    try:
        return {
            str(model["id"]): {model["id"], *model.get("aliases", ())} for model in response.json()["data"]
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError from error


@dataclass(slots=True)
class LastEvent:
    """Last event of a stream."""

    id: str = ""
    """Empty if the server keeps no answers."""

    @property
    def headers(self) -> dict[str, str]:
        """Headers that ask for the events after it."""
        return {"Last-Event-ID": self.id} if self.id else {}


def _chunks(response: httpx.Response, last_event: LastEvent) -> Generator[dict[str, Any]]:
    id_ = ""
    for line in response.iter_lines():
        if line.startswith("id:"):
            id_ = line.removeprefix("id:").strip()
        data = line.removeprefix("data:").strip()
        if data == line or not data:
            continue
        if data == "[DONE]":
            return
        chunk: Any = json.loads(data)
        if not isinstance(chunk, dict):
            raise ValueError(data)  # noqa: TRY004 - it is text from outside that is wrong
        if chunk.get("error"):
            raise ChatError(_message_of(chunk["error"]))
        last_event.id = id_
        yield chunk
    raise ConnectionBroke("The server's answer broke off.")


def chat(
    url: Annotated[str, typer.Option(help="Address of the server.")] = DEFAULT_URL,
    model: Annotated[str | None, typer.Option(help="Model to ask; the first one served by default.")] = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    api_key: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="API key of the server; MLX_RING_API_KEY by default."),
    ] = None,
    cacert: Annotated[Path | None, CACERT] = None,
) -> None:
    """Chat with a served model in this terminal.

    From a pipe, each line is a question. The exit code is then 1 if one of them got no complete answer.
    """
    settings = load_settings({"api_key": api_key})
    key = key_to_send(settings)
    raise typer.Exit(
        run_chat(url, model=model, system=system, api_key=key, trusted=trust(cacert, settings.ssl_certfile))
    )
