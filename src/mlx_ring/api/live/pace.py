"""How fast an instance went since it was last looked at, and where the time of its stages went. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlx_ring.engine.stats import EngineStats, StepTiming

Json = dict[str, object]


@dataclass(frozen=True, slots=True)
class Look:
    """An instance at a moment."""

    at_s: float
    """On a clock that does not jump."""
    epoch: int
    stats: EngineStats


def pace(before: Look | None, now: Look) -> Json:
    """Tokens per second, and of each stage the shares of the time in which it computed and had to do with links.

    Without an earlier look at the same epoch nothing is known.
    """
    if before is None or before.epoch != now.epoch or now.at_s <= before.at_s:
        return {"tokens_per_s": None, "prompt_tokens_per_s": None, "stages": []}
    span_s = now.at_s - before.at_s
    stages = sorted({rank.stage for rank in now.stats.scheduler.kv_bytes})
    steps = {stage: _new_steps(stage, before.stats, now.stats) for stage in stages}
    read = sum(step.tokens for step in steps.get(0, ()) if not step.is_decode)
    return {
        "tokens_per_s": round((now.stats.generated_tokens - before.stats.generated_tokens) / span_s, 1),
        "prompt_tokens_per_s": round(read / span_s, 1),
        "stages": [
            {"stage": stage} | _shares(steps[stage], _last_step(stage, before.stats), span_s)
            for stage in stages
        ],
    }


def _steps(stage: int, stats: EngineStats) -> list[StepTiming]:
    """Those that the stage's first rank has answered last: the others do the same at the same time."""
    return [step for step in stats.scheduler.recent if step.rank == (stage, 0)]


def _last_step(stage: int, stats: EngineStats) -> int:
    return max((step.step for step in _steps(stage, stats)), default=0)


def _new_steps(stage: int, before: EngineStats, now: EngineStats) -> list[StepTiming]:
    seen = _last_step(stage, before)
    return [step for step in _steps(stage, now) if step.step > seen]


def _shares(steps: Sequence[StepTiming], seen: int, span_s: float) -> Json:
    span_us = 1e6 * span_s
    if steps and steps[0].step > seen + 1:
        # Of many short steps only the last are kept: they speak for the time that they took.
        span_us = min(span_us, max(1.0, steps[-1].finished_us - steps[0].started_us))
    compute = min(1.0, sum(step.compute_us for step in steps) / span_us)
    link_us = sum(step.link_wait_us + step.link_send_us for step in steps)
    return {"compute": round(compute, 3), "link": round(min(1.0 - compute, link_us / span_us), 3)}
