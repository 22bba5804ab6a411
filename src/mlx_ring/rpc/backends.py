"""Choice of the MLX backend that joins ranks, and of the ranks that it joins. Pure.

jaccl   RDMA over Thunderbolt 5, one rank a machine
nccl    CUDA, each rank with a GPU of its own
ring    TCP, everywhere
mpi     Open MPI, on one machine; only on request

A process is in one group at most: that of its stage, whose layers its ranks share, or that of all stages, if links use
collectives. Head, agent and worker all derive it from the assignment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from mlx_ring.core.errors import ConfigError

if TYPE_CHECKING:
    # `mlx-ring serve --help` needs only the names of backends.
    from mlx_ring.rpc.protos import worker_pb2

Backend = Literal["ring", "mpi", "jaccl", "nccl"]
BACKENDS: Final[tuple[Backend, ...]] = ("ring", "mpi", "jaccl", "nccl")
AUTO: Final = "auto"

MENDS: Final = {
    "ring": "install a build of MLX that has it",
    "mpi": "install Open MPI, on Debian with `apt install libopenmpi3`",
    "jaccl": (
        "it is RDMA over Thunderbolt 5, from macOS 26.2 on, once `rdma_ctl enable` was run in Recovery; "
        "`mlx-ring doctor` tells what is missing"
    ),
    "nccl": "install MLX's build for CUDA, `mlx[cuda13]` or `mlx[cuda12]`",
}
"""Remedies for a machine without the backend."""


@dataclass(frozen=True, slots=True)
class RankCapabilities:
    """Backends and devices by which one rank can join others."""

    machine: str
    """Machine, which is equal for ranks on one machine."""
    backends: frozenset[str]
    """Backends that MLX has there."""
    gpu: str = ""
    """GPU of this rank alone; empty if it has none or shares one."""
    rdma_devices: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Choice:
    """A backend, and the reason for it."""

    backend: Backend
    why: str


def choose_backend(
    asked: str,
    ranks: Sequence[RankCapabilities],
    *,
    option: str,
    rdma: Sequence[Sequence[object]] | None = None,
) -> Choice:
    """Choose the backend of a group.

    Args:
        asked: one of `BACKENDS`, or `auto`.
        ranks: of the group, in order.
        option: the command-line option that asked for it: "--link jaccl".
        rdma: devices from each rank to each, if a hostfile lists them.

    Raises:
        ConfigError: the requested backend is not possible; the message names possible ones.
    """
    for backend in BACKENDS:
        if asked == backend:
            if problem := _problem(backend, ranks, rdma):
                raise ConfigError(f"{option}: {problem}.{_instead(ranks, rdma)}")
            return Choice(backend, "asked for")
    return _best(ranks, rdma)


def _best(ranks: Sequence[RankCapabilities], rdma: Sequence[Sequence[object]] | None) -> Choice:
    """Choose the best possible backend. The reasons only mention a missing backend if a machine has part of it."""
    without_jaccl = _problem("jaccl", ranks, rdma)
    if not without_jaccl:
        return Choice("jaccl", "every machine has RDMA devices, and the hostfile tells which lead where")
    without_nccl = _problem("nccl", ranks, rdma)
    if not without_nccl:
        return Choice("nccl", "MLX is built for CUDA, and each rank has a GPU of its own")
    missed = [
        *([f"not jaccl: {without_jaccl}"] if any(rank.rdma_devices for rank in ranks) else []),
        *([f"not nccl: {without_nccl}"] if any("nccl" in rank.backends for rank in ranks) else []),
    ]
    if problem := _problem("ring", ranks, rdma):
        raise ConfigError(f"No backend joins these workers: {'; '.join([problem, *missed])}.")
    return Choice("ring", "; ".join(["it works everywhere", *missed]))


def _instead(ranks: Sequence[RankCapabilities], rdma: Sequence[Sequence[object]] | None) -> str:
    others = [backend for backend in BACKENDS if backend != "mpi" and not _problem(backend, ranks, rdma)]
    return f" {' or '.join(others)} would be available." if others else ""


def _problem(
    backend: Backend, ranks: Sequence[RankCapabilities], rdma: Sequence[Sequence[object]] | None
) -> str:
    """Return why the backend is not possible, with a remedy; empty if it is."""
    without = sorted({rank.machine for rank in ranks if backend not in rank.backends})
    if without:
        return f"MLX's backend {backend} is not available on {' and '.join(without)}: {MENDS[backend]}"
    if backend == "mpi" and _machines(ranks) > 1:
        return (
            "MPI joins workers of one machine only, because nothing starts its processes on others: use ring"
        )
    if backend == "nccl":
        return "NCCL listens on every network: use ring" if _machines(ranks) > 1 else _problem_of_nccl(ranks)
    return _problem_of_jaccl(ranks, rdma) if backend == "jaccl" else ""


def _problem_of_nccl(ranks: Sequence[RankCapabilities]) -> str:
    gpus = {(rank.machine, rank.gpu) for rank in ranks if rank.gpu}
    if len(gpus) < len(ranks):
        return f"NCCL needs a GPU for each of the {len(ranks)} workers, and there are {len(gpus)}: start fewer, or use ring"
    return ""


def _problem_of_jaccl(ranks: Sequence[RankCapabilities], rdma: Sequence[Sequence[object]] | None) -> str:
    if _machines(ranks) < len(ranks):
        return "RDMA leads from machine to machine, and several of these workers are on one: use ring"
    without = [rank.machine for rank in ranks if not rank.rdma_devices]
    if without:
        return f"{' and '.join(without)} has no RDMA device on an interface that is trusted: {MENDS['jaccl']}"
    if rdma is None:
        return "nothing tells which RDMA device leads to which machine: name a hostfile with `rdma`"
    for rank, row in zip(ranks, rdma, strict=True):
        if unknown := sorted(set(devices_of(row)) - rank.rdma_devices):
            return (
                f"the hostfile names {unknown[0]} on {rank.machine}, which has {', '.join(sorted(rank.rdma_devices))}: "
                "write the file anew with `mlx.distributed_config`"
            )
    return ""


def devices_of(row: Sequence[object]) -> list[str]:
    """Return the device names in one rank's row of a matrix: null, a name, or several for several cables."""
    named: list[str] = []
    for entry in row:
        if isinstance(entry, str):
            named.append(entry)
        elif isinstance(entry, list | tuple):
            named.extend(map(str, entry))  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType] - JSON
    return named


