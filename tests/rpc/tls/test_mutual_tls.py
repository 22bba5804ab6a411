"""Real servers on loopback: a valid certificate is served, any other caller refused with a reason."""

from __future__ import annotations

import asyncio
import socket
import ssl
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from tests.machines import ANSWER, NOW, free_pair_of_ports, listening, node_credentials

from mlx_ring.cluster.control import open_control
from mlx_ring.cluster.security import authority as authorities
from mlx_ring.cluster.security.authority import CERTIFICATE_LIFE, Authority
from mlx_ring.core.errors import ConfigError, PeerRefused, WorkerLost
from mlx_ring.host.addresses import HeadAddress
from mlx_ring.host.private_files import write_private
from mlx_ring.rpc.channels import add_secure_port, make_server, open_aio_channel, open_channel
from mlx_ring.rpc.failures import channel_error
from mlx_ring.rpc.methods import AGENT_SERVICE, STOP, service_handler
from mlx_ring.rpc.protos import agent_pb2
from mlx_ring.rpc.tls.credentials import (
    CERTIFICATE_FILE,
    KEY_FILE,
    Anchor,
    ChannelTrust,
    Credentials,
    KeptCredentials,
    load_credentials,
    serve_from_folder,
)
from mlx_ring.rpc.tls.handshakes import handshake_error
from mlx_ring.rpc.tls.peers import HEAD_NAME, Peer, node_name, peer_of_call, peer_of_certificate

MINI = node_name("mini-1")
LONG_AGO = NOW - CERTIFICATE_LIFE - timedelta(days=1)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.open(tmp_path_factory.mktemp("cluster"))


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.open(tmp_path_factory.mktemp("foreign"))


@pytest.fixture(scope="module")
def mini(authority: Authority) -> Credentials:
    return node_credentials(authority, "mini-1")


async def ask(address: str, trust: ChannelTrust | None, name: str) -> int:
    """Return the server's answer, or raise the caller's error."""
    async with open_aio_channel(address, trust, name) as channel:
        try:
            reply = await STOP.aio_unary_unary(channel)(agent_pb2.StopRequest(), timeout=10)
        except grpc.aio.AioRpcError as error:
            raise (handshake_error(error, "The peer") or channel_error(error, "The peer")) from error
    return reply.stopped


def shown_leaf(port: int, client: Credentials, folder: Path, name: str) -> x509.Certificate:
    """Return the certificate that a server on loopback shows; `folder` keeps the client's files."""
    client.save(folder)
    context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cadata=client.authority.decode())
    context.load_cert_chain(folder / CERTIFICATE_FILE, folder / KEY_FILE)
    with (
        socket.create_connection(("127.0.0.1", port), timeout=10) as plain,
        context.wrap_socket(plain, server_hostname=name) as connection,
    ):
        shown = connection.getpeercert(binary_form=True)
        assert shown is not None
        return x509.load_der_x509_certificate(shown)


def shown_peer(port: int, client: Credentials, folder: Path, name: str) -> Peer:
    return peer_of_certificate(shown_leaf(port, client, folder, name))


def refusal(served_by: Credentials, trust: ChannelTrust | None, name: str, trusted: Credentials) -> str:
    """Return the message of a refused caller; check that a trusted one is served afterwards."""

    async def run() -> str:
        async with listening(served_by) as address:
            with pytest.raises((PeerRefused, WorkerLost)) as caught:
                await ask(address, trust, name)
            # The same server answers another caller, who expects the server's real name.
            assert await ask(address, trusted, MINI) == ANSWER
        return str(caught.value)

    return asyncio.run(run())


def test_a_node_reaches_the_head_and_the_head_a_node(authority: Authority, mini: Credentials) -> None:
    async def run() -> tuple[int, int]:
        head = authority.head_credentials()
        async with listening(head) as at_head, listening(mini) as at_node:
            return await ask(at_head, mini, HEAD_NAME), await ask(at_node, head, MINI)

    assert asyncio.run(run()) == (ANSWER, ANSWER)


def test_threaded_servers_speak_tls_like_async_ones(authority: Authority, mini: Credentials) -> None:
    seen: list[Peer] = []

    def behaviour(_request: agent_pb2.StopRequest, context: grpc.ServicerContext) -> agent_pb2.StopReply:
        seen.append(peer_of_call(context))
        return agent_pb2.StopReply(stopped=ANSWER)

    server = make_server(1)
    server.add_generic_rpc_handlers((service_handler(AGENT_SERVICE, ((STOP, behaviour),)),))
    port = add_secure_port(server, "127.0.0.1:0", mini.for_server())
    server.start()
    try:
        with open_channel(f"127.0.0.1:{port}", authority.head_credentials(), MINI) as channel:
            assert STOP.unary_unary(channel)(agent_pb2.StopRequest(), timeout=10).stopped == ANSWER
    finally:
        server.stop(None)
    assert [peer.is_head for peer in seen] == [True]


