"""Choice of the connection that closes when there are too many."""

from __future__ import annotations

from dataclasses import dataclass

from mlx_ring.head.uvicorn_connection import choose_to_shed


@dataclass(eq=False)
class Each:
    peer: str
    since_s: float = 0.0
    quiet_since_s: float | None = None
    has_answered: bool = False


def test_the_longest_idle_connection_of_the_address_with_most_is_shed_first() -> None:
    others = [
        Each("a", quiet_since_s=1.0),
        Each("b", quiet_since_s=3.0),
        Each("b", quiet_since_s=2.0),
        Each("c"),
    ]
    assert choose_to_shed(Each("c"), others) is others[2]
    assert choose_to_shed(Each("c"), [others[0], *others[3:]]) is others[0]


def test_of_busy_connections_the_newest_without_an_answer_is_shed() -> None:
    others = [Each("a", 1.0), Each("b", 2.0), Each("b", 3.0), Each("b", 4.0, has_answered=True)]
    assert choose_to_shed(Each("a"), others) is others[2]


def test_no_connection_is_shed_for_a_client_with_as_many() -> None:
    others = [Each("a"), Each("a"), Each("b"), Each("b")]
    assert choose_to_shed(Each("a"), others) is None
    assert choose_to_shed(Each("b"), others) is None
    assert choose_to_shed(Each("c"), others) is others[0]
    assert choose_to_shed(Each("a"), []) is None
