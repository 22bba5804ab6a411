"""Step-by-step runs of one family, whole and split."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from typing import Any, cast

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten  # pyright: ignore[reportUnknownVariableType] - its tree is any
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import _get_classes  # pyright: ignore[reportPrivateUsage, reportUnknownVariableType]
from tests.conformance.families import HIDDEN, VOCABULARY

from mlx_ring.core.errors import ModelUnsupported
from mlx_ring.core.types import LayerRange
from mlx_ring.rpc.protos import step_pb2, worker_pb2
from mlx_ring.worker.forward import Pass, StageForward, evaluate, flat_activations
from mlx_ring.worker.inputs import RowInput, StepInput, read_wants
from mlx_ring.worker.kv import KVStore
from mlx_ring.worker.kv.block_files import kinds_of
from mlx_ring.worker.kv.disk import KvDisk
from mlx_ring.worker.sequences import OpenSequence
from mlx_ring.worker.shard import StageModel

CHUNKS = ((3, 1, 4, 1, 5), (9, 2, 6), (5, 3, 5, 8), (7,), (9,), (3,))
"""Prompt in three chunks, longer than the sliding windows, then three decode tokens."""
PROMPTS = ((3, 1, 4, 1, 5), (9, 2, 6), (5, 3, 5, 8, 9, 7, 9, 3, 2, 3))
"""Three rows of different lengths, for ragged batches."""
DECODED = 3
ROW_STEPS = (PROMPTS, *(tuple((10 * step + row,) for row in range(len(PROMPTS))) for step in range(DECODED)))
"""Tokens of each row in each step: its prompt, then decode tokens."""
BLOCK = 8
"""Tokens of a block of saved KV."""


@dataclass(frozen=True)
class Family:
    """Factory of copies of one model with the same seeded weights."""

    config: dict[str, Any]

    def model(self) -> nn.Module:
        model = self._build()
        model.load_weights(list(self._weights.items()))
        return model.eval()

    def _build(self) -> nn.Module:
        model_class, _ = self._classes
        # Some vectors are initialized at random; all copies must be equal.
        mx.random.seed(0)
        return cast("nn.Module", model_class(deepcopy(self._arguments)))

    @cached_property
    def _classes(self) -> tuple[Any, Any]:
        return cast("tuple[Any, Any]", cast("object", _get_classes(self.config)))

    @cached_property
    def _arguments(self) -> Any:
        """The configuration as mlx-lm reads it, which takes as long as a run of a small model."""
        return self._classes[1].from_dict(self.config)

    @cached_property
    def _weights(self) -> dict[str, mx.array]:
        parameters = cast("dict[str, mx.array]", tree_flatten(self._build().parameters(), destination={}))
        weights = {name: _weight(name, value) for name, value in parameters.items()}
        mx.eval(weights)
        return weights

    @cached_property
    def rows_alone(self) -> list[list[mx.array]]:
        """Logits (1, n, vocabulary) of the whole model in each of `ROW_STEPS`, for each row alone."""
        model = self.model()
        return [run_whole(model, chunks) for chunks in zip(*ROW_STEPS, strict=True)]

    def stages(self, cuts: Sequence[int]) -> list[StageModel]:
        return [self._stage(LayerRange(start, end)) for start, end in pairwise(cuts)]

    def _stage(self, layers: LayerRange) -> StageModel:
        """Return a stage whose unneeded weights are NaN, so that any use of them is visible."""
        stage = StageModel(self.model(), layers, mx.float32, VOCABULARY, HIDDEN)
        parameters = cast("dict[str, mx.array]", tree_flatten(stage.model.parameters(), destination={}))
        unread = [(path, value) for path, value in parameters.items() if not stage.needs(path)]
        stage.model.load_weights(
            [
                (path, mx.full(value.shape, mx.nan, value.dtype))
                for path, value in unread
                if mx.issubdtype(value.dtype, mx.floating)
            ],
            strict=False,
        )
        return stage


def _weight(name: str, value: mx.array) -> mx.array:
    """Return matrices of unit gain, and vectors near their initial values, so that every layer has an effect."""
    if not mx.issubdtype(value.dtype, mx.floating):
        return value
    noise = mx.random.normal(value.shape, key=mx.random.key(zlib.crc32(name.encode())))
    if value.ndim < 2:
        return (value + 0.05 * noise).astype(mx.float32)
    return 0.3 * noise / (value.shape[-1] / HIDDEN) ** 0.5


def run_whole(model: nn.Module, chunks: Sequence[Sequence[int]]) -> list[mx.array]:
    """Run mlx-lm's own code; return the logits (1, n, vocabulary) of each chunk."""
    cache = make_prompt_cache(model)
    run = cast("Any", model)
    outputs: list[mx.array] = []
    for chunk in chunks:
        outputs.append(run(mx.array([list(chunk)]), cache=cache))
        mx.eval(outputs[-1])
    return outputs


