"""A server of OpenAI's API, as far as a load needs it: what it says of itself, and one streamed request."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import time
from dataclasses import dataclass
from typing import Any, Literal, cast

import httpx

from mlx_ring.cli.bench.events import DONE, EventReader, read_event
from mlx_ring.cli.bench.summary import STOPPED, Record
from mlx_ring.cli.bench.workload import Job, Words
from mlx_ring.cli.trust import distrust
from mlx_ring.core.errors import ConfigError, NotReady

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
