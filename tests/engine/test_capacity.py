"""Capacity of clusters: the highest rate at which a service level holds, and what follows from it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from math import inf
from statistics import fmean, median, pstdev, pvariance
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.default_settings import make_policy
from tests.examples import examples
from tests.planner.clusters import cluster_of, known_cluster, known_sizes, model_of, node_of

from mlx_ring.core.errors import ConfigError, PlanError
from mlx_ring.core.types import LayerRange
from mlx_ring.engine.capacity import Capacity, CapacityMeter, Question
from mlx_ring.engine.capacity_search import Search, ServiceLevel
from mlx_ring.engine.prefill import Prefilling
from mlx_ring.engine.simulated_load import Outcome, SimulatedInstance
from mlx_ring.engine.simulated_replicas import replicas_of
from mlx_ring.engine.simulation import Simulation
from mlx_ring.planner.catalogue import named_links
from mlx_ring.planner.cluster_file import Upkeep
from mlx_ring.planner.place import LoadedStages, place
from mlx_ring.planner.profiles import ClusterProfile
from mlx_ring.planner.request import (
    Arrivals,
    Demand,
    Lengths,
    Load,
    PlanRequest,
    Recorded,
    SimulatedRequest,
    read_recorded,
)
from mlx_ring.settings.strategies import Strategy

SMALL = Load(Lengths(64, 64), Lengths(16, 16))
SHORT = Load(Lengths(64, 64), Lengths(4, 4))
"""A load that is simulated in half the time."""
MODEL = model_of(8)
ONE = cluster_of(node_of("a"))


def measured(
    cluster: ClusterProfile = ONE,
    *,
    load: Load = SMALL,
    level: ServiceLevel | None = None,
    rate: float | None = None,
    kwh_price: float = 0.0,
    upkeep: dict[str, Upkeep] | None = None,
    most_running: int | None = 8,
    loaded: Sequence[LoadedStages] = (),
) -> Capacity:
    question = Question(
        load,
        ServiceLevel(1.0, 0.2) if level is None else level,
        PlanRequest(Demand(80, 1)),
        make_policy(num_speculative_tokens=0),
        max_num_seqs=most_running,
        rate=rate,
        kwh_price=kwh_price,
        upkeep=upkeep or {},
    )
    return CapacityMeter(MODEL, question).measure("now", cluster, loaded)


def instance(**layers: int) -> LoadedStages:
    """Return the stages of an instance, as so many layers by machine; `_` in a name begins a comment."""
    ends = [*accumulate(layers.values(), initial=0)]
    return tuple(
        (LayerRange(first, end), ((name.partition("_")[0], 1.0),))
        for name, (first, end) in zip(layers, pairwise(ends), strict=True)
    )


@pytest.fixture(scope="module")
def alone() -> Capacity:
    return measured()


@pytest.mark.slow
def test_the_level_holds_at_the_capacity_and_not_far_beyond(alone: Capacity) -> None:
    assert alone.holds
    assert alone.first_token_s <= 1.0
    assert alone.between_tokens_s <= 0.2
    assert not measured(rate=1.3 * alone.requests_per_s).holds
    assert measured(rate=0.8 * alone.requests_per_s).holds


@pytest.mark.slow
def test_two_machines_that_do_not_need_each_other_serve_twice_as_many(alone: Capacity) -> None:
    both = measured(cluster_of(node_of("a"), node_of("b")))
    assert both.replicas == 2
    assert both.requests_per_s == pytest.approx(2 * alone.requests_per_s, rel=0.06)


@pytest.mark.slow
def test_users_follow_from_the_rate_and_the_time_of_a_request(alone: Capacity) -> None:
    assert alone.users == pytest.approx(alone.requests_per_s * (60 + alone.request_s))
    assert alone.tokens_per_s == pytest.approx(16 * alone.requests_per_s)


@pytest.mark.slow
def test_a_stricter_level_is_kept_at_lower_rates_only(alone: Capacity) -> None:
    strict = measured(level=ServiceLevel(0.25, 0.2))
    assert 0 < strict.requests_per_s < alone.requests_per_s


def test_a_level_that_one_request_misses_is_never_kept() -> None:
    found = measured(level=ServiceLevel(0.001, None))
    assert not found.holds
    assert found.requests_per_s == 0
    assert found.why == "Even one request at a time is too slow."


@pytest.mark.slow
def test_cached_prefixes_let_more_requests_in(alone: Capacity) -> None:
    cached = measured(load=Load(Lengths(64, 64), Lengths(16, 16), prefix_hits=0.9))
    assert cached.requests_per_s > 1.05 * alone.requests_per_s


def test_energy_and_prices_follow_from_the_use() -> None:
    found = measured(rate=1.0, kwh_price=0.3, upkeep={"a": Upkeep(watts=100, idle_watts=20, price=3000)})
    (use,) = found.uses
    assert found.watts == pytest.approx(20 + 80 * use.busy)
    assert found.tokens_per_joule == pytest.approx(16 / (found.watts or 0))
    per_s = 3000 / (3 * 365.25 * 86_400) + (found.watts or 0) / 3.6e6 * 0.3
    assert found.tokens_per_price == pytest.approx(16 / per_s)


def test_costs_of_a_machine_without_figures_are_unknown() -> None:
    cluster = cluster_of(node_of("a"), node_of("b"))
    found = measured(cluster, rate=1.0, upkeep={"a": Upkeep(watts=100, price=3000)})
    assert (found.watts, found.price, found.tokens_per_joule, found.tokens_per_price) == (None,) * 4


def test_a_model_that_does_not_fit_is_a_plan_error() -> None:
    with pytest.raises(PlanError, match="GB are missing"):
        measured(cluster_of(node_of("a", 0.2)))


@pytest.mark.slow
def test_alike_replicas_are_measured_once_and_the_head_limits_very_many() -> None:
    one = measured(load=SHORT)
    few, hundreds = (
        measured(cluster_of(*(node_of(f"node-{number}") for number in range(count))), load=SHORT)
        for count in (4, 400)
    )
    assert few.requests_per_s == pytest.approx(4 * one.requests_per_s)
    assert few.stages == ("4 x node-0 0-7",)
    assert hundreds.replicas == 400
    assert one.requests_per_s < hundreds.requests_per_s < 400 * one.requests_per_s
    assert hundreds.head_busy == pytest.approx(1)
    assert hundreds.why.startswith("The head computes all of the time")


def test_a_small_model_on_a_fast_machine_has_no_endless_capacity() -> None:
    """Ask for a rate that a short run would hold, because its requests all start before the first is late."""
    found = measured(load=Load(Lengths(8, 8), Lengths(4, 4)), level=ServiceLevel(5.0, None))
    assert found.holds
    assert 0 < found.uses[0].busy <= 1
    assert found.tokens_per_s < 1e5


def test_runs_are_not_longer_because_very_many_requests_may_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count the requests of runs at a rate at which few run at the same time."""
    counts, run = list[int](), Simulation.run

    def counted(
        self: Simulation, requests: Sequence[SimulatedRequest], *, skipped: int = 0, drains: bool = True
    ) -> Outcome:
        counts.append(len(requests))
        return run(self, requests, skipped=skipped, drains=drains)

    monkeypatch.setattr(Simulation, "run", counted)
    few, many = (measured(rate=20.0, most_running=most) for most in (256, 10_000))
    assert few.holds
    assert many.holds
    assert max(counts) < 2000


