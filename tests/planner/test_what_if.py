"""Answers to what-if questions."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.planner.clusters import UNLIKE, known_cluster, known_sizes
from tests.profiles import made_up_profile

from mlx_ring.core.errors import ConfigError, PlanError
from mlx_ring.core.types import LayerRange
from mlx_ring.planner.catalogue import (
    accuracy,
    known_profile,
    named_links,
)
from mlx_ring.planner.cluster_file import cluster_of
from mlx_ring.planner.known_models import find_known_model, popular_models
from mlx_ring.planner.model_sizes import sizes_of
from mlx_ring.planner.place import LoadedStages, place, plan_instances, plan_loaded
from mlx_ring.planner.plan import Plan
from mlx_ring.planner.profiles import ClusterProfile, ModelProfile, measured_node
from mlx_ring.planner.replicas import place_replicas, total_tokens_per_s
from mlx_ring.planner.request import Demand, Objective, PlanRequest, request_within
from mlx_ring.planner.tensor_plans import TensorSearch, place_tensor
from mlx_ring.planner.what_if import Outcome, Question, what_if


def test_an_answer_survives_users_for_whom_no_plan_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def place_one(
        model: ModelProfile, machines: ClusterProfile, request: PlanRequest, _: int | None
    ) -> tuple[Plan, ...]:
        if request.demand.sequences > 1:
            raise PlanError("There is no plan.")
        return (place(model, machines, request),)

    monkeypatch.setattr("mlx_ring.planner.what_if.place_replicas", place_one)
    machines = known_cluster("m4-pro-48")
    (found,) = what_if([("8b", known_sizes("8b", machines))], machines, Question()).outcomes
    assert found.fits
    assert found.users_tokens_per_s == 0


def test_cases_are_planned_like_a_plan_and_those_that_do_not_fit_say_why() -> None:
    machines = known_cluster("m4-16")
    models = [(name, known_sizes(name, machines)) for name in ("8b-4bit", "70b-4bit")]
    small, large = what_if(models, machines, Question(context_tokens=4096)).outcomes
    predicted = place(models[0][1], machines, PlanRequest(Demand(4096, 1))).prediction
    assert small.tokens_per_s == pytest.approx(1 / predicted.token_s)
    assert (small.first_token_s, small.request_s) == (predicted.first_token_s, predicted.request_s)
    assert (small.model, small.prompt_tokens, small.answer_tokens) == ("8b-4bit", 1024, 256)
    assert (large.fits, large.users, large.stages) == (False, 0, ())
    assert "GB are missing" in large.why


@pytest.mark.parametrize("objective", ["latency", "first-token"])
def test_cases_minimize_the_request_that_is_asked_for(objective: Objective) -> None:
    machines = replace(known_cluster("m3-ultra-512", "m4-max-128"), usual_link=named_links()["tb5"])
    model = known_sizes("llama-70b", machines)
    asked = PlanRequest(
        Demand(8192, 1, typical_tokens=32_064), "auto", objective, prompt_tokens=32_000, answer_tokens=128
    )
    (found,) = what_if([("70b", model)], machines, Question(request=asked)).outcomes
    plan = place(model, machines, replace(asked, demand=replace(asked.demand, context_tokens=32_128)))
    assert found.context_tokens == 32_128, "room for the request"
    assert found.request_s == plan.prediction.request_s
    assert found.request_s_range[0] < found.request_s < found.request_s_range[1]


def test_given_lengths_must_have_room_and_usual_ones_are_shortened() -> None:
    given = PlanRequest(Demand(8192, 1, typical_tokens=4128), prompt_tokens=4000, answer_tokens=256)
    with pytest.raises(
        ConfigError,
        match="4000 tokens and an answer of 256 need a context of 4256, which is longer than 4096",
    ):
        request_within(given, 8192, 4096)
    assert request_within(given, 8192, 4256).prompt_tokens == 4000
    usual = request_within(PlanRequest(Demand(8192, 1)), 8192, 500)
    assert (usual.prompt_tokens, usual.answer_tokens) == (400, 100)


def test_one_machine_may_hold_several_replicas_as_serve_loads_them() -> None:
    machines = known_cluster("m4-max-128")
    model = known_sizes("8b-4bit", machines)
    one, two = (what_if([("8b", model)], machines, Question(count=count)).outcomes[0] for count in (1, 2))
    assert (two.fits, two.stages) == (True, one.stages * 2)
    assert one.users > two.users > 1


def test_a_quick_search_leaves_replicas_over_several_machines_each_to_the_planner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machines = replace(
        cluster_of(tuple(known_profile("m4-pro-48", f"m{place}") for place in range(4))),
        usual_link=named_links()["10gbe"],
    )
    model = known_sizes("llama-70b", machines)
    monkeypatch.setattr("mlx_ring.planner.what_if._MOST_WORK", 0)
    (found,) = what_if([("70b", model)], machines, Question(count=2, context_tokens=2048)).outcomes
    assert found.fits, found.why


def test_times_of_several_users_are_those_of_all_their_requests_also_for_throughput() -> None:
    machines = known_cluster("m4-max-128")
    model = known_sizes("8b-4bit", machines)

    def found(objective: Objective, users: int) -> Outcome:
        request = PlanRequest(Demand(4096, 1), objective=objective, users=users)
        return what_if([("8b", model)], machines, Question(request=request, context_tokens=4096)).outcomes[0]

    together, apart = found("throughput", 8), found("throughput", 1)
    assert together.at_once == 8
    assert together.request_s > 2 * apart.request_s
    assert together.request_s == pytest.approx(found("latency", 8).request_s, rel=0.01)


def test_a_hybrid_is_searched_few_times_because_memory_decides_about_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machines = known_cluster("m4-max-128", "m4-pro-64", "m4-max-64")
    trusted = tuple(replace(node, trusted=True) for node in machines.nodes)
    machines = replace(machines, nodes=trusted, usual_link=named_links()["tb5-rdma"])
    searches: list[int] = []

    def counted(
        model: ModelProfile, cluster: ClusterProfile, request: PlanRequest, search: TensorSearch
    ) -> Plan:
        searches.append(request.demand.sequences)
        return place_tensor(model, cluster, request, search)

    for user in ("place", "memory_fit"):
        monkeypatch.setattr(f"mlx_ring.planner.{user}.place_tensor", counted)
    question = Question(request=PlanRequest(Demand(8192, 1), "hybrid"))
    (found,) = what_if([("8b", known_sizes("8b-4bit", machines))], machines, question).outcomes
    assert found.fits
    assert found.users > 1
    assert len(searches) <= 4


# ---- a running cluster


def measured(*names: str) -> ClusterProfile:
    profile = made_up_profile(cpu_share=None, memory_bytes=64 * 10**9)
    return ClusterProfile(tuple(measured_node(profile, name) for name in names))


def test_now_is_the_loaded_plan_and_not_the_one_that_would_be_made() -> None:
    machines = measured("a", "b", "c")
    model = known_sizes("8b-4bit", machines)
    loaded: LoadedStages = (
        (LayerRange(0, 4), (("b", 1.0),)),
        (LayerRange(4, 32), (("a", 1.0),)),
    )
    now, added = what_if([("8b", model)], machines, Question(("m3-ultra-512",), loaded=(loaded,))).outcomes
    assert now.stages == ("b 0-3", "a 4-31")
    assert now.left_out == ("c: not in the loaded plan",)
    assert added.stages != now.stages
    alone = place(model, measured("a"), PlanRequest(Demand(8192, 1))).prediction
    assert now.tokens_per_s < 1 / alone.token_s, "two hops more"


def test_instances_on_one_machine_share_its_memory() -> None:
    machines = measured("a")
    model = known_sizes("8b-4bit", machines)
    stages: LoadedStages = ((LayerRange(0, 32), (("a", 1.0),)),)
    one, two = (
        what_if([("8b", model)], machines, Question(loaded=(stages,) * number)).outcomes[0]
        for number in (1, 2)
    )
    assert one.users > two.users > 1
    assert two.stages == ("a 0-31",) * 2
    assert two.tokens_per_s == pytest.approx(one.tokens_per_s)


def test_instances_on_one_machine_share_its_speed_while_they_compute_together() -> None:
    machines = measured("a")
    model = known_sizes("8b-4bit", machines)
    stages: LoadedStages = ((LayerRange(0, 32), (("a", 1.0),)),)
    request = PlanRequest(Demand(8192, 8), users=8)
    (one,), two = (plan_loaded(model, machines, request, [stages] * count) for count in (1, 2))
    assert total_tokens_per_s(two, 8) < total_tokens_per_s([one], 8)
    assert two[0].prediction.request_s >= one.prediction.request_s
    lone = replace(request, demand=Demand(8192, 1), users=1)
    (one,), two = (plan_loaded(model, machines, lone, [stages] * count) for count in (1, 2))
    assert two[0].prediction.token_s == pytest.approx(one.prediction.token_s)


@pytest.mark.parametrize("name", ["m4-max-128", "linux-desktop-64"])
def test_two_instances_on_a_known_machine_are_no_faster_than_one(name: str) -> None:
    """Expect that products one row after the other, and operations beside products, are shared as well."""
    machines = known_cluster(name)
    model = known_sizes("qwen3-30b-a3b", machines)
    request = PlanRequest(Demand(2048, 32), users=32)
    (one,), two = (plan_instances(model, machines, request, count) for count in (1, 2))
    assert total_tokens_per_s(two, 32) <= total_tokens_per_s([one], 32)
    assert two[0].prediction.first_token_s == pytest.approx(one.prediction.first_token_s, rel=0.01)
    assert two[0].prediction.token_s >= one.prediction.token_s


def test_ranges_of_measured_machines_have_their_own_accuracy() -> None:
    machines = measured("a")
    found, mixed = what_if(
        [("8b", known_sizes("8b-4bit", machines))], machines, Question(("m3-ultra-512",))
    ).outcomes
    assert (found.is_measured, mixed.is_measured) == (True, False)
    for one, factor in ((found, accuracy("measured")), (mixed, accuracy("decode"))):
        assert one.tokens_per_s_range[1] / one.tokens_per_s == pytest.approx(factor)


def test_curves_fall_with_context_and_end_at_the_room_for_users() -> None:
    machines = known_cluster("m4-pro-48")
    answer = what_if([("8b", known_sizes("8b", machines))], machines, Question(with_curves=True))
    assert answer.curves is not None
    speeds = [point.tokens_per_s for point in answer.curves.by_context]
    assert speeds == sorted(speeds, reverse=True)
    assert answer.curves.by_users[-1].at == answer.outcomes[0].users


def test_a_context_longer_than_the_models_is_an_answer_not_an_error() -> None:
    machines = known_cluster("m3-ultra-512")
    (found,) = what_if(
        [("x", known_sizes("qwen3-30b-a3b", machines))], machines, Question(context_tokens=10**6)
    ).outcomes
    assert not found.fits
    assert "supports 32768 at most" in found.why


def test_a_question_that_is_stopped_has_the_cases_so_far() -> None:
    machines = known_cluster("m4-pro-48")
    calls = iter([False, True])
    answer = what_if(
        [("8b", known_sizes("8b", machines))], machines, Question(kv_bits=(16, 8, 4)), lambda: next(calls)
    )
    assert [one.kv_bits for one in answer.outcomes] == [16]


# ---- what the planner would do


def test_for_throughput_a_row_shows_the_replicas_that_the_planner_makes() -> None:
    machines = cluster_of(tuple(known_profile("m4-16", name) for name in "ab"))
    model = known_sizes("qwen3-0.6b", machines)
    asked = PlanRequest(Demand(8192, 1), objective="throughput")
    (found,) = what_if([("8b", model)], machines, Question(request=asked)).outcomes
    demand = replace(asked.demand, sequences=found.fastest_users)
    plans = place_replicas(model, machines, replace(asked, demand=demand), None)
    assert len(plans) == 2
    assert sorted(found.stages) == ["a 0-27", "b 0-27"]
    assert found.left_out == ()
    assert found.users_tokens_per_s == pytest.approx(total_tokens_per_s(plans, found.fastest_users))


def test_a_heads_number_of_replicas_holds_for_machines_that_are_added() -> None:
    machines = measured("a")
    model = known_sizes("8b-4bit", machines)
    question = Question(("m4-pro-48",), count=2)
    now, added = what_if([("8b", model)], machines, question).outcomes
    assert (now.fits, now.stages) == (True, ("a 0-31",) * 2)
    assert added.stages == ("a 0-31", "m4-pro-48 0-31")


def test_users_together_are_never_slower_than_the_machine_that_one_would_get() -> None:
    """Add a fast machine to a slow one with much memory, whose last users would slow all others down."""
    slow = replace(measured("a").nodes[0], memory_bytes=64 * 10**9, bandwidth=2e9, flops=5e10, rates=())
    machines = ClusterProfile((slow,))
    model = known_sizes("llama-70b", machines)
    question = Question(("m3-ultra-512",), kv_bits=(16, 8, 4))
    rows = what_if([("70b", model)], machines, question).outcomes
    alone = what_if([("70b", model)], known_cluster("m3-ultra-512"), Question(kv_bits=(16, 8, 4))).outcomes
    for row, best in zip(rows[1::2], alone, strict=True):
        assert row.users > best.users
        assert row.users_tokens_per_s > row.tokens_per_s
        assert row.users_tokens_per_s >= 0.95 * best.users_tokens_per_s
        assert row.fastest_users < row.users


def test_without_machines_those_that_are_added_count_alone() -> None:
    model = known_sizes("8b-4bit", known_cluster("m4-16"))
    answer = what_if([("8b", model)], ClusterProfile(()), Question(("m4-pro-48",)), remarks=["It is so."])
    (found,) = answer.outcomes
    assert (found.label, found.stages) == ("m4-pro-48", ("m4-pro-48 0-31",))
    assert answer.remarks == ("It is so.",)


def test_more_memory_never_makes_the_fastest_users_slower() -> None:
    """Take machines over which three users are faster together than all, with a slower number on the way down."""
    machines = replace(
        known_cluster("m4-pro-48", "m3-ultra-96", "m4-max-128"), usual_link=named_links()["tb5"]
    )
    first, *others = machines.nodes
    larger = replace(machines, nodes=(replace(first, memory_bytes=first.memory_bytes * 5 // 4), *others))
    question = Question(request=PlanRequest(Demand(8192, 1), users=4))
    folder = find_known_model("qwen3-235b-a22b-4bit").folder
    less, more = (
        what_if([("moe", sizes_of(folder, "moe", each))], each, question).outcomes[0]
        for each in (machines, larger)
    )
    assert more.users > less.users
    assert more.users_tokens_per_s >= 0.99 * less.users_tokens_per_s


def test_a_request_of_several_users_is_planned_for_them() -> None:
    machines = known_cluster("m4-pro-48")
    model = known_sizes("8b-4bit", machines)
    asked = PlanRequest(Demand(8192, 1), users=6)
    (found,) = what_if([("8b", model)], machines, Question(request=asked)).outcomes
    plan = place(model, machines, replace(asked, demand=Demand(8192, 6)))
    assert (found.at_once, found.request_s) == (6, plan.prediction.request_s)
    assert found.users >= 6
    (many,) = what_if([("8b", model)], machines, Question(request=replace(asked, users=4000))).outcomes
    assert not many.fits


@pytest.mark.slow
def test_many_cases_are_planned_by_the_quick_search_and_say_so() -> None:
    machines = replace(known_cluster(*UNLIKE), usual_link=named_links()["tb5-rdma"])
    models = [(known.name, sizes_of(known.folder, known.name, machines)) for known in popular_models()]
    answer = what_if(models, machines, Question())
    assert any("A quick search planned them" in remark for remark in answer.remarks)
    fitting = [one for one in answer.outcomes if one.fits]
    assert len(fitting) == len(models) - 1, "the largest does not fit"
    assert all(one.users_tokens_per_s >= 0.95 * one.tokens_per_s for one in fitting)
    few = what_if(models[:1], known_cluster("m4-pro-48"), Question())
    assert few.remarks == ()


def test_a_quick_search_asks_for_no_plan_of_the_planner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Expect it to leave out what takes seconds for each case."""

    def refuse(*_: object) -> None:
        raise AssertionError("the planner was asked")

    for name in ("quick_plans.place_exactly", "what_if.place_replicas"):
        monkeypatch.setattr(f"mlx_ring.planner.{name}", refuse)
    machines = replace(known_cluster(*UNLIKE), usual_link=named_links()["tb5-rdma"])
    (found,) = what_if([("70b", known_sizes("llama-70b", machines))], machines, Question()).outcomes
    assert found.fits