def test_a_unix_socket_stays_plain_despite_credentials(mini: Credentials, tmp_path: Path) -> None:
    server = make_server(1)

    def behaviour(_request: agent_pb2.StopRequest, _context: grpc.ServicerContext) -> agent_pb2.StopReply:
        return agent_pb2.StopReply(stopped=ANSWER)

    server.add_generic_rpc_handlers((service_handler(AGENT_SERVICE, ((STOP, behaviour),)),))
    server.add_insecure_port(f"unix:{tmp_path}/s")
    server.start()
    try:
        with open_channel(f"unix:{tmp_path}/s", mini, HEAD_NAME) as channel:
            assert STOP.unary_unary(channel)(agent_pb2.StopRequest(), timeout=10).stopped == ANSWER
    finally:
        server.stop(None)


def test_a_client_without_a_certificate_is_refused(mini: Credentials) -> None:
    message = refusal(mini, Anchor(mini.authority), MINI, mini)
    assert "may not accept this machine's certificate" in message


def test_a_plaintext_client_is_refused(mini: Credentials) -> None:
    assert "The connection to the peer broke: it closed the connection" in refusal(mini, None, "", mini)


def test_a_client_of_another_cluster_is_refused(mini: Credentials, foreign: Authority) -> None:
    stranger = node_credentials(foreign, "mini-1")
    sneaky = Credentials(mini.authority, stranger.certificate, stranger.key)
    assert "may not accept this machine's certificate" in refusal(mini, sneaky, MINI, mini)


def test_a_client_refuses_a_server_of_another_cluster(mini: Credentials, foreign: Authority) -> None:
    stranger = node_credentials(foreign, "mini-1")
    assert "certificate belongs to another cluster" in refusal(mini, stranger, MINI, mini)


def test_a_client_whose_certificate_has_expired_is_refused(authority: Authority, mini: Credentials) -> None:
    expired = node_credentials(authority, "mini-2", LONG_AGO)
    assert "may not accept this machine's certificate" in refusal(mini, expired, MINI, mini)


def test_a_server_whose_certificate_has_expired_is_refused(authority: Authority, mini: Credentials) -> None:
    async def run() -> None:
        async with listening(node_credentials(authority, "mini-1", LONG_AGO)) as address:
            await ask(address, mini, MINI)

    with pytest.raises(
        PeerRefused, match="its certificate has expired, or this clock is ahead: compare the clocks"
    ):
        asyncio.run(run())


def test_a_certificate_that_is_not_valid_yet_is_refused(authority: Authority, mini: Credentials) -> None:
    async def run() -> None:
        early = node_credentials(authority, "mini-1", NOW + timedelta(days=2))
        async with listening(early) as address:
            await ask(address, mini, MINI)

    with pytest.raises(PeerRefused, match="compare the clocks"):
        asyncio.run(run())


def test_a_valid_certificate_with_another_name_is_refused(mini: Credentials) -> None:
    assert "its certificate is for another name" in refusal(mini, mini, node_name("mini-2"), mini)


def test_a_node_cannot_pass_for_the_head(mini: Credentials) -> None:
    assert "its certificate is for another name" in refusal(mini, mini, HEAD_NAME, mini)


