"""What an engine has done since it began: numbers that only grow. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from mlx_ring.engine.executor import RankId
from mlx_ring.rpc.protos import step_pb2


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
