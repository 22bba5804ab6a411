"""Engines of one model, one after the other: each loss leaves its requests to the next one."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from itertools import count, pairwise
from typing import Any

from tests.engine.engines import BYTES, LIMITS, PLAIN
from tests.engine.twin import Draw, TwinExecutor
from tests.engine.twin_rank import NextToken, Reach, anywhere, hash_token

from mlx_ring.core.engine_stats import Meter, Policy, StepTotals
from mlx_ring.core.errors import NodeDrained, RingError, WorkerLost
from mlx_ring.core.generation import Delta, GenerateRequest, RequestStream
from mlx_ring.core.types import LayerRange, RankId
from mlx_ring.engine.engine import Engine
from mlx_ring.engine.executor import sampling_ranks
from mlx_ring.engine.kv_budget import RankKv
from mlx_ring.engine.left_kv import LeftKvMoves, LeftStages
from mlx_ring.engine.live_request import InProgress, LiveRequest, judge
from mlx_ring.engine.resumption import FIRST_KEPT, KeptKv, LeftKv, kept_message
from mlx_ring.engine.sequence import Limits
from mlx_ring.engine.takeover import HeldRequests

LOSS = WorkerLost("Worker 0 of stage 1 died.")
Kept = dict[LiveRequest, KeptKv]


class Succession:
    """A model whose instance can be lost and loaded again. A test runs its ranks step by step."""

    def __init__(
        self,
        next_token: NextToken | None = None,
        policy: Policy = PLAIN,
        *,
        draw: Draw | None = None,
        kv: RankKv | None = None,
        reach: Reach = anywhere,
        within_s: float = 300.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start without an instance."""
        self._next_token, self._draw = next_token or hash_token(256), draw
        self._policy, self.kv = policy, kv
        self.meter = Meter()
        self.held = HeldRequests(BYTES, LIMITS, policy, within_s=within_s, meter=self.meter, clock=clock)
        self._clock = clock
        self.twin: TwinExecutor | None = None
        self.engine: Engine | None = None
        self._in_progress: InProgress = {}
        self._lost_ranks: Sequence[RankId] = ()
        self._left: dict[LiveRequest, LeftKv] = {}
        self._kept_ids = count(FIRST_KEPT)
        self.before: TwinExecutor | None = None
        """Ranks of the last instance, if they may serve again."""
        self._reach = reach
        self.steps_failed = 0
        """Answers of ranks that report a failure."""
        self._ended = list[StepTotals]()
        """Totals of lost engines."""
        self._epoch = 0
        self.moves_kv = False
        """True if KV moves from and to its instances."""
        self._compiled = set[tuple[RankId, int]]()
        """Grammars that ranks of the instance have compiled, by id."""

    def load(
        self,
        tp_sizes: Sequence[int] = (1, 1),
        limits: Limits = LIMITS,
        *,
        kept: Kept | None = None,
        takes_over: bool = True,
    ) -> Engine:
        """Load an instance, which takes the requests that wait unless `takes_over` is False."""
        self._epoch += 1
        twin = TwinExecutor(
            tp_sizes,
            next_token=self._next_token,
            draw=self._draw,
            reach=self._reach,
            automatic=False,
            makes_grammars=False,
        )
        self._compiled = set[tuple[RankId, int]]()
        if kept is not None and self.before is not None:
            twin.keep(self.before, kept_message(kept.values()))
        if self.moves_kv:
            twin.place_kv(cut_evenly(len(tp_sizes)))
        self.twin, self.before = twin, None
        self.engine = Engine(
            self.twin,
            BYTES,
            limits,
            instance=f"demo-{self._epoch}",
            epoch=self._epoch,
            policy=self._policy,
            kv=None if self.kv is None else dict.fromkeys(self.twin.ranks, self.kv),
            hold=self._hold,
            meter=self.meter,
            clock=self._clock,
            kept=kept,
        )
        if takes_over:
            self.engine.take_over(self.held.take())
        return self.engine

    async def change_stages(
        self, tp_sizes: Sequence[int], *, limits: Limits = LIMITS, keeping: AbstractSet[RankId] | None = None
    ) -> LeftKvMoves:
        """Let the ranks change to other stages. The requests continue once KV of those before has moved.

        Args:
            tp_sizes: the number of ranks of each stage.
            limits: limits of the model.
            keeping: ranks that keep their KV; None: all.

        Returns:
            The move of the rest.
        """
        assert self.engine is not None
        self.engine.pause()
        while self.proceed(0):
            pass
        left = LeftStages(self.engine.moves.origin, self.engine.moves.texts)
        self.lose(NodeDrained("They change to another split."))
        before, lives = self.before, self._left
        assert before is not None
        engine = self.load(tp_sizes, limits, takes_over=False)
        assert self.twin is not None
        before._listener, self.twin.left = None, before  # pyright: ignore[reportPrivateUsage] - as once its engine has ended
        ranks = frozenset(before.ranks) if keeping is None else keeping
        moving = LeftKvMoves(engine.moves, replace(left, ranks=ranks, lives=lives))
        await self.during(moving.bring_running())
        engine.take_over(self.held.take())
        return moving

    async def during(self, work: Coroutine[Any, Any, None]) -> None:
        """Let the ranks work during a move."""
        moving = asyncio.create_task(work)
        while not moving.done():
            self.proceed(0)
            await asyncio.sleep(0)
        await moving

    def _hold(self, lives: Iterable[LiveRequest], loss: RingError) -> None:
        interrupted = list(lives)
        self._in_progress = {live: live.unanswered for live in interrupted if live.unanswered}
        self._left = {live: live.left for live in interrupted if live.left is not None}
        self.held.hold(interrupted, loss)

    @property
    def in_progress(self) -> frozenset[int]:
        """Sequences in steps that some rank has not answered."""
        engine = self.engine
        return frozenset() if engine is None else frozenset(engine._scheduler.unanswered)  # pyright: ignore[reportPrivateUsage]

    def judge(self, loss: RingError, lost: Mapping[RankId, float] | None = None) -> bool:
        """Judge the requests that were in progress at the last loss. By default any rank may have been lost."""
        any_rank = dict.fromkeys(self._lost_ranks, math.inf)
        return judge(self._in_progress, loss, any_rank if lost is None else lost)

    def lose(self, error: RingError = LOSS) -> None:
        """Lose the instance."""
        if self.engine is not None:
            self.engine.lose(error)
            self._ended.append(self.engine.totals())
        if self.twin is not None:
            self._lost_ranks = self.twin.ranks
        self.before, self.twin, self.engine = self.twin, None, None

    @property
    def totals(self) -> Sequence[StepTotals]:
        """Totals of all engines."""
        return self._ended if self.engine is None else [*self._ended, self.engine.totals()]

    def drift(self, choices: Iterable[int]) -> None:
        """Let ranks of the lost instance execute steps that it had sent."""
        for choice in choices:
            if self.before is not None and (runnable := self.before.runnable()):
                self.before.run(runnable[choice % len(runnable)])

    def choose_kept(self, first_stage: int) -> Kept:
        """Return the KV of the lost instance that its stages from this one on can keep."""
        chosen = {
            live: left.keep(live.sequence, first_stage, next(self._kept_ids))
            for live, left in self._left.items()
            if not live.has_ended
        }
        return {live: kept for live, kept in chosen.items() if kept is not None}

    def forget_loss(self) -> None:
        """Forget the requests of the last loss, as a head does when the next instance begins."""
        self._in_progress, self._left = {}, {}

    def patch(self, kept: Kept) -> Engine:
        """Load the lost instance again, whose stages keep KV."""
        assert self.before is not None
        return self.load((1,) * len(self.before.ranks), kept=kept)

    def submit(self, *requests: GenerateRequest) -> list[RequestStream]:
        """Submit requests to the instance, or to the queue for the next one."""
        return (self.held if self.engine is None else self.engine).submit_all(*requests)

    def proceed(self, choice: int) -> bool:
        """Let one rank execute a step, deliver one of its answers, or compile a grammar; return False if nothing is to do."""
        if self.twin is None:
            return False
        moves = [(self.twin.run, rank) for rank in self.twin.runnable()]
        moves += [(self.twin.deliver, rank) for rank in self.twin.answering()]
        moves += [(self._compile, rank) for rank in sampling_ranks(self.twin.ranks) if self.compiling(rank)]
        if moves:
            move, rank = moves[choice % len(moves)]
            done = move(rank)
            self.steps_failed += done is not None and done.HasField("failure")
        return bool(moves)

    def compiling(self, rank: RankId) -> list[str]:
        """Return the grammars that a rank of the last stage has to compile, in their order."""
        return [] if self.twin is None else [self.twin.grammars[each].text for each in self._uncompiled(rank)]

    def _uncompiled(self, rank: RankId) -> list[int]:
        wanted = () if self.twin is None else self.twin.grammars
        return [each for each in wanted if (rank, each) not in self._compiled]

    def _compile(self, rank: RankId) -> None:
        assert self.twin is not None
        number = self._uncompiled(rank)[0]
        self._compiled.add((rank, number))
        self.twin.report_prepared(rank, number)

    @property
    def has_requests(self) -> bool:
        """True while requests run or wait."""
        return bool(len(self.held)) or (self.engine is not None and bool(self.engine.requests()))

    def finish(self) -> None:
        """Load an instance if there is none, and answer all requests."""
        if self.engine is None:
            self.load()
        assert self.twin is not None
        while self.proceed(0):
            pass


