"""Records of a cluster that its head stores: join tokens, and the nodes that joined, with their certificates.

Of a token's secret it stores the SHA-256. The secret is 20 random bytes, so inverting a plain hash is as hard as
guessing the secret.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from cryptography import x509
from pydantic import BaseModel

from mlx_ring.core.errors import ConfigError, PeerRefused, RingError, TokenRefused
from mlx_ring.core.join_token import ID_BYTES, SECRET_BYTES, JoinToken
from mlx_ring.host.private_files import StateFile
from mlx_ring.rpc.tls.certificates import key_digest
from mlx_ring.rpc.tls.peers import Peer, peer_of_certificate

DEFAULT_LIFE_S = 24 * 3600.0
NONCE_BYTES = 16
_NONCES_KEPT = 1024
_TOKENS_FILE = "tokens.json"
_SHOWN_AFTER_END_S = 7 * 24 * 3600.0


class TokenRecord(BaseModel):
    """A token without its secret. Times are seconds since the epoch."""

    id: str
    name: str = ""
    secret_sha256: str
    created_s: float
    expires_s: float
    uses_left: int | None = None
    """Number of uses left; None for any number until the token expires."""
    uses: int = 0
    revoked: bool = False
    nonces: list[str] = []
    """Nonces of all accepted requests, by which a repeated request is refused."""

    def state(self, now_s: float) -> str:
        """Return the state as `mlx-ring token list` shows it; "valid" if the token is accepted."""
        if self.revoked:
            return "revoked"
        if now_s >= self.expires_s:
            return "expired"
        return "used up" if self.uses_left == 0 else "valid"


class _TokensFile(BaseModel):
    tokens: list[TokenRecord] = []


class TokenStore:
    """The tokens of a cluster, in its folder."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self._file = StateFile(
            folder / _TOKENS_FILE, _TokensFile, "remove it, and create new tokens; members stay"
        )
        self._clock = clock

    def create(
        self,
        fingerprint: bytes,
        *,
        name: str = "",
        life_s: float = DEFAULT_LIFE_S,
        uses: int | None = None,
    ) -> JoinToken:
        """Create a token; only the returned value holds its secret."""
        now_s = self._clock()
        token = JoinToken(fingerprint, secrets.token_bytes(ID_BYTES), secrets.token_bytes(SECRET_BYTES))
        record = TokenRecord(
            id=token.id.hex(),
            name=name,
            secret_sha256=_digest(token.secret),
            created_s=now_s,
            expires_s=now_s + life_s,
            uses_left=uses,
        )
        with self._file.change() as content:
            content.tokens = [
                kept for kept in content.tokens if now_s < kept.expires_s + _SHOWN_AFTER_END_S
            ] + [record]
        return token

    def list(self) -> Sequence[TokenRecord]:
        """Return all tokens, oldest first; an expired one is listed for another week."""
        return tuple(self._file.read().tokens)

    def revoke(self, wanted: str) -> TokenRecord:
        """Revoke the token of this ID or name.

        Raises:
            ConfigError: no such token, or several of that name.
        """
        with self._file.change() as content:
            found = [record for record in content.tokens if wanted and wanted in (record.id, record.name)]
            if len(found) != 1:
                problem = f"There are {len(found)} tokens" if found else "There is no token"
                raise ConfigError(f"{problem} {wanted!r}: `mlx-ring token list` shows the IDs.")
            found[0].revoked = True
            return found[0]

    def check(self, token_id: bytes, secret: bytes, nonce: bytes, *, is_member: bool = False) -> TokenRecord:
        """Return a token that `redeem` would accept.

        Raises:
            TokenRefused: as `redeem`.
        """
        return self._accepted(self._file.read(), token_id, secret, nonce, is_member=is_member)

    def redeem(self, token_id: bytes, secret: bytes, nonce: bytes, *, is_member: bool = False) -> TokenRecord:
        """Use a token once. A member, which may not have received its certificate, joins again without using it.

        Raises:
            TokenRefused: the reason; without the right secret, it reveals nothing about the token.
        """
        with self._file.change() as content:
            record = self._accepted(content, token_id, secret, nonce, is_member=is_member)
            record.nonces.append(nonce.hex())
            if not is_member:
                record.uses += 1
                if record.uses_left is not None:
                    record.uses_left -= 1
            return record

    def _accepted(
        self, content: _TokensFile, token_id: bytes, secret: bytes, nonce: bytes, *, is_member: bool
    ) -> TokenRecord:
        if len(nonce) != NONCE_BYTES:
            raise TokenRefused(
                f"The join request's nonce has {len(nonce)} bytes; it must have {NONCE_BYTES}."
            )
        record = _find(content.tokens, token_id.hex(), _digest(secret))
        if reason := _objection(record, nonce.hex(), self._clock(), is_member=is_member):
            raise TokenRefused(reason)
        return record


def _find(records: Sequence[TokenRecord], wanted: str, secret_sha256: str) -> TokenRecord:
    """Return the token of this ID and secret; fail with the same message and work if either is wrong."""
    record = next((record for record in records if record.id == wanted), None)
    known = record.secret_sha256 if record is not None else _digest(b"")
    if not hmac.compare_digest(known, secret_sha256) or record is None:
        raise TokenRefused(
            "The join token is unknown: create another one with `mlx-ring token create` on the head."
        )
    return record


