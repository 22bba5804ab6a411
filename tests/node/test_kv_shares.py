"""Who may hold how much KV when instances come and go."""

from __future__ import annotations

from typing import Any, cast

import pytest

from mlx_ring.engine.executor import RankId
from mlx_ring.engine.kv_limits import Allowance, Place
from mlx_ring.node.kv_shares import KvShares
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


def test_one_alone_has_all_and_two_share() -> None:
    shares = KvShares(None)
    first = shares.join("a", {HERE: worker(21)}, NO_RESERVE)
    second = shares.join("b", {HERE: worker(11)}, NO_RESERVE)
    assert (first[FIRST].limit_bytes, second[FIRST].limit_bytes) == (20 * GIB, 5 * GIB)


def test_instances_on_other_nodes_are_no_matter() -> None:
    shares = KvShares(None)
    shares.join("a", {HERE: worker(21)}, NO_RESERVE)
    assert shares.join("b", {("there", FIRST): worker(11)}, NO_RESERVE)[FIRST].limit_bytes == 10 * GIB


def test_what_others_hold_of_kv_by_now_counts_as_theirs_to_share() -> None:
    shares = KvShares(None)
    shares.join("a", {HERE: worker(21)}, NO_RESERVE)
    grown = worker(15)
    grown.kv_bytes = 6 * GIB
    state = agent_pb2.WorkerState(instance="a", stage=0, rank=0, status=grown)
    shares.hear(agent_pb2.AgentEvent(hello=hello_pb2.Hello(node="here"), workers=[state]))
    assert shares.join("b", {HERE: worker(11)}, NO_RESERVE)[FIRST].limit_bytes == 8 * GIB


def test_what_one_that_leaves_held_is_shared_by_the_others() -> None:
    shares = KvShares(None)
    shares.join("a", {HERE: worker(31, weights=10)}, NO_RESERVE)
    shares.join("b", {HERE: worker(21)}, NO_RESERVE)
    shares.leave("a")
    shares.leave("never-there")
    assert shares.join("c", {HERE: worker(31)}, NO_RESERVE)[FIRST].limit_bytes == 15 * GIB


def test_what_was_said_is_kept_whoever_comes() -> None:
    shares = KvShares(5 * GIB)
    assert shares.join("a", {HERE: worker(21)}, NO_RESERVE)[FIRST].limit_bytes == 5 * GIB
    assert shares.join("b", {HERE: worker(1)}, NO_RESERVE)[FIRST].limit_bytes == 5 * GIB


def test_weights_that_are_about_to_come_make_others_give_up_theirs_at_once() -> None:
    shares = KvShares(None)
    shares.join("a", {HERE: worker(21)}, NO_RESERVE)
    shares.expect("b", {"here": 6 * GIB})
    assert shares.join("c", {HERE: worker(21)}, NO_RESERVE)[FIRST].limit_bytes == 7 * GIB
    shares.leave("b")
    shares.leave("c")
    assert not shares.is_alone("b")
    assert shares.is_alone("a")


def test_no_more_is_held_than_the_owner_grants() -> None:
    shares = KvShares(None)
    granted = {"here": Allowance(0.5, limit_bytes=16 * GIB)}
    assert shares.join("a", {HERE: worker(60, weights=3)}, granted)[FIRST].limit_bytes == 5 * GIB


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
    monkeypatch.setattr("mlx_ring.node.kv_shares.time.monotonic", lambda: now[0])
    shares.join("a", {HERE: worker(21)}, NO_RESERVE)
    shares.attach("a", cast("Any", engine))
    shares.join("b", {HERE: worker(11)}, NO_RESERVE)
    shares.leave("b")
    state = agent_pb2.WorkerState(instance="a", stage=0, rank=0, status=worker(21))
    event = agent_pb2.AgentEvent(hello=hello_pb2.Hello(node="here"), workers=[state])
    shares.hear(event)
    assert engine.limits == [5 * GIB], "what it says now may have been measured before"
    now[0] += 3.0
    shares.hear(event)
    shares.hear(event)
    assert engine.limits == [5 * GIB, 20 * GIB]
