"""Comparison of a loaded split with the best one, and the patience before a move."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.planner.clusters import cluster_of, model_of, node_of, shared_model, trusting

from mlx_ring.core.errors import PlanError
from mlx_ring.core.types import LayerRange
from mlx_ring.planner.forecast import Forecast
from mlx_ring.planner.place import LoadedStages, place, plan_loaded
from mlx_ring.planner.profiles import ClusterProfile, NodeProfile, StepRatios
from mlx_ring.planner.rank_costs import beside_others
from mlx_ring.planner.replan import (
    LEAST_GAIN,
    Comparison,
    Patience,
    Situation,
    compare,
    describe,
    stage_changes,
    stages_of,
)
from mlx_ring.planner.request import Demand, PlanRequest
from mlx_ring.planner.stage_costs import StageTables
from mlx_ring.planner.step_overheads import Round, StageStep, StepOverheads
from mlx_ring.rpc.link_profile import ETHERNET, UNREACHABLE, LinkProfile
from mlx_ring.settings.strategies import Strategy

MODEL = model_of(28)
REQUEST = PlanRequest(Demand(4096, 8), objective="throughput", users=8)
LOOK_S = 10.0


def machines(*ratios: float, gigabytes: float = 16) -> ClusterProfile:
    """Return equal machines whose steps take these multiples of the predicted time."""
    nodes = [node_of(f"node-{place}", gigabytes) for place in range(len(ratios))]
    return cluster_of(
        *(replace(node, ratios=StepRatios(ratio, ratio)) for node, ratio in zip(nodes, ratios, strict=True))
    )


def loaded_on(cluster: ClusterProfile) -> LoadedStages:
    return stages_of(place(MODEL, cluster, REQUEST))


def compared(
    loaded: LoadedStages,
    now: ClusterProfile,
    beside: ClusterProfile | None = None,
    *,
    has_less_memory: bool = False,
) -> Comparison | None:
    return compare(Situation(MODEL, REQUEST, loaded, now, beside or now, has_less_memory=has_less_memory))


def layers(stages: LoadedStages) -> list[int]:
    return [len(span) for span, _ in stages]


def shared_one(*, at_once: int = 1, ratio: float = 1.0) -> Comparison | None:
    """Compare a replica on a machine, which another one also uses, with an unused one that is slower by a ratio."""
    node, other = machines(1, ratio).nodes
    node, other = (replace(each, workers_at_once=at_once) for each in (node, other))
    request, free = replace(REQUEST, strategy="auto"), cluster_of(other)
    loaded = stages_of(place(MODEL, cluster_of(node), request))
    shared = (beside_others(node, 2),)
    return compare(Situation(MODEL, request, loaded, free, free, shared=shared))


def test_a_replica_that_shares_a_machine_gains_by_one_of_its_own() -> None:
    found = shared_one()
    assert found is not None
    assert (found.way, found.unused) == ("beside", ("node-1",))
    assert found.gain == pytest.approx(1.0)
    assert {stage.node for stage in found.planned.stages} == {"node-1"}
    text = "A replica has machines in common with another one, while node-1 had no layers. Another split has its own:"
    assert describe("A replica", found).startswith(text)


def test_a_replica_has_a_machine_of_its_own_also_without_a_gain_unless_it_is_slower() -> None:
    found = shared_one(at_once=2)
    assert found is not None
    assert (found.gain, found.worth) == (pytest.approx(0.0), math.inf)
    slower = shared_one(at_once=2, ratio=1.5)
    assert slower is not None
    assert slower.worth == slower.gain < 0
    half = shared_one(ratio=1.5)
    assert half is not None
    assert 0 < half.gain < 1


def test_the_best_split_is_not_compared_with_itself() -> None:
    assert compared(loaded_on(machines(1, 1)), machines(1, 1)) is None


def test_a_slower_machine_gets_fewer_layers() -> None:
    loaded, now = loaded_on(machines(1, 1)), machines(1, 4)
    found = compared(loaded, now)
    assert found is not None
    assert found.loaded is not None
    assert layers(loaded) == [14, 14]
    by_node = {stage.node: len(stage.layers) for stage in found.planned.stages}
    assert by_node["node-0"] > 3 * by_node.get("node-1", 0)
    assert found.way == "beside"
    before, after = (plan.prediction.tokens_per_s for plan in (found.loaded, found.planned))
    assert found.gain == pytest.approx(after / before - 1)
    assert found.gain > 1


def test_a_new_machine_is_used() -> None:
    assert compared(loaded_on(machines(1, 1)), machines(1, 1, 50)) is None
    found = compared(loaded_on(machines(1, 1)), machines(1, 1, 0.5))
    assert found is not None
    assert "node-2" in {stage.node for stage in found.planned.stages}
    assert found.gain > LEAST_GAIN


def test_answers_pause_where_the_machines_have_no_room_for_both() -> None:
    loaded, now = loaded_on(machines(1, 1)), machines(1, 4)
    found = compared(loaded, now, machines(1, 4, gigabytes=0.5))
    assert found is not None
    assert (found.way, len(found.why) > 0) == ("ranges", True)
    # The rest of the memory has room for no better split than the present one.
    first, second = now.nodes
    only_slow = replace(now, nodes=(replace(first, memory_bytes=first.memory_bytes // 16), second))
    found = compared(loaded, now, only_slow)
    assert found is not None
    assert (found.way, found.why[:30]) == ("ranges", "Beside the present instance, t")
    whole = compare(Situation(MODEL, REQUEST, loaded, now, only_slow, only_whole="Links are collectives."))
    assert whole is not None
    assert (whole.way, whole.changes) == ("after", ())
    assert whole.why.endswith(" Links are collectives.")


def test_weights_that_machines_lack_are_fetched_from_the_heads_machine() -> None:
    loaded, layer_s = loaded_on(machines(1, 1)), MODEL.layers[0].weight_bytes / ETHERNET.bandwidth

    def fetch_s(now: ClusterProfile, head: str, had: range = range(0)) -> float:
        earlier = {"node-0": frozenset(had), "node-1": frozenset(had)}
        found = compare(Situation(MODEL, REQUEST, loaded, now, now, head=head, had=earlier))
        assert found is not None
        return found.fetch_s

    now = replace(machines(1, 40), links={}, usual_link=ETHERNET)
    found = compared(loaded, now)
    assert found is not None
    assert layers(stages_of(found.planned)) == [28]
    assert fetch_s(now, "node-0") == 0.0
    assert fetch_s(now, "node-1") == pytest.approx(14 * layer_s)
    assert fetch_s(now, "node-1", range(10, 20)) == pytest.approx(8 * layer_s)
    # Weights reach it from the head's machine in any case.
    cut_off = replace(now, links={frozenset(("node-0", "elsewhere")): UNREACHABLE})
    assert fetch_s(cut_off, "elsewhere") == pytest.approx(14 * layer_s)


@pytest.mark.parametrize(("refusal", "way"), [("", "beside"), ("--model-memory allows one.", "after")])
def test_machines_that_share_layers_are_proposed_and_fetch_whole_tensors(refusal: str, way: str) -> None:
    model, request = shared_model(40), PlanRequest(Demand(1024, 1), prompt_tokens=512)
    now = trusting(node_of("a"), node_of("b"), link=LinkProfile(20e-6, 5e9))
    alone: LoadedStages = ((LayerRange(0, 40), (("a", 1.0),)),)
    found = compare(Situation(model, request, alone, now, now, refusal, head="a"))
    assert found is not None
    assert stages_of(found.planned) == ((LayerRange(0, 40), (("a", 0.5), ("b", 0.5))),)
    assert (found.way, found.gain > LEAST_GAIN) == (way, True)
    whole = sum(layer.weight_bytes for layer in model.layers) + model.ends_bytes(is_first=True, is_last=True)
    assert found.fetch_s == pytest.approx(whole / 5e9)
    # And back to one machine, if the link is no longer trusted.
    apart = compare(Situation(model, request, stages_of(found.planned), untrusted(now), untrusted(now)))
    assert apart is not None
    assert len(stages_of(apart.planned)[0][1]) == 1


def untrusted(cluster: ClusterProfile) -> ClusterProfile:
    return replace(cluster, nodes=tuple(replace(node, trusted=False) for node in cluster.nodes))


def stages(*ranges: tuple[str, int, int]) -> LoadedStages:
    return tuple((LayerRange(start, end), ((node, 1.0),)) for node, start, end in ranges)


def changes(now: ClusterProfile, loaded: LoadedStages, planned: LoadedStages) -> dict[str, tuple[int, bool]]:
    found = stage_changes(MODEL, now, REQUEST, loaded, planned)
    return {change.node: (change.gained_bytes, change.fits_beside) for change in found}


def test_workers_load_the_layers_and_ends_that_they_gain() -> None:
    now, layer = machines(1, 1, 1), MODEL.layers[0].weight_bytes
    first, last = (MODEL.ends_bytes(is_first=is_first, is_last=not is_first) for is_first in (True, False))
    loaded = stages(("node-0", 0, 14), ("node-1", 14, 28))
    assert changes(now, loaded, stages(("node-0", 0, 16), ("node-1", 16, 28))) == {
        "node-0": (2 * layer, True),
        "node-1": (0, True),
    }
    # A third machine becomes the last one, so that one in the middle keeps no head.
    assert changes(now, loaded, stages(("node-0", 0, 10), ("node-1", 10, 20), ("node-2", 20, 28))) == {
        "node-0": (0, True),
        "node-1": (4 * layer, True),
        "node-2": (8 * layer + last, True),
    }
    assert changes(now, loaded, stages(("node-1", 0, 20), ("node-0", 20, 28)))["node-1"] == (
        14 * layer + first,
        True,
    )


def test_layers_without_room_beside_the_present_ones_are_loaded_in_the_pause() -> None:
    loaded = stages(("node-0", 0, 14), ("node-1", 14, 28))
    planned = stages(("node-0", 0, 6), ("node-1", 6, 28))
    roomy = machines(1, 1)
    needed = StageTables(MODEL, REQUEST.demand).memory(roomy.nodes[1])[6, 28]
    first, second = roomy.nodes
    full = replace(second, memory_bytes=int(1.01 * needed / (1 - second.reserve_share)))
    gained, fits = changes(cluster_of(first, full), loaded, planned)["node-1"]
    assert gained > 0
    assert fits
    # It loses as many as it gains, and has no room for both.
    needed = StageTables(MODEL, REQUEST.demand).memory(second)[0, 14]
    full = replace(second, memory_bytes=int(1.01 * needed / (1 - second.reserve_share)))
    exchanged = stages(("node-1", 0, 15), ("node-0", 15, 28))
    assert not changes(cluster_of(first, full), loaded, exchanged)["node-1"][1]


def test_of_several_workers_on_a_machine_the_one_with_most_of_its_next_layers_stays() -> None:
    now, layer = machines(1, 1, 1), MODEL.layers[0].weight_bytes
    loaded = stages(("node-0", 0, 9), ("node-1", 9, 19), ("node-1", 19, 28))
    planned = stages(("node-0", 0, 9), ("node-1", 9, 21), ("node-2", 21, 28))
    found = {change.node: change for change in stage_changes(MODEL, now, REQUEST, loaded, planned)}
    assert found["node-1"].present == LayerRange(9, 19)
    assert found["node-1"].gained_bytes == 2 * layer
    assert found["node-2"].present is None
    # All its present stages take memory until the others end.
    tables, (first, second, third) = StageTables(MODEL, REQUEST.demand), now.nodes
    memory = tables.memory(second)
    needed = memory[9, 19] + memory[19, 28] + layer
    full = replace(second, memory_bytes=int(needed / (1 - second.reserve_share)))
    assert changes(cluster_of(first, full, third), loaded, planned)["node-1"] == (2 * layer, False)


@pytest.mark.parametrize("strategy", ["uniform", "memory", "compute", "balanced"])
def test_a_strategy_over_all_machines_needs_no_gain_for_one_without_layers(strategy: Strategy) -> None:
    request = PlanRequest(Demand(4096, 1), strategy=strategy)
    now = machines(1, 1, 1)
    split = stages_of(place(MODEL, now, request))
    (_, second, third) = split
    loaded = (split[0], second, (third[0], second[1]))
    situation = Situation(MODEL, request, loaded, now, now, refusal="No room.")
    found = compare(situation)
    assert found is not None
    assert (found.unused, found.way) == (("node-2",), "ranges")
    assert found.gain < LEAST_GAIN
    assert math.isinf(found.worth)
    assert "no layers on node-2, but its strategy uses all machines" in describe("demo", found)
    # So it is if the model was loaded as a whole meanwhile. One that has just joined needs a gain.
    whole = replace(situation, loaded=stages_of(place(MODEL, machines(1, 1), request)))
    joined = compare(whole)
    assert joined is not None
    assert joined.unused == ()
    returned = compare(replace(whole, had={"node-2": frozenset({27})}))
    assert returned is not None
    assert returned.unused == ("node-2",)
    # The fastest plan may leave machines out, so that it needs a gain.
    chosen = compare(replace(situation, request=replace(request, strategy="auto")))
    assert chosen is None or (chosen.unused, chosen.worth) == ((), chosen.gain)


@pytest.mark.parametrize(
    ("loaded", "planned", "problem"),
    [
        (
            ((LayerRange(0, 28), (("node-0", 1.0), ("node-1", 1.0))),),
            stages(("node-0", 0, 28)),
            "share the layers of a stage",
        ),
        (
            stages(("node-0", 0, 14), ("node-1", 14, 28)),
            stages(("node-0", 0, 9), ("node-1", 9, 20), ("node-0", 20, 28)),
            "would have several stages",
        ),
        (stages(("node-0", 0, 28)), stages(("node-1", 0, 28)), "No machine would keep"),
        (
            stages(("node-0", 0, 10), ("node-1", 10, 20), ("node-2", 20, 28)),
            stages(("node-0", 0, 10), ("node-2", 10, 20), ("node-1", 20, 28)),
            "exchange their stages",
        ),
    ],
)
def test_it_is_said_why_the_whole_model_is_loaded_again(
    loaded: LoadedStages, planned: LoadedStages, problem: str
) -> None:
    with pytest.raises(PlanError, match=problem):
        changes(machines(1, 1, 1), loaded, planned)


def test_a_split_that_no_longer_fits_is_infinitely_worse() -> None:
    loaded, (first, second) = loaded_on(machines(1, 1)), machines(1, 1).nodes
    smaller = cluster_of(first, replace(second, memory_bytes=second.memory_bytes // 16))
    found = compared(loaded, smaller, has_less_memory=True)
    assert found is not None
    assert found.loaded is None
    assert math.isinf(found.gain)


def test_programs_that_grow_do_not_make_a_split_too_large() -> None:
    loaded, (first, second) = loaded_on(machines(1, 1)), machines(1, 1).nodes
    needed = place(MODEL, machines(1, 1), REQUEST).stages[1].memory_bytes
    tight = replace(second, memory_bytes=needed - 1)
    found = compared(loaded, cluster_of(first, tight))
    assert found is not None
    assert found.loaded is not None
    assert found.gain < LEAST_GAIN


class Clock:
    """Time that passes by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def looks_until_due(patience: Patience, clock: Clock, gain: float, move_s: float, **facts: bool) -> float:
    """Return the seconds until a move pays; infinite if it does not within a day."""
    began = clock.now
    while clock.now - began < 86_400:
        if patience.look(gain, move_s, **{"is_measured": True, "has_changed": False, **facts}):
            return clock.now - began
        clock.now += LOOK_S
    return math.inf