def cut_evenly(stages: int, layers: int = 12) -> list[LayerRange]:
    """Return the layers of each stage."""
    ends = [layers * stage // stages for stage in range(stages + 1)]
    return [LayerRange(*each) for each in pairwise(ends)]


def tokens_of(deltas: Sequence[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def run_to(succession: Succession, stream: RequestStream, tokens: int) -> list[Delta]:
    """Let the ranks proceed until an answer has so many tokens."""
    deltas: list[Delta] = []
    while len(tokens_of(deltas)) < tokens:
        succession.proceed(0)
        deltas += stream.take()
    return deltas


def lose_and_load(succession: Succession) -> list[LiveRequest]:
    """Lose the instance, load another one, and return the requests that it took over."""
    succession.lose()
    lives = succession.held.take()
    succession.held.hold(lives, LOSS)
    succession.load()
    return lives


def check_nothing_is_left(succession: Succession) -> None:
    """Check that only the prefix cache holds KV, and that every stage holds the same."""
    assert succession.engine is not None
    assert succession.twin is not None
    stats = succession.engine.stats()
    assert (stats.scheduler.running, stats.scheduler.waiting) == (0, 0)
    assert stats.scheduler.sequences_held == stats.cache.entries
    first, *others = (succession.twin.tokens(rank) for rank in succession.twin.ranks)
    assert all(held == first for held in others)
    assert len(first) == stats.cache.entries
    succession.engine._scheduler.reset()  # pyright: ignore[reportPrivateUsage] - `close` awaits no answers
    succession.engine.resume()
    succession.finish()
    assert not any(succession.twin.held().values())
    assert all(use.used_bytes == 0 for use in succession.engine.stats().cache.ranks.values())
