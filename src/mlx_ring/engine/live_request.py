"""A request from its submission until its end, whichever engine works on it.

An engine lasts as long as its instance. A request outlives it: its stream, its text, its times and its known tokens
stay here, and the next engine continues them. Its owner, `home`, is the engine that works on it, or the queue for
the next engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, Protocol

from mlx_ring.core.engine_stats import Meter
from mlx_ring.core.errors import (
    DeadlineExceeded,
    GroupStuck,
    RepeatedLoss,
    RingError,
    ServingError,
)
from mlx_ring.core.generation import (
    Delta,
    EndedRequest,
    OpenRequest,
    RequestState,
    RequestStream,
    RequestTimings,
    WaysBack,
)
from mlx_ring.core.traces import CLIENT, Span, owner_of
from mlx_ring.core.types import FinishReason, RankId, TokenLogprob, Way
from mlx_ring.engine.request_traces import RequestTracer
from mlx_ring.engine.resumption import LeftKv
from mlx_ring.engine.sequence import Limits, Sequence, continue_sequence
from mlx_ring.engine.streams import AnswerText, Reading, Vocabulary

PROGRESS_TOKENS = 2
"""Tokens after a loss that clear a request of having caused it."""
LOSSES_TO_RUN_ALONE, LOSSES_TO_GIVE_UP = 2, 3
"""Losses in a row after which a request runs alone, and after which it is given up."""


class Home(Protocol):
    """Owner of a live request."""

    def abort(self, live: LiveRequest) -> None:
        """End a request whose client left."""
        ...

    def stop(self, live: LiveRequest) -> None:
        """End a request whose reader needs no more of it, as complete."""
        ...

    def fail_request(self, live: LiveRequest, error: RingError) -> None:
        """End a request with an error."""
        ...


class CountedLoss(NamedTuple):
    """Loss of workers, of which a request may be the cause."""

    unanswered: Mapping[RankId, int]
    """Ranks that had not answered all of its steps."""
    known: int
    """Number of its known tokens."""
    ran_alone: bool


class LiveRequest:
    """A request that has not ended. Times are in seconds of the engine's clock."""

    is_warm_up = False

    def __init__(
        self, sequence: Sequence, vocabulary: Vocabulary, home: Home, tracer: RequestTracer | None
    ) -> None:
        """Start a request of the client in this context.

        Args:
            sequence: its sequence; each engine makes another one.
            vocabulary: the model's tokens as text.
            home: its first owner.
            tracer: tracer of its span, if it is traced.
        """
        request = sequence.request
        before = request.prompt_tokens if request.continues_text else ()
        self.sequence, self.home = sequence, home
        self.stream = RequestStream(lambda: self.home.abort(self), lambda: self.home.stop(self))
        self.text = AnswerText(vocabulary, request.sampling, sequence.ends, request.shown_tokens, before)
        self.text.read(request.answered, None)
        self.client = CLIENT.get()
        """Client that sent the request."""
        sequence.owner = owner_of(self.client)
        self.is_first, self.completion_tokens = not request.answered, len(request.answered)
        """True until the first delta."""
        self.last_at = sequence.submitted_at
        """Time of the last tokens."""
        self.interrupted_at: float | None = None
        """Time at which its instance was lost; None while an engine works on it, and for new requests."""
        self.unanswered: Mapping[RankId, int] = {}
        """Ranks that had not answered all of its steps when its instance was lost, each with the first of these steps.

        For a rank that had not compiled its grammar, the step is 0.
        """
        self._counted: list[CountedLoss] = []
        """Losses in a row of workers while it was in progress. Progress after a loss ends the row."""
        self.stalled_since: float | None = None
        """Time of the first loss since its last token; None if it has a new one, or never ran."""
        self._is_interrupted = bool(request.answered)
        """True from a loss until the next tokens."""
        self._paused_s = 0.0
        """Times from the last token before a loss until the next one."""
        self.model = request.model
        """Digest of the model that answers it; empty if it is unknown."""
        self.left: LeftKv | None = None
        """KV that its lost instance left of it; None while an engine works on it."""
        self.has_ended = False
        self.on_resumed: Callable[[bool], None] | None = None
        """Called once after a loss: with True at the first new token, or with False at an end without one."""
        self.on_ended: Callable[[], None] = lambda: None
        self._span: Span | None = None if tracer is None else tracer.begin(request, sequence.submitted_at)
        self._tracer = tracer
        self._deadline: asyncio.TimerHandle | None = None
        sequence.traceparent = "" if self._span is None else self._span.traceparent

    def interrupt(self, now: float, unanswered: Mapping[RankId, int], left: LeftKv | None = None) -> None:
        """Record the loss of the instance, and inform the reader.

        A loss in progress counts until `judge` knows its reason, because another replica may take over before.

        Args:
            now: time of the loss.
            unanswered: ranks that had not answered all of its steps, each with the first of these; empty if it was not
                in progress. The object itself names the loss.
            left: the KV that the instance leaves of the request.
        """
        self.interrupted_at, self.unanswered, self._is_interrupted = now, unanswered, True
        self.left = left
        if self.stalled_since is None or not self.sequence.admitted_at:
            self.stalled_since = now
        if unanswered:
            self._count_loss(unanswered)
        self.on_resumed = None
        self._arrive(None)
        self.stream.pause()

    def set_way_back(self, ways: WaysBack, way: Way, seconds: float | None) -> None:
        """Begin its way back from the loss, with the predicted seconds until it serves again, or of the whole way."""
        self._arrive(None)
        if self.interrupted_at is not None and self.sequence.opened_at is not None:
            self.sequence.back = ways.begin(way, seconds, self.interrupted_at)

    def _arrive(self, now: float | None) -> None:
        """End its way back, if it is on one, at its new tokens or with None without any."""
        if self.sequence.back is not None:
            self.sequence.back.arrive(now)
            self.sequence.back = None

    def _count_loss(self, unanswered: Mapping[RankId, int]) -> None:
        if self._counted and self.sequence.length >= self._cleared_at:
            self._counted.clear()
        self._counted.append(CountedLoss(unanswered, self.sequence.length, self.sequence.runs_alone))

    def forgive_loss(self, unanswered: Mapping[RankId, int]) -> None:
        """Do not count a loss in progress that had another cause. Others, before or after it, count as before."""
        self._counted = [loss for loss in self._counted if loss.unanswered is not unanswered]
        if not self.is_suspect:
            self.sequence.alone_until = 0

    @property
    def losses(self) -> int:
        """Times in a row that workers were lost while it was in progress."""
        return len(self._counted)

    @property
    def has_run_alone(self) -> bool:
        """True if it ran alone at one of these losses."""
        return any(loss.ran_alone for loss in self._counted)

    @property
    def _cleared_at(self) -> int:
        """Number of known tokens that ends the row of losses."""
        return PROGRESS_TOKENS + max((loss.known for loss in self._counted), default=0)

    @property
    def is_suspect(self) -> bool:
        """True if it has to run alone, because it was in progress at several losses without progress between them."""
        return self.losses >= LOSSES_TO_RUN_ALONE and self.sequence.length < self._cleared_at

    @property
    def may_be_shed(self) -> bool:
        """True if it waits and nothing was computed for it yet."""
        return self.sequence.opened_at is None

    def has_model(self, limits: Limits) -> bool:
        """Report whether an engine with these limits has the model that began its answer, as far as that is known."""
        is_known = bool(self.completion_tokens and self.model and limits.model)
        return not is_known or self.model == limits.model

    def set_model(self, limits: Limits) -> None:
        """Record the model of the engine that begins or continues the answer. Raises `ServingError` if another began it."""
        if not self.has_model(limits):
            raise ServingError(
                "The answer cannot be continued, because the model's files were replaced while it was in progress "
                f"(digest {self.model}, now {limits.model}): send the request again."
            )
        self.model = self.stream.model = limits.model or self.model

    def continue_on(self, sequence_id: int, limits: Limits, now: float, meter: Meter) -> None:
        """Make a sequence for another engine.

        Raises:
            ServingError: the engine has another model than the one that began the answer.
            ContextExceeded: the known tokens do not fit the engine.
        """
        self.set_model(limits)
        self.sequence = continue_sequence(self.sequence, sequence_id, limits)
        if self.interrupted_at is not None:
            meter.record_resumed(now - self.interrupted_at)
        else:
            self.sequence.move()
        self.interrupted_at = self.left = None
        if self.is_suspect:
            self.sequence.alone_until = self._cleared_at
        if not self._is_interrupted:
            self.stream.resume(continues=False)

    def limit_time(self, limit_s: float | None) -> None:
        """End the request with an error after `limit_s` seconds, if a number is given."""
        if limit_s is not None:
            self._deadline = asyncio.get_running_loop().call_later(limit_s, self._expire, limit_s)

    def _expire(self, limit_s: float) -> None:
        error = DeadlineExceeded(
            f"The request was not finished within {limit_s:g} s (--request-timeout-s); "
            f"{self.completion_tokens} tokens were generated. Ask for fewer tokens, or retry when the server is less busy."
        )
        self.home.fail_request(self, error)

    def read(self, tokens: tuple[TokenLogprob, ...], finish_reason: FinishReason | None) -> Reading:
        """Return the text that tokens add to the answer."""
        return self.text.read([token.token for token in tokens], finish_reason)

    def put(
        self,
        tokens: tuple[TokenLogprob, ...],
        reading: Reading,
        finish_reason: FinishReason | None,
        now: float,
        meter: Meter,
    ) -> None:
        """Count new tokens, and put their delta into the stream."""
        if self.is_first:
            waited_s = now - self.sequence.submitted_at if tokens else None
            meter.record_first_token(self.sequence.prompt_length, waited_s)
        elif tokens and self._is_interrupted:
            self._paused_s += now - self.last_at
        elif tokens:
            meter.record_tokens(len(tokens), now - self.last_at)
        meter.generated_tokens += len(tokens)
        self.stream.resume(continues=self._is_interrupted)
        if tokens:
            self._is_interrupted, self.stalled_since = False, None
            self._arrive(now)
        self.stream.put(self._delta(tokens, reading, finish_reason, now))
        self._report_resumed(has_token=bool(tokens))

    def _report_resumed(self, *, has_token: bool) -> None:
        if self.on_resumed is not None:
            report, self.on_resumed = self.on_resumed, None
            report(has_token)

    def end(self, reason: FinishReason, error: RingError | None, now: float, meter: Meter) -> None:
        """Record the end, and fail the stream with the error, if any."""
        self.has_ended = True
        self._report_resumed(has_token=False)
        self._arrive(None)
        self.on_ended()
        self.stream.resume(continues=False)
        if self._deadline is not None:
            self._deadline.cancel()
        if error is not None:
            self.stream.fail(error)
        ended = self._as_ended(reason, error, now)
        meter.record_end(ended)
        if self._is_interrupted and error is not None:
            meter.given_up[type(error).__name__] += 1
        if self._span is not None and self._tracer is not None:
            self._tracer.end(self._span, ended)

    def _delta(
        self,
        tokens: tuple[TokenLogprob, ...],
        reading: Reading,
        finish_reason: FinishReason | None,
        now: float,
    ) -> Delta:
        """Make the next delta; the first and the last also carry the results of the whole answer."""
        sequence, request = self.sequence, self.sequence.request
        is_first, self.is_first = self.is_first, False
        self.last_at = now
        self.completion_tokens += len(tokens)
        scored = is_first and request.prompt_logprobs is not None
        return Delta(
            text=reading.text,
            token_ids=tuple(token.token for token in tokens),
            logprobs=tokens if request.sampling.logprobs else (),
            prompt_tokens=sequence.prompt_length,
            completion_tokens=self.completion_tokens,
            cached_tokens=sequence.cached_tokens,
            finish_reason=finish_reason,
            stop_match=reading.stop_match,
            prompt_logprobs=tuple(sequence.prompt_logprobs) if scored else None,
            pooled=None if finish_reason is None else sequence.pooled,
            timings=None if finish_reason is None else self._timings(now),
            pieces=reading.pieces,
        )

    def as_open(self, now: float) -> OpenRequest:
        """Return the state of the request."""
        sequence = self.sequence
        return OpenRequest(
            id=sequence.request.request_id,
            state=self._state,
            prompt_tokens=sequence.prompt_length,
            cached_tokens=sequence.cached_tokens,
            read_tokens=min(sequence.scheduled, sequence.prompt_length),
            tokens=self.completion_tokens,
            age_s=now - sequence.submitted_at,
        )

    def _as_ended(self, reason: FinishReason, error: RingError | None, now: float) -> EndedRequest:
        """Return the summary of the ended request."""
        sequence = self.sequence
        return EndedRequest(
            submitted_at=sequence.submitted_at,
            opened_at=sequence.opened_at,
            first_token_at=sequence.first_token_at,
            last_token_at=sequence.last_token_at,
            ended_at=now,
            prompt_tokens=sequence.prompt_length,
            completion_tokens=self.completion_tokens,
            cached_tokens=sequence.cached_tokens,
            reason=reason,
            error=error,
        )

    @property
    def _state(self) -> RequestState:
        """State of the request; a preempted one is waiting."""
        if self.interrupted_at is not None:
            return "paused"
        if not self.sequence.scheduled:
            return "waiting"
        return "answering" if self.sequence.is_prefilled else "reading"

    def _timings(self, now: float) -> RequestTimings:
        sequence = self.sequence
        opened = sequence.submitted_at if sequence.opened_at is None else sequence.opened_at
        first = now if sequence.first_token_at is None else sequence.first_token_at
        last = now if sequence.last_token_at is None else sequence.last_token_at
        return RequestTimings(opened - sequence.submitted_at, first - opened, last - first - self._paused_s)


