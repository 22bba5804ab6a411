"""Load of a simulated instance: requests, counts of micro-batches, measurements and the service level. Pure.

The streams of a micro-batch that have a row in each of its steps are one number.
"""

from __future__ import annotations

import csv
import heapq
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from math import ceil, inf
from typing import Any, Literal, NamedTuple, cast, get_args

import numpy as np

from mlx_ring.core.engine_stats import BLOCK
from mlx_ring.core.errors import ConfigError
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
        return min(1.0, (self.prefill_s[stage] + self.decode_s[stage]) / self.span_s)


def percentile(values: Iterable[tuple[float, int]], percent: float) -> float:
    """Return a percentile (nearest rank) of values with their numbers; 0 without any."""
    ordered = sorted(values)
    left = ceil(percent / 100 * sum(number for _, number in ordered))
    for value, number in ordered:
        left -= number
        if left <= 0:
            return value
    return 0.0


# ---- load and service level

Arrivals = Literal["poisson", "even", "burst"]
ARRIVALS: tuple[Arrivals, ...] = get_args(Arrivals)
_SOONER = 1.1
"""Factor by which a run may have more tokens than its requests on average."""


class Lengths(NamedTuple):
    """Numbers of tokens from `low` to `high`, all equally likely."""

    low: int
    high: int

    @property
    def mean(self) -> float:
        return (self.low + self.high) / 2

    def draw(self, random: np.random.Generator) -> int:
        """Return one of them."""
        return int(random.integers(self.low, self.high + 1))


class Recorded(NamedTuple):
    """A recorded request."""

    prompt: int
    answer: int
    at_s: float | None = None


