"""The nodes of the cluster and their certificates."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from cryptography import x509
from pydantic import BaseModel

from mlx_ring.core.errors import ConfigError, PeerRefused
from mlx_ring.host.private_files import StateFile
from mlx_ring.rpc.tls.certificates import key_digest
from mlx_ring.rpc.tls.peers import Peer, peer_of_certificate

_FILE = "members.json"


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
        self._file = StateFile(folder / _FILE, _MembersFile)
        self._clock = clock

    def list(self) -> Mapping[str, KnownNode]:
        """Return the members by node ID."""
        return dict(self._file.read().members)

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
        if member.key_sha256 != key_digest(certificate):
            raise PeerRefused(
                f"There is a node {peer.node} with another key: if it is the same machine after a new set-up, run "
                f"`mlx-ring node remove {peer.node}` on the head first."
            )
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
                known = ", ".join(sorted(content.members)) or "none"
                raise ConfigError(f"There is no node {node!r}: the cluster's nodes are {known}.")
            content.revoked = _valid([*content.revoked, *member.certificates], self._clock())
        return member

    def revoked_serials(self) -> frozenset[str]:
        """Return the serial numbers that nodes must refuse too, for their `Revoked`."""
        return frozenset(certificate.serial for certificate in self._file.read().revoked)

    def refusal(self, peer: Peer) -> str:
        """Return why the head's servers must refuse this peer; empty for a current member."""
        if peer.is_head:
            return ""
        member = self._file.read().members.get(peer.node)
        if member is not None and any(kept.serial == peer.serial for kept in member.certificates):
            return ""
        return _no_member(peer)


def _no_member(peer: Peer) -> str:
    return f"{peer} is not a member of this cluster, or was removed: join again with a new token."


def _valid(certificates: Iterable[Certificate], now_s: float) -> list[Certificate]:
    return [certificate for certificate in certificates if certificate.expires_s > now_s]
