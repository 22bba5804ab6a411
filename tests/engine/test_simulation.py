"""The simulated pipeline, compared with values counted by hand and with the limits of any pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples
from tests.planner.closed_loop import ClosedLoop, Load

from mlx_ring.engine.simulation import Outcome, Simulation, StepMaker, Times, Work
from mlx_ring.rpc.protos import step_pb2
from mlx_ring.rpc.protos.step_pb2 import Want

TOKEN = Want(where=Want.LAST, what=Want.TOKEN)
STAGES = st.lists(st.floats(0.01, 1.0), min_size=1, max_size=4)
LOADS = st.builds(
    Load,
    prompt_chunks=st.integers(0, 4),
    chunk_tokens=st.integers(1, 9),
    answer_tokens=st.integers(1, 9) | st.none(),
)
MANY = examples(0.6)


class Script:
    """Step maker that sends all its steps at once, or each after the last stage's answer to the previous one."""

    def __init__(self, steps: Sequence[step_pb2.Step], stages: int, *, one_by_one: bool = False) -> None:
        self._remaining = list(steps)
        self._last = stages - 1
        self._one_by_one = one_by_one
        self._free = True
        self.answered: list[tuple[float, step_pb2.StepDone]] = []

    def schedule(self, now: float) -> list[step_pb2.Step]:
        del now
        if not self._free:
            return []
        steps, self._remaining = (
            (self._remaining[:1], self._remaining[1:])
            if self._one_by_one
            else (self._remaining, list[step_pb2.Step]())
        )
        self._free = not self._one_by_one
        return steps

    def on_answer(self, done: step_pb2.StepDone, now: float) -> None:
        self._free |= done.stage == self._last
        self.answered.append((now, done))


def chunks(count: int) -> list[step_pb2.Step]:
    """Return the chunks of one prompt, of which the last samples."""
    return [
        step_pb2.Step(
            step=number,
            rows=[
                step_pb2.Row(
                    sequence=1,
                    start=number - 1,
                    tokens=step_pb2.Tokens(ids=[1]),
                    wants=[TOKEN] if number == count else [],
                )
            ],
        )
        for number in range(1, count + 1)
    ]


def decodes(count: int) -> list[step_pb2.Step]:
    """Return decode steps of one sequence, each on the previous token."""
    return [
        step_pb2.Step(
            step=number, rows=[step_pb2.Row(sequence=1, start=number, previous=True, wants=[TOKEN])]
        )
        for number in range(1, count + 1)
    ]


def every_step(*stage_s: float) -> Callable[[int, step_pb2.Step], float]:
    return lambda stage, step: stage_s[stage] if step.rows else 0.0


def run(
    maker: StepMaker[None],
    stage_s: Sequence[float],
    *,
    until_s: float = float("inf"),
    **times: float,
) -> Outcome:
    simulation = Simulation(maker, Times(every_step(*stage_s), **times), len(stage_s))
    return simulation.run([(0.0, lambda _now: None)], until_s=until_s)


# ---- by example


def test_one_stream_on_one_stage_gives_a_token_per_step() -> None:
    outcome = run(Script(decodes(4), 1), [2.0])
    assert outcome.sequences[1].tokens_s == (2.0, 4.0, 6.0, 8.0)
    assert outcome.stages[0].work == tuple(Work(n, 2.0 * (n - 1), 2.0 * n) for n in (1, 2, 3, 4))
    assert (outcome.elapsed_s, outcome.steps, outcome.most_in_flight) == (8.0, 4, 4)


@pytest.mark.parametrize(("count", "stages"), [(1, 1), (1, 3), (5, 2), (7, 4)])
def test_chunks_of_one_prompt_overlap_across_stages(count: int, stages: int) -> None:
    outcome = run(Script(chunks(count), stages), [1.0] * stages)
    assert outcome.sequences[1].tokens_s == (count + stages - 1,)


