"""Links between stages and MLX's backends: one table of each, and the choice of a group's backend. Pure.

Settings, hostfiles, agents and workers read the tables. `worker/group.py` has the variables of each backend.

A process is in one group at most: that of its stage, whose layers its ranks share, or that of all stages, if links use
collectives. Head, agent and worker all derive it from the assignment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from mlx_ring.core.errors import ConfigError, ProtocolError

if TYPE_CHECKING:
    # `mlx-ring serve --help` needs only the names of backends.
    from mlx_ring.rpc.protos import worker_pb2

Backend = Literal["ring", "mpi", "nccl", "jaccl"]
DirectLink = Literal["grpc"]
"""Links without a group. A worker opens one to each rank that it sends to."""
Link = Literal[DirectLink, Backend, "allreduce"]
BackendSetting = Literal["auto", Backend]
AUTO: Final = "auto"
_DEFAULT_LINK: Final = "grpc"
"""Link of a plan that names none, and of what collectives do not carry."""


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


Ranks = Sequence[RankCapabilities]
Rdma = Sequence[Sequence[object]] | None
"""Devices from each rank to each, if a hostfile lists them."""


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """Description of one of MLX's backends."""

    remedy: str
    """Advice for a machine without it."""
    advantage: str = ""
    """Reason to choose it; empty if it is used only on request."""
    problem: Callable[[Ranks, Rdma], str] = lambda _ranks, _rdma: ""
    """Function that says why it cannot join ranks that all have it, with a remedy; empty if it can."""
    is_expected: Callable[[RankCapabilities], bool] = lambda _: False
    """Function that returns True for a rank on whose machine a user may expect it."""
    joins_machines: bool = True
    """False if all its ranks are on one machine."""
    meets_at_rank_0: bool = False
    """True if every rank connects to rank 0, not only to its neighbours."""
    uses_rdma: bool = False
    """True if its ranks use the RDMA devices that a hostfile names."""
    runs_on_gpu: bool = False
    """True if its collectives run on the GPU."""
    can_send: bool = True
    """False if it can carry activations only in a sum."""
    allows_allreduce: bool = True
    """False if the link `allreduce` is refused over it."""
    why_two_stages: str = ""
    """Reason why a link over it joins two stages only; empty if it joins any number."""


@dataclass(frozen=True, slots=True)
class LinkKind:
    """Description of one kind of link between stages."""

    backend: Backend | None
    """Backend that it uses if none is requested; None if it needs no group."""
    is_encrypted: bool = False
    """True if activations between machines are encrypted and authenticated; if not, they need trusted interfaces."""
    sums: bool = False
    """True if activations travel in a sum, over whichever backend is chosen."""
    why_two_stages: str = ""
    """Reason why it joins two stages only; empty if it joins any number."""


def _machines(ranks: Sequence[RankCapabilities]) -> int:
    return len({rank.machine for rank in ranks})


def _problem_of_mpi(ranks: Ranks, _rdma: Rdma) -> str:
    if _machines(ranks) > 1:
        return (
            "MPI joins workers of one machine only, because nothing starts its processes on others: use ring"
        )
    return ""


def _problem_of_nccl(ranks: Ranks, _rdma: Rdma) -> str:
    if _machines(ranks) > 1:
        return "NCCL listens on every network: use ring"
    gpus = {(rank.machine, rank.gpu) for rank in ranks if rank.gpu}
    if len(gpus) < len(ranks):
        return f"NCCL needs a GPU for each of the {len(ranks)} workers, but there are {len(gpus)}: start fewer, or use ring"
    return ""