def test_a_gain_has_to_last_for_a_minute_and_for_as_long_as_a_move_takes_to_pay() -> None:
    for gain, move_s, waits_s in ((1.0, 5.0, 60.0), (math.inf, 1000.0, 60.0), (0.5, 100.0, 200.0)):
        clock = Clock()
        assert looks_until_due(Patience(clock), clock, gain, move_s) == waits_s
    clock = Clock()
    assert looks_until_due(Patience(clock), clock, 0.99 * LEAST_GAIN, 1.0) == math.inf
    assert looks_until_due(Patience(clock), clock, 1.0, 5.0, has_changed=True) == LOOK_S


def test_nothing_is_learned_without_steps() -> None:
    clock = Clock()
    assert looks_until_due(Patience(clock), clock, 1.0, 5.0, is_measured=False) == math.inf
    assert looks_until_due(Patience(clock), clock, 1.0, 5.0, is_measured=False, has_changed=True) == LOOK_S


def test_each_recent_move_needs_four_times_the_patience() -> None:
    clock = Clock()
    patience = Patience(clock)
    waits: list[float] = []
    for _ in range(3):
        waits.append(looks_until_due(patience, clock, 1.0, 1.0))
        patience.moved()
    assert waits == [60.0, 240.0, 960.0]
    clock.now += 6 * 3600
    assert not patience.look(1.0, 1.0, is_measured=False, has_changed=False)
    assert looks_until_due(patience, clock, 1.0, 1.0) == 60.0


