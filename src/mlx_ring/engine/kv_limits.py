"""How much KV each rank may hold: what the person who serves said, or what its device has left. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from mlx_ring.core.errors import ConfigError
from mlx_ring.engine.executor import RankId
from mlx_ring.engine.kv_budget import BLOCK, KvBudget, sequence_bytes
from mlx_ring.engine.policy import RankKv
from mlx_ring.rpc.protos import worker_pb2

RESERVE_SHARE = 0.1
"""Of a device's memory that KV leaves alone: activations, the system, and whoever else works there ..."""
RESERVE_BYTES = 1 << 30
"""... and at least so much."""
KEPT_TOKENS = 8192
"""Of the context that an instance keeps whoever else is loaded, where none was insisted on; plans leave room for as much."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """What of a node's memory may be used."""

    reserve_share: float = RESERVE_SHARE
    limit_bytes: int | None = None
    """That its owner grants in all, where that is less than there is."""
    claimed_bytes: int = 0
    """For weights that are about to be loaded."""
    claimed_shares: int = 0
    """For workers that are about to be loaded: each will have one."""


Place = tuple[str, RankId]
"""A node and a rank on it."""
Floors = Mapping[str, Mapping[RankId, int]]
"""Bytes that the ranks of an instance keep, by instance: none where it is not named."""


def rank_limits(
    instances: Mapping[str, Mapping[Place, worker_pb2.WorkerStatus]],
    given_bytes: int | None,
    allowances: Mapping[str, Allowance],
    floors: Floors = MappingProxyType({}),
) -> dict[str, dict[RankId, RankKv]]:
    """Each rank's budget, by instance: what a node has left for KV is shared out among all ranks on it.

    Args:
        instances: what each worker says of its KV and of its device's memory; the one that has spoken last comes last.
        given_bytes: `--kv-cache-memory`, for each worker; else what is left is shared out.
        allowances: by node, what of its memory may be used, where it is not all but the usual reserve.
        floors: what each has at least, even where there is not so much.
    """
    rooms = kv_rooms(instances, allowances)
    seats = [(name, *place) for name, workers in instances.items() for place in workers]
    shares: dict[tuple[str, str, RankId], int] = {}
    for node, room in rooms.items():
        on_node = [seat for seat in seats if seat[1] == node]
        coming = allowances.get(node, Allowance()).claimed_shares
        least = [floors.get(name, {}).get(rank, 0) for name, _, rank in on_node]
        shares |= zip(on_node, share_out(room, [*least, *[0] * coming]), strict=False)
    return {
        name: {
            rank: _rank_kv(status, shares[name, node, rank] if given_bytes is None else given_bytes)
            for (node, rank), status in workers.items()
        }
        for name, workers in instances.items()
    }


def kv_rooms(
    instances: Mapping[str, Mapping[Place, worker_pb2.WorkerStatus]], allowances: Mapping[str, Allowance]
) -> dict[str, int]:
    """Bytes that all workers of a node may hold of KV together, by node."""
    told: dict[str, list[worker_pb2.WorkerStatus]] = {}
    for workers in instances.values():
        for (node, _), status in workers.items():
            told.setdefault(node, []).append(status)
    return {node: _room(statuses, allowances.get(node, Allowance())) for node, statuses in told.items()}


def share_out(room: int, floors: Sequence[int]) -> list[int]:
    """Equal shares of `room`; who keeps more than that has what it keeps, and the others share the rest."""
    shares = list(floors)
    left, waiting = room, sorted(range(len(floors)), key=lambda seat: -floors[seat])
    while waiting:
        equal = max(0, left) // len(waiting)
        if floors[waiting[0]] <= equal:
            for seat in waiting:
                shares[seat] = equal
            break
        left -= floors[waiting.pop(0)]
    return shares


def floor_of(ranks: Mapping[RankId, RankKv], tokens: int) -> dict[RankId, int]:
    """Bytes that one sequence of so many tokens takes of each rank."""
    return {rank: sequence_bytes(kv, tokens) for rank, kv in ranks.items()}


def _room(statuses: Sequence[worker_pb2.WorkerStatus], allowance: Allowance) -> int:
    """What a node's workers may hold of KV together, as the last of them found its memory."""
    last = statuses[-1]
    reserve = max(RESERVE_BYTES, int(last.memory_bytes * allowance.reserve_share))
    # A worker knows what it holds of a GPU's memory, and not what the others do.
    others = sum(status.device_memory_bytes for status in statuses[:-1]) if last.device == "gpu" else 0
    held = sum(status.kv_bytes for status in statuses)
    left = last.memory_left_bytes - others + held - reserve
    if allowance.limit_bytes is not None:
        weights = sum(status.device_memory_bytes - status.kv_bytes for status in statuses)
        left = min(left, int(allowance.limit_bytes * (1 - allowance.reserve_share)) - weights)
    return max(0, left - allowance.claimed_bytes)


def _rank_kv(status: worker_pb2.WorkerStatus, limit_bytes: int) -> RankKv:
    traits = status.kv
    return RankKv(
        limit_bytes=limit_bytes,
        bytes_per_token=traits.bytes_per_token,
        bytes_per_sequence=traits.bytes_per_sequence,
        recurrent=traits.recurrent,
        slack=traits.slack,
        exact_length=traits.exact_length,
    )


def fitting_context(limits: Mapping[RankId, RankKv], wanted: int, *, insisted: bool) -> int:
    """Most tokens of one sequence that every rank can hold, `wanted` at most.

    Raises:
        ConfigError: they are fewer than `wanted`, which the person who serves insists on, or too few for anything.
    """
    capacity = KvBudget(limits).capacity_tokens
    if capacity is None or capacity >= wanted:
        return wanted
    # Memory goes by whole blocks, so the last of them may hold what is wanted even where it is not full.
    if insisted or capacity < BLOCK:
        raise ConfigError(_too_little(limits, capacity, wanted))
    return capacity


def _too_little(limits: Mapping[RankId, RankKv], capacity: int, wanted: int) -> str:
    rank, kv = min(limits.items(), key=lambda item: item[1].limit_bytes - sequence_bytes(item[1], wanted))
    return (
        f"The KV cache of stage {rank.stage} may take {kv.limit_bytes / 1e6:.0f} MB, and one request of "
        f"{wanted} tokens takes {sequence_bytes(kv, wanted) / 1e6:.0f} MB there: {capacity} tokens fit. "
        "Give --max-model-len that many or fewer, raise --kv-cache-memory, or try --kv-bits 8."
    )
