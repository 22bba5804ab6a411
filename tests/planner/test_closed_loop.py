"""Rules of the closed loop of clients."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from tests.engine.step_simulation import Simulation, Times
from tests.examples import examples
from tests.planner.closed_loop import ClosedLoop, Load
from tests.planner.costs import is_prefill

from mlx_ring.rpc.protos import step_pb2


def first_steps(loop: ClosedLoop, stages: int, count: int) -> list[step_pb2.Step]:
    """Return the first steps of a pipeline in which a chunk takes five times as long as a decode step."""
    recorded: list[step_pb2.Step] = []

    class Recorder:
        def schedule(self, now: float) -> list[step_pb2.Step]:
            steps = loop.schedule(now)
            recorded.extend(steps)
            return steps

        def on_answer(self, done: step_pb2.StepDone, now: float) -> None:
            loop.on_answer(done, now)

    times = Times(lambda _stage, step: 5.0 if is_prefill(step) else 1.0)
    Simulation(Recorder(), times, stages).run([(0.0, lambda _now: None)], until_s=10.0 * count)
    return recorded[:count]


def test_groups_take_turns() -> None:
    steps = first_steps(ClosedLoop(2, [2, 1]), 2, 40)
    assert {tuple(row.sequence for row in step.rows) for step in steps} == {(1, 2), (3,)}
    assert all(one.rows[0].sequence != other.rows[0].sequence for one, other in pairwise(steps))


def test_each_group_has_its_steps_ahead_in_flight() -> None:
    assert len(ClosedLoop(2, [1, 1], steps_ahead=3).schedule(0.0)) == 6


def test_prompt_chunks_in_flight_are_limited_by_the_stages_and_in_order() -> None:
    loop = ClosedLoop(2, [2], load=Load(prompt_chunks=8, chunk_tokens=4))
    steps = loop.schedule(0.0)
    assert [(step.rows[0].sequence, step.rows[0].start) for step in steps] == [(1, 0), (1, 4), (1, 8)]
    assert [len(step.rows[0].tokens.ids) for step in steps] == [4, 4, 4]


def test_decoding_continues_between_chunks() -> None:
    loop = ClosedLoop(1, [2], load=Load(prompt_chunks=6))
    steps = first_steps(loop, 1, 40)
    first_decode = next(place for place, step in enumerate(steps) if not is_prefill(step))
    last_chunk = max(place for place, step in enumerate(steps) if is_prefill(step))
    between = steps[first_decode:last_chunk]
    assert any(map(is_prefill, between))
    assert not any(is_prefill(one) and is_prefill(other) for one, other in pairwise(between))


@given(
    st.integers(1, 3),
    st.lists(st.integers(1, 3), min_size=1, max_size=4),
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(1, 7),
)
@examples(0.6)
def test_a_client_sends_its_next_request_after_the_whole_answer(
    stages: int, groups: list[int], steps_ahead: int, chunks: int, answer: int
) -> None:
    load = Load(prompt_chunks=chunks, chunk_tokens=3, answer_tokens=answer)
    loop = ClosedLoop(stages, groups, steps_ahead=steps_ahead, load=load)
    steps = first_steps(loop, stages, 200)
    rows: dict[int, list[step_pb2.Row]] = {}
    for step in steps:
        sequences = [row.sequence for row in step.rows]
        assert len(set(sequences)) == len(sequences)
        assert len(sequences) <= (1 if is_prefill(step) else max(groups))
        for row in step.rows:
            rows.setdefault(row.sequence, []).append(row)
    whole = chunks + answer - bool(chunks)
    assert len(rows) > sum(groups), "clients send further requests"
    for number, own_rows in rows.items():
        starts = [row.start for row in own_rows]
        assert starts == [3 * min(place, chunks) + max(0, place - chunks) for place in range(len(starts))]
        assert len(own_rows) <= whole
        assert sum(bool(row.wants) for row in own_rows) <= answer
        if number < max(rows) - 2 * sum(groups):
            assert len(own_rows) == whole
