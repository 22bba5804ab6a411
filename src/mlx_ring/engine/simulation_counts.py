"""Counts of a simulated instance, and what is measured on it. Pure.

The streams of a micro-batch that have a row in each of its steps are one number.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import ceil, inf
from typing import NamedTuple

from mlx_ring.core.engine_stats import BLOCK
from mlx_ring.engine.decode import MicroBatch


class SimulatedRequest(NamedTuple):
    """A request that arrives at a time."""

    at_s: float
    prompt_tokens: int
    answer_tokens: int
    cached_tokens: int = 0
    """Prompt tokens that the prefix cache supplies; fewer than all."""


class Span(NamedTuple):
    """Part of a prompt in a step."""

    start: int
    """Tokens before it."""
    tokens: int


# ---- micro-batches


@dataclass(slots=True, eq=False)
class Stream:
    """Counts of one request, for which the engine would have a sequence."""

    id: int
    request: SimulatedRequest
    fill_to: int
    max_length: int
    scheduled: int = 0
    reused: int = 0
    has_begun: bool = False
    admitted_at: float = 0.0
    first_token_at: float | None = None
    token_at: float = 0.0
    """Time of its last token."""
    generation: int = 0
    replays: int = 0
    is_resumed: bool = False
    is_catching_up: bool = False
    in_flight: list[Sent] = field(default_factory=list["Sent"])
    """Steps in flight that sample a token of it; not kept while it is counted."""
    cohort: Cohort | None = None
    joined: int = 0
    """Number of the micro-batch's step from which on it is counted, or 0."""

    def can_step(self, steps_ahead: int) -> bool:
        """Return True if a decode row can be sent."""
        if self.joined and self.cohort is not None:
            return len(self.cohort.in_flight) < steps_ahead
        return len(self.in_flight) < steps_ahead and self.scheduled + 1 < self.max_length

    def chunk_end(self, most: int) -> int:
        """Return the length after a chunk of at most `most` tokens."""
        return min(self.scheduled + most, self.fill_to)

    def feed(self, tokens: int) -> None:
        """Count tokens that are sent with a step."""
        self.scheduled += tokens

    @property
    def length(self) -> int:
        """Number of known tokens."""
        return self.fill_to if self.scheduled < self.fill_to else self.scheduled + 1 - len(self.in_flight)


Change = tuple[int, int, int, Stream]
"""Step of a micro-batch at which a counted stream changes, its number, the step from which it was counted, and itself."""


@dataclass(slots=True, eq=False)
class Cohort:
    """Counts of a micro-batch."""

    batch: MicroBatch[Stream]
    counted: int = 0
    """Streams that had a row in each step since they joined, and have one in the next."""
    context: int = 0
    """Sum of their lengths."""
    single: dict[int, Stream] = field(default_factory=dict[int, Stream])
    """The other streams."""
    sent: int = 0
    """Number of decode steps that were sent."""
    answered: int = 0
    answered_at: float = 0.0
    in_flight: deque[Sent] = field(default_factory=deque["Sent"])
    ends: list[Change] = field(default_factory=list[Change])
    """Last steps of streams."""
    blocks: list[Change] = field(default_factory=list[Change])
    """Steps for which streams need another block of KV memory."""

    def count_in(self, stream: Stream, *, needs_blocks: bool) -> None:
        """Count a stream that has a row in each of the micro-batch's steps in flight."""
        del self.single[stream.id]
        stream.joined = joined = self.sent
        self.counted += 1
        self.context += stream.scheduled
        left = stream.max_length - 1 - stream.scheduled
        heapq.heappush(self.ends, (joined + left, stream.id, joined, stream))
        room = -stream.scheduled % BLOCK
        if needs_blocks and room < left:
            heapq.heappush(self.blocks, (joined + room + 1, stream.id, joined, stream))

    def count_out(self, stream: Stream) -> None:
        """Look at a counted stream alone again."""
        stream.scheduled += self.sent - stream.joined
        self.counted -= 1
        self.context -= stream.scheduled
        stream.in_flight = list(self.in_flight)
        for sent in self.in_flight:
            if sent.number > stream.joined:
                sent.counted -= 1
                sent.single.append((stream, stream.generation))
        if self.answered > stream.joined:
            stream.token_at = self.answered_at
        stream.joined = 0
        self.single[stream.id] = stream

    def count_out_until(self, changes: list[Change], number: int) -> None:
        """Look alone at the counted streams that change at a step or before; `changes` are the ends or the blocks."""
        while changes and changes[0][0] <= number:
            _, _, joined, stream = heapq.heappop(changes)
            if stream.joined == joined and stream.cohort is self:
                self.count_out(stream)


