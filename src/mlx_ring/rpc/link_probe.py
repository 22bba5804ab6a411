"""Measurement of a link's round trip and throughput, with frames and channels like those of real links.

The prober sends frames, and the responder accepts each of them like a link's greeting. Both sides limit time,
frames and bytes. A foreign frame ends the probe and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import statistics
import threading
import time
from collections.abc import AsyncIterator, Generator, Iterator
from dataclasses import dataclass, field

import grpc

from mlx_ring.core.errors import ProtocolError, RingError, WorkerStuck
from mlx_ring.host.process import release_freed_memory
from mlx_ring.rpc.failures import channel_error, error_to_failure, failure_to_error
from mlx_ring.rpc.frames import Frame, encode_frame, receive_frame
from mlx_ring.rpc.hello import check_hello
from mlx_ring.rpc.methods import Method, service_handler
from mlx_ring.rpc.protos import hello_pb2, worker_pb2
from mlx_ring.rpc.tls.handshakes import handshake_error
from mlx_ring.rpc.tls.peers import CallContext, address_of_call

log = logging.getLogger(__name__)


PROBE_SERVICE = "mlx_ring.Probe"
PROBE: Method[Frame, worker_pb2.FrameAccepted] = Method(
    PROBE_SERVICE,
    "Link",
    "stream_stream",
    encode_frame,
    receive_frame,
    worker_pb2.FrameAccepted.SerializeToString,
    worker_pb2.FrameAccepted.FromString,
)
"""Method like `LINK`, whose frames are dropped."""
PURPOSE = "probe"
"""Value of the instance field in a probe's frames."""

SMALL_BYTES = 4096
"""Size of a token's activations in a small model."""
_LARGE_BYTES, _LARGEST_BYTES = 16 << 10, 64 << 20
_GROWTH = 4
_LONG_S = 0.05
"""Duration of a large frame: long beside the round trip, which is subtracted."""
_AT_LEAST, _FEWEST, _ENOUGH = 10, 3, 100
"""Numbers of round trips: the usual number, the least if they take long, and the most, which a fast link ends with."""
_LONGEST = 4
"""Factor by which `_AT_LEAST` round trips may exceed their time."""
_LARGEST_ENOUGH = 2 * _LARGEST_BYTES
"""Bytes in frames of the largest size. Only a fast link gets so far, and more of them would only occupy both machines."""
_MOST_FRAMES = 2000
_MOST_BYTES = 1 << 30
_RESPONDER_S = 30.0


@dataclass(frozen=True, slots=True)
class ProbeBounds:
    """Limits of one probe, on the prober's side."""

    round_trips_s: float = 0.3
    throughput_s: float = 1.0
    most_bytes: int = 512 << 20
    answer_s: float = 10.0
    """Time for any single answer."""
    greeting_s: float = 10.0
    """Time for the connection and the first answer."""
    largest_bytes: int = _LARGEST_BYTES
    """Size of a single frame, if the responder's server takes no larger ones."""


@dataclass(frozen=True, slots=True)
class LinkMeasure:
    """Result of one probe."""

    round_trip_s: float
    """Median round trip."""
    least_round_trip_s: float
    bandwidth: float
    """Throughput in bytes a second."""
    frames: int
    nbytes: int


# ---- the prober


def probe_link(
    channel: grpc.Channel, hello: hello_pb2.Hello, peer: str, bounds: ProbeBounds | None = None
) -> LinkMeasure:
    """Measure the link to a peer. Blocks for a second or two.

    Args:
        channel: as a link to the peer would open it.
        peer: its name, for errors.

    Raises:
        RingError: the peer refuses, has ended, or does not answer in time.
    """
    with _opened(channel, hello, peer, bounds or ProbeBounds()) as probe:
        trips = probe.round_trips()
        return LinkMeasure(
            round_trip_s=statistics.median(trips),
            least_round_trip_s=min(trips),
            bandwidth=probe.bandwidth(statistics.median(trips)),
            frames=probe.frames,
            nbytes=probe.nbytes,
        )


