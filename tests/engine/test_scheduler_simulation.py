"""Scheduler in a simulation with a clock: use of the stages, and effect of a long prompt on others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.default_settings import make_policy
from tests.engine.step_simulation import Outcome, Simulation, Times
from tests.examples import examples
from tests.planner.costs import LinearCost, MeasuredCost
from tests.planner.prediction import predict_throughput

from mlx_ring.core.engine_stats import BLOCK, Policy
from mlx_ring.core.generation import GenerateRequest
from mlx_ring.core.types import RankId, SamplingParams
from mlx_ring.engine.kv_budget import RankKv
from mlx_ring.engine.scheduler import Scheduler
from mlx_ring.engine.sequence import Limits, Sequence, make_sequence
from mlx_ring.rpc.protos import step_pb2

LIMITS = Limits(context_length=1 << 20, vocab_size=1000, eos=frozenset())
DECODE_S, TOKEN_S = 0.02, 0.0005
PLAIN = make_policy(prefix_cache=False, num_speculative_tokens=0, max_num_seqs=64)


class Bench:
    """Scheduler over simulated stages."""

    def __init__(
        self,
        stages: int,
        policy: Policy = PLAIN,
        *,
        hop_s: float = 0.0,
        head_s: float = 0.001,
        kv_blocks: int | None = None,
    ) -> None:
        ranks = [RankId(stage, 0) for stage in range(stages)]
        kv = None if kv_blocks is None else {rank: RankKv(kv_blocks * BLOCK, 1) for rank in ranks}
        self.scheduler = Scheduler(ranks, instance="demo", epoch=1, policy=policy, kv=kv)
        self.sequences: dict[int, Sequence] = {}
        self.left_early: set[int] = set()
        cost = LinearCost(DECODE_S / stages, TOKEN_S / stages)

        def stage_s(_stage: int, step: step_pb2.Step) -> float:
            return cost(step)

        self.simulation = Simulation(self.scheduler, Times(stage_s, hop_s, head_s), stages)

    def request(self, prompt: int, answer: int) -> Callable[[float], None]:
        number = len(self.sequences) + 1
        tokens = tuple(Random(number).randrange(1000) for _ in range(prompt))
        request = GenerateRequest(str(number), tokens, SamplingParams(max_tokens=answer))
        self.sequences[number] = make_sequence(number, request, LIMITS, 0.0)

        def arrive(now: float) -> None:
            self.sequences[number].submitted_at = now
            self.scheduler.add(self.sequences[number])

        return arrive

    def leave(self, number: int) -> None:
        """Abort a sequence as its client leaves, unless it has ended."""
        sequence = self.sequences[number]
        if sequence.finish_reason is None:
            self.left_early.add(number)
            self.scheduler.finish(sequence)


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_running_streams_keep_every_stage_busy(stages: int) -> None:
    bench = Bench(stages)
    streams = 4 * stages
    result = bench.simulation.run([(0.0, bench.request(8, 300)) for _ in range(streams)], until_s=4.0)
    stage_s = (DECODE_S + 4 * TOKEN_S) / stages
    assert result.tokens_per_s(2.0, 4.0) >= 0.95 * 4 / stage_s
    predicted = predict_throughput([MeasuredCost(stage_s * 1e6)] * stages, [4] * stages, head_us=1e3)
    assert result.tokens_per_s(2.0, 4.0) == pytest.approx(predicted, rel=0.05)


@pytest.mark.parametrize("stages", [2, 3])
def test_streams_that_start_at_different_times_keep_every_stage_busy(stages: int) -> None:
    bench = Bench(stages)
    arrivals = [(0.037 * number, bench.request(8, 400)) for number in range(4 * stages)]
    result = bench.simulation.run(arrivals, until_s=5.0)
    assert result.tokens_per_s(3.0, 5.0) >= 0.95 * 4 * stages / (DECODE_S + 4 * TOKEN_S)


def test_the_heads_latency_is_hidden() -> None:
    bench = Bench(1, head_s=0.008)
    result = bench.simulation.run([(0.0, bench.request(4, 200))], until_s=3.0)
    assert result.tokens_per_s(1.0, 3.0) >= 0.97 / (DECODE_S + TOKEN_S)


@pytest.mark.parametrize("stages", [2, 4])
def test_chunks_of_a_long_prompt_overlap(stages: int) -> None:
    bench = Bench(stages)
    result = bench.simulation.run([(0.0, bench.request(8000, 1))])
    chunks = -(-8000 // (8000 // (8 * stages)))
    alone_s = 8000 * TOKEN_S + chunks * DECODE_S
    assert result.sequences[1].first_token_s <= 1.2 * alone_s / stages


@pytest.mark.parametrize(
    "ratio",
    [
        1.3,
        *(pytest.param(ratio, marks=[pytest.mark.slow, pytest.mark.thorough]) for ratio in (1.7, 2.5)),
        pytest.param(4.0, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("stages", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_long_prompt_keeps_the_itl_ratio_of_running_streams(stages: int, ratio: float) -> None:
    bench = Bench(stages, replace(PLAIN, max_itl_ratio=ratio))
    arrivals = [(0.0, bench.request(8, 1000)) for _ in range(4)]
    arrivals.append((2.0, bench.request(2000, 1)))
    result = bench.simulation.run(arrivals)
    ended_s = result.sequences[5].end_s
    assert all(result.sequences[number].end_s > ended_s for number in range(1, 5)), "they run until it ends"
    quiet = max(gap for number in range(1, 5) for gap in result.sequences[number].gaps_s(1.0, 2.0))
    for number in range(1, 5):
        gaps = list(result.sequences[number].gaps_s(2.1, ended_s))
        for tokens in {min(8, len(gaps)), min(32, len(gaps)), len(gaps)}:
            longest = max(sum(gaps[begin : begin + tokens]) for begin in range(len(gaps) - tokens + 1))
            # Time for eight tokens may have been saved before, and a chunk may take longer than predicted.
            assert longest <= 1.05 * quiet * (tokens + (ratio - 1) * (tokens + 8) + 4)
    alone_s = 2000 * TOKEN_S + 4 * DECODE_S
    assert ended_s - 2.0 < 6 * alone_s * ratio / (ratio - 1), "the prompt must progress too"


def test_a_long_prompt_delays_few_tokens_beyond_the_itl_ratio() -> None:
    bench = Bench(1, replace(PLAIN, max_itl_ratio=2.5))
    arrivals = [(0.0, bench.request(8, 600)) for _ in range(4)]
    arrivals.append((2.0, bench.request(4000, 1)))
    result = bench.simulation.run(arrivals)
    ended_s = result.sequences[5].end_s
    quiet, busy = (_gaps(result, begin, end) for begin, end in ((1.0, 2.0), (2.1, ended_s)))
    assert sorted(busy)[len(busy) * 95 // 100] <= 2.5 * max(quiet)
    assert ended_s - 2.0 < 40 * 4000 * TOKEN_S


def _gaps(result: Outcome, begin: float, end: float) -> list[float]:
    return [gap for number in range(1, 5) for gap in result.sequences[number].gaps_s(begin, end)]


def test_simultaneous_prompts_are_read_at_full_speed() -> None:
    bench = Bench(1)
    result = bench.simulation.run([(0.0, bench.request(200, 50)) for _ in range(8)])
    last_first_token = max(times.first_token_s for times in result.sequences.values())
    assert last_first_token <= 1.35 * (8 * 200 * TOKEN_S + 4 * DECODE_S)


REQUEST = st.tuples(st.floats(0, 2), st.integers(1, 900), st.integers(1, 60), st.floats(0.1, 3) | st.none())
"""Arrival, prompt length and answer length of a request, and the time after which its client leaves."""


@given(st.lists(REQUEST, min_size=1, max_size=20), st.integers(1, 4), st.integers(1, 8), st.data())
@examples(0.6)
def test_no_request_starves(
    requests: list[tuple[float, int, int, float | None]], stages: int, places: int, data: st.DataObject
) -> None:
    policy = make_policy(
        max_num_seqs=places,
        prefix_cache=data.draw(st.booleans()),
        num_speculative_tokens=data.draw(st.sampled_from([0, 4])),
        prefill_chunk=data.draw(st.sampled_from([16, 512])),
    )
    bench = Bench(stages, policy, kv_blocks=data.draw(st.integers(4, 12) | st.none()))
    arrivals: list[tuple[float, Callable[[float], None]]] = []
    for number, (at, prompt, answer, stays_s) in enumerate(requests, start=1):
        arrivals.append((at, bench.request(prompt, answer)))
        if stays_s is not None:
            arrivals.append((at + stays_s, lambda _now, number=number: bench.leave(number)))
    result = bench.simulation.run(arrivals)
    for number, (_, _, answer, _) in enumerate(requests, start=1):
        assert len(bench.sequences[number].output) == answer or number in bench.left_early
    assert result.most_in_flight <= stages + 1 + 2 * stages
    stats = bench.scheduler.stats()
    assert (stats.running, stats.waiting) == (0, 0)


def test_a_long_prompt_and_a_flow_of_short_ones_both_progress() -> None:
    bench = Bench(1, replace(PLAIN, max_num_seqs=8))
    arrivals = [(0.0, bench.request(4000, 4))]
    arrivals += [(0.05 + 0.1 * number, bench.request(40, 4)) for number in range(100)]
    result = bench.simulation.run(arrivals)
    alone_s = 4000 * TOKEN_S + 8 * DECODE_S
    assert result.sequences[1].first_token_s <= 4 * alone_s
    waits = sorted(result.sequences[number].first_token_s - at for number, (at, _) in enumerate(arrivals, 1))
    assert waits[len(waits) // 2] < alone_s / 4, "short prompts do not wait for the end of the long one"


def test_a_sequence_that_needs_most_of_the_memory_is_not_starved() -> None:
    bench = Bench(1, replace(PLAIN, max_num_seqs=8), kv_blocks=8)
    arrivals = [(0.2 * number, bench.request(200, 40)) for number in range(40)]
    arrivals.insert(5, (0.95, bench.request(1500, 40)))
    result = bench.simulation.run(arrivals)
    large, later = (number for number, (at, _) in enumerate(arrivals, 1) if at in {0.95, 0.2 * 15})
    assert result.sequences[large].first_token_s < result.sequences[later].first_token_s
