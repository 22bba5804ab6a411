"""Measurement of links on request of the head, once for each pair of addresses, and its storage."""

from __future__ import annotations

import asyncio
import socket
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from tests.agent.linked_nodes import LinkedNode, linked_node
from tests.machines import node_credentials
from tests.throttled_relay import throttled_relay

from mlx_ring.agent.link_measurements import LINKS_FILE, LinkStore, RouteKey
from mlx_ring.cluster.agent_link import AgentLink
from mlx_ring.cluster.security.authority import Authority
from mlx_ring.core.errors import PeerRefused, RingError, WorkerStuck
from mlx_ring.rpc.channels import open_aio_channel
from mlx_ring.rpc.frames import Frame
from mlx_ring.rpc.hello import make_hello
from mlx_ring.rpc.link_probe import PROBE, LinkMeasure
from mlx_ring.rpc.protos import agent_pb2, worker_pb2
from mlx_ring.rpc.tls.credentials import Credentials
from mlx_ring.rpc.tls.peers import node_name

KEY = RouteKey("mini-2", "10.0.0.2", "10.0.0.1")
MEASURE = LinkMeasure(0.3e-3, 0.2e-3, 1e9, 20, 1 << 20)


@dataclass(slots=True)
class Clock:
    """A clock in Unix seconds that the test sets."""

    now: float = 1.8e9

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.open(tmp_path_factory.mktemp("cluster"))


async def measure(
    node: LinkedNode, credentials: Credentials, target: str, address: str, max_age_s: float = 3600.0
) -> agent_pb2.MeasureLinkReply:
    async with open_aio_channel(node.agent, credentials, node_name(node.name)) as channel:
        agent = AgentLink(channel, f"the agent of {node.name}")
        return await agent.measure_link(make_hello(), target, address, max_age_s, 30.0)


def test_a_link_is_measured_again_only_at_another_address_or_when_it_is_old(
    authority: Authority, tmp_path: Path
) -> None:
    async def run() -> list[float]:
        clock, head = Clock(), authority.head_credentials()
        async with AsyncExitStack() as stack:
            one = await stack.enter_async_context(
                linked_node(authority, "mini-1", tmp_path / "1", clock=clock)
            )
            two = await stack.enter_async_context(linked_node(authority, "mini-2", tmp_path / "2"))
            ages: list[float] = []
            for host, later_s in (("127.0.0.1", 0), ("127.0.0.1", 60), ("[::1]", 0), ("127.0.0.1", 7200)):
                clock.now += later_s
                found = await measure(one, head, "mini-2", f"{host}:{two.links_port}")
                assert found.round_trip_s > 0
                assert found.bytes_per_s > 0
                ages.append(found.age_s)
        return ages

    assert asyncio.run(run()) == [0.0, 60.0, 0.0, 0.0]


def test_a_slow_link_is_measured_as_slow(authority: Authority, tmp_path: Path) -> None:
    async def run() -> float:
        async with AsyncExitStack() as stack:
            one = await stack.enter_async_context(linked_node(authority, "mini-1", tmp_path / "1"))
            two = await stack.enter_async_context(linked_node(authority, "mini-2", tmp_path / "2"))
            port = await stack.enter_async_context(throttled_relay(two.links_port, 100_000))
            found = await measure(one, authority.head_credentials(), "mini-2", f"127.0.0.1:{port}")
        return found.bytes_per_s

    # The correction for the latency of the first bytes raises the result.
    assert asyncio.run(run()) < 1_000_000


@pytest.mark.slow
def test_a_link_without_an_answer_is_an_error_and_not_stored(authority: Authority, tmp_path: Path) -> None:
    async def run() -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            address = f"127.0.0.1:{silent.getsockname()[1]}"
            async with linked_node(authority, "mini-1", tmp_path) as one:
                with pytest.raises(WorkerStuck, match=f"mini-2 at {address} did not answer"):
                    await measure(one, authority.head_credentials(), "mini-2", address)

    asyncio.run(run())
    assert not (tmp_path / LINKS_FILE).exists()


@pytest.mark.slow
def test_an_answer_of_another_node_is_an_error(authority: Authority, tmp_path: Path) -> None:
    async def run() -> None:
        async with linked_node(authority, "mini-1", tmp_path) as one:
            with pytest.raises(RingError, match="mini-2 at"):
                await measure(one, authority.head_credentials(), "mini-2", f"127.0.0.1:{one.links_port}")

    asyncio.run(run())


