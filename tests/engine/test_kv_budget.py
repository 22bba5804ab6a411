"""KV budget of the ranks, and the limits from which it is made."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_ring.core.engine_stats import BLOCK
from mlx_ring.core.errors import ConfigError
from mlx_ring.core.types import RankId
from mlx_ring.engine.kv_budget import Allowance, KvBudget, NodeRank, RankKv, fitting_context, share_out
from mlx_ring.engine.kv_budget import rank_limits as shared_limits
from mlx_ring.engine.kv_manager import KvManager
from mlx_ring.rpc.protos import worker_pb2

GIB = 1 << 30
FIRST, SECOND = RankId(0, 0), RankId(1, 0)


def budget(blocks: int, *, bytes_per_sequence: int = 0) -> KvBudget:
    """Return the budget of two ranks; the second has twice the memory and needs twice as much."""
    return KvBudget(
        {
            FIRST: RankKv(blocks * BLOCK * 4 + 2 * bytes_per_sequence, 4, bytes_per_sequence),
            SECOND: RankKv(blocks * BLOCK * 8 + 2 * bytes_per_sequence, 8, bytes_per_sequence),
        }
    )


def test_kv_is_charged_in_whole_blocks() -> None:
    kv = budget(3)
    kv.charge(1, BLOCK + 1)
    assert {use.used_bytes for use in kv.use().values()} == {2 * BLOCK * 4, 2 * BLOCK * 8}
    assert kv.fits(BLOCK, 2)
    assert not kv.fits(BLOCK + 1, 2)
    assert kv.fits(3 * BLOCK, 1)
    assert not kv.fits(3 * BLOCK + 1, 1)


def test_ranks_of_a_stage_reach_their_limits_with_the_same_tokens() -> None:
    kv = KvBudget(
        {
            RankId(0, 0): RankKv(1000, 30),
            RankId(0, 1): RankKv(340, 10),
            RankId(1, 0): RankKv(999, 7),
            RankId(2, 0): RankKv(500, 0, 12),
            RankId(2, 1): RankKv(101, 0, 4),
        }
    )
    assert [*kv.even_limits.values()] == [1000, 333, 999, 303, 101]


def test_held_memory_needs_no_search_unless_a_rank_is_over_its_limit() -> None:
    kv = budget(3)
    kv.charge(1, BLOCK + 1)
    assert kv.holds(2 * BLOCK, 1)
    assert not kv.holds(2 * BLOCK + 1, 1)
    assert not kv.holds(1, 2)
    kv.charge(2, 2 * BLOCK)
    assert not kv.holds(2 * BLOCK, 1)


def test_released_kv_is_free_once_its_step_is_answered() -> None:
    kv = budget(2)
    kv.charge(1, 2 * BLOCK)
    kv.release(1, step=7)
    assert not kv.fits(1, 2)
    assert kv.fits(1, 2, freed=True)
    kv.settle(6)
    assert kv.being_freed == 1
    kv.settle(7)
    assert kv.fits(2 * BLOCK, 2)
    assert all(use.used_bytes == 0 for use in kv.use().values())


def test_a_sequence_fits_in_place_of_another() -> None:
    kv = budget(2)
    kv.charge(1, 2 * BLOCK)
    assert not kv.fits(2 * BLOCK, 2)
    assert kv.fits(2 * BLOCK, 2, without=[1])


def test_bytes_per_sequence_are_charged_too() -> None:
    kv = budget(4, bytes_per_sequence=BLOCK)
    assert kv.capacity_tokens == 4 * BLOCK
    kv.charge(1, 1)
    kv.charge(2, 1)
    assert kv.fits(BLOCK, 3)
    assert not kv.fits(2 * BLOCK, 3), "four blocks would fit, but not with three windows"


def test_a_sequence_that_fits_the_budget_may_not_fit_the_reported_kv() -> None:
    kv = budget(4)
    assert kv.fits_as_held(BLOCK)
    kv.report(FIRST, 4 * BLOCK * 4)
    assert kv.fits(BLOCK, 1)
    assert not kv.fits_as_held(BLOCK)


def test_without_a_limit_everything_fits() -> None:
    kv = KvBudget(None)
    assert kv.capacity_tokens is None
    assert kv.fits(1 << 40, 1)
    assert kv.fits_as_held(1 << 40)


def status(memory: int, left: int, per_token: int = 1000) -> worker_pb2.WorkerStatus:
    return worker_pb2.WorkerStatus(
        memory_bytes=memory,
        memory_left_bytes=left,
        kv=worker_pb2.KvTraits(bytes_per_token=per_token, bytes_per_sequence=7, slack=3, exact_length=9),
    )


def rank_limits(
    workers: Mapping[NodeRank, worker_pb2.WorkerStatus], given_bytes: int | None
) -> dict[RankId, RankKv]:
    """Return the limits of a single instance."""
    return shared_limits({"one": workers}, given_bytes, {})["one"]


def test_workers_on_a_device_share_its_free_memory_less_a_reserve() -> None:
    same = rank_limits(
        {("here", FIRST): status(64 * GIB, 20 * GIB), ("here", SECOND): status(64 * GIB, 20 * GIB)}, None
    )
    assert [kv.limit_bytes for kv in same.values()] == [(20 * GIB - int(6.4 * GIB)) // 2] * 2
    apart = rank_limits(
        {("here", FIRST): status(8 * GIB, 5 * GIB), ("there", SECOND): status(8 * GIB, 3 * GIB)}, None
    )
    assert [kv.limit_bytes for kv in apart.values()] == [4 * GIB, 2 * GIB], "a reserve is 1 GiB at least"


def test_a_device_without_free_memory_has_a_kv_limit_of_zero() -> None:
    limits = rank_limits({("here", FIRST): status(8 * GIB, GIB // 2)}, None)
    assert limits[FIRST].limit_bytes == 0
    with pytest.raises(ConfigError, match=r"even 256 tokens need .*Raise --kv-cache-memory"):
        fitting_context(limits, 4096, insisted=False)


def test_a_given_limit_applies_to_each_worker_and_kv_traits_are_kept() -> None:
    limits = rank_limits(
        {("here", FIRST): status(8 * GIB, GIB), ("here", SECOND): status(8 * GIB, GIB)}, 5000
    )
    assert limits == dict.fromkeys((FIRST, SECOND), RankKv(5000, 1000, 7, slack=3, exact_length=9))


@given(st.integers(0, 10**7), st.integers(1, 3000), st.integers(0, 10**5), st.integers(1, 10**5))
def test_the_fitting_context_is_the_longest_that_fits(
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


def test_a_required_context_that_does_not_fit_is_refused_with_stage_and_limit() -> None:
    limits = {FIRST: RankKv(10**9, 1000), SECOND: RankKv(1_000_000, 1000)}
    with pytest.raises(ConfigError) as caught:
        fitting_context(limits, 4096, insisted=True)
    assert str(caught.value).startswith("The KV cache of stage 1 may take 1 MB")
    assert "768 tokens fit" in str(caught.value)
    assert "--max-model-len" in str(caught.value)
    assert fitting_context(limits, 4096, insisted=False) == 768
    assert fitting_context(limits, 700, insisted=True) == 700


def test_a_model_whose_kv_does_not_grow_has_no_context_limit() -> None:
    assert fitting_context({FIRST: RankKv(1000, 0, 50)}, 4096, insisted=True) == 4096


def test_workers_on_one_gpu_deduct_each_others_memory() -> None:
    def on_gpu(used: int) -> worker_pb2.WorkerStatus:
        reported = status(100 * GIB, 100 * GIB - used)
        reported.device, reported.device_memory_bytes = "gpu", used
        return reported

    limits = rank_limits({("here", FIRST): on_gpu(40 * GIB), ("here", SECOND): on_gpu(30 * GIB)}, None)
    assert [kv.limit_bytes for kv in limits.values()] == [10 * GIB] * 2


def test_kv_that_does_not_grow_must_fit_as_a_whole() -> None:
    state = RankKv(limit_bytes=100, bytes_per_token=0, bytes_per_sequence=200)
    assert KvBudget({FIRST: state}).capacity_tokens == 0
    with pytest.raises(ConfigError, match=r"even 256 tokens need .*Raise --kv-cache-memory"):
        fitting_context({FIRST: state}, 4096, insisted=False)


def test_a_new_instance_gets_an_equal_share_of_used_and_free_kv_memory() -> None:
    first, second = status(64 * GIB, 40 * GIB), status(64 * GIB, 20 * GIB)
    first.kv_bytes = 6 * GIB
    limits = shared_limits(
        {"a": {("here", FIRST): first}, "b": {("here", FIRST): second}}, None, {"here": Allowance(0.25)}
    )
    each = (20 * GIB + 6 * GIB - 16 * GIB) // 2
    assert limits["a"][FIRST].limit_bytes == limits["b"][FIRST].limit_bytes == each


@given(st.integers(0, 10**6), st.lists(st.integers(0, 10**5), min_size=1, max_size=8))
def test_shares_are_at_least_their_floors_and_otherwise_equal(room: int, floors: list[int]) -> None:
    shares = share_out(room, floors)
    assert all(share >= floor for share, floor in zip(shares, floors, strict=True))
    above = [share for share, floor in zip(shares, floors, strict=True) if share > floor]
    assert len(set(above)) <= 1, "shares above their floors are equal"
    assert all(share >= max(above, default=0) for share in shares)
    if sum(floors) <= room:
        assert room - len(floors) < sum(shares) <= room


def test_memory_that_one_sequence_takes_from_pending_frees_is_free_for_no_other() -> None:
    taken = budget(10)
    taken.charge(1, 4 * BLOCK)
    taken.charge(2, 5 * BLOCK)
    taken.release(1, 7)
    assert not taken.fits(3 * BLOCK, 3)
    taken.charge_freed(3, 3 * BLOCK)
    assert not taken.fits(BLOCK, 4)
    assert taken.fits(2 * BLOCK, 4, freed=True)
    assert not taken.fits(3 * BLOCK, 4, freed=True)
    assert taken.being_freed == 1
    taken.settle(7)
    assert taken.being_freed == 0
    assert taken.fits(2 * BLOCK, 4)
    assert not taken.fits(3 * BLOCK, 4)


def test_memory_of_an_entry_that_is_dropped_unopened_is_free_only_when_its_step_is_answered() -> None:
    kv = budget(10)
    kv.charge(1, 6 * BLOCK)
    kv.charge(2, 4 * BLOCK)
    kv.release(1, 5)
    kv.release(2, 6)
    kv.charge_freed(3, 8 * BLOCK)
    kv.drop(3)
    assert not kv.fits(1, 4)
    assert kv.fits(10 * BLOCK, 4, freed=True)
    kv.settle(5)
    assert kv.fits(6 * BLOCK, 4)
    assert not kv.fits(7 * BLOCK, 4)
    kv.settle(6)
    assert kv.fits(10 * BLOCK, 4)


def test_an_entry_whose_memory_another_sequence_took_over_frees_nothing() -> None:
    kv = budget(10)
    kv.charge(1, 10 * BLOCK)
    kv.release(1, 5)
    kv.charge_freed(2, 4 * BLOCK)
    kv.charge_freed(3, 4 * BLOCK)
    kv.hand_over(2)
    kv.settle(5)
    assert kv.fits(6 * BLOCK, 4)
    assert not kv.fits(7 * BLOCK, 4)


def test_an_entry_leaves_the_memory_that_a_running_sequence_awaits() -> None:
    manager = KvManager({FIRST: RankKv(10 * BLOCK, 1)}, prefix_cache=True)
    kv = manager.budget
    kv.charge(1, 4 * BLOCK)
    kv.charge(2, 6 * BLOCK)
    kv.release(1, 5)
    assert kv.awaits(7 * BLOCK, 2)
    assert manager.begin_entry(tuple(range(4 * BLOCK))) is None
    assert manager.begin_entry(tuple(range(3 * BLOCK))) is not None
    kv.settle(5)
    assert kv.fits(7 * BLOCK, 2)