@contextlib.contextmanager
def _opened(
    channel: grpc.Channel, hello: hello_pb2.Hello, peer: str, bounds: ProbeBounds
) -> Generator[_Probe]:
    probe = _Probe(channel, peer, bounds)
    patience = threading.Timer(bounds.greeting_s, probe.close)
    patience.start()
    try:
        probe.greet(hello)
        patience.cancel()
        yield probe
    except grpc.RpcError as error:
        raise _lost(error, peer) from error
    finally:
        patience.cancel()
        probe.close()


def _lost(error: grpc.RpcError, peer: str) -> RingError:
    code = getattr(error, "code", None)
    if callable(code) and code() in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED):
        return WorkerStuck(f"{peer} did not answer a probe of its link in time.")
    return handshake_error(error, peer) or channel_error(error, peer)


class _Probe:
    """One stream to a responder."""

    def __init__(self, channel: grpc.Channel, peer: str, bounds: ProbeBounds) -> None:
        self._peer = peer
        self._bounds = bounds
        self._frames: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        limit_s = bounds.round_trips_s + bounds.throughput_s + bounds.answer_s
        self._call = PROBE.stream_stream(channel)(
            iter(self._frames.get, None), timeout=limit_s, wait_for_ready=True
        )
        self.frames = self.nbytes = 0

    def greet(self, hello: hello_pb2.Hello) -> None:
        self._frames.put(Frame(worker_pb2.FrameHeader(hello=hello)))
        self._await_answer()

    def round_trips(self) -> list[float]:
        """Measure the seconds of small frames, one after the other. The first is slower and does not count."""
        payload = bytes(SMALL_BYTES)
        self._seconds(payload)
        started, trips = time.perf_counter(), list[float]()
        while len(trips) < _ENOUGH:
            trips.append(self._seconds(payload))
            taken, limit_s = time.perf_counter() - started, self._bounds.round_trips_s
            if len(trips) >= _FEWEST and taken > (limit_s if len(trips) >= _AT_LEAST else _LONGEST * limit_s):
                break
        return trips

    def bandwidth(self, round_trip_s: float) -> float:
        """Measure the throughput of large frames: as large as takes a while, then some of those, and the best of them."""
        until = time.perf_counter() + self._bounds.throughput_s
        size, best, largest = _LARGE_BYTES, 0.0, 0
        while largest < _LARGEST_ENOUGH and self._may_send(size, best, until):
            taken = self._seconds(bytes(size))
            largest += size if size >= self._bounds.largest_bytes else 0
            # A frame's first bytes travel as long as a small frame.
            best = max(best, size / max(taken - round_trip_s, taken / 10))
            if taken < _LONG_S:
                size = min(self._bounds.largest_bytes, size * _GROWTH)
        return best

    def _may_send(self, size: int, best: float, until: float) -> bool:
        """Report whether another frame is within the limits; the first always is."""
        expected_s = size / best if best else 0.0
        return not best or (
            time.perf_counter() + expected_s < until
            and self.nbytes + size <= self._bounds.most_bytes
            and self.frames < _MOST_FRAMES - 1
        )

    def _seconds(self, payload: bytes) -> float:
        """Measure the time until a frame was sent and accepted."""
        activation = worker_pb2.Activation(
            instance=PURPOSE, step=self.frames + 1, dtype="uint8", shape=[len(payload)]
        )
        started = time.perf_counter()
        self._frames.put(Frame(worker_pb2.FrameHeader(activation=activation), payload))
        self._await_answer()
        self.frames += 1
        self.nbytes += len(payload)
        return time.perf_counter() - started

    def _await_answer(self) -> None:
        answer = next(self._call, None)
        if answer is None:
            raise ProtocolError(f"{self._peer} ended the probe of its link too early.")
        if answer.HasField("failure"):
            raise failure_to_error(answer.failure)

    def close(self) -> None:
        self._frames.put(None)
        self._call.cancel()


# ---- the responder


