"""Distribution of parts among the nodes of a fetch."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_ring.agent.weights.shares import RUN_BYTES, Board, PiecePart, join_ranges, rest_of
from mlx_ring.models.weights_manifest import WeightsManifest

MB = 1 << 20
EMPTY = WeightsManifest({}, ())


def parts(*sizes: int, file: str = "a") -> list[PiecePart]:
    """Return consecutive parts, each a piece."""
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    return [
        PiecePart(number, 0, file, start, start + size)
        for number, (start, size) in enumerate(zip(starts, sizes, strict=True))
    ]


def test_a_run_has_one_file_and_is_no_larger_than_a_request_may_be() -> None:
    wanted = [*parts(*[MB] * 40), *(part for part in parts(MB, file="b"))]
    board = Board(EMPTY, wanted, {"mini": frozenset(range(40))})
    first, second, third = (board.take("mini") for _ in range(3))
    assert [sum(part.nbytes for part in run) for run in (first, second, third)] == [RUN_BYTES, 8 * MB, MB]
    assert third[0].file == "b"
    assert board.take("mini") == []


def test_a_part_larger_than_a_request_is_a_run_of_its_own() -> None:
    board = Board(EMPTY, parts(2 * RUN_BYTES, 1), {"mini": frozenset({0, 1})})
    assert [part.piece for part in board.take("mini")] == [0]


def test_a_peer_gets_only_what_it_has() -> None:
    board = Board(EMPTY, parts(5, 5, 5), {"mini": frozenset({1}), "max": frozenset({0, 1, 2})})
    assert [part.piece for part in board.take("mini")] == [1]
    assert not board.can_take("mini")
    assert board.may_take_later("mini")
    assert [part.piece for part in board.take("max")] == [0, 2]


def test_a_piece_that_must_come_from_one_peer_is_a_run_of_its_own() -> None:
    alone = PiecePart(1, -1, "a", 5, 10, alone=True)
    board = Board(EMPTY, [parts(5)[0], alone, PiecePart(2, 0, "a", 10, 15)], {"mini": frozenset({0, 1, 2})})
    assert [[part.piece for part in board.take("mini")] for _ in range(3)] == [[0], [1], [2]]


class Counted(frozenset[int]):
    """Pieces of a peer that count how often they are looked up."""

    lookups = 0

    def __contains__(self, piece: object) -> bool:
        type(self).lookups += 1
        return super().__contains__(piece)


@pytest.mark.parametrize("pieces", [range(4000), range(3000, 4000), range(0)])
def test_the_work_of_a_fetch_grows_with_its_parts_and_not_with_their_square(
    monkeypatch: pytest.MonkeyPatch, pieces: range
) -> None:
    monkeypatch.setattr(Counted, "lookups", 0)
    board = Board(
        EMPTY, parts(*[RUN_BYTES // 4] * 4000), {"mini": Counted(pieces), "max": Counted(range(4000))}
    )
    for number in range(2 * 4000):
        peer = ("mini", "max")[number % 2]
        can_take = board.can_take(peer)
        run = board.take(peer)
        assert can_take == bool(run)
        unfinished = run[-1:] if number % 100 == 1 else []
        for _ in run[len(unfinished) :]:
            board.finish()
        board.return_unfinished(unfinished)
        if not board.waiting:
            break
    assert not board.waiting
    assert Counted.lookups < 20 * 4000


def test_adjacent_parts_are_one_range() -> None:
    assert list(join_ranges([*parts(3, 4), PiecePart(9, 0, "a", 20, 30)])) == [(0, 7), (20, 30)]
    assert list(join_ranges([])) == []


def test_the_rest_of_a_run_starts_where_it_was_interrupted() -> None:
    assert [(part.start, part.end) for part in rest_of(parts(4, 4, 4), 6)] == [(6, 8), (8, 12)]
    alone = PiecePart(0, -1, "a", 0, 4, alone=True)
    assert rest_of([alone], 3) == [alone]


@given(st.lists(st.integers(1, 50), max_size=30), st.randoms(use_true_random=False))
def test_every_byte_is_handed_out_once_whatever_is_interrupted(
    sizes: list[int], chance: random.Random
) -> None:
    peers = {name: frozenset(range(len(sizes))) for name in ("one", "two")}
    board = Board(EMPTY, parts(*sizes), peers)
    got: list[int] = []
    while run := board.take(chance.choice(["one", "two"])):
        reached = chance.randint(0, sum(part.nbytes for part in run))
        spans = [byte for start, end in join_ranges(run) for byte in range(start, end)]
        got += spans[:reached]
        rest = rest_of(run, reached)
        for _ in range(len(run) - len(rest)):
            board.finish()
        board.return_unfinished(rest)
        assert board.in_progress == 0
    assert sorted(got) == list(range(sum(sizes)))
