"""A server of OpenAI's API, as far as a load needs it: what it offers, and one streamed request."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass
from typing import Any, Literal, cast

import httpx

from mlx_ring.cli.bench.events import DONE, EventReader, read_event
from mlx_ring.cli.bench.summary import Record
from mlx_ring.cli.bench.workload import Job
from mlx_ring.core.errors import ConfigError, NotReady

Endpoint = Literal["completions", "chat"]

_CONNECT_S = 10.0
_BAD_REQUEST = 400
_SHOWN = 200


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


class BenchClient:
    """Asks one server; every request has a connection of its own if need be."""

    def __init__(self, url: str, *, api_key: str | None, timeout_s: float) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        timeout = httpx.Timeout(timeout_s, connect=_CONNECT_S)
        self._http = httpx.AsyncClient(headers=headers, limits=limits, timeout=timeout, trust_env=False)

    async def close(self) -> None:
        await self._http.aclose()

    async def discover(self, model: str | None) -> Target:
        """Find out what the server takes.

        Raises:
            NotReady: nobody answers there.
            ConfigError: it is no server of this API, or has no such model.
        """
        try:
            response = await self._http.get(f"{self.url}/v1/models")
        except (httpx.UnsupportedProtocol, httpx.InvalidURL):
            raise ConfigError(f"--url is {self.url!r}; give one like http://127.0.0.1:8100.") from None
        except httpx.HTTPError as error:
            raise NotReady(
                f"No server answers at {self.url} ({error or type(error).__name__}). Start one with: mlx-ring serve"
            ) from None
        served = _model_names(response, self.url)
        if model is not None and model not in served:
            raise ConfigError(f"{self.url} does not serve {model!r}; it has {', '.join(served)}.")
        vocabulary = await self._vocabulary()
        return Target(self.url, model or served[0], vocabulary, ignores_eos=vocabulary is not None)

    async def _vocabulary(self) -> int | None:
        """mlx-ring tells; others take text."""
        size = (await self.look("/model/info")).get("vocab_size")
        return size if isinstance(size, int) else None

    async def look(self, path: str) -> dict[str, Any]:
        """What the server says of itself at a path; nothing where it has no such thing."""
        with contextlib.suppress(httpx.HTTPError, ValueError):
            response = await self._http.get(f"{self.url}{path}")
            told: object = response.json() if response.is_success else None
            if isinstance(told, dict):
                return cast("dict[str, Any]", told)
        return {}

    async def ask(self, target: Target, job: Job, options: RequestOptions, started: float) -> Record:
        """Send one request and follow its answer. Trouble is noted in the record, never raised."""
        record = Record(job.number, time.perf_counter() - started)
        try:
            await self._follow(options.path(self.url), options.body(target, job), record, started)
        except httpx.TimeoutException:
            record.error = "timeout"
        except httpx.HTTPError as error:
            record.error = f"connection: {type(error).__name__}"
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            record.error = f"not understood: {error!r}"[:_SHOWN]
        except asyncio.CancelledError:
            record.error = "stopped"
            raise
        finally:
            record.ended_s = time.perf_counter() - started
        return record

    async def _follow(self, url: str, body: dict[str, Any], record: Record, started: float) -> None:
        async with self._http.stream("POST", url, json=body) as response:
            if response.status_code >= _BAD_REQUEST:
                text = (await response.aread()).decode(errors="replace")
                record.error = f"HTTP {response.status_code}: {_message(text)}"
                return
            reader, done = EventReader(), False
            async for data in response.aiter_raw():
                now = time.perf_counter() - started
                for event in reader.feed(data):
                    done = done or event == DONE
                    if event != DONE and not _note(record, event, now):
                        return
            if not done and record.error is None:
                record.error = "stream ended early"


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
        record.prompt_tokens = int(event.usage.get("prompt_tokens") or 0)
        record.output_tokens = int(event.usage.get("completion_tokens") or 0)
        record.cached_tokens = int(details.get("cached_tokens") or 0)
    return True


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
            "max_tokens": job.output_tokens,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if target.ignores_eos:
            body["ignore_eos"] = True
        if self.temperature:
            body["seed"] = job.number
        if self.endpoint == "chat":
            return body | {"messages": [{"role": "user", "content": job.prompt}]}
        return body | {"prompt": job.prompt}


def _model_names(response: httpx.Response, url: str) -> list[str]:
    try:
        response.raise_for_status()
        names = [str(model["id"]) for model in response.json()["data"]]
    except httpx.HTTPStatusError:
        raise ConfigError(
            f"{url}/v1/models answers {response.status_code}: {_message(response.text)}"
        ) from None
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{url} answers, but not as an OpenAI API does.") from None
    if not names:
        raise ConfigError(f"{url} serves no model.")
    return names


def _message(text: str) -> str:
    """The sentence of an error's body, or the beginning of whatever came."""
    import json  # noqa: PLC0415 - only where something went wrong

    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(json.loads(text)["error"]["message"])[:_SHOWN]
    return " ".join(text.split())[:_SHOWN]
