"""Requests between two engines of a model: those that wait for the next one, and those that move to another one.

After a loss, the requests of the lost instance wait for the next one, and keep what they have delivered. New requests
join them, within the limit of the queue. The next engine takes all of them, in their order.

Where both engines serve, a request moves without a pause. The other engine computes the KV of its known tokens while
the request continues, and then takes it over.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from mlx_ring.core.engine_stats import EngineLoad, Meter, Policy
from mlx_ring.core.errors import NotReady, RingError
from mlx_ring.core.generation import GenerateRequest, OpenRequest, RequestStream
from mlx_ring.core.traces import CLIENT
from mlx_ring.core.types import FinishReason, RankId, SamplingParams, TokenLogprob
from mlx_ring.engine.admission import check_places, choose_to_shed, shed_error
from mlx_ring.engine.live_request import Home, LiveRequest
from mlx_ring.engine.moved_kv import KvMoves
from mlx_ring.engine.request_traces import RequestTracer
from mlx_ring.engine.resumption import LeftKv
from mlx_ring.engine.sequence import Limits, make_sequence
from mlx_ring.engine.streams import Reading, Vocabulary

log = logging.getLogger(__name__)


class HeldRequests:
    """Requests without an engine, in the order of their arrival. It answers like an engine that is very slow."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        limits: Limits,
        policy: Policy,
        *,
        within_s: float,
        meter: Meter,
        tracer: RequestTracer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start empty.

        Args:
            vocabulary: the model's tokens as text.
            limits: limits of the model.
            policy: limits of the queue.
            within_s: longest time from a loss, or from the submission, without a new token or another engine; seconds.
            meter: measurements of requests that end here.
            tracer: tracer of new requests.
            clock: the engines' clock.
        """
        self._vocabulary, self._limits, self._policy = vocabulary, limits, policy
        self._within_s, self._meter, self._tracer, self._clock = within_s, meter, tracer, clock
        self._held: dict[LiveRequest, asyncio.TimerHandle] = {}
        """Timers that give up requests."""
        self._loss: RingError = NotReady("The model is being loaded again.")

    def __len__(self) -> int:
        return len(self._held)

    # ---- from engines, and to them

    def hold(self, lives: Iterable[LiveRequest], loss: RingError) -> None:
        """Keep the requests of a lost engine, before new ones."""
        self._loss = loss
        self._held |= {live: self._keep(live) for live in lives}
        # New ones come last; another replica may have been lost before.
        in_order = sorted(
            self._held, key=lambda live: (live.interrupted_at is None, live.sequence.submitted_at)
        )
        self._held = {live: self._held[live] for live in in_order}

    def _keep(self, live: LiveRequest) -> asyncio.TimerHandle:
        live.home = self
        waited_s = 0.0 if live.stalled_since is None else self._clock() - live.stalled_since
        return asyncio.get_running_loop().call_later(max(0.0, self._within_s - waited_s), self._give_up, live)

    def _give_up(self, live: LiveRequest) -> None:
        error = NotReady(
            f"{self._loss} The model was not loaded again, or the answer not continued, within {self._within_s:g} s "
            "(--resume-within-s)."
        )
        self.fail_request(live, error)

    def take(self) -> list[LiveRequest]:
        """Return all requests for an engine, those that must run alone last, and keep none."""
        held, self._held = self._held, {}
        for timer in held.values():
            timer.cancel()
        return sorted(held, key=lambda live: live.is_suspect)

    def fail(self, error: RingError) -> None:
        """End all requests with an error."""
        for live in list(self._held):
            self.fail_request(live, error)

    # ---- from the API

    def submit_all(self, *requests: GenerateRequest) -> list[RequestStream]:
        """Keep new requests until there is an engine: all of them, or none.

        Raises:
            RequestError: the model cannot serve one of them, or there are more than the server ever admits.
            Overloaded: too many requests wait already.
        """
        waiting = len(self._held)
        free = self._policy.most_requests - waiting
        check_places(len(requests), self._policy, free=max(0, free), waiting=waiting)
        now = self._clock()
        sequences = [make_sequence(0, request, self._limits, now) for request in requests]
        lives = [LiveRequest(sequence, self._vocabulary, self, self._tracer) for sequence in sequences]
        for live in lives:
            self._held[live] = self._keep(live)
            live.stream.pause()
            live.limit_time(self._policy.request_timeout_s)
        return [live.stream for live in lives]

    def make_room(self, *requests: GenerateRequest) -> bool:
        """Shed other clients' new requests for these, if fairness allows it; return False if not."""
        for request in requests:
            make_sequence(0, request, self._limits, self._clock())
        needs = len(requests) + len(self._held) - self._policy.most_requests
        shed = choose_to_shed(self._held, CLIENT.get(), wants=len(requests), needs=needs)
        for live in shed or ():
            self.fail_request(live, shed_error())
        return shed is not None

    def load_for(self, prompts: Iterable[tuple[int, ...]]) -> EngineLoad:
        del prompts
        return EngineLoad(is_open=True, sequences=len(self._held), tokens_to_read=0, shared_tokens=0)

    # ---- from the requests

    def abort(self, live: LiveRequest) -> None:
        self._end(live, "abort")

    def stop(self, live: LiveRequest) -> None:
        live.put((), Reading("", 0), "stop", self._clock(), self._meter)
        self._end(live, "stop")

    def fail_request(self, live: LiveRequest, error: RingError) -> None:
        self._end(live, "error", error)

    def _end(self, live: LiveRequest, reason: FinishReason, error: RingError | None = None) -> None:
        self._held.pop(live).cancel()
        live.end(reason, error, self._clock(), self._meter)

    # ---- reports

    def requests(self) -> list[OpenRequest]:
        """Return the requests, the oldest first."""
        now = self._clock()
        return [live.as_open(now) for live in self._held]


