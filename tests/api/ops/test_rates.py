"""Rates between two samples of an instance."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import pairwise

from tests.engine.engines import PLAIN, ask, collect, make_engine

from mlx_ring.api.ops.events import Counters, rates_between
from mlx_ring.core.engine_stats import COUNTS, RankTotals, StepTotals
from mlx_ring.core.types import RankId
from mlx_ring.engine.twin import TwinExecutor, hash_token

BEGAN = Counters(0.0, 1, 0, StepTotals({}, **dict.fromkeys(COUNTS, 0)))
SECOND_US = 1_000_000


def with_rank(counters: Counters, at_s: float, **spent_us: int) -> Counters:
    """Return the counters at a later second, with the rank's totals by then."""
    totals = replace(counters.totals, ranks={RankId(0, 0): RankTotals(**spent_us)})
    return replace(counters, at_s=at_s, totals=totals)


def test_a_step_of_several_seconds_is_under_way_until_it_ends_and_never_idle() -> None:
    samples = [with_rank(BEGAN, second, idle_us=SECOND_US) for second in (1.0, 2.0, 3.0)]
    samples.append(with_rank(BEGAN, 4.0, idle_us=SECOND_US, compute_us=3 * SECOND_US))
    rates = [rates_between(before, now)["stages"] for before, now in pairwise([BEGAN, *samples])]
    assert rates == [
        [{"stage": 0, "compute": compute, "link": 0.0, "under_way": under_way}]
        for compute, under_way in ((0.0, 0.0), (0.0, 1.0), (0.0, 1.0), (1.0, 0.0))
    ]


def test_an_old_sample_gives_no_rates() -> None:
    now = replace(BEGAN, at_s=3600.0, generated_tokens=7200)
    assert rates_between(BEGAN, now)["tokens_per_s"] is None
    assert rates_between(replace(now, at_s=3599.0, generated_tokens=7100), now)["tokens_per_s"] == 100


def test_every_prompt_token_is_counted_however_many_steps_follow_it() -> None:
    async def read() -> tuple[int, int]:
        twin = TwinExecutor((1, 1), next_token=hash_token(256))
        engine = make_engine(twin, replace(PLAIN, prefill_chunk=8))
        for _ in range(20):
            await collect(engine.submit(ask(30, max_tokens=20, ignore_eos=True)))
        return engine.totals().read_tokens, len(engine.stats().scheduler.recent)

    tokens, recent = asyncio.run(read())
    assert recent < 20 * 20, "more steps than are remembered one by one"
    assert tokens == 20 * 30