def test_chunks_sent_one_by_one_do_not_overlap() -> None:
    outcome = run(Script(chunks(5), 3, one_by_one=True), [1.0] * 3)
    assert outcome.sequences[1].first_token_s == 15.0
    assert [stage.utilization(0.0, 15.0) for stage in outcome.stages] == [pytest.approx(1 / 3)] * 3
    assert [bubble.length_s for bubble in outcome.stages[1].bubbles()] == [2.0] * 4


def test_the_first_stage_waits_for_tokens_and_later_ones_for_activations() -> None:
    outcome = run(Script(decodes(2), 2), [1.0, 2.0], hop_s=0.25)
    assert outcome.stages[0].work == (Work(1, 0.0, 1.0), Work(2, 3.5, 4.5))
    assert outcome.stages[1].work == (Work(1, 1.25, 3.25), Work(2, 4.75, 6.75))


def test_tokens_of_a_single_stage_make_no_hop() -> None:
    assert run(Script(decodes(3), 1), [1.0], hop_s=9.0).sequences[1].end_s == 3.0


def test_waiting_for_the_head_costs_a_round_trip() -> None:
    waits = run(Script(decodes(3), 1, one_by_one=True), [1.0], head_s=0.5)
    assert waits.sequences[1].tokens_s == (2.0, 4.0, 6.0)
    ahead = run(Script(decodes(3), 1), [1.0], head_s=0.5)
    assert ahead.sequences[1].tokens_s == (2.0, 3.0, 4.0)


def test_the_head_handles_one_event_at_a_time() -> None:
    maker = Script(chunks(3), 1)
    run(maker, [1.0], head_event_s=1.5)
    # The first step starts at 1.5; answers reach the head at 2.5, 3.5 and 4.5.
    assert [at for at, _ in maker.answered] == [4.0, 5.5, 7.0]


def test_every_stage_answers_every_step_with_its_compute_time() -> None:
    maker = Script(chunks(2), 2)
    run(maker, [1.0, 3.0], head_s=0.5)
    answers = [(at, done.step, done.stage, done.timings.compute_us) for at, done in maker.answered]
    assert answers == [(2.0, 1, 0, 1e6), (3.0, 2, 0, 1e6), (5.0, 1, 1, 3e6), (8.0, 2, 1, 3e6)]
    assert [len(done.results) for _, done in maker.answered] == [0, 0, 1, 1]
    assert maker.answered[-1][1].timings.started_us == 4_500_000


def test_operations_without_rows_wait_for_no_activations_and_make_no_bubble() -> None:
    step = step_pb2.Step(step=1, operations=[step_pb2.CacheOperation(reset=step_pb2.Reset())])
    maker = Script([step], 2)
    outcome = run(maker, [1.0, 1.0], hop_s=9.0, head_s=0.5)
    assert [at for at, _ in maker.answered] == [1.0, 1.0]
    assert outcome.most_in_flight == 0
    assert not any(stage.work for stage in outcome.stages)


@pytest.mark.parametrize(("draft", "tokens"), [([], 1), ([6, 7, 8], 4), ([6, 9, 8], 2), ([9], 1)])
def test_draft_tokens_are_accepted_up_to_the_first_difference(draft: list[int], tokens: int) -> None:
    row = step_pb2.Row(
        sequence=1, start=5, token=5, draft=draft, wants=[Want(where=Want.ALL, what=Want.TOKEN)]
    )
    maker = Script([step_pb2.Step(step=1, rows=[row])], 1)
    simulation = Simulation(maker, Times(every_step(1.0)), 1, sample=lambda _sequence, position: position)
    outcome = simulation.run([(0.0, lambda _now: None)])
    (result,) = maker.answered[0][1].results
    assert [token.token for token in result.tokens] == [6, 7, 8, 9][:tokens]
    assert outcome.sequences[1].tokens_s == (1.0,) * tokens


