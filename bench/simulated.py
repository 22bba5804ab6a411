"""Simulation of the engine's scheduler with stages of given durations."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.default_settings import make_policy
from tests.engine.step_simulation import Simulation, Times
from tests.planner.costs import MeasuredCost, StageCosts

from mlx_ring.core.generation import GenerateRequest
from mlx_ring.core.types import RankId, SamplingParams
from mlx_ring.engine.scheduler import Scheduler
from mlx_ring.engine.sequence import Limits, make_sequence

_LIMITS = Limits(context_length=1 << 20, vocab_size=1000, eos=frozenset())
_WARM, _STEPS = 10, 100


def steady_throughput(stages: Sequence[MeasuredCost], *, streams: int, hop_us: float) -> float:
    """Return the output tokens per second of the given number of running streams.

    `hop_us` is the one-way delay between stages, and between the head and stages.
    """
    ranks = [RankId(stage, 0) for stage in range(len(stages))]
    policy = make_policy(prefix_cache=False, num_speculative_tokens=0, max_num_seqs=streams)
    scheduler = Scheduler(ranks, instance="simulated", epoch=1, policy=policy)
    times = Times(StageCosts(stages), hop_us / 1e6, hop_us / 1e6)
    step_s = sum(stage.decode_us for stage in stages) / 1e6
    begin_s, end_s = _WARM * step_s, (_WARM + _STEPS) * step_s
    outcome = Simulation(scheduler, times, len(stages)).run(
        [(0.0, _arrival(scheduler, number)) for number in range(1, streams + 1)], until_s=end_s
    )
    return outcome.tokens_per_s(begin_s, end_s)


def _arrival(scheduler: Scheduler, number: int) -> Callable[[float], None]:
    request = GenerateRequest(str(number), (number,), SamplingParams())

    def arrive(now: float) -> None:
        scheduler.add(make_sequence(number, request, _LIMITS, now))

    return arrive