# ---- causes of losses

InProgress = Mapping[LiveRequest, Mapping[RankId, int]]
"""Requests that were in progress at a loss, with their `unanswered` at that time."""


def judge(in_progress: InProgress, loss: RingError, lost: Mapping[RankId, float]) -> bool:
    """Find requests that may have caused the loss of their instance.

    A request counts that a lost worker may have begun and has not answered, each time when workers die or hang. It runs
    alone after the second time. It ends with an error after the third, if it ran alone at one of them.

    Hung groups count as well, because a rank that hangs alone in a shared pass looks like one. They are blamed on their
    backend anyway: a network that drops packets hangs with the same requests, too.

    Args:
        in_progress: requests that were in progress at the loss, wherever they are now.
        loss: best known reason.
        lost: ranks that died or hung, each with the last step that it may have begun.

    Returns:
        True if one of them counted at several losses in a row, so that no machine is to blame.
    """
    counts = loss.is_workers_own or isinstance(loss, GroupStuck)
    is_repeated = False
    for live, unanswered in in_progress.items():
        if live.has_ended:
            continue
        may_be_cause = any(rank in lost and step <= lost[rank] for rank, step in unanswered.items())
        if not (counts and may_be_cause):
            live.forgive_loss(unanswered)
            continue
        is_repeated |= live.losses >= LOSSES_TO_RUN_ALONE
        if live.losses >= LOSSES_TO_GIVE_UP and live.has_run_alone:
            error = RepeatedLoss(
                f"The request was in progress at {live.losses} losses in a row, and is not tried again. {loss}"
            )
            live.home.fail_request(live, error)
    return is_repeated and loss.is_workers_own


Hold = Callable[[Iterable[LiveRequest], RingError], None]
"""Receiver of a lost engine's requests, in the order of their submission, and of the loss."""
