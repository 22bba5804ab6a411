"""Requests move from one engine to another while both serve, and no answer changes."""

# Predictions and objections are tested alone.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.default_settings import make_policy
from tests.engine.engines import LIMITS, answer_of, drafting_at_no_cost, hash_token, kv_of, make_request
from tests.engine.successions import LOSS, Succession, check_nothing_is_left, run_to, tokens_of
from tests.engine.test_resume import SMALL_KV, Disturbed, Wanted, wanted_requests
from tests.engine.twin import TwinExecutor
from tests.engine.twin_rank import KV_BYTES_PER_TOKEN
from tests.examples import examples

from mlx_ring.core.engine_stats import Meter
from mlx_ring.core.errors import NotReady
from mlx_ring.core.generation import GenerateRequest
from mlx_ring.core.types import LayerRange, RankId, SamplingParams
from mlx_ring.engine import moved_kv, rows, takeover
from mlx_ring.engine.engine import Engine
from mlx_ring.engine.executor import KvPlace, kv_sources
from mlx_ring.engine.kv_budget import RankKv
from mlx_ring.engine.moved_kv import KvMoves
from mlx_ring.engine.scheduler import Scheduler
from mlx_ring.engine.sequence import Limits, make_sequence
from mlx_ring.engine.sequence import Sequence as EngineSequence
from mlx_ring.engine.takeover import move_requests
from mlx_ring.rpc.protos import step_pb2


