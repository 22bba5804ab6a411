"""The prompts in prefill, and the rows of the next prefill step. Pure.

A step carries a chunk of one long prompt, or several short prompts. Prompts that arrived together are read at full
speed before any of them decodes. Beside running sequences, chunks are as small as the promised latency requires.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import Generic, Protocol, TypeVar

from mlx_ring.core.engine_stats import Policy
from mlx_ring.core.types import LONG_CHUNK_US, even_chunk, even_part, longest_chunk
from mlx_ring.engine.decode import MicroBatches
from mlx_ring.engine.prefix_cache import LEAST_TOKENS
from mlx_ring.engine.step_times import ChunkSizer

_AHEAD = 32
"""Number of long prompts that a step looks at in vain, so that its cost does not grow with the queue."""


class Prompt(Protocol):
    """A sequence whose prompt is computed, or a count of its tokens in a simulation."""

    @property
    def id(self) -> int:
        """Number of the sequence, in order of arrival."""
        ...

    @property
    def fill_to(self) -> int:
        """Number of tokens to compute."""
        ...

    @property
    def scheduled(self) -> int:
        """KV length after the last step that was sent."""
        ...

    @property
    def reused(self) -> int:
        """KV length that the prefix cache supplied."""
        ...

    @property
    def replays(self) -> int:
        """Number of its failed steps without progress."""
        ...

    @property
    def is_resumed(self) -> bool:
        """True if another engine began the request."""
        ...

    @property
    def is_catching_up(self) -> bool:
        """True while only some stages compute its tokens."""
        ...

    @property
    def admitted_at(self) -> float:
        """Time of its last admission."""
        ...

    @property
    def first_token_at(self) -> float | None:
        """Time of its first token."""
        ...

    def can_step(self, steps_ahead: int) -> bool:
        """Return True if a decode row can be sent."""
        ...

    def chunk_end(self, most: int) -> int:
        """Return the length after a chunk of at most `most` tokens."""
        ...

    def feed(self, tokens: int) -> None:
        """Count tokens that are sent with a step."""
        ...


P = TypeVar("P", bound=Prompt)
P_contra = TypeVar("P_contra", bound=Prompt, contravariant=True)
Chunk = TypeVar("Chunk")


class PromptKv(Protocol[P_contra]):
    """KV cache from the point of view of prompts."""

    def reuse(self, sequence: P_contra, running: Mapping[int, P_contra], /) -> int:
        """Return the number of tokens that need no prefill if the sequence begins now."""
        ...

    def will_supply(self, other: P_contra, sequence: P_contra, least: int, /) -> bool:
        """Return True if another prompt will have at least so many of a prompt's tokens; it then offers them at once."""
        ...

    def begin(self, sequence: P_contra, running: Mapping[int, P_contra], /) -> None:
        """Open an admitted sequence."""
        ...


class SentSteps(Protocol):
    """Counts of the steps that were sent."""

    @property
    def sent(self) -> int:
        """Number of the last step."""
        ...

    @property
    def prefills(self) -> int:
        """Number of prefill steps that some rank has not answered."""
        ...


class PrefillQueue(Generic[P]):
    """Prompts in order of arrival, except that every second chunk beside a long first prompt is for short ones.

    A short prompt waits while one that goes before it is about to compute what both begin with. A prompt whose step failed is retried
    alone, so that it cannot make others fail.
    """

    def __init__(self) -> None:
        self._line: dict[int, P] = {}
        self._long: int | None = None
        """Long prompt that had the last turn."""

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[P]:
        return iter(self._line.values())

    def add(self, sequence: P) -> None:
        """Add a prompt; a preempted one gets its place by arrival."""
        is_last = not self._line or next(reversed(self._line)) < sequence.id
        self._line[sequence.id] = sequence
        if not is_last:
            self._line = dict(sorted(self._line.items()))

    def remove(self, sequence: int) -> None:
        self._line.pop(sequence, None)

    def next_in_turn(
        self, left: Callable[[P], int], most: int, waits: Callable[[P, Iterable[P]], bool]
    ) -> Iterable[P]:
        """Return the prompts that may go into the next chunk; the first of them must. Later ones are looked up when needed.

        Args:
            left: returns the number of a prompt's tokens that are still to be computed.
            most: number of tokens up to which a prompt is short.
            waits: returns True if a prompt waits for one of some others, which are before it.
        """

        def is_short(sequence: P) -> bool:
            return left(sequence) <= most and not sequence.replays

        first = next(iter(self._line.values()))
        if self._long == first.id or is_short(first):
            short = self._passing(is_short, waits)
            if (one := next(short, None)) is not None:
                self._long = None
                return chain((one,), short)
        self._long = first.id
        return (first,)

    def _passing(self, is_short: Callable[[P], bool], waits: Callable[[P, Iterable[P]], bool]) -> Iterator[P]:
        """Yield the short prompts that do not wait, in order, until too many long ones lie between them."""
        passed, before = 0, list[P]()
        for sequence in self._line.values():
            goes_ahead = is_short(sequence)
            if goes_ahead and waits(sequence, before):
                continue
            # The first one is about to compute its part, and so are those that go ahead of it. Other long ones may wait long.
            if len(before) < _AHEAD and (goes_ahead or not (before or passed)):
                before.append(sequence)
            if goes_ahead:
                yield sequence
            elif (passed := passed + 1) == _AHEAD:
                return


