"""Drivers of a KV store, as a stage uses it: form batches, run a model over their caches, commit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import make_prompt_cache

from mlx_ring.worker.kv import Batch, KVStore

HEADS = 2
WIDTH = 4


def padded(batch: Batch, rows: Sequence[Sequence[int]]) -> mx.array:
    """Return the batch's tokens, `(batch, width)`."""
    width = max(batch.counts)
    return mx.array([[*rows[index], *[0] * (width - len(rows[index]))] for index in batch.rows])


class ModelRun:
    """Whole model over a KV store, beside the same model over mlx-lm's own caches."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        self.model = cast("Any", model)
        self.store = KVStore(self.own_caches(), mx.float32, **options)

    def own_caches(self) -> list[Any]:
        return make_prompt_cache(self.model)

    def open(self, *sequences: int) -> None:
        for sequence in sequences:
            self.store.open(sequence, 4096)

    def step(self, work: Mapping[int, Sequence[int]]) -> dict[int, mx.array]:
        """Return logits `(tokens, vocabulary)` of each sequence."""
        sequences, rows = list(work), list(work.values())
        logits: dict[int, mx.array] = {}
        for batch in self.store.batches([(sequence, len(work[sequence])) for sequence in sequences]):
            output = self.model(padded(batch, rows), cache=batch.caches)
            mx.eval(output, *batch.arrays)
            self.store.commit(batch)
            for place, (index, count) in enumerate(zip(batch.rows, batch.counts, strict=True)):
                logits[sequences[index]] = output[place, :count]
        return logits

    def alone(self, chunks: Sequence[Sequence[int]], caches: list[Any] | None = None) -> mx.array:
        """Return logits of the last chunk from mlx-lm's own caches."""
        caches = self.own_caches() if caches is None else caches
        output = None
        for chunk in chunks:
            output = self.model(mx.array([list(chunk)]), cache=caches)
            mx.eval(output)
        return cast("mx.array", output)[0]


def difference(left: mx.array, right: mx.array) -> float:
    """Return the largest difference between two arrays."""
    return cast("float", mx.abs(left - right).max().item())


def to_list(array: mx.array) -> list[float]:
    """Return the numbers of an array of one axis."""
    return cast("list[float]", array.tolist())


def feed(batch: Batch, rows: Sequence[Sequence[int]]) -> list[list[mx.array]]:
    """Append tokens as keys that name them, and their negatives as values; return each cache's result."""
    tokens = padded(batch, rows).astype(mx.float32)[:, None, :, None]
    fetched: list[list[mx.array]] = []
    for layer, cache in enumerate(batch.caches):
        shape = (tokens.shape[0], HEADS, tokens.shape[2], WIDTH)
        keys = mx.broadcast_to(tokens + 10_000 * layer, shape)
        fetched.append(list(cache.update_and_fetch(keys, -keys)))
    return fetched


def visible_keys(mask: Any, query: int, queries: int, keys: int, row: int) -> list[bool]:
    """Return for each key whether the mask shows it to a query, as mlx-lm's attention reads masks."""
    if mask is None:
        return [True] * keys
    if isinstance(mask, str):
        return [key <= query + keys - queries for key in range(keys)]
    own = mask if mask.ndim == 2 else mask[row, 0]
    return cast("list[bool]", mx.broadcast_to(own, (queries, keys))[query].tolist())