def read_recorded(text: str, where: str) -> tuple[Recorded, ...]:
    """Return the requests of a file of CSV or JSON lines.

    Raises:
        ConfigError: a line is no request, or they are not in order of arrival.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    is_json = bool(lines) and lines[0].lstrip().startswith("{")
    entries = map(_json_line, lines) if is_json else csv.DictReader(lines)
    found = [_one_recorded(entry, f"{where}, request {number}") for number, entry in enumerate(entries, 1)]
    if not found:
        raise ConfigError(f"{where} has no requests: give the columns prompt and answer.")
    times = [each.at_s for each in found if each.at_s is not None]
    if len(times) not in (0, len(found)) or any(later < sooner for sooner, later in pairwise(times)):
        raise ConfigError(
            f"{where}: `at` must be the seconds of every request, in order of arrival, or of none."
        )
    return tuple(found)


def _json_line(line: str) -> object:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _one_recorded(entry: object, where: str) -> Recorded:
    try:
        fields = cast("Mapping[str, Any]", entry)
        at = fields.get("at")
        found = Recorded(
            int(fields["prompt"]), int(fields["answer"]), None if at in (None, "") else float(at)
        )
    except (TypeError, KeyError, ValueError, AttributeError):
        raise ConfigError(
            f"{where}: it must have a prompt and an answer, as whole numbers of tokens."
        ) from None
    if min(found.prompt, found.answer) < 1:
        raise ConfigError(
            f"{where}: prompt {found.prompt} and answer {found.answer} must be 1 token or more."
        )
    return found


@dataclass(frozen=True)
class Load:
    """Requests and how they arrive."""

    prompt: Lengths
    answer: Lengths
    arrivals: Arrivals = "poisson"
    burst: int = 8
    """Number of requests that arrive at once, with bursts."""
    prefix_hits: float = 0.0
    """Share of each prompt that the prefix cache supplies."""
    recorded: tuple[Recorded, ...] = ()
    """Requests that are repeated in their order, in place of the lengths; with times, they arrive as recorded."""
    seed: int = 0

    @property
    def mean_prompt(self) -> float:
        return self._mean([each.prompt for each in self.recorded], self.prompt)

    @property
    def mean_answer(self) -> float:
        return self._mean([each.answer for each in self.recorded], self.answer)

    @staticmethod
    def _mean(recorded: Sequence[int], lengths: Lengths) -> float:
        return sum(recorded) / len(recorded) if recorded else lengths.mean

    @property
    def longest(self) -> tuple[int, int]:
        """Longest prompt and longest answer."""
        if not self.recorded:
            return self.prompt.high, self.answer.high
        return max(each.prompt for each in self.recorded), max(each.answer for each in self.recorded)

    def requests(self, count: int, rate: float) -> list[SimulatedRequest]:
        """Return requests in order of arrival.

        Args:
            count: number of requests.
            rate: requests per second on average.
        """
        return [each._replace(at_s=each.at_s / rate) for each in islice(self.at_one_per_second(), count)]

    def at_one_per_second(self) -> Iterator[SimulatedRequest]:
        """Yield the requests without end, one per second on average."""
        random, moments = np.random.default_rng(self.seed), self._moments()
        for number, at_s in enumerate(moments):
            if self.recorded:
                prompt, answer, _ = self.recorded[number % len(self.recorded)]
            else:
                prompt, answer = self.prompt.draw(random), self.answer.draw(random)
            cached = min(prompt - 1, int(self.prefix_hits * prompt))
            yield SimulatedRequest(at_s, prompt, answer, cached)

    def _moments(self) -> Iterator[float]:
        """Yield the times of arrival for one request per second."""
        random, at = np.random.default_rng(self.seed + 1), 0.0
        recorded = [each.at_s for each in self.recorded if each.at_s is not None]
        if recorded:
            # The pause between two rounds is a mean one.
            pause = (recorded[-1] - recorded[0]) / max(1, len(recorded) - 1) or 1.0
            each = [later - sooner for sooner, later in pairwise(recorded)]
            while True:
                for gap in (pause, *each):
                    at += gap / pause
                    yield at
        while True:
            if self.arrivals == "burst":
                at += float(random.exponential()) * self.burst
                yield from (at for _ in range(self.burst))
            else:
                at += 1.0 if self.arrivals == "even" else float(random.exponential())
                yield at


@dataclass(frozen=True, slots=True)
class ServiceLevel:
    """Times within which a percentage of first tokens, and of further tokens, must come."""

    first_token_s: float | None = None
    between_tokens_s: float | None = None
    percent: float = 95.0

    def holds(self, outcome: Outcome) -> bool:
        """Return True if a run kept it, and requests did not queue up."""
        return not outcome.is_overrun and not self.broken(outcome)

    def broken(self, outcome: Outcome) -> str:
        """Return the kind of times that took too long, "first token" or "between tokens"; empty if none did."""
        if self.first_token_s is not None and self._late(
            self.first_token_s, [(wait, 1) for wait in outcome.first_token_s]
        ):
            return "first token"
        if self.between_tokens_s is not None and self._late(
            self.between_tokens_s, [(gap.gap_s, gap.streams) for gap in outcome.gaps]
        ):
            return "between tokens"
        return ""

    def _late(self, limit_s: float, times: Sequence[tuple[float, int]]) -> bool:
        total = sum(number for _, number in times)
        late = sum(number for seconds, number in times if seconds > limit_s)
        return late > self._allowed(total)

    def is_lost(self, measured: int, answer_tokens: float) -> Callable[[Outcome], bool]:
        """Return a function that tells early that a run cannot keep the level.

        Args:
            measured: number of measured requests.
            answer_tokens: mean length of their answers.
        """
        allowed = [
            self._allowed(measured),
            self._allowed(int(_SOONER * measured * max(0.0, answer_tokens - 1))),
        ]
        limits = (self.first_token_s, self.between_tokens_s)
        seen, late = [0, 0], [0, 0]

        def is_lost(outcome: Outcome) -> bool:
            first, between = (inf if limit is None else limit for limit in limits)
            late[0] += sum(wait > first for wait in outcome.first_token_s[seen[0] :])
            late[1] += sum(gap.streams for gap in outcome.gaps[seen[1] :] if gap.gap_s > between)
            seen[:] = len(outcome.first_token_s), len(outcome.gaps)
            return late[0] > allowed[0] or late[1] > allowed[1]

        return is_lost

    def _allowed(self, total: int) -> int:
        """Return the number of times that may be too long; the percentile is that of the nearest rank."""
        return total - ceil(self.percent / 100 * total)
