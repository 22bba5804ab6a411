"""The KV cache of one rank: rows of any length, each of which joins, leaves, is cut and forked by itself."""

from mlx_ring.worker.kv.grouping import STEP_BYTES
from mlx_ring.worker.kv.passes import Batch
from mlx_ring.worker.kv.store import KVStore

__all__ = ["STEP_BYTES", "Batch", "KVStore"]
