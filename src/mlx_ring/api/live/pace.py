"""How fast an instance went since it was last looked at, and where the time of its stages went. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mlx_ring.engine.executor import RankId
from mlx_ring.engine.stats import EngineStats
from mlx_ring.engine.totals import RankTotals

Json = dict[str, object]


@dataclass(frozen=True, slots=True)
class Look:
    """An instance at a moment."""

    at_s: float
    """On a clock that does not jump."""
    epoch: int
    stats: EngineStats
    ranks: Mapping[RankId, RankTotals]
    """As they were then."""


def pace(before: Look | None, now: Look) -> Json:
    """Tokens per second, and of each stage the shares of the time in which it computed and had to do with links.

    Without an earlier look at the same epoch nothing is known.
    """
    if before is None or before.epoch != now.epoch or now.at_s <= before.at_s:
        return {"tokens_per_s": None, "prompt_tokens_per_s": None, "stages": []}
    span_s = now.at_s - before.at_s
    return {
        "tokens_per_s": round((now.stats.generated_tokens - before.stats.generated_tokens) / span_s, 1),
        "prompt_tokens_per_s": round(_read_tokens(before.stats, now.stats) / span_s, 1),
        "stages": [
            _shares(rank.stage, before.ranks.get(rank, RankTotals()), totals, 1e6 * span_s)
            for rank, totals in sorted(now.ranks.items())
            if rank.rank == 0
        ],
    }


def _read_tokens(before: EngineStats, now: EngineStats) -> int:
    """Of prompts, by the first stage, in the steps that it has answered since."""
    first = RankId(0, 0)
    seen = max((step.step for step in before.scheduler.recent if step.rank == first), default=0)
    return sum(
        step.tokens
        for step in now.scheduler.recent
        if step.rank == first and step.step > seen and not step.is_decode
    )


def _shares(stage: int, before: RankTotals, now: RankTotals, span_us: float) -> Json:
    """A step that began before counts where it ends, so a share could seem to be more than all."""
    compute = min(1.0, (now.compute_us - before.compute_us) / span_us)
    link_us = now.link_wait_us + now.link_send_us - before.link_wait_us - before.link_send_us
    return {
        "stage": stage,
        "compute": round(compute, 3),
        "link": round(min(1.0 - compute, link_us / span_us), 3),
    }
