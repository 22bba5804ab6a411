"""Enrolment at a real head over loopback: a valid token makes a member, and every refusal is logged."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import ssl
import struct
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import grpc
import psutil
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import Encoding
from tests.eventually import eventually
from tests.machines import ANSWER, NOW, Head, node_credentials, running_head
from tests.port_attacks import Address, call, without_certificate
from tests.processes import give_profile, joining

from mlx_ring.agent import enrolment
from mlx_ring.agent.enrolment import join, renew, renew_if_due
from mlx_ring.cluster.security import enrolment as head_enrolment
from mlx_ring.cluster.security.authority import CERTIFICATE_LIFE, Authority
from mlx_ring.cluster.security.enrolment import MAX_MESSAGE_BYTES, TryLimit, admit_own_machine
from mlx_ring.cluster.security.records import Members
from mlx_ring.core.errors import (
    ConfigError,
    PeerRefused,
    RingError,
    TokenRefused,
    VersionMismatch,
    WorkerLost,
)
from mlx_ring.core.folders import AGENT_LOCK
from mlx_ring.core.join_token import JoinToken, parse_token
from mlx_ring.host import private_files
from mlx_ring.host.addresses import HeadAddress
from mlx_ring.host.private_files import try_lock, write_private
from mlx_ring.rpc.channels import FOR_STRANGERS, add_secure_port, make_server, open_aio_channel
from mlx_ring.rpc.failures import channel_error, failure_to_error
from mlx_ring.rpc.hello import make_hello
from mlx_ring.rpc.methods import ENROL, ENROLMENT_SERVICE, STOP, service_handler
from mlx_ring.rpc.protos import agent_pb2, enrol_pb2
from mlx_ring.rpc.tls import credentials as tls_credentials
from mlx_ring.rpc.tls.certificates import (
    CARRIED_AUTHORITY,
    common_name,
    key_to_pem,
    make_key,
    make_signing_request,
)
from mlx_ring.rpc.tls.credentials import Anchor, Credentials, load_credentials
from mlx_ring.rpc.tls.handshakes import handshake_error
from mlx_ring.rpc.tls.peers import HEAD_NAME, node_name, open_identity


async def call_as_member(head: Head, credentials: Credentials) -> int:
    """Call the head as a member. Raise `PeerRefused` if it refuses."""
    async with open_aio_channel(head.address.cluster, credentials, HEAD_NAME) as channel:
        try:
            reply = await STOP.aio_unary_unary(channel)(agent_pb2.StopRequest(), timeout=10)
        except grpc.aio.AioRpcError as error:
            raise (handshake_error(error, "The head") or channel_error(error, "The head")) from error
    return reply.stopped


async def enrol(head: Head, request: enrol_pb2.EnrolRequest) -> enrol_pb2.EnrolReply:
    """Send a request to the enrolment port as it is."""
    async with open_aio_channel(head.address.enrolment, Anchor(head.authority.pem), HEAD_NAME) as channel:
        return await ENROL.aio_unary_unary(channel)(request, timeout=10)


def request_for(node: str, token: str, named: str = "") -> enrol_pb2.EnrolRequest:
    ticket = parse_token(token)
    return enrol_pb2.EnrolRequest(
        hello=make_hello(node=node),
        token_id=ticket.id,
        secret=ticket.secret,
        node=node,
        signing_request=make_signing_request(make_key(), node_name(named or node)),
        nonce=secrets.token_bytes(16),
    )


def refusals(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the head's log lines about refused requests. Each has the peer's address."""
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert all(line.startswith("Refused to enrol 127.0.0.1:") for line in lines)
    return lines


def say_nothing(address: Address, context: ssl.SSLContext) -> bool:
    """Begin HTTP/2 without a call; return True once the other side ends the connection."""
    with (
        socket.create_connection(address, 60) as plain,
        context.wrap_socket(plain) as connection,
    ):
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5))
        while connection.recv(4096):
            pass
    return True


def joins(head: Head, folder: Path) -> bool:
    try:
        join(str(head.address), head.token(), folder)
    except RingError:
        return False
    return True


def with_head(folder: Path, act: Callable[[Head], Awaitable[None]], tries: TryLimit | None = None) -> None:
    async def run() -> None:
        async with running_head(folder / "head", tries) as head:
            await act(head)

    asyncio.run(run())


