"""`mlx-ring heads`, which lists the heads on this LAN, and requests of other commands to a head over HTTP or HTTPS."""

from __future__ import annotations

import contextlib
import json
import ssl
import sys
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from mlx_ring.cli import table_console
from mlx_ring.core.errors import ConfigError, RequestError, without_number
from mlx_ring.host.addresses import is_loopback, plain_url
from mlx_ring.host.head_announcement import LISTEN_S, FoundHead
from mlx_ring.settings.config import Settings
from mlx_ring.settings.settings_sources import load_settings

DEFAULT_URL = "http://127.0.0.1:8100"
CACERT = typer.Option(
    "--cacert",
    metavar="FILE",
    help="PEM file of the authority or certificate of an https:// server; the system's authorities by default.",
)
API_KEY = typer.Option("--api-key", metavar="KEY", help="API key of the server; MLX_RING_API_KEY by default.")
QUICK_ANSWER_S = 10.0
"""Time within which any head answers a question about what it serves."""
_LONGEST_S = 300.0
_ANOTHER = "another program answers there"
NONE_FOUND = """No head was found on this LAN. Check that
  - `mlx-ring serve MODEL --nodes N` runs on the head's machine, and both are on the same network
  - no firewall on either machine blocks mDNS (UDP port 5353)
  - the network carries multicast: guest networks, some Wi-Fi access points, VPNs and containers do not
An address always works: mlx-ring join HEAD --token TOKEN"""


def heads(
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Time to listen.")] = LISTEN_S,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the heads on this LAN that this machine can join.

    The exit code is 1 if none is found.
    """
    if not 0 < timeout <= _LONGEST_S:
        raise ConfigError(f"--timeout is {timeout:g}; it must be a number above 0, at most {_LONGEST_S:g}.")
    from mlx_ring.cluster.announcement import find_heads  # zeroconf is slow to import

    found = find_heads(timeout)
    if as_json:
        print(json.dumps([head.as_json() for head in found], indent=1))
    elif found:
        show_heads(found)
    if not found:
        print(NONE_FOUND, file=sys.stderr)
        raise typer.Exit(1)


def show_heads(found: Sequence[FoundHead]) -> None:
    """Print a table with one address per line. Its texts come from the network, so they are no markup."""
    from rich.table import Table  # a machine that joins by an address prints no table

    table = Table("cluster", "machine", "mlx-ring", "authority", "address", box=None, pad_edge=False)
    for head in found:
        announced = head.announcement
        first, *more = map(str, head.joinable or ("none that can be reached",))
        table.add_row(announced.cluster, announced.node, announced.version, announced.authority, first)
        for address in more:
            table.add_row("", "", "", "", address)
    table_console().print(table)


# ---- requests to a head


def ask_head(
    url: str,
    path: str,
    body: Mapping[str, object] | None = None,
    *,
    api_key: str | None = None,
    cacert: Path | None = None,
    timeout_s: float = 60.0,
    hint: str = "start one with `mlx-ring serve`, or give its address with --url",
) -> Any:
    """Return the JSON answer of a running head to GET, or with a body to POST.

    Args:
        url: address of the head.
        path: path of the route.
        body: fields to send as JSON.
        api_key: key of the server; that of the settings by default.
        cacert: file of a certificate to trust.
        timeout_s: time to wait for the answer.
        hint: what to do if no head answers.

    Raises:
        ConfigError: no head answers there.
        RequestError: it refuses the request.
    """
    import httpx  # slow to import, and most commands do without it

    given = _connection(api_key, cacert)
    try:
        answer = httpx.request(
            "GET" if body is None else "POST", _address(url, path), json=body, timeout=timeout_s, **given
        )
        reply: Any = answer.json()
        if answer.is_error:
            raise RequestError(_refusal(url, answer.status_code, reply, had_key=bool(given["headers"])))
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            distrust(error, url) or f"No head answers at {url} ({_reason(error)}): {hint}."
        ) from error
    return reply


def _refusal(url: str, status: int, reply: Any, *, had_key: bool) -> str:
    if status == HTTPStatus.UNAUTHORIZED:
        key = "another API key" if had_key else "an API key"
        return f"The head at {url} asks for {key}: give it with --api-key, or set MLX_RING_API_KEY."
    return f"The head at {url} refuses: {reply['error']['message']}"


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
    given = _connection(api_key, cacert)
    try:
        with httpx.stream("POST", _address(url, "/models/pull"), json=body, timeout=60.0, **given) as answer:
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
    return without_number(str(error)) or type(error).__name__


def _other_program(url: str) -> str:
    return f"No head answers at {url} ({_ANOTHER}): start one with `mlx-ring serve`, or give its address with --url."


def _address(url: str, path: str) -> str:
    return plain_url(f"{url.rstrip('/')}{path}")


def _connection(api_key: str | None, cacert: Path | None) -> Mapping[str, Any]:
    """Return what httpx needs for a request to a head."""
    settings = load_settings({"api_key": api_key})
    key = key_to_send(settings)
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return {"headers": headers, "trust_env": False, "verify": trust(cacert, settings.ssl_certfile)}


def key_to_send(settings: Settings) -> str | None:
    """Return the key that a request carries: the first one of the settings; None without any.

    Raises:
        ConfigError: an HTTP header cannot carry it.
    """
    return checked_key(settings.api_key[0] if settings.api_key else None)


def checked_key(key: str | None) -> str | None:
    """Return a key that an HTTP header can carry, or None as it is.

    Raises:
        ConfigError: an HTTP header cannot carry it.
    """
    if key is not None and not (key.isascii() and key.isprintable()):
        raise ConfigError(
            "--api-key must be printable ASCII characters, as MLX_RING_API_KEY too: an HTTP header carries no others."
        )
    return key


@dataclass(frozen=True, slots=True)
class ServedNames:
    """Names and state of a model that a head serves."""

    names: frozenset[str]
    is_loaded: bool
    """False if it is unloaded: its next request loads it."""


def names_at(
    url: str, *, api_key: str | None = None, cacert: Path | None = None
) -> Mapping[str, ServedNames]:
    """Return the models that a head serves, by their ids.

    Raises:
        ConfigError: no head answers there soon.
        RequestError: it refuses.
    """
    listed = ask_head(url, "/v1/models", api_key=api_key, cacert=cacert, timeout_s=QUICK_ANSWER_S)
    try:
        return {
            str(each["id"]): ServedNames(
                frozenset((each["id"], *each.get("aliases", ()))), each.get("state") != "unloaded"
            )
            for each in listed["data"]
        }
    except (LookupError, TypeError, AttributeError) as error:
        raise ConfigError(_other_program(url)) from error


def name_for(url: str, model: str) -> str:
    """Return the name of a model for a head: the absolute path of a folder or file, if the head runs on this machine.

    It runs in another working folder.
    """
    from mlx_ring.models.model_source import builtin_names  # most commands do without it

    if not model or not is_loopback(urlsplit(url).hostname or "") or model in builtin_names():
        return model
    with contextlib.suppress(OSError, RuntimeError):  # too long for a path, or the home of an unknown user
        path = Path(model).expanduser()
        return str(path.absolute()) if path.exists() else model
    return model


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
    """Return a sentence about an untrusted certificate; None for any other error."""
    _, found, why = str(error).partition("CERTIFICATE_VERIFY_FAILED] certificate verify failed: ")
    if not found:
        return None
    return (
        f"The certificate of {url} is not trusted here: {why.partition(' (_ssl')[0]}. "
        "Give the file of its authority, or of the certificate itself, with --cacert FILE."
    )
