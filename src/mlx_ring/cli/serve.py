"""`mlx-ring serve`: read the settings, load the models, and serve them until Ctrl-C or SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
import ssl
import threading
from collections.abc import Generator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from mlx_ring.cli.flags import ALL_SETTINGS, with_settings
from mlx_ring.core.environment import enable_grpc_logs
from mlx_ring.core.errors import ConfigError
from mlx_ring.core.folders import state_folder
from mlx_ring.core.lean_imports import import_bare, importing
from mlx_ring.core.logs import configure_logging
from mlx_ring.core.traces import check_exporter
from mlx_ring.host.addresses import listening_url
from mlx_ring.host.machine import listen, node_name
from mlx_ring.host.process import exit_now, unblocked_output
from mlx_ring.host.running import kept_fresh, recorded
from mlx_ring.models.model_source import must_be_fetched
from mlx_ring.settings.config import Settings
from mlx_ring.settings.hostfile import Launch, read_launch
from mlx_ring.settings.rank_settings import check_link, check_ranks, with_named_group
from mlx_ring.settings.settings_sources import load_settings

log = logging.getLogger(__name__)

_LOOK_S = 0.1
_CONFIG = typer.Option(metavar="FILE", help="YAML or JSON file of settings; keys are the flags' names.")
_NO_JOIN_LINES = typer.Option(
    "--no-join-lines", hidden=True, help="Create no join token, because the caller enrols the other machines."
)


@with_settings(ALL_SETTINGS)
def serve(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL",
            help=f"{Settings.model_fields['model'].description} Give several to serve them together.",
        ),
    ] = None,
    *,
    config: Annotated[Path | None, _CONFIG] = None,
    no_join_lines: Annotated[bool, _NO_JOIN_LINES] = False,
    flags: dict[str, object],
) -> None:
    """Serve one or more models over HTTP. Without arguments: the built-in demo model, on port 8100.

    Each flag can also be set as MLX_RING_<NAME> in the environment or in .env, or in the --config file. Flags take
    precedence over the environment, the environment over .env, and .env over the file.
    """
    flags |= model_settings(models or [], flags["more_models"])
    settings = with_named_group(load_settings(flags, config=config))
    _check(settings)
    launch = read_launch()
    if launch is not None and launch.rank:
        _lend_to_first(settings, launch)
        return
    tls = server_tls(settings)
    listener = listen(settings.host, settings.port)
    configure_logging(
        process="head",
        node=node_name(),
        rank=None,
        level=settings.log_level,
        log_dir=settings.log_dir,
        to_stderr=settings.log_stderr == "on",
        log_format=settings.log_format,
        keeps_lines=True,
        is_for_people=True,
    )
    enable_grpc_logs()
    from mlx_ring.rpc.tls.handshakes import log_refused_handshakes  # imports gRPC, which is slow

    # A single machine refuses no peers, but this also keeps gRPC's own messages off the terminal.
    log_refused_handshakes()
    with (
        unblocked_output(),
        listener,
        _leading(launch),
        recorded(state_folder(settings.state_dir), "head", _url(listener, tls), settings.shutdown_timeout_s),
    ):
        _run(settings, listener, tls, invites=not no_join_lines)
    _leave_threads()


def _leave_threads() -> None:
    """Exit without waiting for threads that still encode text for clients that are already refused."""
    if any(not each.daemon for each in threading.enumerate() if each is not threading.main_thread()):
        logging.shutdown()
        exit_now(0)


def _leading(launch: Launch | None) -> contextlib.AbstractContextManager[None]:
    """Keep the processes that mlx.launch started beside this one for as long as this one."""
    if launch is None:
        return contextlib.nullcontext()
    return _serving_as_first(launch)


def _check(settings: Settings) -> None:
    """Raise `ConfigError` for settings that contradict each other."""
    check_link(settings)
    check_ranks(settings)
    check_exporter(settings.otlp_traces_endpoint)


def _url(listener: socket.socket, tls: ssl.SSLContext | None) -> str:
    return listening_url(listener, "http" if tls is None else "https")


def _run(settings: Settings, listener: socket.socket, tls: ssl.SSLContext | None, *, invites: bool) -> None:
    from mlx_ring.head.served_model import prepare_models  # before the slow imports below

    for name in (settings.model, *settings.more_models):
        if must_be_fetched(name):
            from mlx_ring.cli.local_models import fetch_here  # imports what only downloads need

            fetch_here(name, must_fit=settings.nodes == 1)
    served = prepare_models(settings)
    # The API's libraries take a second to import: report mistakes before.
    import_bare("uvicorn")
    with importing():
        from mlx_ring.cli.startup import StartupMessages
        from mlx_ring.head.head import Head

    async def run() -> None:
        with StartupMessages(invites=invites, lasting=settings.log_stderr == "on") as audience:
            await Head(settings, served, listener, audience, tls).run()

    asyncio.run(run())


def model_settings(models: Sequence[str], more: object) -> dict[str, object]:
    """Return the settings that models named without a flag stand for."""
    if not models:
        return {}
    first, *others = models
    if others and more is not None:
        raise ConfigError(
            f"--more-models is {more}, and {' '.join(others)} was given too: use one of the two."
        )
    named: dict[str, object] = {"model": first}
    return named | ({"more_models": ",".join(others)} if others else {})


# ---- under mlx.launch: rank 0 serves; the other processes start and keep its workers


@contextlib.contextmanager
def _serving_as_first(launch: Launch) -> Generator[None]:
    """Keep the processes of the other ranks running: each holds a connection that ends with this process."""
    place = launch.meeting_place
    try:
        with kept_fresh(place), socket.socket(socket.AF_UNIX) as held:
            held.bind(str(place / "head.sock"))
            held.listen(launch.size)
            yield
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _lend_to_first(settings: Settings, launch: Launch) -> None:
    """Be the parent of this rank's worker until the server ends or SIGTERM arrives."""
    configure_logging(
        process=f"rank-{launch.rank}",
        node=node_name(),
        rank=launch.rank,
        level=settings.log_level,
        log_dir=settings.log_dir,
        to_stderr=settings.log_stderr == "on",
        log_format=settings.log_format,
    )
    # Ctrl-C in the terminal reaches all processes, and the server ends its workers itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(_lend(launch))


