"""Simulation with counted rows, beside the engine's scheduler step by step, and what it measures."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp
from random import Random
from types import FrameType

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.default_settings import make_policy
from tests.engine.step_simulation import Simulation as StepSimulation
from tests.engine.step_simulation import Times
from tests.examples import examples
from tests.planner.costs import LinearCost

from mlx_ring.core.engine_stats import BLOCK, Policy
from mlx_ring.core.generation import GenerateRequest
from mlx_ring.core.types import RankId, SamplingParams
from mlx_ring.engine.kv_budget import RankKv
from mlx_ring.engine.scheduler import Scheduler
from mlx_ring.engine.sequence import Advance, Limits, make_sequence
from mlx_ring.engine.shared_stages import SharedMachines
from mlx_ring.engine.simulated_load import Outcome, SimulatedInstance, Span, percentile
from mlx_ring.engine.simulation import Simulation
from mlx_ring.planner.request import SimulatedRequest
from mlx_ring.rpc.protos import step_pb2

LIMITS = Limits(context_length=1 << 20, vocab_size=1000, eos=frozenset())


@dataclass(frozen=True)
class Costs:
    """The same linear costs on every stage, with constant hops."""

    linear: tuple[LinearCost, ...]
    hop: float
    head: float

    def decode_s(self, stage: int, rows: int, context_tokens: float) -> float:
        cost = self.linear[stage]
        each = cost.per_row_s + cost.per_token_s + cost.per_context_s * context_tokens
        return cost.per_step_s + rows * each

    def chunk_s(self, stage: int, spans: Sequence[Span]) -> float:
        cost = self.linear[stage]
        return cost.per_step_s + sum(
            cost.per_row_s
            + cost.per_token_s * tokens
            + cost.per_context_s * (tokens * start + tokens * (tokens - 1) / 2)
            for start, tokens in spans
        )

    def hop_s(self, stage: int, tokens: int) -> tuple[float, float]:
        del stage, tokens
        return self.hop, 0.0

    def back_s(self, rows: int) -> float:
        del rows
        return self.hop

    def head_s(self) -> float:
        return self.head


def by_steps(
    costs: Costs, policy: Policy, requests: Sequence[SimulatedRequest], kv: dict[RankId, RankKv] | None
) -> tuple[dict[int, list[float]], int]:
    """Return the times of each request's tokens on the engine's own scheduler, and its preemptions."""
    stages = len(costs.linear)
    ranks = [RankId(stage, 0) for stage in range(stages)]
    scheduler = Scheduler(ranks, instance="demo", epoch=1, policy=policy, kv=kv)

    def stage_s(stage: int, step: step_pb2.Step) -> float:
        return costs.linear[stage](step)

    def arrival(number: int, request: SimulatedRequest) -> Callable[[float], None]:
        tokens = tuple(Random(number).randrange(1000) for _ in range(request.prompt_tokens))
        made = GenerateRequest(str(number), tokens, SamplingParams(max_tokens=request.answer_tokens))

        def arrive(now: float) -> None:
            scheduler.add(make_sequence(number, made, LIMITS, now))

        return arrive

    def taken(advances: list[Advance]) -> list[tuple[int, int]]:
        return [(advance.sequence.id, len(advance.tokens)) for advance in advances]

    simulation = StepSimulation(scheduler, Times(stage_s, costs.hop, costs.head), stages, taken=taken)
    outcome = simulation.run([(request.at_s, arrival(n, request)) for n, request in enumerate(requests, 1)])
    times = {number: list(each.tokens_s) for number, each in outcome.sequences.items()}
    return times, scheduler.stats().num_preemptions


def gaps_of(times: dict[int, list[float]]) -> list[float]:
    return sorted(b - a for each in times.values() for a, b in pairwise(each))


COST = st.builds(
    LinearCost,
    st.floats(0.001, 0.03),
    st.floats(1e-5, 1e-3),
    st.sampled_from([0.0, 1e-7]),
    st.sampled_from([0.0, 1e-4]),
)
COSTS = st.builds(
    Costs,
    st.lists(COST, min_size=1, max_size=3).map(tuple),
    st.sampled_from([0.0, 0.001, 0.005]),
    st.sampled_from([0.0005, 0.002]),
)
REQUESTS = st.lists(
    st.tuples(st.sampled_from([0.0, 0.01, 0.2, 1.0]), st.integers(1, 700), st.integers(1, 60)),
    min_size=1,
    max_size=16,
)
"""Time since the request before, and lengths of prompt and answer."""


def in_order(made: list[tuple[float, int, int]]) -> list[SimulatedRequest]:
    return [
        SimulatedRequest(sum(gap for gap, _, _ in made[: number + 1]), prompt, answer)
        for number, (_, prompt, answer) in enumerate(made)
    ]


POLICIES = st.builds(
    Policy,
    max_num_seqs=st.sampled_from([2, 5, 16]),
    max_itl_ratio=st.sampled_from([1.3, 2.5]),
    steps_ahead=st.sampled_from([1, 2]),
    prefill_chunk=st.sampled_from([64, 512]),
    long_chunk=st.sampled_from([0, 2048]),
    prefix_cache=st.sampled_from([False]),
    num_speculative_tokens=st.just(0),
)


@pytest.mark.slow
@given(COSTS, POLICIES, REQUESTS)
@examples(0.6)
def test_every_token_comes_when_the_scheduler_gives_it(
    costs: Costs, policy: Policy, made: list[tuple[float, int, int]]
) -> None:
    requests = in_order(made)
    times, _ = by_steps(costs, policy, requests, None)
    outcome = Simulation([SimulatedInstance(costs, len(costs.linear))], policy).run(requests)
    firsts = sorted(times[number][0] - each.at_s for number, each in enumerate(requests, 1))
    assert sorted(outcome.first_token_s) == pytest.approx(firsts, abs=1e-9)
    assert all_gaps(outcome) == pytest.approx(gaps_of(times), abs=1e-9)
    assert outcome.tokens == sum(each.answer_tokens for each in requests)


@pytest.mark.slow
@given(COSTS, POLICIES, REQUESTS, st.integers(4, 12))
@examples(0.6)
def test_with_little_memory_times_are_within_three_per_cent(
    costs: Costs, policy: Policy, made: list[tuple[float, int, int]], blocks: int
) -> None:
    """Allow for the order in which streams of one step take memory: another one may be preempted."""
    requests = in_order(made)
    kv = {RankId(stage, 0): RankKv(blocks * BLOCK, 1) for stage in range(len(costs.linear))}
    times, _ = by_steps(costs, policy, requests, kv)
    outcome = Simulation([SimulatedInstance(costs, len(costs.linear), kv)], policy).run(requests)
    last = max(each[-1] for each in times.values())
    assert outcome.elapsed_s == pytest.approx(last, rel=0.03, abs=0.1)
    assert outcome.tokens == sum(each.answer_tokens for each in requests)
    firsts = [(times[number][0] - each.at_s, 1) for number, each in enumerate(requests, 1)]
    assert outcome.first_token_within(95) == pytest.approx(percentile(firsts, 95), rel=0.03, abs=0.1)


@pytest.mark.slow
@given(
    st.lists(COSTS, min_size=1, max_size=3),
    POLICIES,
    st.lists(
        st.tuples(st.sampled_from([0.0, 0.05, 0.2, 0.7, 3.0]), st.integers(1, 900), st.integers(1, 300)),
        min_size=1,
        max_size=16,
    ),
    st.sampled_from([0, 0, 5, 9]),
    st.integers(0, 3),
    st.booleans(),
)
@example(
    [Costs((LinearCost(0.015625, 0.001, 0.0, 0.0),), 0.0, 0.0005)],
    make_policy(max_num_seqs=5, max_itl_ratio=1.3, steps_ahead=1, prefill_chunk=64, prefix_cache=False),
    [(0.0, 1, 5), (0.0, 321, 1), (0.2, 192, 1)],
    0,
    0,
    True,  # noqa: FBT003
)
@examples(1.0)
def test_steps_that_repeat_have_the_outcome_of_steps_one_by_one(
    costs: list[Costs],
    policy: Policy,
    made: list[tuple[float, int, int]],
    blocks: int,
    skipped: int,
    drains: bool,  # noqa: FBT001
) -> None:
    """Simulate unlike instances behind the router, with and without little memory."""
    instances = [
        SimulatedInstance(
            each,
            len(each.linear),
            {RankId(stage, 0): RankKv(blocks * BLOCK, 1) for stage in range(len(each.linear))}
            if blocks
            else None,
        )
        for each in costs
    ]
    requests = in_order(made)
    at_once, one_by_one = (
        Simulation(instances, policy, repeats=repeats, ends_early=False).run(
            requests, skipped=min(skipped, len(requests) - 1), drains=drains
        )
        for repeats in (True, False)
    )
    assert all_gaps(at_once) == pytest.approx(all_gaps(one_by_one))
    for name in ("first_token_s", "request_s", "prefill_s", "decode_s", "link_s"):
        assert sorted(getattr(at_once, name)) == pytest.approx(sorted(getattr(one_by_one, name)))
    for name in ("tokens", "begun", "rows", "steps", "preemptions", "is_overrun"):
        assert getattr(at_once, name) == getattr(one_by_one, name)
    for name in ("elapsed_s", "end_s", "waits_for_memory_s", "waits_for_place_s"):
        assert getattr(at_once, name) == pytest.approx(getattr(one_by_one, name))


def all_gaps(outcome: Outcome) -> list[float]:
    return sorted(gap_s for gap_s, streams in outcome.gaps for _ in range(streams))


POLICY = make_policy(prefix_cache=False, num_speculative_tokens=0)

# ---- machines that are shared


@pytest.mark.slow
@given(COSTS, POLICIES, REQUESTS, st.sampled_from([0, 8]))
@examples(0.4)
def test_stages_that_share_no_machine_have_the_times_of_machines_of_their_own(
    costs: Costs, policy: Policy, made: list[tuple[float, int, int]], blocks: int
) -> None:
    requests, stages = in_order(made), len(costs.linear)
    kv = {RankId(stage, 0): RankKv(blocks * BLOCK, 1) for stage in range(stages)} if blocks else None
    instance = SimulatedInstance(costs, stages, kv)
    apart = SharedMachines([1.0] * stages, [{stage: 1.0} for stage in range(stages)])
    expected = Simulation([instance], policy).run(requests)
    found = Simulation([instance], policy, shared=apart).run(requests)
    assert all_gaps(found) == pytest.approx(all_gaps(expected), abs=1e-6)
    assert found.first_token_s == pytest.approx(expected.first_token_s, abs=1e-6)
    assert found.elapsed_s == pytest.approx(expected.elapsed_s, abs=1e-6)
    for part in ("prefill_s", "decode_s", "link_s"):
        assert getattr(found, part) == pytest.approx(getattr(expected, part), abs=1e-6)


@pytest.mark.slow
@given(COSTS, POLICIES, REQUESTS, st.integers(1, 3), st.sampled_from([1.0, 2.0]))
@examples(0.4)
def test_a_machine_computes_no_more_than_it_can_and_every_token(
    costs: Costs, policy: Policy, made: list[tuple[float, int, int]], instances: int, most: float
) -> None:
    """Put all stages of some instances on one machine, each with a half of the processors where it has two."""
    requests, stages = in_order(made), len(costs.linear)
    shared = SharedMachines([most], [{0: 1.0}] * (stages * instances))
    outcome = Simulation([SimulatedInstance(costs, stages)] * instances, policy, shared=shared).run(requests)
    assert outcome.tokens == sum(each.answer_tokens for each in requests)
    computed_s = sum(outcome.prefill_s) + sum(outcome.decode_s)
    assert computed_s <= most * (outcome.elapsed_s - requests[0].at_s) + 1e-9
    assert all(seconds <= outcome.elapsed_s for seconds in map(sum, zip(outcome.prefill_s, outcome.decode_s)))  # noqa: B905


def test_two_instances_on_one_machine_decode_half_as_fast_while_both_do() -> None:
    """Send each a request at once, of which one is longer."""
    requests = [SimulatedRequest(0.0, 8, 101), SimulatedRequest(0.0, 8, 201)]
    costs = Costs((LinearCost(0.01, 0.0),), 0.0, 0.0)
    shared = SharedMachines([1.0], [{0: 1.0}, {0: 1.0}])
    outcome = Simulation([SimulatedInstance(costs, 1)] * 2, POLICY, shared=shared).run(requests)
    gaps = all_gaps(outcome)
    assert gaps[:99] == pytest.approx([0.01] * 99)
    assert gaps[-199:] == pytest.approx([0.02] * 199, rel=1e-6)
    assert outcome.elapsed_s == pytest.approx(3.02)
    alone = Simulation([SimulatedInstance(costs, 1)] * 2, POLICY).run(requests)
    assert all_gaps(alone) == pytest.approx([0.01] * 300)


def test_a_machine_that_runs_two_workers_at_once_slows_none_of_two_down() -> None:
    request = SimulatedRequest(0.0, 8, 50)
    costs = Costs((LinearCost(0.01, 0.0),), 0.0, 0.0)
    two, three = (
        Simulation(
            [SimulatedInstance(costs, 1)] * count,
            POLICY,
            shared=SharedMachines([2.0], [{0: 1.0}] * count),
        ).run([request] * count)
        for count in (2, 3)
    )
    assert all_gaps(two) == pytest.approx([0.01] * len(all_gaps(two)))
    assert all_gaps(three) == pytest.approx([0.015] * len(all_gaps(three)))


def test_a_request_goes_to_the_instance_with_the_fewest_tokens_ahead() -> None:
    """Send a long prompt to one instance. Both short ones after it then go to the other one, though it has more requests."""
    requests = [SimulatedRequest(0.001 * place, tokens, 4) for place, tokens in enumerate((4096, 16, 16))]
    together = Simulation([SimulatedInstance(ONE, 1)] * 2, POLICY).run(requests)
    alone = Simulation([SimulatedInstance(ONE, 1)], POLICY).run(requests[1:])
    assert sorted(together.request_s)[:2] == pytest.approx(sorted(alone.request_s))


def test_a_step_of_several_machines_is_as_slow_as_the_busiest_of_them() -> None:
    """Let one stage compute on both machines, and another on the second one only."""
    machines = SharedMachines([1.0, 1.0], [{0: 1.0, 1: 1.0}, {1: 1.0}])
    machines.begin(0, 1.0, 0.0)
    assert machines.next_end() == (1.0, 0)
    machines.begin(1, 1.0, 0.5)
    assert machines.next_end() == (1.5, 0)
    machines.end(0, 1.5)
    assert machines.next_end() == (2.0, 1)
    machines.end(1, 2.0)
    assert machines.next_end() is None


# ---- one instance

ONE = Costs((LinearCost(0.01, 0.0002),), 0.0, 0.0005)


def test_cached_tokens_shorten_only_the_prefill() -> None:
    whole, cached = (
        Simulation([SimulatedInstance(ONE, 1)], POLICY).run([SimulatedRequest(0.0, 1024, 32, supplied)])
        for supplied in (0, 768)
    )
    assert cached.first_token_s[0] < 0.5 * whole.first_token_s[0]
    assert all_gaps(cached) == pytest.approx(all_gaps(whole))


def test_memory_for_one_request_serves_them_one_after_the_other() -> None:
    kv = {RankId(0, 0): RankKv(2 * BLOCK, 1)}
    requests = [SimulatedRequest(0.0, 300, 20) for _ in range(3)]
    outcome = Simulation([SimulatedInstance(ONE, 1, kv)], POLICY).run(requests)
    each_s = outcome.request_s[0]
    assert outcome.request_s == pytest.approx([each_s, 2 * each_s, 3 * each_s], rel=0.05)
    assert outcome.waits_for_memory_s > each_s > outcome.waits_for_place_s


def test_a_run_ends_when_too_many_requests_wait() -> None:
    requests = [SimulatedRequest(0.001 * number, 512, 64) for number in range(200)]
    outcome = Simulation([SimulatedInstance(ONE, 1)], POLICY, most_waiting=20).run(requests)
    assert outcome.is_overrun
    assert outcome.first_token_within(95) == float("inf")


def test_only_the_requests_after_the_skipped_ones_are_measured() -> None:
    requests = [SimulatedRequest(float(number), 64, 8) for number in range(10)]
    outcome = Simulation([SimulatedInstance(ONE, 1)], POLICY).run(requests, skipped=4, drains=False)
    assert len(outcome.first_token_s) == 6
    assert (outcome.begin_s, outcome.end_s) == (4.0, 9.0)


def test_a_busy_link_delays_the_steps_behind_it() -> None:
    @dataclass(frozen=True)
    class Linked(Costs):
        def hop_s(self, stage: int, tokens: int) -> tuple[float, float]:
            del stage, tokens
            return 0.05, 0.04

    costs = Linked((LinearCost(0.001, 0.0), LinearCost(0.001, 0.0)), 0.0, 0.0)
    outcome = Simulation([SimulatedInstance(costs, 2)], POLICY).run(
        [SimulatedRequest(0.0, 8, 50) for _ in range(8)]
    )
    assert outcome.link_s[0] / outcome.span_s > 0.7
    assert outcome.decode_s[0] / outcome.span_s < 0.1


def test_a_prompt_of_many_experts_beside_decode_is_read_in_few_steps() -> None:
    """Take times at which two tokens read nearly all experts: 18 ms for them, 26 ms for 512."""

    @dataclass(frozen=True)
    class Experts(Costs):
        def decode_s(self, stage: int, rows: int, context_tokens: float) -> float:
            del stage, rows, context_tokens
            return 0.012

        def chunk_s(self, stage: int, spans: Sequence[Span]) -> float:
            del stage
            return 0.018 + 0.008 * (1 - exp(-sum(tokens for _, tokens in spans) / 120))

    streams = [SimulatedRequest(0.0, 8, 500) for _ in range(4)]
    prompt = SimulatedRequest(1.0, 8192, 1)
    outcome = Simulation([SimulatedInstance(Experts((), 0.0, 0.0005), 1)], POLICY).run([*streams, prompt])
    assert outcome.first_token_s[-1] < 2 * 16 * (0.026 + 2 * 0.012)
    gaps = all_gaps(outcome)
    assert sum(gaps) / len(gaps) < POLICY.max_itl_ratio * 0.012


def test_a_percentile_counts_each_value_as_often_as_it_came() -> None:
    values = [(0.3, 1), (0.1, 90), (0.2, 9)]
    assert [percentile(values, percent) for percent in (50, 90, 91, 99, 100)] == [0.1, 0.1, 0.2, 0.2, 0.3]
    assert percentile([], 95) == 0.0


def test_no_step_looks_at_each_of_many_running_streams() -> None:
    cost = LinearCost(per_step_s=0.01, per_row_s=1e-5, per_token_s=1e-5, per_context_s=0.0)

    def calls(streams: int) -> int:
        """Return the number of Python's calls, those of generators included."""
        requests = [SimulatedRequest(0.001 * number, 20, 30 + number % 50) for number in range(streams)]
        policy = make_policy(num_speculative_tokens=0, max_num_seqs=streams)
        simulation, count = Simulation([SimulatedInstance(Costs((cost,), 1e-4, 1e-4), 1)], policy), 0

        def note(_frame: FrameType, event: str, _argument: object) -> None:
            nonlocal count
            count += event == "call"

        before = sys.getprofile()
        sys.setprofile(note)
        try:
            simulation.run(requests)
        finally:
            sys.setprofile(before)
        return count

    assert calls(600) < 3.2 * calls(200)
