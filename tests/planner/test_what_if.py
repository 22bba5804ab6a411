"""Answers to what-if questions, models by short name, and machines by the family of their chip."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlx_ring.core.errors import ConfigError, ModelNotFound, PlanError
from mlx_ring.planner.catalogue import known_profile
from mlx_ring.planner.cluster_file import cluster_of
from mlx_ring.planner.known_models import find_known_model, popular_models
from mlx_ring.planner.model_sizes import profile_folder
from mlx_ring.planner.place import place
from mlx_ring.planner.plan import Plan
from mlx_ring.planner.profiles import ClusterProfile, ModelProfile
from mlx_ring.planner.request import Demand, PlanRequest
from mlx_ring.planner.what_if import (
    MOST_ADDED,
    MOST_USERS,
    Question,
    room_for,
    sizes_of,
    what_if,
    with_machines,
)
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
    def place_one(model: ModelProfile, machines: ClusterProfile, request: PlanRequest) -> Plan:
        if request.demand.sequences > 1:
            raise PlanError("There is no plan.")
        return place(model, machines, request)

    monkeypatch.setattr("mlx_ring.planner.what_if.place", place_one)
    machines = cluster("m4-pro-48")
    (found,) = what_if([("8b", sizes("8b", machines))], machines, Question()).outcomes
    assert found.fits
    assert found.users_tokens_per_s == 0


def test_cases_are_planned_like_a_plan_and_those_that_do_not_fit_say_why() -> None:
    machines = cluster("m4-16")
    models = [(name, sizes(name, machines)) for name in ("8b-4bit", "70b-4bit")]
    small, large = what_if(models, machines, Question(context_tokens=4096)).outcomes
    plan = place(models[0][1], machines, PlanRequest(Demand(4096, 1), prompt_tokens=4096))
    assert small.tokens_per_s == pytest.approx(1 / plan.prediction.token_s)
    assert small.first_token_s == plan.prediction.first_token_s
    assert (large.fits, large.users, large.stages) == (False, 0, ())
    assert "GB are missing" in large.why


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
