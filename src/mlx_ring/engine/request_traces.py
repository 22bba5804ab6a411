"""Traces of requests: queue, prefill, decode, and the work of every stage.

Names are those of OpenTelemetry's conventions for generative AI, where they have one; those of `gen_ai.server` are
their metrics', of this one request. The API opens the request's span (`core/traces.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from mlx_ring.core.generation import EndedRequest, GenerateRequest
from mlx_ring.core.traces import TRACEPARENT, Span, TracePlace, Tracing
from mlx_ring.core.types import RankId
from mlx_ring.rpc.protos import step_pb2


class RequestTracer:
    """Tracer of one instance's requests."""

    def __init__(
        self,
        tracing: Tracing,
        model: str,
        nodes: Mapping[RankId, str],
        unix_ns: Callable[[], int] = time.time_ns,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start a tracer. `nodes` are the ranks' nodes; `clock` is the engine's."""
        self._tracing = tracing
        self._model = model
        self._nodes = nodes
        self._unix_ns = unix_ns
        self._clock = clock

    def begin(self, request: GenerateRequest, submitted_at: float) -> Span | None:
        """Open the span of a request; None if it is not traced."""
        parent = TRACEPARENT.get()
        if not parent:
            return None
        sampling = request.sampling
        attributes: dict[str, str | int | float] = {
            "gen_ai.provider.name": "mlx-ring",
            "gen_ai.request.model": self._model,
            "gen_ai.response.model": self._model,
            "gen_ai.response.id": request.request_id,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
        }
        if sampling.max_tokens is not None:
            attributes["gen_ai.request.max_tokens"] = sampling.max_tokens
        at_ns = self._clock_unix_ns() + int(submitted_at * 1e9)
        return self._tracing.start("llm_request", attributes, parent=parent, at_ns=at_ns)

    def _clock_unix_ns(self) -> int:
        """Return the Unix time of the clock's zero."""
        return self._unix_ns() - int(self._clock() * 1e9)

    def end(self, span: Span, ended: EndedRequest) -> None:
        """Close the span of a request, with a span for each phase."""
        to_unix_ns = self._clock_unix_ns()

        def part(name: str, since: float, until: float, attributes: Mapping[str, int]) -> None:
            child = self._tracing.start(
                name, attributes, parent=span.traceparent, at_ns=to_unix_ns + int(since * 1e9)
            )
            if child is not None:
                child.end(to_unix_ns + int(until * 1e9))

        opened, first, last = ended.opened_at, ended.first_token_at, ended.last_token_at
        part("queue", ended.submitted_at, ended.ended_at if opened is None else opened, {})
        if opened is not None:
            read = {
                "gen_ai.usage.input_tokens": ended.prompt_tokens,
                "gen_ai.usage.cache_read.input_tokens": ended.cached_tokens,
            }
            part("prefill", opened, ended.ended_at if first is None else first, read)
        if first is not None and last is not None:
            part("decode", first, last, {"gen_ai.usage.output_tokens": ended.completion_tokens})
        span.set_attributes(_usage(ended))
        span.end(
            to_unix_ns + int(ended.ended_at * 1e9),
            error="" if ended.error is None else type(ended.error).__name__,
        )

    def stages(self, place: RankId, spans: Iterable[step_pb2.StageSpan]) -> None:
        """Export the spans that a rank reported."""
        where = TracePlace(self._nodes.get(place, ""), place.stage, place.rank)
        for span in spans:
            child = self._tracing.start(
                f"stage {place.stage} {'decode' if span.is_decode else 'prefill'}",
                _stage_attributes(where, span),
                parent=span.traceparent,
                at_ns=span.started_unix_us * 1000,
                place=where,
            )
            if child is not None:
                child.end(span.finished_unix_us * 1000)


def _usage(ended: EndedRequest) -> dict[str, int | float | tuple[str, ...]]:
    attributes: dict[str, int | float | tuple[str, ...]] = {
        "gen_ai.usage.input_tokens": ended.prompt_tokens,
        "gen_ai.usage.output_tokens": ended.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": ended.cached_tokens,
        "gen_ai.response.finish_reasons": (ended.reason,),
        "gen_ai.server.request.duration": ended.ended_at - ended.submitted_at,
    }
    first, last = ended.first_token_at, ended.last_token_at
    if first is not None and last is not None:
        attributes["gen_ai.server.time_to_first_token"] = first - ended.submitted_at
        if ended.completion_tokens > 1:
            attributes["gen_ai.server.time_per_output_token"] = (last - first) / (ended.completion_tokens - 1)
    return attributes


def _stage_attributes(where: TracePlace, span: step_pb2.StageSpan) -> dict[str, str | int]:
    return {
        "mlx_ring.node": where.node,
        "mlx_ring.stage": where.stage,
        "mlx_ring.rank": where.rank,
        "mlx_ring.steps": span.steps,
        "mlx_ring.tokens": span.tokens,
        "mlx_ring.queue_us": span.queue_us,
        "mlx_ring.link_wait_us": span.link_wait_us,
        "mlx_ring.compute_us": span.compute_us,
        "mlx_ring.link_send_us": span.link_send_us,
    }
