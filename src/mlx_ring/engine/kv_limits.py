"""How much KV each rank may hold: what the person who serves said, or what its device has left. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from mlx_ring.core.errors import ConfigError
from mlx_ring.engine.executor import RankId
from mlx_ring.engine.kv_budget import BLOCK, KvBudget
from mlx_ring.engine.policy import RankKv
from mlx_ring.rpc.protos import worker_pb2

RESERVE_SHARE = 0.1
"""Of a device's memory that KV leaves alone: activations, the system, and whoever else works there ..."""
RESERVE_BYTES = 1 << 30
"""... and at least so much."""

Place = tuple[str, RankId]
"""A node and a rank on it."""


def rank_limits(
    workers: Mapping[Place, worker_pb2.WorkerStatus], given_bytes: int | None
) -> dict[RankId, RankKv]:
    """Each rank's budget, once every worker has loaded.

    Args:
        workers: what each says of its KV and of its device's memory, which workers of one node share.
        given_bytes: `--kv-cache-memory`, for each worker; else what is left is shared out.
    """
    on_node = Counter(node for node, _ in workers)
    held = Counter[str]()
    for (node, _), status in workers.items():
        held[node] += status.device_memory_bytes
    limits: dict[RankId, RankKv] = {}
    for (node, rank), status in workers.items():
        reserve = max(RESERVE_BYTES, int(status.memory_bytes * RESERVE_SHARE))
        # A worker knows what it holds of a GPU's memory, and not what the others do.
        others = held[node] - status.device_memory_bytes if status.device == "gpu" else 0
        left = max(0, status.memory_left_bytes - others - reserve) // on_node[node]
        traits = status.kv
        limits[rank] = RankKv(
            limit_bytes=left if given_bytes is None else given_bytes,
            bytes_per_token=traits.bytes_per_token,
            bytes_per_sequence=traits.bytes_per_sequence,
            recurrent=traits.recurrent,
            slack=traits.slack,
            exact_length=traits.exact_length,
        )
    return limits


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
    def need(kv: RankKv, tokens: int) -> int:
        return -(-tokens // BLOCK) * BLOCK * kv.bytes_per_token + kv.bytes_per_sequence

    rank, kv = min(limits.items(), key=lambda item: item[1].limit_bytes - need(item[1], wanted))
    return (
        f"The KV cache of stage {rank.stage} may take {kv.limit_bytes / 1e6:.0f} MB, and one request of "
        f"{wanted} tokens takes {need(kv, wanted) / 1e6:.0f} MB there: {capacity} tokens fit. "
        "Give --max-model-len that many or fewer, raise --kv-cache-memory, or try --kv-bits 8."
    )
