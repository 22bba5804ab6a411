"""Each rank's budget, from what was asked for and what its device has."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_ring.core.engine_stats import BLOCK
from mlx_ring.core.errors import ConfigError
from mlx_ring.core.types import RankId
from mlx_ring.engine.kv_budget import Allowance, KvBudget, Place, RankKv, fitting_context, share_out
from mlx_ring.engine.kv_budget import rank_limits as shared_limits
from mlx_ring.rpc.protos import worker_pb2

GIB = 1 << 30
FIRST, SECOND = RankId(0, 0), RankId(1, 0)


def status(memory: int, left: int, per_token: int = 1000) -> worker_pb2.WorkerStatus:
    return worker_pb2.WorkerStatus(
        memory_bytes=memory,
        memory_left_bytes=left,
        kv=worker_pb2.KvTraits(bytes_per_token=per_token, bytes_per_sequence=7, slack=3, exact_length=9),
    )


def rank_limits(
    workers: Mapping[Place, worker_pb2.WorkerStatus], given_bytes: int | None
) -> dict[RankId, RankKv]:
    """Of an instance that is alone."""
    return shared_limits({"one": workers}, given_bytes, {})["one"]


def test_what_a_device_has_left_less_a_reserve_is_shared_by_the_workers_on_it() -> None:
    same = rank_limits(
        {("here", FIRST): status(64 * GIB, 20 * GIB), ("here", SECOND): status(64 * GIB, 20 * GIB)}, None
    )
    assert [kv.limit_bytes for kv in same.values()] == [(20 * GIB - int(6.4 * GIB)) // 2] * 2
    apart = rank_limits(
        {("here", FIRST): status(8 * GIB, 5 * GIB), ("there", SECOND): status(8 * GIB, 3 * GIB)}, None
    )
    assert [kv.limit_bytes for kv in apart.values()] == [4 * GIB, 2 * GIB], "a reserve is 1 GiB at least"


def test_a_device_without_memory_to_spare_leaves_nothing() -> None:
    limits = rank_limits({("here", FIRST): status(8 * GIB, GIB // 2)}, None)
    assert limits[FIRST].limit_bytes == 0
    with pytest.raises(ConfigError, match="0 tokens fit"):
        fitting_context(limits, 4096, insisted=False)


def test_what_was_asked_for_counts_for_each_worker_and_traits_go_along() -> None:
    limits = rank_limits(
        {("here", FIRST): status(8 * GIB, GIB), ("here", SECOND): status(8 * GIB, GIB)}, 5000
    )
    assert limits == dict.fromkeys((FIRST, SECOND), RankKv(5000, 1000, 7, slack=3, exact_length=9))


@given(st.integers(0, 10**7), st.integers(1, 3000), st.integers(0, 10**5), st.integers(1, 10**5))
def test_a_sequence_of_the_fitting_context_fits_and_one_block_more_would_not(
    limit: int, per_token: int, per_sequence: int, wanted: int
) -> None:
    limits = {FIRST: RankKv(limit, per_token, per_sequence), SECOND: RankKv(10 * limit + 1, per_token)}
    try:
        context = fitting_context(limits, wanted, insisted=False)
    except ConfigError:
        assert not KvBudget(limits).fits(min(wanted, BLOCK), 1)
        return
    assert KvBudget(limits).fits(context, 1)
    assert context == wanted or (context % BLOCK == 0 and not KvBudget(limits).fits(context + 1, 1))


def test_who_insists_on_a_context_reads_how_much_fits_and_where_it_does_not() -> None:
    limits = {FIRST: RankKv(10**9, 1000), SECOND: RankKv(1_000_000, 1000)}
    with pytest.raises(ConfigError) as caught:
        fitting_context(limits, 4096, insisted=True)
    assert str(caught.value).startswith("The KV cache of stage 1 may take 1 MB")
    assert "768 tokens fit" in str(caught.value)
    assert "--max-model-len" in str(caught.value)
    assert fitting_context(limits, 4096, insisted=False) == 768
    assert fitting_context(limits, 700, insisted=True) == 700


def test_a_model_without_growing_kv_has_no_limit_on_its_context() -> None:
    assert fitting_context({FIRST: RankKv(1000, 0, 50)}, 4096, insisted=True) == 4096


def test_workers_on_one_gpu_do_not_take_each_others_weights_for_free_memory() -> None:
    def on_gpu(held: int) -> worker_pb2.WorkerStatus:
        told = status(100 * GIB, 100 * GIB - held)
        told.device, told.device_memory_bytes = "gpu", held
        return told

    limits = rank_limits({("here", FIRST): on_gpu(40 * GIB), ("here", SECOND): on_gpu(30 * GIB)}, None)
    assert [kv.limit_bytes for kv in limits.values()] == [10 * GIB] * 2


def test_kv_that_does_not_grow_must_fit_as_a_whole() -> None:
    state = RankKv(limit_bytes=100, bytes_per_token=0, bytes_per_sequence=200)
    assert KvBudget({FIRST: state}).capacity_tokens == 0
    with pytest.raises(ConfigError, match="0 tokens fit"):
        fitting_context({FIRST: state}, 4096, insisted=False)


def test_an_instance_that_comes_takes_its_part_of_what_others_hold_and_have_left() -> None:
    first, second = status(64 * GIB, 40 * GIB), status(64 * GIB, 20 * GIB)
    first.kv_bytes = 6 * GIB
    limits = shared_limits(
        {"a": {("here", FIRST): first}, "b": {("here", FIRST): second}}, None, {"here": Allowance(0.25)}
    )
    each = (20 * GIB + 6 * GIB - 16 * GIB) // 2
    assert limits["a"][FIRST].limit_bytes == limits["b"][FIRST].limit_bytes == each


@given(st.integers(0, 10**6), st.lists(st.integers(0, 10**5), min_size=1, max_size=8))
def test_shares_are_floors_at_least_and_as_equal_as_these_allow(room: int, floors: list[int]) -> None:
    shares = share_out(room, floors)
    assert all(share >= floor for share, floor in zip(shares, floors, strict=True))
    above = [share for share, floor in zip(shares, floors, strict=True) if share > floor]
    assert len(set(above)) <= 1, "whoever has more than it keeps has as much as the others"
    assert all(share >= max(above, default=0) for share in shares)
    if sum(floors) <= room:
        assert room - len(floors) < sum(shares) <= room
