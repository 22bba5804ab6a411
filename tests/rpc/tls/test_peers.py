"""Origin of a call, and the node that its certificate names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.machines import node_credentials

from mlx_ring.cluster.security.authority import Authority
from mlx_ring.core.errors import PeerRefused
from mlx_ring.rpc.tls.peers import Peer, Revoked, address_of_call, host_of_call, is_local, peer_of_call


@dataclass(frozen=True)
class Call:
    """Context of a call, as gRPC gives it."""

    origin: str
    authentication: Mapping[str, list[bytes]] = field(default_factory=dict[str, list[bytes]])

    def peer(self) -> str:
        return self.origin

    def auth_context(self) -> Mapping[str, list[bytes]]:
        return self.authentication


@pytest.mark.parametrize(
    ("peer", "address", "host"),
    [
        ("ipv4:192.168.1.7:51234", "192.168.1.7:51234", "192.168.1.7"),
        ("ipv6:%5B::1%5D:51234", "[::1]:51234", "::1"),
        ("ipv6:[fe80::1%25en0]:51234", "[fe80::1%en0]:51234", "fe80::1%en0"),
    ],
)
def test_ipv4_and_ipv6_peers_are_readable(peer: str, address: str, host: str) -> None:
    assert (address_of_call(Call(peer)), host_of_call(Call(peer))) == (address, host)


def test_only_a_unix_socket_is_local() -> None:
    assert is_local(Call("unix:"))
    assert not is_local(Call("ipv4:127.0.0.1:1"))


def test_the_peer_of_a_call_is_read_from_its_certificate(tmp_path: Path) -> None:
    authority = Authority.open(tmp_path)
    node = peer_of_call(Call("", {"x509_pem_cert": [node_credentials(authority, "mini-1").certificate]}))
    assert (node.node, node.is_head, str(node)) == ("mini-1", False, "mini-1")
    head = peer_of_call(Call("", {"x509_pem_cert": [authority.head_credentials().certificate]}))
    assert (head.node, head.is_head, str(head)) == ("", True, "the head")


def test_a_certificate_that_names_no_machine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PeerRefused, match="for no name was shown"):
        peer_of_call(Call("", {"x509_pem_cert": [Authority.open(tmp_path).pem]}))
    with pytest.raises(PeerRefused, match=r"192\.168\.1\.7:5 showed no certificate"):
        peer_of_call(Call("ipv4:192.168.1.7:5"))


def test_revoked_certificates_are_kept_for_the_next_start(tmp_path: Path) -> None:
    revoked = Revoked(file=tmp_path / "revoked")
    assert revoked.replace(["b", "a"])
    assert Revoked(file=tmp_path / "revoked").serials == ("a", "b")
    assert revoked.replace([])
    assert Revoked(file=tmp_path / "revoked").serials == ()


def test_revoked_certificates_are_refused_although_their_file_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    revoked = Revoked(file=tmp_path / "revoked")
    (tmp_path / "revoked").mkdir()
    assert revoked.replace(["a"])
    assert "cannot be written" in caplog.text
    assert revoked.refusal(Peer("mini-1.node.mlx-ring", "a"))