def test_only_the_head_may_request_a_measurement(authority: Authority, tmp_path: Path) -> None:
    async def run() -> None:
        async with linked_node(authority, "mini-1", tmp_path) as one:
            with pytest.raises(PeerRefused, match="only the head may"):
                await measure(one, node_credentials(authority, "mini-2"), "mini-1", "127.0.0.1:9")

    asyncio.run(run())


def test_the_probe_of_a_removed_node_is_cancelled(authority: Authority, tmp_path: Path) -> None:
    async def run() -> None:
        prober = node_credentials(authority, "mini-2")
        async with (
            linked_node(authority, "mini-1", tmp_path) as one,
            open_aio_channel(f"127.0.0.1:{one.links_port}", prober, node_name("mini-1")) as channel,
        ):
            call = PROBE.aio_stream_stream(channel)(timeout=20)
            await call.write(Frame(worker_pb2.FrameHeader(hello=make_hello(node="mini-2"))))
            assert await call.read() is not grpc.aio.EOF
            serial = x509.load_pem_x509_certificate(prober.certificate).serial_number
            one.revoked.replace([f"{serial:x}"])
            assert one.guard.end_refused() == 1
            assert await call.code() == grpc.StatusCode.CANCELLED

    asyncio.run(run())


def test_probes_of_strangers_are_not_answered(authority: Authority, tmp_path: Path) -> None:
    async def run() -> None:
        stranger = node_credentials(Authority.open(tmp_path / "theirs"), "mini-2")
        forged = Credentials(authority.pem, stranger.certificate, stranger.key)
        async with (
            linked_node(authority, "mini-1", tmp_path / "1") as one,
            open_aio_channel(f"127.0.0.1:{one.links_port}", forged, node_name("mini-1")) as channel,
        ):
            call = PROBE.aio_stream_stream(channel)(iter([Frame(worker_pb2.FrameHeader())]))
            with pytest.raises(grpc.aio.AioRpcError):
                await call.read()

    asyncio.run(run())


def test_a_stored_measurement_holds_for_its_two_addresses_until_it_is_old(tmp_path: Path) -> None:
    clock = Clock()
    store = LinkStore(tmp_path / "state", clock)
    store.save(KEY, MEASURE)
    clock.now += 100
    kept = LinkStore(tmp_path / "state", clock).load(KEY, 100)
    assert kept is not None
    assert (kept.round_trip_s, kept.bytes_per_s, kept.age_s) == (0.3e-3, 1e9, 100)
    assert store.load(KEY, 99) is None
    assert store.load(RouteKey("mini-2", "10.0.0.3", "10.0.0.1"), 100) is None
    assert store.load(RouteKey("mini-2", "10.0.0.2", "192.168.0.1"), 100) is None
    clock.now -= 200
    assert store.load(KEY, 100) is None, "measured in the future"


def test_each_route_has_its_last_measurement(tmp_path: Path) -> None:
    store, other = LinkStore(tmp_path), RouteKey("mini-3", "10.0.0.3", "10.0.0.1")
    for key, bandwidth in ((KEY, 1.0), (other, 2.0), (KEY, 3.0)):
        store.save(key, LinkMeasure(1e-3, 1e-3, bandwidth, 1, 1))
    found = [store.load(key, 60) for key in (KEY, other)]
    assert [kept and kept.bytes_per_s for kept in found] == [3.0, 2.0]


@pytest.mark.parametrize("text", ["", "[]", '{"version": 1}', '{"version": 9, "mlx_ring": "0", "links": []}'])
def test_a_broken_file_is_ignored_and_overwritten(text: str, tmp_path: Path) -> None:
    (tmp_path / LINKS_FILE).write_text(text)
    store = LinkStore(tmp_path)
    assert store.load(KEY, 60) is None
    store.save(KEY, MEASURE)
    assert store.load(KEY, 60) is not None


def test_a_folder_that_cannot_be_written_is_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    LinkStore(tmp_path / "file" / "state").save(KEY, MEASURE)
    assert "is not kept, and is repeated next time" in caplog.text


def test_the_key_of_a_route_has_both_addresses() -> None:
    assert RouteKey.to("mini-2", "127.0.0.1:50051") == RouteKey("mini-2", "127.0.0.1", "127.0.0.1")
    assert RouteKey.to("mini-2", "[::1]:50051") == RouteKey("mini-2", "::1", "::1")
    assert not RouteKey.to("mini-2", "no.such.host.invalid:1").source