def run_cut(stages: Sequence[StageModel], chunks: Sequence[Sequence[int]]) -> list[mx.array]:
    """Run stages with mlx-lm's own caches."""
    caches = [stage.make_layer_caches() for stage in stages]
    outputs: list[mx.array] = []
    offset = 0
    for chunk in chunks:
        tokens = mx.array([list(chunk)])
        hidden: mx.array | None = None
        for stage, owned in zip(stages, caches, strict=True):
            hidden = stage.forward(tokens, hidden, owned, None, offset=offset)
        outputs.append(_evaluated(hidden))
        offset += len(chunk)
    return outputs


def _evaluated(array: mx.array | None) -> mx.array:
    if array is None:
        raise ValueError("a pipeline has at least one stage")
    mx.eval(array)
    return array


@dataclass(frozen=True, slots=True)
class RowOutput:
    """Results of a row at the wanted positions."""

    offsets: tuple[int, ...]
    values: mx.array
    """Array of shape (offsets, vocabulary)."""


class WorkerPipeline:
    """Stages as in workers: with the KV store, grouped rows, and results only at wanted offsets."""

    def __init__(self, stages: Sequence[StageModel], *, ragged: bool, kv_bits: int | None = None) -> None:
        self._stores = [
            KVStore(stage.make_layer_caches(), mx.float32, ragged=ragged, kv_bits=kv_bits) for stage in stages
        ]
        self._forwards = [
            StageForward(stage, store) for stage, store in zip(stages, self._stores, strict=True)
        ]
        self._numbers = [stage.cache_numbers for stage in stages]

    def open(self, sequences: Iterable[int]) -> None:
        for sequence in sequences:
            for store in self._stores:
                store.open(sequence, 256)

    def step(
        self, tokens: Mapping[int, Sequence[int]], wants: Mapping[int, step_pb2.Want]
    ) -> dict[int, RowOutput]:
        """Feed each sequence its tokens; return the wanted results of each."""
        rows = [self._row(sequence, ids, wants[sequence]) for sequence, ids in tokens.items()]
        step = StepInput(rows, None)
        for stage in range(len(self._forwards) - 1):
            step = StepInput(rows, flat_activations(self._run(stage, step)))
        outputs: dict[int, RowOutput] = {}
        for item in self._run(-1, step):
            for place, member in enumerate(item.members):
                offsets = item.offsets[place]
                outputs[rows[member].row.sequence] = RowOutput(offsets, item.values[place, : len(offsets)])
        return outputs

    def save(self, folder: Path, sequence: int) -> None:
        """Save the KV of a sequence that has whole blocks."""
        blocks = step_pb2.KvBlocks(block_tokens=BLOCK, digests=_digests(self._stores[0].length(sequence)))
        for disk, store in self._disks(folder):
            for end in (True, False):
                disk.save(store, step_pb2.Save(sequence=sequence, blocks=blocks, end=end))
            disk.settle()

    def restore(self, folder: Path, sequence: int, length: int) -> bool:
        """Restore saved KV as a new sequence; return False if a stage does not find it."""
        blocks = step_pb2.KvBlocks(block_tokens=BLOCK, digests=_digests(length))
        for disk, store in self._disks(folder):
            answers: SimpleQueue[int] = SimpleQueue()

            def answer(fetched: worker_pb2.KvFetched, put: Callable[[int], None] = answers.put) -> None:
                put(fetched.blocks)

            disk.fetch(worker_pb2.FetchKv(id=1, blocks=blocks), answer)
            if answers.get(timeout=60) * BLOCK != length:
                return False
            store.open(sequence, 256)
            disk.adopt(store, step_pb2.Adopt(sequence=sequence, fetch=1, length=length))
        return True

    def _disks(self, folder: Path) -> Iterator[tuple[KvDisk, KVStore]]:
        for layers, store in zip(self._numbers, self._stores, strict=True):
            if store.unsaved_layers:
                raise ModelUnsupported(store.unsaved_layers)
            yield KvDisk(folder, 1 << 30, "0" * 32, layers, kinds_of(store, layers)), store

    def _row(self, sequence: int, ids: Sequence[int], want: step_pb2.Want) -> RowInput:
        row = step_pb2.Row(
            sequence=sequence,
            start=self._stores[0].length(sequence),
            tokens=step_pb2.Tokens(ids=ids),
            wants=[want],
        )
        state = OpenSequence.from_message(step_pb2.Open(sequence=sequence), 1)
        return RowInput(row, state, list(ids), None, read_wants(row, len(ids)), None)

    def _run(self, stage: int, step: StepInput) -> list[Pass]:
        passes: list[Pass] = []
        self._forwards[stage].build(step, passes)
        evaluate(passes, *(item.values for item in passes))
        for item in passes:
            mx.eval(item.values)
            self._stores[stage].commit(item.batch)
        return passes


def _digests(length: int) -> list[bytes]:
    return [bytes([place]) * 16 for place in range(length // BLOCK)]


def difference(first: mx.array, second: mx.array) -> float:
    """Return the largest difference relative to the largest logit; infinite if a value is not a number."""
    scale = max(1.0, cast("float", mx.abs(second).max().item()))
    largest = cast("float", mx.abs(first - second).max().item()) / scale
    return math.inf if math.isnan(largest) else largest
