"""Names that settings had in the prototypes, as their `.env` files have them. Pure.

`settings/settings_sources.py` reads the file and maps old names here. A name without a counterpart is refused with the
reason, because ignoring it would be worse.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mlx_ring.core.errors import ConfigError

_LEVELS = {"warn": "warning", "critical": "error", "fatal": "error", "notset": "debug", "trace": "debug"}
_NOTHING = ("none", "null", "")
_TRUTH = {
    "true": True,
    "1": True,
    "yes": True,
    "on": True,
    "false": False,
    "0": False,
    "no": False,
    "off": False,
}


@dataclass(frozen=True, slots=True)
class Renamed:
    """Setting and value that an old name stands for."""

    setting: str
    value: str


def of_today(old: Mapping[str, str], where: str) -> dict[str, Renamed]:
    """Return the setting that each old name stands for. Names that ask for today's only behaviour set nothing.

    Args:
        old: names as written, with their values; other names are ignored.
        where: their source, for messages.

    Raises:
        ConfigError: a name has no counterpart, or two contradict each other.
    """
    found: dict[str, Renamed] = {}
    if refused := [name for name in old if name in WITHOUT_COUNTERPART]:
        raise ConfigError(
            " ".join(
                f"{name} in {where} is {old[name]}, which has no counterpart here: {WITHOUT_COUNTERPART[name]}."
                for name in refused
            )
        )
    for name, value in old.items():
        if name in COUNTERPARTS and (renamed := COUNTERPARTS[name](name, value, where)) is not None:
            found[name] = renamed
    if "MODEL_REPO" in found and "MODEL_NAME" in found:
        found["MODEL_NAME"] = Renamed("served_model_name", found["MODEL_NAME"].value)
    _refuse_contradictions(found, old, where)
    return found


def is_old(name: str) -> bool:
    """Return True if a prototype had a setting of this name."""
    return name in COUNTERPARTS or name in WITHOUT_COUNTERPART


def _refuse_contradictions(found: Mapping[str, Renamed], old: Mapping[str, str], where: str) -> None:
    """Refuse two old names of one setting with different values."""
    first: dict[str, str] = {}
    for name, renamed in found.items():
        other = first.setdefault(renamed.setting, name)
        if found[other].value != renamed.value:
            raise ConfigError(
                f"{other} in {where} is {old[other]} and {name} is {old[name]}, but both are "
                f"MLX_RING_{renamed.setting.upper()} here: give one of them."
            )


Counterpart = Callable[[str, str, str], Renamed | None]


def _same(setting: str) -> Counterpart:
    return lambda _name, value, _where: Renamed(setting, value)


def _unless_none(setting: str) -> Counterpart:
    return lambda _name, value, _where: None if value.lower() in _NOTHING else Renamed(setting, value)


def _mebibytes(_name: str, value: str, _where: str) -> Renamed:
    return Renamed("kv_cache_memory", f"{value}MiB")


def _level(_name: str, value: str, _where: str) -> Renamed:
    level = value.lower()
    return Renamed("log_level", _LEVELS.get(level, level))


def _kv_size(_name: str, value: str, _where: str) -> Renamed | None:
    """Read a bare number as tokens (mlx-lm's meaning), a size with a unit as bytes, and none as no limit."""
    if value.lower() in _NOTHING:
        return None
    return Renamed("max_model_len" if value.isdigit() else "kv_cache_memory", value)


def _distributed(name: str, value: str, where: str) -> Renamed | None:
    """Read true as nothing to set: another name gives the number of machines."""
    truth = _TRUTH.get(value.lower())
    if truth is None:
        raise ConfigError(f"{name} in {where} is {value}; it must be true or false.")
    return None if truth else Renamed("nodes", "1")


COUNTERPARTS: Mapping[str, Counterpart] = {
    "MODEL_REPO": _same("model"),
    "MODEL_NAME": _same("model"),
    "API_HOST": _same("host"),
    "API_PORT": _same("port"),
    "NUM_DEVICES": _same("nodes"),
    "WORLD_SIZE": _same("nodes"),
    "DISTRIBUTED": _distributed,
    "KV_CACHE_MAX_SIZE": _kv_size,
    "KV_CACHE_RESERVED_MEMORY_MB": _mebibytes,
    "MAX_SEQUENCE_LENGTH": _same("max_model_len"),
    "REQUEST_TIMEOUT_SECONDS": _unless_none("request_timeout_s"),
    "DEFAULT_MAX_TOKENS": _same("default_max_tokens"),
    "FILE_DESCRIPTOR_SOFT_LIMIT": _same("file_descriptor_limit"),
    "MODEL_LOAD_WAIT_SECONDS": _same("model_load_timeout"),
    "LOG_LEVEL": _level,
}
_CLUSTER_FILE = "list the machines in a file for `mlx-ring cluster start -c FILE`"
WITHOUT_COUNTERPART: Mapping[str, str] = {
    "MODEL_CACHE_DIR": "the hub's own cache is used; HF_HUB_CACHE in the environment moves it",
    "WORKER_HOSTS": _CLUSTER_FILE,
    "WORKER_SSH": _CLUSTER_FILE,
    "SOCKET_PATH": "sockets are in a private folder; MLX_RING_RUN_DIR sets its location",
    "DISTRIBUTED_BACKEND": "stages use mutual TLS by default; --link and --backend choose other transports",
    "MAX_PROMPT_LEN_BYTES": (
        "MLX_RING_MAX_MODEL_LEN bounds prompts in tokens, and MLX_RING_MAX_REQUEST_MB requests in MiB"
    ),
    "FILE_DESCRIPTOR_HARD_LIMIT": "the operating system sets the hard limit (`ulimit -Hn`)",
    "POLL_INTERVAL_SECONDS": "nothing is polled",
    "MASTER_ADDR": "run `mlx-ring serve --nodes N` on the first machine, and `mlx-ring join ADDRESS` on the others",
    "RANK": "the planner assigns the layers, so machines have no ranks",
}