def _problem_of_jaccl(ranks: Ranks, rdma: Rdma) -> str:
    if _machines(ranks) < len(ranks):
        return "RDMA connects machines, but several of these workers are on one: use ring"
    without = [rank.machine for rank in ranks if not rank.rdma_devices]
    if without:
        return f"{' and '.join(without)} has no RDMA device on an interface that is trusted: {BACKENDS['jaccl'].remedy}"
    if rdma is None:
        return "nothing says which machines the RDMA devices connect: give a hostfile with `rdma`"
    for rank, row in zip(ranks, rdma, strict=True):
        if unknown := sorted(set(devices_of(row)) - rank.rdma_devices):
            return (
                f"the hostfile names {unknown[0]} on {rank.machine}, which has {', '.join(sorted(rank.rdma_devices))}: "
                "create the file again with `mlx.distributed_config`"
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


_SUM: Final = "needs every stage to take part in each sum"

BACKENDS: Final[Mapping[Backend, BackendInfo]] = {
    # TCP, everywhere.
    "ring": BackendInfo(
        remedy="install a build of MLX that has it",
        advantage="it works everywhere",
    ),
    # Open MPI.
    "mpi": BackendInfo(
        remedy="install Open MPI, on Debian with `apt install libopenmpi3`",
        problem=_problem_of_mpi,
        joins_machines=False,
        why_two_stages="supports one thread in MLX, but a middle stage sends and receives at the same time",
    ),
    # CUDA, each rank with a GPU of its own.
    "nccl": BackendInfo(
        remedy="install MLX's build for CUDA, `mlx[cuda13]` or `mlx[cuda12]`",
        advantage="MLX is built for CUDA, and each rank has a GPU of its own",
        problem=_problem_of_nccl,
        is_expected=lambda rank: "nccl" in rank.backends,
        joins_machines=False,
        meets_at_rank_0=True,
        runs_on_gpu=True,
        can_send=False,
        why_two_stages=_SUM,
    ),
    # RDMA over Thunderbolt 5, one rank per machine.
    "jaccl": BackendInfo(
        remedy=(
            "it is RDMA over Thunderbolt 5, from macOS 26.2 on, once `rdma_ctl enable` was run in Recovery; "
            "`mlx-ring doctor` shows what is missing"
        ),
        advantage="every machine has RDMA devices, and the hostfile says which machines they connect",
        problem=_problem_of_jaccl,
        is_expected=lambda rank: bool(rank.rdma_devices),
        meets_at_rank_0=True,
        uses_rdma=True,
        allows_allreduce=False,
    ),
}
"""MLX's backends; a later one is better, if it is possible."""
DIRECT_LINKS: Final[Mapping[DirectLink, LinkKind]] = {"grpc": LinkKind(None, is_encrypted=True)}
LINKS: Final[Mapping[Link, LinkKind]] = {
    **DIRECT_LINKS,
    **{name: LinkKind(name, why_two_stages=info.why_two_stages) for name, info in BACKENDS.items()},
    "allreduce": LinkKind("ring", sums=True, why_two_stages=_SUM),
}
"""Links: direct ones, each backend's own, and a sum over a backend."""


def find_backend(name: str) -> Backend:
    """Return the backend of that name. Raises `ProtocolError` for an unknown one."""
    for backend in BACKENDS:
        if name == backend:
            return backend
    raise ProtocolError(f"The plan requests the MLX backend {name!r}; known ones are {', '.join(BACKENDS)}.")


def find_link(name: str) -> Link:
    """Return the link of that name. Raises `ProtocolError` for an unknown one."""
    for link in LINKS:
        if name == link:
            return link
    raise ProtocolError(f"The plan requests the link {name!r}; known ones are {', '.join(LINKS)}.")


def is_collective(link: str) -> bool:
    """Return True if a link of that name carries activations over a group. Raises `ProtocolError` for an unknown one."""
    return LINKS[find_link(link)].backend is not None


@dataclass(frozen=True, slots=True)
class Choice:
    """A backend, and the reason for it."""

    backend: Backend
    why: str


def choose_backend(asked: str, ranks: Ranks, *, option: str, rdma: Rdma = None) -> Choice:
    """Choose the backend of a group.

    Args:
        asked: one of `BACKENDS`, or `auto`.
        ranks: of the group, in order.
        option: the command-line option that asked for it: "--link jaccl".
        rdma: devices from each rank to each, if a hostfile lists them.

    Raises:
        ConfigError: the requested backend is not possible; the message names possible ones.
        ProtocolError: the requested backend is unknown.
    """
    if asked == AUTO:
        return _best(ranks, rdma)
    backend = find_backend(asked)
    if problem := _problem(backend, ranks, rdma):
        raise ConfigError(f"{option}: {problem}.{_instead(ranks, rdma)}")
    return Choice(backend, "asked for")


def _best(ranks: Ranks, rdma: Rdma) -> Choice:
    """Choose the best possible backend. The reasons only mention a missing backend if a machine has part of it."""
    missed: list[str] = []
    problem = ""
    for backend, info in reversed(BACKENDS.items()):
        if not info.advantage:
            continue
        problem = _problem(backend, ranks, rdma)
        if not problem:
            return Choice(backend, "; ".join([info.advantage, *missed]))
        if any(map(info.is_expected, ranks)):
            missed.append(f"not {backend}: {problem}")
    raise ConfigError(f"No backend joins these workers: {'; '.join([problem, *missed])}.")


def _instead(ranks: Ranks, rdma: Rdma) -> str:
    others = [name for name, info in BACKENDS.items() if info.advantage and not _problem(name, ranks, rdma)]
    return f" {' or '.join(others)} would be available." if others else ""


def _problem(backend: Backend, ranks: Ranks, rdma: Rdma) -> str:
    """Return why the backend is not possible, with a remedy; empty if it is."""
    info = BACKENDS[backend]
    without = sorted({rank.machine for rank in ranks if backend not in rank.backends})
    if without:
        return f"MLX's backend {backend} is not available on {' and '.join(without)}: {info.remedy}"
    return info.problem(ranks, rdma)


def _link_of(assignment: worker_pb2.StageAssignment) -> Link:
    return find_link(assignment.link or _DEFAULT_LINK)


def direct_link(assignment: worker_pb2.StageAssignment) -> DirectLink:
    """Return the link without a group that this worker opens. Raises `ProtocolError` for an unknown link."""
    link = _link_of(assignment)
    for direct in DIRECT_LINKS:
        if link == direct:
            return direct
    return _DEFAULT_LINK


def sends_in_the_clear(assignment: worker_pb2.StageAssignment) -> bool:
    """Report whether this worker opens links that are not encrypted. Raises `ProtocolError` for an unknown link."""
    return not DIRECT_LINKS[direct_link(assignment)].is_encrypted


def has_collective_link(assignment: worker_pb2.StageAssignment) -> bool:
    """Report whether activations go from stage to stage over a group. Raises `ProtocolError` for an unknown link."""
    return is_collective(_link_of(assignment)) and assignment.stages > 1


def joined_ranks(assignment: worker_pb2.StageAssignment) -> list[tuple[int, int]]:
    """Return stage and rank of each member of this worker's group, in the order of the group's ranks; none without a group.

    Raises:
        ProtocolError: the link is unknown.
    """
    if assignment.tp_size > 1:
        return [(assignment.stage, rank) for rank in range(assignment.tp_size)]
    if has_collective_link(assignment):
        return [(stage, 0) for stage in range(assignment.stages)]
    return []


def rank_in_group(assignment: worker_pb2.StageAssignment) -> int:
    """Return the worker's rank in its group; 0 without a group."""
    joined = joined_ranks(assignment)
    return joined.index((assignment.stage, assignment.rank)) if joined else 0


def backend_of(assignment: worker_pb2.StageAssignment) -> Backend:
    """Return the group's backend: the chosen one, else the one of the kind of link.

    Raises:
        ProtocolError: the backend or the link is unknown.
    """
    if assignment.backend not in {"", AUTO}:
        return find_backend(assignment.backend)
    of_link = LINKS[_link_of(assignment)].backend
    return "ring" if assignment.tp_size > 1 or of_link is None else of_link


def requested_backend(assignment: worker_pb2.StageAssignment) -> str:
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
