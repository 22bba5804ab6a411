"""What the conformance run finds out about one family."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from tests.conformance.families import CONDITIONS, LAYERS, WHY, configuration, with_entries
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

WHOLE = [0, LAYERS]
CUTS = ([0, 3, LAYERS], [0, 1, 5, LAYERS], [0, 2, 3, 4, LAYERS])
_LONGEST_S = 180.0
CLOSE = 1e-4
"""Of the largest logit: what batching and other orders of summing may differ by."""


def examine(family: str) -> Architecture:
    """Run a family whole, cut and batched. What it raises is part of the outcome."""
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
        caches = tuple(sorted({type(cache).__name__ for cache in make_prompt_cache(model)}))
    except Exception as error:  # noqa: BLE001 - any refusal by mlx-lm counts
        return Architecture(reason=f"mlx-lm does not run it here: {_brief(error)}")
    whole, reason = _equals(maker, [WHOLE], expected)
    exact, reason = _equals(maker, CUTS, expected) if whole else (False, reason)
    batches = whole and _batches(maker, CUTS[0] if exact else WHOLE)
    return Architecture(exact, whole, batches, caches, reason=reason)


def _equals(maker: Family, cuts: Sequence[Sequence[int]], expected: Sequence[mx.array]) -> tuple[bool, str]:
    """Whether stages give the whole's logits, and what is wrong otherwise."""
    try:
        found = max(_largest(run_cut(maker.stages(cut), CHUNKS), expected) for cut in cuts)
        ends = run_cut(maker.stages(cuts[0]), CHUNKS, ends_alone=True)
        apart = _largest(ends, [logits[:, mx.array([0, -1])] for logits in expected])
        stored = _stored_differs(maker, cuts[0], ragged=False)
    except Exception as error:  # noqa: BLE001 - any failure says that it cannot be cut
        return False, _brief(error)
    if found > 0.0:
        return False, f"logits of the pieces differ by {found:.2g}"
    if apart > CLOSE:
        return False, f"logits of single positions differ by {apart:.2g}"
    if stored > CLOSE:
        return False, f"logits with stored KV differ by {stored:.2g}"
    return True, ""


def examine_apart(families: Iterable[str]) -> dict[str, Architecture]:
    """Run families in a process of their own, so that one that takes its process down is but one outcome."""
    examiner = _Examiner()
    try:
        return {family: examiner.examine(family) for family in families}
    finally:
        examiner.end()


class _Examiner:
    """Examines families in a process that is started anew when one has ended or held it up."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        context = get_context("spawn")
        self._asks, theirs = context.Pipe()
        self._process = context.Process(target=_examine_all, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def examine(self, family: str) -> Architecture:
        self._asks.send(family)
        try:
            if self._asks.poll(_LONGEST_S):
                return self._asks.recv()
            reason = f"it does not end within {_LONGEST_S:.0f} s"
        except (EOFError, ConnectionError):
            reason = "it takes its process down on this machine"
        self.end()
        self._start()
        return Architecture(reason=WHY.get(family, reason))

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self._asks.close()


def _examine_all(asked: Connection[Architecture, str]) -> None:
    """The process: answers until the other end is closed."""
    while True:
        try:
            asked.send(examine(asked.recv()))
        except EOFError:
            return


def _batches(maker: Family, cuts: Sequence[int]) -> bool:
    """Whether rows of different lengths may share a forward pass."""
    try:
        return _stored_differs(maker, cuts, ragged=True) <= CLOSE
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


def _largest(outputs: Sequence[mx.array], expected: Sequence[mx.array]) -> float:
    return max(difference(ours, theirs) for ours, theirs in zip(outputs, expected, strict=True))


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
