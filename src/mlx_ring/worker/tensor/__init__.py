"""Split of a stage's layers over the ranks of a group."""

from mlx_ring.worker.tensor.collectives import Group
from mlx_ring.worker.tensor.split import SplitHead, split

__all__ = ["Group", "SplitHead", "split"]
