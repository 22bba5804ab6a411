"""Who may hold how much KV when instances come and go."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import pytest

from mlx_ring.core.errors import ConfigError, ContextKept, PlanError
from mlx_ring.core.types import RankId
from mlx_ring.engine.kv_budget import KEPT_TOKENS, Allowance, Place, RankKv
from mlx_ring.head.kv_memory import KvShares, KvUser, Reservation
from mlx_ring.rpc.protos import agent_pb2, hello_pb2, worker_pb2

GIB = 1 << 30
FIRST = RankId(0, 0)
HERE: Place = ("here", FIRST)
NO_RESERVE = {"here": Allowance(0.0), "there": Allowance(0.0)}
"""One GiB is kept free whatever the share is."""


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
    who: str | KvUser,
    workers: dict[Place, worker_pb2.WorkerStatus],
    allowances: dict[str, Allowance],
) -> Mapping[RankId, RankKv]:
    return shares.join(user(who) if isinstance(who, str) else who, workers, allowances)[0]


def test_one_alone_has_all_and_two_share() -> None:
    shares = KvShares(None)
    first = join(shares, "a", {HERE: worker(21)}, NO_RESERVE)
    second = join(shares, "b", {HERE: worker(11)}, NO_RESERVE)
    assert (first[FIRST].limit_bytes, second[FIRST].limit_bytes) == (20 * GIB, 5 * GIB)


def test_instances_on_other_nodes_are_no_matter() -> None:
    shares = KvShares(None)
    join(shares, "a", {HERE: worker(21)}, NO_RESERVE)
    assert join(shares, "b", {("there", FIRST): worker(11)}, NO_RESERVE)[FIRST].limit_bytes == 10 * GIB


def test_what_others_hold_of_kv_by_now_counts_as_theirs_to_share() -> None:
    shares = KvShares(None)
    join(shares, "a", {HERE: worker(21)}, NO_RESERVE)
    grown = worker(15)
    grown.kv_bytes = 6 * GIB
    state = agent_pb2.WorkerState(instance="a", stage=0, rank=0, status=grown)
    shares.record_workers(agent_pb2.AgentEvent(hello=hello_pb2.Hello(node="here"), workers=[state]))
    assert join(shares, "b", {HERE: worker(11)}, NO_RESERVE)[FIRST].limit_bytes == 8 * GIB


def test_what_one_that_leaves_held_is_shared_by_the_others() -> None:
    shares = KvShares(None)
    join(shares, "a", {HERE: worker(31, weights=10)}, NO_RESERVE)
    join(shares, "b", {HERE: worker(21)}, NO_RESERVE)
    shares.leave("a")
    shares.leave("never-there")
    assert join(shares, "c", {HERE: worker(31)}, NO_RESERVE)[FIRST].limit_bytes == 15 * GIB


def test_what_was_said_is_kept_whoever_comes() -> None:
    shares = KvShares(5 * GIB)
    assert join(shares, "a", {HERE: worker(21)}, NO_RESERVE)[FIRST].limit_bytes == 5 * GIB
    assert join(shares, "b", {HERE: worker(1)}, NO_RESERVE)[FIRST].limit_bytes == 5 * GIB


def test_weights_that_are_about_to_come_make_others_give_up_theirs_at_once() -> None:
    shares = KvShares(None)
    join(shares, "a", {HERE: worker(21)}, NO_RESERVE)
    shares.expect(user("b"), {"here": Reservation(6 * GIB, 1)})
    assert join(shares, "c", {HERE: worker(21)}, NO_RESERVE)[FIRST].limit_bytes == 14 * GIB // 3
    shares.leave("b")
    assert join(shares, "d", {HERE: worker(21)}, NO_RESERVE)[FIRST].limit_bytes == 20 * GIB // 3


def test_no_more_is_held_than_the_owner_grants() -> None:
    shares = KvShares(None)
    granted = {"here": Allowance(0.5, limit_bytes=16 * GIB)}
    assert join(shares, "a", {HERE: worker(60, weights=3)}, granted)[FIRST].limit_bytes == 5 * GIB


class Engine:
    """Notes its limits."""

    error = None

    def __init__(self) -> None:
        self.limits: list[int] = []

    def limit_kv(self, limits: dict[RankId, int]) -> None:
        self.limits.append(limits[FIRST])


def test_memory_of_one_that_left_is_given_out_when_the_others_have_looked_again(
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
    assert engine.limits == [5 * GIB], "what it says now may have been measured before"
    now[0] += 3.0
    shares.record_workers(event)
    shares.record_workers(event)
    assert engine.limits == [5 * GIB, 20 * GIB]


MILLION = 2_147_328
"""Tokens, by whole blocks, whose KV is a little less than 2 GiB."""


def test_a_context_that_was_insisted_on_is_kept_and_the_newcomer_has_the_rest() -> None:
    shares, engine = KvShares(None), Engine()
    join(shares, user("a", 4 * MILLION, insisted=True), {HERE: worker(11)}, NO_RESERVE)
    shares.attach("a", cast("Any", engine))
    rest = join(shares, user("b"), {HERE: worker(11)}, NO_RESERVE)[FIRST].limit_bytes
    assert engine.limits == [4 * MILLION * 1000]
    assert rest == 10 * GIB - 4 * MILLION * 1000


def test_a_newcomer_whose_insisted_context_does_not_fit_beside_is_refused_and_nobody_gives_anything_up() -> (
    None
):
    shares, engine = KvShares(None), Engine()
    join(shares, user("a", 4 * MILLION, insisted=True), {HERE: worker(11)}, NO_RESERVE)
    shares.attach("a", cast("Any", engine))
    with pytest.raises(ContextKept) as caught:
        join(shares, user("b", 2 * MILLION, insisted=True), {HERE: worker(11)}, NO_RESERVE)
    assert engine.limits == []
    assert str(caught.value) == (
        f"model b does not fit beside model a on here: the KV of one request of {2 * MILLION} tokens takes 4.29 GB, and "
        f"2.15 GB are left there, for model a keeps 8.59 GB for one request of {4 * MILLION} tokens. Unload model a, or "
        f"start the server with a --max-model-len below {4 * MILLION}, or with --model-memory, by which models take turns."
    )
    shares.leave("b")
    assert join(shares, user("c", 1000, insisted=True), {HERE: worker(11)}, NO_RESERVE)


def test_weights_that_leave_too_little_for_a_kept_context_are_refused_before_they_are_loaded() -> None:
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


def test_what_nobody_insisted_on_is_shared_but_for_the_tokens_that_each_keeps() -> None:
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
    assert not isinstance(caught.value, ContextKept), "one that answers nobody may make way for it"


def test_one_that_is_alone_and_has_too_little_is_told_so_and_of_nobody_else() -> None:
    shares = KvShares(None)
    join(shares, "a", {("there", FIRST): worker(21)}, NO_RESERVE)
    with pytest.raises(ConfigError, match="tokens fit"):
        join(shares, user("b", 100 * MILLION, insisted=True), {HERE: worker(21)}, NO_RESERVE)


def test_right_after_one_has_left_nobody_is_refused_by_what_was_told_before() -> None:
    shares = KvShares(None)
    join(shares, user("a", 4 * MILLION, insisted=True), {HERE: worker(11)}, NO_RESERVE)
    join(shares, user("b", 1000, insisted=True), {HERE: worker(11)}, NO_RESERVE)
    shares.leave("b")
    shares.expect(user("c"), {"here": Reservation(3 * GIB, 1)})
