"""Settings: one field for each, with its type, bounds, default, help and flag. `settings_sources.py` reads the sources.

Those of models, placement and clusters are in `placement_settings.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field
from pydantic.fields import FieldInfo
from pydantic_settings import SettingsConfigDict

from mlx_ring.core.logs import LogFormat, LogLevel
from mlx_ring.core.types import CpuWeights
from mlx_ring.host.power import KeepAwakeMode
from mlx_ring.rpc.backends import BackendSetting, Link
from mlx_ring.settings.fields import (
    SIZE_TAKES,
    AutoOrOff,
    Blas,
    HttpAddress,
    Keys,
    KvBits,
    Names,
    Size,
    SocketFolder,
    Spare,
    Switch,
    Text,
    flag_name,
    flag_of,
    other_names,
    setting,
)
from mlx_ring.settings.placement_settings import PlacementSettings

ENVIRONMENT_PREFIX = "MLX_RING_"
_SCHEDULING, _KV_CACHE, _LINKS = "Scheduling", "KV cache", "Links between stages"
_HTTP, _SECURITY, _LOGS, _PROCESS = "HTTP server", "Security", "Logs and traces", "Processes"


class Settings(PlacementSettings):
    """Server configuration. Command-line flags, help and the table in docs/configuration.md come from these fields."""

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", env_prefix=ENVIRONMENT_PREFIX, protected_namespaces=()
    )

    max_num_seqs: Annotated[int, Field(ge=1, le=4096)] = setting(
        16, "Maximum requests that run at the same time; further ones are queued.", _SCHEDULING, basic=True
    )
    max_queued_requests: Annotated[int, Field(ge=0, le=1 << 20)] = setting(
        256,
        "Maximum queued requests; further ones are refused with status 429.",
        _SCHEDULING,
        old=("max_waiting",),
    )
    prefill_chunk: Annotated[int | None, Field(ge=1, le=65536)] = setting(
        None,
        "Maximum prompt tokens per step. Smaller chunks disturb running answers less. Default: 512; on GPUs up to 2,048 of a prompt alone, where that takes less than a second.",
        _SCHEDULING,
        aliases=("--max-num-batched-tokens",),
    )
    max_itl_ratio: Annotated[float, Field(ge=1.1, le=1000)] = setting(
        2.5, "Maximum factor by which prefill may slow down the next token of running answers.", _SCHEDULING
    )
    num_speculative_tokens: Annotated[int, Field(ge=0, le=32)] = setting(
        8,
        "Maximum tokens per step of speculative decoding by prompt lookup; 0 disables it.",
        _SCHEDULING,
        old=("draft_tokens",),
    )
    default_max_tokens: Annotated[int | None, Field(ge=1, le=1 << 30)] = setting(
        None,
        "Maximum tokens of a chat answer if its request sets none; the rest of the context by default.",
        _SCHEDULING,
    )
    request_timeout_s: Annotated[float | None, Field(gt=0, le=1_000_000)] = setting(
        None, "Maximum seconds for one request; it then ends with an error.", _SCHEDULING, metavar="SECONDS"
    )
    resume: Switch = setting(
        "on",
        "Continue running answers after the loss of a machine or a worker; off ends them with an error.",
        _SCHEDULING,
        metavar="MODE",
    )
    resume_within_s: Annotated[float, Field(gt=0, le=86400)] = setting(
        300.0,
        "Maximum seconds that an interrupted answer waits to be continued; it then ends with an error.",
        _SCHEDULING,
        metavar="SECONDS",
    )
    step_deadline_s: Annotated[float, Field(ge=0, le=86400)] = setting(
        30.0,
        "Minimum seconds without progress on a step before a worker counts as stuck; 0 disables the check.",
        _SCHEDULING,
        metavar="SECONDS",
    )
    kv_cache_memory: Size = setting(
        None,
        "Memory of each worker's KV cache, such as 2GiB; what the device has left by default.",
        _KV_CACHE,
        metavar="SIZE",
        basic=True,
        takes=SIZE_TAKES,
    )
    kv_bits: KvBits = setting(
        "off", "Quantize keys and values to 8 or 4 bits: less memory, less exact.", _KV_CACHE, metavar="BITS"
    )
    prefix_cache: Switch = setting(
        "on",
        "Keep the KV cache of finished requests and reuse it for prompts with the same prefix.",
        _KV_CACHE,
        metavar="MODE",
        switch_on=("--enable-prefix-caching",),
        switch_off=("--no-enable-prefix-caching", "--no-prefix-cache"),
    )
    kv_disk: Size = setting(
        None,
        "Keep KV of prompts on the disk for restarts, on each machine up to this size, such as 20GiB. It reveals prompts.",
        _KV_CACHE,
        metavar="SIZE",
        takes=SIZE_TAKES,
    )
    kv_disk_dir: Path | None = setting(
        None, "Folder of --kv-disk; `kv` in the state folder by default.", _KV_CACHE, metavar="DIR"
    )
    link: Link = setting(
        "grpc",
        "Transport for activations between stages: gRPC, or an MLX collective (allreduce is a sum over its ring).",
        _LINKS,
        metavar="KIND",
    )
    backend: BackendSetting = setting(
        "auto",
        "MLX backend for tensor parallelism and collective links; auto chooses the best one available.",
        _LINKS,
        metavar="NAME",
    )
    link_step_down: Literal["auto", "implicit", "off"] = setting(
        "implicit",
        "Replace a backend that has hung twice: always (auto), unless --backend names it (implicit), or never (off).",
        _LINKS,
        metavar="MODE",
    )
    link_compression: AutoOrOff = setting(
        "auto",
        "Compress activations between machines without loss, if that is faster (auto) or never (off).",
        _LINKS,
        metavar="MODE",
    )
    hostfile: Path | None = setting(
        None,
        "MLX hostfile: one worker on this machine for each of its hosts, at the ports that it names.",
        _LINKS,
        metavar="FILE",
    )
    host: Text = setting(
        "127.0.0.1",
        "Address to listen on; 0.0.0.0 accepts connections from other machines.",
        _HTTP,
        metavar="ADDRESS",
        basic=True,
    )
    port: Annotated[int, Field(ge=0, le=65535)] = setting(
        8100, "Port to listen on; 0 picks a free port.", _HTTP, basic=True
    )
    max_connections: Annotated[int, Field(ge=1, le=1 << 20)] = setting(
        1024, "Maximum client connections. Beyond it, the connection that is idle longest is closed.", _HTTP
    )
    max_request_mb: Annotated[int, Field(ge=1, le=4096)] = setting(
        16, "Maximum size of a request body, in MiB.", _HTTP
    )
    max_bodies_mb: Annotated[int | None, Field(ge=2, le=1 << 20)] = setting(
        None,
        "Maximum size of all request bodies in progress, in MiB; one client gets at most half. "
        "The default is 16 times --max-request-mb.",
        _HTTP,
    )
    client_timeout_s: Annotated[float, Field(gt=0, le=86400)] = setting(
        60.0,
        "Maximum seconds that a client may stall while it sends a request or reads an answer.",
        _HTTP,
        metavar="SECONDS",
    )
    http_timeout_keep_alive: Annotated[float, Field(gt=0, le=86400)] = setting(
        75.0,
        "Seconds that a connection stays open between requests; set it above the proxy's own value.",
        _HTTP,
        metavar="SECONDS",
        aliases=("--timeout-keep-alive",),
    )
    shutdown_timeout_s: Annotated[float, Field(ge=0, le=86400)] = setting(
        30.0,
        "Seconds for running requests to finish on shutdown; they then end with an error.",
        _HTTP,
        metavar="SECONDS",
        aliases=("--shutdown-timeout",),
    )
    additional_properties: Switch = setting(
        "off",
        "Let objects of answers have properties that their schema does not name; off: only if it allows them itself.",
        _HTTP,
        metavar="MODE",
        switch_on=("--open-schemas",),
    )
    special_tokens_in_chats: Literal["allow", "escape"] = setting(
        "allow", "Special tokens spelled in messages: tokens (allow) or text (escape).", _HTTP, metavar="MODE"
    )
    journal: Size = setting(
        None,
        "Keep the requests and answers of a day on the disk, up to this size, such as 256MiB. Streams and background "
        "responses then survive a restart. It reveals them.",
        _HTTP,
        metavar="SIZE",
        takes=SIZE_TAKES,
    )
    journal_dir: Path | None = setting(
        None, "Folder of --journal; `journal` in the state folder by default.", _HTTP, metavar="DIR"
    )
    api_key: Keys = setting(
        (),
        "Accepted API keys; without any, no authentication.",
        _SECURITY,
        metavar="KEY,...",
        basic=True,
        takes="one key or several, separated by commas",
        secret=True,
    )
    api_key_file: Path | None = setting(
        None, "File of accepted API keys, one per line.", _SECURITY, metavar="FILE", basic=True
    )
    allowed_hosts: Names = setting(
        (),
        "Further host names by which clients may reach this server; * allows all.",
        _SECURITY,
        metavar="NAME,...",
    )
    allowed_origins: Names = setting(
        (), "Web origins whose pages may use this server; * allows all.", _SECURITY, metavar="URL,..."
    )
    ssl_certfile: Path | None = setting(
        None,
        "PEM file of a certificate and its intermediates; enables HTTPS.",
        _SECURITY,
        metavar="FILE",
        basic=True,
    )
    ssl_keyfile: Path | None = setting(
        None, "PEM file of the private key; by default the certificate's file.", _SECURITY, metavar="FILE"
    )
    ssl_keyfile_password: Annotated[str | None, Field(min_length=1)] = setting(
        None, "Password of an encrypted private key.", _SECURITY, metavar="PASSWORD", secret=True
    )
    log_level: LogLevel = setting("info", "Minimum level of log lines.", _LOGS, metavar="LEVEL", basic=True)
    log_format: LogFormat = setting(
        "text", "Format of log lines: text, or one JSON object per line.", _LOGS, metavar="FORMAT"
    )
    log_dir: Path = setting(
        Path(), "Folder for a log file per process; by default in the state folder.", _LOGS, metavar="DIR"
    )
    log_stderr: Switch = setting(
        "on", "Write log lines to stderr too, not only to files.", _LOGS, metavar="MODE"
    )
    access_log: Switch = setting(
        "on",
        "Log a line for each finished request: client, path, status, time, tokens.",
        _LOGS,
        metavar="MODE",
        switch_off=("--disable-uvicorn-access-log",),
    )
    otlp_traces_endpoint: HttpAddress | None = setting(
        None,
        "Send request traces to this OTLP/HTTP endpoint, such as http://localhost:4318. Requires mlx-ring[otel].",
        _LOGS,
        metavar="URL",
        takes="an address that begins with http:// or https://",
    )
    run_dir: SocketFolder = setting(
        None,
        "Folder for sockets, at most 63 bytes long; a private temporary folder by default.",
        _PROCESS,
        metavar="DIR",
        takes="a path of at most 63 bytes",
    )
    state_dir: Path | None = setting(
        None, "Folder for keys, members and tokens; by default in the user's data.", _PROCESS, metavar="DIR"
    )
    blas: Blas = setting(
        "auto",
        "On a CPU: OpenBLAS and native kernels (auto), OpenBLAS (openblas), or MLX's code (off).",
        _PROCESS,
        metavar="NAME",
    )
    cpu_weights: CpuWeights = setting(
        "auto",
        "Quantized weights on CPUs: as they are, as float32 (faster without native kernels), or whichever suits (auto).",
        _PROCESS,
        metavar="NAME",
    )
    blas_threads: Annotated[int, Field(ge=0, le=1024)] = setting(
        0, "Threads of each worker's products; 0 shares the cores among the stages.", _PROCESS
    )
    keep_awake: KeepAwakeMode = setting(
        "auto", "Stay awake to answer: if plugged in (auto), always, or never.", _PROCESS, metavar="MODE"
    )
    min_battery: Annotated[float, Field(ge=0, le=1)] = setting(
        0.1,
        "Share of this machine's battery below which its layers move to others, with `join`; 0: none.",
        _PROCESS,
        metavar="SHARE",
    )
    yielding: Switch = setting(
        "off",
        "Yield while other programs of this machine are busy, it runs on its battery, or its memory is short.",
        _PROCESS,
        metavar="MODE",
        switch_on=("--yield-to-user",),
    )
    spare_worker: Spare = setting(
        "auto",
        "Keep a spare worker process on each machine; auto keeps one that takes at most 1 percent of memory.",
        _PROCESS,
        metavar="MODE",
    )
    file_descriptor_limit: Annotated[int, Field(ge=256, le=1 << 20)] = setting(
        4096, "Open files and connections to request from the operating system.", _PROCESS
    )


OTHER_NAMES = dict(other_names(Settings.model_fields))
"""Field of `Settings` by each other name that a file may use: vLLM's flags, and names of earlier versions."""
OLD_NAMES = {old: name for name, field in Settings.model_fields.items() for old in flag_of(field).old}
"""Field of `Settings` by its name in earlier versions."""
_NOT_SHOWN = ("model", "more_models")