def test_a_machine_with_a_token_becomes_a_member_and_keeps_its_credentials(tmp_path: Path) -> None:
    async def act(head: Head) -> None:
        folder = tmp_path / "node"
        credentials = await head.join(folder, head.token())
        assert load_credentials(folder) == credentials
        assert list(head.members.list()) == [open_identity(folder).node]
        assert await call_as_member(head, credentials) == ANSWER

    with_head(tmp_path, act)


def test_joining_again_with_the_same_key_adds_no_member(tmp_path: Path) -> None:
    async def act(head: Head) -> None:
        await head.join(tmp_path / "node", head.token(uses=1))
        credentials = await head.join(tmp_path / "node", head.token(uses=1))
        assert len(head.members.list()) == 1
        assert await call_as_member(head, credentials) == ANSWER

    with_head(tmp_path, act)


def test_the_same_join_command_works_twice_with_a_token_for_one_use(tmp_path: Path) -> None:
    async def act(head: Head) -> None:
        token = head.token(uses=1)
        first = await head.join(tmp_path / "node", token)
        again = await head.join(tmp_path / "node", token)
        assert again.key == first.key
        assert await call_as_member(head, again) == ANSWER
        # A removed machine does need a token that is not used up.
        head.members.remove(open_identity(tmp_path / "node").node)
        with pytest.raises(TokenRefused, match="is used up"):
            await head.join(tmp_path / "node", token)
        renewed = await head.join(tmp_path / "node", head.token(uses=1))
        assert await call_as_member(head, renewed) == ANSWER

    with_head(tmp_path, act)


def test_a_running_member_is_not_enrolled_in_another_cluster(tmp_path: Path) -> None:
    async def act(head: Head) -> None:
        folder = tmp_path / "state" / "node"
        credentials = await head.join(folder, head.token())
        other = Authority.open(tmp_path / "other")
        lock = try_lock(folder / AGENT_LOCK)
        assert lock is not None
        try:
            for authority in (head.authority, other):
                token = str(JoinToken(authority.fingerprint, bytes(4), bytes(20)))
                with pytest.raises(ConfigError, match="already runs on this machine"):
                    await head.join(folder, token)
            with pytest.raises(ConfigError, match="as a member of another cluster"):
                admit_own_machine(other, Members(tmp_path / "other"), folder)
            assert load_credentials(folder) == credentials
            # The agent of this machine may outlive its own head, which then starts again.
            assert admit_own_machine(head.authority, head.members, folder) == credentials
        finally:
            os.close(lock)
        assert admit_own_machine(other, Members(tmp_path / "other"), folder) != credentials

    with_head(tmp_path, act)


def test_a_refused_key_does_not_use_the_token(tmp_path: Path) -> None:
    async def act(head: Head) -> None:
        assert not (await enrol(head, request_for("mini-1", head.token()))).HasField("failure")
        token = head.token(uses=1)
        refused = failure_to_error((await enrol(head, request_for("mini-1", token))).failure)
        assert "with another key" in str(refused)
        head.members.remove("mini-1")
        assert not (await enrol(head, request_for("mini-1", token))).HasField("failure")

    with_head(tmp_path, act)