@cache
def _compared_at(loaded: LoadedStages, ratios: tuple[float, ...]) -> Comparison | None:
    return compared(loaded, machines(*ratios))


class Cluster:
    """Three machines in a simulation, whose model moves as soon as that pays."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.patience = Patience(self.clock)
        self.loaded = loaded_on(machines(1, 1, 1))
        self.moves: list[float] = []

    def found(self, ratios: tuple[float, ...]) -> Comparison | None:
        return _compared_at(self.loaded, ratios)

    def run(self, ratios: tuple[float, ...], seconds: float) -> None:
        """Let time pass, while the machines' steps take these multiples of the predicted time."""
        end = self.clock.now + seconds
        found = self.found(ratios)
        while self.clock.now < end:
            gain = 0.0 if found is None else found.gain
            if self.patience.look(gain, 5.0, is_measured=True, has_changed=False) and found is not None:
                self.loaded = stages_of(found.planned)
                self.patience.moved()
                self.moves.append(self.clock.now)
                found = self.found(ratios)
            self.clock.now += LOOK_S


RATIOS = st.tuples(*[st.sampled_from((1.0, 1.5, 4.0))] * 3)


@given(st.lists(st.tuples(RATIOS, st.integers(1, 90)), min_size=1, max_size=30), RATIOS)
def test_speeds_that_come_and_go_cause_few_moves_and_lasting_ones_the_best_split(
    phases: list[tuple[tuple[float, ...], int]], last: tuple[float, ...]
) -> None:
    cluster = Cluster()
    for ratios, count in phases:
        cluster.run(ratios, count * LOOK_S)
    for number, (before, after) in enumerate(pairwise(cluster.moves), start=1):
        recent = sum(moment > after - 6 * 3600 for moment in cluster.moves[:number])
        assert after - before >= 60 * 4**recent
    count = len(cluster.moves)
    cluster.run(last, 7 * 3600)
    found = cluster.found(last)
    assert found is None or found.gain < LEAST_GAIN
    # One move reaches the best split, and none follows it.
    assert len(cluster.moves) - count <= 1