def shown_flags(arguments: Sequence[str], *, shows_folders: bool) -> list[str]:
    """Return the flags of a command line of `serve` with their values, each once, under today's names, without models.

    Keys and passwords become placeholders. URLs keep their scheme, host and port.

    Args:
        arguments: words after the command's name.
        shows_folders: False for readers elsewhere: absolute paths become placeholders too.
    """
    known, alone = _shown_tables()
    shown: dict[str, list[str]] = {}
    rest = iter(arguments)
    for word in rest:
        flag, equals, value = word.partition("=")
        if word in alone:
            shown[word] = [word]
        elif flag in known and known[flag] not in _NOT_SHOWN:
            given = value if equals else next(rest, "")
            name = flag_name(known[flag])
            shown[name] = [
                name,
                _shown_value(Settings.model_fields.get(known[flag]), given, shows_folders=shows_folders),
            ]
    return [word for words in shown.values() for word in words]


@cache
def _shown_tables() -> tuple[dict[str, str], frozenset[str]]:
    """Return the field of each flag with a value, and the flags without one."""
    flags = {name: (field, flag_of(field)) for name, field in Settings.model_fields.items()}
    known = {"--config": "config"} | {
        each: name
        for name, (_, flag) in flags.items()
        for each in (flag_name(name), *flag.aliases, *map(flag_name, flag.old))
    }
    return known, frozenset(
        each for _, flag in flags.values() for each in (*flag.switch_on, *flag.switch_off)
    )


def _shown_value(field: FieldInfo | None, value: str, *, shows_folders: bool) -> str:
    """Return a flag's value for others to read; the flag of a settings file has no field."""
    placeholder = "FILE" if field is None else flag_of(field).metavar.partition(",")[0]
    if field is not None and not field.repr:
        return placeholder
    if "://" in value or placeholder == "URL":
        return ",".join(
            each if each == "*" else _shown_url(each) for each in map(str.strip, value.split(","))
        )
    return placeholder if not shows_folders and value.startswith(("/", "~")) else value


def _shown_url(url: str) -> str:
    """Return the scheme, host and port of a URL, or "URL": all else may hold a secret."""
    with suppress(ValueError):
        parts = urlsplit(url)
        # An "@" after the host ends a password that has one of the characters "/", "?" and "#".
        rest = f"{parts.path}{parts.query}{parts.fragment}"
        if parts.scheme and parts.hostname and parts.port != 0 and "@" not in rest:
            return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
    return "URL"
