"""Requests move from one engine to another while both serve, and no answer changes."""

# Predictions and objections are tested alone.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.default_settings import make_policy
from tests.engine.engines import LIMITS, answer_of, drafting_at_no_cost, hash_token, kv_of, make_request
from tests.engine.moving import CACHING, adopted, engine_of, instances_that_move_kv, move_all, rows_of
from tests.engine.successions import LOSS, Succession, check_nothing_is_left, run_to, tokens_of
from tests.engine.test_resume import SMALL_KV, Disturbed, Wanted, wanted_requests
from tests.engine.twin import TwinExecutor
from tests.examples import examples

from mlx_ring.core.engine_stats import Meter
from mlx_ring.core.errors import NotReady
from mlx_ring.core.types import KvPlace, LayerRange, RankId
from mlx_ring.engine.kv_budget import RankKv
from mlx_ring.engine.moved_kv import KvMoves
from mlx_ring.engine.scheduler import Scheduler
from mlx_ring.engine.sequence import Sequence as EngineSequence
from mlx_ring.engine.sequence import make_sequence
from mlx_ring.engine.takeover import move_requests
from mlx_ring.rpc.protos import step_pb2

pytestmark = pytest.mark.usefixtures("moves_in_small_parts")


@examples(0.6)
@given(
    wanted=st.lists(wanted_requests, min_size=1, max_size=5),
    random=st.randoms(use_true_random=False),
    before=st.sampled_from([0, 20, 100]),
    stages=st.integers(1, 3),
    drafts=st.sampled_from([0, 4]),
    kv=st.sampled_from([None, SMALL_KV]),
    cached=st.booleans(),
    moves_kv=st.booleans(),
)
def test_a_move_at_any_step_changes_no_answer(
    wanted: list[Wanted],
    random: Random,
    before: int,
    stages: int,
    drafts: int,
    kv: RankKv | None,
    *,
    cached: bool,
    moves_kv: bool,
) -> None:
    policy = make_policy(max_num_seqs=3, prefill_chunk=8, num_speculative_tokens=drafts, prefix_cache=cached)

    async def run() -> tuple[Disturbed, Succession]:
        disturbed = Disturbed(policy, kv)
        source, target = disturbed.succession, Disturbed(policy, kv).succession
        source.moves_kv = target.moves_kv = moves_kv
        source.load()
        target.load(tp_sizes=(1,) * stages)
        for request in wanted:
            disturbed.submit(request)
        for _ in range(before):
            source.proceed(random.randrange(1000))
        moving = asyncio.create_task(move_requests(engine_of(source), engine_of(target)))
        while not moving.done() or source.has_requests or target.has_requests:
            choice = random.randrange(1000)
            ran = [succession.proceed(choice) for succession in random.sample((source, target), 2)]
            await asyncio.sleep(0)
            disturbed.take()
            is_over = not (source.has_requests or target.has_requests)
            assert any(ran) or is_over or not moving.done(), "a request starves"
        await moving
        assert not engine_of(source).lives
        source.finish()
        target.finish()
        return disturbed, target

    wanted = [each for each in wanted if each.requests[0].prompt_tokens[0] == 65]
    with drafting_at_no_cost():
        disturbed, target = asyncio.run(run())
    disturbed.check()
    check_nothing_is_left(target)


def test_known_tokens_are_computed_before_the_request_moves() -> None:
    """Check that the answer continues meanwhile, and that less than a chunk is left to compute after the move."""
    request = make_request(40, max_tokens=30)

    async def run() -> tuple[list[int], list[tuple[int, int]], int, Succession]:
        source, target = Succession(policy=CACHING), Succession(policy=CACHING)
        source.load()
        target.load()
        (stream,) = source.submit(request)
        deltas = run_to(source, stream, 3)
        moved = await move_all(source, target)
        deltas += stream.take()
        at_move, rows_before = len(tokens_of(deltas)), len(rows_of(target))
        assert moved == 1
        target.finish()
        deltas += stream.take()
        rest = rows_of(target)[: rows_before + 2]
        assert (target.meter.finished, target.meter.prompt_tokens) == ({"length": 1}, 0)
        assert not source.meter.finished
        return tokens_of(deltas), rest, at_move, target

    tokens, rows, at_move, target = asyncio.run(run())
    assert tokens == answer_of(hash_token(256), request).token_ids
    assert at_move > 3
    largest = max(start + count for start, count in rows)
    assert largest >= 40 + at_move - 1
    again = [count for start, count in rows if start >= 43]
    assert sum(again) <= 16
    assert engine_of(target).stats().finished == {"length": 1}


