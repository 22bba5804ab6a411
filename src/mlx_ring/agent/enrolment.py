"""Enrolment of this machine in a cluster, and renewal of its certificate: the node's side of `Enrol` and `Renew`.

A machine that joins has a token, and in it the fingerprint of the cluster's CA. It reads the CA's
certificate off a first connection, which it does not trust and over which it sends nothing. Only if the
certificate has the fingerprint, a second connection carries the secret. This CA verifies it, for the head's name.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
import socket
import ssl
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.serialization import Encoding

from mlx_ring.core.errors import ConfigError, PeerRefused, RingError, TokenRefused, WorkerLost
from mlx_ring.core.folders import AGENT_LOCK
from mlx_ring.core.join_token import parse_token
from mlx_ring.host.addresses import LOCAL_NETWORK_DENIED, HeadAddress, is_denied_by_macos, parse_head_address
from mlx_ring.host.head_announcement import HeadPlace
from mlx_ring.host.private_files import is_held
from mlx_ring.rpc.channels import open_channel
from mlx_ring.rpc.failures import channel_error, failure_to_error
from mlx_ring.rpc.hello import make_hello
from mlx_ring.rpc.methods import ENROL, RENEW
from mlx_ring.rpc.protos import enrol_pb2
from mlx_ring.rpc.tls.certificates import (
    carried_authority,
    certificate_names,
    fingerprint,
    key_to_pem,
    make_signing_request,
    needs_renewal,
)
from mlx_ring.rpc.tls.credentials import Anchor, Credentials, load_credentials
from mlx_ring.rpc.tls.handshakes import handshake_error
from mlx_ring.rpc.tls.peers import HEAD_NAME, Identity, node_name, open_identity

log = logging.getLogger(__name__)

_RENEWAL_S = 3600.0
_WAIT_S = 15.0
_NONCE_BYTES = 16


def join(address: str, token: str, folder: Path, *, is_known: bool = False) -> Credentials:
    """Become a member, and keep what proves it in `folder`; this machine's identity is made or found there.

    A member of the token's cluster stays one, and does not use the token. If no head answers, it is to wait for it.

    Args:
        address: the head's, as a person types it; the enrolment port is the one after.
        token: the text from `mlx-ring token create`.
        folder: private to this machine.
        is_known: True if the head has been there: a name that does not resolve is no mistake then.

    Raises:
        TokenRefused: the token is mistyped, of another cluster, or not taken by the head.
        PeerRefused, VersionMismatch: the head does not take this machine, or is none.
        ConfigError: the address is invalid, nothing answers a machine that is no member, or an unknown name does not
            resolve. Or an agent runs with what is in `folder`.
    """
    ticket = parse_token(token)
    head = parse_head_address(address)
    if is_held(folder / AGENT_LOCK):
        raise ConfigError(
            f"An agent with the state in {folder.parent} already runs on this machine, and its membership would be "
            "overwritten: stop it first, or give --state-dir."
        )
    identity = open_identity(folder)
    kept = load_credentials(folder)
    member = kept if kept is not None and _is_ours(kept, ticket.fingerprint) else None
    try:
        authority = fetch_authority(head, ticket.fingerprint)
    except ConfigError as error:
        # After a power cut, machines may start before their head, and before what resolves its name.
        if member is None or (isinstance(error.__cause__, socket.gaierror) and not is_known):
            raise
        log.warning("This machine has joined before, and waits for its head. %s", error)
        return member
    if member is not None:
        with contextlib.suppress(PeerRefused, WorkerLost):  # a removed machine needs the token
            return renew(head, member, folder)
    request = enrol_pb2.EnrolRequest(
        hello=make_hello(node=identity.node),
        token_id=ticket.id,
        secret=ticket.secret,
        node=identity.node,
        signing_request=make_signing_request(identity.key, node_name(identity.node)),
        nonce=secrets.token_bytes(_NONCE_BYTES),
    )
    anchor = Anchor(authority.public_bytes(Encoding.PEM))
    with open_channel(head.enrolment, anchor, HEAD_NAME) as channel:
        reply = _call(head.enrolment, lambda: ENROL.unary_unary(channel)(request, timeout=_WAIT_S))
    return _take(reply, identity, authority, folder)


def _is_ours(kept: Credentials, expected: bytes) -> bool:
    """Return True if the kept certificate is still valid, and is of the cluster whose CA has this fingerprint."""
    certificate = x509.load_pem_x509_certificate(kept.certificate)
    authority = x509.load_pem_x509_certificate(kept.authority)
    is_valid = certificate.not_valid_after_utc > datetime.now(UTC)
    return is_valid and hmac.compare_digest(fingerprint(authority), expected)


def renew(head: HeadAddress, credentials: Credentials, folder: Path) -> Credentials:
    """Renew the certificate in `folder` for the same name and key; `certificates.needs_renewal` says when.

    Raises:
        PeerRefused: the head does not take this machine: it was removed, or its certificate has expired.
        WorkerLost: the head cannot be reached.
    """
    identity = open_identity(folder)
    authority = x509.load_pem_x509_certificate(credentials.authority)
    request = enrol_pb2.RenewRequest(
        hello=make_hello(node=identity.node),
        signing_request=make_signing_request(identity.key, node_name(identity.node)),
    )
    with open_channel(head.cluster, credentials, HEAD_NAME) as channel:
        reply = _call(head.cluster, lambda: RENEW.unary_unary(channel)(request, timeout=_WAIT_S))
    return _take(reply, identity, authority, folder)


def renew_if_due(head: HeadAddress, folder: Path, now: datetime | None = None) -> bool:
    """Renew the certificate in `folder` if less than a third of its time is left; return True if it was renewed. Blocks.

    Raises:
        PeerRefused, WorkerLost: as `renew`.
    """
    credentials = load_credentials(folder)
    if credentials is None:
        return False
    certificate = x509.load_pem_x509_certificate(credentials.certificate)
    if not needs_renewal(certificate, now or datetime.now(UTC)):
        return False
    renew(head, credentials, folder)
    return True


async def keep_renewed(head: HeadPlace, folder: Path) -> None:
    """Renew the certificate before it expires; check every hour, and retry an hour later if the head is unreachable."""
    while True:
        try:
            if await asyncio.to_thread(renew_if_due, head.address, folder):
                log.info("The certificate was renewed")
        except (RingError, OSError) as error:
            log.warning("The certificate expires soon and could not be renewed: %s", error)
        await asyncio.sleep(_RENEWAL_S)


def fetch_authority(head: HeadAddress, expected: bytes) -> x509.Certificate:
    """Return the cluster CA's certificate from an untrusted connection, checked against its fingerprint.

    Raises:
        TokenRefused: another cluster's head answers there.
        PeerRefused, ConfigError: no head answers there.
    """
    authority = carried_authority(shown_certificate(head))
    if not hmac.compare_digest(fingerprint(authority), expected):
        raise TokenRefused(
            f"The head at {head} belongs to another cluster than the token: create a token on that head, "
            "or check the address."
        )
    return authority


def shown_certificate(head: HeadAddress) -> bytes:
    """Return the unverified certificate (DER) that the enrolment port shows; nothing is sent to it.

    Raises:
        PeerRefused, ConfigError: no head answers there.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        with (
            socket.create_connection((head.host, head.enrolment_port), timeout=_WAIT_S) as plain,
            context.wrap_socket(plain, server_hostname=HEAD_NAME) as connection,
        ):
            shown = connection.getpeercert(binary_form=True)
    except (
        ssl.SSLEOFError,
        ssl.SSLZeroReturnError,
        ConnectionResetError,
    ) as error:  # which, depends on Python
        raise PeerRefused(
            f"The peer at {head.enrolment} ended the connection: it is no mlx-ring head, or has too many connections "
            "just now. Try again in a moment."
        ) from error
    except ssl.SSLError as error:
        raise PeerRefused(f"The peer at {head.enrolment} is no mlx-ring head: {error}.") from error
    except OSError as error:
        if is_denied_by_macos(error.errno, head.host):
            raise ConfigError(
                f"The head at {head.enrolment} cannot be reached: {LOCAL_NETWORK_DENIED}."
            ) from error
        raise ConfigError(
            f"No head answers at {head.enrolment} ({error.strerror or error}): check the address, that "
            f"`mlx-ring serve MODEL --nodes N` runs there, and that ports {head.port} and {head.enrolment_port} are open."
        ) from error
    if shown is None:
        raise PeerRefused(f"The peer at {head.enrolment} shows no certificate: it is no mlx-ring head.")
    return shown


def _call(peer: str, ask: Callable[[], enrol_pb2.EnrolReply]) -> enrol_pb2.EnrolReply:
    try:
        reply = ask()
    except grpc.RpcError as error:
        who = f"The head at {peer}"
        raise (handshake_error(error, who) or channel_error(error, who)) from error
    if reply.HasField("failure"):
        raise failure_to_error(reply.failure)
    return reply


def _take(
    reply: enrol_pb2.EnrolReply, identity: Identity, authority: x509.Certificate, folder: Path
) -> Credentials:
    """Keep what the head has signed, once it is what was asked for."""
    try:
        certificate = x509.load_pem_x509_certificate(reply.certificate)
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature) as error:
        raise PeerRefused(f"The head's answer has no certificate of its cluster: {error}.") from error
    same_key = certificate.public_key() == identity.key.public_key()
    if not same_key or list(certificate_names(certificate)) != [node_name(identity.node)]:
        raise PeerRefused(f"The head signed a certificate that is not for {identity.node}.")
    credentials = Credentials(
        authority.public_bytes(Encoding.PEM), reply.certificate, key_to_pem(identity.key)
    )
    credentials.save(folder)
    return credentials