def test_a_found_rate_is_kept_by_many_requests_that_come_at_exactly_that_rate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Record the runs of a machine that serves few long answers at once, for which a short run has 100 requests."""
    runs, run = list[tuple[int, float]](), Simulation.run

    def recorded(
        self: Simulation, requests: Sequence[SimulatedRequest], *, skipped: int = 0, drains: bool = True
    ) -> Outcome:
        if not drains:
            span_s = requests[-1].at_s - requests[skipped - 1].at_s
            runs.append((len(requests) - skipped, (len(requests) - skipped) / span_s))
        return run(self, requests, skipped=skipped, drains=drains)

    monkeypatch.setattr(Simulation, "run", recorded)
    found = measured(load=Load(Lengths(64, 64), Lengths(100, 100)), most_running=2)
    assert found.holds
    assert max(count for count, rate in runs if rate == pytest.approx(found.requests_per_s)) >= 300
    assert "Other arrivals may give" in found.why


def test_a_lone_request_takes_as_long_as_the_plan_predicts() -> None:
    """Compare the times of requests that never meet with the plan's prediction of one."""
    found = measured(rate=1e-3)
    request = PlanRequest(Demand(80, 1, typical_tokens=72), prompt_tokens=64, answer_tokens=16)
    predicted = place(MODEL, ONE, request).prediction
    assert found.between_tokens_s == pytest.approx(predicted.token_s, rel=0.03)
    # A plan counts one more step before the first token.
    assert found.first_token_s + found.between_tokens_s == pytest.approx(predicted.first_token_s, rel=0.1)
    assert found.users == pytest.approx(1e-3 * (60 + found.request_s))