def test_many_machines_behind_one_address_join_at_once(tmp_path: Path) -> None:
    async def act(head: Head) -> None:
        token = head.token()
        replies = await asyncio.gather(
            *(enrol(head, request_for(f"mini-{number}", token)) for number in range(12))
        )
        assert [reply.failure.message for reply in replies] == [""] * 12

    with_head(tmp_path, act, TryLimit(burst=3, per_second=0.0))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("wrong", "token is unknown"),
        ("expired", "is expired"),
        ("used up", "is used up"),
        ("revoked", "is revoked"),
    ],
)
def test_an_invalid_token_is_refused_and_logged_with_the_reason_and_others_join(
    fault: str, message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def act(head: Head) -> None:
        token = head.token(life_s=0.0 if fault == "expired" else 60.0, uses=1)
        ticket = parse_token(token)
        match fault:
            case "wrong":
                token = str(JoinToken(ticket.fingerprint, ticket.id, bytes(20)))
            case "used up":
                await head.join(tmp_path / "first", token)
            case "revoked":
                head.tokens.revoke(ticket.id.hex())
            case _:
                pass
        with pytest.raises(TokenRefused, match=message):
            await head.join(tmp_path / "stranger", token)
        assert load_credentials(tmp_path / "stranger") is None
        assert await call_as_member(head, await head.join(tmp_path / "friend", head.token())) == ANSWER

    with_head(tmp_path, act)
    (line,) = refusals(caplog)
    assert message in line


def test_a_mistyped_token_is_refused_before_any_connection(tmp_path: Path) -> None:
    token = str(JoinToken(bytes(32), bytes(4), bytes(20)))
    with pytest.raises(TokenRefused, match="typing error"):
        join("192.0.2.1", token[:-1] + "z", tmp_path)


def test_a_token_of_another_cluster_is_refused_and_its_secret_never_sent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    foreign = Authority.open(tmp_path / "foreign")

    async def act(head: Head) -> None:
        ticket = parse_token(head.token())
        with pytest.raises(TokenRefused, match="belongs to another cluster than the token"):
            await head.join(tmp_path / "node", str(JoinToken(foreign.fingerprint, ticket.id, ticket.secret)))
        assert head.tokens.list()[0].uses == 0

    with_head(tmp_path, act)
    assert refusals(caplog) == []


def test_a_stranger_with_the_cluster_s_public_authority_gets_no_secret(tmp_path: Path) -> None:
    # The CA's certificate is public, so a machine in the middle can present it.
    authority, key = Authority.open(tmp_path / "head"), make_key()
    carried = x509.UnrecognizedExtension(CARRIED_AUTHORITY, authority.certificate.public_bytes(Encoding.DER))
    leaf = (
        x509.CertificateBuilder()
        .subject_name(common_name(HEAD_NAME))
        .issuer_name(authority.certificate.subject)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(NOW)
        .not_valid_after(NOW + CERTIFICATE_LIFE)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(HEAD_NAME)]), critical=False)
        .add_extension(carried, critical=False)
        .sign(key, hashes.SHA256())
    )
    arrived: list[enrol_pb2.EnrolRequest] = []

    def take(request: enrol_pb2.EnrolRequest, _context: grpc.ServicerContext) -> enrol_pb2.EnrolReply:
        arrived.append(request)
        return enrol_pb2.EnrolReply()

    middle = Credentials(authority.pem, leaf.public_bytes(Encoding.PEM), key_to_pem(key))
    server = make_server(1)
    server.add_generic_rpc_handlers((service_handler(ENROLMENT_SERVICE, ((ENROL, take),)),))
    port = add_secure_port(server, "127.0.0.1:0", middle.for_strangers())
    server.start()
    token = str(JoinToken(authority.fingerprint, bytes(4), bytes(20)))
    try:
        with pytest.raises(PeerRefused, match="its certificate belongs to another cluster"):
            join(f"127.0.0.1:{port - 1}", token, tmp_path / "node")
    finally:
        server.stop(None)
    assert arrived == []


def test_a_member_cannot_impersonate_the_head(tmp_path: Path) -> None:
    authority = Authority.open(tmp_path / "head")
    server = make_server(1)
    port = add_secure_port(server, "127.0.0.1:0", node_credentials(authority, "mini-1").for_strangers())
    server.start()
    try:
        with pytest.raises(PeerRefused, match="no mlx-ring head"):
            join(
                f"127.0.0.1:{port - 1}",
                str(JoinToken(authority.fingerprint, bytes(4), bytes(20))),
                tmp_path / "n",
            )
    finally:
        server.stop(None)


