"""Chunks of prompts: their order, beside decode and over several stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from unittest.mock import Mock, patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.pipeline import PLAIN, Pipeline, budget, is_prefill
from tests.engine.test_scheduler import REACHES, SHARED, TRAITS

from mlx_ring.core.types import SamplingParams
from mlx_ring.engine.kv_manager import KvManager
from mlx_ring.engine.sequence import Sequence as Running
from mlx_ring.planner.request import chunks_alone, usual_chunks
from mlx_ring.rpc.protos import step_pb2

CHUNK_2 = replace(PLAIN, prefill_chunk=2)


def test_chunks_of_one_prompt_are_pipelined_through_the_stages() -> None:
    pipeline = Pipeline((1, 1, 1), PLAIN)
    pipeline.add(40)
    assert [len(step.rows[0].tokens.ids) for step in pipeline.twin.sent] == [4, 4, 4, 4]
    assert [step.rows[0].start for step in pipeline.twin.sent] == [0, 4, 8, 12]


def sizes_alone(stages: int, prompts: Sequence[int], us: Callable[[int], float] | None = None) -> list[int]:
    """Return the sizes of the steps in which prompts pass stages that have measured chunks of 16, 160 and 480 tokens."""
    pipeline = Pipeline((1,) * stages, replace(PLAIN, prefill_chunk=512), context=5000)
    sizer = pipeline.scheduler._sizer  # pyright: ignore[reportPrivateUsage]
    for stage in range(stages if us is not None else 0):
        for tokens in (16, 160, 480):
            sizer.record_chunk(stage, 1, tokens, us(tokens) if us is not None else 0.0)
    sizer.record = Mock()
    for prompt in prompts:
        pipeline.add(prompt)
    pipeline.run_out()
    return [sum(len(row.tokens.ids) for row in step.rows) for step in pipeline.twin.sent if is_prefill(step)]


@pytest.mark.parametrize(
    ("token_us", "chunk_us", "prompt", "sizes"),
    [
        pytest.param(1000.0, 0.0, 240, [16] * 15, id="short, proportional"),
        pytest.param(0.0, 50_000.0, 240, [240], id="short, constant"),
        pytest.param(100.0, 5000.0, 240, [80] * 3, id="short, between"),
        pytest.param(1000.0, 4000.0, 1024, [64] * 16, id="long, dense"),
        pytest.param(2000.0, 600_000.0, 1024, [512] * 2, id="long, experts"),
    ],
)
def test_a_prompt_alone_passes_the_stages_in_chunks_of_the_best_measured_size(
    token_us: float, chunk_us: float, prompt: int, sizes: list[int]
) -> None:
    assert sizes_alone(3, [prompt], lambda tokens: chunk_us + token_us * tokens) == sizes


def test_a_prompt_alone_is_split_so_that_stages_overlap_before_times_are_measured() -> None:
    assert sizes_alone(1, [4000]) == [512] * 7 + [416]
    sizes = sizes_alone(2, [4000])
    assert (sum(sizes), max(sizes)) == (4000, 352)
    assert min(sizes) >= 256
    assert sizes_alone(2, [1500]) == [256] * 5 + [220]
    assert sizes_alone(2, [40]) == [40]


def test_chunks_are_larger_while_other_prompts_wait() -> None:
    alone, several = (
        sizes_alone(3, [600] * prompts, lambda tokens: 40_000 + 1000 * tokens) for prompts in (1, 4)
    )
    assert max(alone) < max(several) <= 512


@pytest.mark.parametrize(
    ("ms", "sizes"),
    [(0, [512] * 10), (100, [2048, 2048, 1024]), (400, [1024] * 5), (600, [512] * 10)],
    ids=["unmeasured", "fast", "slower", "slow"],
)
@pytest.mark.parametrize("has_long", [True, False])
def test_a_prompt_alone_is_read_in_long_chunks_where_they_take_less_than_a_second(
    ms: int, sizes: list[int], *, has_long: bool
) -> None:
    policy = replace(PLAIN, prefill_chunk=512, long_chunk=2048 if has_long else 0)
    pipeline = Pipeline((1,), policy, context=6000)
    sizer = pipeline.scheduler._sizer  # pyright: ignore[reportPrivateUsage]
    with patch.object(sizer, "record"):
        if ms:
            sizer.record_chunk(0, 1, 512, 1000.0 * ms)
        pipeline.add(5120)
        pipeline.run_out()
    chunks = [len(step.rows[0].tokens.ids) for step in pipeline.twin.sent if is_prefill(step)]
    assert chunks == (sizes if has_long else [512] * 10)


def long_chunks(context: int, token_us: float = 1e6 / 2048, *, learns: bool = False) -> Pipeline:
    """Return a pipeline of one stage whose chunks of 64 tokens may become 2,048; usually that takes a second."""
    pipeline = Pipeline((1,), replace(PLAIN, prefill_chunk=64, long_chunk=2048), context=context)
    sizer = pipeline.scheduler._sizer  # pyright: ignore[reportPrivateUsage]
    sizer.record_chunk(0, 1, 64, 64 * token_us)
    if not learns:
        sizer.record = Mock()
    return pipeline


def prefill_rows(steps: Iterable[step_pb2.Step]) -> list[list[int]]:
    """Return the tokens of the rows of prefill steps."""
    return [[len(row.tokens.ids) for row in step.rows] for step in steps if is_prefill(step)]


@pytest.mark.parametrize("together", [True, False])
def test_chunks_beside_answers_are_not_long(*, together: bool) -> None:
    pipeline = long_chunks(2000, 10.0, learns=True)
    pipeline.add(1, SamplingParams(ignore_eos=True))
    for _ in range(1 if together else 5):
        pipeline.run(0)
    begun, sizer = len(pipeline.twin.sent), pipeline.scheduler._sizer  # pyright: ignore[reportPrivateUsage]
    sizer.record_chunk(0, 1, 64, 640.0)
    sizer.record_decode(0, 1, 1, 100_000.0)
    pipeline.add(1000)
    for _ in range(60):
        pipeline.run(0)
    beside = prefill_rows(pipeline.twin.sent[begun:])
    assert len(beside) > 3
    assert max(map(max, beside)) <= 64


def test_a_prompt_that_arrives_waits_for_a_second_at_most() -> None:
    pipeline = long_chunks(9000)
    pipeline.add(8000)
    assert prefill_rows(pipeline.twin.sent) == [[2048]]
    pipeline.run(0)
    assert prefill_rows(pipeline.twin.sent) == [[2048], [2048]]


def test_long_chunks_become_shorter_behind_long_contexts() -> None:
    pipeline = long_chunks(70_000)
    pipeline.add(69_000)
    pipeline.run_out()
    (sizes,) = zip(*prefill_rows(pipeline.twin.sent), strict=True)
    assert all(
        size == 64 or size * end <= 2048 * 8192 for size, end in zip(sizes, accumulate(sizes), strict=True)
    )
    assert sorted(sizes[:-1], reverse=True) == [*sizes[:-1]]
    assert {2048, 1024, 512, 256} <= {*sizes}


@pytest.mark.parametrize("token_us", [1e6 / 2048, 1e6 / 1000, 1e6 / 70], ids=["fast", "slower", "slow"])
@pytest.mark.parametrize("tokens", [50, 1500, 8192, 20_000])
def test_the_planner_counts_the_chunks_that_the_engine_takes(tokens: int, token_us: float) -> None:
    pipeline = long_chunks(20_100, token_us)
    pipeline.add(tokens)
    pipeline.run_out()
    (taken,) = zip(*prefill_rows(pipeline.twin.sent), strict=True)
    long = chunks_alone(tokens, 64, 2048, lambda size, _: size * token_us / 1e6)
    counted = long or usual_chunks(tokens, 64)
    assert [size for size, count in counted for _ in range(count)] == [*taken]


def test_short_prompts_that_arrive_during_a_chunk_share_the_next_step() -> None:
    pipeline = Pipeline((1,), replace(PLAIN, prefill_chunk=32))
    pipeline.add(8)
    for _ in range(3):
        pipeline.add(6)
    assert [len(step.rows) for step in pipeline.twin.sent if is_prefill(step)] == [1]
    pipeline.run(0)
    assert [len(step.rows) for step in pipeline.twin.sent if is_prefill(step)] == [1, 3]


def test_decode_steps_alternate_with_the_chunks_of_a_long_prompt() -> None:
    pipeline = Pipeline((1,), CHUNK_2)
    short = pipeline.add(1, SamplingParams(ignore_eos=True))
    pipeline.run(0)
    pipeline.add(40)
    for _ in range(20):
        pipeline.run(0)
    kinds = [is_prefill(step) for step in pipeline.twin.sent[2:20]]
    assert kinds in ([True, False] * 9, [False, True] * 9)
    assert len(short.output) > 8


def read_beside_decode(pipeline: Pipeline, steps: int) -> list[int]:
    """Run the next steps of one stage, and return the sequence of each chunk among them."""
    sent = len(pipeline.twin.sent)
    for _ in range(steps):
        pipeline.run(0)
    return [step.rows[0].sequence for step in pipeline.twin.sent[sent:] if is_prefill(step)]


def test_every_second_chunk_beside_decode_is_for_short_prompts() -> None:
    pipeline = Pipeline((1,), replace(PLAIN, prefill_chunk=16), context=700)
    pipeline.add(1, SamplingParams(ignore_eos=True))
    pipeline.run(0)
    pipeline.run(0)
    long, short = pipeline.add(400), pipeline.add(12)
    turns = read_beside_decode(pipeline, 12)
    assert turns.count(short.id) >= 2, "the short prompt is larger than a chunk beside decode"
    assert all({one, other} == {long.id, short.id} for one, other in pairwise(turns[:4]))


def test_a_mostly_cached_prompt_counts_as_short() -> None:
    pipeline = Pipeline((1,), replace(PLAIN, prefill_chunk=16, prefix_cache=True), context=700)
    pipeline.add(SHARED[:300])
    pipeline.run_out()
    pipeline.add(1, SamplingParams(ignore_eos=True, max_tokens=600))
    pipeline.run(0)
    pipeline.run(0)
    pipeline.add(400)
    again = pipeline.add((*SHARED[:300], 3, 4, 5))
    assert again.id in read_beside_decode(pipeline, 6)
    assert again.cached_tokens == 300


@pytest.mark.parametrize("chunk", [32, 512])
@pytest.mark.parametrize("own", [0, 100])
@pytest.mark.parametrize("tp_sizes", [(1,), (1, 1)])
@pytest.mark.parametrize("kind", REACHES)
def test_what_prompts_that_came_together_share_is_computed_once(
    kind: str, tp_sizes: tuple[int, ...], own: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Add four prompts of 300 tokens, with some last tokens of their own or with none."""
    pipeline = Pipeline(
        tp_sizes,
        replace(PLAIN, prefix_cache=True, prefill_chunk=chunk),
        kv=budget(tp_sizes, 60, **TRAITS[kind]),
        context=700,
        reach=REACHES[kind],
    )
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "send", list)
        for number in range(4):
            tail = [(place * (3 + number) + number) % 50 for place in range(own)]
            pipeline.add((*SHARED[: 300 - own], *tail))
    pipeline.send()
    pipeline.run_out()
    computed = sum(
        len(row.tokens.ids) for step in pipeline.twin.sent if is_prefill(step) for row in step.rows
    )
    assert computed == 300 + 3 * (own or 1)
    for sequence in pipeline.sequences.values():
        assert sequence.output == pipeline.alone(sequence)
    pipeline.check_nothing_is_left()


