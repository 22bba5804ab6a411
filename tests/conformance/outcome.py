"""What the conformance run finds out about one family."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import cast

from mlx_lm.models.cache import make_prompt_cache
from tests.conformance.families import LAYERS, LEFT_OUT, WHY, configuration
from tests.conformance.pipelines import (
    CHUNKS,
    DECODED,
    PROMPTS,
    Family,
    StoredPipeline,
    difference,
    run_cut,
    run_whole,
)

from mlx_ring.core.architectures import Architecture

CUTS = ([0, 3, LAYERS], [0, 1, 5, LAYERS], [0, 2, 3, 4, LAYERS])
CLOSE = 1e-4
"""Of the largest logit: what batching and other orders of summing may differ by."""


def examine(family: str) -> Architecture:
    """Run a family whole, cut and batched. What it raises is part of the outcome."""
    maker = Family(configuration(family))
    try:
        model = maker.model()
        expected = run_whole(model, CHUNKS)
        caches = tuple(sorted({type(cache).__name__ for cache in make_prompt_cache(model)}))
    except Exception as error:  # noqa: BLE001 - any refusal by mlx-lm counts
        return Architecture(reason=WHY.get(family, f"mlx-lm does not run it here: {_brief(error)}"))
    try:
        whole = _largest(run_cut(maker.stages([0, LAYERS]), CHUNKS), expected) == 0.0
        found = max(_largest(run_cut(maker.stages(cuts), CHUNKS), expected) for cuts in CUTS)
        stored = _stored_differs(maker, [0, 3, LAYERS], ragged=False)
    except Exception as error:  # noqa: BLE001 - any failure says that it cannot be cut
        return Architecture(caches=caches, reason=WHY.get(family, _brief(error)), whole=_whole_runs(maker))
    if found > 0.0:
        return Architecture(caches=caches, whole=whole, reason=f"logits of the pieces differ by {found:.2g}")
    if stored > CLOSE:
        return Architecture(
            caches=caches, whole=whole, reason=f"logits with stored KV differ by {stored:.2g}"
        )
    return Architecture(caches=caches, exact=True, whole=True, batches=_batches(maker))


def examine_apart(families: Iterable[str]) -> dict[str, Architecture]:
    """Run families in a process of their own, so that one that takes its process down is but one outcome."""
    found: dict[str, Architecture] = {}
    process = _one_process()
    for family in families:
        if family in LEFT_OUT:
            found[family] = Architecture(reason=LEFT_OUT[family])
            continue
        found[family] = _examine_in(process, family)
        if not found[family].caches:
            process.shutdown()
            process = _one_process()
    process.shutdown()
    return found


def _one_process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=get_context("spawn"))


def _examine_in(process: ProcessPoolExecutor, family: str) -> Architecture:
    try:
        return process.submit(examine, family).result()
    except BrokenProcessPool:
        return Architecture(reason="it takes its process down on this machine")
    except SystemExit:
        return Architecture(reason="its module ends the process: it needs a package that is not installed")


def _whole_runs(maker: Family) -> bool:
    try:
        return _stored_differs(maker, [0, LAYERS], ragged=False) <= CLOSE
    except Exception:  # noqa: BLE001 - then it is refused altogether
        return False


def _batches(maker: Family) -> bool:
    """Whether rows of different lengths may share a forward pass."""
    try:
        return _stored_differs(maker, [0, 3, LAYERS], ragged=True) <= CLOSE
    except Exception:  # noqa: BLE001 - then they may not
        return False


def _stored_differs(maker: Family, cuts: Sequence[int], *, ragged: bool) -> float:
    """Three sequences over the worker's KV store, prefilled together, against each alone and whole."""
    model = maker.model()
    pipeline = StoredPipeline(maker.stages(cuts), ragged=ragged)
    sequences = range(len(PROMPTS))
    pipeline.open(sequences)
    steps = [PROMPTS, *[tuple((10 * step + row,) for row in sequences) for step in range(DECODED)]]
    expected = [run_whole(model, [step[row] for step in steps]) for row in sequences]
    worst = 0.0
    for number, step in enumerate(steps):
        outputs = pipeline.step(dict(enumerate(step)))
        worst = max(worst, *(difference(outputs[row], expected[row][number][0]) for row in sequences))
    return worst


def _largest(outputs: Sequence[object], expected: Sequence[object]) -> float:
    import mlx.core as mx  # noqa: PLC0415 - typed here alone

    return max(
        difference(cast("mx.array", ours), cast("mx.array", theirs))
        for ours, theirs in zip(outputs, expected, strict=True)
    )


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
