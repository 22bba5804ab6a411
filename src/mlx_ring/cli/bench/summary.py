"""Latencies and throughput from what was seen of each request. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

_PERCENTILES = (50, 95, 99)


@dataclass(slots=True)
class Record:
    """One request, seen from outside. Seconds after the start of the run."""

    number: int
    sent_s: float
    arrivals_s: list[float] = field(default_factory=list[float])
    """Of every event that said something."""
    ended_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token."""
        return self.arrivals_s[0] - self.sent_s if self.arrivals_s else None

    def inter_token_s(self) -> list[float]:
        """Time between tokens. Events may bring several: each gap is shared out among the tokens of one event."""
        events = len(self.arrivals_s)
        if events < 2:  # noqa: PLR2004 - a gap has two ends
            return []
        tokens_per_event = max(1.0, (self.output_tokens - 1) / (events - 1))
        return [(later - earlier) / tokens_per_event for earlier, later in pairwise(self.arrivals_s)]


@dataclass(frozen=True, slots=True)
class Distribution:
    """Seconds."""

    mean: float
    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Distribution | None:
        """None where there is nothing to measure."""
        if not values:
            return None
        ordered = sorted(values)
        p50, p95, p99 = (percentile(ordered, share) for share in _PERCENTILES)
        return cls(sum(ordered) / len(ordered), p50, p95, p99)


def percentile(ordered: Sequence[float], share: float) -> float:
    """Between the two nearest ranks, as NumPy's default has it. `ordered` ascends and is not empty."""
    place = (len(ordered) - 1) * share / 100
    low, high = math.floor(place), math.ceil(place)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True, slots=True)
class Summary:
    """A run in numbers."""

    requests: int
    completed: int
    errors: dict[str, int]
    """How many requests ended in each."""
    duration_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft: Distribution | None
    inter_token: Distribution | None
    end_to_end: Distribution | None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def summarise(records: Iterable[Record], duration_s: float) -> Summary:
    """All of a run that lasted so long."""
    records = list(records)
    completed = [record for record in records if record.error is None]
    prompt = sum(record.prompt_tokens for record in completed)
    output = sum(record.output_tokens for record in completed)
    seconds = max(duration_s, 1e-9)
    return Summary(
        requests=len(records),
        completed=len(completed),
        errors=dict(Counter(record.error for record in records if record.error is not None)),
        duration_s=duration_s,
        prompt_tokens=prompt,
        cached_tokens=sum(record.cached_tokens for record in completed),
        output_tokens=output,
        requests_per_s=len(completed) / seconds,
        output_tokens_per_s=output / seconds,
        total_tokens_per_s=(prompt + output) / seconds,
        ttft=Distribution.of([record.ttft_s for record in completed if record.ttft_s is not None]),
        inter_token=Distribution.of([gap for record in completed for gap in record.inter_token_s()]),
        end_to_end=Distribution.of([record.ended_s - record.sent_s for record in completed]),
    )
