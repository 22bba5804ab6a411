"""Which workers of an instance MLX joins to one group of its collectives, and over what.

A process is in one group at most: that of its stage, whose layers its ranks share, or that of all stages, where links go over
collectives. Head, agent and worker read it off the assignment alike.
"""

from __future__ import annotations

from typing import Final

from mlx_ring.rpc.backends import AUTO, BACKENDS
from mlx_ring.rpc.protos import worker_pb2

GRPC: Final = "grpc"
"""The kind of link that needs no group."""
ALLREDUCE: Final = "allreduce"
_RING: Final = "ring"


def has_collective_link(assignment: worker_pb2.StageAssignment) -> bool:
    """Whether activations go from stage to stage over a group."""
    return assignment.stages > 1 and assignment.link not in {"", GRPC}


def joined_ranks(assignment: worker_pb2.StageAssignment) -> list[tuple[int, int]]:
    """Stage and rank of each that is in the group with this one, in the order of their ranks there; none if it is in no group."""
    if assignment.tp_size > 1:
        return [(assignment.stage, rank) for rank in range(assignment.tp_size)]
    if has_collective_link(assignment):
        return [(stage, 0) for stage in range(assignment.stages)]
    return []


def rank_in_group(assignment: worker_pb2.StageAssignment) -> int:
    """Its place among those that are joined with it; 0 where none is."""
    joined = joined_ranks(assignment)
    return joined.index((assignment.stage, assignment.rank)) if joined else 0


def backend_of(assignment: worker_pb2.StageAssignment) -> str:
    """MLX's name for what carries the group's collectives: as chosen, else as the kind of link has it."""
    if assignment.backend not in {"", AUTO}:
        return assignment.backend
    if assignment.tp_size > 1 or assignment.link == ALLREDUCE:
        return _RING
    return assignment.link


def asked_backend(assignment: worker_pb2.StageAssignment) -> str:
    """The backend that was asked for, by its name or with the kind of link; `auto` where none was."""
    if assignment.backend:
        return assignment.backend
    is_of_link = assignment.tp_size <= 1 and assignment.link in BACKENDS
    return assignment.link if is_of_link else AUTO


def wish_of(assignment: worker_pb2.StageAssignment) -> str:
    """What was asked for, as a person wrote it."""
    if assignment.tp_size <= 1 and assignment.link in BACKENDS:
        return f"--link {assignment.link}"
    return f"--backend {assignment.backend or AUTO}"