@pytest.mark.parametrize(
    ("machines", "strategy", "prompt", "users"),
    [
        *((("m4-max-128",), "auto", prompt, 1) for prompt in (500, 1024, 4096, 8192)),
        *((("m3-ultra-512",), "auto", prompt, 1) for prompt in (1024, 8192, 20_000)),
        (("m4-max-128",), "auto", 2048, 3),
        (("m4-max-128", "m4-max-64"), "tensor", 4096, 1),
        (("linux-desktop-32",), "auto", 2048, 1),
    ],
)
def test_a_prompt_alone_on_one_stage_takes_as_long_as_the_plan_predicts(
    machines: tuple[str, ...], strategy: Strategy, prompt: int, users: int
) -> None:
    """Compare with the last of several requests, or of bursts: the scheduler has measured chunks by then."""
    cluster = replace(known_cluster(*machines), usual_link=named_links()["tb5-rdma"])
    model = known_sizes("qwen3-30b-a3b-4bit", cluster)
    demand = Demand(prompt + 64, users, typical_tokens=prompt)
    request = PlanRequest(demand, strategy=strategy, prompt_tokens=prompt, answer_tokens=64, users=users)
    plan = place(model, cluster, request)
    (replicas,) = replicas_of(model, cluster, request, [plan])
    predicted, policy = plan.prediction, make_policy(num_speculative_tokens=0)
    if users == 1:
        load = Load(Lengths(prompt, prompt), Lengths(8, 8))
        outcome = Search(replicas, load, ServiceLevel(1.0, 0.2), policy).alone
    else:
        (one,) = replicas.members
        instance = SimulatedInstance(one.costs, one.stages, one.kv, one.long_chunk)
        times = [30 * burst * predicted.request_s for burst in range(20) for _ in range(users)]
        bursts = [SimulatedRequest(at_s, prompt, 8) for at_s in times]
        outcome = Simulation([instance], policy).run(bursts)
    first_token_s = max(outcome.first_token_s[-users:])
    # A plan counts one more step before the first token, and a time for each prompt.
    waited_s = predicted.first_token_s - predicted.token_s - users * cluster.nodes[0].prompt_s
    # Some tokens of the others come between the prompts of several users.
    assert first_token_s == pytest.approx(waited_s, rel=0.01 if users == 1 else 0.02)


