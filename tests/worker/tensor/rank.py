"""One rank of a ring on loopback: `python rank.py CASES FOLDER`, with MLX_RANK and MLX_HOSTFILE set.

It runs every case of the file, because a process makes a group only once. Rank 0 saves a case's results as
`NAME.safetensors`. Each rank writes the bytes that its part of the weights takes to `NAME.RANK.json`.
"""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

from mlx_cpu_kernels import decoder_layers, operations
from mlx_ring.core.lean_imports import import_mlx_lm

import_mlx_lm()

import mlx.core as mx  # noqa: E402 - what is left out of mlx-lm must be left out first
import numpy as np  # noqa: E402 - as above
from mlx_lm.models.cache import make_prompt_cache  # noqa: E402 - as above
from mlx_lm.utils import load_model  # noqa: E402 - as above # pyright: ignore[reportUnknownVariableType]

from mlx_ring.core.types import LayerRange, MemberRange  # noqa: E402 - as above
from mlx_ring.models.model_folder import ModelFolder, read_model_folder  # noqa: E402 - as above
from mlx_ring.models.tensor_shares import read_tensor_sizes, share_out  # noqa: E402 - as above
from mlx_ring.worker.kv import KVStore  # noqa: E402 - as above
from mlx_ring.worker.sampler import LazySample, Parameters, SamplerRow  # noqa: E402 - as above
from mlx_ring.worker.shard import StageModel  # noqa: E402 - as above
from mlx_ring.worker.tensor import Group, SplitHead, split  # noqa: E402 - as above
from mlx_ring.worker.weights import load_stage  # noqa: E402 - as above

Arrays = dict[str, mx.array]


class _Stages:
    """Stages of a model, each split over the group, one after the other in this process."""

    def __init__(self, folder: ModelFolder, case: dict[str, Any], group: Group) -> None:
        self._shares = share_out(read_tensor_sizes(folder), case["proportions"])
        self._group = group
        self.heads: list[SplitHead] = []
        cuts = [0, *case["cuts"], folder.num_layers]
        self._stages = [
            load_stage(folder, LayerRange(start, end), "float32", lambda _done, _total: None, self._divide)
            for start, end in pairwise(cuts)
        ]
        kv_bits = cast("int | None", case.get("kv_bits"))
        self._stores = [
            KVStore(stage.make_layer_caches(), mx.float32, kv_bits=kv_bits) for stage in self._stages
        ]

    def _divide(self, stage: StageModel) -> None:
        self.heads.append(split(stage.model, self._shares, self._group, looks_up=stage.is_first))

    def open(self, sequences: int) -> None:
        for store in self._stores:
            for sequence in range(sequences):
                store.open(sequence, 256)

    def step(self, rows: Sequence[Sequence[int]]) -> mx.array:
        """Return (rows, tokens, own part of the vocabulary) for rows that continue together."""
        width = max(map(len, rows))
        tokens = mx.array([[*row, *[0] * (width - len(row))] for row in rows])
        hidden: mx.array | None = None
        for stage, store in zip(self._stages, self._stores, strict=True):
            (batch,) = store.batches([(sequence, len(row)) for sequence, row in enumerate(rows)])
            hidden = stage.forward(tokens, hidden, batch.caches, None, offset=batch.offset)
            mx.eval(hidden, *batch.arrays)
            store.commit(batch)
        return cast("mx.array", hidden)


def _run_split(case: dict[str, Any], group: Group, report: Callable[[Any], None]) -> Arrays:
    gc.collect()  # the previous case, whose modules refer to each other
    mx.clear_cache()
    before = mx.get_active_memory()
    stages = _Stages(read_model_folder(Path(case["folder"])), case, group)
    mx.clear_cache()
    report({"bytes": mx.get_active_memory() - before})
    if case["kind"] == "load":
        return {}
    stages.open(len(case["steps"][0]))
    head, arrays = stages.heads[-1], dict[str, mx.array]()
    for number, rows in enumerate(case["steps"]):
        own = stages.step(rows)
        together = {f"logits{number}": head.logits(own), f"best{number}": head.best(own)}
        mx.eval(together)
        arrays |= together
    return arrays


def _run_native(case: dict[str, Any], group: Group, report: Callable[[Any], None]) -> Arrays:
    """Compute with the native kernels, whose prepared layers take the sums themselves; "mixed": on the first rank only."""
    if not operations.install().active:
        return {}
    if case["kind"] == "layer by layer" or (case["kind"] == "mixed" and group.rank):
        decoder_layers.uninstall()
    try:
        arrays = _run_split(case, group, lambda _: None)
        report({"prepared": len(decoder_layers._prepared)})
    finally:
        operations.uninstall()
    return arrays


def _run_shard(case: dict[str, Any], joined: mx.distributed.Group) -> Arrays:
    """Compute with mlx-lm's own split of a model, row by row on its own caches."""
    model = cast("Any", load_model(Path(case["folder"]), lazy=True)[0])
    model.shard(joined)
    arrays: Arrays = {}
    for row in range(len(case["steps"][0])):
        caches = make_prompt_cache(model)
        for number, rows in enumerate(case["steps"]):
            arrays[f"logits{number}.{row}"] = model(mx.array([rows[row]]), cache=caches)[0]
            mx.eval(arrays)
    return arrays


