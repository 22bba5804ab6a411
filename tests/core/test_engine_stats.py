"""Measurements of requests and ranks: each is counted once, and counts never decrease."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.default_settings import make_policy
from tests.engine.engines import (
    BYTES,
    LIMITS,
    PLAIN,
    collect,
    make_manual_engine,
    make_request,
    run_all,
    scripted,
)
from tests.engine.twin import TwinExecutor
from tests.engine.twin_rank import hash_token

from mlx_ring.core.engine_stats import COUNTS, Distribution, Meter, RankTotals, StepTotals
from mlx_ring.core.errors import ContextExceeded, Overloaded, WorkerLost
from mlx_ring.core.types import RankId
from mlx_ring.engine.engine import Engine
from mlx_ring.head.router import Router

NOTHING = StepTotals({}, **dict.fromkeys(COUNTS, 0))
RANK = RankId(0, 0)


@dataclass
class Counted:
    """Engine that has only totals."""

    now: StepTotals = field(default=NOTHING)

    def totals(self) -> StepTotals:
        return self.now


def test_a_value_counts_in_the_first_bucket_whose_bound_it_does_not_exceed() -> None:
    seen = Distribution((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.5):
        seen.record(value)
    seen.record(2.0, times=3)
    assert seen.counts == [2, 4, 1]
    assert seen.total == 11.5


@given(st.lists(st.lists(st.integers(0, 1000), max_size=4), max_size=4))
def test_meter_counts_never_decrease_as_engines_come_and_go(epochs: list[list[int]]) -> None:
    meter, counts = Meter(), [(0, 0, 0)]

    def read_meter() -> None:
        rank = meter.ranks().get((RANK, "mini"), RankTotals())
        counts.append((meter.counts()["preemptions"], rank.steps, rank.idle_us))

    for steps in epochs:
        engine = Counted()
        with meter.attached(engine, {RANK: "mini"}):
            for step, idle_us in enumerate(steps):
                totals = RankTotals(steps=step + 1, compute_us=5, idle_us=idle_us)
                engine.now = replace(NOTHING, ranks={RANK: totals}, preemptions=step)
                read_meter()
        read_meter()
    for before, after in pairwise(counts):
        assert all(one <= other for one, other in zip(before, after, strict=True))
    assert counts[-1][1] == sum(map(len, epochs))
    assert meter.loads == len(epochs)


def test_the_first_token_counts_once_and_every_other_by_its_share_of_a_step() -> None:
    async def run() -> Meter:
        meter, now = Meter(), 10.0

        def clock() -> float:
            nonlocal now
            now += 0.001
            return now

        twin = TwinExecutor((1, 1), next_token=scripted(b"abababababababab"))
        policy = replace(PLAIN, num_speculative_tokens=4)
        engine = Engine(
            twin, BYTES, LIMITS, instance="demo", epoch=1, policy=policy, clock=clock, meter=meter
        )
        await collect(engine.submit(make_request()))
        assert engine.totals().accepted_tokens > 0
        return meter

    meter = asyncio.run(run())
    assert sum(meter.first_token_s.counts) == 1
    assert meter.generated_tokens == 17
    assert sum(meter.between_tokens_s.counts) == 16
    assert meter.between_tokens_s.total == pytest.approx(meter.decode_s.total)
    assert (meter.prompt_lengths.total, meter.answer_lengths.total) == (3, 17)
    assert meter.whole_s.total == pytest.approx(
        meter.queue_s.total + meter.prefill_s.total + meter.decode_s.total, abs=0.01
    )


def test_a_scored_prompt_has_no_time_to_first_token() -> None:
    async def run() -> Meter:
        meter = Meter()
        twin = TwinExecutor((1, 1), next_token=hash_token(256))
        engine = Engine(twin, BYTES, LIMITS, instance="demo", epoch=1, policy=PLAIN, meter=meter)
        await collect(engine.submit(make_request(max_tokens=0, prompt_logprobs=0)))
        return meter

    meter = asyncio.run(run())
    assert (meter.prompt_tokens, meter.generated_tokens) == (3, 0)
    assert sum(meter.first_token_s.counts) == 0


def test_requests_are_counted_by_finish_reason_and_error() -> None:
    async def run() -> Meter:
        meter = Meter()
        twin = TwinExecutor((1, 1), next_token=hash_token(256), automatic=False)
        engine = Engine(twin, BYTES, LIMITS, instance="demo", epoch=1, policy=PLAIN, meter=meter)
        done = engine.submit(make_request(max_tokens=2, ignore_eos=True))
        run_all(twin)
        assert (await collect(done)).last.finish_reason == "length"
        left, lost = engine.submit(make_request()), engine.submit(make_request())
        await left.aclose()
        engine.fail(WorkerLost("lost"))
        assert lost.error is not None
        return meter

    meter = asyncio.run(run())
    assert meter.finished == {"length": 1, "abort": 1, "error": 1}
    assert meter.failed == {"WorkerLost": 1}
    assert sum(meter.whole_s.counts) == 1, "only completed answers have one"
    assert sum(meter.queue_s.counts) == 3


def test_rejected_requests_are_counted_by_error() -> None:
    async def run() -> Router:
        engine, _ = make_manual_engine()
        router = Router(lambda: [engine])
        with pytest.raises(ContextExceeded):
            router.submit_all(make_request(LIMITS.context_length))
        full = Engine(
            TwinExecutor((1,), automatic=False),
            BYTES,
            LIMITS,
            instance="full",
            epoch=1,
            policy=make_policy(max_num_seqs=1, max_queued_requests=0),
        )
        router = Router(lambda: [full])
        router.submit_all(make_request())
        for _ in range(2):
            with pytest.raises(Overloaded):
                router.submit_all(make_request())
        return router

    assert asyncio.run(run()).rejected == {"Overloaded": 2}


def test_a_rank_is_idle_without_open_steps_and_busy_for_its_reported_time() -> None:
    async def run() -> tuple[RankTotals, RankTotals, RankTotals]:
        now = 100.0
        twin = TwinExecutor((1, 1), next_token=hash_token(256), automatic=False)
        engine = Engine(twin, BYTES, LIMITS, instance="demo", epoch=1, policy=PLAIN, clock=lambda: now)
        now += 3
        idle = engine.totals().ranks[RANK]
        engine.submit(make_request(max_tokens=1))
        now += 2
        owing = engine.totals().ranks[RANK]
        run_all(twin)
        now += 1
        return idle, owing, engine.totals().ranks[RANK]

    idle, owing, after = asyncio.run(run())
    assert (idle.idle_us, idle.steps) == (3_000_000, 0)
    assert owing.idle_us == 3_000_000, "a rank with a step in flight is not idle"
    assert after.steps >= 1
    assert after.idle_us == 6_000_000 - after.busy_us
