"""A request that is being answered, and the reports made from it: its deltas, its state, and its end."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from mlx_ring.core.engine_stats import EndedRequest, OpenRequest, RequestState
from mlx_ring.core.errors import RingError
from mlx_ring.core.generation import Delta, RequestStream, RequestTimings
from mlx_ring.core.traces import Span
from mlx_ring.core.types import FinishReason, TokenLogprob
from mlx_ring.engine.detokenizer import AnswerText, Reading
from mlx_ring.engine.sequence import Sequence


@dataclass(slots=True)
class LiveRequest:
    """A request from its submission until its end. Times are in seconds of the engine's clock."""

    sequence: Sequence
    stream: RequestStream
    text: AnswerText
    completion_tokens: int = 0
    is_first: bool = True
    """True until the first delta."""
    last_at: float = 0.0
    """Time of the last tokens."""
    span: Span | None = None
    """Span of the request, if it is traced."""
    client: str = ""
    """Client that sent the request."""
    deadline: asyncio.TimerHandle | None = None

    def delta(
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

    def as_ended(self, reason: FinishReason, error: RingError | None, now: float) -> EndedRequest:
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
        if not self.sequence.scheduled:
            return "waiting"
        return "answering" if self.sequence.is_prefilled else "reading"

    def _timings(self, now: float) -> RequestTimings:
        sequence = self.sequence
        opened = sequence.submitted_at if sequence.opened_at is None else sequence.opened_at
        first = now if sequence.first_token_at is None else sequence.first_token_at
        last = now if sequence.last_token_at is None else sequence.last_token_at
        return RequestTimings(opened - sequence.submitted_at, first - opened, last - first)