async def _lend(launch: Launch) -> None:
    from mlx_ring.agent.lending import lend, lent_at  # slow to import, and rarely needed

    end = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, end.set)
    place = launch.meeting_place
    lending = asyncio.create_task(lend(lent_at(place, launch.rank), end), name="lending")
    watching = asyncio.create_task(_until_the_server_ends(str(place / "head.sock")), name="head")
    await asyncio.wait((lending, watching), return_when=asyncio.FIRST_COMPLETED)
    end.set()
    watching.cancel()
    await lending


async def _until_the_server_ends(address: str) -> None:
    """Wait for the end of the server, or of the launcher before the server listens."""
    parent = os.getppid()
    while os.getppid() == parent:
        with contextlib.suppress(OSError):
            reader, _ = await asyncio.open_unix_connection(address)
            with contextlib.suppress(ConnectionError):
                await reader.read()
            return
        await asyncio.sleep(_LOOK_S)


# ---- HTTPS


def server_tls(settings: Settings) -> ssl.SSLContext | None:
    """Return the TLS context of the HTTP server; None without a certificate.

    Raises:
        ConfigError: a file is missing, is of another kind, or does not match the other.
    """
    certificate, key = settings.ssl_certfile, settings.ssl_keyfile
    if certificate is None:
        for name in ("ssl_keyfile", "ssl_keyfile_password"):
            if getattr(settings, name):
                raise ConfigError(f"--{name.replace('_', '-')} is given without --ssl-certfile; give both.")
        return None
    _check_readable("--ssl-certfile", certificate)
    if key is not None:
        _check_readable("--ssl-keyfile", key)
    _check_certificate(certificate)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certificate, key, _password(settings))
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(_what_is_wrong(error, settings)) from error
    return context


def _password(settings: Settings) -> str:
    """Return the password, or an empty one, which unlocks no key: OpenSSL would ask at the terminal without any."""
    return settings.ssl_keyfile_password or ""


def _check_readable(flag: str, path: Path) -> None:
    try:
        path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{flag} is {path}, which cannot be read: {error.strerror}.") from error


def _check_certificate(path: Path) -> None:
    """Check that the file holds a certificate. An expired one only logs a warning: its owner may need the server to renew it."""
    from cryptography import x509  # few need it

    try:
        first = x509.load_pem_x509_certificates(path.read_bytes())[0]
    except ValueError:
        raise ConfigError(
            f"--ssl-certfile is {path}, which holds no certificate in PEM form "
            "(a text that contains -----BEGIN CERTIFICATE-----)."
        ) from None
    now = datetime.now(UTC)
    if not first.not_valid_before_utc <= now <= first.not_valid_after_utc:
        log.warning(
            "The certificate in %s is valid from %s to %s only: clients will refuse it.",
            path,
            first.not_valid_before_utc.date(),
            first.not_valid_after_utc.date(),
        )


def _what_is_wrong(error: Exception, settings: Settings) -> str:
    if settings.ssl_keyfile is None:
        where, path = (
            f"--ssl-certfile is {settings.ssl_certfile}, without --ssl-keyfile",
            settings.ssl_certfile,
        )
    else:
        where, path = f"--ssl-keyfile is {settings.ssl_keyfile}", settings.ssl_keyfile
    reason = getattr(error, "reason", None)
    if reason == "KEY_VALUES_MISMATCH":
        return f"{where}, whose key does not match the certificate in {settings.ssl_certfile}."
    if path is not None and b"ENCRYPTED" in path.read_bytes():
        wanted = "another password" if settings.ssl_keyfile_password else "a password"
        return f"{where}, whose key needs {wanted}: give it as MLX_RING_SSL_KEYFILE_PASSWORD."
    return f"{where}, which holds no private key in PEM form that OpenSSL accepts ({reason or error})."
