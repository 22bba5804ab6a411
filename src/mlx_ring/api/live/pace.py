"""How fast an instance went since it was last looked at, and where the time of its stages went. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from mlx_ring.engine.totals import RankTotals, StepTotals

Json = dict[str, object]

_LONG_AGO_S = 5.0
"""Between looks lies a second. Where nobody looked for long, the time before tells nothing of now."""


@dataclass(frozen=True, slots=True)
class Look:
    """An instance at a moment."""

    at_s: float
    """On a clock that does not jump."""
    epoch: int
    generated_tokens: int
    totals: StepTotals
    """As they were then."""


def pace(before: Look | None, now: Look) -> Json:
    """Tokens per second, and of each stage the shares of the time in which it did what.

    Without an earlier look at the same epoch, a moment ago, nothing is known.
    """
    if before is None or before.epoch != now.epoch or not before.at_s < now.at_s <= before.at_s + _LONG_AGO_S:
        return {"tokens_per_s": None, "prompt_tokens_per_s": None, "stages": []}
    span_s = now.at_s - before.at_s
    return {
        "tokens_per_s": round((now.generated_tokens - before.generated_tokens) / span_s, 1),
        "prompt_tokens_per_s": round((now.totals.read_tokens - before.totals.read_tokens) / span_s, 1),
        "stages": [
            _shares(rank.stage, before.totals.ranks.get(rank, RankTotals()), totals, 1e6 * span_s)
            for rank, totals in sorted(now.totals.ranks.items())
            if rank.rank == 0
        ],
    }


def _shares(stage: int, before: RankTotals, now: RankTotals, span_us: float) -> Json:
    """A step counts where it ends, and could seem to be more than all; until then its time is under way."""
    link_us = now.link_wait_us + now.link_send_us - before.link_wait_us - before.link_send_us
    idle = min(1.0, max(0.0, (now.idle_us - before.idle_us) / span_us))
    compute = min(1.0 - idle, (now.compute_us - before.compute_us) / span_us)
    link = min(1.0 - idle - compute, link_us / span_us)
    shares = {"compute": compute, "link": link, "under_way": 1.0 - idle - compute - link}
    return {"stage": stage, **{name: round(max(0.0, share), 3) for name, share in shares.items()}}
