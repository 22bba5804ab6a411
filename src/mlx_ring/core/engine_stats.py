"""Configuration, statistics and meters of an engine: engines write them, the API reports them."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Protocol

from mlx_ring.core.errors import RingError
from mlx_ring.core.generation import EndedRequest
from mlx_ring.core.types import WAYS, FinishReason, RankId, Way


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Configuration of a scheduler. Fields that a person sets have the names of their settings, which have defaults."""

    max_num_seqs: int
    """Most sequences that run at the same time."""
    max_queued_requests: int
    """Most requests in the queue; further ones are refused."""
    prefill_chunk: int
    long_chunk: int = 0
    """Most tokens of one prompt in one step, and of one alone, where that is measured to be fast; 0: not more."""
    max_itl_ratio: float
    """Largest inter-token latency beside prefill, as a multiple of the latency without it."""
    steps_ahead: int = 2
    """Decode steps of one micro-batch that are in flight at once; 1 waits for every result."""
    prefix_cache: bool
    """True if KV is kept after a sequence's end and reused."""
    kv_disk: int | None = None
    """Bytes of KV that each machine keeps on its disk; None: none is saved or restored."""
    kv_owners: frozenset[str] = frozenset()
    """Owners of KV on disks, as `owner_of` names them; that of others is removed. Empty: none is."""
    num_speculative_tokens: int
    """Most tokens that prompt lookup proposes in one step; 0: no speculative decoding."""
    step_deadline_s: float
    """Shortest time after which a rank without an answer counts as stuck; 0: never."""
    request_timeout_s: float | None
    """Longest time of a request, from its arrival; None: no limit."""

    @property
    def most_requests(self) -> int:
        """Most requests that run or wait."""
        return self.max_num_seqs + self.max_queued_requests


BLOCK = 256
"""Tokens by which a sequence's KV memory grows."""


@dataclass(frozen=True, slots=True)
class RankKvUse:
    """Use of one rank's KV memory, in bytes."""

    limit_bytes: int
    used_bytes: int
    """Accounted bytes: whole blocks, including those being freed."""
    held_bytes: int
    """Bytes that the rank reported last."""
    bytes_per_token: int
    bytes_per_sequence: int
    kept_bytes: int = 0
    """Part of the used bytes that the prefix cache keeps; it is evicted when sequences need memory."""

    def sequences_allowed(self, tokens: int) -> int:
        """Return the number of sequences of `tokens` tokens that the limit holds."""
        each = kv_blocks(tokens) * BLOCK * self.bytes_per_token + self.bytes_per_sequence
        return self.limit_bytes // each if each else 0


