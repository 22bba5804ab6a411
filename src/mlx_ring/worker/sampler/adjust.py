"""Bars the tokens that a row's grammar does not allow."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import mlx.core as mx
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlx_ring.worker.sampler.parameters import SamplerRow


def bar(logits: mx.array, rows: Sequence[SamplerRow], first: int = 0) -> mx.array:
    """(rows, tokens) with -inf for what is not allowed; `first` is the first token's id.

    Masks come as bytes: to take 152k logits' bits apart in MLX takes a CPU twice as long as all of this.
    """
    width = logits.shape[1]
    allowed = np.zeros((len(rows), width), np.bool_)
    for index, row in enumerate(rows):
        if row.allowed is None:
            allowed[index] = True
        else:
            part = row.allowed[first : first + width]
            allowed[index, : len(part)] = part
    return mx.where(mx.array(cast("list[list[bool]]", allowed)), logits, -mx.inf)
