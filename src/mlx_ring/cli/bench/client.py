"""Client of an OpenAI-compatible server: its models, one streamed request, and probes of the fields that it accepts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, cast
from urllib.parse import urlsplit

import httpx

from mlx_ring.cli.bench.summary import STOPPED, Record
from mlx_ring.cli.bench.workload import Job, Words, as_text, draw
from mlx_ring.cli.head_client import asked_key, distrust
from mlx_ring.core.errors import ConfigError, NotReady
from mlx_ring.host.addresses import is_loopback, plain_url

DONE = "[DONE]"


class EventReader:
    """Parser of server-sent events. It yields their `data`, and skips comments and other fields."""

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

    has_output: bool
    """True if it holds text, reasoning or a tool call."""
    finish_reason: str | None
    usage: dict[str, Any] | None
    error: str | None


def read_event(data: str) -> Event:
    """Parse an event of a chat or text completion.

    Raises:
        ValueError: it is no JSON object.
    """
    body: object = json.loads(data)
    if not isinstance(body, dict):
        raise ValueError(data)  # noqa: TRY004 - it is text from outside that is wrong
    fields = cast("dict[str, Any]", body)
    error: object = fields.get("error")
    if error is not None:
        message = cast("dict[str, object]", error).get("message") if isinstance(error, dict) else error
        return Event(has_output=False, finish_reason=None, usage=None, error=str(message))
    choices: list[dict[str, Any]] = fields.get("choices") or []
    return Event(
        has_output=any(_has_output(choice) for choice in choices),
        finish_reason=next((one["finish_reason"] for one in choices if one.get("finish_reason")), None),
        usage=fields.get("usage"),
        error=None,
    )


def _has_output(choice: dict[str, Any]) -> bool:
    delta: dict[str, Any] = choice.get("delta") or {}
    parts = ("content", "reasoning", "reasoning_content", "tool_calls")
    return bool(choice.get("text")) or any(delta.get(part) for part in parts)


Endpoint = Literal["completions", "chat"]

_CONNECT_S = 10.0
_UNAUTHORIZED = (401, 403)
_SHOWN = 200
_CUT = "stream ended early"
_ONE_EACH = Words()


@dataclass(frozen=True, slots=True)
class Target:
    """Properties of the server that are known before the load."""

    url: str
    """Without /v1."""
    model: str
    vocabulary: int | None
    """Number of token ids; None if prompts must be text."""
    ignores_eos: bool
    """True if a request can force the full length of its answer."""
    reports_usage: bool = True
    """True if a stream can end with its token counts."""
    limit_field: str = "max_tokens"
    """Request field for the length of an answer."""
    context: int | None = None
    """Maximum tokens of prompt and answer; None if the server does not report it."""
    words: Words = _ONE_EACH
    """Token counts of words, for prompts of text."""


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Options that all requests share."""

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
        if target.reports_usage:
            body["stream_options"] = {"include_usage": True}
        if target.ignores_eos:
            body["ignore_eos"] = True
        if self.temperature:
            body["seed"] = job.number
        if self.endpoint == "chat":
            return body | {"messages": [{"role": "user", "content": job.prompt}]}
        return body | {"prompt": job.prompt}


class BenchClient:
    """HTTP client of one server, with as many connections as requests need."""

    def __init__(
        self, url: str, *, api_key: str | None, timeout_s: float, trusted: ssl.SSLContext | None = None
    ) -> None:
        """Create a client; `timeout_s` bounds a request from its first byte to the last of its answer."""
        self.url = plain_url(url.rstrip("/").removesuffix("/v1"))
        self._timeout_s = timeout_s
        # A proxy must not collect events to compress them.
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
        """Find the model to ask.

        Raises:
            NotReady: no server answers.
            ConfigError: the server has another API, or no such model.
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
        name = next((name for name, entry in served.items() if model in (None, name, *_aliases(entry))), None)
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
        """Return the JSON object at a path of the server; an empty one if there is none."""
        with contextlib.suppress(httpx.HTTPError, ValueError, TimeoutError):
            async with asyncio.timeout(_CONNECT_S):
                response = await self._http.get(f"{self.url}{path}")
            body: object = response.json() if response.is_success else None
            if isinstance(body, dict):
                return cast("dict[str, Any]", body)
        return {}

    async def ask(
        self, target: Target, job: Job, options: RequestOptions, record: Record, started: float
    ) -> None:
        """Send one request and record its answer. Errors are recorded, never raised.

        Args:
            target: the server.
            job: the request.
            options: options that all requests share.
            record: filled as the answer arrives.
            started: start of the run, by `time.perf_counter`.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._follow(options.path(self.url), options.body(target, job), record, started)
        except (TimeoutError, httpx.TimeoutException):
            record.error = "timeout"
        except httpx.HTTPError as error:
            cause = f"{type(error).__name__} {error}".strip()
            record.error = f"{'connection' if record.status is None else _CUT}: {cause}"[:_SHOWN]
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
                record.error = f"the answer is not a stream, but {kind}"
            elif not await _read_stream(response, record, started) and record.error is None:
                record.error = _CUT


