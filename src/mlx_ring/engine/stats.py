"""What the engine tells of itself: to `/health`, to metrics, and to whoever watches for stuck workers.

What an engine has done since it began: numbers that only grow. Pure.

What is measured of requests at one place of a model, over all the engines that come and go there.

An engine lasts for one epoch. Its meter stays, so that what it counts only grows, whatever is lost, unloaded and
loaded again. Feeding it must be cheap, for some of it happens for every token.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Literal, Protocol

from mlx_ring.core.errors import RingError
from mlx_ring.core.types import FinishReason
from mlx_ring.engine.executor import RankId
from mlx_ring.engine.kv_budget import RankKvUse
from mlx_ring.rpc.protos import step_pb2


@dataclass(frozen=True, slots=True)
class StepTiming:
    """How one rank spent one step. Microseconds; `started_us` is on its machine's monotonic clock."""

    step: int
    rank: RankId
    rows: int
    tokens: int
    is_decode: bool
    """Whether its rows are the next tokens of running sequences, and not parts of prompts."""
    started_us: int
    finished_us: int
    queue_us: int
    link_wait_us: int
    compute_us: int
    link_send_us: int
    context_tokens: int = 0
    """That its rows looked back at, in the mean."""
    sequence: int = 0
    """Whose only row it was; 0 where it had several, or none."""


@dataclass(frozen=True, slots=True)
class Unanswered:
    """The rank that everybody waits for: of the earliest step that is owed, in the first stage that owes it."""

    rank: RankId
    step: int
    waited_s: float
    """Since all that the rank needs for the step was there, or since it was last heard of."""
    deadline_s: float
    """0: none."""

    @property
    def is_late(self) -> bool:
        return 0 < self.deadline_s < self.waited_s


RequestState = Literal["waiting", "reading", "answering"]


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """A request that has not ended. Nothing is told of what it says."""

    id: str
    state: RequestState
    """`reading`: its prompt."""
    prompt_tokens: int
    cached_tokens: int
    """Of the prompt, that need not be read."""
    read_tokens: int
    """Of the prompt, cached ones included."""
    tokens: int
    """Of the answer so far."""
    age_s: float


@dataclass(frozen=True, slots=True)
class CacheStats:
    """What was reused, what is kept, and how every rank's KV memory stands."""

    enabled: bool
    queries: int
    """Prompts that were looked up."""
    hits: int
    query_tokens: int
    hit_tokens: int
    """Tokens that were not computed again."""
    entries: int
    """Ended sequences and snapshots whose KV is kept."""
    entry_tokens: int
    evictions: int
    ranks: Mapping[RankId, RankKvUse]
    """Empty where no budget was given."""


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Where steps and sequences stand."""

    running: int
    waiting: int
    sequences_held: int
    """Whose KV some rank may still hold, kept ones included."""
    kv_bytes: Mapping[RankId, int]
    """As each rank said last."""
    steps_sent: int
    steps_completed: int
    """Answered by every rank."""
    steps_failed: int
    """On one rank at least, whole or in part."""
    recent: tuple[StepTiming, ...]
    """Of the last steps, in order of arrival."""
    num_preemptions: int
    """Times that a sequence was put back because KV memory ran out."""
    draft_tokens: int
    """Proposed by prompt look-up."""
    accepted_tokens: int
    """Of them, those that were right."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Steps and sequences now, and what became of requests since the start."""

    scheduler: SchedulerStats
    cache: CacheStats
    prompt_tokens: int
    """Of requests that got as far as an answer, those included whose KV was there already."""
    generated_tokens: int
    finished: Mapping[FinishReason, int]


@dataclass(slots=True)
class RankTotals:
    """Where a rank's time went, microseconds. A step's parts follow each other; in the queue it waits beside other steps."""

    steps: int = 0
    queue_us: int = 0
    link_wait_us: int = 0
    compute_us: int = 0
    link_send_us: int = 0
    idle_us: int = 0
    """With no step to do."""

    def note(self, timings: step_pb2.Timings) -> None:
        """Take in a step that is done."""
        self.steps += 1
        self.queue_us += timings.queue_us
        self.link_wait_us += timings.link_wait_us
        self.compute_us += timings.compute_us
        self.link_send_us += timings.link_send_us

    @property
    def busy_us(self) -> int:
        return self.link_wait_us + self.compute_us + self.link_send_us

    def plus(self, other: RankTotals) -> RankTotals:
        return RankTotals(
            *(getattr(self, part.name) + getattr(other, part.name) for part in fields(RankTotals))
        )


@dataclass(frozen=True, slots=True)
class StepTotals:
    """Of the steps of one engine, and of the KV behind them."""

    ranks: Mapping[RankId, RankTotals]
    read_tokens: int
    """Of prompts, by the first stage, those that were read again included."""
    steps_failed: int
    preemptions: int
    drafts: int
    """Rows that carried a draft."""
    draft_tokens: int
    accepted_tokens: int
    cache_query_tokens: int
    cache_hit_tokens: int
    cache_evictions: int


COUNTS = tuple(part.name for part in fields(StepTotals) if part.name != "ranks")
"""All that is one number."""


FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
"""vLLM's bounds, as are the next ones."""
TOKEN_S = (
    *(0.001, 0.0025, 0.005),
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
"""And below them some more: small models are quicker."""
REQUEST_S = (
    *(0.01, 0.03, 0.1),
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
"""The same."""
_LARGEST_COUNT = 1 << 20
TOKENS = tuple(
    float(count) for power in range(7) for step in (1, 2, 5) if (count := step * 10**power) <= _LARGEST_COUNT
)


class Distribution:
    """How many of the values seen lie up to each of some bounds."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        """Between one bound and the next; the last is of what lies above all of them."""
        self.total = 0.0

    def see(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """A request that nothing more is done for. Times are on the engine's clock, seconds."""

    submitted_at: float
    opened_at: float | None
    """When it was admitted first; None where it never was."""
    first_token_at: float | None
    last_token_at: float | None
    ended_at: float
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reason: FinishReason
    error: RingError | None = None

    @property
    def queue_s(self) -> float:
        return (self.ended_at if self.opened_at is None else self.opened_at) - self.submitted_at


class Metered(Protocol):
    """An engine, as its meter follows it."""

    def totals(self) -> StepTotals: ...


Rank = tuple[RankId, str]
"""A rank, and the node that it is on."""


class Meter:
    """Of one replica of a model."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        """Of requests that got as far as an answer."""
        self.generated_tokens = 0
        self.finished: Counter[FinishReason] = Counter()
        self.failed: Counter[str] = Counter()
        """By error, those that finished with one."""
        self.loads = 0
        """Times that an instance began to serve."""
        self.losses: Counter[str] = Counter()
        """By error, why it ended or could not be loaded again."""
        self.first_token_s = Distribution(FIRST_TOKEN_S)
        self.between_tokens_s = Distribution(TOKEN_S)
        self.queue_s = Distribution(REQUEST_S)
        self.prefill_s = Distribution(REQUEST_S)
        self.decode_s = Distribution(REQUEST_S)
        self.inference_s = Distribution(REQUEST_S)
        self.whole_s = Distribution(REQUEST_S)
        self.prompt_lengths = Distribution(TOKENS)
        self.answer_lengths = Distribution(TOKENS)
        self._counts: Counter[str] = Counter()
        self._ranks: dict[Rank, RankTotals] = {}
        """Of engines that are gone, as are the counts."""
        self._idle_us: dict[Rank, int] = {}
        """As was told last: it is partly estimated, and must not go back."""
        self._engine: Metered | None = None
        self._nodes: Mapping[RankId, str] = {}

    # ---- as the engine feeds it

    def answers(self, prompt_tokens: int, waited_s: float | None) -> None:
        """A request got its first token; `waited_s` is None where its prompt alone was asked for."""
        self.prompt_tokens += prompt_tokens
        if waited_s is not None:
            self.first_token_s.see(waited_s)

    def grows(self, tokens: int, since_last_s: float) -> None:
        """A request got more of them, in one step."""
        self.between_tokens_s.see(since_last_s / tokens, tokens)

    def ends(self, request: EndedRequest) -> None:
        """Nothing more is done for a request. What is told of times is told of whole answers."""
        self.finished[request.reason] += 1
        if request.error is not None:
            self.failed[type(request.error).__name__] += 1
        self.queue_s.see(request.queue_s)
        if request.reason not in ("stop", "length") or request.opened_at is None:
            return
        first = request.ended_at if request.first_token_at is None else request.first_token_at
        last = first if request.last_token_at is None else request.last_token_at
        self.prefill_s.see(first - request.opened_at)
        self.decode_s.see(last - first)
        self.inference_s.see(last - request.opened_at)
        self.whole_s.see(request.ended_at - request.submitted_at)
        self.prompt_lengths.see(request.prompt_tokens)
        self.answer_lengths.see(request.completion_tokens)

    # ---- as whoever runs the engine tells it

    @contextmanager
    def following(self, engine: Metered, nodes: Mapping[RankId, str]) -> Generator[None]:
        """While an engine serves; what it has done counts for good.

        Args:
            engine: whose steps are counted.
            nodes: where its ranks are.
        """
        self._engine, self._nodes = engine, nodes
        self.loads += 1
        try:
            yield
        finally:
            counts, ranks = self.counts(), self.ranks()
            self._counts, self._ranks, self._engine = Counter(counts), ranks, None

    def lost(self, error: RingError | None) -> None:
        """An instance could not go on, or could not be loaded."""
        if error is not None:
            self.losses[type(error).__name__] += 1

    # ---- as it is read

    def counts(self) -> Mapping[str, int]:
        """Each of `COUNTS`."""
        now = None if self._engine is None else self._engine.totals()
        return {name: self._counts[name] + (0 if now is None else int(getattr(now, name))) for name in COUNTS}

    def ranks(self) -> dict[Rank, RankTotals]:
        """Where every rank's time went, of those too that are gone."""
        told = {rank: totals.plus(RankTotals()) for rank, totals in self._ranks.items()}
        if self._engine is not None:
            for place, totals in self._engine.totals().ranks.items():
                rank = (place, self._nodes.get(place, ""))
                told[rank] = told.get(rank, RankTotals()).plus(totals)
        for rank, totals in told.items():
            totals.idle_us = self._idle_us[rank] = max(self._idle_us.get(rank, 0), totals.idle_us)
        return told