def test_a_machine_that_is_slow_from_now_on_moves_the_split_once() -> None:
    cluster = Cluster()
    cluster.run((1, 1, 1), 600)
    assert not cluster.moves
    cluster.run((1, 1, 4), 3600)
    assert cluster.moves == [660.0]
    cluster.run((1, 1, 0.25), 3600)
    assert cluster.moves == [660.0, 4200.0 + 240.0]


# ---- time beside computing


def with_overheads(overheads: StepOverheads, *ratios: float) -> ClusterProfile:
    """Return machines as plans count them after these measurements."""
    now = machines(*ratios)
    return replace(
        now,
        nodes=tuple(
            counted(node, overheads.of(node.name), overheads.of(node.name, is_alone=True))
            for node in now.nodes
        ),
    )


def counted(node: NodeProfile, overhead_s: float, alone_s: float | None = None) -> NodeProfile:
    return replace(node, ratios=replace(node.ratios, overhead_s=overhead_s, alone_s=alone_s))


def round_on(loaded: LoadedStages, ratios: Sequence[float], *overheads_s: float) -> Round:
    """Return the round of machines whose steps take these multiples of the predicted time, and these times beside it."""
    now = machines(*ratios)
    nodes = tuple(counted(node, each) for node, each in zip(now.nodes, overheads_s, strict=True))
    speed = speed_of(loaded, replace(now, nodes=nodes))
    by_name = {node.name: node for node in now.nodes}
    given = [(by_name[name], layers) for layers, ((name, _),) in loaded]
    forecast, batches = Forecast(MODEL, REQUEST.demand, now, given), len(loaded)
    rows = REQUEST.streams // batches
    return Round(
        tuple(
            StageStep(
                node.name,
                forecast.decode_s(stage, rows, REQUEST.demand.mean_context_tokens),
                node.ratios.decode,
            )
            for stage, (node, _) in enumerate(given)
        ),
        batches,
        rows,
        REQUEST.streams / speed,
        forecast.pipeline.around_s(rows),
    )


