"""Outcome of the conformance run for one family."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from typing import Any, cast

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_map  # pyright: ignore[reportUnknownVariableType] - its tree is any
from mlx_lm.models import switch_layers
from mlx_lm.models.cache import CacheList, KVCache, make_prompt_cache
from tests.conformance.families import CONDITIONS, LAYERS, VOCABULARY, WHY, configuration, with_entries
from tests.conformance.pipelines import (
    BLOCK,
    CHUNKS,
    PROMPTS,
    ROW_STEPS,
    Family,
    WorkerPipeline,
    difference,
    run_cut,
    run_whole,
)

from mlx_ring.models.architectures import Architecture
from mlx_ring.rpc.protos.step_pb2 import Want
from mlx_ring.worker.shard import find_heads

WHOLE = [0, LAYERS]
CUTS = ([0, 3, LAYERS], [0, 1, 5, LAYERS], [0, 2, 3, 4, LAYERS])
WANTS = {
    0: Want(what=Want.LOGITS, where=Want.ALL),
    1: Want(what=Want.LOGITS, where=Want.LAST),
    2: Want(what=Want.LOGITS, where=Want.LISTED, listed=[0]),
}
"""Wanted results by row: at all positions, the last, the first."""
GROUP_SIZE = 32
PROCESSES = 2
_LONGEST_S = 180.0
CLOSE = 1e-4
"""Tolerance for batching and other orders of summation, relative to the largest logit."""
SEEN = 1e-3
"""Minimum effect of a change of a tenth in one layer's weights, relative to the largest logit."""


def examine(family: str) -> Architecture:
    """Run a family whole, split and batched. The outcome includes any exception."""
    config = configuration(family)
    found = _examine(config)
    condition = CONDITIONS.get(family, {})
    if not found.exact and condition:
        freed = _examine(with_entries(config, condition))
        if freed.exact:
            batches = freed.batches and (found.batches or not found.whole)
            found = replace(found, exact=True, batches=batches, only_if=condition)
    return (
        found if found.exact and not found.only_if else replace(found, reason=WHY.get(family, found.reason))
    )


def _examine(config: dict[str, Any]) -> Architecture:
    maker = Family(config)
    try:
        model = maker.model()
        expected = run_whole(model, CHUNKS)
        idle = _idle_parts(maker, expected)
    except Exception as error:  # noqa: BLE001 - any refusal by mlx-lm counts
        return Architecture(reason=f"mlx-lm does not run it here: {_brief(error)}")
    own, twin = find_heads(model, VOCABULARY), Family(with_entries(config, {"tie_word_embeddings": True}))
    tied = _runs_without_head(twin)
    found = Architecture(caches=_cache_kinds(model), experts=_has_experts(model), tied=tied)
    if idle:
        return replace(found, reason=f"its small configuration makes too little of its {', '.join(idle)}")
    found = replace(found, **_runs(maker, expected))
    if found.exact and own and tied:
        exact, reason = _equals(twin, CUTS[:1], run_whole(twin.model(), CHUNKS))
        return replace(found, exact=exact, reason=f"with a tied head, {reason}" if reason else "")
    return found


def _runs(maker: Family, expected: Sequence[mx.array]) -> dict[str, Any]:
    """Run the family on one stage, on several, and in batches."""
    whole, reason = _equals(maker, [WHOLE], expected)
    exact, reason = _equals(maker, CUTS, expected) if whole else (False, reason)
    batches = whole and _batches(maker, CUTS if exact else (WHOLE,))
    restores = whole and _restores(maker, *(CUTS[:2] if exact else (WHOLE, WHOLE)))
    return {"exact": exact, "whole": whole, "batches": batches, "restores": restores, "reason": reason}


def _idle_parts(maker: Family, expected: Sequence[mx.array]) -> list[str]:
    """List the parts without effect on the logits, for which equal logits prove nothing."""
    model = maker.model()
    idle: list[str] = []
    for index, layer in enumerate(cast("Sequence[nn.Module]", model.layers)):
        before = cast("dict[str, Any]", layer.parameters())
        layer.update(tree_map(_changed, before))
        if difference(run_whole(model, CHUNKS[:1])[0], expected[0]) < SEEN:
            idle.append(f"layer {index}")
        layer.update(before)
    if difference(run_whole(model, CHUNKS[-1:])[0], expected[-1]) < SEEN:
        idle.append("caches")
    return idle


def _changed(value: mx.array) -> mx.array:
    return 1.1 * value if mx.issubdtype(value.dtype, mx.floating) else value


def _runs_without_head(maker: Family) -> bool:
    model = maker.model()
    try:
        run_whole(model, CHUNKS[:1])
    except AttributeError:  # a family that has no output head and then uses it
        return False
    return not find_heads(model, VOCABULARY)


def _cache_kinds(model: nn.Module) -> tuple[str, ...]:
    kinds: set[str] = set()
    for cache in make_prompt_cache(model):
        parts = cast("Sequence[object]", getattr(cache, "caches", [cache]))
        kinds.update(type(part).__name__ for part in parts)
    return tuple(sorted(kinds))


def _has_experts(model: nn.Module) -> bool:
    modules = cast("list[tuple[str, nn.Module]]", model.named_modules())
    return any(
        type(module).__module__ == switch_layers.__name__ or "experts" in path for path, module in modules
    )


def _equals(maker: Family, cuts: Sequence[Sequence[int]], expected: Sequence[mx.array]) -> tuple[bool, str]:
    """Compare the logits of stages and of the whole model; return the result and the difference."""
    try:
        found = max(_largest(run_cut(maker.stages(cut), CHUNKS), expected) for cut in cuts)
        alone = _alone_differs(maker, cuts[0], expected)
        together = _together_differ(maker, cuts[0], ragged=False)
    except Exception as error:  # noqa: BLE001 - any failure says that it cannot be cut
        return False, _brief(error)
    if found > 0.0:
        return False, f"logits of the pieces differ by {found:.2g}"
    if max(alone, together) > CLOSE:
        return False, f"logits with stored KV differ by {max(alone, together):.2g}"
    return True, ""


