"""Scheduler over the twin's ranks; each sent step is checked against every rule."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from random import Random
from typing import Any

from tests.default_settings import make_policy
from tests.engine.twin import FaultInjector, TwinExecutor
from tests.engine.twin_rank import KV_BYTES_PER_TOKEN, NextToken, Reach, anywhere, hash_token

from mlx_ring.core.engine_stats import BLOCK, Policy
from mlx_ring.core.errors import RingError
from mlx_ring.core.generation import GenerateRequest
from mlx_ring.core.types import RankId, SamplingParams
from mlx_ring.engine.kv_budget import RankKv
from mlx_ring.engine.scheduler import Scheduler
from mlx_ring.engine.sequence import Advance, Limits, Sequence, make_sequence
from mlx_ring.rpc.protos import step_pb2, worker_pb2

VOCABULARY = 50
EOS = 0
CONTEXT = 64
NEXT_TOKEN = hash_token(VOCABULARY)
PLAIN = make_policy(
    max_num_seqs=8, prefill_chunk=4, num_speculative_tokens=0, prefix_cache=False, step_deadline_s=5.0
)


def budget(tp_sizes: tuple[int, ...], blocks: int, **traits: Any) -> dict[RankId, RankKv]:
    """Return a KV budget of so many blocks of tokens on each rank."""
    limit = blocks * BLOCK * KV_BYTES_PER_TOKEN
    return {
        RankId(stage, rank): RankKv(limit, KV_BYTES_PER_TOKEN, **traits)
        for stage, size in enumerate(tp_sizes)
        for rank in range(size)
    }


class Pipeline:
    """Scheduler over ranks that continue one by one."""

    def __init__(
        self,
        tp_sizes: tuple[int, ...] = (1, 1),
        policy: Policy = PLAIN,
        *,
        kv: Mapping[RankId, RankKv] | None = None,
        context: int = CONTEXT,
        next_token: NextToken = NEXT_TOKEN,
        inject_fault: FaultInjector | None = None,
        reach: Reach = anywhere,
        pads: bool = False,
    ) -> None:
        self.pads = pads
        self.twin = TwinExecutor(
            tp_sizes,
            next_token=next_token,
            inject_fault=inject_fault,
            reach=reach,
            pads=pads,
            automatic=False,
        )
        self.twin.set_listener(self)
        self.policy = policy
        self.kv = kv
        self.scheduler = Scheduler(self.twin.ranks, instance="demo", epoch=1, policy=policy, kv=kv)
        self.limits = Limits(context_length=context, vocab_size=VOCABULARY, eos=frozenset({EOS}))
        self.next_token = next_token
        self.stages = len(tp_sizes)
        self.now = 0.0
        self.sequences: dict[int, Sequence] = {}
        self.ended: dict[int, RingError | None] = {}
        self.sampling_rows: dict[int, int] = defaultdict(int)
        """Number of unanswered rows that sample, by sequence."""
        self.decode_steps: set[int] = set()
        """Decode steps that the last stage has not answered."""
        self.answers: dict[int, int] = defaultdict(int)
        """Number of ranks that have answered, by step."""

    # ---- actions of a test

    def add(self, prompt: int | tuple[int, ...], sampling: SamplingParams | None = None) -> Sequence:
        """Add a request with this prompt, or with a prompt of its own of this length."""
        number = len(self.sequences) + 1
        if isinstance(prompt, int):
            prompt = tuple((number * 31 + place) % VOCABULARY for place in range(prompt))
        request = GenerateRequest(str(number), prompt, sampling or SamplingParams(max_tokens=5))
        sequence = self.sequences[number] = make_sequence(number, request, self.limits, self.now)
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
        self._check_budget()
        return steps

    def run(self, stage: int, rank: int = 0) -> None:
        """Execute the next step of a rank, and deliver its answer."""
        self.twin.run(RankId(stage, rank))
        self.twin.deliver(RankId(stage, rank))

    def run_any(self, random: Random) -> bool:
        """Execute a step or deliver an answer, chosen at random; return False when nothing is left."""
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
        """Run until nothing is left to do."""
        random = random or Random(0)
        while self.run_any(random):
            pass

    def alone(self, sequence: Sequence) -> list[int]:
        """Return the answer that the model gives to the sequence alone."""
        history = list(sequence.request.prompt_tokens)
        while len(history) < sequence.max_length:
            history.append(self.next_token(history))
            if history[-1] in sequence.ends:
                break
        return history[sequence.prompt_length :]

    # ---- the listener

    def answered(self, done: step_pb2.StepDone) -> None:
        self.now += 1.0
        self.answers[done.step] += 1
        if done.stage == self.stages - 1 and done.rank == 0:
            self.decode_steps.discard(done.step)
            for row in self.twin.sent[done.step - 1].rows:
                self.sampling_rows[row.sequence] -= bool(row.wants)
        for advance in self.scheduler.on_answer(done, self.now):
            self._take(advance)
        self.send()

    def prepared(self, rank: RankId, prepared: worker_pb2.GrammarPrepared) -> None:
        """Fail, because no request here has a grammar."""
        raise AssertionError(f"Grammar {prepared.id} of {rank} was never requested.")

    def fetched(self, rank: RankId, fetched: worker_pb2.KvFetched) -> None:
        """Fail, because nothing here is saved on a disk."""
        raise AssertionError(f"Fetch {fetched.id} of {rank} was never requested.")

    def failed(self, error: RingError) -> None:
        raise error

    def _take(self, advance: Advance) -> None:
        sequence = advance.sequence
        if advance.error is not None or sequence.finish_reason is not None:
            self._end(sequence, advance.error)

    def _end(self, sequence: Sequence, error: RingError | None) -> None:
        assert sequence.id not in self.ended
        self.ended[sequence.id] = error

    # ---- the rules

    def _check(self, step: step_pb2.Step) -> None:
        named = [row.sequence for row in step.rows]
        assert len(set(named)) == len(named), "a step has a sequence twice"
        assert not set(named) & set(self.ended), "a step has a sequence that has ended"
        assert step.rows or step.operations, "a step is empty"
        assert self.scheduler.stats().running <= self.policy.max_num_seqs
        if is_prefill(step):
            tokens = [len(row.tokens.ids) for row in step.rows]
            assert max(tokens) <= max(self.policy.prefill_chunk, self.policy.long_chunk), (
                "a chunk is too long"
            )
            most_together = max(4 * self.policy.prefill_chunk, self.policy.long_chunk)
            assert sum(tokens) <= most_together, "a step has too many prompts"
            ranks = len(self.twin.ranks)
            in_flight = sum(is_prefill(one) for one in self.twin.sent if self.answers[one.step] < ranks)
            assert in_flight <= self.stages, "too many chunks are in flight"
        elif step.rows:
            assert len(self.decode_steps) < self.stages * self.policy.steps_ahead, "too many decode steps"
            self.decode_steps.add(step.step)
        for row in step.rows:
            self.sampling_rows[row.sequence] += bool(row.wants)
            assert len(row.draft) <= self.policy.num_speculative_tokens

    def _check_budget(self) -> None:
        for place, use in self.scheduler.cache_stats().ranks.items():
            assert use.used_bytes <= use.limit_bytes, f"the budget of {place} is exceeded"
            # The memory of padded rows is known only afterwards.
            assert self.pads or self.twin.kv_bytes(place) <= use.limit_bytes, (
                f"{place} uses more memory than its limit"
            )

    def check_nothing_is_left(self) -> None:
        """Check that every sequence has ended, and that only the prefix cache uses KV until a reset."""
        assert set(self.ended) == set(self.sequences)
        stats = self.scheduler.stats()
        assert (stats.running, stats.waiting) == (0, 0)
        assert stats.sequences_held == self.scheduler.cache_stats().entries
        assert all(len(held) == stats.sequences_held for held in self.twin.held().values())
        self.scheduler.reset()
        self.send()
        self.run_out()
        assert not any(self.twin.held().values())
        assert set(self.scheduler.stats().kv_bytes.values()) == {0}
        assert all(use.used_bytes == 0 for use in self.scheduler.cache_stats().ranks.values())
        assert self.scheduler.stats().steps_sent == self.scheduler.stats().steps_completed
        assert self.scheduler.in_flight.oldest_unanswered(self.now) is None


def is_prefill(step: step_pb2.Step) -> bool:
    return any(row.HasField("tokens") for row in step.rows)
