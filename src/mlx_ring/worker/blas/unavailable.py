"""The reason why the fast BLAS cannot be used. It never leaves `mlx_ring.worker.blas`."""

from __future__ import annotations


class Unavailable(Exception):
    """Something that the fast BLAS needs is missing; `str(error)` says what, as part of a sentence."""
