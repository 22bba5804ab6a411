"""Measurement of a link between two processes, and the ends of a probe."""

from __future__ import annotations

import asyncio
import math
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from mlx_ring.core.errors import ProtocolError, VersionMismatch, WorkerLost, WorkerStuck
from mlx_ring.rpc import link_probe
from mlx_ring.rpc.channels import make_aio_server, make_server, open_aio_channel, open_channel
from mlx_ring.rpc.frames import Frame
from mlx_ring.rpc.hello import make_hello
from mlx_ring.rpc.link_probe import PROBE, PURPOSE, LinkResponder, ProbeBounds, probe_link
from mlx_ring.rpc.methods import Method, service_handler
from mlx_ring.rpc.protos import worker_pb2

SHORT = ProbeBounds(round_trips_s=0.05, throughput_s=0.2, most_bytes=32 << 20)
HELLO = Frame(worker_pb2.FrameHeader(hello=make_hello()))


@pytest.fixture(scope="module", params=["threads", "loop"])
def address(request: pytest.FixtureRequest) -> Iterator[str]:
    """Return the address of another process that answers probes."""
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("link_responder.py")), request.param],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        yield f"127.0.0.1:{int(process.stdout.readline())}"
        process.communicate("")


@pytest.fixture
def channel(address: str) -> Iterator[grpc.Channel]:
    with open_channel(address) as opened:
        yield opened


def probe_frame(nbytes: int) -> Frame:
    activation = worker_pb2.Activation(instance=PURPOSE, dtype="uint8", shape=[nbytes])
    return Frame(worker_pb2.FrameHeader(activation=activation), bytes(nbytes))


def answers(channel: grpc.Channel, *frames: Frame) -> list[worker_pb2.FrameAccepted]:
    return list(PROBE.stream_stream(channel)(iter(frames), timeout=30))


def test_a_probe_measures_round_trip_and_bandwidth_within_its_bounds(channel: grpc.Channel) -> None:
    found = probe_link(channel, make_hello(), "other", SHORT)
    assert 0 < found.least_round_trip_s <= found.round_trip_s
    assert math.isfinite(found.bandwidth)
    assert found.bandwidth > 0
    assert found.frames >= 11
    assert found.nbytes <= SHORT.most_bytes


def test_a_probe_of_a_fast_link_ends_before_its_bounds(channel: grpc.Channel) -> None:
    """Expect a hundred round trips and 128 MB in frames of the largest size, however small the server wants them."""
    patient = ProbeBounds(round_trips_s=3600.0, throughput_s=3600.0, answer_s=60.0, largest_bytes=1 << 20)
    found = probe_link(channel, make_hello(), "other", patient)
    assert 100 + 128 < found.frames < 100 + 128 + 20
    assert 128 << 20 < found.nbytes < 140 << 20
    assert found.bandwidth > 0


def test_a_link_can_be_probed_again(channel: grpc.Channel) -> None:
    first, second = (probe_link(channel, make_hello(), "other", SHORT) for _ in range(2))
    assert first.frames
    assert second.frames


def test_a_prober_of_another_version_is_refused_by_name(channel: grpc.Channel) -> None:
    hello = make_hello(node="old")
    hello.mlx = "0.1"
    with pytest.raises(VersionMismatch, match=r"old has mlx 0\.1"):
        probe_link(channel, hello, "other", SHORT)


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        ([probe_frame(1)], "begins with a greeting"),
        ([HELLO, HELLO], "does not belong to a probe"),
        ([HELLO, Frame(worker_pb2.FrameHeader())], "does not belong to a probe"),
        (
            [HELLO, Frame(worker_pb2.FrameHeader(tombstone=worker_pb2.Tombstone(step=1)))],
            "does not belong to a probe",
        ),
        (
            [HELLO, Frame(worker_pb2.FrameHeader(activation=worker_pb2.Activation(instance="demo")))],
            "does not belong",
        ),
        ([HELLO, probe_frame((64 << 20) + 1)], "are allowed"),
    ],
)
def test_an_invalid_frame_ends_only_its_probe_with_a_reason(
    channel: grpc.Channel, frames: list[Frame], message: str
) -> None:
    *_, last = answers(channel, *frames, probe_frame(1))
    assert message in last.failure.message
    assert probe_link(channel, make_hello(), "other", SHORT).frames


def test_bytes_that_are_no_frame_end_only_their_probe(channel: grpc.Channel) -> None:
    raw: Method[bytes, bytes] = Method(PROBE.service, PROBE.name, PROBE.arity, bytes, bytes, bytes, bytes)
    (answer,) = raw.stream_stream(channel)(iter([b"\xff\xff\xff\xff rubbish"]), timeout=30)
    failure = worker_pb2.FrameAccepted.FromString(answer).failure
    assert (failure.kind, "should have 4294967295 bytes" in failure.message) == ("ProtocolError", True)
    assert probe_link(channel, make_hello(), "other", SHORT).frames


def test_an_endless_probe_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_probe, "_MOST_FRAMES", 3)
    judge = link_probe.ProbeJudge(make_hello())
    replies = [judge.answer(frame) for frame in (HELLO, *[probe_frame(1)] * 4)]
    assert [answer.HasField("failure") for answer in replies] == [False, False, False, False, True]


def test_a_silent_prober_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_probe, "_RESPONDER_S", 0.1)

    async def silent_probe() -> list[str]:
        server = make_aio_server()
        server.add_generic_rpc_handlers((LinkResponder(make_hello()).aio_handler(),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with open_aio_channel(f"127.0.0.1:{port}") as channel:
            call = PROBE.aio_stream_stream(channel)(timeout=30)
            await call.write(HELLO)
            messages = [answer.failure.message async for answer in call]
        await server.stop(None)
        return messages

    assert asyncio.run(silent_probe()) == ["", "A probe of a link may take 0.1 s."]


def test_a_missing_responder_is_named(tmp_path: Path) -> None:
    bounds = ProbeBounds(0.05, 0.05, answer_s=0.3)
    with (
        open_channel(f"unix:{tmp_path}/nobody") as nowhere,
        pytest.raises(WorkerStuck, match="mini did not answer"),
    ):
        probe_link(nowhere, make_hello(), "mini", bounds)


def test_a_responder_that_does_not_greet_is_given_up_early() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        open_channel(f"127.0.0.1:{silent.getsockname()[1]}") as channel,
        pytest.raises(WorkerStuck, match="mini did not answer"),
    ):
        probe_link(channel, make_hello(), "mini", ProbeBounds(answer_s=3600.0, greeting_s=0.2))


def test_a_responder_that_dies_ends_the_probe_with_an_error() -> None:
    server, address = serve_hanging_up()
    with open_channel(address) as channel, pytest.raises((WorkerLost, ProtocolError)):
        probe_link(channel, make_hello(), "mini", SHORT)
    server.stop(None).wait()


def serve_hanging_up() -> tuple[grpc.Server, str]:
    """Start a server that accepts the greeting and ends; return it with its address."""

    def hang_up(
        frames: Iterator[Frame], _context: grpc.ServicerContext
    ) -> Iterator[worker_pb2.FrameAccepted]:
        next(frames)
        yield worker_pb2.FrameAccepted(hello=make_hello())

    server = make_server(2)
    server.add_generic_rpc_handlers((service_handler(link_probe.PROBE_SERVICE, ((PROBE, hang_up),)),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    return server, f"127.0.0.1:{port}"
