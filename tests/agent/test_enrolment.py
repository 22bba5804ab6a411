"""Joining a real head over loopback: who has a good token becomes a member, whoever else is refused and logged."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import Encoding
from tests.machines import ANSWER, NOW, Head, node_credentials, running_head

from mlx_ring.agent import enrolment
from mlx_ring.agent.enrolment import join, renew, renew_if_due
from mlx_ring.cluster.security.authority import CERTIFICATE_LIFE, Authority
from mlx_ring.cluster.security.enrolment import MAX_MESSAGE_BYTES, TryLimit
from mlx_ring.core.errors import ConfigError, PeerRefused, RingError, TokenRefused, VersionMismatch
from mlx_ring.core.join_token import JoinToken, parse_token
from mlx_ring.host.addresses import HeadAddress
from mlx_ring.rpc.channels import add_secure_port, make_server, open_aio_channel
from mlx_ring.rpc.failures import failure_to_error
from mlx_ring.rpc.hello import make_hello
from mlx_ring.rpc.methods import ENROL, ENROLMENT_SERVICE, STOP, service_handler
from mlx_ring.rpc.protos import agent_pb2, enrol_pb2
from mlx_ring.rpc.tls.certificates import (
    CARRIED_AUTHORITY,
    HEAD_NAME,
    common_name,
    key_to_pem,
    make_key,
    make_signing_request,
    node_name,
)
from mlx_ring.rpc.tls.credentials import Anchor, Credentials, load_credentials
from mlx_ring.rpc.tls.handshakes import handshake_error
from mlx_ring.rpc.tls.identity import open_identity


async def speak(head: Head, credentials: Credentials) -> int:
    """A call of a member to the head. Raises `PeerRefused` where it is refused."""
    async with open_aio_channel(head.address.cluster, credentials, HEAD_NAME) as channel:
        try:
            reply = await STOP.aio_unary_unary(channel)(agent_pb2.StopRequest(), timeout=10)
        except grpc.aio.AioRpcError as error:
            raise (handshake_error(error, "The head") or error) from error
    return reply.stopped


async def enrol(head: Head, request: enrol_pb2.EnrolRequest) -> enrol_pb2.EnrolReply:
    """A request as it stands, from whoever made it."""
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
    """The head's lines about refused requests; each has the peer's address."""
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert all(line.startswith("refused to enrol 127.0.0.1:") for line in lines)
    return lines


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
        assert await speak(head, credentials) == ANSWER

    with_head(tmp_path, act)


def test_joining_again_with_the_same_key_is_no_other_machine(tmp_path: Path) -> None:
    async def act(head: Head) -> None:
        await head.join(tmp_path / "node", head.token(uses=1))
        credentials = await head.join(tmp_path / "node", head.token(uses=1))
        assert len(head.members.list()) == 1
        assert await speak(head, credentials) == ANSWER

    with_head(tmp_path, act)


@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        ("wrong", "token is unknown"),
        ("expired", "is expired"),
        ("used up", "is used up"),
        ("revoked", "is revoked"),
    ],
)
def test_a_token_that_opens_nothing_is_refused_with_the_reason_logged_and_others_join(
    trouble: str, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def act(head: Head) -> None:
        token = head.token(life_s=0.0 if trouble == "expired" else 60.0, uses=1)
        ticket = parse_token(token)
        match trouble:
            case "wrong":
                token = str(JoinToken(ticket.fingerprint, ticket.id, bytes(20)))
            case "used up":
                await head.join(tmp_path / "first", token)
            case "revoked":
                head.tokens.revoke(ticket.id.hex())
            case _:
                pass
        with pytest.raises(TokenRefused, match=said):
            await head.join(tmp_path / "stranger", token)
        assert load_credentials(tmp_path / "stranger") is None
        assert await speak(head, await head.join(tmp_path / "friend", head.token())) == ANSWER

    with_head(tmp_path, act)
    (line,) = refusals(caplog)
    assert said in line


def test_a_mistyped_token_is_told_before_anything_is_asked(tmp_path: Path) -> None:
    token = str(JoinToken(bytes(32), bytes(4), bytes(20)))
    with pytest.raises(TokenRefused, match="typing error"):
        join("192.0.2.1", token[:-1] + "z", tmp_path)


def test_a_token_of_another_cluster_is_noticed_here_and_its_secret_never_sent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    foreign = Authority.open(tmp_path / "foreign")

    async def act(head: Head) -> None:
        ticket = parse_token(head.token())
        with pytest.raises(TokenRefused, match="is of another cluster than the token"):
            await head.join(tmp_path / "node", str(JoinToken(foreign.fingerprint, ticket.id, ticket.secret)))
        assert head.tokens.list()[0].uses == 0

    with_head(tmp_path, act)
    assert refusals(caplog) == []


def test_who_shows_the_cluster_s_authority_without_being_of_it_gets_no_secret(tmp_path: Path) -> None:
    """The CA's certificate is no secret, so a stranger in the middle can carry it too."""
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
        with pytest.raises(PeerRefused, match="its certificate is of another cluster"):
            join(f"127.0.0.1:{port - 1}", token, tmp_path / "node")
    finally:
        server.stop(None)
    assert arrived == []


def test_a_member_cannot_pass_for_the_head_towards_who_joins(tmp_path: Path) -> None:
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


