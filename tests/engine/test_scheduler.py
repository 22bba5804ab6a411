"""The scheduler against ranks that go on in any order that reality allows."""

from __future__ import annotations

from collections import defaultdict
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_ring.core.errors import ProtocolError, RingError, StepFailed
from mlx_ring.core.types import SamplingParams
from mlx_ring.engine.executor import RankId
from mlx_ring.engine.scheduler import Advance, Scheduler
from mlx_ring.engine.sequence import GenerateRequest, Limits, Sequence, make_sequence
from mlx_ring.engine.twin import Trouble, TwinExecutor, hash_token
from mlx_ring.rpc.failures import error_to_failure
from mlx_ring.rpc.protos import step_pb2

VOCABULARY = 50
EOS = 0
LIMITS = Limits(context_length=64, vocab_size=VOCABULARY, eos=frozenset({EOS}))
NEXT_TOKEN = hash_token(VOCABULARY)


class Pipeline:
    """A scheduler and the twin's ranks, with every rule checked at each step that goes out."""

    def __init__(
        self,
        tp_sizes: tuple[int, ...] = (1, 1),
        *,
        max_num_seqs: int = 8,
        chunk: int = 4,
        trouble: Trouble | None = None,
    ) -> None:
        self.twin = TwinExecutor(tp_sizes, next_token=NEXT_TOKEN, trouble=trouble, automatic=False)
        self.twin.set_listener(self)
        self.scheduler = Scheduler(
            self.twin.ranks,
            instance="demo",
            epoch=1,
            max_num_seqs=max_num_seqs,
            prefill_chunk=chunk,
            step_deadline_s=5.0,
        )
        self.stages = len(tp_sizes)
        self.now = 0.0
        self.sequences: dict[int, Sequence] = {}
        self.ended: dict[int, RingError | None] = {}
        self.line: list[int] = []
        """Sequences that wait for a decode step, in order."""
        self.unanswered: dict[int, list[step_pb2.Step]] = defaultdict(list)
        """By sequence, its steps that the last stage has not answered."""
        self.answers: dict[int, int] = defaultdict(int)
        """By step, how many ranks have answered."""
        self.prefills_since_decode: dict[int, int] = {}
        self.opened: list[int] = []

    # ---- what a test does

    def add(self, prompt: int, sampling: SamplingParams | None = None) -> Sequence:
        number = len(self.sequences) + 1
        tokens = tuple((number * 31 + place) % VOCABULARY for place in range(prompt))
        request = GenerateRequest(str(number), tokens, sampling or SamplingParams(max_tokens=5))
        sequence = self.sequences[number] = make_sequence(number, request, LIMITS, self.now)
        self.scheduler.add(sequence)
        self.send()
        return sequence

    def cancel(self, sequence: Sequence) -> None:
        self.scheduler.finish(sequence)
        self._end(sequence, None)
        self.send()

    def send(self) -> list[step_pb2.Step]:
        steps = self.scheduler.schedule(self.now)
        for step in steps:
            self._check(step)
            self.twin.send(step)
        return steps

    def run(self, stage: int, rank: int = 0) -> None:
        """A rank executes its next step, and its answer arrives."""
        self.twin.run(RankId(stage, rank))
        self.twin.deliver(RankId(stage, rank))

    def run_any(self, random: Random) -> bool:
        """One thing that can happen happens; False when nothing can."""
        runnable, answering = self.twin.runnable(), self.twin.answering()
        if not runnable and not answering:
            return False
        choice = random.randrange(len(runnable) + len(answering))
        if choice < len(runnable):
            self.twin.run(runnable[choice])
        else:
            self.twin.deliver(answering[choice - len(runnable)])
        return True

    def run_out(self, random: Random | None = None) -> None:
        """Until nothing is left to do."""
        random = random or Random(0)
        while self.run_any(random):
            pass

    # ---- the listener

    def answered(self, done: step_pb2.StepDone) -> None:
        self.now += 1.0
        self.answers[done.step] += 1
        if done.stage == self.stages - 1 and done.rank == 0:
            for row in self.twin.sent[done.step - 1].rows:
                self.unanswered[row.sequence].pop(0)
        for advance in self.scheduler.answer(done, self.now):
            self._take(advance)
        self.send()

    def failed(self, error: RingError) -> None:
        raise error

    def _take(self, advance: Advance) -> None:
        sequence = advance.sequence
        if advance.error is not None or sequence.finish_reason is not None:
            self._end(sequence, advance.error)
        else:
            self.line.append(sequence.id)
            self.prefills_since_decode.setdefault(sequence.id, 0)

    def _end(self, sequence: Sequence, error: RingError | None) -> None:
        assert sequence.id not in self.ended
        self.ended[sequence.id] = error
        self.prefills_since_decode.pop(sequence.id, None)
        if sequence.id in self.line:
            self.line.remove(sequence.id)

    # ---- the rules

    def _check(self, step: step_pb2.Step) -> None:
        named = [row.sequence for row in step.rows]
        assert len(set(named)) == len(named), "a sequence is twice in one step"
        assert not set(named) & set(self.ended), "a sequence that has ended is in a step"
        self.opened += [one.open.sequence for one in step.operations if one.HasField("open")]
        assert self.opened == sorted(self.opened), "a prompt overtook an earlier one"
        if any(row.HasField("tokens") for row in step.rows):
            self._check_prefill(step)
        elif step.rows:
            self._check_decode(named)
        else:
            assert step.operations, "a step says nothing"
        for sequence in named:
            self.unanswered[sequence].append(step)

    def _check_prefill(self, step: step_pb2.Step) -> None:
        (row,) = step.rows
        assert all(_is_prefill(before) for before in self.unanswered[row.sequence])
        ranks = len(self.twin.ranks)
        in_flight = sum(_is_prefill(one) for one in self.twin.sent if self.answers[one.step] < ranks)
        assert in_flight <= self.stages, "too many chunks are on their way"
        for sequence in self.prefills_since_decode:
            self.prefills_since_decode[sequence] += 1
            assert self.prefills_since_decode[sequence] <= 1, "a decode step waits for two chunks"

    def _check_decode(self, named: list[int]) -> None:
        assert self.line[: len(named)] == named, "a sequence overtook another"
        del self.line[: len(named)]
        assert not any(self.unanswered[sequence] for sequence in named)
        self.prefills_since_decode.update(dict.fromkeys(named, 0))
        groups = {
            before.step for steps in self.unanswered.values() for before in steps if not _is_prefill(before)
        }
        assert len(groups) < self.stages, "more decode steps in flight than stages"
        assert len(named) <= -(-len(self.prefills_since_decode) // self.stages), "groups are out of balance"

    def check_nothing_is_left(self) -> None:
        assert set(self.ended) == set(self.sequences)
        assert not any(self.twin.held().values())
        stats = self.scheduler.stats()
        assert (stats.running, stats.waiting, stats.sequences_held) == (0, 0, 0)
        assert set(stats.kv_bytes.values()) == {0}
        assert stats.steps_sent == stats.steps_completed
        assert self.scheduler.oldest_unanswered(self.now) is None


def _is_prefill(step: step_pb2.Step) -> bool:
    return any(row.HasField("tokens") for row in step.rows)


def alone(sequence: Sequence) -> list[int]:
    """The answer that the sequence's model gives when nobody disturbs it."""
    history = list(sequence.request.prompt_tokens)
    while len(history) < sequence.max_length:
        history.append(NEXT_TOKEN(history))
        if history[-1] in sequence.ends:
            break
    return history[sequence.prompt_length :]


RANDOM = st.builds(Random, st.integers(0, 2**32))
TP_SIZES = st.sampled_from([(1,), (2,), (1, 1), (1, 1, 1), (2, 2), (1, 2, 1), (1,) * 5])
SAMPLING = st.builds(SamplingParams, max_tokens=st.integers(0, 12) | st.none(), ignore_eos=st.booleans())
REQUESTS = st.lists(st.tuples(st.integers(1, 30), SAMPLING), min_size=1, max_size=9)
MANY = settings(deadline=None, max_examples=100)


@given(TP_SIZES, REQUESTS, st.integers(1, 9), st.integers(1, 10), RANDOM)
@MANY
def test_every_answer_is_what_the_sequence_alone_would_get(
    tp_sizes: tuple[int, ...],
    requests: list[tuple[int, SamplingParams]],
    max_num_seqs: int,
    chunk: int,
    random: Random,
) -> None:
    pipeline = Pipeline(tp_sizes, max_num_seqs=max_num_seqs, chunk=chunk)
    for prompt, sampling in requests:
        pipeline.add(prompt, sampling)
        assert pipeline.scheduler.stats().running <= max_num_seqs
        for _ in range(random.randrange(6)):
            pipeline.run_any(random)
    pipeline.run_out(random)
    for sequence in pipeline.sequences.values():
        assert sequence.output == alone(sequence)
    pipeline.check_nothing_is_left()


@given(TP_SIZES, REQUESTS, st.integers(1, 9), RANDOM)
@MANY
def test_cancelled_sequences_free_all_and_disturb_none(
    tp_sizes: tuple[int, ...],
    requests: list[tuple[int, SamplingParams]],
    max_num_seqs: int,
    random: Random,
) -> None:
    pipeline = Pipeline(tp_sizes, max_num_seqs=max_num_seqs)
    cancelled: set[int] = set()
    for prompt, sampling in requests:
        pipeline.add(prompt, sampling)
        for _ in range(random.randrange(12)):
            pipeline.run_any(random)
        living = [one for number, one in pipeline.sequences.items() if number not in pipeline.ended]
        if living and random.random() < 0.5:
            victim = random.choice(living)
            pipeline.cancel(victim)
            cancelled.add(victim.id)
    pipeline.run_out(random)
    for sequence in pipeline.sequences.values():
        whole = alone(sequence)
        assert sequence.output == (whole[: len(sequence.output)] if sequence.id in cancelled else whole)
    pipeline.check_nothing_is_left()


@given(TP_SIZES, REQUESTS, st.booleans(), RANDOM)
@MANY
def test_a_failed_step_ends_the_rows_it_names_and_no_other(
    tp_sizes: tuple[int, ...],
    requests: list[tuple[int, SamplingParams]],
    name_rows: bool,  # noqa: FBT001 - drawn by hypothesis
    random: Random,
) -> None:
    blamed: set[int] = set()

    def trouble(step: step_pb2.Step, stage: int) -> step_pb2.Failure | None:
        del stage
        if not step.rows or random.random() > 0.05:
            return None
        rows = [row.sequence for row in step.rows]
        named = rows[:1] if name_rows else rows
        blamed.update(named)
        return error_to_failure(StepFailed("boom"), named if name_rows else ())

    pipeline = Pipeline(tp_sizes, trouble=trouble)
    for prompt, sampling in requests:
        pipeline.add(prompt, sampling)
    pipeline.run_out(random)
    for number, error in pipeline.ended.items():
        assert error is None or number in blamed
        if number not in blamed:
            assert pipeline.sequences[number].output == alone(pipeline.sequences[number])
    assert all(isinstance(error, StepFailed) for error in pipeline.ended.values() if error is not None)
    pipeline.check_nothing_is_left()


def test_chunks_of_one_prompt_follow_each_other_through_the_stages() -> None:
    pipeline = Pipeline((1, 1, 1), chunk=4)
    pipeline.add(40)
    assert [len(step.rows[0].tokens.ids) for step in pipeline.twin.sent] == [4, 4, 4, 4]
    assert [step.rows[0].start for step in pipeline.twin.sent] == [0, 4, 8, 12]


def test_a_chunk_counts_as_in_flight_until_every_rank_has_answered() -> None:
    pipeline = Pipeline((1, 2), chunk=4)
    pipeline.add(40)
    pipeline.run(0)
    pipeline.run(1)
    assert len(pipeline.twin.sent) == 3
    pipeline.run(1, 1)
    assert len(pipeline.twin.sent) == 4


def test_two_sequences_have_a_decode_step_each_in_flight_on_two_stages() -> None:
    pipeline = Pipeline((1, 1))
    for _ in range(2):
        pipeline.add(3, SamplingParams(ignore_eos=True))
    for _ in range(2):
        pipeline.run(0)
        pipeline.run(1)
    assert [[row.sequence for row in step.rows] for step in pipeline.twin.sent] == [[1], [2], [1], [2]]


def test_five_sequences_share_two_decode_steps_evenly() -> None:
    pipeline = Pipeline((1, 1))
    for _ in range(5):
        pipeline.add(3, SamplingParams(ignore_eos=True, max_tokens=40))
    random = Random(1)
    for _ in range(120):
        pipeline.run_any(random)
    assert {len(step.rows) for step in pipeline.twin.sent[-10:]} == {2, 3}


def test_one_stage_decodes_all_sequences_in_one_step() -> None:
    pipeline = Pipeline((1,))
    for _ in range(4):
        pipeline.add(3, SamplingParams(ignore_eos=True))
    for _ in range(12):
        pipeline.run(0)
    assert len(pipeline.twin.sent[-1].rows) == 4


def test_decoding_goes_on_between_the_chunks_of_a_long_prompt() -> None:
    pipeline = Pipeline((1,), chunk=2)
    short = pipeline.add(1, SamplingParams(ignore_eos=True))
    pipeline.run(0)
    pipeline.add(40)
    for _ in range(20):
        pipeline.run(0)
    kinds = [_is_prefill(step) for step in pipeline.twin.sent[2:20]]
    assert kinds in ([True, False] * 9, [False, True] * 9)
    assert len(short.output) > 8


def test_free_goes_out_at_once_and_alone_when_there_is_no_work() -> None:
    pipeline = Pipeline((1, 1))
    sequence = pipeline.add(3)
    pipeline.cancel(sequence)
    step = pipeline.twin.sent[-1]
    assert [operation.free.sequence for operation in step.operations] == [sequence.id]
    assert not step.rows
    pipeline.run(0)
    pipeline.run(0)
    assert pipeline.scheduler.stats().sequences_held == 1
    pipeline.run(1)
    pipeline.run(1)
    pipeline.check_nothing_is_left()


def test_free_rides_with_the_next_work_when_there_is_some() -> None:
    pipeline = Pipeline((1,))
    ending = pipeline.add(3, SamplingParams(max_tokens=2, ignore_eos=True))
    lasting = pipeline.add(3, SamplingParams(ignore_eos=True))
    while ending.id not in pipeline.ended:
        pipeline.run(0)
    step = pipeline.twin.sent[-1]
    assert [operation.free.sequence for operation in step.operations] == [ending.id]
    assert [row.sequence for row in step.rows] == [lasting.id]


def test_a_sequence_that_never_started_is_dropped_in_silence() -> None:
    pipeline = Pipeline((1,), max_num_seqs=1)
    pipeline.add(3)
    waiting = pipeline.add(3)
    sent = len(pipeline.twin.sent)
    pipeline.cancel(waiting)
    assert len(pipeline.twin.sent) == sent


def test_an_answer_of_another_epoch_or_instance_is_dropped() -> None:
    pipeline = Pipeline((1,))
    pipeline.add(3)
    for stale in (
        step_pb2.StepDone(instance="demo", epoch=0, step=1),
        step_pb2.StepDone(instance="other", epoch=1, step=1),
    ):
        assert pipeline.scheduler.answer(stale, now=1.0) == []
    assert pipeline.scheduler.stats().steps_completed == 0


@pytest.mark.parametrize(
    ("stage", "rank", "step"),
    [(0, 0, 2), (0, 0, 9), (1, 0, 1), (0, 1, 1)],
    ids=["skips", "unsent", "no stage", "no rank"],
)
def test_an_answer_out_of_order_or_of_nobody_is_refused(stage: int, rank: int, step: int) -> None:
    pipeline = Pipeline((1,), chunk=2)
    pipeline.add(6)
    done = step_pb2.StepDone(instance="demo", epoch=1, stage=stage, rank=rank, step=step)
    with pytest.raises(ProtocolError):
        pipeline.scheduler.answer(done, now=1.0)


def test_the_rank_that_owes_longest_is_known_from_its_last_progress() -> None:
    pipeline = Pipeline((1, 1), chunk=2)
    assert pipeline.scheduler.oldest_unanswered(9.0) is None
    pipeline.add(6)
    first = pipeline.scheduler.oldest_unanswered(4.0)
    assert first is not None
    assert (first.rank, first.step, first.waited_s, first.is_late) == (RankId(0, 0), 1, 4.0, False)
    pipeline.run(0)
    second = pipeline.scheduler.oldest_unanswered(6.0)
    assert second is not None
    assert (second.rank, second.step, second.waited_s, second.is_late) == (RankId(1, 0), 1, 6.0, True)