def examine_apart(families: Iterable[str]) -> dict[str, Architecture]:
    """Run families in separate processes, so that a crash affects only one family."""
    examiners = [_Examiner() for _ in range(PROCESSES)]
    idle: SimpleQueue[_Examiner] = SimpleQueue()

    def examine_in_one(family: str) -> tuple[str, Architecture]:
        examiner = idle.get()
        try:
            return family, examiner.examine(family)
        finally:
            idle.put(examiner)

    try:
        for examiner in examiners:
            idle.put(examiner)
        with ThreadPoolExecutor(PROCESSES) as threads:
            return dict(threads.map(examine_in_one, families))
    finally:
        for examiner in examiners:
            examiner.end()


class _Examiner:
    """Process that examines families; it is restarted after a crash or a timeout."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        context = get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_examine_all, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def examine(self, family: str) -> Architecture:
        self._connection.send(family)
        try:
            if self._connection.poll(_LONGEST_S):
                return self._connection.recv()
            reason = f"it does not end within {_LONGEST_S:.0f} s"
        except (EOFError, ConnectionError):
            reason = "it takes its process down on this machine"
        self.end()
        self._start()
        return Architecture(reason=WHY.get(family, reason))

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self._connection.close()


def _examine_all(connection: Connection[Architecture, str]) -> None:
    """Run the process: answer until the other end is closed."""
    while True:
        try:
            connection.send(examine(connection.recv()))
        except EOFError:
            return


def _batches(maker: Family, cuts: Iterable[Sequence[int]]) -> bool:
    """Return true if rows of different lengths may share a forward pass, however the model is cut."""
    try:
        return all(_together_differ(maker, cut, ragged=True) <= CLOSE for cut in cuts)
    except Exception:  # noqa: BLE001 - then they may not
        return False


def _restores(maker: Family, saved: Sequence[int], restored: Sequence[int]) -> bool:
    """Return true if a sequence continues with the same logits after its KV was saved, and restored by other stages."""
    try:
        with TemporaryDirectory() as folder:
            return _restored_differs(maker, saved, restored, Path(folder)) == 0.0
    except Exception:  # noqa: BLE001 - then it does not
        return False


def _restored_differs(maker: Family, saved: Sequence[int], restored: Sequence[int], folder: Path) -> float:
    before, after = (WorkerPipeline(maker.stages(cuts), ragged=False) for cuts in (saved, restored))
    before.open([0])
    for _ in range(3):
        before.step({0: range(BLOCK)}, WANTS)
    before.save(folder, 0)
    after.open([1])
    after.step({1: PROMPTS[0]}, WANTS)  # as workers do before they serve
    if not after.restore(folder, 0, 3 * BLOCK):
        return math.inf
    outputs = [(after.step({0: chunk}, WANTS)[0], before.step({0: chunk}, WANTS)[0]) for chunk in CHUNKS]
    return max(difference(ours.values, theirs.values) for ours, theirs in outputs)


def _alone_differs(maker: Family, cuts: Sequence[int], expected: Sequence[mx.array]) -> float:
    """Compare one sequence, run by a worker's code, with the whole model."""
    pipeline = WorkerPipeline(maker.stages(cuts), ragged=True)
    pipeline.open([0])
    outputs = [pipeline.step({0: chunk}, WANTS)[0] for chunk in CHUNKS]
    return _largest([output.values[None] for output in outputs], expected)


def _together_differ(maker: Family, cuts: Sequence[int], *, ragged: bool) -> float:
    """Compare three sequences in one batch, run by a worker's code, with each alone and with the whole model."""
    pipeline = WorkerPipeline(maker.stages(cuts), ragged=ragged)
    pipeline.open(range(len(PROMPTS)))
    worst = 0.0
    for number, step in enumerate(ROW_STEPS):
        for row, output in pipeline.step(dict(enumerate(step)), WANTS).items():
            wanted = maker.rows_alone[row][number][0][mx.array(output.offsets)]
            worst = max(worst, difference(output.values, wanted))
    return worst


def _largest(outputs: Sequence[mx.array], expected: Sequence[mx.array]) -> float:
    return max(difference(ours, theirs) for ours, theirs in zip(outputs, expected, strict=True))


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"


def quantized_differs(config: dict[str, Any], bits: int) -> float:
    """Compare a sequence over quantized KV, run by a worker's code, with mlx-lm's own quantized caches.

    Raises:
        Exception: mlx-lm's attention cannot compute over them.
    """
    maker = Family(config)
    run, caches = (
        cast("Any", maker.model()),
        [_quantized(cache, bits) for cache in make_prompt_cache(maker.model())],
    )
    pipeline = WorkerPipeline(maker.stages(WHOLE), ragged=False, kv_bits=bits)
    pipeline.open([0])
    differences: list[float] = []
    for chunk in CHUNKS:
        expected = cast("mx.array", run(mx.array([list(chunk)]), cache=caches))
        differences.append(difference(pipeline.step({0: chunk}, WANTS)[0].values, expected[0]))
    return max(differences)


def _quantized(cache: Any, bits: int) -> Any:
    """Return mlx-lm's quantized form of a cache with full attention, and any other one as it is."""
    if type(cache) is KVCache:
        return cache.to_quantized(group_size=GROUP_SIZE, bits=bits)
    if type(cache) is CacheList:
        cache.caches = tuple(_quantized(child, bits) for child in cast("Sequence[Any]", cache.caches))
    return cache