# ---- moves

_WARM_UP_CHUNK = 64
"""Most tokens of a warm-up in a step. Answers on the same machines wait for a step."""
_LOOK_S, _LONGEST_WAIT_S = 0.001, 1.0
_FEW_TOKENS = 8
"""Tokens that a request may be ahead of its warm-up: to compute them takes about as long as to compute one."""


class WarmUp(LiveRequest):
    """Computation of the known tokens of a request, before an engine takes it over. It is not counted as a request."""

    is_warm_up = True

    def __init__(
        self,
        tokens: tuple[int, ...],
        owner: str,
        sequence_id: int,
        limits: Limits,
        now: float,
        vocabulary: Vocabulary,
        home: Home,
    ) -> None:
        """Prepare to compute tokens of a request of `owner`, as `make_sequence` does.

        Raises:
            ContextExceeded: they do not fit.
        """
        request = GenerateRequest("", tokens, SamplingParams(max_tokens=0))
        super().__init__(make_sequence(sequence_id, request, limits, now), vocabulary, home, None)
        self.sequence.longest_chunk = _WARM_UP_CHUNK
        self.sequence.owner = owner
        self.is_first = False

    def put(
        self,
        tokens: tuple[TokenLogprob, ...],
        reading: Reading,
        finish_reason: FinishReason | None,
        now: float,
        meter: Meter,
    ) -> None:
        """Report the end to the stream, and count nothing."""
        del meter
        self.stream.put(self._delta(tokens, reading, finish_reason, now))

    def interrupt(self, now: float, unanswered: Mapping[RankId, int], left: LeftKv | None = None) -> None:
        """End it: the request that it was made for stays where it is."""
        del now, unanswered, left
        self.end("error", NotReady("The instance was lost."), 0.0, Meter())

    def end(self, reason: FinishReason, error: RingError | None, now: float, meter: Meter) -> None:
        """Record the end, and count nothing."""
        del reason, now, meter
        self.has_ended = True
        if error is not None:
            self.stream.fail(error)


class Source(Protocol):
    """Engine whose requests move to another one."""

    @property
    def limits(self) -> Limits:
        """Limits of its model."""
        ...

    @property
    def moves(self) -> KvMoves:
        """Moves of its KV."""
        ...

    @property
    def lives(self) -> list[LiveRequest]:
        """Requests that run or wait, the oldest first."""
        ...

    @property
    def is_settled(self) -> bool:
        """True if all steps are answered, or it has ended."""
        ...

    def pause(self) -> None:
        """Send no new steps until `resume`."""
        ...

    def resume(self) -> None:
        """Send steps again."""
        ...

    def release(self, live: LiveRequest) -> None:
        """Give up a request, for another engine to take it over."""
        ...


class Target(Protocol):
    """Engine to which requests move."""

    @property
    def error(self) -> RingError | None:
        """Reason why it no longer answers; None while it does."""
        ...

    @property
    def limits(self) -> Limits:
        """Limits of its model, with its own context."""
        ...

    @property
    def moves(self) -> KvMoves:
        """Moves of its KV."""
        ...

    def warm_up(self, tokens: tuple[int, ...], owner: str) -> RequestStream:
        """Compute the KV of tokens, and keep it for a request of `owner` that is about to be taken over."""
        ...

    def take_over(self, lives: Iterable[LiveRequest]) -> None:
        """Continue requests that another engine began."""
        ...