LONG = tuple(number * 7 % 50 for number in range(1000))


def beside_decode() -> Pipeline:
    """Return one stage with a prefix cache that decodes an answer."""
    policy = replace(PLAIN, prefill_chunk=64, prefix_cache=True, max_num_seqs=50)
    pipeline = Pipeline((1,), policy, context=2000)
    pipeline.add(1, SamplingParams(ignore_eos=True))
    pipeline.run(0)
    pipeline.run(0)
    return pipeline


@pytest.mark.parametrize("start", [0, 100], ids=["shared", "not shared"])
def test_a_short_prompt_waits_for_no_long_one_that_has_no_turn(start: int) -> None:
    pipeline = beside_decode()
    first = pipeline.add(LONG)
    waiting = pipeline.add((*SHARED[:40], *LONG))
    short = pipeline.add((*SHARED[start : start + 40], 3, 4, 5))
    turns = read_beside_decode(pipeline, 8)
    assert turns[0] == short.id
    assert set(turns) == {first.id, short.id}
    pipeline.run_out()
    for sequence in pipeline.sequences.values():
        assert sequence.output == pipeline.alone(sequence)
    assert waiting.cached_tokens == (0 if start else 40), "the short one has computed it"


def test_what_a_long_prompt_shares_is_there_for_others_once_it_is_computed() -> None:
    pipeline = beside_decode()
    first = pipeline.add((*SHARED[:40], *LONG))
    short = pipeline.add((*SHARED[:40], 3, 4, 5))
    while not short.scheduled:
        pipeline.run(0)
    assert short.cached_tokens == 40 <= first.scheduled <= 80
    pipeline.run_out()
    assert short.output == pipeline.alone(short)


