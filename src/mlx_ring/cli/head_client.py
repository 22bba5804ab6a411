"""Requests of commands to a head, and chats with it, over HTTP or HTTPS."""

from __future__ import annotations

import contextlib
import json
import ssl
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import psutil
import typer

from mlx_ring.core.errors import ConfigError, RequestError, without_number
from mlx_ring.core.folders import state_folder
from mlx_ring.host.addresses import plain_url
from mlx_ring.host.running import Running, running_here
from mlx_ring.settings.settings_sources import KEY_VARIABLE, key_to_send, load_settings, own_url

if TYPE_CHECKING:
    import httpx

DEFAULT_URL = "http://127.0.0.1:8100"
URL = typer.Option(
    "--url",
    metavar="URL",
    help=f"Address of the server; {DEFAULT_URL} or another of this machine by default.",
)
CACERT = typer.Option(
    "--cacert",
    metavar="FILE",
    help="PEM file of the authority or certificate of an https:// server; the system's authorities by default.",
)
API_KEY = typer.Option("--api-key", metavar="KEY", help=f"API key of the server; {KEY_VARIABLE} by default.")
LIFELINE = "--lifeline-fd"
"""Option of a server that `run` starts for its own chat."""
QUICK_ANSWER_S = 10.0
"""Time within which any head answers a question about what it serves."""
_OTHER_ANSWER_S = 2.0
"""The same for a head that is only asked whether it has what one's own lacks."""
_ANOTHER = "another program answers there"
_START_ONE = "start one with `mlx-ring serve`, or give its address with --url"


def ask_head(
    url: str,
    path: str,
    body: Mapping[str, object] | None = None,
    *,
    api_key: str | None = None,
    cacert: Path | None = None,
    timeout_s: float = 60.0,
    hint: str = _START_ONE,
) -> Any:
    """Return the JSON answer of a running head to GET, or with a body to POST.

    Args:
        url: address of the head.
        path: path of the route.
        body: fields to send as JSON.
        api_key: key of the server; the one of `key_to_send` by default.
        cacert: file of a certificate to trust.
        timeout_s: time to wait for the answer.
        hint: what to do if no head answers.

    Raises:
        ConfigError: no head answers there.
        RequestError: it refuses the request.
    """
    import httpx  # slow to import, and most commands do without it

    given = _connection(url, api_key, cacert)
    try:
        method, place = "GET" if body is None else "POST", plain_url(f"{url.rstrip('/')}{path}")
        answer = httpx.request(method, place, json=body, timeout=timeout_s, **given)
        reply: Any = answer.json()
        if answer.is_error:
            raise RequestError(_refusal(url, answer.status_code, reply, had_key=bool(given["headers"])))
    except (httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
        raise ConfigError(_no_address(url)) from error
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            distrust(error, url) or f"No head answers at {url} ({_reason(error)}): {hint}."
        ) from error
    return reply


def _refusal(url: str, status: int, reply: Any, *, had_key: bool) -> str:
    if status == HTTPStatus.UNAUTHORIZED:
        return f"The head at {url} asks for {asked_key(had_key=had_key)}"
    return f"The head at {url} refuses: {reply['error']['message']}"


def asked_key(*, had_key: bool) -> str:
    """Return which API key a server asks for, how to give it, and why the one of the settings was not sent."""
    settings = None if had_key else load_settings({})
    why = (
        " A key in a file is sent only to the server that the file sets up: for that one, use --url "
        f"{own_url(settings)}."
        if settings is not None and settings.api_key
        else ""
    )
    which = "another" if had_key else "an"
    return f"{which} API key: give it with --api-key, or set {KEY_VARIABLE}.{why}"