def learn(overheads: StepOverheads, found: Round, times: int = 7, instance: str = "demo-1") -> None:
    """Learn from rounds that take nearly as long."""
    for number in range(times):
        overheads.learn({instance: replace(found, round_s=found.round_s + 1e-9 * number)}, [instance])


def speed_of(loaded: LoadedStages, now: ClusterProfile) -> float:
    return plan_loaded(MODEL, now, REQUEST, (loaded,))[0].prediction.tokens_per_s


@pytest.mark.parametrize("overhead_ms", [0.0, 2.0, 20.0])
def test_the_promise_of_another_split_comes_true_with_the_learned_overhead(overhead_ms: float) -> None:
    loaded, overheads = loaded_on(machines(1, 1)), StepOverheads(Clock(), 1800.0)
    overhead_s, slow = overhead_ms / 1e3, (1.0, 6.0)
    learn(overheads, round_on(loaded, (1, 1), overhead_s, overhead_s))
    # At first, its waits are not known from those of other steps.
    learn(overheads, round_on(loaded, (1, 1.4), overhead_s, overhead_s + 0.01), times=3)
    # The slow machine also answers late, which says nothing about the other one.
    overheads.learn({"demo-1": round_on(loaded, slow, overhead_s, overhead_s + 0.03)}, ["demo-1"])
    assert overheads.of("node-0") == pytest.approx(overhead_s)
    assert overheads.of("node-1") == pytest.approx(overhead_s + 0.03)
    found = compared(loaded, with_overheads(overheads, *slow))
    assert found is not None
    truth = machines(*slow)
    truth = replace(
        truth, nodes=(counted(truth.nodes[0], overhead_s), counted(truth.nodes[1], overhead_s + 0.03))
    )
    for plan in (found.loaded, found.planned):
        assert plan is not None
        assert plan.prediction.tokens_per_s == pytest.approx(speed_of(stages_of(plan), truth))