async def move_requests(source: Source, target: Target) -> int:
    """Move all requests of an engine to another one, while both serve; return how many were moved.

    Requests continue on their engine until the other one has computed almost all of their known tokens. Then all move at
    once, so that two engines share the machines' processors for a short time only. A request that may become longer than
    the other engine's context stays until its end. If only the context limits it, it stays if it is longer already. So
    does an answer that was begun before the model's files were replaced. The prefix cache moves last.

    Raises:
        RingError: the target was lost. The requests are still with their engine.
    """
    started = time.monotonic()
    homes = {live: live.home for live in source.lives}

    def movable() -> list[LiveRequest]:
        return [live for live, home in homes.items() if _stays(live, home) and _fits(live, target)]

    await _warm_up(movable, source, target)
    try:
        await settle(source)
        moved = movable()
        for live in moved:
            source.release(live)
        target.take_over(moved)
    finally:
        source.resume()
    if homes:
        log.info("%d of %d requests moved in %.2f s", len(moved), len(homes), time.monotonic() - started)
    await _bring_kept(source, target)
    stayed = [live for live, home in homes.items() if _stays(live, home)]
    for live in stayed:
        while _stays(live, homes[live]):
            await _wait_for_end(live)
    if stayed:
        await _bring_kept(source, target)
    return len(moved)


async def settle(source: Source) -> None:
    """Pause an engine, and wait for the answers to all steps: tokens of steps in flight would be lost, and computed again."""
    try:
        source.pause()
        while not source.is_settled:
            await asyncio.sleep(_LOOK_S)
            # A suspicion that has ended may have resumed it.
            source.pause()
    except BaseException:
        source.resume()
        raise


async def _bring_kept(source: Source, target: Target) -> None:
    """Move the prefix cache, unless the model's files were replaced meanwhile."""
    if source.limits.model == target.limits.model:
        await target.moves.bring_kept(source.moves.origin, source.moves.texts)


async def _warm_up(movable: Callable[[], Sequence[LiveRequest]], source: Source, target: Target) -> None:
    """Bring the KV of requests' known tokens to an engine, again and again, until they are only a few ahead of it.

    It moves from the source's workers, or is computed.
    """
    warmed: dict[LiveRequest, int] = {}

    def ahead(live: LiveRequest) -> int:
        return live.sequence.length - warmed.get(live, 0)

    before = math.inf
    while True:
        late = [live for live in movable() if _is_worth_warming(live) and ahead(live) > _FEW_TOKENS]
        total = sum(map(ahead, late))
        if not total or total >= before:
            return
        before = total
        for live in late:
            if live in movable():
                warmed[live] = await _bring(live, movable, source, target)


async def _bring(
    live: LiveRequest, movable: Callable[[], Sequence[LiveRequest]], source: Source, target: Target
) -> int:
    """Move the KV of a request's known tokens to an engine, or let it compute them; return their number."""
    moved = await target.moves.bring(source.moves.origin, live.sequence)
    if moved.tokens or live not in movable():
        return moved.tokens
    known = tuple(live.sequence.tokens)
    try:
        async with target.warm_up(known, live.sequence.owner) as warming:
            async for _ in warming:
                pass
    except RingError:
        # Without it, the request only pauses for longer.
        if target.error is not None:
            raise
    if moved.back is not None:
        moved.back.arrive(target.moves.clock())
    return len(known)


def _fits(live: LiveRequest, target: Target) -> bool:
    limit = live.sequence.request.sampling.max_tokens
    most = live.sequence.length + 1 if limit is None else live.sequence.max_length
    return most <= target.limits.context_length and live.has_model(target.limits)


async def _wait_for_end(live: LiveRequest) -> None:
    """Wait until the request has ended, but not for long, because it may also get another engine."""
    ended = asyncio.Event()
    live.on_ended = ended.set
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LONGEST_WAIT_S):
            await ended.wait()


def _stays(live: LiveRequest, home: Home) -> bool:
    """Report whether the request still runs on its engine."""
    return not live.has_ended and live.home is home


def _is_worth_warming(live: LiveRequest) -> bool:
    """Report whether another engine can use cached KV of the request's tokens, and some are computed here."""
    return live.sequence.opened_at is not None and not live.sequence.request.computes_all
