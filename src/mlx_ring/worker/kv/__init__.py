"""KV cache of one rank. Its rows have any length; each one joins, leaves, is cut and forked by itself."""

from mlx_ring.worker.kv.bank_memory import STEP_BYTES
from mlx_ring.worker.kv.kv_store import KVStore
from mlx_ring.worker.kv.passes import Batch

__all__ = ["STEP_BYTES", "Batch", "KVStore"]