def test_an_overhead_that_nobody_counts_promises_too_much() -> None:
    loaded = loaded_on(machines(1, 1))
    found = compared(loaded, machines(1, 6))
    assert found is not None
    truth = machines(1, 6)
    truth = replace(truth, nodes=tuple(counted(node, 0.02) for node in truth.nodes))
    assert speed_of(stages_of(found.planned), truth) < 0.9 * found.planned.prediction.tokens_per_s


def test_machines_that_all_become_slower_share_the_overhead() -> None:
    loaded, overheads = loaded_on(machines(1, 1)), StepOverheads(Clock(), 1800.0)
    learn(overheads, round_on(loaded, (1, 1), 0.001, 0.001))
    learn(overheads, round_on(loaded, (3, 3), 0.05, 0.05))
    assert [overheads.of(node) for node in ("node-0", "node-1", "node-2")] == [pytest.approx(0.05)] * 3


def test_a_machine_is_not_slower_because_rounds_have_other_rows() -> None:
    loaded, overheads = loaded_on(machines(1, 1)), StepOverheads(Clock(), 1800.0)
    learn(overheads, round_on(loaded, (1, 1), 0.001, 0.001))
    learn(overheads, replace(round_on(loaded, (1, 1.8), 0.02, 0.02), rows=99))
    assert [overheads.of(node) for node in ("node-0", "node-1")] == [pytest.approx(0.02)] * 2


def test_an_overhead_is_bounded_and_changes_by_more_than_noise() -> None:
    loaded, overheads = loaded_on(machines(1, 1)), StepOverheads(Clock(), 1800.0)

    def learned(overhead_s: float) -> float:
        learn(overheads, round_on(loaded, (1, 1), overhead_s, overhead_s))
        return overheads.of("node-0")

    assert learned(9.0) == 0.2
    assert learned(0.01) == pytest.approx(0.01)
    assert learned(0.0101) == pytest.approx(0.01)
    assert learned(0.02) == pytest.approx(0.02)
    learn(overheads, replace(round_on(loaded, (1, 1), 0.0, 0.0), round_s=1e-6))
    assert overheads.of("node-0") == 0.0


