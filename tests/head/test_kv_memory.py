"""KV limits of instances as others join and leave, and refusals for lack of memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import pytest
from tests.planner.clusters import model_of

from mlx_ring.core.errors import ConfigError, ContextKept, PlanError
from mlx_ring.core.types import LayerRange, RankId
from mlx_ring.engine.kv_budget import KEPT_TOKENS, Allowance, NodeRank, RankKv
from mlx_ring.head.kv_memory import KvKeeper, KvShares, KvUser, Reservation, no_room
from mlx_ring.head.served_model import policy_of
from mlx_ring.models.tensor_shares import TensorSizes
from mlx_ring.planner.profiles import LAYERS_AHEAD_WITH_CUDA, ModelProfile, NodeProfile
from mlx_ring.planner.request import Demand
from mlx_ring.planner.stage_costs import long_chunk_on
from mlx_ring.rpc.protos import agent_pb2, hello_pb2, worker_pb2
from mlx_ring.settings.config import Settings

GIB = 1 << 30
FIRST = RankId(0, 0)
HERE: NodeRank = ("here", FIRST)
NO_RESERVE = {"here": Allowance(0.0), "there": Allowance(0.0)}
"""Allowances without a share kept free. One GiB is always kept free."""


def worker(left: int, *, weights: int = 0) -> worker_pb2.WorkerStatus:
    return worker_pb2.WorkerStatus(
        phase="ready",
        memory_bytes=64 * GIB,
        memory_left_bytes=left * GIB,
        device_memory_bytes=weights * GIB,
        kv=worker_pb2.KvTraits(bytes_per_token=1000),
    )


def user(name: str, context: int = 4096, *, insisted: bool = False) -> KvUser:
    return KvUser(name, f"model {name}", context, insisted=insisted)


def join(
    shares: KvShares,
    instance: str | KvUser,
    workers: dict[NodeRank, worker_pb2.WorkerStatus],
    allowances: dict[str, Allowance],
) -> Mapping[RankId, RankKv]:
    return shares.join(user(instance) if isinstance(instance, str) else instance, workers, allowances)[0]


@pytest.mark.parametrize(
    ("gib", "limit_gib", "ranks", "uses_cuda", "hidden", "widest", "layers", "expected"),
    [
        pytest.param(43, None, 1, False, 4096, 14336, 32, 2048, id="8 B on a Mac of 64 GB"),
        pytest.param(43, 8, 1, False, 4096, 14336, 32, 0, id="8 B within 8 GiB"),
        pytest.param(5, None, 1, False, 4096, 14336, 32, 0, id="8 B on a Mac of 8 GB"),
        pytest.param(131, None, 1, True, 2048, 8192, 16, 2048, id="1.2 B on an H200"),
        pytest.param(22, None, 1, True, 4096, 14336, 32, 0, id="8 B on an RTX 4090"),
        pytest.param(22, None, 1, False, 4096, 14336, 32, 2048, id="8 B on a Mac of 32 GB"),
        pytest.param(22, None, 2, False, 4096, 14336, 32, 0, id="two ranks on it"),
    ],
)
def test_long_chunks_need_gpus_whose_free_part_holds_their_activations(
    gib: int,
    limit_gib: int | None,
    ranks: int,
    hidden: int,
    widest: int,
    layers: int,
    expected: int,
    *,
    uses_cuda: bool,
) -> None:
    sizes = fused(replace(model_of(layers), hidden_size=hidden, widest=widest))
    limit = None if limit_gib is None else limit_gib * GIB
    for allowance, given, device, longest in (
        (Allowance(limit_bytes=limit), sizes, "gpu", expected),
        (Allowance(0.0, limit), sizes, "gpu", 0),
        (Allowance(limit_bytes=limit), None, "gpu", 0),
        (Allowance(limit_bytes=limit), sizes, "cpu", 0),
    ):
        status = gpu_worker(gib, uses_cuda=uses_cuda)
        status.device = device
        shares = KvShares(1 << 20)
        join(shares, "a", {("here", RankId(0, rank)): status for rank in range(ranks)}, {"here": allowance})
        assert shares.long_chunk("a", given, (LayerRange(0, layers),), "off") == longest
        node = NodeProfile(
            "here",
            min(gib, limit_gib or gib) * GIB,
            1.0,
            1.0,
            reserve_share=allowance.reserve_share,
            layers_ahead=LAYERS_AHEAD_WITH_CUDA if uses_cuda else 0.0,
            long_chunk_tokens=2048 if device == "gpu" else 0,
        )
        if given is not None:
            assert long_chunk_on([(node, layers)] * ranks, given, Demand(8192, 1)) == longest
            assert not long_chunk_on([(node, layers)] * ranks, given, Demand(8192, 1, chunk_tokens=512))


def test_models_on_one_machine_share_the_memory_for_long_chunks() -> None:
    shares, ranges = KvShares(1 << 20), (LayerRange(0, 32),)
    sizes = fused(replace(model_of(32), hidden_size=4096, widest=14336))

    def longest(instance: str) -> int:
        return shares.long_chunk(instance, sizes, ranges, "off")

    for instance in "abc":
        join(shares, instance, {HERE: gpu_worker(43)}, {"here": Allowance()})
    assert [longest(instance) for instance in "abc"] == [2048, 2048, 0]
    shares.leave("a")
    assert [longest(instance) for instance in "bc"] == [2048, 2048]


@pytest.mark.parametrize(
    ("head_dim", "kv_bits", "expected"), [(128, "off", 2048), (256, "off", 0), (128, "4", 0)]
)
def test_scores_of_attention_that_is_not_fused_count(head_dim: int, kv_bits: str, expected: int) -> None:
    shares = KvShares(1 << 20)
    sizes = fused(replace(model_of(32), hidden_size=4096, widest=14336), head_dim)
    join(shares, "a", {HERE: gpu_worker(30)}, {"here": Allowance()})
    assert shares.long_chunk("a", sizes, (LayerRange(0, 32),), kv_bits) == expected
    demand = Demand(8192, 1, 16 if kv_bits == "off" else int(kv_bits))
    node = NodeProfile("here", 30 * GIB, 1.0, 1.0, long_chunk_tokens=2048)
    assert long_chunk_on([(node, 32)], sizes, demand) == expected


def fused(model: ModelProfile, head_dim: int = 128) -> ModelProfile:
    """Return the model with 4,096 numbers in its queries, in heads of a width."""
    layers = tuple(replace(layer, query_width=4096) for layer in model.layers)
    shared = TensorSizes(8, 4096 // head_dim, head_dim, 14336, 0, 32000, 1)
    return replace(model, layers=layers, shared=shared)


def gpu_worker(gib: int, *, uses_cuda: bool = False) -> worker_pb2.WorkerStatus:
    status = worker(gib)
    status.device, status.memory_bytes, status.uses_cuda = "gpu", gib * GIB, uses_cuda
    return status


def test_a_given_chunk_is_the_longest() -> None:
    assert (policy_of(Settings(), 2048).prefill_chunk, policy_of(Settings(), 2048).long_chunk) == (512, 2048)
    given = policy_of(Settings(prefill_chunk=512), 2048)
    assert (given.prefill_chunk, given.long_chunk) == (512, 0)


def test_one_instance_has_all_memory_and_two_share_it() -> None:
    shares = KvShares(None)
    first = join(shares, "a", {HERE: worker(21)}, NO_RESERVE)
    second = join(shares, "b", {HERE: worker(11)}, NO_RESERVE)
    assert (first[FIRST].limit_bytes, second[FIRST].limit_bytes) == (20 * GIB, 5 * GIB)


def test_instances_on_other_nodes_do_not_count() -> None:
    shares = KvShares(None)
    join(shares, "a", {HERE: worker(21)}, NO_RESERVE)
    assert join(shares, "b", {("there", FIRST): worker(11)}, NO_RESERVE)[FIRST].limit_bytes == 10 * GIB


def test_kv_that_others_hold_by_now_is_part_of_the_shared_memory() -> None:
    shares = KvShares(None)
    join(shares, "a", {HERE: worker(21)}, NO_RESERVE)
    grown = worker(15)
    grown.kv_bytes = 6 * GIB
    state = agent_pb2.WorkerState(instance="a", stage=0, rank=0, status=grown)
    shares.record_workers(agent_pb2.AgentEvent(hello=hello_pb2.Hello(node="here"), workers=[state]))
    assert join(shares, "b", {HERE: worker(11)}, NO_RESERVE)[FIRST].limit_bytes == 8 * GIB


def test_memory_of_an_instance_that_left_is_shared_by_the_others() -> None:
    shares = KvShares(None)
    join(shares, "a", {HERE: worker(31, weights=10)}, NO_RESERVE)
    join(shares, "b", {HERE: worker(21)}, NO_RESERVE)
    shares.leave("a")
    shares.leave("never-there")
    assert join(shares, "c", {HERE: worker(31)}, NO_RESERVE)[FIRST].limit_bytes == 15 * GIB


def test_an_explicit_kv_size_does_not_change_when_others_join() -> None:
    shares = KvShares(5 * GIB)
    assert join(shares, "a", {HERE: worker(21)}, NO_RESERVE)[FIRST].limit_bytes == 5 * GIB
    assert join(shares, "b", {HERE: worker(1)}, NO_RESERVE)[FIRST].limit_bytes == 5 * GIB


def test_expected_weights_reduce_the_limits_of_others_at_once() -> None:
    shares = KvShares(None)
    join(shares, "a", {HERE: worker(21)}, NO_RESERVE)
    shares.expect(user("b"), {"here": Reservation(6 * GIB, 1)})
    assert join(shares, "c", {HERE: worker(21)}, NO_RESERVE)[FIRST].limit_bytes == 14 * GIB // 3
    shares.leave("b")
    assert join(shares, "d", {HERE: worker(21)}, NO_RESERVE)[FIRST].limit_bytes == 20 * GIB // 3


def test_limit_stays_within_the_owners_allowance() -> None:
    shares = KvShares(None)
    granted = {"here": Allowance(0.5, limit_bytes=16 * GIB)}
    assert join(shares, "a", {HERE: worker(60, weights=3)}, granted)[FIRST].limit_bytes == 5 * GIB


class Engine:
    """An engine that records its limits."""

    error = None

    def __init__(self) -> None:
        self.limits: list[int] = []

    def limit_kv(self, limits: dict[RankId, int]) -> None:
        self.limits.append(limits[FIRST])


def test_memory_of_an_instance_that_left_is_used_after_the_next_measurement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shares, engine, now = KvShares(None), Engine(), [100.0]
    monkeypatch.setattr("mlx_ring.head.kv_memory.time.monotonic", lambda: now[0])
    join(shares, "a", {HERE: worker(21)}, NO_RESERVE)
    shares.attach("a", cast("Any", engine))
    join(shares, "b", {HERE: worker(11)}, NO_RESERVE)
    shares.leave("b")
    state = agent_pb2.WorkerState(instance="a", stage=0, rank=0, status=worker(21))
    event = agent_pb2.AgentEvent(hello=hello_pb2.Hello(node="here"), workers=[state])
    shares.record_workers(event)
    assert engine.limits == [5 * GIB], "this report may be from an earlier measurement"
    now[0] += 3.0
    shares.record_workers(event)
    shares.record_workers(event)
    assert engine.limits == [5 * GIB, 20 * GIB]


MILLION = 2_147_328
"""Tokens in whole blocks whose KV takes a little less than 2 GiB."""


def test_an_explicit_context_is_kept_and_a_newcomer_gets_the_rest() -> None:
    shares, engine = KvShares(None), Engine()
    join(shares, user("a", 4 * MILLION, insisted=True), {HERE: worker(11)}, NO_RESERVE)
    shares.attach("a", cast("Any", engine))
    rest = join(shares, user("b"), {HERE: worker(11)}, NO_RESERVE)[FIRST].limit_bytes
    assert engine.limits == [4 * MILLION * 1000]
    assert rest == 10 * GIB - 4 * MILLION * 1000


def test_newcomer_whose_explicit_context_does_not_fit_is_refused_and_limits_stay() -> None:
    shares, engine = KvShares(None), Engine()
    join(shares, user("a", 4 * MILLION, insisted=True), {HERE: worker(11)}, NO_RESERVE)
    shares.attach("a", cast("Any", engine))
    with pytest.raises(ContextKept) as caught:
        join(shares, user("b", 2 * MILLION, insisted=True), {HERE: worker(11)}, NO_RESERVE)
    assert engine.limits == []
    assert str(caught.value) == (
        f"model b does not fit beside model a on here: the KV of one request of {2 * MILLION} tokens takes 4.29 GB, and "
        f"2.15 GB are left there, for model a keeps 8.59 GB for one request of {4 * MILLION} tokens. Unload model a, or "
        f"start the server with a --max-model-len below {4 * MILLION}, or with --model-memory, with which models are loaded in turn."
    )
    shares.leave("b")
    assert join(shares, user("c", 1000, insisted=True), {HERE: worker(11)}, NO_RESERVE)


def test_weights_that_leave_too_little_for_an_explicit_context_are_refused_before_loading() -> None:
    shares, engine = KvShares(None), Engine()
    join(shares, user("a", 4 * MILLION, insisted=True), {HERE: worker(11)}, NO_RESERVE)
    shares.attach("a", cast("Any", engine))
    with pytest.raises(
        ContextKept, match=r"model b does not fit beside model a on here: its weights take 3\.22 GB"
    ):
        shares.expect(user("b"), {"here": Reservation(3 * GIB, 1)})
    assert engine.limits == []
    shares.expect(user("b"), {"here": Reservation(GIB, 1)})
    assert engine.limits == [4 * MILLION * 1000]


def test_other_contexts_are_shared_except_for_the_tokens_that_each_keeps() -> None:
    shares, engine = KvShares(None), Engine()
    kept = KEPT_TOKENS * 1_000_000
    heavy = worker(11)
    heavy.kv.bytes_per_token = 1_000_000
    join(shares, user("a", 4 * KEPT_TOKENS), {HERE: heavy}, NO_RESERVE)
    shares.attach("a", cast("Any", engine))
    assert join(shares, "b", {HERE: worker(11)}, NO_RESERVE)[FIRST].limit_bytes == 10 * GIB - kept
    assert engine.limits == [kept]
    heavier = worker(11)
    heavier.kv.bytes_per_token = 100_000_000
    with pytest.raises(PlanError, match="model c does not fit beside model a and model b on here") as caught:
        join(shares, "c", {HERE: heavier}, NO_RESERVE)
    assert not isinstance(caught.value, ContextKept), "an idle instance may be evicted for it"


def test_error_of_a_single_instance_on_a_node_names_no_other() -> None:
    shares = KvShares(None)
    join(shares, "a", {("there", FIRST): worker(21)}, NO_RESERVE)
    with pytest.raises(ConfigError, match="tokens fit"):
        join(shares, user("b", 100 * MILLION, insisted=True), {HERE: worker(21)}, NO_RESERVE)


def test_no_refusal_from_outdated_reports_after_an_instance_has_left() -> None:
    shares = KvShares(None)
    join(shares, user("a", 4 * MILLION, insisted=True), {HERE: worker(11)}, NO_RESERVE)
    join(shares, user("b", 1000, insisted=True), {HERE: worker(11)}, NO_RESERVE)
    shares.leave("b")
    shares.expect(user("c"), {"here": Reservation(3 * GIB, 1)})


def user_of(model: str, *, insisted: bool = False) -> KvUser:
    return KvUser(f"{model}-1f", model, 32768, insisted=insisted)


def test_an_explicit_context_is_kept_whole_and_another_up_to_the_planned_tokens() -> None:
    assert user_of("a", insisted=True).kept_of(32768) == 32768
    assert user_of("a").kept_of(32768) == KEPT_TOKENS
    assert user_of("a").kept_of(700) == 700


def test_a_refusal_names_the_models_that_keep_memory_and_the_remedies() -> None:
    keepers = [KvKeeper(user_of("a"), 8192, 2_000_000_000), KvKeeper(user_of("b"), 700, 30_000_000)]
    assert str(no_room(user_of("c"), "mini", "its weights take", 5_000_000_000, 12_345, keepers)) == (
        "c does not fit beside a and b on mini: its weights take 5.00 GB, and 0.0 MB are left there, for a keeps 2.00 GB "
        "for one request of 8192 tokens, and b keeps 30.0 MB for one request of 700 tokens. Unload a and b, or start the "
        "server with a --max-model-len below 8192."
    )


def test_for_another_replica_of_the_model_fewer_replicas_are_advised() -> None:
    same = user_of("a", insisted=True)
    error = no_room(same, "mini", "its weights take", 10**9, 0, [KvKeeper(same, 32768, 10**9)])
    assert str(error).startswith("Another replica of a does not fit on mini: its weights take 1.00 GB")
    assert "Ask for fewer --replicas, or start" in str(error)
    assert isinstance(error, ContextKept)