def test_a_repeated_request_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def act(head: Head) -> None:
        request = request_for("mini-1", head.token())
        assert not (await enrol(head, request)).HasField("failure")
        error = failure_to_error((await enrol(head, request)).failure)
        assert isinstance(error, TokenRefused)
        assert "already used" in str(error)

    with_head(tmp_path, act)
    (line,) = refusals(caplog)
    assert "already used" in line


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        (
            "another node's request",
            PeerRefused,
            "is for studio-2.node.mlx-ring, not for mini-1.node.mlx-ring",
        ),
        ("no id", ConfigError, "is no node id"),
        ("rubbish", PeerRefused, "cannot be read"),
        ("another version", VersionMismatch, "mlx-lm 0.0.1"),
        ("no nonce", TokenRefused, "nonce has 0 bytes"),
    ],
)
def test_an_invalid_request_is_refused_and_logged_and_does_not_use_the_token(
    fault: str, kind: type[RingError], message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def act(head: Head) -> None:
        token = head.token(uses=1)
        request = request_for("mini-1", token, "studio-2" if fault == "another node's request" else "")
        match fault:
            case "no id":
                request.node = "head.mlx-ring"
            case "rubbish":
                request.signing_request = b"rubbish"
            case "another version":
                request.hello.mlx_lm = "0.0.1"
            case "no nonce":
                request.nonce = b""
            case _:
                pass
        error = failure_to_error((await enrol(head, request)).failure)
        assert type(error) is kind
        assert message in str(error)
        assert head.tokens.list()[0].uses == 0
        assert await call_as_member(head, await head.join(tmp_path / "friend", token)) == ANSWER

    with_head(tmp_path, act)
    (line,) = refusals(caplog)
    assert message in line


def test_another_machine_cannot_take_a_members_id(tmp_path: Path) -> None:
    async def act(head: Head) -> None:
        assert not (await enrol(head, request_for("mini-1", head.token()))).HasField("failure")
        error = failure_to_error((await enrol(head, request_for("mini-1", head.token()))).failure)
        assert isinstance(error, PeerRefused)
        assert "with another key" in str(error)

    with_head(tmp_path, act)


def test_a_message_over_the_size_limit_is_refused_and_others_are_served(tmp_path: Path) -> None:
    async def act(head: Head) -> None:
        request = request_for("mini-1", head.token())
        request.signing_request = bytes(MAX_MESSAGE_BYTES)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await enrol(head, request)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await call_as_member(head, await head.join(tmp_path / "friend", head.token())) == ANSWER

    with_head(tmp_path, act)


def test_guesses_are_limited_to_a_few_tries_and_valid_requests_do_not_count(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def act(head: Head) -> None:
        token = head.token()
        for number in range(6):
            assert not (await enrol(head, request_for(f"mini-{number}", token))).HasField("failure")
        ticket = parse_token(token)
        wrong = str(JoinToken(ticket.fingerprint, ticket.id, bytes(20)))
        messages = [(await enrol(head, request_for("guess-1", wrong))).failure.message for _ in range(5)]
        assert ["Too many" in message for message in messages] == [False] * 3 + [True] * 2
        # The right secret is refused too. Otherwise the limit would not hide which guess was right.
        assert "Too many" in (await enrol(head, request_for("mini-9", token))).failure.message

    with_head(tmp_path, act, TryLimit(burst=3, per_second=0.0))
    assert len(refusals(caplog)) == 6


def test_the_enrolment_port_serves_only_enrolment(tmp_path: Path) -> None:
    async def act(head: Head) -> None:
        async with open_aio_channel(head.address.enrolment, Anchor(head.authority.pem), HEAD_NAME) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await STOP.aio_unary_unary(channel)(agent_pb2.StopRequest(), timeout=10)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED

    with_head(tmp_path, act)


def test_after_a_renewal_both_certificates_work(tmp_path: Path) -> None:
    async def act(head: Head) -> None:
        folder = tmp_path / "node"
        first = await head.join(folder, head.token())
        second = await asyncio.to_thread(renew, head.address, first, folder)
        assert second.key == first.key
        assert second.certificate != first.certificate
        assert load_credentials(folder) == second
        assert [await call_as_member(head, each) for each in (first, second)] == [ANSWER, ANSWER]

    with_head(tmp_path, act)


def test_a_certificate_is_renewed_only_when_it_is_due(tmp_path: Path) -> None:
    async def run() -> None:
        async with running_head(tmp_path / "head") as head:
            folder = tmp_path / "node"
            assert not await asyncio.to_thread(renew_if_due, head.address, folder), "there is none yet"
            first = await head.join(folder, head.token())
            assert not await asyncio.to_thread(renew_if_due, head.address, folder)
            later = datetime.now(UTC) + timedelta(days=300)
            assert await asyncio.to_thread(renew_if_due, head.address, folder, later)
            kept = load_credentials(folder)
            assert kept is not None
            assert kept.certificate != first.certificate
            assert kept.key == first.key

    asyncio.run(run())


def test_a_removed_node_is_refused_and_cannot_renew_while_another_is_served(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def act(head: Head) -> None:
        lost = await head.join(tmp_path / "lost", head.token())
        kept = await head.join(tmp_path / "kept", head.token())
        node = open_identity(tmp_path / "lost").node
        head.members.remove(node)
        with pytest.raises(PeerRefused, match=f"{node} is not a member"):
            await call_as_member(head, lost)
        with pytest.raises(PeerRefused, match=f"{node} is not a member"):
            await asyncio.to_thread(renew, head.address, lost, tmp_path / "lost")
        assert await call_as_member(head, kept) == ANSWER
        assert await call_as_member(head, await head.join(tmp_path / "lost", head.token())) == ANSWER

    with_head(tmp_path, act)
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    # The last one is of the machine that joins again, which asks first whether it still is a member.
    assert len(lines) == 3
    assert all(line.startswith("Refused a call of ") for line in lines)


def test_an_expired_certificate_is_refused_by_tls(tmp_path: Path) -> None:
    async def act(head: Head) -> None:
        key, long_ago = make_key(), datetime.now(UTC) - CERTIFICATE_LIFE * 2
        certificate = head.authority.sign(make_signing_request(key, node_name("old-1")), "old-1", long_ago)
        head.members.admit(certificate)
        expired = Credentials(head.authority.pem, certificate.public_bytes(Encoding.PEM), key_to_pem(key))
        with pytest.raises(WorkerLost, match="may not accept this machine's certificate"):
            await call_as_member(head, expired)

    with_head(tmp_path, act)


def test_an_unreachable_head_is_named_with_its_address_and_a_remedy(tmp_path: Path) -> None:
    token = str(JoinToken(bytes(32), bytes(4), bytes(20)))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigError, match=f"No head answers at 127.0.0.1:{port} .*check the address.* --nodes N"
        ):
            join(f"127.0.0.1:{port - 1}", token, tmp_path)


def test_a_member_that_starts_before_its_head_waits_for_it_also_with_a_token(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = str(JoinToken(bytes(32), bytes(4), bytes(20)))

    async def act(head: Head) -> None:
        token = head.token()
        credentials = await head.join(tmp_path / "node", token)
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{taken.getsockname()[1] - 1}"
            assert await asyncio.to_thread(join, address, token, tmp_path / "node") == credentials
            with pytest.raises(ConfigError, match="No head answers"):
                await asyncio.to_thread(join, address, other, tmp_path / "node")
            for mistyped in ("nosuch.invalid", "1.2.3.4.5"):
                with pytest.raises(ConfigError, match=f"No head answers at {mistyped}"):
                    await asyncio.to_thread(join, mistyped, token, tmp_path / "node")
            known = partial(join, "nosuch.invalid", token, tmp_path / "node", is_known=True)
            assert await asyncio.to_thread(known) == credentials
        assert "waits for its head. No head answers" in caplog.text

    with_head(tmp_path, act)


def test_waiting_for_a_silent_head_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enrolment, "_WAIT_S", 0.05)
    token = str(JoinToken(bytes(32), bytes(4), bytes(20)))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(ConfigError, match="No head answers"):
            join(str(HeadAddress("127.0.0.1", port - 1)), token, tmp_path)


@pytest.mark.parametrize("is_reset", [False, True])
def test_a_peer_that_ends_the_connection_may_be_a_busy_head(*, is_reset: bool, tmp_path: Path) -> None:
    def end_one(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection:
            connection.recv(1 << 16)
            if is_reset:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(1) as pool:
        pool.submit(end_one, listening)
        head = HeadAddress("127.0.0.1", listening.getsockname()[1] - 1)
        with pytest.raises(PeerRefused, match="has too many connections just now"):
            join(str(head), str(JoinToken(bytes(32), bytes(4), bytes(20))), tmp_path)


def test_a_server_that_is_no_head_is_refused_as_such(tmp_path: Path) -> None:
    token = str(JoinToken(bytes(32), bytes(4), bytes(20)))
    server = make_server(1)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with pytest.raises(PeerRefused, match="no mlx-ring head"):
            join(f"127.0.0.1:{port - 1}", token, tmp_path)
    finally:
        server.stop(None)


def fail_to_write(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process fail to write files of this name, as on a full disk."""

    def write(path: Path, content: bytes) -> None:
        if path.name == name:
            raise ConfigError(f"{path} cannot be written (No space left on device).")
        write_private(path, content)

    monkeypatch.setattr(private_files, "write_private", write)
    monkeypatch.setattr(tls_credentials, "write_private", write)


@pytest.mark.parametrize("name", ["tokens.json", "members.json", "certificate.pem"])
def test_a_full_disk_at_either_end_does_not_use_up_a_token(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act(head: Head) -> None:
        token = head.token(uses=1)
        with monkeypatch.context() as full:
            fail_to_write(name, full)
            with pytest.raises(ConfigError, match=f"{name} cannot be written"):
                await head.join(tmp_path / "node", token)
        await head.join(tmp_path / "node", token)
        with pytest.raises(TokenRefused, match="is used up"):
            await head.join(tmp_path / "other", token)
        assert list(head.members.list()) == [open_identity(tmp_path / "node").node]

    with_head(tmp_path, act)


def test_a_node_that_was_removed_needs_another_token(tmp_path: Path) -> None:
    async def act(head: Head) -> None:
        token = head.token(uses=1)
        await head.join(tmp_path / "node", token)
        head.members.remove(open_identity(tmp_path / "node").node)
        with pytest.raises(TokenRefused, match="is used up"):
            await head.join(tmp_path / "node", token)

    with_head(tmp_path, act)


def test_a_stranger_who_connects_and_says_nothing_is_disconnected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = dict(FOR_STRANGERS) | {"grpc.max_connection_idle_ms": 1000}
    monkeypatch.setattr(head_enrolment, "FOR_STRANGERS", tuple(limits.items()))

    async def act(head: Head) -> None:
        address = "127.0.0.1", head.address.enrolment_port
        context = without_certificate(head.authority.pem)
        assert await asyncio.to_thread(say_nothing, address, context)

    with_head(tmp_path, act)


def test_a_call_that_does_not_end_keeps_no_connection_of_a_stranger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = {"grpc.max_connection_age_ms": 1000, "grpc.max_connection_age_grace_ms": 500}
    monkeypatch.setattr(head_enrolment, "FOR_STRANGERS", tuple((dict(FOR_STRANGERS) | short).items()))

    async def act(head: Head) -> None:
        address = "127.0.0.1", head.address.enrolment_port
        context = without_certificate(head.authority.pem)
        unfinished = partial(call, address, context, "/mlx_ring.Enrolment/Enrol", b"", ends=False)
        # The age of the connection ends it, not an answer or a reset of the call.
        assert await asyncio.to_thread(unfinished) == "sent away"

    with_head(tmp_path, act)


@pytest.mark.parametrize("speaks", [False, True])
def test_strangers_neither_take_all_descriptors_of_a_head_nor_keep_others_from_joining(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, speaks: bool
) -> None:
    monkeypatch.setattr(head_enrolment, "_MOST_CONNECTIONS", 4)

    async def act(head: Head) -> None:
        context = without_certificate(head.authority.pem)

        def connect() -> socket.socket:
            plain = socket.create_connection(("127.0.0.1", head.address.enrolment_port), 60)
            return context.wrap_socket(plain) if speaks else plain

        def read_to_end(connection: socket.socket) -> None:
            with contextlib.suppress(ConnectionError, ssl.SSLError):
                while connection.recv(1 << 16):
                    pass

        with contextlib.ExitStack() as stack:
            idle = [stack.enter_context(await asyncio.to_thread(connect)) for _ in range(6)]
            # The first ones have made room, although all are from one address.
            for connection in idle[:2]:
                await asyncio.to_thread(read_to_end, connection)
            await head.join(tmp_path / "node", head.token())

    with_head(tmp_path, act)


def test_a_stranger_s_versions_neither_fill_the_log_nor_control_a_terminal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def act(head: Head) -> None:
        request = request_for("mini-1", head.token())
        request.hello.mlx = "\x1b[2J" + "\n" * 60_000
        reply = await enrol(head, request)
        assert reply.failure.kind == VersionMismatch.__name__
        assert len(refusals(caplog)[0]) < 500
        assert refusals(caplog)[0].isprintable()

    with_head(tmp_path, act)


def test_a_token_is_not_in_the_list_of_processes_while_its_machine_computes(tmp_path: Path) -> None:
    async def act(head: Head) -> None:
        token, state = head.token(uses=1), tmp_path / "node" / "state"
        give_profile(state)
        with joining(str(head.address), "--token", token, folder=tmp_path / "node") as process:
            joined = state / "node" / "certificate.pem"
            await asyncio.to_thread(eventually, joined.exists)
            itself = psutil.Process(process.pid)
            assert itself.is_running()
            assert "join" in itself.cmdline()
            assert token not in " ".join(itself.cmdline())
        # The variable is for the first time alone: it needs no head now, and refuses no damaged token.
        within = "env", "MLX_RING_JOIN_TOKEN=old"
        with joining(str(head.address), folder=tmp_path / "node", within=within) as process:
            said = tmp_path / "node" / "stderr.txt"
            await asyncio.to_thread(eventually, lambda: "head" in said.read_text())
            assert process.poll() is None

    with_head(tmp_path, act)