def test_an_overhead_counts_for_a_time_without_new_rounds_and_the_slow_machines_part_until_it_is_fast() -> (
    None
):
    loaded, clock = loaded_on(machines(1, 1)), Clock()
    overheads = StepOverheads(clock, 1800.0)
    usual = round_on(loaded, (1, 1), 0.01, 0.01)
    overheads.learn({"demo-1": usual}, ["demo-1"])
    overheads.learn({"demo-1": round_on(loaded, (1, 6), 0.01, 0.04)}, ["demo-1"])
    overheads.learn({"demo-1": usual}, ["demo-1"])
    assert overheads.of("node-1") == pytest.approx(0.01)
    clock.now = 1799.0
    assert overheads.of("node-1") == pytest.approx(0.01)
    # The same rounds again say nothing new.
    overheads.learn({"demo-1": usual}, ["demo-1"])
    clock.now = 1801.0
    assert overheads.of("node-1") == 0.0


@pytest.mark.parametrize("whole_ms", [2.0, 40.0])
def test_promises_of_one_stage_and_of_several_hold_once_both_have_been_measured(whole_ms: float) -> None:
    """Let a stage with all layers need less or more time beside computing than each of several, and move both ways."""
    truth, overheads = {1: whole_ms / 1e3, 2: 0.02}, StepOverheads(Clock(), 1800.0)
    several = loaded_on(machines(1, 1))
    learn(overheads, round_on(several, (1, 1), truth[2], truth[2]))
    whole = loaded_on(machines(1, 40))
    learn(overheads, round_on(whole, (1, 40), truth[1], truth[1]), instance="demo-2")
    for loaded, ratios in ((several, (1, 1)), (whole, (1, 40)), (several, (1, 3))):
        now, real = with_overheads(overheads, *ratios), machines(*ratios)
        real = replace(real, nodes=tuple(counted(node, truth[len(loaded)]) for node in real.nodes))
        assert speed_of(loaded, now) == pytest.approx(speed_of(loaded, real), rel=0.01)
        # The search counts them as the prediction does.
        plan = place(MODEL, now, REQUEST)
        assert plan.prediction.tokens_per_s >= 0.999 * speed_of(loaded, now)


def test_until_it_is_measured_a_stage_with_all_layers_counts_like_one_of_several() -> None:
    clock = Clock()
    overheads = StepOverheads(clock, 1800.0)
    learn(overheads, round_on(loaded_on(machines(1, 1)), (1, 1), 0.02, 0.02))
    assert overheads.of("node-0") == overheads.of("node-0", is_alone=True) == pytest.approx(0.02)
    clock.now = 1000.0
    learn(overheads, round_on(loaded_on(machines(1, 40)), (1, 40), 0.01, 0.01), instance="demo-2")
    assert overheads.of("node-0") == pytest.approx(0.02)
    assert overheads.of("node-0", is_alone=True) == pytest.approx(0.01)
    # The older time of several stages is forgotten first.
    clock.now = 1801.0
    assert overheads.of("node-0") == overheads.of("node-0", is_alone=True) == pytest.approx(0.01)


@example(0.0, 0.009765625, (4.0, 1.0, 4.0), (1.0, 4.0, 1.0))
@given(st.floats(0.0, 0.05), st.floats(0.0, 0.05), RATIOS, RATIOS)
def test_a_learned_overhead_moves_a_split_at_most_once(
    first_s: float, then_s: float, before: tuple[float, ...], after: tuple[float, ...]
) -> None:
    """Let machines have two overheads and speeds in turn. With the second ones, the best split stays the best.

    A change within the noise of the first split's steps is not seen there, but on faster machines, from which there may be
    another move.
    """
    loaded, overheads = loaded_on(machines(*before)), StepOverheads(Clock(), 1800.0)
    overheads.learn({"demo-1": round_on(loaded, before, *[first_s] * 3)}, ["demo-1"])
    moves, first_step_s = 0, round_on(loaded, after, *[then_s] * 3).step_s
    for _ in range(4):
        learn(overheads, round_on(loaded, after, *[then_s] * 3), instance=f"demo-{moves}")
        found = compared(loaded, with_overheads(overheads, *after))
        if found is None or found.gain < LEAST_GAIN:
            break
        loaded, moves = stages_of(found.planned), moves + 1
    # The median of both measurements counts.
    is_noise = abs(then_s - first_s) / 2 <= 0.05 * first_step_s
    assert moves <= 1 + is_noise