@pytest.mark.parametrize("prompt", [1024, 2048, 6000])
@pytest.mark.parametrize(
    ("model_name", "machine", "other"),
    [("gpt-oss-120b", "m4-max-128", "m4-max-64"), ("llama-3.3-70b-4bit", "m4-max-128", "m4-max-64")],
    ids=["experts", "dense"],
)
def test_a_prompt_alone_on_two_stages_takes_no_longer_than_in_chunks_of_any_usual_size(
    model_name: str, machine: str, other: str, prompt: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = replace(known_cluster(machine, other), usual_link=named_links()["tb5-rdma"])
    model = known_sizes(model_name, cluster)
    request = PlanRequest(Demand(prompt + 8, 1), strategy="balanced", prompt_tokens=prompt, answer_tokens=8)
    plan = place(model, cluster, request)
    (replicas,) = replicas_of(model, cluster, request, [plan])
    load, policy = Load(Lengths(prompt, prompt), Lengths(8, 8)), make_policy(num_speculative_tokens=0)

    def first_token_s() -> float:
        # The engine continues to try other sizes, so that any one prompt may take a little longer.
        return median(Search(replicas, load, ServiceLevel(1.0, 0.2), policy).alone.first_token_s[3:])

    chosen_s = first_token_s()
    assert chosen_s == pytest.approx(plan.prediction.first_token_s - plan.prediction.token_s, rel=0.05)
    for size in (64, 128, 256, 512):
        monkeypatch.setattr(Prefilling, "_even_size", Mock(return_value=size))
        assert chosen_s < 1.03 * first_token_s()


@pytest.mark.slow
@given(
    prompt=st.integers(8, 200),
    answer=st.integers(2, 20),
    first_token_s=st.floats(0.3, 4),
    between_s=st.floats(0.05, 0.5),
)
@examples(0.04)
def test_stricter_levels_more_requests_and_fewer_machines_never_gain(
    prompt: int, answer: int, first_token_s: float, between_s: float
) -> None:
    load = Load(Lengths(prompt, prompt), Lengths(answer, answer))
    level = ServiceLevel(first_token_s, between_s)
    loose = measured(load=load, level=level)
    strict = measured(load=load, level=ServiceLevel(first_token_s / 2, between_s))
    # A search ends within 5 %.
    assert strict.requests_per_s <= 1.05 * loose.requests_per_s
    both = measured(cluster_of(node_of("a"), node_of("b")), load=load, level=level)
    assert both.requests_per_s >= loose.requests_per_s / 1.05
    if loose.holds:
        less, more = (
            measured(load=load, level=level, rate=part * loose.requests_per_s) for part in (0.3, 0.9)
        )
        assert less.uses[0].busy <= more.uses[0].busy + 0.02
        assert less.first_token_s <= 1.05 * more.first_token_s


def test_a_given_rate_is_served_exactly_and_the_soonest_first_token_wins() -> None:
    for rate in (0.1, 0.11, 0.12, 0.17):
        both = measured(cluster_of(node_of("a"), node_of("b", gb_s=400, tflops=16)), rate=rate)
        fast = measured(cluster_of(node_of("b", gb_s=400, tflops=16)), rate=rate)
        assert both.requests_per_s == fast.requests_per_s == rate
        assert both.first_token_s <= fast.first_token_s + 1e-3, "with the link to the other machine"


def test_at_a_rate_beyond_the_capacity_only_served_tokens_count() -> None:
    found = measured(rate=1000.0)
    assert not found.holds
    assert found.first_token_s == inf
    assert 0 <= found.tokens_per_s < 0.5 * 16 * 1000
    assert found.users == 0


def test_a_machine_with_an_endless_queue_is_busy_at_any_rate() -> None:
    """Ask for rates from a little to very far beyond the capacity."""
    several = [measured(rate=rate, upkeep={"a": Upkeep(100, 20, 1)}) for rate in (60.0, 200.0, 1e5)]
    for found in several:
        assert not found.holds
        assert found.uses[0].busy > 0.95
        assert found.watts == pytest.approx(100, abs=4)
        assert found.between_tokens_s > 0
        assert found.tokens_per_s == pytest.approx(several[0].tokens_per_s, rel=0.05)


def test_bursts_that_are_too_large_are_reported_as_such_after_one_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Try no lower rates: bursts that are far apart are too late already."""
    rates, run = list[float](), Search.run

    def count_run(search: Search, rate: float, **options: Any) -> Outcome:
        rates.append(rate)
        return run(search, rate, **options)

    monkeypatch.setattr(Search, "run", count_run)
    found = measured(
        load=Load(Lengths(64, 64), Lengths(16, 16), "burst", burst=50), level=ServiceLevel(0.4, None)
    )
    assert not found.holds
    assert 0 < found.first_token_s < 0.4
    assert found.why == (
        "One request at a time is fast enough, but of requests that arrive together the first token comes too late."
    )
    assert len(rates) == 1


@pytest.mark.parametrize("arrivals", ["poisson", "even", "burst"])
def test_requests_come_in_whole_bursts_however_large_they_are(arrivals: Arrivals) -> None:
    """Double the size of bursts that have more requests than a run usually has, and the last ones wait twice as long."""
    waits = [
        measured(load=Load(Lengths(64, 64), Lengths(4, 4), arrivals, burst=burst), rate=5.0).first_token_s
        for burst in (700, 1400)
    ]
    assert waits[1] / waits[0] == pytest.approx(2.0 if arrivals == "burst" else 1.0, rel=0.05)


def test_a_rate_beyond_the_capacity_is_seen_although_the_run_ends_before_bursts_queue_up() -> None:
    """Take so large bursts that the few of a run are answered at any rate before their queue is long."""
    load, level = Load(Lengths(64, 64), Lengths(4, 4), "burst", burst=2000), ServiceLevel(600.0, None)
    assert measured(load=load, level=level, rate=45.0).holds
    # Full steps take 62 requests a second.
    beyond = measured(load=load, level=level, rate=63.0)
    assert (beyond.holds, beyond.first_token_s) == (False, inf)


@pytest.mark.parametrize("burst", [8, 64, 256])
def test_bursts_that_come_close_together_at_a_rate_that_can_be_served_do_not_queue_up(burst: int) -> None:
    """Take half of what full steps take, and more than that."""
    load, level = Load(Lengths(64, 64), Lengths(4, 4), "burst", burst=burst), ServiceLevel(600.0, None)
    assert measured(load=load, level=level, rate=31.0).holds
    assert not measured(load=load, level=level, rate=63.0).holds


WHOLE, SPLIT = instance(a=8), instance(a_1=4, a_2=4)

# ---- unlike replicas

UNLIKE = cluster_of(node_of("a"), node_of("b", gb_s=400, tflops=16))
BOTH = [WHOLE, instance(b=8)]


@pytest.mark.slow
def test_unlike_replicas_serve_as_many_with_the_number_of_running_requests_that_is_named() -> None:
    """Let a machine that is several times as fast keep the time between tokens with many more requests."""
    load, level = Load(Lengths(400, 400), Lengths(6, 6)), ServiceLevel(1.0, 0.02)
    found = measured(UNLIKE, load=load, level=level, most_running=None, loaded=BOTH)
    given = measured(UNLIKE, load=load, level=level, most_running=found.max_num_seqs, loaded=BOTH)
    assert found.holds
    assert given.max_num_seqs == found.max_num_seqs
    assert given.requests_per_s == pytest.approx(found.requests_per_s)


@pytest.mark.slow
def test_unlike_replicas_serve_what_the_router_gives_them() -> None:
    """Take a machine that is much slower. The router counts tokens, not seconds, so it gives that one too many."""
    load, level = Load(Lengths(200, 200), Lengths(8, 8)), ServiceLevel(0.6, 0.2)
    slow, fast = (
        measured(cluster_of(node), load=load, level=level, most_running=32) for node in UNLIKE.nodes
    )
    both = measured(UNLIKE, load=load, level=level, most_running=32, loaded=BOTH)
    assert both.replicas == 2
    assert 0 < both.requests_per_s < 0.9 * (slow.requests_per_s + fast.requests_per_s)


# ---- machines with several workers

TWO = cluster_of(node_of("a"), node_of("b"))
PATIENT = ServiceLevel(3.0, None)
"""A level at which a queue is the limit."""


@pytest.fixture(scope="module")
def busy() -> Capacity:
    return measured(level=PATIENT)


@pytest.mark.slow
@pytest.mark.parametrize(
    "loaded", [[WHOLE] * 2, [WHOLE] * 3, [SPLIT], [SPLIT, WHOLE], [instance(a_1=2, a_2=2, a_3=4)]]
)
def test_one_machine_serves_no_more_with_several_workers(
    busy: Capacity, loaded: Sequence[LoadedStages]
) -> None:
    """Ask for a little more than one instance serves. Instances have no rows in one step, so they gain nothing."""
    found = measured(level=PATIENT, rate=1.1 * busy.requests_per_s, loaded=loaded)
    assert not found.holds
    assert found.replicas == len(loaded)


@pytest.mark.slow
@given(
    prompt=st.integers(8, 200),
    answer=st.integers(2, 20),
    between_s=st.floats(0.05, 0.5),
    layers=st.lists(st.sampled_from([[8], [4, 4], [2, 6], [3, 2, 3]]), min_size=1, max_size=2),
)
@example(73, 27, 0.4423022257752348, [[8]])
@example(73, 2, 0.4423022257752348, [[8]])
@examples(0.03)
def test_everything_on_one_machine_serves_at_most_as_many_as_that_machine_alone(
    prompt: int, answer: int, between_s: float, layers: list[list[int]]
) -> None:
    """Let as many requests run as are served soon enough, so that one instance has the fullest steps."""
    load, level = Load(Lengths(prompt, prompt), Lengths(answer, answer)), ServiceLevel(3.0, between_s)
    stages = [instance(**{f"a_{place}": count for place, count in enumerate(each)}) for each in layers]
    alone = measured(load=load, level=level, most_running=None)
    rate = 1.1 * alone.requests_per_s or 0.01
    assert not measured(load=load, level=level, rate=rate, most_running=None, loaded=stages).holds


@pytest.mark.slow
def test_power_and_price_of_a_machine_count_once_however_many_workers_it_has() -> None:
    upkeep = {name: Upkeep(watts=100, idle_watts=20, price=3000) for name in "ab"}
    for loaded in ([WHOLE] * 2, [SPLIT], [SPLIT, WHOLE]):
        found = measured(load=SHORT, rate=5.0, upkeep=upkeep, loaded=loaded)
        (use,) = found.uses
        assert found.price == 3000
        assert use.prefill < use.busy <= 1
        assert found.watts == pytest.approx(20 + 80 * use.busy)
    all_three = [WHOLE, instance(b=8), instance(a=4, b=4)]
    both = measured(TWO, load=SHORT, rate=5.0, upkeep=upkeep, loaded=all_three)
    assert both.price == 6000
    assert both.watts == pytest.approx(40 + 80 * sum(use.busy for use in both.uses))
    assert [use.machine for use in both.uses] == ["a", "b"]


@pytest.mark.slow
def test_machines_with_as_many_instances_are_alike_and_measured_once() -> None:
    pair = measured(load=SHORT, loaded=[WHOLE] * 2)
    pairs = measured(TWO, load=SHORT, loaded=[WHOLE, instance(b=8)] * 2)
    assert (pair.stages, pairs.stages) == (("2 x a 0-7",), ("4 x a 0-7",))
    assert pairs.replicas == 4
    assert pairs.requests_per_s == pytest.approx(2 * pair.requests_per_s)
    uneven = measured(TWO, load=SHORT, rate=20.0, loaded=[WHOLE, instance(b=8), WHOLE])
    assert (uneven.replicas, uneven.stages) == (3, ("2 x a 0-7", "b 0-7"))


def test_instances_on_one_machine_have_parts_of_its_memory() -> None:
    """Take a machine that holds the KV of about a dozen requests beside one instance's weights."""
    long = Load(Lengths(8000, 8000), Lengths(16, 16))
    one, two = (
        measured(
            cluster_of(node_of("a", 3.0)),
            load=long,
            level=ServiceLevel(None, None),
            rate=0.01,
            most_running=None,
            loaded=[WHOLE] * count,
        )
        for count in (1, 2)
    )
    assert one.max_num_seqs >= 2 * two.max_num_seqs > 0


def test_a_machine_that_runs_several_workers_at_once_slows_down_only_more_of_them() -> None:
    cluster = cluster_of(replace(node_of("a"), workers_at_once=2))
    one, two, three = (measured(cluster, rate=40.0, loaded=[WHOLE] * count) for count in (1, 2, 3))
    assert not one.holds
    assert two.holds
    assert not three.holds or three.between_tokens_s > two.between_tokens_s


def test_fewer_requests_run_at_once_where_several_workers_share_a_machine() -> None:
    level = ServiceLevel(20.0, 0.06)
    one, two = (
        measured(level=level, rate=1.0, most_running=None, loaded=[WHOLE] * count) for count in (1, 2)
    )
    assert one.max_num_seqs > 1.5 * two.max_num_seqs


# ---- load


@pytest.mark.parametrize("arrivals", ["poisson", "even", "burst"])
def test_requests_arrive_at_the_given_rate(arrivals: Arrivals) -> None:
    load = Load(Lengths(10, 20), Lengths(1, 5), arrivals, burst=4)
    requests = load.requests(4000, 5.0)
    assert requests[-1].at_s == pytest.approx(800, rel=0.1)
    assert all(later.at_s >= sooner.at_s for sooner, later in pairwise(requests))
    assert {request.prompt_tokens for request in requests} == set(range(10, 21))


def test_the_same_requests_arrive_sooner_at_a_higher_rate() -> None:
    slow, fast = (Load(Lengths(5, 900), Lengths(1, 90)).requests(50, rate) for rate in (1.0, 4.0))
    assert [request.at_s for request in slow] == pytest.approx([4 * request.at_s for request in fast])
    assert [request[1:] for request in slow] == [request[1:] for request in fast]


@pytest.mark.parametrize("arrivals", ["poisson", "even", "burst"])
def test_typical_requests_come_at_the_rate_with_lengths_spread_evenly(arrivals: Arrivals) -> None:
    requests = Load(Lengths(100, 299), Lengths(7, 7), arrivals, prefix_hits=0.5).typical(400)
    assert requests[-1].at_s == pytest.approx(400)
    assert all(later.at_s >= sooner.at_s for sooner, later in pairwise(requests))
    assert sorted(request.prompt_tokens for request in requests) == [100 + place // 2 for place in range(400)]
    assert {request.answer_tokens for request in requests} == {7}
    assert all(request.cached_tokens == request.prompt_tokens // 2 for request in requests)


def test_typical_requests_differ_less_than_others_in_how_many_come_close_together() -> None:
    """Compare the spread among seeds of the number of requests within 4 s before each one."""

    def crowding(requests: Sequence[SimulatedRequest]) -> float:
        at_s = [request.at_s for request in requests]
        return pvariance(place - bisect_left(at_s, at - 4) for place, at in enumerate(at_s))

    loads = [Load(Lengths(9, 9), Lengths(9, 9), seed=seed) for seed in range(12)]
    typical, others = (
        [crowding(each) for each in made]
        for made in (
            [load.typical(300) for load in loads],
            [load.requests(300, 1.0) for load in loads],
        )
    )
    assert pstdev(typical) < 0.5 * pstdev(others)
    assert fmean(typical) == pytest.approx(4, rel=0.1)


def test_a_prompt_is_never_cached_whole() -> None:
    requests = Load(Lengths(1, 8), Lengths(1, 1), prefix_hits=0.99).requests(200, 1.0)
    assert all(request.cached_tokens < request.prompt_tokens for request in requests)


def test_recorded_requests_repeat_with_their_distances() -> None:
    recorded = (Recorded(10, 1, 0.0), Recorded(20, 2, 1.0), Recorded(30, 3, 4.0))
    load = Load(Lengths(1, 1), Lengths(1, 1), recorded=recorded)
    requests = load.requests(6, 1.0)
    assert [request.prompt_tokens for request in requests] == [10, 20, 30, 10, 20, 30]
    gaps = [later.at_s - sooner.at_s for sooner, later in pairwise(requests)]
    assert gaps == pytest.approx([0.5, 1.5, 1.0, 0.5, 1.5])
    assert load.longest == 33


@pytest.mark.parametrize("times", [(5.0,), (5.0, 5.0, 5.0), (0.0, 0.0, 3.0), (0.0, 1.0, 4.0)])
def test_recorded_requests_come_at_one_per_second_on_average(times: tuple[float, ...]) -> None:
    recorded = tuple(Recorded(10, 1, at_s) for at_s in times)
    requests = Load(Lengths(1, 1), Lengths(1, 1), recorded=recorded).requests(60 + 1, 1.0)
    assert requests[-1].at_s - requests[0].at_s == pytest.approx(60)


def test_the_longest_request_is_one_of_the_recorded_ones() -> None:
    """Record a long prompt and a long answer of different requests."""
    recorded = (Recorded(1000, 10), Recorded(10, 600))
    assert Load(Lengths(1, 1), Lengths(1, 1), recorded=recorded).longest == 1010


@pytest.mark.parametrize(
    "text",
    [
        "prompt,answer,at\n10,5,0\n20,6,1.5\n",
        '{"prompt":10,"answer":5,"at":0}\n{"prompt":20,"answer":6,"at":1.5}',
    ],
)
def test_requests_are_read_from_csv_and_json_lines(text: str) -> None:
    assert read_recorded(text, "requests") == (Recorded(10, 5, 0.0), Recorded(20, 6, 1.5))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "has no requests"),
        ("prompt,answers\n1,2", "request 1: it must have a prompt and an answer"),
        ("prompt,answer\n1,2\nx,3", "request 2: it must have"),
        ("prompt,answer\n0,2", "must be 1 token or more"),
        ("prompt,answer,at\n1,2,5\n1,2,3", "in order of arrival"),
        ("prompt,answer,at\n1,2,nan\n1,2,1", "request 1: at is nan; it must be a number of seconds"),
        ("prompt,answer,at\n1,2,0\n1,2,inf", "request 2: at is inf; it must be a number of seconds"),
        ("prompt,answer,at\n1,2,noon", "request 1: at is noon; it must be a number of seconds"),
        ('{"prompt": 1, "answer": 2, "at": NaN}', "request 1: at is nan"),
        ('{"prompt": 1, "answer": 2, "at": true}', "request 1: at is True; it must be a number of seconds"),
        ('{"prompt": Infinity, "answer": 2}', "request 1: it must have a prompt and an answer"),
        ('{"prompt": 1, "answer": 2}\nnonsense', "request 2: it must have"),
        ('{"prompt": 10.9, "answer": 2}', "request 1: it must have a prompt and an answer"),
        ('{"prompt": 10, "answer": true}', "request 1: it must have a prompt and an answer"),
    ],
)
def test_a_wrong_file_of_requests_gets_a_sentence(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        read_recorded(text, "requests")
