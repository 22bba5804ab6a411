"""Engine of one instance: requests in, steps out, answers in, text out.

Its inputs, all in the event loop, end with schedule → send. The path of an answer is `answered` →
`Scheduler.on_answer` → `_postprocess` → the request's stream.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import count

from mlx_ring.core.engine_stats import EngineLoad, EngineStats, Meter, Policy, StepTotals
from mlx_ring.core.errors import LinkLost, NotReady, ProtocolError, RingError, ServingError, WorkerLost
from mlx_ring.core.generation import GenerateRequest, OpenRequest, RequestStream
from mlx_ring.core.traces import CLIENT
from mlx_ring.core.types import FinishReason, RankId, TokenLogprob
from mlx_ring.engine.admission import Settled, check_places, choose_to_shed, shed_error
from mlx_ring.engine.executor import Executor, GrammarRequests
from mlx_ring.engine.in_flight import Predict, Unanswered
from mlx_ring.engine.kv_budget import RankKv, log_new_context
from mlx_ring.engine.live_request import Hold, LiveRequest
from mlx_ring.engine.moved_kv import KvMoves
from mlx_ring.engine.request_traces import RequestTracer
from mlx_ring.engine.resumption import KeptKv
from mlx_ring.engine.scheduler import Scheduler
from mlx_ring.engine.sequence import Advance, Limits, make_sequence
from mlx_ring.engine.step_times import StepTimes
from mlx_ring.engine.streams import Reading, Vocabulary
from mlx_ring.engine.takeover import WarmUp
from mlx_ring.rpc.failures import failure_to_error
from mlx_ring.rpc.protos import step_pb2, worker_pb2

_log = logging.getLogger(__name__)


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
        policy: Policy,
        kv: Mapping[RankId, RankKv] | None = None,
        clock: Callable[[], float] = time.monotonic,
        predict: Predict | None = None,
        on_lost: Callable[[RingError], None] | None = None,
        hold: Hold | None = None,
        meter: Meter | None = None,
        tracer: RequestTracer | None = None,
        kept: dict[LiveRequest, KeptKv] | None = None,
    ) -> None:
        """Start an engine.

        Args:
            executor: transport to the ranks.
            vocabulary: the model's tokens as text.
            limits: limits of the model.
            instance: name of the instance.
            epoch: its epoch.
            policy: configuration of the scheduler.
            kv: KV memory of each rank.
            clock: returns seconds.
            predict: returns expected times of steps.
            on_lost: is called once, when the instance is lost.
            hold: receives the requests of a lost instance; None: they end with an error.
            meter: measurements of the replica.
            tracer: tracer of requests.
            kept: KV that ranks kept of interrupted requests. The first call of `take_over` brings them, and empties it.
        """
        self._meter = Meter() if meter is None else meter
        self._tracer, self._kept = tracer, {} if kept is None else kept
        self._executor, self._vocabulary, self._on_lost = executor, vocabulary, on_lost
        self._instance, self.policy, self._hold = instance, policy, hold
        self._clock, self._began = clock, clock()
        self._scheduler = Scheduler(
            executor.ranks,
            instance=instance,
            epoch=epoch,
            policy=policy,
            kv=kv,
            predict=predict,
            meter=self._meter,
        )
        self.moves = KvMoves(
            executor, self._scheduler, kv, self._meter, clock, self._send_steps, lambda: self._ended
        )
        self._grammars = GrammarRequests(executor, self._scheduler.suspects, self._settle)
        self._model_limits = limits
        self._wanted_kv: Mapping[RankId, int] = {}
        """Limits set while the engine serves; a long sequence in progress may delay them."""
        self.limits = limits.within(self._scheduler.capacity_tokens)
        self._live: dict[int, LiveRequest] = {}
        self._sequence_ids, self._is_paused = count(1), False
        self._ended: RingError | None = None
        """Reason why the engine no longer answers."""
        self._prompt_tokens = self._generated_tokens = 0
        self._finished: Counter[FinishReason] = Counter()
        executor.set_listener(self)
        executor.limit_kv(self._scheduler.kv.budget.even_limits)

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
            ServingError: another model began an answer.
        """
        if self._ended is not None:
            raise NotReady(f"Instance {self._instance} cannot answer: {self._ended}")
        free, waiting = self._scheduler.places, self._scheduler.num_waiting
        check_places(len(requests), self.policy, free=free, waiting=waiting)
        now = self._clock()
        sequences = [make_sequence(next(self._sequence_ids), each, self.limits, now) for each in requests]
        lives = [LiveRequest(sequence, self._vocabulary, self, self._tracer) for sequence in sequences]
        for live in lives:
            live.set_model(self.limits)
        for live in lives:
            self._start(live)
        # The first prompt's chunks end where later ones begin to differ, so all must be known.
        self._send_steps(now)
        for live in lives:
            live.limit_time(self.policy.request_timeout_s)
        return [live.stream for live in lives]

    def _start(self, live: LiveRequest) -> None:
        self._live[live.sequence.id] = live
        self._scheduler.add(live.sequence, self._kept.pop(live, None))
        if live.completion_tokens and live.sequence.finish_reason is not None:
            # A smaller context ends here.
            self._postprocess(Advance(live.sequence), self._clock())

    def take_over(self, lives: Iterable[LiveRequest]) -> None:
        """Continue requests that another engine began, or that waited for one, in their order.

        They were admitted before, so no limit of the queue applies.
        """
        now = self._clock()
        for live in lives:
            try:
                live.continue_on(next(self._sequence_ids), self.limits, now, self._meter)
            except RingError as error:
                live.end("error", error, now, self._meter)
                self._finished["error"] += 1
                continue
            live.home = self
            self._start(live)
        self._scheduler.free_kept(self._kept.values())
        self._kept.clear()
        self._send_steps(now)

    def prepared(self, rank: RankId, prepared: worker_pb2.GrammarPrepared) -> None:
        """Record that a rank compiled a grammar, or could not."""
        self._grammars.answered(rank, prepared)

    def fetched(self, rank: RankId, fetched: worker_pb2.KvFetched) -> None:
        now, is_over = self._clock(), self.moves.fetched(rank, fetched) or self._ended is not None
        if not is_over and self._scheduler.ways.fetched(rank, fetched, now):
            self._send_steps(now)

    def _settle(self, settled: Settled) -> None:
        """Release the sequences that waited for a grammar."""
        if self._ended is not None:
            return
        for sequence in settled.sequences:
            if settled.error is None:
                sequence.awaits_grammar = False
            else:
                self._retire(self._live[sequence.id], "error", settled.error)
        if settled.sequences:
            self._send_steps(self._clock())

    # ---- to and from other engines

    @property
    def lives(self) -> list[LiveRequest]:
        """Requests that run or wait, the oldest first."""
        return [live for live in self._live.values() if not live.is_warm_up]

    def warm_up(self, tokens: tuple[int, ...], owner: str = "") -> RequestStream:
        """Compute the KV of tokens, and keep it in the prefix cache for a request of `owner` that is about to be taken over."""
        now = self._clock()
        live = WarmUp(tokens, owner, next(self._sequence_ids), self.limits, now, self._vocabulary, self)
        self._start(live)
        self._send_steps(now)
        return live.stream

    def release(self, live: LiveRequest) -> None:
        """Give up a request, for another engine to take it over. The tokens of steps in progress are dropped."""
        self._take_out(live)
        self._send_steps(self._clock())

    def make_room(self, *requests: GenerateRequest) -> bool:
        """Shed other clients' waiting requests for these, if fairness allows it; return False if not.

        Raises:
            RequestError: the model cannot take one of them, so that nothing need be shed.
        """
        if self._ended is not None:
            return False
        for request in requests:
            make_sequence(0, request, self.limits, self._clock())
        needs = len(requests) - self._scheduler.places
        shed = choose_to_shed(self.lives, CLIENT.get(), wants=len(requests), needs=needs)
        for live in shed or ():
            self._retire(live, "error", shed_error())
        return shed is not None

    def abort(self, live: LiveRequest) -> None:
        self._retire(live, "abort")
        self._send_steps(self._clock())

    def stop(self, live: LiveRequest) -> None:
        """End an answer whose reader needs no more of it, and keep its KV as after any complete answer."""
        now = self._clock()
        self._put(live, (), Reading("", 0), "stop", now)
        self._retire(live, "stop")
        self._send_steps(now)

    def fail_request(self, live: LiveRequest, error: RingError) -> None:
        self._retire(live, "error", error)
        self._send_steps(self._clock())

    # ---- schedule → send → postprocess

    def pause(self) -> None:
        """Send no new steps until `resume`; answers to earlier ones are taken."""
        self._is_paused = True

    @property
    def is_settled(self) -> bool:
        """True if all steps are answered, or it has ended."""
        return (
            self._ended is not None or self._scheduler.in_flight.completed == self._scheduler.in_flight.sent
        )

    def resume(self) -> None:
        """Send steps again."""
        self._is_paused = False
        self._send_steps(self._clock())

    def _send_steps(self, now: float) -> None:
        """Send what can be scheduled, unless the engine is paused or has ended: others run its sequences then."""
        if not self._is_paused and self._ended is None:
            self._send_all(now)

    def _send_all(self, now: float) -> None:
        steps = self._scheduler.schedule(now)
        if self._grammars.send():
            steps += self._scheduler.schedule(now)
        for step in steps:
            self._executor.send(step)
        for wanted in self._scheduler.disk.take_unsent(now) if self._scheduler.disk is not None else ():
            self._executor.fetch_kv(wanted)

    def answered(self, done: step_pb2.StepDone) -> None:
        """Record that one rank executed a step."""
        if self._ended is not None:
            return
        if done.HasField("failure"):
            error = failure_to_error(done.failure)
            if isinstance(error, LinkLost):
                error.reported_by(done.stage, done.rank)
            if isinstance(error, WorkerLost):
                # No later step would get past the broken link either.
                self.lose(error)
                return
        now = self._clock()
        try:
            advances = self._scheduler.on_answer(done, now)
        except ProtocolError as error:
            self.lose(error)
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
            self._retire(live, "error", advance.error)
            return
        finish_reason = live.sequence.finish_reason
        try:
            reading = live.read(advance.tokens, finish_reason)
        except Exception as error:  # noqa: BLE001 - a tokenizer's error ends one request, not all
            _log.exception("Request %s: its tokens cannot be read", live.sequence.request.request_id)
            self._retire(live, "error", ServingError(f"The answer's tokens cannot be read: {error!r}."))
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
        self._generated_tokens += len(tokens)
        live.put(tokens, reading, finish_reason, now, self._meter)

    def _retire(self, live: LiveRequest, reason: FinishReason, error: RingError | None = None) -> None:
        self._finished[reason] += not live.is_warm_up
        live.end(reason, error, self._clock(), self._meter)
        self._take_out(live, is_spoiled=reason == "error")

    def _take_out(self, live: LiveRequest, *, is_spoiled: bool = False) -> None:
        """Remove a request. Its KV stays in the prefix cache, unless the scheduler has freed it as wrong."""
        del self._live[live.sequence.id]
        self._scheduler.finish(live.sequence)
        self._grammars.leave(live.sequence, is_spoiled=is_spoiled)
        if self._wanted_kv and self._wanted_kv != self._scheduler.kv_limits:
            self._apply_kv_limits()

    # ---- errors and the end

    def lose(self, error: RingError) -> None:
        """End because the instance is lost: this epoch is over. Another engine may continue the requests."""
        if self._ended is not None:
            return
        if self._hold is None:
            self.fail(error)
            return
        self._ended = error
        all_lives, lives = list(self._live.values()), self.lives
        self._live = {}
        left, now = self._scheduler.left_kv(), self._clock()
        unanswered = self._grammars.unanswered | self._scheduler.unanswered
        for live in all_lives:
            live.interrupt(now, unanswered.get(live.sequence.id, {}), left.get(live.sequence.id))
        if self._on_lost is not None:
            self._on_lost(error)
        self._hold(lives, error)

    failed = lose

    def fail(self, error: RingError) -> None:
        """End every request with `error`, and refuse new ones: this instance and epoch are over."""
        if self._ended is not None:
            return
        self._ended = error
        for live in list(self._live.values()):
            self._retire(live, "error", error)
        if self._on_lost is not None:
            self._on_lost(error)

    async def close(self) -> None:
        """End every request and free its KV, because the workers may continue to run."""
        if self._ended is not None:
            return
        self.fail(NotReady("This instance of the model is not needed any more."))
        self._scheduler.reset()
        self._send_all(self._clock())

    # ---- reports

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and answer together."""
        return self.limits.context_length

    @property
    def error(self) -> RingError | None:
        """Reason why the engine no longer answers; None while it does."""
        return self._ended

    def record_started(self, rank: RankId, begun: int, *, is_loading: bool = False) -> None:
        """Record, from a heartbeat, that a rank started a step, or loads before it: its deadline counts from now."""
        self._scheduler.in_flight.record_started(rank, begun, self._clock(), is_loading=is_loading)

    def limit_kv(self, limits: Mapping[RankId, int]) -> None:
        """Set the bytes of KV that each rank may hold from now on. Running requests continue."""
        self._wanted_kv = dict(limits)
        self._apply_kv_limits()
        self._send_steps(self._clock())

    def _apply_kv_limits(self) -> None:
        self._scheduler.limit_kv(self._wanted_kv)
        before = self.context_length
        self.limits = self._model_limits.within(self._scheduler.capacity_tokens)
        log_new_context(self._instance, before, self.context_length)
        self._executor.limit_kv(self._scheduler.kv.budget.even_limits)

    def load_for(self, prompts: Iterable[tuple[int, ...]]) -> EngineLoad:
        """Return the instance's load, and the cost of prompts on it."""
        shared = max((self._scheduler.shared_tokens(prompt) for prompt in prompts), default=0)
        return EngineLoad(
            is_open=self._ended is None,
            sequences=self._scheduler.num_open,
            tokens_to_read=self._scheduler.tokens_to_read,
            shared_tokens=shared,
            token_s=self._scheduler.ways.speed.token_s,
        )

    @property
    def answered_at(self) -> Mapping[RankId, float]:
        """Time of each rank's last answer, by the clock; 0 before the first one."""
        return self._scheduler.in_flight.answered_at

    def oldest_unanswered(self) -> Unanswered | None:
        """Return the rank that all others wait for, with its deadline; None if no answer is owed."""
        return None if self._ended is not None else self._scheduler.in_flight.oldest_unanswered(self._clock())

    def step_times(self) -> StepTimes:
        """Return the times of the last steps, by stage and kind."""
        return self._scheduler.in_flight.window.read()

    def requests(self) -> list[OpenRequest]:
        """Return the requests that run or wait, the oldest first."""
        now = self._clock()
        return [live.as_open(now) for live in self.lives]

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
