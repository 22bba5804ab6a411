"""Spans of a request, with a clock and a calendar that the test sets."""

from __future__ import annotations

from dataclasses import dataclass, field

from mlx_ring.core.generation import EndedRequest, GenerateRequest
from mlx_ring.core.traces import TRACEPARENT, Attributes
from mlx_ring.core.types import SamplingParams
from mlx_ring.engine.request_traces import RequestTracer

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
NOON_NS = 1_700_000_000_000_000_000


@dataclass
class RecordedSpan:
    """Span that keeps its start and end."""

    began_ns: int | None
    ended_ns: int | None = None
    traceparent: str = PARENT

    def set_attributes(self, attributes: Attributes, *, name: str = "") -> None: ...

    def end(self, at_ns: int | None = None, *, error: str = "") -> None:
        del error
        self.ended_ns = at_ns


@dataclass
class RecordedTraces:
    """Implementation of `Tracing` that keeps its spans by name."""

    spans: dict[str, RecordedSpan] = field(default_factory=dict[str, RecordedSpan])

    def start(
        self, name: str, attributes: Attributes, *, at_ns: int | None = None, **_: object
    ) -> RecordedSpan:
        del attributes
        return self.spans.setdefault(name, RecordedSpan(at_ns))

    def close(self) -> None: ...


def test_spans_have_the_times_of_the_request_and_not_of_its_report() -> None:
    traces, now = RecordedTraces(), [0.0]
    tracer = RequestTracer(traces, "m", {}, unix_ns=lambda: NOON_NS + int(now[0] * 1e9), clock=lambda: now[0])
    token = TRACEPARENT.set(PARENT)
    now[0] = 1.5
    span = tracer.begin(GenerateRequest("r", (1,), SamplingParams()), submitted_at=1.0)
    TRACEPARENT.reset(token)
    assert span is not None
    now[0] = 9.0
    tracer.end(span, EndedRequest(1.0, 2.0, 3.0, 4.0, 5.0, 1, 2, 0, "stop"))
    seconds = {
        name: tuple(((at or 0) - NOON_NS) / 1e9 for at in (span.began_ns, span.ended_ns))
        for name, span in traces.spans.items()
    }
    assert seconds == {"llm_request": (1, 5), "queue": (1, 2), "prefill": (2, 3), "decode": (3, 4)}