def pull_at(
    url: str, model: str, *, api_key: str | None = None, cacert: Path | None = None
) -> Generator[Mapping[str, Any]]:
    """Let a head download a model that it does not have, and yield the progress as `/models/pull` writes it.

    The download ends with the iterator, unless others wait for it.

    Raises:
        ConfigError: no head answers there, or it ends.
        RequestError: it refuses, or the download fails.
    """
    import httpx  # slow to import, and most commands do without it

    body = {"model": model, "stream": True, "stop_unwatched": True}
    given = _connection(url, api_key, cacert)
    try:
        with httpx.stream(
            "POST", plain_url(f"{url.rstrip('/')}/models/pull"), json=body, timeout=60.0, **given
        ) as answer:
            if answer.is_error:
                answer.read()
                raise RequestError(
                    _refusal(url, answer.status_code, answer.json(), had_key=bool(given["headers"]))
                )
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    event: Any = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise RequestError(f"The head at {url} refuses: {event['error']['message']}")
                    yield {name: event[name] for name in ("status", "done_bytes", "total_bytes")}
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            distrust(error, url) or f"The head at {url} ended the download ({_reason(error)})."
        ) from error


def _reason(error: Exception) -> str:
    """Return what went wrong, in words. An answer that is no JSON comes from another program."""
    import httpx

    if isinstance(error, httpx.ReadTimeout):
        return "something accepts connections there, but does not answer"
    if isinstance(error, (ValueError, LookupError, TypeError)):
        return _ANOTHER
    return without_number(str(error)).rstrip(".") or type(error).__name__


def _no_address(url: str) -> str:
    return f"'{url}' is no address of a server; give one like {DEFAULT_URL}."


def _connection(url: str, api_key: str | None, cacert: Path | None) -> Mapping[str, Any]:
    """Return what httpx needs for a request to a head."""
    settings = load_settings({"api_key": api_key})
    key = key_to_send(url, settings, api_key)
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return {"headers": headers, "trust_env": False, "verify": trust(cacert, settings.ssl_certfile)}


@dataclass(frozen=True, slots=True)
class ServedNames:
    """Names and state of a model that a head serves."""

    names: frozenset[str]
    is_loaded: bool
    """False if it is unloaded: its next request loads it."""


def names_at(
    url: str, *, api_key: str | None = None, cacert: Path | None = None, timeout_s: float = QUICK_ANSWER_S
) -> Mapping[str, ServedNames]:
    """Return the models that a head serves, by their ids.

    Raises:
        ConfigError: no head answers there soon.
        RequestError: it refuses.
    """
    try:
        return _names_in(ask_head(url, "/v1/models", api_key=api_key, cacert=cacert, timeout_s=timeout_s))
    except ValueError as error:
        raise ConfigError(f"No head answers at {url} ({_ANOTHER}): {_START_ONE}.") from error


def _names_in(listed: Any) -> Mapping[str, ServedNames]:
    """Return the models of an answer of `/v1/models`, by their ids. Raises `ValueError` if it is none."""
    try:
        return {
            str(each["id"]): ServedNames(
                frozenset((each["id"], *each.get("aliases", ()))), each.get("state") != "unloaded"
            )
            for each in listed["data"]
        }
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError from error


def trust(given: Path | None, own: Path | None = None) -> ssl.SSLContext:
    """Return a context that trusts the system's authorities, a file, and `own`, the certificate in this machine's settings.

    Raises:
        ConfigError: a file cannot be read, or holds no certificate.
    """
    context = ssl.create_default_context()
    # The file may hold only the server's own certificate.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    for flag, path in (("--cacert", given), ("ssl-certfile", own)):
        if path is not None:
            try:
                context.load_verify_locations(path)
            except OSError as error:
                reason = (
                    error.strerror if not isinstance(error, ssl.SSLError) else "no certificate in PEM form"
                )
                raise ConfigError(f"{flag} is {path}, which cannot be used: {reason}.") from error
    return context


def distrust(error: Exception, url: str) -> str | None:
    """Return a sentence about an untrusted certificate, or another scheme than the server's; None for other errors."""
    text = str(error)
    if "WRONG_VERSION_NUMBER" in text:
        return f"The server at {url} does not use HTTPS: give its address with http://."
    if url.startswith("http:") and "without sending a response" in text:
        return f"{url} closed the connection without an answer. If the server uses HTTPS, give its address with https://."
    _, found, why = text.partition("CERTIFICATE_VERIFY_FAILED] certificate verify failed: ")
    advice = "Give the file of its authority, or of the certificate itself, with --cacert FILE."
    said = f"The certificate of {url} is not trusted here: {why.partition(' (_ssl')[0]}. {advice}"
    return said if found else None