def _machines(ranks: Sequence[RankCapabilities]) -> int:
    return len({rank.machine for rank in ranks})


GRPC: Final = "grpc"
"""Kind of link that needs no group."""
ALLREDUCE: Final = "allreduce"
_RING: Final = "ring"


def has_collective_link(assignment: worker_pb2.StageAssignment) -> bool:
    """Report whether activations go from stage to stage over a group."""
    return assignment.stages > 1 and assignment.link not in {"", GRPC}


def joined_ranks(assignment: worker_pb2.StageAssignment) -> list[tuple[int, int]]:
    """Return stage and rank of each member of this worker's group, in the order of the group's ranks; none without a group."""
    if assignment.tp_size > 1:
        return [(assignment.stage, rank) for rank in range(assignment.tp_size)]
    if has_collective_link(assignment):
        return [(stage, 0) for stage in range(assignment.stages)]
    return []


def rank_in_group(assignment: worker_pb2.StageAssignment) -> int:
    """Return the worker's rank in its group; 0 without a group."""
    joined = joined_ranks(assignment)
    return joined.index((assignment.stage, assignment.rank)) if joined else 0


def backend_of(assignment: worker_pb2.StageAssignment) -> str:
    """Return MLX's name of the group's backend: the chosen one, else the one of the kind of link."""
    if assignment.backend not in {"", AUTO}:
        return assignment.backend
    if assignment.tp_size > 1 or assignment.link == ALLREDUCE:
        return _RING
    return assignment.link


def asked_backend(assignment: worker_pb2.StageAssignment) -> str:
    """Return the requested backend, by its name or the kind of link; `auto` if none was."""
    if assignment.backend:
        return assignment.backend
    is_of_link = assignment.tp_size <= 1 and assignment.link in BACKENDS
    return assignment.link if is_of_link else AUTO


def backend_option(assignment: worker_pb2.StageAssignment) -> str:
    """Return the command-line option that asks for the backend."""
    if assignment.tp_size <= 1 and assignment.link in BACKENDS:
        return f"--link {assignment.link}"
    return f"--backend {assignment.backend or AUTO}"