@dataclass(slots=True)
class ProbeJudge:
    """Judge of each frame of one probe."""

    ours: hello_pb2.Hello
    until: float = field(default_factory=lambda: time.monotonic() + _RESPONDER_S)
    frames: int = 0
    nbytes: int = 0

    def answer(self, frame: Frame) -> worker_pb2.FrameAccepted:
        """Return the reply; a failure ends the probe."""
        try:
            self._check(frame)
        except RingError as error:
            return worker_pb2.FrameAccepted(failure=error_to_failure(error))
        greets = self.frames == 0
        self.frames += 1
        return worker_pb2.FrameAccepted(hello=self.ours if greets else hello_pb2.Hello())

    def _check(self, frame: Frame) -> None:
        header = frame.header
        if self.frames == 0:
            if not header.HasField("hello"):
                raise ProtocolError(
                    frame.problem or "A probe of a link begins with a greeting, but another frame arrived."
                )
            check_hello(header.hello, self.ours, header.hello.node or "the prober")
            return
        if not header.HasField("activation") or header.activation.instance != PURPOSE:
            raise ProtocolError(frame.problem or "A frame arrived that does not belong to a probe.")
        self.nbytes += len(frame.payload)
        if len(frame.payload) > _LARGEST_BYTES or self.nbytes > _MOST_BYTES:
            raise ProtocolError(
                f"A probe of a link sent {self.nbytes} bytes, its last frame {len(frame.payload)}; "
                f"{_MOST_BYTES} and {_LARGEST_BYTES} are allowed."
            )
        if self.frames > _MOST_FRAMES or time.monotonic() > self.until:
            raise ProtocolError(
                f"A probe of a link may have {_MOST_FRAMES} frames and take {_RESPONDER_S:g} s; this one exceeds that."
            )


class LinkResponder:
    """Responder that accepts probes' frames, on a server of threads or inside an event loop."""

    def __init__(self, hello: hello_pb2.Hello) -> None:
        self._hello = hello

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the handler for a server of threads, as in workers."""
        return service_handler(PROBE_SERVICE, ((PROBE, self.respond),))

    def aio_handler(self) -> grpc.GenericRpcHandler:
        """Return the handler for a server in an event loop, as in agents."""
        return service_handler(PROBE_SERVICE, ((PROBE, self.respond_aio),))

    def respond(
        self, frames: Iterator[Frame], context: grpc.ServicerContext
    ) -> Iterator[worker_pb2.FrameAccepted]:
        judge, patience = ProbeJudge(self._hello), threading.Timer(_RESPONDER_S, context.cancel)
        # A prober that says nothing would occupy a thread.
        patience.start()
        try:
            for frame in frames:
                answer = judge.answer(frame)
                # The last frame may have 64 MB, which are free before they are released below.
                del frame
                yield answer
                if answer.HasField("failure"):
                    _log_end(answer, context)
                    return
        finally:
            patience.cancel()
            release_freed_memory()

    async def respond_aio(
        self, frames: AsyncIterator[Frame], context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncIterator[worker_pb2.FrameAccepted]:
        judge = ProbeJudge(self._hello)
        async for frame in _until(judge.until, frames):
            answer = judge.answer(frame)
            yield answer
            if answer.HasField("failure"):
                _log_end(answer, context)
                return


async def _until(until: float, frames: AsyncIterator[Frame]) -> AsyncIterator[Frame]:
    """Yield the frames that come in time: a prober that says nothing would keep its call open for ever."""
    while True:
        try:
            async with asyncio.timeout(until - time.monotonic()):
                frame = await anext(frames)
        except StopAsyncIteration:
            return
        except TimeoutError:
            yield Frame(worker_pb2.FrameHeader(), problem=f"A probe of a link may take {_RESPONDER_S:g} s.")
            return
        yield frame


def _log_end(answer: worker_pb2.FrameAccepted, context: CallContext) -> None:
    log.warning("Ended a probe from %s: %s", address_of_call(context), answer.failure.message)