def test_a_step_maker_can_choose_which_tokens_count() -> None:
    simulation = Simulation(
        Script(decodes(3), 1), Times(every_step(1.0)), 1, taken=lambda _answer: [(7, 2), (8, 0)]
    )
    outcome = simulation.run([(0.0, lambda _now: None)])
    assert {number: times.tokens_s for number, times in outcome.sequences.items()} == {
        7: (1.0, 1.0, 2.0, 2.0, 3.0, 3.0)
    }


def test_arrivals_occur_in_order_and_get_the_time() -> None:
    seen: list[tuple[str, float]] = []
    simulation = Simulation(Script([], 1), Times(every_step(1.0)), 1)
    simulation.run(
        [
            (2.0, lambda now: seen.append(("late", now))),
            (1.0, lambda now: seen.append(("early", now))),
            (2.0, lambda now: seen.append(("later", now))),
            (9.0, lambda now: seen.append(("never", now))),
        ],
        until_s=8.0,
    )
    assert seen == [("early", 1.0), ("late", 2.0), ("later", 2.0)]


# ---- by property


class RecordingMaker:
    """Step maker that records the steps it sends and their answers."""

    def __init__(self, maker: ClosedLoop) -> None:
        self._maker = maker
        self.sent_s: dict[int, float] = {}
        self.answered: list[tuple[float, step_pb2.StepDone]] = []

    def schedule(self, now: float) -> list[step_pb2.Step]:
        steps = self._maker.schedule(now)
        self.sent_s.update({step.step: now for step in steps})
        return steps

    def on_answer(self, done: step_pb2.StepDone, now: float) -> None:
        self.answered.append((now, done))
        self._maker.on_answer(done, now)


@given(
    STAGES,
    st.lists(st.integers(1, 3), min_size=1, max_size=5),
    st.integers(1, 3),
    LOADS,
    st.floats(0, 0.2),
    st.floats(0, 0.2),
    st.sampled_from([0.0, 0.03]),
)
@MANY
def test_no_stage_overlaps_steps_or_starts_one_early(
    stage_s: list[float],
    groups: list[int],
    steps_ahead: int,
    load: Load,
    hop_s: float,
    head_s: float,
    head_event_s: float,
) -> None:
    maker = RecordingMaker(ClosedLoop(len(stage_s), groups, steps_ahead=steps_ahead, load=load))
    outcome = run(maker, stage_s, until_s=15.0, hop_s=hop_s, head_s=head_s, head_event_s=head_event_s)
    assert outcome.most_in_flight <= len(groups) * steps_ahead + len(stage_s) + 1
    ends: dict[tuple[int, int], float] = {}
    for number, stage in enumerate(outcome.stages):
        assert stage.busy_s(0.0, outcome.elapsed_s) <= outcome.elapsed_s * (1 + 1e-9)
        assert [one.step for one in stage.work] == sorted(one.step for one in stage.work)
        for one, following in zip(stage.work, stage.work[1:], strict=False):
            assert one.end_s <= following.begin_s
        for one in stage.work:
            assert one.begin_s >= maker.sent_s[one.step] + head_s
            assert not number or one.begin_s >= ends[one.step, number - 1] + hop_s
            ends[one.step, number] = one.end_s
    for now, done in maker.answered:
        assert now >= ends[done.step, done.stage] + head_s + head_event_s - 1e-9
    tokens = sum(len(times.tokens_s) for times in outcome.sequences.values())
    assert tokens == sum(len(result.tokens) for _, done in maker.answered for result in done.results)


@given(STAGES, st.lists(st.integers(1, 3), min_size=1, max_size=4), LOADS)
@MANY
def test_runs_are_deterministic(stage_s: list[float], groups: list[int], load: Load) -> None:
    def once() -> Outcome:
        loop = ClosedLoop(len(stage_s), groups, load=load)
        return run(loop, stage_s, until_s=10.0, hop_s=0.01, head_s=0.01, head_event_s=0.001)

    assert once() == once()