def test_request_stays_if_the_other_instance_is_lost_meanwhile() -> None:
    request = make_request(20, max_tokens=12)

    async def run() -> list[int]:
        source, target = Succession(policy=CACHING), Succession(policy=CACHING)
        source.load()
        target.load()
        (stream,) = source.submit(request)
        deltas = run_to(source, stream, 2)
        moving = asyncio.create_task(move_requests(engine_of(source), engine_of(target)))
        await asyncio.sleep(0)
        target.lose(LOSS)
        with pytest.raises(NotReady):
            await moving
        assert not len(target.held)
        source.finish()
        return tokens_of([*deltas, *stream.take()])

    assert asyncio.run(run()) == answer_of(hash_token(256), request).token_ids


def test_request_that_does_not_fit_the_other_context_stays_until_its_end() -> None:
    async def run() -> tuple[int, int]:
        source, target = Succession(policy=CACHING), Succession(policy=CACHING)
        source.load()
        target.load(limits=LIMITS.within(30))
        source.submit(make_request(20, max_tokens=12), make_request(4, max_tokens=12))
        await move_all(source, target)
        target.finish()
        return source.meter.finished["length"], target.meter.finished["length"]

    assert asyncio.run(run()) == (1, 1)


def test_kv_moves_once_and_only_what_follows_is_computed() -> None:
    """Move two requests with a common beginning to an instance with another cut."""
    first = make_request(40, max_tokens=20)
    second = replace(first, prompt_tokens=(*first.prompt_tokens[:20], *range(20)))

    async def run() -> tuple[list[list[int]], Succession]:
        source, target = instances_that_move_kv(tp_sizes=(1, 1, 1))
        streams = source.submit(first, second)
        deltas = [run_to(source, streams[0], 3), [*streams[1].take()]]
        assert await move_all(source, target) == 2
        starts = [adopt.start for adopt in adopted(target)]
        assert starts[:2] == [0, 20]
        moved = sum(adopt.length - adopt.start for adopt in adopted(target))
        assert engine_of(target).stats().cache.moved_tokens == moved
        assert sum(target.meter.way_taken_s["move"].counts) == len(starts)
        target.finish()
        source.finish()
        return [tokens_of([*of, *stream.take()]) for of, stream in zip(deltas, streams, strict=True)], target

    tokens, target = asyncio.run(run())
    assert tokens == [answer_of(hash_token(256), each).token_ids for each in (first, second)]
    check_nothing_is_left(target)


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        ("the connection broke", "because it was not moved: the connection broke"),
        ("", "because the model has recurrent layers"),
    ],
)
def test_kv_that_cannot_move_is_computed_and_the_log_says_why(
    problem: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    request = make_request(40, max_tokens=20)
    kv = None if problem else kv_of(40, recurrent=True)

    async def run() -> tuple[list[int], Succession]:
        source, target = instances_that_move_kv(kv)
        assert target.twin is not None
        target.twin.fails_moves = problem
        (stream,) = source.submit(request)
        deltas = run_to(source, stream, 3)
        assert await move_all(source, target) == 1
        assert not engine_of(target).stats().cache.moved_tokens
        assert any(start + count >= 40 for start, count in rows_of(target))
        target.finish()
        source.finish()
        assert not target.twin.has_fetched
        return tokens_of([*deltas, *stream.take()]), target

    with caplog.at_level(logging.INFO):
        tokens, target = asyncio.run(run())
    assert tokens == answer_of(hash_token(256), request).token_ids
    assert reason in caplog.text
    check_nothing_is_left(target)


@pytest.mark.parametrize("kv", [None, kv_of(40)], ids=["at once", "in parts"])
def test_move_that_a_rank_cannot_keep_is_not_counted(
    kv: RankKv | None, caplog: pytest.LogCaptureFixture
) -> None:
    request = make_request(40, max_tokens=20)

    def fail(step: step_pb2.Step, stage: int) -> step_pb2.Failure | None:
        entries = [each.adopt.sequence for each in step.operations if each.HasField("adopt") and stage]
        return (
            step_pb2.Failure(kind="StepFailed", message="no memory", sequences=entries)
            if any(entries)
            else None
        )

    async def run() -> tuple[list[int], Succession]:
        source, target = instances_that_move_kv(kv)
        assert target.twin is not None
        target.twin.inject_fault = fail
        (stream,) = source.submit(request)
        deltas = run_to(source, stream, 3)
        assert await move_all(source, target) == 1
        assert adopted(target)
        assert not engine_of(target).stats().cache.moved_tokens
        assert not sum(target.meter.way_taken_s["move"].counts)
        assert sum(target.meter.way_taken_s["recompute"].counts)
        assert "move" not in target.meter.measured
        target.finish()
        source.finish()
        assert not target.twin.has_fetched
        return tokens_of([*deltas, *stream.take()]), target

    with caplog.at_level(logging.INFO):
        tokens, target = asyncio.run(run())
    assert tokens == answer_of(hash_token(256), request).token_ids
    assert "because it was not moved: a worker could not keep it" in caplog.text
    check_nothing_is_left(target)


# ---- predictions and objections


def moves_of(
    cut: Sequence[int],
    nodes: Sequence[str],
    *,
    kv: RankKv | None = None,
    shares: tuple[float, ...] = (1.0,),
    bytes_per_s: float = 0.0,
    clock: Callable[[], float] = lambda: 0.0,
) -> KvMoves:
    """Return the moves of an engine whose stages end at these layers; each machine reaches all others equally fast."""
    ranks = [RankId(stage, rank) for stage in range(len(cut)) for rank in range(len(shares))]
    twin = TwinExecutor([len(shares)] * len(cut), automatic=False)
    speeds = dict.fromkeys("abcd", bytes_per_s) if bytes_per_s else {}
    twin.kv_places = [
        KvPlace(
            rank,
            LayerRange(([0, *cut])[rank.stage], cut[rank.stage]),
            shares,
            nodes[rank.stage],
            lambda node, own=nodes[rank.stage]: ("unix:worker" if node == own else f"{own}:1", own),
            speeds,
        )
        for rank in ranks
    ]
    memory = dict.fromkeys(ranks, kv or RankKv(1 << 40, 0))
    meter = Meter()
    scheduler = Scheduler(ranks, instance="demo", epoch=1, policy=CACHING, kv=memory, meter=meter)
    return KvMoves(twin, scheduler, memory, meter, clock, lambda _now: None, lambda: None)


def sequence_of(tokens: int, *, reached: int = 0) -> EngineSequence:
    sequence = make_sequence(1, make_request(tokens), LIMITS.within(60), 0.0)
    sequence.scheduled, sequence.reached = tokens, reached or tokens
    return sequence


def test_time_of_a_move_is_that_of_the_busiest_machine_and_is_learnt() -> None:
    now = 0.0
    # Two ranks with 4 layers each, of 1 MB for each token and layer.
    kv = RankKv(1 << 40, 4_000_000)
    source = moves_of([4, 8], ["a", "b"], kv=kv, bytes_per_s=1e8)
    target = moves_of([2, 7, 8], ["c", "d", "b"], kv=kv, clock=lambda: now)

    def predict_s() -> float:
        return target._predict_s(source.origin, 50)

    # d reads 2 layers from a and 3 from b; b also reads one layer within the machine, which is ten times as fast.
    assert predict_s() == pytest.approx(0.02 + 50 * 5e6 / 1e8)
    for _ in range(20):
        target._measure(source.origin, 50, 0.02 + 2 * 2.5)
    assert predict_s() == pytest.approx(0.02 + 2 * 2.5, rel=1e-3)
    now = 601.0
    assert predict_s() == pytest.approx(0.02 + 2.5)
    assert moves_of([8], ["d"], kv=kv)._predict_s(target.origin, 0) == pytest.approx(0.02)


def test_time_and_pieces_of_a_move_count_sliding_layers() -> None:
    kv = RankKv(1 << 40, 1_000_000, bytes_per_sequence=120_000_000, slack=8, exact_length=40)
    source, target = moves_of([8], ["a"], kv=kv, bytes_per_s=1e8), moves_of([8], ["b"], kv=kv)
    assert target._predict_s(source.origin, 25) == pytest.approx(0.02 + 25 * 4e6 / 1e8)
    assert target._token_bytes == 4_000_000


@pytest.mark.parametrize(
    ("source", "target", "reached", "reason"),
    [
        ({"kv": RankKv(1, 1, recurrent=True)}, {}, 0, "the model has recurrent layers"),
        ({"kv": RankKv(1, 1, slack=8, exact_length=40)}, {}, 41, "sliding layers have dropped tokens"),
        ({"kv": RankKv(1, 1, slack=8, exact_length=40)}, {}, 40, ""),
        ({"shares": (1.0, 1.0)}, {}, 0, "ranks have other shares of the heads there"),
        ({"shares": (1.0, 1.0)}, {"shares": (2.0, 1.0)}, 0, "ranks have other shares of the heads there"),
        ({"shares": (2.0, 1.0)}, {"shares": (2.0, 1.0)}, 0, ""),
    ],
)
def test_kv_that_cannot_move_is_named(
    source: dict[str, Any], target: dict[str, Any], reached: int, reason: str
) -> None:
    ours, theirs = moves_of([8], ["a"], **target), moves_of([4, 8], ["a", "b"], **source)
    assert theirs.origin.objection(ours.places, ours.origin.kv, reached or 40) == reason


def test_slow_link_lets_tokens_be_computed_and_the_choice_is_recorded() -> None:
    kv = RankKv(1 << 40, 4_000_000)
    source = moves_of([8], ["a"], kv=kv, bytes_per_s=1e3)
    target = moves_of([8], ["b"], kv=kv)
    target._meter.measured["prefill 0/1"] = [1.0, 0.0, 0.001, 0.0, 0.0]
    moved = asyncio.run(target.bring(source.origin, sequence_of(40)))
    assert moved.tokens == 0
    assert moved.back is not None
    assert (moved.back.way, moved.back.seconds) == ("recompute", pytest.approx(0.04))


def test_each_rank_reads_from_the_ranks_that_have_its_layers_and_heads() -> None:
    source = moves_of([5, 8], ["a", "b"], shares=(2.0, 1.0))
    target = moves_of([2, 7, 8], ["a", "c", "b"], shares=(2.0, 1.0))
    found = [
        (each.stage, each.rank, each.address, each.first_layer, each.end_layer)
        for each in source.origin.sources(target.places, "key")
    ]
    expected = [
        (0, "unix:worker", 0, 2),
        (1, "a:1", 2, 5),
        (1, "b:1", 5, 7),
        (2, "unix:worker", 7, 8),
    ]
    assert sorted(found) == sorted((stage, rank, *rest) for stage, *rest in expected for rank in (0, 1))


@pytest.mark.parametrize(("files", "moves"), [("a-1", 1), ("a-2", 0)])
def test_answer_stays_until_its_end_if_the_files_were_replaced_since_it_began(files: str, moves: int) -> None:
    async def run() -> tuple[int, bool]:
        source, target = Succession(policy=CACHING), Succession(policy=CACHING)
        source.load(limits=replace(LIMITS, model="a-1"))
        target.load(limits=replace(LIMITS, model=files))
        (stream,) = source.submit(make_request(max_tokens=40))
        run_to(source, stream, 3)
        moved = await move_all(source, target)
        target.finish()
        return moved, stream.take()[-1].finish_reason == "length"

    assert asyncio.run(run()) == (moves, True)