def test_prompts_that_wait_keep_no_others_from_going_ahead() -> None:
    pipeline = beside_decode()
    first = pipeline.add((*SHARED[:60], *LONG))
    waiting = [pipeline.add((*SHARED[:60], number)) for number in range(40)]
    other = pipeline.add((*SHARED[100:140], 3, 4, 5))
    assert first.scheduled < 60
    assert read_beside_decode(pipeline, 4)[0] == other.id
    pipeline.run_out()
    assert {sequence.cached_tokens for sequence in waiting} == {60}
    for sequence in (first, *waiting, other):
        assert sequence.output == pipeline.alone(sequence)


@pytest.mark.parametrize("tp_sizes", [(1,), (1, 1)])
def test_a_step_looks_at_few_of_the_prompts_in_line(
    tp_sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0
    reuse = KvManager.reuse

    def counting(kv: KvManager, sequence: Running, running: Mapping[int, Running]) -> int:
        nonlocal looks
        looks += 1
        return reuse(kv, sequence, running)

    monkeypatch.setattr(KvManager, "reuse", counting)

    def looks_a_step(prompts: int) -> float:
        nonlocal looks
        pipeline = Pipeline(tp_sizes, replace(PLAIN, max_num_seqs=prompts, prefix_cache=True))
        for number in range(prompts):
            # Most prompts are longer than a chunk.
            pipeline.add(20 if number % 50 else 3, SamplingParams(max_tokens=1))
        sent, looks = len(pipeline.twin.sent), 0
        pipeline.run_out()
        for sequence in pipeline.sequences.values():
            assert sequence.output == pipeline.alone(sequence)
        return looks / (len(pipeline.twin.sent) - sent)

    assert looks_a_step(240) <= 1.25 * looks_a_step(120)


@pytest.mark.parametrize("kept", [0, 3000])
def test_a_chunk_behind_a_kept_prefix_counts_as_late(kept: int) -> None:
    policy = replace(PLAIN, prefill_chunk=64, prefix_cache=True)
    pipeline = Pipeline((1, 1), policy, context=4000)
    text = tuple(place % 7 for place in range(kept))
    if kept:
        pipeline.add(text)
        pipeline.run_out()
    sizer = pipeline.scheduler._sizer  # pyright: ignore[reportPrivateUsage]
    with patch.object(sizer, "sent", wraps=sizer.sent) as sent:
        sequence = pipeline.add((*text, 1, 2, 3, 4, 5))
        assert sequence.cached_tokens == kept
    assert [call.args[2] for call in sent.call_args_list] == [sequence.cached_tokens]


def test_chunks_of_prompts_alone_are_unlike_until_the_time_of_a_token_is_known() -> None:
    pipeline = Pipeline((1, 1), replace(PLAIN, prefill_chunk=512), context=3000)
    sizer = pipeline.scheduler._sizer  # pyright: ignore[reportPrivateUsage]
    pipeline.add(1000)
    pipeline.run_out()
    assert sizer.largest_early >= 256
    pipeline.add(1000)
    pipeline.run_out()
    sizes = [sum(sizes) for sizes in prefill_rows(pipeline.twin.sent)]
    assert len(set(sizes)) > 1
    assert sizer.early_us(512) is not None


@given(
    prompts=st.lists(st.integers(1, 900), min_size=1, max_size=4),
    stages=st.integers(2, 4),
    chunk_us=st.floats(0, 1e6),
    token_us=st.floats(1, 1e4),
)
def test_chunks_of_one_prompt_alone_are_alike(
    prompts: list[int], stages: int, chunk_us: float, token_us: float
) -> None:
    pipeline = Pipeline((1,) * stages, replace(PLAIN, prefill_chunk=512), context=1000)
    sizer = pipeline.scheduler._sizer  # pyright: ignore[reportPrivateUsage]
    for stage in range(stages):
        for tokens in (16, 160, 480):
            sizer.record_chunk(stage, 1, tokens, chunk_us + token_us * tokens)
    sizer.record = Mock()
    for prompt in prompts:
        pipeline.add(prompt)
    pipeline.run_out()
    rows: dict[int, list[int]] = {}
    for step in pipeline.twin.sent:
        for row in step.rows if is_prefill(step) else ():
            rows.setdefault(row.sequence, []).append(len(row.tokens.ids))
    for number, prompt in enumerate(prompts, 1):
        assert sum(rows[number]) == prompt
        if len(prompts) == 1:
            assert max(rows[number]) <= 2 * min(rows[number]) + 32
