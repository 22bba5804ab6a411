"""The cluster's CA: its creation, and the requests that it signs or refuses."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import given
from hypothesis import strategies as st

from mlx_ring.cluster.security.authority import CERTIFICATE_LIFE, Authority
from mlx_ring.core.errors import ConfigError, PeerRefused
from mlx_ring.rpc.tls.certificates import (
    carried_authority,
    certificate_names,
    common_name,
    fingerprint,
    make_key,
    make_signing_request,
    needs_renewal,
)
from mlx_ring.rpc.tls.peers import node_name, node_of

NOW = datetime.now(UTC)
MINI = node_name("mini-1")


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.open(tmp_path)


def request_for(*names: x509.GeneralName, key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> bytes:
    builder = x509.CertificateSigningRequestBuilder().subject_name(common_name("x"))
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)


def test_the_authority_is_created_once(tmp_path: Path) -> None:
    first, second = Authority.open(tmp_path), Authority.open(tmp_path)
    assert first.fingerprint == second.fingerprint == fingerprint(first.certificate)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


def test_two_concurrent_first_starts_create_one_authority(tmp_path: Path) -> None:
    fingerprints: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: fingerprints.append(Authority.open(tmp_path).fingerprint))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(fingerprints) == 4
    assert len(set(fingerprints)) == 1


def test_an_interrupted_first_start_is_repeated(tmp_path: Path) -> None:
    Authority.open(tmp_path)
    (tmp_path / "ca.pem").unlink()
    assert Authority.open(tmp_path).fingerprint == Authority.open(tmp_path).fingerprint


@pytest.mark.parametrize("fault", ["no key", "another key", "rubbish", "no certificate in it"])
def test_files_that_do_not_match_are_named(fault: str, tmp_path: Path) -> None:
    Authority.open(tmp_path / "a")
    Authority.open(tmp_path / "b")
    key, certificate = tmp_path / "a" / "ca.key", tmp_path / "a" / "ca.pem"
    match fault:
        case "no key":
            key.unlink()
        case "another key":
            key.write_bytes((tmp_path / "b" / "ca.key").read_bytes())
        case "rubbish":
            key.write_text("rubbish")
        case _:
            certificate.write_text("rubbish")
    with pytest.raises(ConfigError, match=str(tmp_path / "a")):
        Authority.open(tmp_path / "a")


def test_a_signed_certificate_is_for_the_node_alone_and_for_a_year(authority: Authority) -> None:
    key = make_key()
    certificate = authority.sign(make_signing_request(key, MINI), "mini-1", NOW)
    assert list(certificate_names(certificate)) == [MINI]
    assert certificate.public_key() == key.public_key()
    certificate.verify_directly_issued_by(authority.certificate)
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert not needs_renewal(certificate, NOW)
    assert not needs_renewal(certificate, NOW + CERTIFICATE_LIFE * 0.6)
    assert needs_renewal(certificate, NOW + CERTIFICATE_LIFE * 0.7)


def test_a_request_for_another_node_is_refused(authority: Authority) -> None:
    with pytest.raises(PeerRefused, match=r"is for studio-1\.node\.mlx-ring, not for mini-1\.node\.mlx-ring"):
        authority.sign(make_signing_request(make_key(), node_name("studio-1")), "mini-1")


@pytest.mark.parametrize(
    "names",
    [
        (),
        (x509.DNSName(MINI), x509.DNSName("head.mlx-ring")),
        (x509.DNSName(MINI), x509.DNSName(MINI)),
        (x509.DNSName("*.node.mlx-ring"),),
        (x509.UniformResourceIdentifier(MINI),),
        (x509.DNSName("head.mlx-ring"),),
    ],
    ids=["none", "two", "twice", "a wildcard", "no DNS name", "the head's"],
)
def test_a_request_for_any_other_set_of_names_is_refused(
    names: tuple[x509.GeneralName, ...], authority: Authority
) -> None:
    with pytest.raises(PeerRefused, match=r"not for mini-1\.node\.mlx-ring"):
        authority.sign(request_for(*names, key=make_key()), "mini-1")


def test_a_request_that_its_key_has_not_signed_is_refused(authority: Authority) -> None:
    ours = x509.load_pem_x509_csr(make_signing_request(make_key(), MINI)).public_bytes(Encoding.DER)
    theirs = x509.load_pem_x509_csr(make_signing_request(make_key(), MINI))
    point = theirs.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    own = (
        x509.load_der_x509_csr(ours)
        .public_key()
        .public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    )
    forged = x509.load_der_x509_csr(ours.replace(own, point)).public_bytes(Encoding.PEM)
    with pytest.raises(PeerRefused, match="not signed with its own key"):
        authority.sign(forged, "mini-1")


def test_keys_of_other_kinds_are_refused(authority: Authority) -> None:
    for key in (rsa.generate_private_key(65537, 2048), ec.generate_private_key(ec.SECP384R1())):
        with pytest.raises(PeerRefused, match="not a P-256 key"):
            authority.sign(request_for(x509.DNSName(MINI), key=key), "mini-1")


@given(content=st.binary(max_size=200) | st.text().map(lambda text: f"-----BEGIN {text}".encode()))
def test_an_invalid_request_is_refused(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    authority = Authority.open(tmp_path_factory.getbasetemp() / "rubbish")
    with pytest.raises(PeerRefused, match="cannot be read"):
        authority.sign(content, "mini-1")


@pytest.mark.parametrize("node", ["", "Mini", "a.b", "-a", "a-", "a" * 49, "ä", "a\n", "*"])
def test_a_node_id_with_an_invalid_character_is_refused(node: str, authority: Authority) -> None:
    with pytest.raises(ConfigError, match="is no node id"):
        authority.sign(make_signing_request(make_key(), MINI), node)


def test_only_a_node_s_name_gives_a_node_id() -> None:
    assert node_of(MINI) == "mini-1"
    for name in ("head.mlx-ring", "mini-1", "a.b.node.mlx-ring", ".node.mlx-ring", "node.mlx-ring"):
        assert node_of(name) == ""


def test_the_head_keeps_its_certificate_until_it_is_due_for_renewal(authority: Authority) -> None:
    first = authority.head_credentials(NOW)
    assert authority.head_credentials(NOW + timedelta(days=100)) == first
    later = authority.head_credentials(NOW + timedelta(days=300))
    assert later != first
    assert authority.head_credentials(NOW + timedelta(days=301)) == later


def test_the_head_s_certificate_carries_the_authority_s(authority: Authority) -> None:
    leaf = x509.load_pem_x509_certificate(authority.head_credentials().certificate)
    assert carried_authority(leaf.public_bytes(Encoding.DER)) == authority.certificate


def test_a_certificate_without_an_authority_is_not_a_head_s(authority: Authority) -> None:
    node = authority.sign(make_signing_request(make_key(), MINI), "mini-1")
    for leaf in (node.public_bytes(Encoding.DER), b"", b"rubbish"):
        with pytest.raises(PeerRefused, match="no mlx-ring head"):
            carried_authority(leaf)


def test_a_head_whose_clock_was_ahead_gets_a_certificate_that_is_valid_now(authority: Authority) -> None:
    authority.head_credentials(NOW + timedelta(days=30))
    shown = x509.load_pem_x509_certificate(authority.head_credentials(NOW).certificate)
    assert shown.not_valid_before_utc <= NOW


def test_an_authority_is_valid_although_the_clock_was_ahead_when_it_was_made(authority: Authority) -> None:
    assert authority.certificate.not_valid_before_utc < NOW - timedelta(days=9 * 365)


@pytest.mark.parametrize("trace", ["head", "tokens.json", "members.json"])
def test_a_lost_certificate_of_a_cluster_is_not_replaced_by_another_cluster_s(
    trace: str, tmp_path: Path
) -> None:
    authority = Authority.open(tmp_path)
    (tmp_path / trace).mkdir()
    (tmp_path / "ca.pem").unlink()
    with pytest.raises(ConfigError, match=r"ca\.pem is missing: restore it.*authority\.pem"):
        Authority.open(tmp_path)
    (tmp_path / "ca.pem").write_bytes(authority.pem)
    assert Authority.open(tmp_path).fingerprint == authority.fingerprint


@pytest.mark.parametrize("file", ["key.pem", "certificate.pem", "authority.pem"])
def test_a_damaged_certificate_of_the_head_is_issued_again(
    file: str, authority: Authority, tmp_path: Path
) -> None:
    authority.head_credentials()
    (tmp_path / "head" / file).write_bytes(b"")
    issued = authority.head_credentials()
    issued.check()
    assert issued.authority == authority.pem
    assert authority.head_credentials() == issued
