"""What a stage takes on a machine, by counting bytes and operations: memory and time. Pure.

A step reads its weights once, whatever the number of rows, and multiplies for each of them: the slower of both counts.
On top come each row's KV, and what every step costs whatever is in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from mlx_ring.cluster.planner.profiles import ModelProfile, NodeProfile

STEP_S = 0.3e-3
"""Of a step on any stage: Python, launches, the wire's own code."""
_CHUNK_TOKENS = 512
_NUMBERS_PER_TOKEN = 16
"""Of the hidden size, what a layer holds for one token of a chunk at its widest."""
_FLOAT_BYTES = 4

Table = NDArray[np.float64]
"""`(layers + 1, layers + 1)`: by first layer and end; infinite where no stage can be."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What is promised to those who ask."""

    context_tokens: int
    sequences: int
    kv_bits: int = 16

    def kv_factor(self) -> float:
        """Of 16-bit KV: what the bits take, with 32 bits of scale and bias for 64 numbers."""
        return 1.0 if self.kv_bits >= 16 else (self.kv_bits + 0.5) / 16  # noqa: PLR2004 - bits


class StageTables:
    """Sums over layers, so that a stage's costs are differences."""

    def __init__(self, model: ModelProfile, demand: Demand) -> None:
        self.model = model
        self.demand = demand

    @cached_property
    def _bytes_before(self) -> Table:
        """By layer: bytes of all before it, KV included, as if embedding and head stood in the outer layers."""
        model, demand = self.model, self.demand
        sizes = [
            layer.weight_bytes
            + demand.sequences
            * (
                layer.kv_bytes_per_token * demand.context_tokens * demand.kv_factor()
                + layer.kv_bytes_per_sequence
            )
            for layer in model.layers
        ]
        sizes[0] += model.embedding_bytes
        sizes[-1] += model.head_bytes + _FLOAT_BYTES * demand.sequences * model.vocabulary
        return np.array(list(accumulate(sizes, initial=0.0)))

    @cached_property
    def memory(self) -> Table:
        """Bytes of every stage that could be, working memory included."""
        before = self._bytes_before
        held = before[None, :] - before[:, None]
        if self.model.is_tied:
            held[0, -1] -= self.model.head_bytes
        working = _FLOAT_BYTES * _CHUNK_TOKENS * self.model.hidden_size * _NUMBERS_PER_TOKEN
        return held + working

    def seconds(self, node: NodeProfile, rows: int, context_tokens: int) -> Table:
        """One step with `rows` tokens of as many sequences, each behind `context_tokens`; infinite where memory ends."""
        model = self.model
        read = [min(layer.weight_bytes, layer.read_bytes * rows) for layer in model.layers]
        flops = [layer.flops_per_token * rows for layer in model.layers]
        kv = [
            rows
            * (
                layer.kv_bytes_per_token * context_tokens * self.demand.kv_factor()
                + layer.kv_bytes_per_sequence
            )
            for layer in model.layers
        ]
        head = max(
            model.head_bytes / node.bandwidth, 2 * rows * model.vocabulary * model.hidden_size / node.flops
        )
        each = [
            max(weights / node.bandwidth, work / node.flops) + cache / node.bandwidth
            for weights, work, cache in zip(read, flops, kv, strict=True)
        ]
        each[-1] += head
        before = np.array(list(accumulate(each, initial=0.0)))
        table = before[None, :] - before[:, None] + STEP_S
        fits = self.memory <= node.usable_bytes
        fits &= np.arange(len(before))[:, None] < np.arange(len(before))[None, :]
        return np.where(fits, table, np.inf)

    def prefill_seconds(self, node: NodeProfile, first: int, end: int, tokens: int) -> float:
        """A stage's part of reading a prompt."""
        model = self.model
        flops = sum(layer.flops_per_token for layer in model.layers[first:end]) * tokens
        # Scores and their sums: every token looks at those before it.
        flops += (end - first) * 2 * tokens * tokens * model.hidden_size
        return flops / node.flops
