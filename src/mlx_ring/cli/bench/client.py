"""A server of OpenAI's API, as far as a load needs it: what it says of itself, and one streamed request.

Server-sent events out of a byte stream, and what a completion's event says. Pure.

Small requests that find out what a server takes which does not say so itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import httpx

from mlx_ring.cli.bench.summary import STOPPED, Record
from mlx_ring.cli.bench.workload import Job, Words, as_text, draw
from mlx_ring.cli.trust import distrust
from mlx_ring.core.errors import ConfigError, NotReady

DONE = "[DONE]"


class EventReader:
    """Cuts bytes as they come into the `data` of events; comments and other fields are passed over."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[str]:
        lines = (self._rest + data).replace(b"\r\n", b"\n").split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip().decode()


@dataclass(frozen=True, slots=True)
class Event:
    """One event of an answer."""

    says_something: bool
    """Whether it brings text, reasoning or a tool call."""
    finish_reason: str | None
    usage: dict[str, Any] | None
    error: str | None


def read_event(data: str) -> Event:
    """Chat and text completions alike. Raises `ValueError` for what is no JSON object."""
    body: object = json.loads(data)
    if not isinstance(body, dict):
        raise ValueError(data)  # noqa: TRY004 - it is text from outside that is wrong
    fields = cast("dict[str, Any]", body)
    error: object = fields.get("error")
    if error is not None:
        message = cast("dict[str, object]", error).get("message") if isinstance(error, dict) else error
        return Event(says_something=False, finish_reason=None, usage=None, error=str(message))
    choices: list[dict[str, Any]] = fields.get("choices") or []
    return Event(
        says_something=any(_says(choice) for choice in choices),
        finish_reason=next((one["finish_reason"] for one in choices if one.get("finish_reason")), None),
        usage=fields.get("usage"),
        error=None,
    )


def _says(choice: dict[str, Any]) -> bool:
    delta: dict[str, Any] = choice.get("delta") or {}
    parts = ("content", "reasoning", "reasoning_content", "tool_calls")
    return bool(choice.get("text")) or any(delta.get(part) for part in parts)


Endpoint = Literal["completions", "chat"]

_CONNECT_S = 10.0
_UNAUTHORISED = (401, 403)
_SHOWN = 200
_CUT = "stream ended early"
_ONE_EACH = Words()


@dataclass(frozen=True, slots=True)
class Target:
    """What is known of the server before the load."""

    url: str
    """Without /v1."""
    model: str
    vocabulary: int | None
    """None where prompts must be text."""
    ignores_eos: bool
    """Whether answers can be asked for that go on to their full length."""
    tells_usage: bool = True
    """Whether a stream can be asked to end with its count of tokens."""
    limit_field: str = "max_tokens"
    """What the length of an answer is called."""
    context: int | None = None
    """Tokens of prompt and answer, where the server tells."""
    words: Words = _ONE_EACH
    """How its tokenizer counts, where prompts are text."""


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """What all requests have in common."""

    endpoint: Endpoint = "completions"
    temperature: float = 0.0

    def path(self, url: str) -> str:
        return f"{url}/v1/{'chat/completions' if self.endpoint == 'chat' else 'completions'}"

    def body(self, target: Target, job: Job) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": target.model,
            target.limit_field: job.output_tokens,
            "temperature": self.temperature,
            "stream": True,
        }
        if target.tells_usage:
            body["stream_options"] = {"include_usage": True}
        if target.ignores_eos:
            body["ignore_eos"] = True
        if self.temperature:
            body["seed"] = job.number
        if self.endpoint == "chat":
            return body | {"messages": [{"role": "user", "content": job.prompt}]}
        return body | {"prompt": job.prompt}


