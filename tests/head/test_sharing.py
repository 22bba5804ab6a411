from __future__ import annotations

from dataclasses import dataclass

from mlx_ring.head.http_connections import who_makes_room


@dataclass(eq=False)
class Each:
    peer: str
    since_s: float = 0.0
    quiet_since_s: float | None = None
    has_answered: bool = False


def test_who_has_no_request_goes_first_and_the_longest_idle_of_whom_there_are_most() -> None:
    others = [
        Each("a", quiet_since_s=1.0),
        Each("b", quiet_since_s=3.0),
        Each("b", quiet_since_s=2.0),
        Each("c"),
    ]
    assert who_makes_room(Each("c"), others) is others[2]
    assert who_makes_room(Each("c"), [others[0], *others[3:]]) is others[0]


def test_where_all_are_busy_the_newest_of_whoever_has_most_goes_and_rather_one_that_has_no_answer_yet() -> (
    None
):
    others = [Each("a", 1.0), Each("b", 2.0), Each("b", 3.0), Each("b", 4.0, has_answered=True)]
    assert who_makes_room(Each("a"), others) is others[2]


def test_nobody_goes_for_who_would_then_have_as_many_or_more() -> None:
    others = [Each("a"), Each("a"), Each("b"), Each("b")]
    assert who_makes_room(Each("a"), others) is None
    assert who_makes_room(Each("b"), others) is None
    assert who_makes_room(Each("c"), others) is others[0]
    assert who_makes_room(Each("a"), []) is None
