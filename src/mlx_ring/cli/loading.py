"""`mlx-ring models load` and `unload`: what a running server holds in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, cast

import typer

from mlx_ring.cli.trust import CACERT, distrust, trust
from mlx_ring.core.errors import NotReady, RequestError
from mlx_ring.core.settings_sources import load_settings

_URL = typer.Option(help="Where the server is.")
_KEY = typer.Option(metavar="KEY", help="Where the server asks for one; MLX_RING_API_KEY otherwise.")
_ANSWER_WAIT_S = 24 * 3600.0
"""A model may have to be fetched first; Ctrl-C ends the wait and not the load."""


def load(
    model: Annotated[
        str, typer.Argument(help="As serve takes it: a built-in name, a folder there, a hub id.")
    ],
    url: Annotated[str, _URL] = "http://127.0.0.1:8100",
    api_key: Annotated[str | None, _KEY] = None,
    cacert: Annotated[Path | None, CACERT] = None,
) -> None:
    """Load a model on a running server, which serves it from now on."""
    loaded = _post(url, "/models/load", {"model": model}, api_key, cacert)
    print(f"{loaded['id']} is loaded.")


def unload(
    model: Annotated[str, typer.Argument(help="Its name, as the server lists it.")],
    url: Annotated[str, _URL] = "http://127.0.0.1:8100",
    api_key: Annotated[str | None, _KEY] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Also while it answers requests, which end with an error.")
    ] = False,
    cacert: Annotated[Path | None, CACERT] = None,
) -> None:
    """Free what a model holds on a running server. It is loaded again when it is asked for."""
    unloaded = _post(url, "/models/unload", {"model": model, "force": force}, api_key, cacert)
    print(f"{unloaded['id']} is unloaded.")


def _post(
    url: str, path: str, body: dict[str, object], api_key: str | None, cacert: Path | None
) -> dict[str, object]:
    import httpx  # noqa: PLC0415 - other commands do without it

    settings = load_settings({"api_key": api_key})
    headers = {"Authorization": f"Bearer {settings.api_key[0]}"} if settings.api_key else {}
    try:
        answer = httpx.post(
            f"{url.rstrip('/')}{path}",
            json=body,
            headers=headers,
            timeout=_ANSWER_WAIT_S,
            trust_env=False,
            verify=trust(cacert, settings.ssl_certfile),
        )
        told = cast("dict[str, Any]", answer.json())
        if answer.is_error:
            raise RequestError(str(told["error"]["message"]))
        return {"id": told["id"]}
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
        raise NotReady(
            distrust(error, url) or f"Nothing answers at {url} as a server of ours does: {error}."
        ) from error