_SMALLEST_UNKNOWN, _UNKNOWN_PER_STAGE = 256, 6
"""Smallest chunk without answers in progress, and their number per stage, while times are not known."""

PROMPTS_TOGETHER = 4
"""Length of a step of several short prompts, as a multiple of one prompt's chunk."""

SEQUENCE_TOKENS = 64
"""Cost of a running sequence for a new one, in prompt tokens: decode steps go between its chunks."""
BURST_S = 0.25
"""Longest time between requests that count as having arrived together."""


class Prefilling(PrefillQueue[P], Generic[P, Chunk]):
    """Prompts in prefill, and their steps."""

    def __init__(
        self,
        policy: Policy,
        stages: int,
        *,
        batches: MicroBatches[P],
        in_flight: SentSteps,
        sizer: ChunkSizer,
        kv: PromptKv[P],
        running: Mapping[int, P],
        make_chunk: Callable[[P, int], Chunk],
    ) -> None:
        """Prepare the queue; `make_chunk` makes a step's part from a sequence and the length after it."""
        super().__init__()
        self._make_chunk = make_chunk
        self._policy = policy
        self._stages = stages
        self._batches = batches
        self._in_flight = in_flight
        self._sizer = sizer
        self._kv = kv
        self._running = running
        self.last_step = 0
        """Number of the last prefill step."""

    def next_chunks(self) -> list[tuple[P, Chunk]]:
        """Return the chunks of the next step, counted as sent; empty if nothing may be sent now."""
        if not self or not self._may_go():
            return []
        beside_decode = self.has_to_spare()
        size = self._sizer.beside_decode() if beside_decode else self._size_alone()
        if not size or self._must_end_first(size):
            return []
        together = PROMPTS_TOGETHER * min(size, self._policy.prefill_chunk)
        chunks, tokens, before = self._fill(size, size if beside_decode else max(size, together))
        self._sizer.sent(self._in_flight.sent + 1, tokens, before, beside_decode=beside_decode)
        return chunks

    def _size_alone(self) -> int:
        """Return the most tokens of a chunk, if no answer is in progress.

        Over several stages, those are equal chunks in which the waiting prompts pass soonest by measured times.
        """
        first = next(iter(self))
        left = self._left(first)
        longest = self._longest_alone(first.fill_to - left)
        if self._stages == 1:
            return longest
        return even_part(left, self._even_size(self._total(), longest), longest)

    def _even_size(self, total: int, longest: int) -> int:
        even = even_chunk(total, self._stages, longest, self._sizer.early_us)
        if even is None and (known := self._sizer.largest_early):
            # Unlike chunks show what a chunk takes, and what a token.
            even = 2 * known if 2 * known <= longest else max(1, known // 2)
        return even or max(_SMALLEST_UNKNOWN, -(-total // (_UNKNOWN_PER_STAGE * self._stages)))

    def _longest_alone(self, before: int) -> int:
        """Return the most tokens of a chunk: without answers in progress, as many as `longest_chunk` allows by measured times."""
        policy = self._policy
        if any(batch.members for batch in self._batches):
            return policy.prefill_chunk
        return longest_chunk(policy.prefill_chunk, policy.long_chunk, before, self._sizer.measured_us)

    def _must_end_first(self, size: int) -> bool:
        """Return True if chunks in progress and a long one would together delay a prompt that arrives meanwhile too much."""
        if size <= self._policy.prefill_chunk or self._in_flight.prefills < self._stages:
            return False
        us = self._sizer.measured_us(size) or 0.0
        return (self._in_flight.prefills + 1) * us > LONG_CHUNK_US

    def _fill(self, size: int, room: int) -> tuple[list[tuple[P, Chunk]], int, int]:
        """Fill a step with the first prompt's chunk of `size`, and with prompts after it that fit as a whole.

        Return the chunks, the number of their tokens, and the most tokens before one of them.
        """
        chunks: list[tuple[P, Chunk]] = []
        catches_up, left, before = False, room, 0
        for sequence in self.next_in_turn(self._left, self._policy.prefill_chunk, self._waits):
            most = min(size, left)
            if chunks and self._left(sequence) > most:
                break
            # Only an opened sequence knows the KV that was kept of it. A step has one reach, so it may wait for the next one.
            self._kv.begin(sequence, self._running)
            if chunks and sequence.is_catching_up != catches_up:
                break
            catches_up = sequence.is_catching_up
            end, before = sequence.chunk_end(most), max(before, sequence.scheduled)
            tokens = end - sequence.scheduled
            chunks.append((sequence, self._make_chunk(sequence, end)))
            left -= tokens
            sequence.feed(tokens)
        return chunks, room - left, before

    def _total(self) -> int:
        """Return the tokens that the next prompts have to compute or have computed."""
        each = ((one.scheduled - one.reused, self._left(one)) for one in islice(self, _AHEAD))
        return max(1, sum(computed + left for computed, left in each))

    def _left(self, sequence: P) -> int:
        """Return the number of tokens that are still to be computed."""
        return sequence.fill_to - self._kv.reuse(sequence, self._running)

    def is_almost_read(self) -> bool:
        """Return True if prompts that arrived together are almost read: then decode waits, and starts for all at once."""
        if not self or self.has_to_spare():
            return False
        return self._left_within(PROMPTS_TOGETHER * self._policy.prefill_chunk)

    def _waits(self, sequence: P, before: Iterable[P]) -> bool:
        """Return True if a prompt that has not begun can soon reuse more, which one before it is about to compute."""
        if sequence.scheduled:
            return False
        enough = self._kv.reuse(sequence, self._running) + LEAST_TOKENS
        return any(self._kv.will_supply(other, sequence, enough) for other in before if not other.replays)

    def _left_within(self, most: int) -> bool:
        """Return True if all prompts together have at most so many tokens left; no more of them are looked up than needed."""
        total = 0
        for sequence in self:
            total += self._left(sequence)
            if total > most:
                return False
        return True

    def has_to_spare(self) -> bool:
        """Return True if a sequence that did not arrive with the prompts is decoding, so that its tokens must not wait long.

        Prompts that arrived with the running ones have the same rights, and are read at full speed, and so do answers
        that were interrupted.
        """
        if any(sequence.is_resumed for sequence in self):
            return False
        came = min(sequence.admitted_at for sequence in self)
        return any(
            (member.first_token_at is not None and member.first_token_at < came)
            or member.admitted_at > came + BURST_S
            for batch in self._batches
            for member in batch.members.values()
        )

    def _may_go(self) -> bool:
        """Allow at most one chunk between two decode steps of a micro-batch, and a bounded number in all.

        Short prompts that fill no step wait until a stage is free: others may arrive and be read with them.
        """
        most = self._stages
        if self._in_flight.prefills > most or (self._in_flight.prefills == most and self._can_wait()):
            return False
        return self.is_almost_read() or all(
            batch.last_step > self.last_step or not batch.is_active(self._policy.steps_ahead)
            for batch in self._batches
        )

    def _can_wait(self) -> bool:
        """Return True if the prompts fill no step together, none has begun, and none delays a running sequence."""
        chunk = self._policy.prefill_chunk
        if not self._left_within(PROMPTS_TOGETHER * chunk - 1):
            return False
        is_new = all(not sequence.scheduled and self._left(sequence) <= chunk for sequence in self)
        return is_new and not self.has_to_spare()
