"""A request's spans, by a clock and a calendar that a test turns."""

from __future__ import annotations

from dataclasses import dataclass, field

from mlx_ring.core.engine_stats import EndedRequest
from mlx_ring.core.generation import GenerateRequest
from mlx_ring.core.traces import TRACEPARENT, Attributes
from mlx_ring.core.types import SamplingParams
from mlx_ring.engine.request_traces import RequestTracer

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
NOON_NS = 1_700_000_000_000_000_000


@dataclass
class Kept:
    """Keeps the contract `Span`."""

    began_ns: int | None
    ended_ns: int | None = None
    traceparent: str = PARENT

    def set_attributes(self, attributes: Attributes, *, name: str = "") -> None: ...

    def end(self, at_ns: int | None = None, *, error: str = "") -> None:
        del error
        self.ended_ns = at_ns


@dataclass
class Spans:
    """Keeps the contract `Tracing`, and the spans by their names."""

    kept: dict[str, Kept] = field(default_factory=dict[str, Kept])

    def start(self, name: str, attributes: Attributes, *, at_ns: int | None = None, **_: object) -> Kept:
        del attributes
        return self.kept.setdefault(name, Kept(at_ns))

    def close(self) -> None: ...


def test_a_request_lasts_from_its_coming_to_its_end_however_late_that_is_told() -> None:
    spans, now = Spans(), [0.0]
    tracer = RequestTracer(spans, "m", {}, unix_ns=lambda: NOON_NS + int(now[0] * 1e9), clock=lambda: now[0])
    told = TRACEPARENT.set(PARENT)
    now[0] = 1.5
    span = tracer.begin(GenerateRequest("r", (1,), SamplingParams()), submitted_at=1.0)
    TRACEPARENT.reset(told)
    assert span is not None
    now[0] = 9.0
    tracer.end(span, EndedRequest(1.0, 2.0, 3.0, 4.0, 5.0, 1, 2, 0, "stop"))
    seconds = {
        name: tuple(((at or 0) - NOON_NS) / 1e9 for at in (kept.began_ns, kept.ended_ns))
        for name, kept in spans.kept.items()
    }
    assert seconds == {"llm_request": (1, 5), "queue": (1, 2), "prefill": (2, 3), "decode": (3, 4)}
