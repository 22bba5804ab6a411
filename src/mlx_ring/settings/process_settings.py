"""Settings that agents and workers get: those of the head's machine from the head, those of other machines from `join`.

Each field has the name and the type of a field of `Settings`, which has its default and its help. A process passes them
on as one JSON argument. Workers and agents must start quickly, so this module imports the standard library alone.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeVar, cast, get_args, get_type_hints

from mlx_ring.core.logs import LogFormat, LogLevel
from mlx_ring.host.power import KeepAwakeMode

BlasMode = Literal["auto", "openblas", "off"]
SpareMode = Literal["auto", "on", "off"]
SwitchMode = Literal["on", "off"]
_FLAG = "--settings"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """Settings of a worker."""

    log_dir: Path
    log_level: LogLevel
    log_format: LogFormat
    blas: BlasMode
    blas_threads: int
    """Number of threads; unlike in `Settings`, never 0."""
    kv_disk: int | None
    """In bytes."""
    kv_disk_dir: Path | None
    """None only without `kv_disk`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings(WorkerSettings):
    """Settings of an agent, which include those of its workers."""

    model_load_timeout: float
    """In seconds."""
    spare_worker: SpareMode
    yielding: SwitchMode


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberSettings(AgentSettings):
    """Settings of the agent of a machine in a cluster. `join` has a flag for each."""

    run_dir: Path | None
    file_descriptor_limit: int
    memory_utilization: float
    memory_limit: int | None
    """In bytes."""
    weights_limit: int | None
    """In bytes."""
    trusted_interface: tuple[str, ...]
    node_ports: tuple[int, ...]
    """The first and the last one; empty for free ports."""
    keep_awake: KeepAwakeMode
    min_battery: float


PassedOn = TypeVar("PassedOn", bound=WorkerSettings)


def select_settings(kind: type[PassedOn], settings: object, **changes: object) -> PassedOn:
    """Return the settings of that kind.

    Args:
        kind: the class to fill.
        settings: `Settings`, or one of these classes with at least the same fields.
        changes: values that replace those of `settings`.
    """
    values = {name: getattr(settings, name) for name in names_of(kind)}
    return kind(**cast("dict[str, Any]", values | changes))


def names_of(kind: type[WorkerSettings]) -> tuple[str, ...]:
    """Return the names of the settings of that kind."""
    return tuple(each.name for each in fields(kind))


def as_arguments(settings: WorkerSettings) -> list[str]:
    """Return the command-line arguments that `add_argument` reads."""
    return [_FLAG, json.dumps(asdict(settings), default=str)]


def add_argument(parser: argparse.ArgumentParser, kind: type[WorkerSettings]) -> None:
    """Add the argument that holds settings of that kind."""
    parser.add_argument(
        _FLAG,
        metavar="JSON",
        type=lambda text: _read(kind, text),
        required=True,
        help=", ".join(names_of(kind)),
    )


def _read(kind: type[WorkerSettings], text: str) -> WorkerSettings:
    hints, given = get_type_hints(kind), cast("dict[str, Any]", json.loads(text))
    if given.keys() != hints.keys():
        raise argparse.ArgumentTypeError(
            f"its fields are {', '.join(given)}; they must be {', '.join(hints)}"
        )
    return kind(**{name: _value(hints[name], value) for name, value in given.items()})


def _value(hint: object, value: Any) -> Any:
    """Undo what JSON changes: it has neither paths nor tuples."""
    if isinstance(value, str) and Path in (hint, *get_args(hint)):
        return Path(value)
    return tuple(cast("list[Any]", value)) if isinstance(value, list) else value