class BenchClient:
    """Asks one server; every request has a connection of its own if need be."""

    def __init__(
        self, url: str, *, api_key: str | None, timeout_s: float, trusted: ssl.SSLContext | None = None
    ) -> None:
        """`timeout_s` is the longest that a request may take from its first byte to the last of its answer."""
        self.url = url.rstrip("/").removesuffix("/v1")
        self._timeout_s = timeout_s
        # A proxy on the way shall not gather events to compress them.
        headers = {"Accept-Encoding": "identity"}
        if api_key is not None:
            headers["Authorization"] = f"Bearer {api_key}"
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        timeout = httpx.Timeout(timeout_s, connect=_CONNECT_S, read=None)
        self._http = httpx.AsyncClient(
            headers=headers, limits=limits, timeout=timeout, trust_env=False, verify=trusted or True
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def discover(self, model: str | None) -> Target:
        """Find out what the server says it serves.

        Raises:
            NotReady: nobody answers there.
            ConfigError: it is no server of this API, or has no such model.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                response = await self._http.get(f"{self.url}/v1/models")
        except (httpx.HTTPError, TimeoutError) as error:
            raise NotReady(
                distrust(error, self.url)
                or f"No server answers at {self.url} ({str(error) or type(error).__name__}). Start one with: mlx-ring serve"
            ) from None
        served = _served_models(response, self.url)
        name = next((name for name, about in served.items() if model in (None, name, *_aliases(about))), None)
        if name is None:
            raise ConfigError(f"{self.url} does not serve {model!r}; it has {', '.join(served)}.")
        vocabulary = _count((await self.look("/model/info")).get("vocab_size"))
        return Target(
            self.url,
            name,
            vocabulary,
            ignores_eos=vocabulary is not None,
            context=_count(served[name].get("max_model_len")),
        )

    async def look(self, path: str) -> dict[str, Any]:
        """What the server says of itself at a path; nothing where it has no such thing."""
        with contextlib.suppress(httpx.HTTPError, ValueError, TimeoutError):
            async with asyncio.timeout(_CONNECT_S):
                response = await self._http.get(f"{self.url}{path}")
            told: object = response.json() if response.is_success else None
            if isinstance(told, dict):
                return cast("dict[str, Any]", told)
        return {}

    async def ask(
        self, target: Target, job: Job, options: RequestOptions, record: Record, started: float
    ) -> None:
        """Send one request and follow its answer into `record`. Trouble is noted there, never raised.

        Args:
            target: the server.
            job: what to ask.
            options: what all requests share.
            record: is filled as the answer comes.
            started: when the run began, by `time.perf_counter`.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._follow(options.path(self.url), options.body(target, job), record, started)
        except (TimeoutError, httpx.TimeoutException):
            record.error = "timeout"
        except httpx.HTTPError as error:
            about = f"{type(error).__name__} {error}".strip()
            record.error = f"{'connection' if record.status is None else _CUT}: {about}"[:_SHOWN]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            record.error = f"not understood: {error!r}"[:_SHOWN]
        except asyncio.CancelledError:
            record.error = STOPPED
            raise
        finally:
            record.ended_s = time.perf_counter() - started
            if not record.has_usage:
                record.output_tokens = len(record.arrivals_s)

    async def _follow(self, url: str, body: dict[str, Any], record: Record, started: float) -> None:
        async with self._http.stream("POST", url, json=body) as response:
            record.status = response.status_code
            kind = response.headers.get("content-type", "nothing").partition(";")[0]
            if not response.is_success:
                text = (await response.aread()).decode(errors="replace")
                record.error = f"HTTP {response.status_code}: {error_message(text)}"
            elif kind != "text/event-stream":
                record.error = f"no stream: the answer is {kind}"
            elif not await _read_stream(response, record, started) and record.error is None:
                record.error = _CUT


async def _read_stream(response: httpx.Response, record: Record, started: float) -> bool:
    """Whether the stream said that it is at its end."""
    reader, done = EventReader(), False
    async for data in response.aiter_raw():
        now = time.perf_counter() - started
        for event in reader.feed(data):
            done = done or event == DONE
            if event != DONE and not _note(record, event, now):
                return False
    return done or DONE in reader.feed(b"\n")


def _note(record: Record, data: str, now: float) -> bool:
    """Take an event in; False where it ends the request with an error."""
    event = read_event(data)
    if event.error is not None:
        record.error = f"in the stream: {event.error}"[:_SHOWN]
        return False
    if event.says_something:
        record.arrivals_s.append(now)
    record.finish_reason = event.finish_reason or record.finish_reason
    if event.usage is not None:
        details = cast("dict[str, Any]", event.usage.get("prompt_tokens_details") or {})
        record.has_usage = True
        record.prompt_tokens = int(event.usage.get("prompt_tokens") or 0)
        record.output_tokens = int(event.usage.get("completion_tokens") or 0)
        record.cached_tokens = int(details.get("cached_tokens") or 0)
    return True


def _served_models(response: httpx.Response, url: str) -> dict[str, dict[str, Any]]:
    """What is served, by id."""
    if not response.is_success:
        hint = " Give --api-key." if response.status_code in _UNAUTHORISED else ""
        said = error_message(response.text)
        raise ConfigError(f"{url}/v1/models answers {response.status_code}: {said}{hint}")
    try:
        models = {str(model["id"]): dict(model) for model in response.json()["data"]}
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{url} answers, but not as an OpenAI API does.") from None
    if not models:
        raise ConfigError(f"{url} serves no model.")
    return models


def _aliases(about: dict[str, Any]) -> list[str]:
    aliases: object = about.get("aliases")
    return cast("list[str]", aliases) if isinstance(aliases, list) else []


def _count(told: object) -> int | None:
    return told if isinstance(told, int) and not isinstance(told, bool) and told > 0 else None


def error_message(text: str) -> str:
    """The sentence of an error's body, or the beginning of whatever came."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(json.loads(text)["error"]["message"])[:_SHOWN]
    return " ".join(text.split())[:_SHOWN]


_REFUSED = (400, 422)
_FEW, _MANY = 32, 160
"""Words of the prompts by which words are measured."""


async def probe(client: BenchClient, target: Target, options: RequestOptions) -> tuple[Target, list[str]]:
    """What the server takes and how it counts words, and what a person should know of it.

    Fields beyond OpenAI's first ones are tried and left out where they are refused.

    Raises:
        ConfigError: it refuses whatever is tried.
        NotReady: it fails.
    """
    tried: Target | None = replace(target, vocabulary=None, ignores_eos=True)
    record = Record(0, 0.0)
    while tried is not None:
        target = tried
        record = await _ask(client, target, options, _FEW)
        tried = _without_what_is_refused(target, record)
    if record.error is not None:
        raise _failure(client.url, options, record)
    if not record.has_usage:
        return replace(target, tells_usage=False), _notes(replace(target, tells_usage=False))
    more = await _ask(client, target, options, _MANY)
    counted = (_MANY, more.prompt_tokens) if more.error is None else (_FEW + 1, record.prompt_tokens)
    words = Words.measured((_FEW, record.prompt_tokens), counted)
    return replace(target, words=words), _notes(target)


async def _ask(client: BenchClient, target: Target, options: RequestOptions, words: int) -> Record:
    record = Record(0, 0.0)
    job = Job(0, as_text(draw(f"probe {words}", words)), output_tokens=1, arrives_s=0.0)
    await client.ask(target, job, options, record, time.perf_counter())
    return record


def _without_what_is_refused(target: Target, record: Record) -> Target | None:
    """The next to try, a field that the refusal names before any other; None where there is none to try."""
    if record.status not in _REFUSED:
        return None
    weaker: dict[str, Target] = {}
    if target.limit_field == "max_tokens" and "max_completion_tokens" in (record.error or ""):
        return replace(target, limit_field="max_completion_tokens")
    if target.ignores_eos:
        weaker["ignore_eos"] = replace(target, ignores_eos=False)
    if target.tells_usage:
        weaker["stream_options"] = replace(target, tells_usage=False)
    named = [field for field in weaker if field in (record.error or "")]
    return weaker[named[0]] if named else next(iter(weaker.values()), None)


def _notes(target: Target) -> list[str]:
    notes: list[str] = []
    if not target.ignores_eos:
        notes.append("The server does not take ignore_eos: answers may be shorter than asked for.")
    if not target.tells_usage:
        notes.append(
            "The server tells no usage: a word of a prompt and an event of an answer each count as a token, "
            "and prompts' tokens are not known."
        )
    return notes


def _failure(url: str, options: RequestOptions, record: Record) -> ConfigError | NotReady:
    said = f"A first small request to {options.path(url)} fails: {record.error}."
    if record.status is not None and 400 <= record.status < 500:  # noqa: PLR2004 - HTTP's classes
        other = "chat" if options.endpoint == "completions" else "completions"
        return ConfigError(f"{said} Check --model, --api-key, or try --endpoint {other}.")
    return NotReady(f"{said} Look at the server's log.")
