"""Outcome of a simulated pipeline: times of tokens, and the work of every stage, in seconds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, inf


@dataclass(frozen=True, slots=True)
class Work:
    """One step on one stage."""

    step: int
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Bubble:
    """A stage without work between two steps."""

    begin_s: float
    end_s: float

    @property
    def length_s(self) -> float:
        return self.end_s - self.begin_s


@dataclass(frozen=True, slots=True)
class StageUse:
    """Work of a stage, in order, without steps that cost nothing."""

    work: tuple[Work, ...]

    def busy_s(self, begin_s: float = 0.0, end_s: float = inf) -> float:
        """Return the busy seconds within a span of time."""
        return sum(max(0.0, min(one.end_s, end_s) - max(one.begin_s, begin_s)) for one in self.work)

    def utilisation(self, begin_s: float, end_s: float) -> float:
        """Return the busy share of a span of time."""
        return self.busy_s(begin_s, end_s) / (end_s - begin_s)

    def bubbles(self, begin_s: float = 0.0, end_s: float = inf) -> tuple[Bubble, ...]:
        """Return the gaps without work between two steps, within a span of time."""
        gaps = (
            Bubble(max(one.end_s, begin_s), min(following.begin_s, end_s))
            for one, following in pairwise(self.work)
        )
        return tuple(gap for gap in gaps if gap.length_s > 0)


@dataclass(frozen=True, slots=True)
class SequenceTimes:
    """Times at which the head received each of a sequence's tokens; there is one at least."""

    tokens_s: tuple[float, ...]

    @property
    def first_token_s(self) -> float:
        return self.tokens_s[0]

    @property
    def end_s(self) -> float:
        return self.tokens_s[-1]

    def gaps_s(self, begin_s: float = 0.0, end_s: float = inf) -> Iterator[float]:
        """Yield the seconds from token to token, within a span of time."""
        for earlier, later in pairwise(self.tokens_s):
            if begin_s <= earlier and later <= end_s:
                yield later - earlier


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run of a simulation."""

    elapsed_s: float
    """Time of the last event at the head."""
    stages: tuple[StageUse, ...]
    sequences: Mapping[int, SequenceTimes]
    """Those that got a token."""
    steps: int
    most_in_flight: int
    """Steps with rows that the last stage had not answered."""

    def tokens_per_s(self, begin_s: float, end_s: float) -> float:
        """Return the throughput within a span of time."""
        came = sum(begin_s < at <= end_s for times in self.sequences.values() for at in times.tokens_s)
        return came / (end_s - begin_s)

    def itl_s(self, percent: float, begin_s: float = 0.0, end_s: float = inf) -> float:
        """Return a percentile (nearest rank) of the times between tokens of all sequences; 0 without any."""
        gaps = sorted(gap for times in self.sequences.values() for gap in times.gaps_s(begin_s, end_s))
        return gaps[max(0, ceil(percent / 100 * len(gaps)) - 1)] if gaps else 0.0
