"""Latencies and throughput from what was seen of each request. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby, pairwise
from typing import Any

STOPPED = "stopped"
"""The error of a request that was under way when a person ended the load: it is no fault of the server."""
_PERCENTILES = (50, 95, 99)


@dataclass(slots=True)
class Record:
    """One request, seen from outside. Seconds after the start of the run."""

    number: int
    sent_s: float
    arrivals_s: list[float] = field(default_factory=list[float])
    """Of every event that said something; events that came in one read have one time."""
    ended_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    """By the server's usage; where it tells none, an event counts as one."""
    has_usage: bool = False
    status: int | None = None
    """Of HTTP."""
    finish_reason: str | None = None
    error: str | None = None
    """A kind, and after a colon what else is known."""
    asked_tokens: int = 0

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token."""
        return self.arrivals_s[0] - self.sent_s if self.arrivals_s else None

    @property
    def tokens_per_s(self) -> float | None:
        """After the first chunk; None where all came at once."""
        chunks = self.chunks()
        if len(chunks) < 2:  # noqa: PLR2004 - time passes between two
            return None
        return (self.output_tokens - chunks[0][1]) / (chunks[-1][0] - chunks[0][0])

    @property
    def error_kind(self) -> str | None:
        return None if self.error is None else self.error.partition(":")[0]

    def chunks(self) -> list[tuple[float, int]]:
        """When something came, and in how many events."""
        return [(arrival, len(list(events))) for arrival, events in groupby(self.arrivals_s)]

    def between_chunks_s(self) -> list[float]:
        """How long nothing came, each time."""
        return [later - earlier for (earlier, _), (later, _) in pairwise(self.chunks())]

    def inter_token_s(self) -> list[float]:
        """Time between tokens, a value for each event after the first chunk.

        A chunk may bring several events and an event several tokens: the wait for a chunk is shared out evenly among its
        tokens. An event is taken to bring as many as they bring on average, because only the sum is told.
        """
        chunks = self.chunks()
        if len(chunks) < 2:  # noqa: PLR2004 - a gap has two ends
            return []
        first = chunks[0][1]
        per_event = max(1.0, (self.output_tokens - first) / (len(self.arrivals_s) - first))
        return [
            (later - earlier) / (events * per_event)
            for (earlier, _), (later, events) in pairwise(chunks)
            for _ in range(events)
        ]


@dataclass(frozen=True, slots=True)
class Distribution:
    """What half, 95 % and 99 % of the values do not exceed; of speeds, what so many reach."""

    mean: float
    p50: float
    p95: float
    p99: float
    worst: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Distribution | None:
        """Of times. None where there is nothing to measure."""
        if not values:
            return None
        ordered = sorted(values)
        p50, p95, p99 = (percentile(ordered, share) for share in _PERCENTILES)
        return cls(math.fsum(ordered) / len(ordered), p50, p95, p99, ordered[-1])

    @classmethod
    def of_speeds(cls, values: Sequence[float]) -> Distribution | None:
        """As `of`, for values of which the smallest are the worst."""
        times = cls.of([-value for value in values])
        return times and cls(-times.mean, -times.p50, -times.p95, -times.p99, -times.worst)


def percentile(ordered: Sequence[float], share: float) -> float:
    """Between the two nearest ranks, as NumPy's default has it. `ordered` ascends and is not empty."""
    place = (len(ordered) - 1) * share / 100
    low, high = math.floor(place), math.ceil(place)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True, slots=True)
class Summary:
    """A run in numbers. Latencies and tokens are those of the requests that were answered to their end."""

    requests: int
    completed: int
    stopped: int
    """Under way when the load was ended from outside."""
    shorter: int
    """Answers with fewer tokens than were asked for."""
    errors: dict[str, int]
    """How many requests ended in each kind."""
    duration_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    tokens_per_event: float | None
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    request_tokens_per_s: Distribution | None
    """Of each request, after its first token."""
    ttft: Distribution | None
    inter_token: Distribution | None
    between_chunks: Distribution | None
    end_to_end: Distribution | None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def summarise(records: Iterable[Record], duration_s: float) -> Summary:
    """All of a run that lasted so long."""
    records = list(records)
    completed = [record for record in records if record.error is None]
    kinds = Counter(record.error_kind for record in records if record.error_kind is not None)
    prompt = sum(record.prompt_tokens for record in completed)
    output = sum(record.output_tokens for record in completed)
    events = sum(len(record.arrivals_s) for record in completed)
    seconds = max(duration_s, 1e-9)
    return Summary(
        requests=len(records),
        completed=len(completed),
        stopped=kinds.pop(STOPPED, 0),
        shorter=sum(record.output_tokens < record.asked_tokens for record in completed),
        errors=dict(kinds),
        duration_s=duration_s,
        prompt_tokens=prompt,
        cached_tokens=sum(record.cached_tokens for record in completed),
        output_tokens=output,
        tokens_per_event=output / events if events else None,
        requests_per_s=len(completed) / seconds,
        output_tokens_per_s=output / seconds,
        total_tokens_per_s=(prompt + output) / seconds,
        request_tokens_per_s=Distribution.of_speeds(
            [record.tokens_per_s for record in completed if record.tokens_per_s is not None]
        ),
        ttft=Distribution.of([record.ttft_s for record in completed if record.ttft_s is not None]),
        inter_token=Distribution.of([gap for record in completed for gap in record.inter_token_s()]),
        between_chunks=Distribution.of([gap for record in completed for gap in record.between_chunks_s()]),
        end_to_end=Distribution.of([record.ended_s - record.sent_s for record in completed]),
    )
