"""Answers to what-if questions, models by short name, and machines by the family of their chip."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.profiles import made_up_profile

from mlx_ring.core.errors import ConfigError, ModelNotFound, PlanError
from mlx_ring.core.types import LayerRange
from mlx_ring.planner.catalogue import (
    accuracy,
    chips,
    known_machines,
    known_profile,
    machine_names,
    named_links,
)
from mlx_ring.planner.cluster_file import MOST_ADDED, cluster_of, with_machines
from mlx_ring.planner.known_models import find_known_model, popular_models
from mlx_ring.planner.memory_fit import MOST_USERS, room_for
from mlx_ring.planner.model_sizes import profile_folder, sizes_of
from mlx_ring.planner.place import LoadedStages, place
from mlx_ring.planner.plan import Plan
from mlx_ring.planner.profiles import ClusterProfile, ModelProfile, measured_node
from mlx_ring.planner.quick_plans import QuickSearch
from mlx_ring.planner.replicas import place_replicas, total_tokens_per_s
from mlx_ring.planner.request import OBJECTIVES, Demand, Objective, PlanRequest, request_within
from mlx_ring.planner.what_if import Question, what_if
from mlx_ring.settings.strategies import Strategy


def cluster(*names: str) -> ClusterProfile:
    return cluster_of(tuple(known_profile(name) for name in names))


def sizes(name: str, machines: ClusterProfile) -> ModelProfile:
    known = find_known_model(name)
    return sizes_of(known.folder, known.name, machines)


# ---- models


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("llama-70b", "Llama-3.3-70B 4-bit"),
        ("Llama 3.3 70B q4", "Llama-3.3-70B 4-bit"),
        ("qwen3-30b-a3b-4bit", "Qwen3-30B-A3B 4-bit"),
        ("qwen3-30b-8bit", "Qwen3-30B-A3B 8-bit"),
        ("gpt-oss-20b", "gpt-oss-20b MXFP4-Q8"),
        ("deepseek-r1", "DeepSeek-R1 4-bit"),
        ("70B-4bit", "70B 4-bit"),
        ("0.5b-bf16", "0.5B bf16"),
    ],
)
def test_a_short_name_means_the_model_with_its_parts(text: str, name: str) -> None:
    assert find_known_model(text).name == name


@pytest.mark.parametrize("billions", [0.5, 1, 3, 8, 14, 32, 70, 123, 405, 1000])
def test_a_dense_model_has_the_number_of_parameters_that_is_asked_for(billions: float) -> None:
    known = find_known_model(f"{billions:g}b-bf16")
    parameters = profile_folder(known.folder, known.name).weight_bytes / 2
    assert parameters / 1e9 == pytest.approx(billions, rel=0.03)


def test_a_name_that_means_nothing_brings_up_the_nearest() -> None:
    with pytest.raises(ModelNotFound, match=r"The nearest are .*Llama-3-70B"):
        find_known_model("lama-70b")
    with pytest.raises(ModelNotFound, match="9000 billion parameters; give a number from"):
        find_known_model("9000b")


@pytest.mark.parametrize("billions", [0.5, 3, 13, 27, 70, 405])
def test_a_dense_model_can_be_shared_by_two_four_and_eight_ranks(billions: float) -> None:
    known = find_known_model(f"{billions:g}b-4bit")
    shared = profile_folder(known.folder, known.name).shared
    assert shared is not None
    config = known.folder.config
    assert config["num_attention_heads"] % config["num_key_value_heads"] == 0
    assert config["num_key_value_heads"] == 8
    assert config["hidden_size"] == config["num_attention_heads"] * config["head_dim"]


def test_a_models_context_is_the_published_one_or_said_to_be_assumed() -> None:
    assert find_known_model("llama-2-7b").folder.context_length == 4096
    assert find_known_model("qwen3-8b").folder.context_length == 40960
    assert "assumed" not in find_known_model("deepseek-v3.2").remark
    assert "is assumed to be 32,768 tokens" in find_known_model("glm-5.2").remark


@pytest.mark.parametrize(
    "text", ["70B-0bit", "70B-1bit", "70B-7bit", "70B-16bit", "llama-70b-4bit-gs7", "8b-q9"]
)
def test_an_unknown_format_is_refused(text: str) -> None:
    with pytest.raises(ModelNotFound, match=r"The format .* is unknown; give 2, 3, 4, 5, 6 or 8 bits"):
        find_known_model(text)


def test_popular_models_have_sizes_and_a_published_conversion() -> None:
    found = list(popular_models())
    assert len({known.name for known in found}) == len(found) > 30
    for known in found:
        assert "/" in known.remark
        assert known.folder.context_length > 8192


# ---- machines


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("m3-ultra-512", "m3-ultra-mac-studio-512"),
        ("m4-16", "m4-mac-mini-16"),
        ("m4-max-36", "m4-max-macbook-pro-36"),
        ("rtx-4090", "geforce-rtx-4090-24"),
        ("m3-max", "m3-max-macbook-pro-48"),
    ],
)
def test_a_chip_family_names_a_machine(text: str, same: str) -> None:
    assert known_profile(text, "x") == known_profile(same, "x")


def test_names_of_machines_are_known_once_each_in_the_order_of_chips() -> None:
    names = machine_names()
    assert len(set(names)) == len(names)
    assert (
        names.index("m1-8") < names.index("m3-ultra-96") < names.index("m3-ultra-512") < names.index("m4-16")
    )
    sold = {
        (chip, size)
        for each in known_machines().values()
        for chip, sizes in each.bins.items()
        for size in sizes
    }
    assert len(names) <= len(sold)
    for name in names:
        known_profile(name)
    families = {name.rpartition("-")[0] for name in names}
    assert all(chip in families or chip.rpartition("-")[0] in families for chip, _ in sold)
    assert {chip for chip, _ in sold} <= chips().keys()


def test_added_machines_have_names_of_their_own_and_the_link_to_all() -> None:
    machines = with_machines(cluster("m4-16"), ["m4-16", "m4-16"], "tb5-rdma")
    assert [node.name for node in machines.nodes] == ["m4-16", "m4-16#2", "m4-16#3"]
    assert len(machines.links) == 3
    assert all(link.is_mesh and link.trusted for link in machines.links.values())
    with pytest.raises(ConfigError, match=f"add {MOST_ADDED} at most"):
        with_machines(cluster("m4-16"), ["m4-16"] * (MOST_ADDED + 1), None)


# ---- users


@pytest.mark.parametrize(
    "names",
    [
        ["m4-pro-48"],
        ["m4-pro-48", "m4-16"],
        ["m4-24", "m4-16", "m4-pro-48"],
        ["m4-16", "m4-24", "m4-pro-48", "m4-pro-24", "m4-32"],
    ],
)
@pytest.mark.parametrize("strategy", ["auto", "uniform"])
def test_as_many_users_are_counted_as_the_strategy_can_place(names: list[str], strategy: Strategy) -> None:
    machines = cluster(*names)
    model = sizes("14b-4bit", machines)
    request = PlanRequest(Demand(8192, 1), strategy=strategy, objective="throughput")
    users = room_for(model, machines, request)
    place(model, machines, replace(request, demand=Demand(8192, users)))
    with pytest.raises(PlanError):
        place(model, machines, replace(request, demand=Demand(8192, users + 1)))


def test_users_are_counted_up_to_a_limit() -> None:
    machines = cluster("m3-ultra-512")
    request = PlanRequest(Demand(256, 1), objective="throughput")
    assert room_for(sizes("qwen3-0.6b", machines), machines, request) == MOST_USERS


def test_a_model_with_states_fits_as_often_as_a_plan_holds_them() -> None:
    machines = cluster("m4-pro-48")
    model = sizes("qwen3.5-9b", machines)
    request = PlanRequest(Demand(1024, 1, kv_bits=4), objective="throughput")
    users = room_for(model, machines, request)
    place(model, machines, replace(request, demand=Demand(1024, users, 4)))
    if users < MOST_USERS:
        with pytest.raises(PlanError):
            place(model, machines, replace(request, demand=Demand(1024, users + 1, 4)))


def test_an_answer_survives_users_for_whom_no_plan_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def place_one(
        model: ModelProfile, machines: ClusterProfile, request: PlanRequest, _: int | None
    ) -> tuple[Plan, ...]:
        if request.demand.sequences > 1:
            raise PlanError("There is no plan.")
        return (place(model, machines, request),)

    monkeypatch.setattr("mlx_ring.planner.what_if.place_replicas", place_one)
    machines = cluster("m4-pro-48")
    (found,) = what_if([("8b", sizes("8b", machines))], machines, Question()).outcomes
    assert found.fits
    assert found.users_tokens_per_s == 0


def test_cases_are_planned_like_a_plan_and_those_that_do_not_fit_say_why() -> None:
    machines = cluster("m4-16")
    models = [(name, sizes(name, machines)) for name in ("8b-4bit", "70b-4bit")]
    small, large = what_if(models, machines, Question(context_tokens=4096)).outcomes
    predicted = place(models[0][1], machines, PlanRequest(Demand(4096, 1))).prediction
    assert small.tokens_per_s == pytest.approx(1 / predicted.token_s)
    assert (small.first_token_s, small.request_s) == (predicted.first_token_s, predicted.request_s)
    assert (small.model, small.prompt_tokens, small.answer_tokens) == ("8b-4bit", 1024, 256)
    assert (large.fits, large.users, large.stages) == (False, 0, ())
    assert "GB are missing" in large.why


@pytest.mark.parametrize("objective", ["latency", "first-token"])
def test_cases_minimize_the_request_that_is_asked_for(objective: Objective) -> None:
    machines = replace(cluster("m3-ultra-512", "m4-max-128"), usual_link=named_links()["tb5"])
    model = sizes("llama-70b", machines)
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


# ---- a running cluster


def measured(*names: str) -> ClusterProfile:
    profile = made_up_profile(cpu_share=None, memory_bytes=64 * 10**9)
    return ClusterProfile(tuple(measured_node(profile, name) for name in names))


def test_now_is_the_loaded_plan_and_not_the_one_that_would_be_made() -> None:
    machines = measured("a", "b", "c")
    model = sizes("8b-4bit", machines)
    loaded: LoadedStages = (
        (LayerRange(0, 4), (("b", 1.0),)),
        (LayerRange(4, 32), (("a", 1.0),)),
    )
    now, added = what_if([("8b", model)], machines, Question(("m3-ultra-512",), loaded=(loaded,))).outcomes
    assert now.stages == ("b 0-3", "a 4-31")
    assert now.left_out == ("c: the loaded plan does not use it",)
    assert added.stages != now.stages
    alone = place(model, measured("a"), PlanRequest(Demand(8192, 1))).prediction
    assert now.tokens_per_s < 1 / alone.token_s, "two hops more"


def test_instances_on_one_machine_share_its_memory() -> None:
    machines = measured("a")
    model = sizes("8b-4bit", machines)
    stages: LoadedStages = ((LayerRange(0, 32), (("a", 1.0),)),)
    one, two = (
        what_if([("8b", model)], machines, Question(loaded=(stages,) * number)).outcomes[0]
        for number in (1, 2)
    )
    assert one.users > two.users > 1
    assert two.stages == ("a 0-31",) * 2
    assert two.tokens_per_s == pytest.approx(one.tokens_per_s)


def test_ranges_of_measured_machines_have_their_own_accuracy() -> None:
    machines = measured("a")
    found, mixed = what_if(
        [("8b", sizes("8b-4bit", machines))], machines, Question(("m3-ultra-512",))
    ).outcomes
    assert (found.is_measured, mixed.is_measured) == (True, False)
    for one, factor in ((found, accuracy("measured")), (mixed, accuracy("decode"))):
        assert one.tokens_per_s_range[1] / one.tokens_per_s == pytest.approx(factor)


def test_curves_fall_with_context_and_end_at_the_room_for_users() -> None:
    machines = cluster("m4-pro-48")
    answer = what_if([("8b", sizes("8b", machines))], machines, Question(with_curves=True))
    assert answer.curves is not None
    speeds = [point.tokens_per_s for point in answer.curves.by_context]
    assert speeds == sorted(speeds, reverse=True)
    assert answer.curves.by_users[-1].at == answer.outcomes[0].users


def test_a_context_longer_than_the_models_is_an_answer_not_an_error() -> None:
    machines = cluster("m3-ultra-512")
    (found,) = what_if(
        [("x", sizes("qwen3-30b-a3b", machines))], machines, Question(context_tokens=10**6)
    ).outcomes
    assert not found.fits
    assert "supports 32768 at most" in found.why


def test_a_question_that_is_stopped_has_the_cases_so_far() -> None:
    machines = cluster("m4-pro-48")
    calls = iter([False, True])
    answer = what_if(
        [("8b", sizes("8b", machines))], machines, Question(kv_bits=(16, 8, 4)), lambda: next(calls)
    )
    assert [one.kv_bits for one in answer.outcomes] == [16]


# ---- what the planner would do


def test_for_throughput_a_row_shows_the_replicas_that_the_planner_makes() -> None:
    machines = cluster_of(tuple(known_profile("m4-16", name) for name in "ab"))
    model = sizes("qwen3-0.6b", machines)
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
    model = sizes("8b-4bit", machines)
    question = Question(("m4-pro-48",), count=2)
    now, added = what_if([("8b", model)], machines, question).outcomes
    assert not now.fits
    assert "2 replicas" in now.why
    assert added.stages == ("a 0-31", "m4-pro-48 0-31")


def test_users_together_are_never_slower_than_the_machine_that_one_would_get() -> None:
    """Add a fast machine to a slow one with much memory, whose last users would slow all others down."""
    slow = replace(measured("a").nodes[0], memory_bytes=64 * 10**9, bandwidth=2e9, flops=5e10, rates=())
    machines = ClusterProfile((slow,))
    model = sizes("llama-70b", machines)
    question = Question(("m3-ultra-512",), kv_bits=(16, 8, 4))
    rows = what_if([("70b", model)], machines, question).outcomes
    alone = what_if([("70b", model)], cluster("m3-ultra-512"), Question(kv_bits=(16, 8, 4))).outcomes
    for row, best in zip(rows[1::2], alone, strict=True):
        assert row.users > best.users
        assert row.users_tokens_per_s > row.tokens_per_s
        assert row.users_tokens_per_s >= 0.95 * best.users_tokens_per_s
        assert row.fastest_users < row.users


def test_without_machines_those_that_are_added_count_alone() -> None:
    model = sizes("8b-4bit", cluster("m4-16"))
    answer = what_if([("8b", model)], ClusterProfile(()), Question(("m4-pro-48",)), remarks=["It is so."])
    (found,) = answer.outcomes
    assert (found.label, found.stages) == ("m4-pro-48", ("m4-pro-48 0-31",))
    assert answer.remarks == ("It is so.",)


def test_a_request_of_several_users_is_planned_for_them() -> None:
    machines = cluster("m4-pro-48")
    model = sizes("8b-4bit", machines)
    asked = PlanRequest(Demand(8192, 1), users=6)
    (found,) = what_if([("8b", model)], machines, Question(request=asked)).outcomes
    plan = place(model, machines, replace(asked, demand=Demand(8192, 6)))
    assert (found.at_once, found.request_s) == (6, plan.prediction.request_s)
    assert found.users >= 6
    (many,) = what_if([("8b", model)], machines, Question(request=replace(asked, users=4000))).outcomes
    assert not many.fits


# ---- the quick search


UNLIKE = (
    "m4-pro-48",
    "m4-max-128",
    "m3-ultra-96",
    "m4-16",
    "m3-ultra-512",
    "m2-ultra-192",
    "m4-24",
    "m1-max-64",
)


@pytest.mark.slow
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("link", ["tb5-rdma", "10gbe"])
def test_the_quick_search_finds_about_as_good_plans(link: str, objective: Objective) -> None:
    factors: list[float] = []
    for number in (2, 3, 4):
        machines = replace(cluster(*UNLIKE[:number]), usual_link=named_links()[link])
        search = QuickSearch(machines)
        for name in ("qwen3-0.6b", "llama-8b", "gpt-oss-120b", "llama-70b", "qwen3-235b-a22b-4bit"):
            model = sizes(name, machines)
            request = PlanRequest(
                Demand(8192, 8 if objective == "throughput" else 1), objective=objective, prompt_tokens=4000
            )
            try:
                best = place(model, machines, request)
            except PlanError:
                with pytest.raises(PlanError):
                    search.plan(model, request)
                continue
            found = search.plan(model, request)
            check_holds(found, model)
            if objective == "memory":
                factors.append(1 + fullest(found) - fullest(best))
            else:
                seconds = (one.prediction.minimized_s(objective) for one in (found, best))
                factors.append(next(seconds) / next(seconds))
    assert len(factors) > 8
    assert max(factors) < 1.15
    assert sum(factors) / len(factors) < 1.03


def fullest(plan: Plan) -> float:
    return max(rank.memory_bytes / rank.usable_bytes for stage in plan.stages for rank in stage.ranks)


def check_holds(plan: Plan, model: ModelProfile) -> None:
    """Check that a plan has all layers once, and no machine more than its memory."""
    layers = [layer for stage in plan.stages for layer in range(stage.layers.start, stage.layers.end)]
    assert layers == list(range(len(model.layers)))
    assert fullest(plan) <= 1
    nodes = [rank.node for stage in plan.stages for rank in stage.ranks]
    assert len(set(nodes)) == len(nodes)
    assert not set(nodes) & {left.node for left in plan.left_out}


@pytest.mark.slow
def test_many_cases_are_planned_by_the_quick_search_and_say_so() -> None:
    machines = replace(cluster(*UNLIKE), usual_link=named_links()["tb5-rdma"])
    models = [(known.name, sizes_of(known.folder, known.name, machines)) for known in popular_models()]
    answer = what_if(models, machines, Question())
    assert any("A quick search planned them" in remark for remark in answer.remarks)
    assert all(one.fits for one in answer.outcomes)
    assert all(one.users_tokens_per_s >= 0.95 * one.tokens_per_s for one in answer.outcomes)
    few = what_if(models[:1], cluster("m4-pro-48"), Question())
    assert few.remarks == ()


def test_a_quick_search_asks_for_no_plan_of_the_planner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Expect it to leave out what takes seconds for each case."""

    def refuse(*_: object) -> None:
        raise AssertionError("the planner was asked")

    for name in ("quick_plans.place_exactly", "what_if.place_replicas"):
        monkeypatch.setattr(f"mlx_ring.planner.{name}", refuse)
    machines = replace(cluster(*UNLIKE), usual_link=named_links()["tb5-rdma"])
    (found,) = what_if([("70b", sizes("llama-70b", machines))], machines, Question()).outcomes
    assert found.fits


@pytest.mark.parametrize("count", [2, 3])
def test_the_quick_search_makes_so_many_replicas(count: int) -> None:
    machines = cluster("m4-pro-48", "m4-max-128", "m3-ultra-96")
    model = sizes("llama-8b", machines)
    request = PlanRequest(Demand(8192, 12), objective="throughput")
    plans = QuickSearch(machines).replicas(model, request, count)
    assert [plan.sequences for plan in plans] == [12 // count] * count
    nodes = [rank.node for plan in plans for stage in plan.stages for rank in stage.ranks]
    assert len(set(nodes)) == len(nodes)
    with pytest.raises(PlanError, match="No 3 replicas of"):
        QuickSearch(cluster("m4-pro-48")).replicas(model, request, 3)


def test_users_are_counted_quickly_where_no_order_of_machines_holds_more() -> None:
    machines = cluster("m4-24", "m4-16", "m4-pro-48")
    request = PlanRequest(Demand(8192, 1), objective="throughput")
    model = sizes("14b-4bit", machines)
    assert room_for(model, machines, request, is_quick=True) == room_for(model, machines, request)
