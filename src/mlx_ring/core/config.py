"""Settings: one model that checks each value, and what they mean. `settings_sources.py` says where values come from.

Of what these two leave, this is the one module that reads the environment.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Literal, Union, cast, get_args, get_origin

from annotated_types import Ge, Gt, Le
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationInfo,
    field_validator,
)
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from mlx_ring.core.backends import BACKENDS
from mlx_ring.core.errors import ConfigError
from mlx_ring.core.old_names import strategy_of_today

ENVIRONMENT_PREFIX = "MLX_RING_"
_OUR_GRPC_LEVEL = "info"
"""In small letters, which gRPC reads alike and nobody else writes: so it is known for ours."""
SOCKET_PATH_LIMIT = 103
"""Bytes of a Unix socket's path: 104 with its end on macOS, 108 on Linux."""


def _split(value: object) -> object:
    """`a,b` from a flag or a variable; a file may hold a list."""
    return (
        tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value
    )


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


def _short_enough(path: Path | None) -> Path | None:
    if path is not None and len(os.fsencode(path.absolute())) > SOCKET_PATH_LIMIT - 40:
        raise ValueError
    return path


_SWITCHES = ("prefix_cache", "log_stderr")
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
    log_dir: Path = Field(Path("logs"), description="Folder for one log file per process.")
    log_stderr: Annotated[Literal["on", "off"], BeforeValidator(_yaml_switch)] = Field(
        "on", description="Write log lines to stderr too, besides their files."
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


def quieten_grpc() -> None:
    """Keep gRPC's C library from writing its own untagged lines, in this process and in its children.

    To be called before gRPC is imported. What matters it also tells through its errors.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def let_grpc_speak() -> None:
    """Have gRPC's C library write why it refused a connection; `rpc/tls/handshakes.py` reads that off.

    It reads its level when it is imported, and writes where there is none: a process that has inherited silence is to be
    started as `speaking_environment` has it. A level that a person has set stays; children begin quiet again.
    """
    if os.environ.get("GRPC_VERBOSITY", "NONE") == "NONE":
        os.environ["GRPC_VERBOSITY"] = _OUR_GRPC_LEVEL


def quieten_transformers() -> None:
    """Keep transformers from advising PyTorch, as mlx-lm does when it comes in whole. To be called before it is imported."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


def rank_shares(settings: Settings) -> tuple[float, ...]:
    """Parts of every layer, by rank of a stage.

    Raises:
        ConfigError: there are not as many as ranks.
    """
    shares = settings.tp_shares
    if not shares:
        return (1.0,) * settings.tp
    if settings.tp not in (1, len(shares)):
        raise ConfigError(
            f"--tp {settings.tp} shares every layer among so many workers, and --tp-shares has parts for {len(shares)}: "
            "name as many, or leave --tp out."
        )
    return shares


def shared_stages(settings: Settings) -> int:
    """Of `--tp` beside `--nodes`: as many stages as are asked for, else so many that each rank has a machine."""
    if settings.stages > 1:
        return settings.stages
    return max(1, settings.nodes // len(rank_shares(settings)))


def may_share_by_plan(settings: Settings) -> bool:
    """Whether machines may come to compute layers together by their plan, without `--tp`."""
    if settings.nodes == 1:
        return False
    return settings.strategy in {"tensor", "hybrid"} or (
        settings.strategy == "auto" and bool(settings.trusted_interface)
    )


def check_ranks(settings: Settings) -> None:
    """Raises `ConfigError` where ranks cannot go to machines as asked."""
    ranks, nodes, stages = len(rank_shares(settings)), settings.nodes, settings.stages
    if nodes == 1:
        return
    if ranks == 1:
        if stages > 1:
            raise ConfigError(
                f"--stages {stages} splits the layers over processes of one machine, and with --nodes {nodes} each "
                "machine of the plan is a stage: leave --stages out."
            )
        if settings.strategy == "tensor":
            _check_trust(settings, "--strategy tensor has all machines share layers")
        return
    if settings.strategy not in {"auto", "custom"}:
        raise ConfigError(
            f"--strategy {settings.strategy} says which machine has what, and so does --tp {ranks} beside --nodes {nodes}: "
            "leave one of them out."
        )
    stages = shared_stages(settings)
    if stages * ranks % nodes:
        near = ", ".join(str(number) for number in range(1, 9) if (stages * ranks) % number == 0)
        raise ConfigError(
            f"--tp {ranks} makes {stages * ranks} workers, which {nodes} machines cannot have evenly: use --nodes {near} or another --tp."
        )
    if stages * ranks // nodes % ranks:
        _check_trust(settings, f"--tp {ranks} beside --nodes {nodes} has machines share layers")


def _check_trust(settings: Settings, wish: str) -> None:
    """Raises `ConfigError` where no interface is trusted with collectives."""
    if not settings.trusted_interface:
        raise ConfigError(
            f"{wish}. MLX's collectives are neither encrypted nor authenticated, so they go to other machines only where both ends "
            "trust an interface with it: name it with --trusted-interface, here and on each machine that joins."
        )


def check_link(settings: Settings) -> None:
    """Raises `ConfigError` where stages cannot be linked as asked."""
    link, stages, ranks = settings.link, settings.stages, len(rank_shares(settings))
    _check_backend(settings, ranks)
    if link == "grpc":
        return
    if settings.nodes > 1:
        if link not in _LINKS_OF_MACHINES:
            raise ConfigError(
                f"--link {link} joins stages on one machine only, and --nodes is {settings.nodes}: use --link ring, or leave it out."
            )
        _check_trust(settings, f"--link {link} beside --nodes {settings.nodes} joins machines")
        # Each machine of the plan is a stage.
        stages = settings.nodes
    if ranks > 1:
        raise ConfigError(
            f"--link {link} needs MLX's one group of a process for the stages, and --tp {ranks} needs it for the ranks of each: "
            "leave one of them out."
        )
    if stages == 1:
        raise ConfigError(
            f"--link {link} carries activations between stages, and there is one: add --stages 2, or leave --link out."
        )
    if link in _LINKS_OF_TWO and stages not in {1, 2}:
        raise ConfigError(
            f"--link {link} {_LINKS_OF_TWO[link]}, so it joins two stages, and {stages} were asked for: "
            "use --link ring or grpc."
        )


def _check_backend(settings: Settings, ranks: int) -> None:
    """Raises `ConfigError` where MLX would join nothing, or the link is another backend's."""
    backend, link = settings.backend, settings.link
    if backend == "auto":
        return
    if ranks == 1 and link == "grpc" and not may_share_by_plan(settings):
        raise ConfigError(
            f"--backend {backend} joins workers that share layers, or stages that collectives link, and there are none: "
            "add --tp 2 or --link allreduce, or leave --backend out."
        )
    if link in BACKENDS and link != backend:
        raise ConfigError(
            f"--link {link} is over MLX's backend {link}, and --backend is {backend}: leave one of them out."
        )
    if link == "allreduce" and backend == "jaccl":
        raise ConfigError(
            "--link allreduce is for backends that cannot send, and jaccl can: use --link jaccl."
        )
    if settings.nodes > 1 and ranks == 1 and backend in {"mpi", "nccl"}:
        raise ConfigError(
            f"--backend {backend} joins workers of one machine, and with --nodes {settings.nodes} each is on one of its own: "
            "use --backend ring."
        )


def library_variable(name: str) -> str:
    """What a library of this process would read of the environment; empty where nothing is set."""
    return os.environ.get(name, "")


def set_for_libraries(variables: Mapping[str, str]) -> None:
    """What libraries of this process read of the environment from now on, where they offer no other way."""
    os.environ.update(variables)


def inherited_environment(changes: Mapping[str, str]) -> dict[str, str]:
    """The environment of this process with changes: what a child is started with."""
    inherited = dict(os.environ)
    if inherited.get("GRPC_VERBOSITY") == _OUR_GRPC_LEVEL:
        inherited["GRPC_VERBOSITY"] = "NONE"
    return inherited | dict(changes)


def speaking_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """For a child whose lines are read: its gRPC writes why it refused a connection. A level that a person has set stays."""
    told = {} if environment.get("GRPC_VERBOSITY", "NONE") != "NONE" else {"GRPC_VERBOSITY": _OUR_GRPC_LEVEL}
    return dict(environment) | told


_LINKS_OF_MACHINES = ("ring", "allreduce", "jaccl")
"""That join stages on several."""
_LINKS_OF_TWO = {
    "allreduce": "is a sum in which every stage would take part for every other's activations",
    "nccl": "is a sum in which every stage would take part for every other's activations",
    "mpi": "is used by MLX for one thread, and a stage between others sends while it receives",
}
"""Links that join two stages only, and why."""

_IN_WORDS = {
    ("kv_cache_memory", "weights_limit", "memory_limit", "model_memory"): (
        "a size of 1MiB or more, such as 2GiB, 500MB or a number of bytes"
    ),
    ("proportions",): "shares with commas between them, as 0.7,0.3",
    ("tp_shares",): "numbers above 0 with commas between them, as 3,1",
    (
        "trusted_interface",
    ): "names of interfaces or networks with commas between them, as thunderbolt0 or 10.0.8.0/24",
}
"""What some settings take, which their types do not tell."""


def allowed_values(field: FieldInfo) -> str:
    """What a field takes, in words: "a whole number from 0 to 65535"."""
    for names, words in _IN_WORDS.items():
        if any(field is Settings.model_fields[name] for name in names):
            return words
    kind, constraints = _unwrap(field.annotation, list(field.metadata))
    if get_origin(kind) is Literal:
        *most, last = (str(choice) for choice in get_args(kind))
        return f"{', '.join(most)} or {last}"
    if kind is int:
        return _number_range("a whole number", constraints)
    if kind is float:
        return _number_range("a number", constraints)
    if kind is Path:
        return "a path"
    return "names separated by commas" if get_origin(kind) is tuple else "a text that is not empty"


def _unwrap(annotation: object, constraints: list[object]) -> tuple[object, list[object]]:
    """The type inside `Annotated[... | None, ...]`, and every constraint on the way."""
    if get_origin(annotation) is Annotated:
        inner, *more = get_args(annotation)
        found: list[object] = []
        for item in more:
            found += item.metadata if isinstance(item, FieldInfo) else [item]
        return _unwrap(inner, constraints + found)
    if get_origin(annotation) in (Union, UnionType):
        return _unwrap(next(part for part in get_args(annotation) if part is not type(None)), constraints)
    return annotation, constraints


def _number_range(noun: str, constraints: list[object]) -> str:
    low = next((str(item.ge) for item in constraints if isinstance(item, Ge)), "")
    above = next((str(item.gt) for item in constraints if isinstance(item, Gt)), "")
    high = next((str(item.le) for item in constraints if isinstance(item, Le)), "")
    return f"{noun} above {above}, at most {high}" if above else f"{noun} from {low} to {high}"
