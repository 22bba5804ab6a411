"""Settings: one model that checks each value, and what they mean. `settings_sources.py` says where values come from.

Of what these two leave, this module and `environment.py` alone read the environment.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Annotated, Literal, cast
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationInfo,
    field_validator,
)
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from mlx_ring.core.errors import ConfigError
from mlx_ring.host.machine import SOCKET_PATH_LIMIT
from mlx_ring.settings.old_names import strategy_of_today

ENVIRONMENT_PREFIX = "MLX_RING_"


def _split(value: object) -> object:
    """`a,b` from a flag or a variable, or as vLLM has lists: `["a", "b"]`; a file may hold a list."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = json.loads(value)
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


def _yaml_switch(value: object) -> object:
    """An unquoted `on` or `off` is a truth value in YAML."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


def _bits(value: object) -> object:
    """A bare number from a file counts as its digits."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else _yaml_switch(value)


_UNITS = (
    {"": 1, "b": 1}
    | {f"{letter}b": 1000**power for power, letter in enumerate("kmgt", start=1)}
    | {f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", start=1)}
)


def _bytes(value: object) -> object:
    """`2GiB`, `500 MB` or a bare number, in bytes."""
    if not isinstance(value, str):
        return value
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", value.strip().lower())
    if found is None or found[2] not in _UNITS:
        raise ValueError
    return int(float(found[1]) * _UNITS[found[2]])


def _strategy(value: object) -> object:
    return strategy_of_today(value) if isinstance(value, str) else value


_SHARE = re.compile(r"(?:[a-z0-9][a-z0-9-]*=)?(?:\d+(?:\.\d*)?|\.\d+)")


def _shares(value: object) -> object:
    """`0.7,0.3` or `mini-7f3a=0.7,studio-1b2c=0.3`; a file may hold a list of numbers."""
    if isinstance(value, str):
        value = value.strip("[] ").split(",")
    if not isinstance(value, (list, tuple)):
        raise ValueError  # noqa: TRY004 - what pydantic takes for a bad value
    parts = tuple(str(part).strip() for part in cast("list[object]", value))
    if not all(map(_SHARE.fullmatch, parts)):
        raise ValueError
    return parts


def _http_address(value: str) -> str:
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError
    return value


def _short_enough(path: Path | None) -> Path | None:
    if path is not None and len(os.fsencode(path.absolute())) > SOCKET_PATH_LIMIT - 40:
        raise ValueError
    return path


_SWITCHES = ("prefix_cache", "log_stderr", "access_log")
Names = Annotated[tuple[str, ...], BeforeValidator(_split)]


class Settings(BaseSettings):
    """What the person who starts a server decides. A field's description is its line in `--help`."""

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", env_prefix=ENVIRONMENT_PREFIX, protected_namespaces=()
    )

    model: Annotated[str, Field(min_length=1)] = Field(
        "demo", description="A built-in model's name, a folder, or a Hugging Face id such as Qwen/Qwen3-0.6B."
    )
    served_model_name: Names = Field(
        (), description="The name that clients see, and others that they may use; the model's own otherwise."
    )
    more_models: Names = Field((), description="Other models to serve beside the first, named alike.")
    model_memory: Annotated[Annotated[int, Field(ge=1 << 20, le=1 << 50)] | None, BeforeValidator(_bytes)] = (
        Field(
            None,
            description="Memory that the weights of all loaded models may take, such as 20GB; the one not asked for longest makes way.",
        )
    )
    replicas: Annotated[int | None, Field(ge=1, le=8)] = Field(
        None,
        description="Instances of each model; one, or with --aim throughput as many as give most.",
    )
    aim: Literal["latency", "throughput"] = Field(
        "latency", description="What plans make best: a single stream's speed, or that of many together."
    )
    stages: Annotated[int, Field(ge=1, le=1024)] = Field(
        1, description="Worker processes to split the layers over."
    )
    tp: Annotated[int, Field(ge=1, le=64)] = Field(
        1, description="Worker processes that share every layer of a stage (tensor parallelism)."
    )
    tp_shares: Annotated[
        tuple[Annotated[float, Field(gt=0, allow_inf_nan=False)], ...], BeforeValidator(_split)
    ] = Field((), description="Parts of every layer by worker of a stage, such as 3,1; all alike otherwise.")
    nodes: Annotated[int, Field(ge=1, le=8)] = Field(
        1, description="Machines to serve with, this one included; more than one wait for `mlx-ring join`."
    )
    cluster_host: Annotated[str, Field(min_length=1)] = Field(
        "[::]", description="Address to listen on for other machines of the cluster."
    )
    trusted_interface: Names = Field(
        (),
        description="Interfaces of this machine, or networks as 10.0.8.0/24, on which MLX's unencrypted collectives may go to other machines.",
    )
    cluster_port: Annotated[int, Field(ge=1, le=65534)] = Field(
        50051, description="Port for other machines of the cluster; the one after it is for those that join."
    )
    strategy: Annotated[
        Literal["auto", "uniform", "memory", "compute", "balanced", "custom", "tensor", "hybrid"],
        BeforeValidator(_strategy),
    ] = Field("auto", description="How layers are shared out among machines; auto is what is fastest.")
    proportions: Annotated[tuple[str, ...], BeforeValidator(_shares)] = Field(
        (),
        description="With the strategy custom: parts of the layers by machine, this one first, or by node as in mini-7f3a=0.7,studio-1b2c=0.3.",
    )
    memory_utilization: Annotated[float, Field(gt=0, le=1)] = Field(
        0.9, description="Share of this machine's memory that may be planned with."
    )
    memory_limit: Annotated[Annotated[int, Field(ge=1 << 20, le=1 << 50)] | None, BeforeValidator(_bytes)] = (
        Field(
            None,
            description="Memory of this machine that plans may count on, such as 16GiB; what is measured otherwise.",
        )
    )
    weights_limit: Annotated[
        Annotated[int, Field(ge=1 << 20, le=1 << 50)] | None, BeforeValidator(_bytes)
    ] = Field(
        None,
        description="Disk that models fetched from other machines may take, such as 100GB; what is free otherwise.",
    )
    host: Annotated[str, Field(min_length=1)] = Field(
        "127.0.0.1", description="Address to listen on; 0.0.0.0 lets other machines in."
    )
    port: Annotated[int, Field(ge=0, le=65535)] = Field(
        8100, description="Port to listen on; 0 takes a free one."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="What to compute in; auto is float32 on a CPU and the model's own on a GPU."
    )
    max_model_len: Annotated[int | None, Field(ge=1, le=1 << 30)] = Field(
        None, description="Most tokens of prompt and answer together; the model's own limit otherwise."
    )
    default_max_tokens: Annotated[int | None, Field(ge=1, le=1 << 30)] = Field(
        None, description="Length of a chat answer that sets no limit; to the end of the context otherwise."
    )
    max_num_seqs: Annotated[int, Field(ge=1, le=4096)] = Field(
        16, description="Requests that are computed at the same time; more wait."
    )
    max_waiting: Annotated[int, Field(ge=0, le=1 << 20)] = Field(
        256, description="Requests that may wait for a place; more are told to come again (429)."
    )
    prefill_chunk: Annotated[int, Field(ge=1, le=65536)] = Field(
        512, description="Most tokens of one prompt in one step; smaller keeps other answers flowing."
    )
    max_itl_ratio: Annotated[float, Field(ge=1.1, le=1000)] = Field(
        2.5,
        description="How many times longer a running answer's next token may take while prompts are read.",
    )
    pooling: Literal["auto", "last", "mean", "cls"] = Field(
        "auto",
        description="Whose hidden states make an embedding: the last token's, the mean of all, or the first's; auto is as the model's folder says.",
    )
    draft_tokens: Annotated[int, Field(ge=0, le=32)] = Field(
        8, description="Most tokens that are guessed from an answer's own text in one step; 0 guesses none."
    )
    prefix_cache: Annotated[Literal["on", "off"], BeforeValidator(_yaml_switch)] = Field(
        "on", description="Keep the KV of ended requests, and begin from it where a prompt begins alike."
    )
    kv_cache_memory: Annotated[
        Annotated[int, Field(ge=1 << 20, le=1 << 50)] | None, BeforeValidator(_bytes)
    ] = Field(
        None,
        description="Memory of each worker's KV cache, such as 2GiB; what the device has left otherwise.",
    )
    kv_bits: Annotated[Literal["off", "8", "4"], BeforeValidator(_bits)] = Field(
        "off", description="Keep keys and values in so many bits: less memory, less exact."
    )
    link_compression: Annotated[Literal["auto", "off"], BeforeValidator(_yaml_switch)] = Field(
        "auto",
        description="Compress activations between machines, without loss, where that is sooner (auto) or never (off).",
    )
    link: Literal["grpc", "ring", "mpi", "jaccl", "nccl", "allreduce"] = Field(
        "grpc",
        description="What carries activations from stage to stage: gRPC, or a collective of MLX's (allreduce is a sum over its ring).",
    )
    backend: Literal["auto", "ring", "mpi", "jaccl", "nccl"] = Field(
        "auto",
        description="MLX's backend for workers that share layers or are linked by collectives; auto is the best that they have.",
    )
    hostfile: Path | None = Field(
        None,
        description="One of MLX's hostfiles: as many workers as it has hosts, which are this machine, at the ports that it names.",
    )
    request_timeout_s: Annotated[float | None, Field(gt=0, le=1_000_000)] = Field(
        None, description="Seconds that a request may take in all; it then ends with an error."
    )
    step_deadline_s: Annotated[float, Field(ge=0, le=86400)] = Field(
        30.0,
        description="Least seconds without progress on a step after which a worker counts as stuck; 0 waits for ever.",
    )
    max_request_mb: Annotated[int, Field(ge=1, le=4096)] = Field(
        16, description="Largest body of a request, in MiB."
    )
    max_bodies_mb: Annotated[int | None, Field(ge=2, le=1 << 20)] = Field(
        None,
        description="Bodies of all requests under way together, in MiB; one client gets half at most. 16 times --max-request-mb otherwise.",
    )
    client_timeout_s: Annotated[float, Field(gt=0, le=86400)] = Field(
        60.0,
        description="Seconds that a client may stall: with a request that does not come, or an answer that it does not read.",
    )
    http_timeout_keep_alive: Annotated[float, Field(gt=0, le=86400)] = Field(
        75.0,
        description="Seconds that a connection stays open between two requests; more than a proxy before it keeps its own.",
    )
    max_connections: Annotated[int, Field(ge=1, le=1 << 20)] = Field(
        1024, description="Connections of clients at a time; for one more the one that is idle longest ends."
    )
    shutdown_timeout_s: Annotated[float, Field(ge=0, le=86400)] = Field(
        30.0,
        description="Seconds that running requests get to finish when the server is told to end; they then end with an error.",
    )
    ssl_certfile: Path | None = Field(
        None,
        description="PEM file of a certificate, with those between it and its authority: HTTPS is served.",
    )
    ssl_keyfile: Path | None = Field(
        None, description="PEM file of the certificate's private key; the certificate's own file otherwise."
    )
    ssl_keyfile_password: Annotated[str | None, Field(min_length=1)] = Field(
        None, repr=False, description="What opens a private key that is locked."
    )
    allowed_hosts: Names = Field(
        (), description="More names that clients may reach this server by; * allows all."
    )
    allowed_origins: Names = Field(
        (), description="Web origins whose pages may use this server; * allows all."
    )
    api_key: Names = Field(
        (), repr=False, description="Keys of which clients must send one; nobody is asked otherwise."
    )
    api_key_file: Path | None = Field(None, description="File of such keys, one in a line.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="How much to log.")
    access_log: Annotated[Literal["on", "off"], BeforeValidator(_yaml_switch)] = Field(
        "on", description="Log a line for each request when it has ended: who, what, status, time, tokens."
    )
    log_format: Literal["text", "json"] = Field(
        "text", description="How log lines are written: for people, or as one JSON object each."
    )
    log_dir: Path = Field(Path("logs"), description="Folder for one log file per process.")
    log_stderr: Annotated[Literal["on", "off"], BeforeValidator(_yaml_switch)] = Field(
        "on", description="Write log lines to stderr too, besides their files."
    )
    otlp_traces_endpoint: Annotated[str, AfterValidator(_http_address)] | None = Field(
        None,
        description="Where traces of requests go by OTLP over HTTP, such as http://localhost:4318; needs mlx-ring[otel].",
    )
    run_dir: Annotated[Path | None, AfterValidator(_short_enough)] = Field(
        None, description="Folder for sockets, at most 63 bytes long; a private temporary one otherwise."
    )
    state_dir: Path | None = Field(
        None,
        description="Folder for the cluster's keys, members and tokens; the user's data folder otherwise.",
    )
    blas: Annotated[Literal["auto", "off"], BeforeValidator(_yaml_switch)] = Field(
        "auto", description="On a CPU, let MLX compute with OpenBLAS (auto) or as it comes (off)."
    )
    blas_threads: Annotated[int, Field(ge=0, le=1024)] = Field(
        0, description="Threads of each worker's BLAS; 0 shares the cores between the stages."
    )
    model_load_timeout: Annotated[float, Field(gt=0, le=86400)] = Field(
        600.0, description="Seconds that loading may take."
    )
    file_descriptor_limit: Annotated[int, Field(ge=256, le=1 << 20)] = Field(
        4096, description="Open files and connections to ask the operating system for."
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """`settings_sources.py` reads the sources itself, to be able to say where a value came from."""
        del settings_cls, env_settings, dotenv_settings, file_secret_settings
        return (init_settings,)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_values(cls, value: object, info: ValidationInfo) -> object:
        # Python takes True for 1, and a file's `port: yes` is a mistake.
        if value is True and info.field_name not in _SWITCHES:
            raise ValueError
        return value


def state_folder(settings: Settings) -> Path:
    """What must outlive a run: the folder of `--state-dir`, else ours in the user's data folder."""
    if settings.state_dir is not None:
        return settings.state_dir
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "mlx-ring"
    given = os.environ.get("XDG_DATA_HOME", "")
    # The standard says that a relative path counts as none.
    return (Path(given) if Path(given).is_absolute() else Path.home() / ".local" / "share") / "mlx-ring"


_BODIES = 16


def bodies_mb(settings: Settings) -> int:
    """What all bodies may hold together, MiB."""
    return settings.max_bodies_mb or _BODIES * settings.max_request_mb


def api_keys(settings: Settings) -> tuple[str, ...]:
    """The keys that were given, and those in the file.

    Raises:
        ConfigError: the file cannot be read, or has none.
    """
    if settings.api_key_file is None:
        return settings.api_key
    try:
        lines = settings.api_key_file.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--api-key-file is {settings.api_key_file}, which cannot be read: {error}."
        ) from error
    keys = tuple(line.strip() for line in lines if line.strip())
    if not keys:
        raise ConfigError(f"--api-key-file is {settings.api_key_file}, which has no key in it.")
    return (*settings.api_key, *keys)


def flag_name(field: str) -> str:
    """The flag of a field of `Settings`."""
    return "--" + field.replace("_", "-")
