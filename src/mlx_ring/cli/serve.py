"""`mlx-ring serve`: settings from flags, progress while loading, and how to talk to what serves.

`mlx-ring serve` as `mlx.launch` starts it: the process of rank 0 serves, and those of the others are parents of its workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from mlx_ring.agent.lending import lend, lent_at
from mlx_ring.core.environment import let_grpc_speak
from mlx_ring.core.errors import ConfigError
from mlx_ring.core.logs import configure_logging
from mlx_ring.core.trace_export import check_exporter
from mlx_ring.host.addresses import local_url
from mlx_ring.host.machine import listen, node_name
from mlx_ring.host.running import recorded
from mlx_ring.settings.config import Settings, flag_name, state_folder
from mlx_ring.settings.launched import Launch, read_launch
from mlx_ring.settings.named_group import with_named_group
from mlx_ring.settings.old_names import ACCESS_LOG_FLAG, PREFIX_CACHING_FLAG, VLLM_FLAGS
from mlx_ring.settings.rank_settings import check_link, check_ranks
from mlx_ring.settings.settings_sources import allowed_values, load_settings

_CHOICES = (
    "dtype",
    "strategy",
    "aim",
    "log_level",
    "access_log",
    "log_format",
    "blas",
    "prefix_cache",
    "kv_bits",
    "link",
    "backend",
    "link_compression",
    "pooling",
)
_METAVARS = dict.fromkeys(("log_dir", "run_dir", "state_dir"), "DIR") | {
    "host": "ADDRESS",
    "cluster_host": "ADDRESS",
    "trusted_interface": "NAME,...",
    "strategy": "NAME",
    "aim": "NAME",
    "more_models": "NAME,...",
    "model_memory": "SIZE",
    "memory_utilization": "SHARE",
    "memory_limit": "SIZE",
    "proportions": "A,B",
    "tp_shares": "A,B",
    "dtype": "TYPE",
    "served_model_name": "NAME,...",
    "api_key": "KEY,...",
    "api_key_file": "FILE",
    "allowed_hosts": "NAME,...",
    "allowed_origins": "URL,...",
    "log_level": "LEVEL",
    "log_format": "FORMAT",
    "otlp_traces_endpoint": "URL",
    "blas": "MODE",
    "prefix_cache": "MODE",
    "kv_cache_memory": "SIZE",
    "weights_limit": "SIZE",
    "kv_bits": "BITS",
    "pooling": "KIND",
    "link": "KIND",
    "backend": "NAME",
    "hostfile": "FILE",
    "link_compression": "MODE",
    "request_timeout_s": "SECONDS",
    "client_timeout_s": "SECONDS",
    "http_timeout_keep_alive": "SECONDS",
    "shutdown_timeout_s": "SECONDS",
    "ssl_certfile": "FILE",
    "ssl_keyfile": "FILE",
    "ssl_keyfile_password": "PASSWORD",
    "access_log": "MODE",
    "step_deadline_s": "SECONDS",
    "model_load_timeout": "SECONDS",
}
_CONFIG = typer.Option(
    metavar="FILE", help="YAML or JSON file of settings; its keys are the names of these flags."
)

_PREFIX_CACHING = typer.Option(
    f"{PREFIX_CACHING_FLAG}/--no-{PREFIX_CACHING_FLAG[2:]}",
    " /--no-prefix-cache",
    help="The same as --prefix-cache on or off.",
    show_default=False,
)
_NO_ACCESS_LOG = typer.Option(ACCESS_LOG_FLAG, help="The same as --access-log off.", show_default=False)


_UNINVITING = typer.Option(
    "--no-join-lines",
    hidden=True,
    help="Others are enrolled by whoever started this: make no token for them.",
)


def setting(name: str) -> Any:
    """The flag of a field of `Settings`. The model checks its value, so that every source gives the same sentence."""
    field = Settings.model_fields[name]
    choices = f" ({allowed_values(field)})" if name in _CHOICES else ""
    default = "" if field.default in (None, ()) else f" [default: {field.default}]"
    return typer.Option(
        flag_name(name),
        *VLLM_FLAGS.get(name, ()),
        help=f"{field.description}{choices}{default}".replace("[", "\\["),
        metavar=_METAVARS.get(name, "N"),
        show_default=False,
    )


def serve(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL]...",
            help=f"{Settings.model_fields['model'].description} Several are served side by side.",
        ),
    ] = None,
    *,
    config: Annotated[Path | None, _CONFIG] = None,
    more_models: Annotated[str | None, setting("more_models")] = None,
    model_memory: Annotated[str | None, setting("model_memory")] = None,
    replicas: Annotated[str | None, setting("replicas")] = None,
    aim: Annotated[str | None, setting("aim")] = None,
    stages: Annotated[str | None, setting("stages")] = None,
    tp: Annotated[str | None, setting("tp")] = None,
    tp_shares: Annotated[str | None, setting("tp_shares")] = None,
    nodes: Annotated[str | None, setting("nodes")] = None,
    strategy: Annotated[str | None, setting("strategy")] = None,
    proportions: Annotated[str | None, setting("proportions")] = None,
    memory_utilization: Annotated[str | None, setting("memory_utilization")] = None,
    memory_limit: Annotated[str | None, setting("memory_limit")] = None,
    weights_limit: Annotated[str | None, setting("weights_limit")] = None,
    cluster_host: Annotated[str | None, setting("cluster_host")] = None,
    cluster_port: Annotated[str | None, setting("cluster_port")] = None,
    trusted_interface: Annotated[str | None, setting("trusted_interface")] = None,
    host: Annotated[str | None, setting("host")] = None,
    port: Annotated[str | None, setting("port")] = None,
    dtype: Annotated[str | None, setting("dtype")] = None,
    served_model_name: Annotated[str | None, setting("served_model_name")] = None,
    max_model_len: Annotated[str | None, setting("max_model_len")] = None,
    default_max_tokens: Annotated[str | None, setting("default_max_tokens")] = None,
    max_num_seqs: Annotated[str | None, setting("max_num_seqs")] = None,
    max_waiting: Annotated[str | None, setting("max_waiting")] = None,
    prefill_chunk: Annotated[str | None, setting("prefill_chunk")] = None,
    max_itl_ratio: Annotated[str | None, setting("max_itl_ratio")] = None,
    pooling: Annotated[str | None, setting("pooling")] = None,
    draft_tokens: Annotated[str | None, setting("draft_tokens")] = None,
    prefix_cache: Annotated[str | None, setting("prefix_cache")] = None,
    prefix_caching: Annotated[bool | None, _PREFIX_CACHING] = None,
    kv_cache_memory: Annotated[str | None, setting("kv_cache_memory")] = None,
    kv_bits: Annotated[str | None, setting("kv_bits")] = None,
    link_compression: Annotated[str | None, setting("link_compression")] = None,
    link: Annotated[str | None, setting("link")] = None,
    backend: Annotated[str | None, setting("backend")] = None,
    hostfile: Annotated[str | None, setting("hostfile")] = None,
    request_timeout_s: Annotated[str | None, setting("request_timeout_s")] = None,
    step_deadline_s: Annotated[str | None, setting("step_deadline_s")] = None,
    max_request_mb: Annotated[str | None, setting("max_request_mb")] = None,
    max_bodies_mb: Annotated[str | None, setting("max_bodies_mb")] = None,
    client_timeout_s: Annotated[str | None, setting("client_timeout_s")] = None,
    http_timeout_keep_alive: Annotated[str | None, setting("http_timeout_keep_alive")] = None,
    max_connections: Annotated[str | None, setting("max_connections")] = None,
    shutdown_timeout_s: Annotated[str | None, setting("shutdown_timeout_s")] = None,
    ssl_certfile: Annotated[str | None, setting("ssl_certfile")] = None,
    ssl_keyfile: Annotated[str | None, setting("ssl_keyfile")] = None,
    ssl_keyfile_password: Annotated[str | None, setting("ssl_keyfile_password")] = None,
    allowed_hosts: Annotated[str | None, setting("allowed_hosts")] = None,
    allowed_origins: Annotated[str | None, setting("allowed_origins")] = None,
    api_key: Annotated[str | None, setting("api_key")] = None,
    api_key_file: Annotated[str | None, setting("api_key_file")] = None,
    log_level: Annotated[str | None, setting("log_level")] = None,
    access_log: Annotated[str | None, setting("access_log")] = None,
    no_access_log: Annotated[bool, _NO_ACCESS_LOG] = False,
    log_format: Annotated[str | None, setting("log_format")] = None,
    log_dir: Annotated[str | None, setting("log_dir")] = None,
    log_stderr: Annotated[str | None, setting("log_stderr")] = None,
    otlp_traces_endpoint: Annotated[str | None, setting("otlp_traces_endpoint")] = None,
    run_dir: Annotated[str | None, setting("run_dir")] = None,
    state_dir: Annotated[str | None, setting("state_dir")] = None,
    blas: Annotated[str | None, setting("blas")] = None,
    blas_threads: Annotated[str | None, setting("blas_threads")] = None,
    model_load_timeout: Annotated[str | None, setting("model_load_timeout")] = None,
    file_descriptor_limit: Annotated[str | None, setting("file_descriptor_limit")] = None,
    no_join_lines: Annotated[bool, _UNINVITING] = False,
) -> None:
    """Serve one model or several. Without arguments: the built-in demo, on port 8100.

    Every flag may also be given as MLX_RING_<NAME> in the environment or in .env, or in the file of --config;
    a flag wins over the environment, that over .env, and that over the file.
    """
    flags: dict[str, object] = {
        name: value
        for name, value in locals().items()
        if name not in ("config", "prefix_caching", "no_access_log", "models", "no_join_lines")
    }
    flags |= _named(models or [], more_models)
    if prefix_caching is not None:
        flags["prefix_cache"] = _one_switch("prefix-cache", prefix_cache, "on" if prefix_caching else "off")
    if no_access_log:
        flags["access_log"] = _one_switch("access-log", access_log, "off")
    settings = with_named_group(load_settings(flags, config=config))
    _check(settings)
    launch = read_launch()
    if launch is not None and launch.rank:
        from mlx_ring.cli.serve import lend_to_first  # brings asyncio along

        lend_to_first(settings, launch)
        return
    tls = _tls(settings)
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
    )
    let_grpc_speak()
    from mlx_ring.rpc.tls.handshakes import log_refused_handshakes  # brings gRPC along

    # With one machine nobody is refused; what else gRPC writes is kept from the terminal.
    log_refused_handshakes()
    with (
        _leading(launch),
        recorded(state_folder(settings), "head", _url(listener, tls), settings.shutdown_timeout_s),
    ):
        _run(settings, listener, tls, invites=not no_join_lines)
    _leave_threads()


def _leave_threads() -> None:
    """End without those that still encode a text for somebody who has been told that the server ends: Python would wait for them."""
    if any(not each.daemon for each in threading.enumerate() if each is not threading.main_thread()):
        logging.shutdown()
        sys.stdout.flush()
        os._exit(0)


def _leading(launch: Launch | None) -> contextlib.AbstractContextManager[None]:
    """The processes that mlx.launch has started beside this one live as long as this does."""
    if launch is None:
        return contextlib.nullcontext()
    from mlx_ring.cli.serve import serving_as_first  # brings asyncio along

    return serving_as_first(launch)


def _check(settings: Settings) -> None:
    """Raises `ConfigError` for settings that do not go together."""
    check_link(settings)
    check_ranks(settings)
    check_exporter(settings.otlp_traces_endpoint)


def _tls(settings: Settings) -> ssl.SSLContext | None:
    if not (settings.ssl_certfile or settings.ssl_keyfile or settings.ssl_keyfile_password):
        return None
    from mlx_ring.cli.https import server_tls  # reads certificates, which few have

    return server_tls(settings)


def _url(listener: socket.socket, tls: ssl.SSLContext | None) -> str:
    return local_url(*listener.getsockname()[:2], scheme="http" if tls is None else "https")


def _run(settings: Settings, listener: socket.socket, tls: ssl.SSLContext | None, *, invites: bool) -> None:
    from mlx_ring.head.served_model import prepare_models  # needs none of what follows

    served = prepare_models(settings)
    # The API's libraries take a second to come in: what is wrong above is told before.
    from mlx_ring.cli.startup import Telling
    from mlx_ring.head.head import Head

    async def run() -> None:
        with Telling(invites=invites, lasting=settings.log_stderr == "on") as audience:
            await Head(settings, served, listener, audience, tls).run()

    asyncio.run(run())


def _named(models: Sequence[str], more: str | None) -> dict[str, object]:
    """The settings that models named without a flag make."""
    if not models:
        return {}
    first, *others = models
    if others and more is not None:
        raise ConfigError(
            f"--more-models is {more}, and {' '.join(others)} was given too; name them in one of both ways."
        )
    named: dict[str, object] = {"model": first}
    return named | ({"more_models": ",".join(others)} if others else {})


def _one_switch(flag: str, given: str | None, switch: str) -> str:
    """A switch's value, given in one way or in both alike."""
    if given not in (None, switch):
        raise ConfigError(f"--{flag} is {given}, and another flag switches it {switch}; give one of them.")
    return switch


