"""What fits, and when what was released counts as free."""

from __future__ import annotations

from mlx_ring.core.engine_stats import BLOCK
from mlx_ring.core.types import RankId
from mlx_ring.engine.kv_budget import KvBudget, RankKv

FIRST, SECOND = RankId(0, 0), RankId(1, 0)


def budget(blocks: int, *, bytes_per_sequence: int = 0) -> KvBudget:
    """Of two ranks, the second of which has twice the memory and needs twice as much."""
    return KvBudget(
        {
            FIRST: RankKv(blocks * BLOCK * 4 + 2 * bytes_per_sequence, 4, bytes_per_sequence),
            SECOND: RankKv(blocks * BLOCK * 8 + 2 * bytes_per_sequence, 8, bytes_per_sequence),
        }
    )


def test_tokens_count_by_whole_blocks() -> None:
    kv = budget(3)
    kv.charge(1, BLOCK + 1)
    assert {use.used_bytes for use in kv.use().values()} == {2 * BLOCK * 4, 2 * BLOCK * 8}
    assert kv.fits(BLOCK, 2)
    assert not kv.fits(BLOCK + 1, 2)
    assert kv.fits(3 * BLOCK, 1)
    assert not kv.fits(3 * BLOCK + 1, 1)


def test_what_is_released_is_free_once_its_step_is_answered() -> None:
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


def test_a_sequence_can_take_anothers_place() -> None:
    kv = budget(2)
    kv.charge(1, 2 * BLOCK)
    assert not kv.fits(2 * BLOCK, 2)
    assert kv.fits(2 * BLOCK, 2, without=[1])


def test_a_sequences_own_bytes_count_too() -> None:
    kv = budget(4, bytes_per_sequence=BLOCK)
    assert kv.capacity_tokens == 4 * BLOCK
    kv.charge(1, 1)
    kv.charge(2, 1)
    assert kv.fits(BLOCK, 3)
    assert not kv.fits(2 * BLOCK, 3), "four blocks would fit, but not with three windows"


def test_what_a_rank_really_holds_can_refuse_what_the_account_allows() -> None:
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
