"""Identities of machines: this one's, made once and kept on disk, and that at the other end of a call with its revocation."""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import unquote

from mlx_ring.core.errors import ConfigError, PeerRefused
from mlx_ring.host.private_files import locked, read_private, write_private

if TYPE_CHECKING:
    from cryptography import x509

    from mlx_ring.rpc.tls.certificates import Key

log = logging.getLogger(__name__)

HEAD_NAME = "head.mlx-ring"
_NODE_SUFFIX = ".node.mlx-ring"
_ID_FILE = "node-id"
_LONGEST_NAME = 40
_NODE_ID = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,46}[a-z0-9])?")


def check_node_id(node: str) -> str:
    """Check a node id, and return it.

    Raises:
        ConfigError: it cannot be part of a host name.
    """
    if not _NODE_ID.fullmatch(node):
        raise ConfigError(
            f"{node[:80]!r} is no node id: use up to 48 lower-case letters, digits and dashes, such as mini-7f3a."
        )
    return node


def node_name(node: str) -> str:
    """Return the name in a node's certificate, which channels to it expect."""
    return check_node_id(node) + _NODE_SUFFIX


def node_of(name: str) -> str:
    """Return the node id of a certificate's name; empty if it is not a node's."""
    node = name.removesuffix(_NODE_SUFFIX)
    return node if node != name and _NODE_ID.fullmatch(node) else ""


@dataclass(frozen=True, slots=True)
class Peer:
    """Identity in a certificate."""

    name: str
    """The one DNS name of the certificate."""
    serial: str
    """Serial of the certificate, in hexadecimal."""

    @property
    def is_head(self) -> bool:
        return self.name == HEAD_NAME

    @property
    def node(self) -> str:
        """Id of the node; empty for the head."""
        return node_of(self.name)

    def __str__(self) -> str:
        return "the head" if self.is_head else self.node or self.name


Refusal = Callable[[Peer], str]
"""Function that returns why a peer is refused, as one sentence; empty if it is admitted."""


class CallContext(Protocol):
    """Part of gRPC's contexts that this module uses, sync and asyncio."""

    def peer(self) -> str: ...
    def auth_context(self) -> Mapping[str, Any]: ...


class Revoked:
    """Serials of certificates that are refused although the CA signed them. The head sets them."""

    def __init__(self, serials: Iterable[str] = (), file: Path | None = None) -> None:
        """Start with these serials, or those in a file that keeps them for the next start.

        Raises:
            ConfigError: the file cannot be read.
        """
        kept = None if file is None else read_private(file)
        self._file = file
        self._serials = frozenset(serials if kept is None else kept.decode(errors="replace").split())

    @property
    def serials(self) -> tuple[str, ...]:
        """The serials, in order."""
        return tuple(sorted(self._serials))

    def replace(self, serials: Iterable[str]) -> bool:
        """Replace the serials; any thread may call it. Return whether they changed."""
        before, self._serials = self._serials, frozenset(serials)
        if before == self._serials:
            return False
        if self._file is not None:
            try:
                write_private(self._file, "".join(f"{serial}\n" for serial in self.serials).encode())
            except ConfigError as error:
                log.warning("Certificates of removed machines are refused until this process ends: %s", error)
        return True

    def refusal(self, peer: Peer) -> str:
        """Return why the peer is refused; a `Refusal`."""
        if peer.serial not in self._serials:
            return ""
        return f"The certificate of {peer} was revoked: it has been removed from the cluster."


def is_local(context: CallContext) -> bool:
    """Report whether the call came over a Unix socket, whose folder's permissions decide who may use it."""
    return context.peer().startswith("unix:")


def peer_of_call(context: CallContext) -> Peer:
    """Return the owner of the certificate of a gRPC call.

    Raises:
        PeerRefused: it came without one, or with one that names no machine of a cluster.
    """
    for pem in context.auth_context().get("x509_pem_cert", ()):
        return _peer_of_pem(pem)
    raise PeerRefused(f"{address_of_call(context)} showed no certificate: join the cluster with a token.")


def peer_of_certificate(certificate: x509.Certificate) -> Peer:
    """Return the owner. Raises `PeerRefused` if the certificate does not have exactly one name, a machine's."""
    from mlx_ring.rpc.tls.certificates import certificate_names  # slow to import, as below

    names = certificate_names(certificate)
    if len(names) != 1 or not (names[0] == HEAD_NAME or node_of(names[0])):
        raise PeerRefused(
            f"A certificate for {', '.join(names) or 'no name'} was shown, which is not the certificate of a cluster's machine."
        )
    return Peer(names[0], f"{certificate.serial_number:x}")


def address_of_call(context: CallContext) -> str:
    """Return the address of a call as text: `192.168.1.7:51234`, `[fe80::1]:51234`."""
    kind, _, address = unquote(context.peer()).partition(":")
    return address if kind in ("ipv4", "ipv6") else f"{kind}:{address}"


def host_of_call(context: CallContext) -> str:
    """Return the address of a call without its port and brackets."""
    return address_of_call(context).rpartition(":")[0].strip("[]")


@lru_cache(maxsize=256)
def _peer_of_pem(pem: bytes) -> Peer:
    from cryptography import x509  # slow to import, and a single machine has no certificates

    return peer_of_certificate(x509.load_pem_x509_certificate(pem))


# ---- this machine


@dataclass(frozen=True, slots=True)
class Identity:
    """A node's id and its key. Certificates change; these stay."""

    node: str
    key: Key = field(repr=False)


def open_identity(folder: Path, machine: str = "") -> Identity:
    """Open the identity in this folder. The first call makes it: `mini-7f3a` on a machine called Mini.local.

    Args:
        folder: private to this machine; the credentials lie there too.
        machine: start of a new id; by default the machine's own name.

    Raises:
        ConfigError: the files cannot be read.
    """
    # Slow to import, and not needed by workers.
    from mlx_ring.host.machine import node_name as name_of_this_machine
    from mlx_ring.rpc.tls.certificates import key_from_pem, key_to_pem, make_key
    from mlx_ring.rpc.tls.credentials import KEY_FILE

    with locked(folder):
        kept = read_private(folder / _ID_FILE)
        node = (
            _new_id(machine or name_of_this_machine())
            if kept is None
            else kept.decode(errors="replace").strip()
        )
        if not _NODE_ID.fullmatch(node):
            raise ConfigError(
                f"{folder / _ID_FILE} has {node[:80]!r}, which is no node id: restore the file from a backup, or remove {folder} "
                "and join again with a token."
            )
        pem = read_private(folder / KEY_FILE)
        key = make_key() if pem is None else key_from_pem(pem, folder / KEY_FILE)
        if pem is None:
            write_private(folder / KEY_FILE, key_to_pem(key))
        if kept is None:
            write_private(folder / _ID_FILE, f"{node}\n".encode())
    return Identity(node, key)


def kept_id(folder: Path) -> str:
    """Return the id of the identity in this folder; empty without one."""
    return (read_private(folder / _ID_FILE) or b"").decode(errors="replace").strip()


def _new_id(machine: str) -> str:
    """Make an id from the machine's name and six digits, because machines may have the same name."""
    readable = re.sub(r"[^a-z0-9]+", "-", machine.split(".", 1)[0].lower())[:_LONGEST_NAME].strip("-")
    return f"{readable or 'node'}-{secrets.token_hex(3)}"
