"""What the engine tells of itself: to `/health`, to metrics, and to whoever watches for stuck workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from mlx_ring.core.types import FinishReason
from mlx_ring.engine.executor import RankId
from mlx_ring.engine.kv_budget import RankKvUse


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
