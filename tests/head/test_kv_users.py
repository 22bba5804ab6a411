"""What is said of a newcomer for which there is no room."""

from __future__ import annotations

from mlx_ring.core.errors import ContextKept
from mlx_ring.engine.kv_budget import KEPT_TOKENS
from mlx_ring.head.kv_memory import KvKeeper, KvUser, no_room


def user(model: str, *, insisted: bool = False) -> KvUser:
    return KvUser(f"{model}-1f", model, 32768, insisted=insisted)


def test_a_context_that_was_insisted_on_is_kept_whole_and_another_as_far_as_plans_count_on_it() -> None:
    assert user("a", insisted=True).kept_of(32768) == 32768
    assert user("a").kept_of(32768) == KEPT_TOKENS
    assert user("a").kept_of(700) == 700


def test_a_refusal_names_all_who_keep_memory_and_what_to_do() -> None:
    keepers = [KvKeeper(user("a"), 8192, 2_000_000_000), KvKeeper(user("b"), 700, 30_000_000)]
    assert str(no_room(user("c"), "mini", "its weights take", 5_000_000_000, 12_345, keepers)) == (
        "c does not fit beside a and b on mini: its weights take 5.00 GB, and 0.0 MB are left there, for a keeps 2.00 GB "
        "for one request of 8192 tokens, and b keeps 30.0 MB for one request of 700 tokens. Unload a and b, or start the "
        "server with a --max-model-len below 8192."
    )


def test_of_a_model_that_is_in_its_own_way_fewer_replicas_are_advised() -> None:
    same = user("a", insisted=True)
    error = no_room(same, "mini", "its weights take", 10**9, 0, [KvKeeper(same, 32768, 10**9)])
    assert str(error).startswith("Another replica of a does not fit on mini: its weights take 1.00 GB")
    assert "Ask for fewer --replicas, or start" in str(error)
    assert isinstance(error, ContextKept)
