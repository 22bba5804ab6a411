"""One family, whole and cut, step by step."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten  # pyright: ignore[reportUnknownVariableType] - its tree is any
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import _get_classes  # pyright: ignore[reportPrivateUsage, reportUnknownVariableType]
from tests.conformance.families import HIDDEN, VOCABULARY

from mlx_ring.core.types import LayerRange
from mlx_ring.worker.kv import KVStore
from mlx_ring.worker.shard import StageModel

CHUNKS = ((3, 1, 4, 1, 5), (9, 2, 6), (5, 3, 5, 8), (7,), (9,), (3,))
"""A prompt in three chunks, longer than the sliding windows, then three tokens of decode."""
PROMPTS = ((3, 1, 4, 1, 5), (9, 2, 6), (5, 3, 5, 8, 9, 7, 9, 3, 2, 3))
"""Three rows of different lengths, for ragged batches."""
DECODED = 3


@dataclass(frozen=True, slots=True)
class Family:
    """Makes copies of one model with the same seeded weights."""

    config: dict[str, Any]

    def model(self) -> nn.Module:
        classes = cast("tuple[Any, Any]", cast("object", _get_classes(self.config)))
        model_class, arguments_class = classes
        # Some vectors begin at random, and every copy must begin alike.
        mx.random.seed(0)
        model = cast("nn.Module", model_class(arguments_class.from_dict(self.config)))
        parameters = cast("dict[str, mx.array]", tree_flatten(model.parameters(), destination={}))
        model.load_weights([(name, _weight(name, value)) for name, value in parameters.items()])
        return model.eval()

    def stages(self, cuts: Sequence[int]) -> list[StageModel]:
        return [
            StageModel(self.model(), LayerRange(start, end), mx.float32, VOCABULARY, HIDDEN)
            for start, end in pairwise(cuts)
        ]


def _weight(name: str, value: mx.array) -> mx.array:
    """Matrices of unit gain, vectors near what the model begins with: every layer matters."""
    if not mx.issubdtype(value.dtype, mx.floating):
        return value
    noise = mx.random.normal(value.shape, key=mx.random.key(zlib.crc32(name.encode())))
    if value.ndim < 2:
        return (value + 0.05 * noise).astype(mx.float32)
    return 0.3 * noise / (value.shape[-1] / HIDDEN) ** 0.5


def run_whole(model: nn.Module, chunks: Sequence[Sequence[int]]) -> list[mx.array]:
    """mlx-lm's own way: logits (1, n, vocabulary) of each chunk."""
    cache = make_prompt_cache(model)
    run = cast("Any", model)
    outputs: list[mx.array] = []
    for chunk in chunks:
        outputs.append(run(mx.array([list(chunk)]), cache=cache))
        mx.eval(outputs[-1])
    return outputs


def run_cut(
    stages: Sequence[StageModel], chunks: Sequence[Sequence[int]], *, ends_alone: bool = False
) -> list[mx.array]:
    """Stages with mlx-lm's own caches; with `ends_alone`, logits of each chunk's first and last token."""
    caches = [stage.make_layer_caches() for stage in stages]
    outputs: list[mx.array] = []
    offset = 0
    for chunk in chunks:
        tokens = mx.array([list(chunk)])
        hidden: mx.array | None = None
        wanted = mx.array([0, len(chunk) - 1]) if ends_alone else None
        for stage, owned in zip(stages, caches, strict=True):
            hidden = stage.forward(tokens, hidden, owned, wanted, offset=offset)
        outputs.append(_evaluated(hidden))
        offset += len(chunk)
    return outputs


class StoredPipeline:
    """Stages with the worker's KV store, as workers run them; rows may be ragged."""

    def __init__(self, stages: Sequence[StageModel], *, ragged: bool) -> None:
        self._stages = stages
        self._stores = [KVStore(stage.make_layer_caches(), mx.float32, ragged=ragged) for stage in stages]

    def step(self, rows: dict[int, Sequence[int]]) -> dict[int, mx.array]:
        """Feed each sequence its tokens; logits (n, vocabulary) of each."""
        asked = [(sequence, len(ids)) for sequence, ids in rows.items()]
        sequences = list(rows)
        hidden: dict[int, mx.array] = {}
        for stage, store in zip(self._stages, self._stores, strict=True):
            outputs: dict[int, mx.array] = {}
            for batch in store.batches(asked):
                members = [sequences[index] for index in batch.rows]
                width = max(batch.counts)
                tokens = mx.array([[*rows[member], *[0] * (width - len(rows[member]))] for member in members])
                given = mx.stack([_padded(hidden[member], width) for member in members]) if hidden else None
                values = stage.forward(tokens, given, batch.caches, None, offset=batch.offset)
                mx.eval(values, *batch.arrays)
                store.commit(batch)
                for place, member in enumerate(members):
                    outputs[member] = values[place, : batch.counts[place]]
            hidden = outputs
        return hidden

    def open(self, sequences: Sequence[int]) -> None:
        for store in self._stores:
            for sequence in sequences:
                store.open(sequence, 256)


def _padded(rows: mx.array, width: int) -> mx.array:
    return mx.pad(rows, [(0, width - rows.shape[0]), (0, 0)])


def _evaluated(array: mx.array | None) -> mx.array:
    if array is None:
        raise ValueError("a pipeline has at least one stage")
    mx.eval(array)
    return array


def difference(first: mx.array, second: mx.array) -> float:
    """The largest, in units of the largest logit."""
    scale = max(1.0, cast("float", mx.abs(second).max().item()))
    return cast("float", mx.abs(first - second).max().item()) / scale