def heads_here() -> list[Running]:
    """Return the heads that run on this machine with the same state folder."""
    return [each for each in running_here(state_folder(load_settings({}).state_dir)) if each.kind == "head"]


def server_here(
    url: str | None, model: str | None = None, *, api_key: str | None = None, cacert: Path | None = None
) -> str:
    """Return a given address, or else that of a head of this machine that answers, and best has the model loaded.

    Heads with the same state folder come first, because another one at the usual address may be another user's. If none
    answers, it is the address of a head that refuses, or else of one that runs here.
    """
    own = lasting_heads() if url is None else []
    if url is not None or not own:
        return url or DEFAULT_URL
    wanted = {model}
    if model:
        from mlx_ring.models.model_source import full_name  # slow to import, and most commands do without it

        with contextlib.suppress(ConfigError):
            wanted.add(full_name(model))
    best, place = -2, own[0]
    for each in dict.fromkeys((*own, DEFAULT_URL)):
        if each not in own and best >= (1 if model else 0):
            break
        # Another program may hold the usual port, and never answer.
        timeout_s = QUICK_ANSWER_S if each in own or best < 0 else _OTHER_ANSWER_S
        try:
            names = names_at(each, api_key=api_key, cacert=cacert, timeout_s=timeout_s).values()
            found = max((1 + one.is_loaded for one in names if wanted & one.names), default=0)
        except RequestError:
            found = -1
        except ConfigError:  # it may be ending, or have a certificate that is not trusted
            continue
        best, place = max((best, place), (found, each), key=lambda pair: pair[0])
    return place


def lasting_heads() -> list[str]:
    """Return the addresses of the heads here, that at the usual port first.

    Those that `run` started are left out: they end with its chats.
    """
    found: dict[str, list[str]] = {}
    for head in heads_here():
        with contextlib.suppress(psutil.Error):
            found[head.url] = psutil.Process(head.pid).cmdline()
    lasting = [url for url, words in found.items() if not any(each.startswith(LIFELINE) for each in words)]
    return sorted(lasting, key=lambda url: urlsplit(url).port != urlsplit(DEFAULT_URL).port)


# ---- chats

_CONNECT_S = 5.0
_SILENCE_S = 60.0
"""Maximum pause of a stream. A live server sends a comment far more often."""
_TRY_EVERY_S, _COMES_BACK_S = 1.0, 120.0
"""Time between two tries to get the rest of an answer, and longest time of all tries."""


class ChatError(Exception):
    """Error whose message is one sentence for the user."""


class ConnectionBroke(ChatError):
    """The server is out of reach, or not ready, and may come back."""


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

    def served(self) -> dict[str, set[str]]:
        """Return the names of each served model, by its id."""
        with self._clear_errors():
            response = self._client.get(f"{self.url}/v1/models", timeout=QUICK_ANSWER_S)
            _check(response)
            return {name: set(each.names) for name, each in _names_in(response.json()).items()}

    def stream(
        self, model: str, messages: list[dict[str, str]], sampling: Mapping[str, float | None]
    ) -> Generator[dict[str, Any]]:
        """Yield the chunks of an answer; closing the iterator stops it.

        If the connection breaks, a server with a journal gives the rest, also after it was started again.
        """
        body = {
            "model": model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **{name: value for name, value in sampling.items() if value is not None},
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
            raise ChatError(_no_address(self.url)) from None
        except httpx.TimeoutException:
            raise ConnectionBroke(f"{self.url} does not answer.") from None
        except httpx.HTTPError as error:
            said = distrust(error, self.url) or f"The connection to {self.url} broke: {_reason(error)}."
            raise ConnectionBroke(said) from None
        except UnicodeEncodeError:
            raise ChatError("The text is not UTF-8: convert it, or set the terminal's encoding.") from None
        except ValueError:
            raise ChatError(f"{self.url} answers, but not as an OpenAI API does.") from None


def _check(response: httpx.Response) -> None:
    """Raise `ChatError` with the server's message if it answered with an error."""
    if not response.is_error:
        return
    kind = ConnectionBroke if response.status_code == HTTPStatus.SERVICE_UNAVAILABLE else ChatError
    if response.status_code == HTTPStatus.UNAUTHORIZED and "authorization" not in response.request.headers:
        raise ChatError(f"This server requires {asked_key(had_key=False)}")
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