def test_invalid_bytes_and_partial_handshakes_do_not_stop_the_server(mini: Credentials) -> None:
    async def run() -> int:
        async with listening(mini) as address:
            host, port = address.rsplit(":", 1)
            for rubbish in (b"\0" * 100, b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01", b""):
                with socket.create_connection((host, int(port))) as stranger:
                    stranger.sendall(rubbish)
            return await ask(address, mini, MINI)

    assert asyncio.run(run()) == ANSWER


def test_grpc_cannot_request_a_certificate_without_requiring_it(
    authority: Authority, mini: Credentials
) -> None:
    """Show why enrolment has a port of its own; once this fails, one port will do."""
    seen: list[bool] = []

    def behaviour(_request: agent_pb2.StopRequest, context: grpc.ServicerContext) -> agent_pb2.StopReply:
        seen.append("x509_pem_cert" in context.auth_context())
        return agent_pb2.StopReply()

    server = make_server(1)
    server.add_generic_rpc_handlers((service_handler(AGENT_SERVICE, ((STOP, behaviour),)),))
    head = authority.head_credentials()
    optional = grpc.ssl_server_credentials([(head.key, head.certificate)], head.authority)
    port = add_secure_port(server, "127.0.0.1:0", optional)
    server.start()
    try:
        with open_channel(f"127.0.0.1:{port}", mini, HEAD_NAME) as channel:
            STOP.unary_unary(channel)(agent_pb2.StopRequest(), timeout=10)
    finally:
        server.stop(None)
    assert seen == [False]


def test_saved_credentials_can_be_loaded_and_the_key_is_private(mini: Credentials, tmp_path: Path) -> None:
    folder = tmp_path / "node"
    assert load_credentials(folder) is None
    mini.save(folder)
    assert load_credentials(folder) == mini
    assert (folder / KEY_FILE).stat().st_mode & 0o777 == 0o600


def test_a_key_that_does_not_match_its_certificate_is_refused_by_name(
    authority: Authority, mini: Credentials, tmp_path: Path
) -> None:
    Credentials(mini.authority, mini.certificate, node_credentials(authority, "mini-1").key).save(tmp_path)
    with pytest.raises(ConfigError, match=f"certificate and key in {tmp_path} cannot be used"):
        load_credentials(tmp_path)
    (tmp_path / KEY_FILE).unlink()
    with pytest.raises(ConfigError, match=r"key\.pem is missing"):
        load_credentials(tmp_path)


def test_a_renewed_certificate_is_served_and_client_certificates_stay_required(
    authority: Authority, mini: Credentials, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="There is no certificate in"):
        serve_from_folder(tmp_path)
    mini.save(tmp_path)
    server = make_server(1)

    def behaviour(_request: agent_pb2.StopRequest, _context: grpc.ServicerContext) -> agent_pb2.StopReply:
        return agent_pb2.StopReply(stopped=ANSWER)

    server.add_generic_rpc_handlers((service_handler(AGENT_SERVICE, ((STOP, behaviour),)),))
    port = add_secure_port(server, "127.0.0.1:0", serve_from_folder(tmp_path))
    server.start()

    def shown() -> Peer:
        return shown_peer(port, mini, tmp_path.with_name("client"), MINI)

    try:
        first = shown()
        assert shown() == first
        node_credentials(authority, "mini-1").save(tmp_path)
        renewed = shown()
        assert renewed.serial != first.serial
        (tmp_path / KEY_FILE).write_text("rubbish")
        (tmp_path / CERTIFICATE_FILE).write_text("rubbish")
        assert shown() == renewed
        assert asyncio.run(ask(f"127.0.0.1:{port}", mini, MINI)) == ANSWER
        with pytest.raises(WorkerLost, match="may not accept this machine's certificate"):
            asyncio.run(ask(f"127.0.0.1:{port}", Anchor(authority.pem), MINI))
    finally:
        server.stop(None)


def test_a_head_renews_the_certificate_that_it_shows_on_both_ports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The certificate is made as one that is renewed at the next look.
    monkeypatch.setattr(authorities, "CERTIFICATE_LIFE", timedelta(minutes=20))

    async def run() -> None:
        head = HeadAddress("127.0.0.1", free_pair_of_ports())
        async with open_control(tmp_path / "head", head) as control:
            client = control.credentials
            monkeypatch.setattr(authorities, "CERTIFICATE_LIFE", CERTIFICATE_LIFE)

            def expiry(port: int) -> datetime:
                leaf = shown_leaf(port, client, tmp_path / "client", HEAD_NAME)
                return leaf.not_valid_after_utc

            for port in (head.port, head.enrolment_port):
                assert await asyncio.to_thread(expiry, port) > datetime.now(UTC) + timedelta(days=300)

    asyncio.run(run())


def test_credentials_are_checked_and_cached_without_writing_files(
    mini: Credentials, authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mini.save(tmp_path)
    # No file can be made there, as on a full disk.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    first = load_credentials(tmp_path)
    assert first == mini
    assert load_credentials(tmp_path) is first
    other = node_credentials(authority, "mini-2")
    for name, content in ((KEY_FILE, other.key), (CERTIFICATE_FILE, other.certificate)):
        write_private(tmp_path / name, content)
    assert load_credentials(tmp_path) == other


def test_a_client_s_renewed_certificate_is_used_from_the_next_channel_on(
    mini: Credentials, authority: Authority, tmp_path: Path
) -> None:
    node_credentials(authority, "mini-2", LONG_AGO).save(tmp_path)
    trust = KeptCredentials(tmp_path)

    async def run() -> int:
        async with listening(mini) as address:
            with pytest.raises(WorkerLost):
                await ask(address, trust, MINI)
            node_credentials(authority, "mini-2").save(tmp_path)
            return await ask(address, trust, MINI)

    assert asyncio.run(run()) == ANSWER


def test_the_private_key_is_not_in_the_repr_of_credentials(mini: Credentials) -> None:
    assert "PRIVATE" not in repr(mini)