def kv_blocks(tokens: int) -> int:
    """Return the number of whole blocks for `tokens` tokens."""
    return -(-tokens // BLOCK)


@dataclass(frozen=True, slots=True)
class StepTiming:
    """Times of one step on one rank, in microseconds of its machine's monotonic clock."""

    step: int
    rank: RankId
    rows: int
    tokens: int
    is_decode: bool
    """True for a decode step, False for prefill."""
    started_us: int
    finished_us: int
    queue_us: int
    link_wait_us: int
    compute_us: int
    link_send_us: int
    context_tokens: int = 0
    """Mean length of the context that its rows attended to."""
    sequence: int = 0
    """Sequence of its first row; 0 without rows."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Load of one instance, and what it has cached of some prompts."""

    is_open: bool
    """True if it answers."""
    sequences: int
    """Number of sequences that run or wait there."""
    tokens_to_read: int
    """Number of their prompt tokens that are not yet computed."""
    shared_tokens: int
    """Tokens of the prompts that are cached there."""
    token_s: float | None = None
    """Predicted seconds to compute a token of a prompt; None before one was measured."""


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Statistics of the prefix cache and of every rank's KV memory."""

    enabled: bool
    queries: int
    """Number of prompts that were looked up."""
    hits: int
    query_tokens: int
    hit_tokens: int
    """Tokens that the cache supplied."""
    entries: int
    """Number of ended sequences and snapshots whose KV is kept."""
    entry_tokens: int
    evictions: int
    restored_tokens: int
    """Tokens whose KV came from disks."""
    peer_tokens: int
    """Those of them of which a rank has read KV of another machine's disk."""
    saved_tokens: int
    """Tokens whose KV the ranks were asked to save."""
    moved_tokens: int
    """Tokens whose KV came from the workers of another instance."""
    ranks: Mapping[RankId, RankKvUse]
    """Empty if KV memory has no limits."""


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """State of steps and sequences."""

    running: int
    waiting: int
    sequences_held: int
    """Sequences whose KV some rank may hold, including the prefix cache's."""
    kv_bytes: Mapping[RankId, int]
    """Bytes that each rank reported last."""
    steps_sent: int
    steps_completed: int
    """Steps that every rank answered."""
    steps_failed: int
    """Steps of which at least a part failed on at least one rank."""
    recent: tuple[StepTiming, ...]
    """Timings of the last steps, in order of arrival."""
    num_preemptions: int
    """Preemptions because KV memory ran out."""
    draft_tokens: int
    """Tokens that prompt lookup proposed."""
    accepted_tokens: int
    """Proposed tokens that were right."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """State of an engine, and totals of its requests since its start."""

    scheduler: SchedulerStats
    cache: CacheStats
    prompt_tokens: int
    """Prompt tokens of requests that got a first token, cached ones included."""
    generated_tokens: int
    finished: Mapping[FinishReason, int]


@dataclass(slots=True)
class RankTotals:
    """Total times of a rank, in microseconds. A step's parts follow each other, except that queue times overlap."""

    steps: int = 0
    queue_us: int = 0
    link_wait_us: int = 0
    compute_us: int = 0
    link_send_us: int = 0
    idle_us: int = 0
    """Time without a step."""

    def record(self, timing: StepTiming) -> None:
        """Add a completed step."""
        self.steps += 1
        self.queue_us += timing.queue_us
        self.link_wait_us += timing.link_wait_us
        self.compute_us += timing.compute_us
        self.link_send_us += timing.link_send_us

    @property
    def busy_us(self) -> int:
        return self.link_wait_us + self.compute_us + self.link_send_us

    def plus(self, other: RankTotals) -> RankTotals:
        return RankTotals(
            *(getattr(self, part.name) + getattr(other, part.name) for part in fields(RankTotals))
        )


@dataclass(frozen=True, slots=True)
class StepTotals:
    """Totals of one engine's steps and KV operations since its start."""

    ranks: Mapping[RankId, RankTotals]
    read_tokens: int
    """Prompt tokens that the first stage computed, including repeated ones."""
    steps_failed: int
    preemptions: int
    drafts: int
    """Number of rows with a draft."""
    draft_tokens: int
    accepted_tokens: int
    cache_query_tokens: int
    cache_hit_tokens: int
    cache_evictions: int
    cache_restored_tokens: int
    cache_peer_tokens: int
    cache_saved_tokens: int
    cache_moved_tokens: int
    resume_redrawn: int
    """Tokens that were delivered before a loss, and drawn again after it."""
    resume_disagreements: int
    """Those of them that differed."""
    resume_kept: int
    """Known tokens of resumed requests of which the stages behind the lost one kept their KV ..."""
    resume_replayed: int
    """... and those that every stage computed again."""


COUNTS = tuple(part.name for part in fields(StepTotals) if part.name != "ranks")
"""Names of the totals that are one number."""


FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
"""Bounds of the time to the first token: vLLM's."""
TOKEN_S = (
    *(0.001, 0.0025, 0.005),
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
"""Bounds of the time between tokens: vLLM's, and shorter ones for small models."""
REQUEST_S = (
    *(0.01, 0.03, 0.1),
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
"""Bounds of the time of a request: vLLM's, and shorter ones."""
_LARGEST_COUNT = 1 << 20
TOKENS = tuple(
    float(count) for power in range(7) for step in (1, 2, 5) if (count := step * 10**power) <= _LARGEST_COUNT
)
"""Bounds of numbers of tokens."""
RECOVERY_PARTS = ("detect", "plan", "load", "replay", "first_token")
"""Parts of a recovery. The first token comes within the replay."""


class Distribution:
    """A histogram: counts of values between given bounds."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        """Number of values up to each bound; the last entry counts the values above all bounds."""
        self.total = 0.0

    def record(self, value: float, times: int = 1) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times


class Metered(Protocol):
    """An engine whose totals a meter reads."""

    def totals(self) -> StepTotals: ...


_FADES, _LEAST_CHUNK = 0.95, 32
"""Factor by which each chunk lowers the weight of those before it, and tokens from which one counts: smaller ones mostly
read the weights."""


def prefill_name(stage: int, stages: int) -> str:
    """Return the name of the sums of a stage's chunks."""
    return f"prefill {stage}/{stages}"


Rank = tuple[RankId, str]
"""A rank and its node."""


class Meter:
    """Measurements of one replica of a model, over all of its engines.

    An engine lasts for one epoch. The meter stays when it is lost, unloaded or loaded again, so that counts only grow.
    Recording is cheap, because some of it happens for every token.
    """

    def __init__(self) -> None:
        self.prompt_tokens = 0
        """Prompt tokens of requests that got a first token."""
        self.generated_tokens = 0
        self.finished: Counter[FinishReason] = Counter()
        self.failed: Counter[str] = Counter()
        """Requests that ended with an error, by its name."""
        self.resumed = 0
        """Interrupted requests that another instance took over."""
        self.moved = 0
        """Requests that another instance took over while both served."""
        self.recovery_s = {part: Distribution(REQUEST_S) for part in RECOVERY_PARTS}
        self.given_up: Counter[str] = Counter()
        """Interrupted requests that were not continued, by the error's name."""
        self.pause_s = Distribution(REQUEST_S)
        self.way_predicted_s = {way: Distribution(REQUEST_S) for way in WAYS}
        self.way_taken_s = {way: Distribution(REQUEST_S) for way in WAYS}
        self.measured: dict[str, list[float]] = {}
        """Sums of measurements by which engines predict times; `engine/resumption.py` has their form."""
        self.loads = 0
        """Number of times that an instance began to serve."""
        self.losses: Counter[str] = Counter()
        """Times that an instance was lost or failed to load, by the error's name."""
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
        """Totals of earlier engines, as in `_counts`."""
        self._idle_us: dict[Rank, int] = {}
        """Idle times reported last: an estimate, which must not decrease."""
        self._engine: Metered | None = None
        self._nodes: Mapping[RankId, str] = {}

    # ---- the engine records

    def record_first_token(self, prompt_tokens: int, waited_s: float | None) -> None:
        """Record a request's first token; `waited_s` is None if only its prompt was requested."""
        self.prompt_tokens += prompt_tokens
        if waited_s is not None:
            self.first_token_s.record(waited_s)

    def record_tokens(self, tokens: int, since_last_s: float) -> None:
        """Record further tokens of a request, from one step."""
        self.between_tokens_s.record(since_last_s / tokens, tokens)

    def record_resumed(self, paused_s: float) -> None:
        """Record that an instance took over an interrupted request."""
        self.resumed += 1
        self.pause_s.record(paused_s)

    def record_recovery(self, parts: Mapping[str, float]) -> None:
        """Record the seconds of a complete recovery's parts."""
        for part, seconds in parts.items():
            self.recovery_s[part].record(seconds)

    def record_chunk(self, timing: StepTiming, stages: int) -> None:
        """Add a prefill step of a stage's first rank to the sums of weights, contexts, a token's seconds, and their products."""
        if timing.tokens < _LEAST_CHUNK or timing.compute_us <= 0 or timing.rank.rank:
            return
        # Its tokens have contexts from the chunk's start to its end.
        x, y = timing.context_tokens + timing.tokens / 2, timing.compute_us / 1e6 / timing.tokens
        name, new = prefill_name(timing.rank.stage, stages), (1.0, x, y, x * x, x * y)
        before = self.measured.get(name, [0.0] * len(new))
        self.measured[name] = [_FADES * old + one for old, one in zip(before, new, strict=True)]

    def record_way(self, way: Way, predicted_s: float | None, taken_s: float) -> None:
        """Record a way back that has ended: its predicted time, if there was a prediction, and the time it took; seconds."""
        if predicted_s is not None:
            self.way_predicted_s[way].record(predicted_s)
        self.way_taken_s[way].record(taken_s)

    def record_end(self, request: EndedRequest) -> None:
        """Record the end of a request; distributions contain only complete answers."""
        self.finished[request.reason] += 1
        if request.error is not None:
            self.failed[type(request.error).__name__] += 1
        self.queue_s.record(request.queue_s)
        if request.reason not in ("stop", "length") or request.opened_at is None:
            return
        first = request.ended_at if request.first_token_at is None else request.first_token_at
        last = first if request.last_token_at is None else request.last_token_at
        self.prefill_s.record(first - request.opened_at)
        self.decode_s.record(last - first)
        self.inference_s.record(last - request.opened_at)
        self.whole_s.record(request.ended_at - request.submitted_at)
        self.prompt_lengths.record(request.prompt_tokens)
        self.answer_lengths.record(request.completion_tokens)

    # ---- the owner of the engine records

    @contextmanager
    def attached(self, engine: Metered, nodes: Mapping[RankId, str]) -> Generator[None]:
        """Count the steps of `engine` while the context lasts, and keep their totals after it.

        Args:
            engine: the engine.
            nodes: node of each of its ranks.
        """
        self._engine, self._nodes = engine, nodes
        self.loads += 1
        try:
            yield
        finally:
            counts, ranks = self.counts(), self.ranks()
            self._counts, self._ranks, self._engine = Counter(counts), ranks, None

    def count_loss(self, error: RingError | None) -> None:
        """Count that an instance was lost or could not be loaded."""
        if error is not None:
            self.losses[type(error).__name__] += 1

    # ---- reports

    def counts(self) -> Mapping[str, int]:
        """Return each of `COUNTS`."""
        now = None if self._engine is None else self._engine.totals()
        return {name: self._counts[name] + (0 if now is None else int(getattr(now, name))) for name in COUNTS}

    def ranks(self) -> dict[Rank, RankTotals]:
        """Return the total times of every rank, including ranks of earlier engines."""
        by_rank = {rank: totals.plus(RankTotals()) for rank, totals in self._ranks.items()}
        if self._engine is not None:
            for place, totals in self._engine.totals().ranks.items():
                rank = (place, self._nodes.get(place, ""))
                by_rank[rank] = by_rank.get(rank, RankTotals()).plus(totals)
        for rank, totals in by_rank.items():
            totals.idle_us = self._idle_us[rank] = max(self._idle_us.get(rank, 0), totals.idle_us)
        return by_rank