def _objection(record: TokenRecord, nonce: str, now_s: float, *, is_member: bool) -> str:
    if nonce in record.nonces:
        return "The join request was already used: run `mlx-ring join` again."
    state = record.state(now_s)
    if state == "used up" and is_member:
        state = "valid"
    if state == "valid" and len(record.nonces) >= _NONCES_KEPT:
        state = f"used {_NONCES_KEPT} times"
    if state == "valid":
        return ""
    return (
        f"The join token {record.id} is {state}: create another one with `mlx-ring token create` on the head."
    )


def _digest(secret: bytes) -> str:
    return hashlib.sha256(secret).hexdigest()


# ---- nodes

_MEMBERS_FILE = "members.json"


class Certificate(BaseModel):
    """A node's certificate, current or former. Times are seconds since the epoch."""

    serial: str
    expires_s: float


class KnownNode(BaseModel):
    """A node of the cluster."""

    key_sha256: str
    """Digest of its public key, to which the node ID belongs until the node is removed."""
    joined_s: float
    certificates: list[Certificate] = []


class _MembersFile(BaseModel):
    members: dict[str, KnownNode] = {}
    revoked: list[Certificate] = []


class Members:
    """The members of a cluster, in its folder; another process may remove one at any time."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self._file = StateFile(folder / _MEMBERS_FILE, _MembersFile)
        self._clock = clock
        self._last: _MembersFile | None = None

    def _last_known(self) -> _MembersFile:
        """Return the content, or if it cannot be read now, the last one."""
        try:
            self._last = self._file.read()
        except (RingError, OSError):
            if self._last is None:
                raise
        return self._last

    def check_readable(self) -> None:
        """Read the file again if it has changed.

        Raises:
            ConfigError: it cannot be parsed.
            OSError: it cannot be read.
        """
        self._file.read()

    def list(self) -> Mapping[str, KnownNode]:
        """Return the members by node ID, as they could last be read."""
        return dict(self._last_known().members)

    def admit(self, certificate: x509.Certificate) -> None:
        """Record a certificate before it is issued, of a new node or a known one.

        Raises:
            PeerRefused: a node ID that belongs to another key.
        """
        peer = peer_of_certificate(certificate)
        with self._file.change() as content:
            member = content.members.setdefault(
                peer.node, KnownNode(key_sha256=key_digest(certificate), joined_s=self._clock())
            )
            self._record(member, peer, certificate)

    def check_key(self, certificate: x509.Certificate) -> bool:
        """Check that `admit` would take this certificate. Return True if its node is a member already, with this key.

        Raises:
            PeerRefused: a node ID that belongs to another key.
        """
        peer = peer_of_certificate(certificate)
        member = self._file.read().members.get(peer.node)
        if member is not None:
            _check_key(member, peer, certificate)
        return member is not None

    def renew(self, certificate: x509.Certificate) -> None:
        """Record another certificate of a node before it is issued.

        Raises:
            PeerRefused: a node that is no longer a member, or has another key.
        """
        peer = peer_of_certificate(certificate)
        with self._file.change() as content:
            member = content.members.get(peer.node)
            if member is None:
                raise PeerRefused(_no_member(peer))
            self._record(member, peer, certificate)

    def _record(self, member: KnownNode, peer: Peer, certificate: x509.Certificate) -> None:
        _check_key(member, peer, certificate)
        issued = Certificate(serial=peer.serial, expires_s=certificate.not_valid_after_utc.timestamp())
        member.certificates = [*_valid(member.certificates, self._clock()), issued]

    def remove(self, node: str) -> KnownNode:
        """Remove a node and revoke all its certificates.

        Raises:
            ConfigError: an unknown node.
        """
        with self._file.change() as content:
            member = content.members.pop(node, None)
            if member is None:
                raise _unknown(node, content.members)
            content.revoked = _valid([*content.revoked, *member.certificates], self._clock())
        return member

    def require(self, node: str) -> None:
        """Check that a node is known. Raises `ConfigError` if it is not."""
        if node not in (known := self.list()):
            raise _unknown(node, known)

    def revoked_serials(self) -> frozenset[str]:
        """Return the serial numbers that nodes must refuse too, for their `Revoked`, as they could last be read."""
        return frozenset(certificate.serial for certificate in self._last_known().revoked)

    def refusal(self, peer: Peer) -> str:
        """Return why the head's servers must refuse this peer; empty for a current member."""
        if peer.is_head:
            return ""
        member = self._file.read().members.get(peer.node)
        if member is not None and any(kept.serial == peer.serial for kept in member.certificates):
            return ""
        return _no_member(peer)


def _check_key(member: KnownNode, peer: Peer, certificate: x509.Certificate) -> None:
    if member.key_sha256 != key_digest(certificate):
        raise PeerRefused(
            f"There is a node {peer.node} with another key: if it is the same machine after a new set-up, run "
            f"`mlx-ring node remove {peer.node}` on the head first."
        )


def _unknown(node: str, members: Iterable[str]) -> ConfigError:
    known = ", ".join(sorted(members))
    those = f"the cluster's nodes are {known}." if known else "no machine has joined this cluster."
    return ConfigError(f"There is no node {node!r}: {those}")


def _no_member(peer: Peer) -> str:
    return f"{peer} is not a member of this cluster, or was removed: join again with a new token."


def _valid(certificates: Iterable[Certificate], now_s: float) -> list[Certificate]:
    return [certificate for certificate in certificates if certificate.expires_s > now_s]