async def _read_stream(response: httpx.Response, record: Record, started: float) -> bool:
    """Read the stream, and return True if it ended with `[DONE]`."""
    reader, done = EventReader(), False
    async for data in response.aiter_raw():
        now = time.perf_counter() - started
        for event in reader.feed(data):
            done = done or event == DONE
            if event != DONE and not _note(record, event, now):
                return False
    return done or DONE in reader.feed(b"\n")


def _note(record: Record, data: str, now: float) -> bool:
    """Record an event; return False if it ends the request with an error."""
    event = read_event(data)
    if event.error is not None:
        record.error = f"in the stream: {event.error}"[:_SHOWN]
        return False
    if event.has_output:
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
    """Return the served models by id."""
    if not response.is_success:
        hint = f" {_key_hint(response, url)}" if response.status_code in _UNAUTHORIZED else ""
        said = error_message(response.text)
        raise ConfigError(f"{url}/v1/models answers {response.status_code}: {said.rstrip('.')}.{hint}")
    try:
        models = {str(model["id"]): dict(model) for model in response.json()["data"]}
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{url} answers, but not as an OpenAI API does.") from None
    if not models:
        raise ConfigError(f"{url} serves no model.")
    return models


def _key_hint(response: httpx.Response, url: str) -> str:
    """Return how to give the key that a server asks for: on another machine, only a flag's is sent."""
    if is_loopback(urlsplit(url).hostname or ""):
        return f"It asks for {asked_key(had_key='authorization' in response.request.headers)}"
    return "Give --api-key, from which alone servers of other machines get a key."


def _aliases(entry: dict[str, Any]) -> list[str]:
    aliases: object = entry.get("aliases")
    return cast("list[str]", aliases) if isinstance(aliases, list) else []


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def error_message(text: str) -> str:
    """Return the message in an error's body, else the start of the body."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(json.loads(text)["error"]["message"])[:_SHOWN]
    return " ".join(text.split())[:_SHOWN]


_REFUSED = (400, 422)
_FEW, _MANY = 32, 160
"""Lengths in words of the prompts that measure tokens per word."""


async def probe(client: BenchClient, target: Target, options: RequestOptions) -> tuple[Target, list[str]]:
    """Find the fields that the server accepts and its tokens per word; return them with notes for the user.

    Newer fields of OpenAI's API are tried, and left out if the server refuses them.

    Raises:
        ConfigError: the server refuses every request.
        NotReady: the server fails.
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
        return replace(target, reports_usage=False), _notes(replace(target, reports_usage=False))
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
    """Return the next target to try: first without a field that the refusal names. None if nothing is left to try."""
    if record.status not in _REFUSED:
        return None
    weaker: dict[str, Target] = {}
    if target.limit_field == "max_tokens" and "max_completion_tokens" in (record.error or ""):
        return replace(target, limit_field="max_completion_tokens")
    if target.ignores_eos:
        weaker["ignore_eos"] = replace(target, ignores_eos=False)
    if target.reports_usage:
        weaker["stream_options"] = replace(target, reports_usage=False)
    named = [field for field in weaker if field in (record.error or "")]
    return weaker[named[0]] if named else next(iter(weaker.values()), None)


def _notes(target: Target) -> list[str]:
    notes: list[str] = []
    if not target.ignores_eos:
        notes.append("The server does not accept ignore_eos: answers may be shorter than requested.")
    if not target.reports_usage:
        notes.append(
            "The server reports no usage: each event of an answer counts as one token, "
            "and prompt tokens are unknown."
        )
    return notes


def _failure(url: str, options: RequestOptions, record: Record) -> ConfigError | NotReady:
    said = f"A first small request to {options.path(url)} fails: {record.error}."
    if record.status is not None and 400 <= record.status < 500:  # noqa: PLR2004 - HTTP's classes
        other = "chat" if options.endpoint == "completions" else "completions"
        return ConfigError(f"{said} Check --model, --api-key, or try --endpoint {other}.")
    return NotReady(f"{said} Look at the server's log.")
