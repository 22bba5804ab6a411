"""Members of the cluster, their certificates and their removal."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509

from mlx_ring.cluster.security.authority import CERTIFICATE_LIFE, Authority
from mlx_ring.cluster.security.enrolment import admit_own_machine
from mlx_ring.cluster.security.records import Members
from mlx_ring.core.errors import ConfigError, PeerRefused
from mlx_ring.rpc.tls.certificates import Key, make_key, make_signing_request
from mlx_ring.rpc.tls.peers import Revoked, node_name, peer_of_certificate

NOW = datetime.now(UTC)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.open(tmp_path)


@pytest.fixture
def members(tmp_path: Path) -> Members:
    return Members(tmp_path)


def certificate(authority: Authority, node: str, key: Key, now: datetime = NOW) -> x509.Certificate:
    return authority.sign(make_signing_request(key, node_name(node)), node, now)


def test_a_member_is_accepted_and_a_signed_certificate_alone_is_not(
    authority: Authority, members: Members
) -> None:
    known, unknown = (certificate(authority, "mini-1", make_key()) for _ in range(2))
    members.admit(known)
    assert members.refusal(peer_of_certificate(known)) == ""
    assert "is not a member" in members.refusal(peer_of_certificate(unknown))


def test_an_id_belongs_to_its_key_until_the_node_is_removed(authority: Authority, members: Members) -> None:
    first, other = (certificate(authority, "mini-1", make_key()) for _ in range(2))
    members.admit(first)
    with pytest.raises(PeerRefused, match="`mlx-ring node remove mini-1`"):
        members.admit(other)
    with pytest.raises(PeerRefused, match="with another key"):
        members.renew(other)
    members.remove("mini-1")
    members.admit(other)
    assert members.refusal(peer_of_certificate(other)) == ""


def test_a_removed_node_is_refused_by_the_head_and_informed_nodes(
    authority: Authority, tmp_path: Path, members: Members
) -> None:
    key = make_key()
    certificates = [certificate(authority, "mini-1", key) for _ in range(2)]
    members.admit(certificates[0])
    members.renew(certificates[1])
    assert members.revoked_serials() == frozenset()
    # Another process does the same when the command runs beside a head.
    Members(tmp_path).remove("mini-1")
    revoked = Revoked(members.revoked_serials())
    for one in certificates:
        assert "is not a member" in members.refusal(peer_of_certificate(one))
        assert "was revoked" in revoked.refusal(peer_of_certificate(one))


def test_a_removed_node_gets_no_new_certificate(authority: Authority, members: Members) -> None:
    key = make_key()
    members.admit(certificate(authority, "mini-1", key))
    members.remove("mini-1")
    with pytest.raises(PeerRefused, match="is not a member"):
        members.renew(certificate(authority, "mini-1", key))
    assert members.list() == {}


def test_removing_an_unknown_node_names_the_known_ones(authority: Authority, members: Members) -> None:
    with pytest.raises(ConfigError, match="There is no node 'mini-2': no machine has joined this cluster"):
        members.remove("mini-2")
    members.admit(certificate(authority, "mini-1", make_key()))
    with pytest.raises(ConfigError, match="There is no node 'mini-2': the cluster's nodes are mini-1"):
        members.remove("mini-2")


def test_serials_of_expired_certificates_are_dropped(authority: Authority, tmp_path: Path) -> None:
    key, old = make_key(), NOW - CERTIFICATE_LIFE - timedelta(days=2)
    members = Members(tmp_path, clock=old.timestamp)
    members.admit(certificate(authority, "mini-1", key, old))
    now = Members(tmp_path, clock=NOW.timestamp)
    now.admit(certificate(authority, "mini-1", key))
    assert len(now.list()["mini-1"].certificates) == 1
    now.remove("mini-1")
    assert len(now.revoked_serials()) == 1


def test_the_head_is_accepted_without_membership(authority: Authority, members: Members) -> None:
    head = x509.load_pem_x509_certificate(authority.head_credentials().certificate)
    assert members.refusal(peer_of_certificate(head)) == ""


def test_the_head_s_own_machine_becomes_a_node_without_a_token(
    authority: Authority, members: Members, tmp_path: Path
) -> None:
    folder = tmp_path / "node"
    first = admit_own_machine(authority, members, folder)
    assert admit_own_machine(authority, members, folder) == first
    (node,) = members.list()
    members.remove(node)
    again = admit_own_machine(authority, members, folder)
    assert again != first
    assert members.refusal(peer_of_certificate(x509.load_pem_x509_certificate(again.certificate))) == ""
    assert list(members.list()) == [node]