@dataclass(slots=True, eq=False)
class Sent:
    """A step in flight."""

    step: int
    tokens: int
    cohort: Cohort | None = None
    """Counts of the micro-batch of a decode step."""
    number: int = 0
    """Number of the step among those of its micro-batch."""
    counted: int = 0
    """Rows of counted streams."""
    single: list[tuple[Stream, int]] = field(default_factory=list[tuple[Stream, int]])
    """Other streams of which it samples a token, and their generation."""
    compute_us: list[int] = field(default_factory=list[int])
    """Time of each stage."""
    sampled_at: float = 0.0


# ---- the outcome


class Gap(NamedTuple):
    """Time between two tokens, for some streams at once."""

    at_s: float
    gap_s: float
    streams: int


@dataclass(slots=True)
class Outcome:
    """Measurements of the requests and steps within a span of time."""

    begin_s: float
    end_s: float
    first_token_s: list[float] = field(default_factory=list[float])
    """Seconds from the arrival to the first token, of the requests that arrived within the span."""
    request_s: list[float] = field(default_factory=list[float])
    """Seconds of the whole request, of those of them that ended."""
    gaps: list[Gap] = field(default_factory=list[Gap])
    tokens: int = 0
    """Tokens of answers."""
    prefill_s: list[float] = field(default_factory=list[float])
    """Seconds in which each stage computed prompts ..."""
    decode_s: list[float] = field(default_factory=list[float])
    """... and decode steps."""
    link_s: list[float] = field(default_factory=list[float])
    """Seconds in which the link behind each stage was busy."""
    waits_for_memory_s: float = 0.0
    """Seconds in which requests waited for KV memory ..."""
    waits_for_place_s: float = 0.0
    """... and because as many ran as may run."""
    rows: int = 0
    """Rows of all decode steps ..."""
    steps: int = 0
    """... and their number."""
    preemptions: int = 0
    is_overrun: bool = False
    """True if the simulation ended because too many requests waited."""
    elapsed_s: float = 0.0
    """Time of the last event."""

    @property
    def span_s(self) -> float:
        return max(self.end_s - self.begin_s, 1e-9)

    def first_token_within(self, percent: float) -> float:
        """Return a percentile (nearest rank) of the seconds to the first token; infinite if the simulation was ended."""
        return inf if self.is_overrun else percentile(((wait, 1) for wait in self.first_token_s), percent)

    def between_tokens_within(self, percent: float) -> float:
        """Return a percentile of the seconds from token to token of all streams."""
        return percentile(((gap.gap_s, gap.streams) for gap in self.gaps), percent)

    def busy(self, stage: int) -> float:
        """Return the share of the span in which a stage computed."""
        return (self.prefill_s[stage] + self.decode_s[stage]) / self.span_s


def percentile(values: Iterable[tuple[float, int]], percent: float) -> float:
    """Return a percentile (nearest rank) of values with their numbers; 0 without any."""
    ordered = sorted(values)
    left = ceil(percent / 100 * sum(number for _, number in ordered))
    for value, number in ordered:
        left -= number
        if left <= 0:
            return value
    return 0.0
