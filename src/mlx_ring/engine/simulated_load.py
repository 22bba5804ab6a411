"""Load of a simulated instance: requests, counts of micro-batches, measurements and the service level. Pure.

The streams of a micro-batch that have a row in each of its steps are one number.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, inf
from typing import NamedTuple, Protocol

from mlx_ring.core.engine_stats import BLOCK, Policy
from mlx_ring.core.types import RankId
from mlx_ring.engine.decode import MicroBatch, MicroBatches
from mlx_ring.engine.kv_budget import RankKv
from mlx_ring.engine.prefill import BURST_S, Prefilling, PromptKv, SentSteps
from mlx_ring.engine.step_times import ChunkSizer
from mlx_ring.planner.request import SimulatedRequest


class Span(NamedTuple):
    """Part of a prompt in a step."""

    start: int
    """Tokens before it."""
    tokens: int


class StepCosts(Protocol):
    """Seconds of steps and messages."""

    def decode_s(self, stage: int, rows: int, context_tokens: float) -> float:
        """Return the seconds of a decode step on a stage, by its rows and their mean context."""
        ...

    def chunk_s(self, stage: int, spans: Sequence[Span]) -> float:
        """Return the seconds of a prefill step on a stage."""
        ...

    def hop_s(self, stage: int, tokens: int) -> tuple[float, float]:
        """Return the seconds until a step's activations have arrived behind a stage, and for which they occupy the link."""
        ...

    def back_s(self, rows: int) -> float:
        """Return the seconds from the last stage to the first, with drawn tokens."""
        ...

    def head_s(self) -> float:
        """Return the seconds from the head to a stage, and from there back."""
        ...


class SimulatedInstance(NamedTuple):
    """Stages of an instance."""

    costs: StepCosts
    """Times of its stages and links."""
    stages: int
    kv: Mapping[RankId, RankKv] | None = None
    """KV memory of each rank; None for no limit."""
    long_chunk: int = 0
    """Most tokens of a prompt alone in a step, in place of the policy's; 0 for the policy's."""


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

    @property
    def next_change(self) -> int:
        """Number of the step at which a stream is looked at alone again; 0 if one is now, or if there is none."""
        if self.single or not self.counted:
            return 0
        return min(changes[0][0] for changes in (self.ends, self.blocks) if changes)

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
    sampled_at: float = inf
    """Time at which the last stage has drawn its tokens; infinite as long as it is not known."""


@dataclass(slots=True)
class StepCounts:
    """Counts of an instance's steps."""

    sent: int = 0
    completed: int = 0
    """Numbers of the last step that was sent, and of the last one that all stages have answered."""
    prefills: int = 0
    """Number of prefill steps in flight."""
    last_s: float = 0.0
    """Time of the last arrival or answer."""


# ---- prompts


class Prompts(Prefilling[Stream, Span]):
    """Prompts in prefill, which know without a look at each stream whether others decode beside them.

    Questions are answered anew only after a change.
    """

    def __init__(
        self,
        policy: Policy,
        stages: int,
        *,
        batches: MicroBatches[Stream],
        running: Mapping[int, Stream],
        in_flight: SentSteps,
        sizer: ChunkSizer,
        kv: PromptKv[Stream],
    ) -> None:
        super().__init__(
            policy,
            stages,
            batches=batches,
            in_flight=in_flight,
            sizer=sizer,
            kv=kv,
            running=running,
            make_chunk=_span,
        )
        # Times and numbers of streams, the least time first. Entries that hold no more are dropped when they come first.
        self._admitted: list[tuple[float, int]] = []
        """Admissions of the prompts."""
        self._first_tokens: list[tuple[float, int]] = []
        self._newest: list[tuple[float, int]] = []
        """First tokens of the streams that decode, and their admissions, negative."""
        self.waits_for_time = False
        """True if a step was not made because too little time is saved for it."""
        self._spares: bool | None = None
        self._within: dict[int, bool] = {}

    def add(self, sequence: Stream) -> None:
        """Add an admitted prompt."""
        super().add(sequence)
        heapq.heappush(self._admitted, (sequence.admitted_at, sequence.id))
        self._forget()

    def remove(self, sequence: int) -> None:
        """Remove a prompt, if it is one; call it also before a stream ends or is preempted."""
        super().remove(sequence)
        self._forget()

    @property
    def sizer(self) -> ChunkSizer:
        """Sizes of the chunks."""
        return self._sizer

    def lone_first(self) -> Stream | None:
        """Return the first prompt if its chunks are the next ones, until it is read; None if others may go between them."""
        first, *others = self
        most = self._policy.prefill_chunk
        if not first.has_begun or any(self._left(other) <= most for other in others):
            return None
        return first

    def read(self, first: Stream, tokens: int, step: int) -> Span:
        """Count the next chunk of the first prompt, which is not its last, as sent."""
        self._long = None if self._left(first) <= self._policy.prefill_chunk else first.id
        self._within.clear()
        self.last_step = step
        self._sizer.sent(step, tokens, beside_decode=True)
        span = Span(first.scheduled, tokens)
        first.feed(tokens)
        return span

    def note_decoding(self, stream: Stream) -> None:
        """Note a stream that decodes from now on, or that has its first token."""
        heapq.heappush(self._newest, (-stream.admitted_at, stream.id))
        if stream.first_token_at is not None:
            heapq.heappush(self._first_tokens, (stream.first_token_at, stream.id))
        self._spares = None

    def _forget(self) -> None:
        self._spares = None
        self._within.clear()

    def next_chunks(self) -> list[tuple[Stream, Span]]:
        """Return the chunks of the next step, counted as sent; empty if nothing may be sent now."""
        self.waits_for_time = False
        return super().next_chunks()

    def _may_go(self) -> bool:
        self.waits_for_time = super()._may_go()
        return self.waits_for_time

    def _fill(self, size: int, room: int) -> tuple[list[tuple[Stream, Span]], int, int]:
        self._within.clear()
        return super()._fill(size, room)

    def _left_within(self, most: int) -> bool:
        if most not in self._within:
            self._within[most] = super()._left_within(most)
        return self._within[most]

    def has_to_spare(self) -> bool:
        """Return True if a stream that did not arrive with the prompts is decoding."""
        if self._spares is None:
            self._spares = self._look_for_others()
        return self._spares

    def _look_for_others(self) -> bool:
        _drop_first(self._admitted, self._is_prompt)
        _drop_first(self._newest, lambda time, stream: self._decodes(-time, stream))
        _drop_first(self._first_tokens, lambda _, stream: stream in self._batches)
        came = self._admitted[0][0]
        return bool(
            (self._newest and -self._newest[0][0] > came + BURST_S)
            or (self._first_tokens and self._first_tokens[0][0] < came)
        )

    def _is_prompt(self, admitted_at: float, stream: int) -> bool:
        return stream in self._line and self._line[stream].admitted_at == admitted_at

    def _decodes(self, admitted_at: float, stream: int) -> bool:
        return stream in self._batches and self._running[stream].admitted_at == admitted_at