def _run_group(group: Group, report: Callable[[Any], None]) -> Arrays:
    rank = group.rank
    number = mx.array([rank + 1])
    ties = mx.zeros((2, 3, rank + 2))
    ties[0, 0, -1] = ties[1, 2, 0] = 1.0
    ties[1, 1] = -mx.inf
    extents = _adjacent_ranges([other + 2 for other in range(group.size)])
    head = SplitHead(group, extents)
    arrays = {
        "gathered": group.all_gather(mx.full((2, rank + 1), rank), list(range(1, group.size + 1))),
        "logits": head.logits(ties),
        "best": head.best(ties),
        "best of half": head.best(ties.astype(mx.float16)),
    }
    for dtype in (mx.int32, mx.uint32, mx.float32, mx.float16, mx.bfloat16):
        arrays[f"first {dtype}"] = group.from_first(number.astype(dtype))
    mx.eval(arrays)
    report(_draws_of_unlike_ranks(group))
    return arrays | _draws(group) | {"bytes of the next step": mx.array(_bytes_after_unused_sum(group))}


def _bytes_after_unused_sum(group: Group) -> int:
    """Return the peak bytes of a small sum, after a step that built a sum of 16 MiB and did not use it."""
    group.all_sum(mx.ones(1 << 22))
    group.end_step()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(group.all_sum(mx.ones(1)))
    return mx.get_peak_memory() - before


def _draws(group: Group) -> Arrays:
    """Draw tokens from parts of the logits, and from all of them."""
    vocabulary, heads = 300, _adjacent_ranges([10, *[290 // (group.size - 1)] * (group.size - 1)])
    heads[-1] = MemberRange(heads[-1].start, vocabulary)
    mx.random.seed(3)
    logits, own = mx.random.normal((len(_ROWS), vocabulary)).astype(mx.bfloat16), heads[group.rank]
    parts = LazySample(logits[:, own.start : own.end], _ROWS, SplitHead(group, heads))
    return {"drawn": mx.array(parts.read()[0]), "drawn alone": mx.array(LazySample(logits, _ROWS).read()[0])}


def _draws_of_unlike_ranks(group: Group) -> dict[str, list[list[int]]]:
    """Draw from logits that differ between ranks, by rows that rank 0 alone, the others alone or all draw again."""
    vocabulary = 4096
    flat, steep = mx.zeros((1, vocabulary)), mx.zeros((1, vocabulary))
    steep[0, 10 * group.rank] = 40.0
    first, others = (flat, steep) if group.rank == 0 else (steep, flat)
    mx.random.seed(group.rank)
    noise = 0.1 * mx.random.normal((1, vocabulary))
    rows = [_row(temperature=1.0, top_p=0.99) for _ in range(3)]
    rows[2] = replace(rows[2], allowed=np.arange(vocabulary) % 2 == 0)
    logits = mx.concatenate([first, others, noise])
    drawn, alone = LazySample(logits, rows, None, group), LazySample(logits, rows)
    mx.eval(drawn.arrays, alone.arrays)
    return {"drawn": list(drawn.read()), "drawn alone": list(alone.read())}


def _row(**parameters: Any) -> SamplerRow:
    history = [17, 250, 250, 4]
    return SamplerRow(Parameters(**parameters), 5, len(history), history, 1, frozenset({9, 299}))


_ROWS = [
    _row(),
    _row(temperature=1.0),
    _row(logit_bias=((299, 50.0),)),
    _row(temperature=0.7, top_p=0.8),
    _row(logit_bias=((299, 50.0),), min_tokens=9, frequency_penalty=1.5),
    _row(logit_bias=((3, 50.0),), repetition_penalty=1.5),
    _row(temperature=1.2, top_k=30, min_p=0.01),
]
"""Rows of every kind. A bias ensures that the first or the last rank has the best token."""


def _adjacent_ranges(widths: Sequence[int]) -> list[MemberRange]:
    begins = [sum(widths[:index]) for index in range(len(widths))]
    return [MemberRange(begin, begin + width) for begin, width in zip(begins, widths, strict=True)]


def main() -> None:
    cases, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    joined = mx.distributed.init(strict=True, backend="ring")
    group = Group(joined)
    for case in cases:
        name = case["name"]

        def report(value: Any, name: str = name) -> None:
            (folder / f"{name}.{group.rank}.json").write_text(json.dumps(value))

        if case["kind"] == "group":
            arrays = _run_group(group, report)
        elif case["kind"] in {"native", "mixed", "layer by layer"}:
            arrays = _run_native(case, group, report)
        elif case["kind"] == "shard":
            arrays = _run_shard(case, joined)
        else:
            arrays = _run_split(case, group, report)
        if group.rank == 0 and arrays:
            mx.save_safetensors(str(folder / f"{name}.safetensors"), arrays)


if __name__ == "__main__":
    main()
