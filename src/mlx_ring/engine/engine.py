"""Engine of one instance: requests in, steps out, answers in, text out.

`submit` and `answered` are the only inputs, both in the event loop, and both end with
schedule → send. The path of an answer is
`answered` → `Scheduler.answer` → `_postprocess` → the request's stream.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import count

from mlx_ring.core.engine_stats import EndedRequest, EngineStats, Meter, OpenRequest, Policy, StepTotals
from mlx_ring.core.errors import (
    DeadlineExceeded,
    NotReady,
    Overloaded,
    ProtocolError,
    RingError,
    ServingError,
)
from mlx_ring.core.generation import GenerateRequest, RequestStream
from mlx_ring.core.traces import CLIENT, Span
from mlx_ring.core.types import FinishReason, RankId, TokenLogprob
from mlx_ring.engine.admission import Grammars, QueuePlace, Settled, check_places, choose_to_shed, shed_error
from mlx_ring.engine.executor import Executor, sampling_ranks
from mlx_ring.engine.kv_budget import RankKv
from mlx_ring.engine.request_traces import RequestTracer
from mlx_ring.engine.router import Load
from mlx_ring.engine.scheduler import Advance, Scheduler
from mlx_ring.engine.sequence import Limits, Sequence, make_sequence
from mlx_ring.engine.step_times import Predict, StepTimes, Unanswered
from mlx_ring.engine.streams import AnswerText, LiveRequest, Reading, Vocabulary
from mlx_ring.rpc.protos import step_pb2, worker_pb2

_log = logging.getLogger(__name__)

_GRAMMAR_WITHIN_S = 30.0
"""Longest time for the ranks to compile a grammar: large ones take some seconds, one after the other."""
_POLICY = Policy()


class Engine:
    """Engine of one instance, for one epoch. Everything runs in the event loop; nothing blocks."""

    def __init__(
        self,
        executor: Executor,
        vocabulary: Vocabulary,
        limits: Limits,
        *,
        instance: str,
        epoch: int,
        policy: Policy = _POLICY,
        kv: Mapping[RankId, RankKv] | None = None,
        clock: Callable[[], float] = time.monotonic,
        predict: Predict | None = None,
        on_lost: Callable[[RingError], None] | None = None,
        meter: Meter | None = None,
        tracer: RequestTracer | None = None,
    ) -> None:
        """Start an engine. `on_lost` is called once when the instance is lost; `predict` gives expected times of steps."""
        self._meter = Meter() if meter is None else meter
        self._tracer = tracer
        self._on_lost = on_lost
        self._executor = executor
        self._vocabulary = vocabulary
        self._instance = instance
        self._policy = policy
        self._clock = clock
        self._began = clock()
        self._scheduler = Scheduler(
            executor.ranks, instance=instance, epoch=epoch, policy=policy, kv=kv, predict=predict
        )
        self._grammars = Grammars(sampling_ranks(executor.ranks))
        self._model_limits = limits
        self._wanted_kv: Mapping[RankId, int] = {}
        """Limits set while the engine serves; a long sequence in progress may delay them."""
        self._limits = limits.within(self._scheduler.capacity_tokens)
        self._live: dict[int, LiveRequest] = {}
        self._sequence_ids = count(1)
        self._ended: RingError | None = None
        """Reason why the engine no longer answers."""
        self._prompt_tokens = 0
        self._generated_tokens = 0
        self._finished: Counter[FinishReason] = Counter()
        executor.set_listener(self)
        executor.limit_kv(self._scheduler.kv_limits)

    # ---- from the API

    def submit(self, request: GenerateRequest) -> RequestStream:
        """Start to answer a request. Raises what `submit_all` raises."""
        return self.submit_all(request)[0]

    def submit_all(self, *requests: GenerateRequest) -> list[RequestStream]:
        """Start to answer requests that belong together: all of them, or none.

        Raises:
            RequestError: the model cannot serve one of them, or there are more than the server ever admits.
            Overloaded: too many requests wait already.
            NotReady: the instance is lost or closed.
        """
        self._check_open(len(requests))
        now = self._clock()
        sequences = [
            make_sequence(next(self._sequence_ids), request, self._limits, now) for request in requests
        ]
        return [self._start(sequence, now) for sequence in sequences]

    def _start(self, sequence: Sequence, now: float) -> RequestStream:
        stream = RequestStream(lambda: self._abort(sequence), lambda: self._stop(sequence))
        request = sequence.request
        before = request.prompt_tokens if request.continues_text else ()
        text = AnswerText(self._vocabulary, request.sampling, sequence.ends, request.shown_tokens, before)
        span = None if self._tracer is None else self._tracer.begin(request, now)
        sequence.traceparent = "" if span is None else span.traceparent
        self._live[sequence.id] = LiveRequest(sequence, stream, text, span=span, client=CLIENT.get())
        self._request_grammar(sequence)
        self._scheduler.add(sequence)
        self._send_steps(now)
        self._set_deadline(sequence)
        return stream

    def _request_grammar(self, sequence: Sequence) -> None:
        wanted = self._grammars.want(sequence)
        if wanted is not None:
            self._executor.prepare(wanted)
            asyncio.get_running_loop().call_later(_GRAMMAR_WITHIN_S, self._time_out_grammar, wanted.id)

    def _time_out_grammar(self, id_: int) -> None:
        """Fail a grammar that is not ready in time."""
        self._settle(
            self._grammars.fail(
                id_,
                Overloaded(
                    f"The answer's schema was not ready for this model within {_GRAMMAR_WITHIN_S:g} s; "
                    "try again later, or simplify it.",
                    retry_after_s=_GRAMMAR_WITHIN_S,
                ),
            )
        )

    def prepared(self, rank: RankId, prepared: worker_pb2.GrammarPrepared) -> None:
        """Record that a rank compiled a grammar, or could not."""
        if self._ended is None:
            self._settle(self._grammars.answered(rank, prepared))

    def _settle(self, settled: Settled) -> None:
        """Release the sequences that waited for a grammar."""
        for sequence in settled.sequences:
            if settled.error is None:
                sequence.awaits_grammar = False
            else:
                self._end_with_error(self._live[sequence.id], settled.error)
        if settled.sequences:
            self._send_steps(self._clock())

    def _set_deadline(self, sequence: Sequence) -> None:
        limit_s = self._policy.request_timeout_s
        live = self._live.get(sequence.id)
        if limit_s is not None and live is not None:
            live.deadline = asyncio.get_running_loop().call_later(limit_s, self._expire, live, limit_s)

    def _expire(self, live: LiveRequest, limit_s: float) -> None:
        """End a request that took too long."""
        tokens = live.completion_tokens
        self._end_with_error(
            live,
            DeadlineExceeded(
                f"The request was not finished within {limit_s:g} s (--request-timeout-s); "
                f"{tokens} tokens were generated. Ask for fewer tokens, or retry when the server is less busy."
            ),
        )
        self._send_steps(self._clock())

    def _check_open(self, requests: int) -> None:
        """Check that a number of requests can be admitted now."""
        if self._ended is not None:
            raise NotReady(f"Instance {self._instance} cannot answer: {self._ended}")
        check_places(requests, self._policy, free=self._scheduler.places, waiting=self._scheduler.num_waiting)

    def make_room(self, *requests: GenerateRequest) -> bool:
        """Shed other clients' waiting requests for these, if fairness allows it; return False if not.

        Raises:
            RequestError: the model cannot take one of them, so that nothing need be shed.
        """
        if self._ended is not None:
            return False
        for request in requests:
            make_sequence(0, request, self._limits, self._clock())
        needs = len(requests) - self._scheduler.places
        held = (
            QueuePlace(key, live.client, live.sequence.opened_at is None) for key, live in self._live.items()
        )
        shed = choose_to_shed(held, CLIENT.get(), wants=len(requests), needs=needs)
        for key in shed or ():
            self._end_with_error(self._live[key], shed_error())
        return shed is not None

    def _abort(self, sequence: Sequence) -> None:
        """Stop a sequence whose client left, and free its KV at once."""
        live = self._live.get(sequence.id)
        if live is not None:
            self._retire(live, "abort")
            self._send_steps(self._clock())

    def _stop(self, sequence: Sequence) -> None:
        """End an answer whose reader needs no more of it, and keep its KV as after any complete answer."""
        live = self._live.get(sequence.id)
        if live is not None:
            now = self._clock()
            self._put(live, (), Reading("", 0), "stop", now)
            self._retire(live, "stop")
            self._send_steps(now)

    # ---- schedule → send → postprocess

    def _send_steps(self, now: float) -> None:
        for step in self._scheduler.schedule(now):
            self._executor.send(step)

    def answered(self, done: step_pb2.StepDone) -> None:
        """Record that one rank executed a step."""
        if self._ended is not None:
            return
        now = self._clock()
        try:
            advances = self._scheduler.on_answer(done, now)
        except ProtocolError as error:
            self.fail(error)
            return
        for advance in advances:
            self._postprocess(advance, now)
        if done.spans and self._tracer is not None:
            self._tracer.stages(RankId(done.stage, done.rank), done.spans)
        self._send_steps(now)

    def _postprocess(self, advance: Advance, now: float) -> None:
        """Turn a sequence's new tokens into a delta, and end the request if it is complete."""
        live = self._live[advance.sequence.id]
        if advance.error is not None:
            self._end_with_error(live, advance.error)
            return
        finish_reason = live.sequence.finish_reason
        try:
            reading = live.text.read([token.token for token in advance.tokens], finish_reason)
        except Exception as error:  # noqa: BLE001 - a tokenizer's own trouble is one request's, not everyone's
            _log.exception("Request %s: its tokens cannot be read", live.sequence.request.request_id)
            self._end_with_error(live, ServingError(f"The answer's tokens cannot be read: {error!r}."))
            return
        if reading.stop_match is not None:
            finish_reason = "stop"
        self._put(live, advance.tokens[: reading.tokens], reading, finish_reason, now)
        if finish_reason is not None:
            self._retire(live, finish_reason)

    def _put(
        self,
        live: LiveRequest,
        tokens: tuple[TokenLogprob, ...],
        reading: Reading,
        finish_reason: FinishReason | None,
        now: float,
    ) -> None:
        """Count new tokens, and put their delta into the stream."""
        if live.is_first:
            self._prompt_tokens += live.sequence.prompt_length
            waited_s = now - live.sequence.submitted_at if tokens else None
            self._meter.record_first_token(live.sequence.prompt_length, waited_s)
        elif tokens:
            self._meter.record_tokens(len(tokens), now - live.last_at)
        self._meter.generated_tokens += len(tokens)
        self._generated_tokens += len(tokens)
        live.stream.put(live.delta(tokens, reading, finish_reason, now))

    def _retire(self, live: LiveRequest, reason: FinishReason, error: RingError | None = None) -> None:
        del self._live[live.sequence.id]
        self._finished[reason] += 1
        self._record_end(live.as_ended(reason, error, self._clock()), live.span)
        if live.deadline is not None:
            live.deadline.cancel()
        if reason in ("stop", "length"):
            self._scheduler.finish(live.sequence)
        else:
            self._scheduler.abort(live.sequence)
        unwanted = self._grammars.leave(live.sequence, is_spoiled=reason == "error")
        if unwanted is not None:
            self._executor.drop_grammar(unwanted)
        if self._wanted_kv and self._wanted_kv != self._scheduler.kv_limits:
            self._apply_kv_limits()

    def _record_end(self, ended: EndedRequest, span: Span | None) -> None:
        self._meter.record_end(ended)
        if span is not None and self._tracer is not None:
            self._tracer.end(span, ended)

    def _end_with_error(self, live: LiveRequest, error: RingError) -> None:
        live.stream.fail(error)
        self._retire(live, "error", error)

    # ---- errors and the end

    def failed(self, error: RingError) -> None:
        """End because the executor lost the instance."""
        self.fail(error)

    def fail(self, error: RingError) -> None:
        """End every request with `error`, and refuse new ones: this instance and epoch are over."""
        if self._ended is not None:
            return
        self._ended = error
        for live in list(self._live.values()):
            self._end_with_error(live, error)
        if self._on_lost is not None:
            self._on_lost(error)

    async def close(self) -> None:
        """End every request and free its KV, because the workers may continue to run."""
        if self._ended is not None:
            return
        self.fail(NotReady("The server is shutting down."))
        self._scheduler.reset()
        self._send_steps(self._clock())

    # ---- reports

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and answer together."""
        return self._limits.context_length

    @property
    def policy(self) -> Policy:
        return self._policy

    @property
    def error(self) -> RingError | None:
        """Reason why the engine no longer answers; None while it does."""
        return self._ended

    def record_started(self, rank: RankId, begun: int) -> None:
        """Record, from a heartbeat, that a rank started a step: its deadline counts from now."""
        self._scheduler.record_started(rank, begun, self._clock())

    def limit_kv(self, limits: Mapping[RankId, int]) -> None:
        """Set the bytes of KV that each rank may hold from now on.

        Cached KV is evicted, running requests continue, and the context shrinks if needed.
        """
        self._wanted_kv = dict(limits)
        self._apply_kv_limits()
        self._send_steps(self._clock())

    def _apply_kv_limits(self) -> None:
        self._scheduler.limit_kv(self._wanted_kv)
        before = self.context_length
        self._limits = self._model_limits.within(self._scheduler.capacity_tokens)
        if self.context_length != before:
            _log.log(
                logging.WARNING if self.context_length < before else logging.INFO,
                "The context of %s changes to %d tokens from %d, because it shares KV memory with other loaded models. "
                "Set --max-model-len to keep it constant.",
                self._instance,
                self.context_length,
                before,
            )
        self._executor.limit_kv(self._scheduler.kv_limits)

    def load_for(self, prompts: Iterable[tuple[int, ...]]) -> Load:
        """Return the instance's load, and the cost of prompts on it."""
        shared = max((self._scheduler.shared_tokens(prompt) for prompt in prompts), default=0)
        return Load(
            is_open=self._ended is None,
            sequences=self._scheduler.num_open,
            tokens_to_read=self._scheduler.tokens_to_read,
            shared_tokens=shared,
        )

    def oldest_unanswered(self) -> Unanswered | None:
        """Return the rank that all others wait for, with its deadline; None if no answer is owed."""
        return None if self._ended is not None else self._scheduler.oldest_unanswered(self._clock())

    def step_times(self) -> StepTimes:
        """Return the times of the last steps, by stage and kind."""
        return self._scheduler.step_times()

    def requests(self) -> list[OpenRequest]:
        """Return the requests that run or wait, the oldest first."""
        now = self._clock()
        return [live.as_open(now) for live in self._live.values()]

    def totals(self) -> StepTotals:
        """Return the totals of its steps since it began."""
        return self._scheduler.totals(self._clock(), self._began)

    def stats(self) -> EngineStats:
        return EngineStats(
            scheduler=self._scheduler.stats(),
            cache=self._scheduler.cache_stats(),
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            finished=dict(self._finished),
        )