def _span(stream: Stream, end: int) -> Span:
    return Span(stream.scheduled, end - stream.scheduled)


def _drop_first(times: list[tuple[float, int]], holds: Callable[[float, int], bool]) -> None:
    """Drop the first entries of a heap until one holds."""
    while times and not holds(*times[0]):
        heapq.heappop(times)


class CountedKv:
    """KV cache from the point of view of prompts; what is cached of each is given."""

    def reuse(self, stream: Stream, _running: Mapping[int, Stream]) -> int:
        """Return the number of tokens that need no prefill if the stream begins now."""
        if stream.has_begun:
            return stream.scheduled
        return stream.request.cached_tokens

    def will_supply(self, _other: Stream, _stream: Stream, _least: int) -> bool:
        """Return False: no prompt supplies another one."""
        return False

    def begin(self, stream: Stream, _running: Mapping[int, Stream]) -> None:
        """Open an admitted stream, with what the prefix cache has of its prompt."""
        if not stream.has_begun:
            stream.has_begun = True
            stream.scheduled = stream.reused = stream.request.cached_tokens


# ---- the outcome


@dataclass(slots=True)
class Outcome:
    """Measurements of the requests and steps within a span of time."""

    begin_s: float
    end_s: float
    first_token_s: list[float] = field(default_factory=list[float])
    """Seconds from the arrival to the first token, of the requests that arrived within the span."""
    request_s: list[float] = field(default_factory=list[float])
    """Seconds of the whole request, of those of them that ended."""
    gaps: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    """Seconds from token to token, each with the number of streams that waited as long at once."""
    tokens: int = 0
    """Tokens of answers ..."""
    begun: int = 0
    """... and answers of which the first one came within the span."""
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
    """True if requests queue up: too many waited, so that the simulation ended, or more came than were answered."""
    elapsed_s: float = 0.0
    """Time of the last event."""

    def note_gap(self, now: float, gap_s: float, streams: int) -> None:
        """Note the next tokens of some streams, and the seconds since those before."""
        if self.begin_s <= now <= self.end_s:
            self.gaps.append((gap_s, streams))
            self.tokens += streams

    def note_step(self, gap_s: float, rows: int) -> None:
        """Note a decode step within the span, all rows of which had their last token some seconds before."""
        self.steps += 1
        self.rows += rows
        self.tokens += rows
        self.gaps.append((gap_s, rows))

    @property
    def span_s(self) -> float:
        return max(self.end_s - self.begin_s, 1e-9)

    def first_token_within(self, percent: float) -> float:
        """Return a percentile (nearest rank) of the seconds to the first token; infinite if the simulation was ended."""
        return inf if self.is_overrun else percentile(((wait, 1) for wait in self.first_token_s), percent)

    def between_tokens_within(self, percent: float) -> float:
        """Return a percentile of the seconds from token to token of all streams."""
        return percentile(self.gaps, percent)

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