_LOOK_S = 0.1


@contextlib.contextmanager
def serving_as_first(launch: Launch) -> Generator[None]:
    """While it lasts, the processes of the other ranks go on: each holds a connection, which ends with this process."""
    place = launch.meeting_place
    try:
        with socket.socket(socket.AF_UNIX) as held:
            held.bind(str(place / "head.sock"))
            held.listen(launch.size)
            yield
    finally:
        shutil.rmtree(place, ignore_errors=True)


def lend_to_first(settings: Settings, launch: Launch) -> None:
    """Be a parent for the worker of this rank, until the server ends or SIGTERM comes."""
    configure_logging(
        process=f"rank-{launch.rank}",
        node=node_name(),
        rank=launch.rank,
        level=settings.log_level,
        log_dir=settings.log_dir,
        to_stderr=settings.log_stderr == "on",
        log_format=settings.log_format,
    )
    # Ctrl-C in the terminal comes to all of them; the server ends its workers itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(_lend(launch))


async def _lend(launch: Launch) -> None:
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
    """Its process, or who started all of them before it was there."""
    parent = os.getppid()
    while os.getppid() == parent:
        with contextlib.suppress(OSError):
            reader, _ = await asyncio.open_unix_connection(address)
            with contextlib.suppress(ConnectionError):
                await reader.read()
            return
        await asyncio.sleep(_LOOK_S)