@pytest.fixture(autouse=True, scope="module")
def _looks_at_once() -> Generator[None]:  # pyright: ignore[reportUnusedFunction] - a fixture
    """Let moves look for the last answers at each turn, so that a random case is the same each time.

    With limited memory, they read few tokens at a time, and copy fewer with each step.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "_PART_BYTES", 8 * KV_BYTES_PER_TOKEN)
        patch.setattr(moved_kv, "_PIECE_BYTES", 20 * KV_BYTES_PER_TOKEN)
        patch.setattr(takeover, "_LOOK_S", 0.0)
        patch.setattr(moved_kv, "_STEP_LOOK_S", 0.0)
        yield


CACHING = make_policy(num_speculative_tokens=0, prefill_chunk=8)


def engine_of(succession: Succession) -> Engine:
    assert succession.engine is not None
    return succession.engine


LARGE = replace(LIMITS, context_length=2000)


def instances_that_move_kv(
    kv: RankKv | None = None, limits: Limits = LIMITS, **shape: Any
) -> tuple[Succession, Succession]:
    """Return two loaded instances, of which the second one has this shape and can take over KV of the first."""
    source, target = Succession(policy=CACHING, kv=kv), Succession(policy=CACHING, kv=kv)
    source.moves_kv = target.moves_kv = True
    source.load(limits=limits)
    target.load(limits=limits, **shape)
    return source, target


async def move_all(source: Succession, target: Succession) -> int:
    """Move all requests while both instances work; return the number of those that moved."""
    moving = asyncio.create_task(move_requests(engine_of(source), engine_of(target)))
    while not moving.done():
        target.proceed(0)
        source.proceed(0)
        await asyncio.sleep(0)
    return await moving


def rows_of(succession: Succession) -> list[tuple[int, int]]:
    """Return the start and the number of tokens of every row."""
    assert succession.twin is not None
    return [(row.start, len(row.tokens.ids)) for step in succession.twin.sent for row in step.rows]


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


def adopted(succession: Succession) -> list[step_pb2.Adopt]:
    """Return the operations that take over KV from another instance."""
    assert succession.twin is not None
    operations = [operation for step in succession.twin.sent for operation in step.operations]
    return [each.adopt for each in operations if each.HasField("adopt") and each.adopt.length]


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
        return target._predict_s(source, 50)

    # d reads 2 layers from a and 3 from b; b also reads one layer within the machine, which is ten times as fast.
    assert predict_s() == pytest.approx(0.02 + 50 * 5e6 / 1e8)
    for _ in range(20):
        target._measure(source, 50, 0.02 + 2 * 2.5)
    assert predict_s() == pytest.approx(0.02 + 2 * 2.5, rel=1e-3)
    now = 601.0
    assert predict_s() == pytest.approx(0.02 + 2.5)
    assert moves_of([8], ["d"], kv=kv)._predict_s(target, 0) == pytest.approx(0.02)


def test_time_and_pieces_of_a_move_count_sliding_layers() -> None:
    kv = RankKv(1 << 40, 1_000_000, bytes_per_sequence=120_000_000, slack=8, exact_length=40)
    source, target = moves_of([8], ["a"], kv=kv, bytes_per_s=1e8), moves_of([8], ["b"], kv=kv)
    assert target._predict_s(source, 25) == pytest.approx(0.02 + 25 * 4e6 / 1e8)
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
    assert ours._objection(theirs, reached or 40) == reason


def test_slow_link_lets_tokens_be_computed_and_the_choice_is_recorded() -> None:
    kv = RankKv(1 << 40, 4_000_000)
    source = moves_of([8], ["a"], kv=kv, bytes_per_s=1e3)
    target = moves_of([8], ["b"], kv=kv)
    target._meter.measured["prefill 0/1"] = [1.0, 0.0, 0.001, 0.0, 0.0]
    moved = asyncio.run(target.bring(source, sequence_of(40)))
    assert moved.tokens == 0
    assert moved.back is not None
    assert (moved.back.way, moved.back.seconds) == ("recompute", pytest.approx(0.04))


def test_each_rank_reads_from_the_ranks_that_have_its_layers_and_heads() -> None:
    source = moves_of([5, 8], ["a", "b"], shares=(2.0, 1.0))
    target = moves_of([2, 7, 8], ["a", "c", "b"], shares=(2.0, 1.0))
    found = [
        (each.stage, each.rank, each.address, each.first_layer, each.end_layer)
        for each in kv_sources(target._pairs(source), "key")
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


# ---- the prefix cache


def starting_with(token: int, tokens: int, **sampling: Any) -> GenerateRequest:
    """Return a request that shares no beginning with those of other first tokens."""
    request = make_request(tokens, **sampling)
    return replace(request, prompt_tokens=(token, *request.prompt_tokens[1:]))


ENDED = [starting_with(200, 40, max_tokens=4), starting_with(201, 24, max_tokens=4)]


def answer_to(request: GenerateRequest) -> list[int]:
    return answer_of(hash_token(256), request).token_ids


def continued(request: GenerateRequest) -> GenerateRequest:
    """Return the next turn of a conversation."""
    return replace(request, prompt_tokens=(*request.prompt_tokens, *answer_to(request), 65, 66))


def answer_all(
    succession: Succession, requests: Iterable[GenerateRequest]
) -> tuple[list[list[int]], list[int]]:
    """Answer requests one after the other; return their tokens, and how many of each prompt came from the cache."""
    answers: list[list[int]] = []
    cached: list[int] = []
    for request in requests:
        (stream,) = succession.submit(request)
        succession.finish()
        deltas = stream.take()
        answers.append(tokens_of(deltas))
        cached.append(deltas[-1].cached_tokens)
    return answers, cached


def first_tokens(succession: Succession) -> list[int]:
    """Return the first token of each text in the prefix cache, the last used one first."""
    return [tokens[0] for _, tokens, _ in engine_of(succession)._scheduler.kv.cache.texts()]


def test_ended_conversations_move_too_and_continue_without_being_computed() -> None:
    running, next_turns = starting_with(202, 30, max_tokens=20), [*map(continued, ENDED)]

    async def run() -> tuple[list[int], list[list[int]], list[int], Succession]:
        source, target = instances_that_move_kv(tp_sizes=(1, 1, 1))
        answer_all(source, ENDED)
        (stream,) = source.submit(running)
        deltas = run_to(source, stream, 3)
        assert await move_all(source, target) == 1
        target.finish()
        tokens = tokens_of([*deltas, *stream.take()])
        return tokens, *answer_all(target, next_turns), target

    tokens, answers, cached, target = asyncio.run(run())
    assert tokens == answer_to(running)
    assert answers == [*map(answer_to, next_turns)]
    # The last token of an answer is not computed.
    assert cached == [43, 27]
    check_nothing_is_left(target)


@pytest.mark.parametrize(("blocks", "cached"), [(1, [0, 27]), (4, [43, 27])])
def test_ended_conversations_that_were_used_last_move_as_far_as_there_is_room(
    blocks: int, cached: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    kv, next_turns = kv_of(blocks), [*map(continued, reversed(ENDED))]

    async def run() -> tuple[list[list[int]], list[int], Succession]:
        source, target = Succession(policy=CACHING), Succession(policy=CACHING, kv=kv)
        source.moves_kv = target.moves_kv = True
        source.load()
        target.load()
        answer_all(source, ENDED)
        assert await move_all(source, target) == 0
        assert not engine_of(target).stats().cache.evictions
        return *answer_all(target, next_turns), target

    with caplog.at_level(logging.INFO):
        answers, found, target = asyncio.run(run())
    assert answers == [*map(answer_to, next_turns)]
    assert found == [*reversed(cached)]
    assert "was not moved" not in caplog.text
    check_nothing_is_left(target)


@pytest.mark.parametrize(("files", "expected"), [("a-1", 24), ("a-2", 0)])
def test_a_conversation_whose_answer_stayed_moves_after_its_end_unless_the_files_were_replaced(
    files: str, expected: int
) -> None:
    request = starting_with(200, 20, max_tokens=4)
    (next_turn,) = map(continued, [request])

    # It may become longer than the context there.
    stays = replace(request.sampling, max_tokens=12, stop_token_ids=tuple(answer_to(request)[-1:]))

    async def run() -> tuple[list[list[int]], list[int]]:
        source, target = Succession(policy=CACHING), Succession(policy=CACHING)
        source.moves_kv = target.moves_kv = True
        source.load(limits=replace(LIMITS, model="a-1"))
        target.load(limits=replace(LIMITS.within(30), model=files))
        source.submit(replace(request, sampling=stays))
        assert await move_all(source, target) == 0
        return answer_all(target, [next_turn])

    answers, cached = asyncio.run(run())
    assert answers == [answer_to(next_turn)]
    assert cached == [expected]


def test_a_long_text_comes_in_pieces_and_these_are_copied_in_parts_between_which_answers_continue() -> None:
    running = starting_with(202, 8, max_tokens=40)

    async def run() -> tuple[list[int], list[tuple[int, ...]], Succession]:
        source, target = instances_that_move_kv(kv_of(40))
        answer_all(source, ENDED[:1])
        (stream,) = target.submit(running)
        deltas = run_to(target, stream, 3)
        assert await move_all(source, target) == 0
        assert target.twin is not None
        steps = [
            (operation.adopt.start, operation.adopt.part, len(step.rows))
            for step in target.twin.sent
            for operation in step.operations
            if operation.HasField("adopt")
        ]
        target.finish()
        return tokens_of([*deltas, *stream.take()]), [tuple(parts) for *parts, rows in steps if rows], target

    tokens, parts, target = asyncio.run(run())
    assert tokens == answer_to(running)
    # 43 tokens, of which 20 are read at a time, and 8 go with a step. With the first ones goes memory for all.
    assert parts == [*((0, part) for part in range(6)), (14, 0), (14, 1), (28, 0), (28, 1)]
    check_nothing_is_left(target)


def at_second_piece(patch: pytest.MonkeyPatch, do: Callable[[Any], None]) -> None:
    """Call a function with the text that arrives, once its third piece is asked for and before the second one is copied."""
    take, texts = KvMoves._take_parts, list[Any]()

    async def take_parts(self: KvMoves, text: Any, fetch: Any) -> str:
        texts.append(text)
        if len(texts) == 2:
            do(text)
        return await take(self, text, fetch)

    patch.setattr(KvMoves, "_take_parts", take_parts)


@pytest.mark.parametrize("is_running", [False, True])
def test_pieces_that_have_arrived_are_kept_if_the_others_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch, *, is_running: bool
) -> None:
    request = starting_with(200, 40, max_tokens=20)
    next_turn = continued(request)

    async def run() -> tuple[list[list[int]], int]:
        source, target = instances_that_move_kv(kv_of(40))
        (stream,) = source.submit(request)
        before = run_to(source, stream, 4)
        if not is_running:
            source.finish()

        def fail(_: object) -> None:
            assert target.twin is not None
            target.twin.fails_moves = "the connection broke"

        at_second_piece(monkeypatch, fail)
        assert await move_all(source, target) == int(is_running)
        target.finish()
        assert target.twin is not None
        assert not target.twin.has_fetched
        moved = engine_of(target).stats().cache.moved_tokens
        answers, _ = answer_all(target, [next_turn])
        check_nothing_is_left(target)
        return [tokens_of([*before, *stream.take()]), *answers], moved

    answers, moved = asyncio.run(run())
    assert answers == [answer_to(request), answer_to(next_turn)]
    # Two of three pieces: 44 tokens have been computed, or in the end 59.
    assert moved == (29 if is_running else 39)


def test_no_more_pieces_of_an_ended_conversation_are_read_once_the_time_for_it_is_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (next_turn,) = map(continued, ENDED[:1])
    # Five pieces.
    monkeypatch.setattr(moved_kv, "_PIECE_BYTES", 10 * KV_BYTES_PER_TOKEN)

    def end_time(text: Any) -> None:
        text.end_s = -1.0

    async def run() -> tuple[list[list[int]], list[int]]:
        source, target = instances_that_move_kv(kv_of(40))
        answer_all(source, ENDED[:1])
        at_second_piece(monkeypatch, end_time)
        await move_all(source, target)
        return answer_all(target, [next_turn])

    with caplog.at_level(logging.INFO):
        answers, cached = asyncio.run(run())
    assert answers == [answer_to(next_turn)]
    assert cached == [25]
    assert "was not moved: the time for it is over" in caplog.text


@pytest.mark.parametrize("is_late", [False, True])
def test_account_has_all_tokens_that_ranks_keep_of_a_text_whose_move_is_given_up(
    monkeypatch: pytest.MonkeyPatch, *, is_late: bool
) -> None:
    """Give up once the last part of the second piece is sent, before or after the ranks have executed it."""
    long = starting_with(200, 100, max_tokens=4)
    monkeypatch.setattr(rows, "_PART_BYTES", 1 << 20)
    monkeypatch.setattr(moved_kv, "_PIECE_BYTES", 40 * KV_BYTES_PER_TOKEN)

    async def run() -> None:
        source, target = instances_that_move_kv(kv_of(40), LARGE)
        answer_all(source, [long])
        moving = asyncio.create_task(move_requests(engine_of(source), engine_of(target)))
        while len(adopted(target)) < 2:
            target.proceed(0)
            source.proceed(0)
            await asyncio.sleep(0)
        while is_late and target.proceed(0):
            pass
        moving.cancel()
        await asyncio.wait((moving,))
        target.finish()
        assert target.twin is not None
        (held,) = target.twin.tokens(target.twin.ranks[0]).values()
        ((_, tokens, _),) = engine_of(target)._scheduler.kv.cache.texts()
        assert [*tokens] == held
        assert not target.twin.has_fetched
        check_nothing_is_left(target)

    asyncio.run(run())


def test_later_pieces_do_not_wait_for_steps_of_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> int:
        source, target = instances_that_move_kv(kv_of(40))
        answer_all(source, ENDED[:1])
        taken = list[Any]()
        take = KvMoves._take_parts

        async def take_parts(self: KvMoves, text: Any, fetch: Any) -> str:
            if not taken:
                source.submit(starting_with(203, 8, max_tokens=4))
            taken.append(fetch)
            return await take(self, text, fetch)

        monkeypatch.setattr(KvMoves, "_take_parts", take_parts)
        moving = asyncio.create_task(engine_of(target).moves.bring_kept(engine_of(source).moves))
        for _ in range(500):
            target.proceed(0)
            await asyncio.sleep(0)
        moved = engine_of(target).stats().cache.moved_tokens
        moving.cancel()
        await asyncio.wait((moving,))
        return moved

    assert asyncio.run(run()) == 43


def large(token: int, tokens: int, **sampling: Any) -> GenerateRequest:
    """Return a request with a prompt of any length."""
    prompt = (token, *(65 + place % 150 for place in range(tokens - 1)))
    return replace(make_request(1, **sampling), prompt_tokens=prompt)


async def answer_alone(request: GenerateRequest) -> list[int]:
    """Return the answer to a request of any length."""
    alone = Succession(policy=CACHING)
    alone.load(limits=LARGE)
    return answer_all(alone, [request])[0][0]


@pytest.mark.parametrize("shares", [False, True])
def test_a_request_does_not_wait_for_the_room_of_an_ended_conversation_that_still_moves(
    monkeypatch: pytest.MonkeyPatch, *, shares: bool
) -> None:
    """Submit a request when the second of three pieces is read, also one that continues a cached text."""
    long, first = large(200, 600, max_tokens=1), large(203, 200, max_tokens=1)
    other = large(203 if shares else 204, 700, max_tokens=4)
    monkeypatch.setattr(moved_kv, "_PIECE_BYTES", 250 * KV_BYTES_PER_TOKEN)
    result, asked = KvMoves._result, list[int]()

    async def run() -> int:
        source, target = instances_that_move_kv(kv_of(5), LARGE)
        answer = await answer_alone(other)
        answer_all(source, [long])
        answer_all(target, [first])
        streams: list[Any] = []

        async def result_after_a_request(self: KvMoves, *given: Any) -> str:
            asked.append(1)
            if len(asked) == 2:
                streams.extend(target.submit(other))
                target.finish()
                assert tokens_of(streams[0].take()) == answer
            return await result(self, *given)

        monkeypatch.setattr(KvMoves, "_result", result_after_a_request)
        await move_all(source, target)
        target.finish()
        assert target.twin is not None
        assert not target.twin.has_fetched
        assert not engine_of(target).stats().scheduler.num_preemptions
        moved = engine_of(target).stats().cache.moved_tokens
        assert answer_all(target, [long])[0] == [await answer_alone(long)]
        check_nothing_is_left(target)
        return moved

    moved = asyncio.run(run())
    assert len(asked) == 2
    # All of it is freed if it could replace the text that the request continues.
    assert moved == (0 if shares else 200)


def test_no_request_is_preempted_for_an_ended_conversation_that_still_moves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    running = large(203, 200, max_tokens=80)
    monkeypatch.setattr(moved_kv, "_PIECE_BYTES", 250 * KV_BYTES_PER_TOKEN)
    monkeypatch.setattr(rows, "_PART_BYTES", 1 << 20)

    async def run() -> int:
        source, target = instances_that_move_kv(kv_of(4), LARGE)
        answer_all(source, [large(200, 600, max_tokens=1)])
        (stream,) = target.submit(running)
        deltas = run_to(target, stream, 1)

        def continue_answer(_: object) -> None:
            for _ in range(600):
                target.proceed(0)

        at_second_piece(monkeypatch, continue_answer)
        await move_all(source, target)
        target.finish()
        assert not engine_of(target).stats().scheduler.num_preemptions
        moved = engine_of(target).stats().cache.moved_tokens
        check_nothing_is_left(target)
        assert tokens_of([*deltas, *stream.take()]) == await answer_alone(running)
        return moved

    assert asyncio.run(run()) == 200


def test_the_first_to_be_evicted_is_the_conversation_that_was_not_used_for_longest() -> None:
    async def run() -> list[int]:
        source, target = instances_that_move_kv()
        own = starting_with(203, 20, max_tokens=4)
        answer_all(target, [own])
        answer_all(source, ENDED)
        await move_all(source, target)
        return first_tokens(target)

    assert asyncio.run(run()) == [203, 201, 200]


def test_an_ended_conversation_evicts_nothing_if_others_take_the_room_while_it_moves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, meanwhile = starting_with(204, 20, max_tokens=4), starting_with(205, 20, max_tokens=4)
    result = KvMoves._result

    async def run() -> None:
        source, target = Succession(policy=CACHING), Succession(policy=CACHING, kv=kv_of(2))
        source.moves_kv = target.moves_kv = True
        source.load()
        target.load()

        async def result_after_another_request(self: KvMoves, *given: Any) -> str:
            answer_all(target, [meanwhile])
            return await result(self, *given)

        monkeypatch.setattr(KvMoves, "_result", result_after_another_request)
        answer_all(source, ENDED[:1])
        answer_all(target, [before])
        await move_all(source, target)
        assert not engine_of(target).stats().cache.evictions
        assert first_tokens(target) == [205, 204]
        target.finish()
        assert target.twin is not None
        assert not target.twin.has_fetched
        check_nothing_is_left(target)

    asyncio.run(run())


def test_the_others_move_too_if_conversations_are_continued_before_they_have_moved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    many = [starting_with(200 + number, 20, max_tokens=1) for number in range(5)]
    result, continued_first = KvMoves._result, many[:1:-1]

    async def run() -> list[int]:
        source, target = instances_that_move_kv()

        async def result_after_the_next_turn(self: KvMoves, *given: Any) -> str:
            answer_all(target, continued_first[:1])
            del continued_first[:1]
            return await result(self, *given)

        monkeypatch.setattr(KvMoves, "_result", result_after_the_next_turn)
        answer_all(source, many)
        await move_all(source, target)
        return first_tokens(target)

    assert asyncio.run(run()) == [202, 203, 204, 201, 200]


def test_a_moved_conversation_takes_the_place_of_the_beginning_that_was_used_later() -> None:
    (long, _), other = ENDED, starting_with(203, 20, max_tokens=4)
    beginning = replace(long, prompt_tokens=long.prompt_tokens[:20], sampling=SamplingParams(max_tokens=1))

    async def run() -> None:
        source, target = instances_that_move_kv()
        answer_all(target, [other, beginning])
        answer_all(source, [long])
        await move_all(source, target)
        assert engine_of(target).stats().cache.moved_tokens == 23
        assert first_tokens(target) == [200, 203]
        check_nothing_is_left(target)

    asyncio.run(run())


def test_ended_conversations_that_cannot_move_are_computed(caplog: pytest.LogCaptureFixture) -> None:
    many = [starting_with(200 + number, 20, max_tokens=1) for number in range(5)]
    next_turns = [*map(continued, many)]

    async def run() -> tuple[list[list[int]], list[int], Succession]:
        source, target = instances_that_move_kv()
        assert target.twin is not None
        target.twin.fails_moves = "the connection broke"
        answer_all(source, many)
        assert await move_all(source, target) == 0
        assert not target.twin.has_fetched
        return *answer_all(target, next_turns), target

    with caplog.at_level(logging.INFO):
        answers, cached, target = asyncio.run(run())
    assert answers == [*map(answer_to, next_turns)]
    assert not any(cached)
    # Others would fail as well, while the machines wait.
    assert caplog.text.count("of an ended sequence was not moved: the connection broke") == 3
    check_nothing_is_left(target)