def test_the_same_request_twice_is_refused_the_second_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
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
    ("trouble", "kind", "said"),
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
def test_a_request_that_is_not_right_is_refused_logged_and_takes_no_use(
    trouble: str, kind: type[RingError], said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def act(head: Head) -> None:
        token = head.token(uses=1)
        request = request_for("mini-1", token, "studio-2" if trouble == "another node's request" else "")
        match trouble:
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
        assert said in str(error)
        assert head.tokens.list()[0].uses == 0
        assert await speak(head, await head.join(tmp_path / "friend", token)) == ANSWER

    with_head(tmp_path, act)
    (line,) = refusals(caplog)
    assert said in line


def test_another_machine_cannot_take_a_member_s_id(tmp_path: Path) -> None:
    async def act(head: Head) -> None:
        assert not (await enrol(head, request_for("mini-1", head.token()))).HasField("failure")
        error = failure_to_error((await enrol(head, request_for("mini-1", head.token()))).failure)
        assert isinstance(error, PeerRefused)
        assert "with another key" in str(error)

    with_head(tmp_path, act)


def test_a_message_over_the_limit_is_refused_and_others_are_served(tmp_path: Path) -> None:
    async def act(head: Head) -> None:
        request = request_for("mini-1", head.token())
        request.signing_request = bytes(MAX_MESSAGE_BYTES)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await enrol(head, request)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await speak(head, await head.join(tmp_path / "friend", head.token())) == ANSWER

    with_head(tmp_path, act)


def test_who_guesses_is_stopped_after_a_few_tries_and_a_right_token_costs_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def act(head: Head) -> None:
        token = head.token()
        for number in range(6):
            assert not (await enrol(head, request_for(f"mini-{number}", token))).HasField("failure")
        ticket = parse_token(token)
        wrong = str(JoinToken(ticket.fingerprint, ticket.id, bytes(20)))
        said = [(await enrol(head, request_for("guess-1", wrong))).failure.message for _ in range(5)]
        assert ["Too many" in sentence for sentence in said] == [False] * 3 + [True] * 2
        # Also with the right secret: otherwise the limit would not hide which guess was right.
        assert "Too many" in (await enrol(head, request_for("mini-9", token))).failure.message

    with_head(tmp_path, act, TryLimit(burst=3, per_second=0.0))
    assert len(refusals(caplog)) == 6


def test_the_enrolment_port_answers_nothing_but_enrolment(tmp_path: Path) -> None:
    async def act(head: Head) -> None:
        async with open_aio_channel(head.address.enrolment, Anchor(head.authority.pem), HEAD_NAME) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await STOP.aio_unary_unary(channel)(agent_pb2.StopRequest(), timeout=10)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED

    with_head(tmp_path, act)


def test_a_member_renews_and_both_certificates_work(tmp_path: Path) -> None:
    async def act(head: Head) -> None:
        folder = tmp_path / "node"
        first = await head.join(folder, head.token())
        second = await asyncio.to_thread(renew, head.address, first, folder)
        assert second.key == first.key
        assert second.certificate != first.certificate
        assert load_credentials(folder) == second
        assert [await speak(head, held) for held in (first, second)] == [ANSWER, ANSWER]

    with_head(tmp_path, act)


def test_a_certificate_is_renewed_when_its_time_comes_and_not_before(tmp_path: Path) -> None:
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
            await speak(head, lost)
        with pytest.raises(PeerRefused, match=f"{node} is not a member"):
            await asyncio.to_thread(renew, head.address, lost, tmp_path / "lost")
        assert await speak(head, kept) == ANSWER
        assert await speak(head, await head.join(tmp_path / "lost", head.token())) == ANSWER

    with_head(tmp_path, act)
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(lines) == 2
    assert all(line.startswith("refused a call of ") for line in lines)


def test_an_expired_member_is_refused_by_tls_itself(tmp_path: Path) -> None:
    async def act(head: Head) -> None:
        key, long_ago = make_key(), datetime.now(UTC) - CERTIFICATE_LIFE * 2
        certificate = head.authority.sign(make_signing_request(key, node_name("old-1")), "old-1", long_ago)
        head.members.admit(certificate)
        expired = Credentials(head.authority.pem, certificate.public_bytes(Encoding.PEM), key_to_pem(key))
        with pytest.raises(PeerRefused, match="may not accept this machine's certificate"):
            await speak(head, expired)

    with_head(tmp_path, act)


def test_where_nobody_listens_the_address_is_named_with_what_to_check(tmp_path: Path) -> None:
    token = str(JoinToken(bytes(32), bytes(4), bytes(20)))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"No head answers at 127.0.0.1:{port} .*check the address"):
            join(f"127.0.0.1:{port - 1}", token, tmp_path)


def test_who_says_nothing_is_not_waited_for_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enrolment, "_WAIT_S", 0.05)
    token = str(JoinToken(bytes(32), bytes(4), bytes(20)))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(ConfigError, match="No head answers"):
            join(str(HeadAddress("127.0.0.1", port - 1)), token, tmp_path)


def test_what_is_no_head_is_said_to_be_none(tmp_path: Path) -> None:
    token = str(JoinToken(bytes(32), bytes(4), bytes(20)))
    server = make_server(1)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with pytest.raises(PeerRefused, match="no mlx-ring head"):
            join(f"127.0.0.1:{port - 1}", token, tmp_path)
    finally:
        server.stop(None)
