"""The cluster's certificate authority, created at the first start: the root of trust between its machines."""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID

from mlx_ring.core.errors import ConfigError
from mlx_ring.core.folders import AUTHORITY_FILE
from mlx_ring.host.private_files import locked, read_private, write_private
from mlx_ring.rpc.tls.certificates import (
    CARRIED_AUTHORITY,
    Key,
    check_signing_request,
    common_name,
    fingerprint,
    key_from_pem,
    key_to_pem,
    make_key,
    needs_renewal,
)
from mlx_ring.rpc.tls.credentials import Credentials, load_credentials
from mlx_ring.rpc.tls.peers import HEAD_NAME, node_name

log = logging.getLogger(__name__)

CERTIFICATE_LIFE = timedelta(days=365)
_AUTHORITY_LIFE = timedelta(days=20 * 365)
_CLOCK_SLACK = timedelta(hours=1)
"""Lag of a machine's clock at which a new certificate is still valid there."""
_AUTHORITY_SLACK = timedelta(days=10 * 365)
"""The same for the CA's, which is never made again: the clock at the first start may be ahead by years."""
_CERTIFICATE_FILE, _KEY_FILE, _HEAD_FOLDER = "ca.pem", "ca.key", "head"


class Authority:
    """The CA's certificate and key, in a folder of the head's machine that the key never leaves."""

    def __init__(self, folder: Path, certificate: x509.Certificate, key: Key) -> None:
        self._folder = folder
        self._key = key
        self.certificate = certificate
        self.pem = certificate.public_bytes(Encoding.PEM)
        self.fingerprint = fingerprint(certificate)

    @classmethod
    def open(cls, folder: Path) -> Authority:
        """Open the CA in this folder, or create it if there is none.

        Raises:
            ConfigError: files that cannot be read or do not match.
        """
        with locked(folder):
            certificate, key = read_private(folder / _CERTIFICATE_FILE), read_private(folder / _KEY_FILE)
            if certificate is None:
                # A key alone is left by an interrupted first start; it has signed nothing.
                if (folder / _HEAD_FOLDER).exists() or any(folder.glob("*.json")):
                    raise ConfigError(
                        f"{folder / _CERTIFICATE_FILE} is missing: restore it from a backup, or copy `node/{AUTHORITY_FILE}` "
                        f"of a member's state folder there; or remove {folder} and let every machine join again."
                    )
                return _make(folder)
        if key is None:
            raise ConfigError(
                f"{folder / _KEY_FILE} is missing: restore it from a backup, or remove {folder} and let every "
                "machine join again."
            )
        return _load(folder, certificate, key)

    def sign(self, signing_request: bytes, node: str, now: datetime | None = None) -> x509.Certificate:
        """Check a node's signing request and return a certificate for it.

        Raises:
            PeerRefused: a request that is not the node's own: see `check_signing_request`.
            ConfigError: an invalid node ID.
        """
        name = node_name(node)
        return self._issue(check_signing_request(signing_request, name), name, now or datetime.now(UTC))

    def head_credentials(self, now: datetime | None = None) -> Credentials:
        """Return the head's own credentials, stored on disk and renewed shortly before they expire."""
        moment = now or datetime.now(UTC)
        folder = self._folder / _HEAD_FOLDER
        try:
            kept = load_credentials(folder)
        except ConfigError as error:
            log.warning("The head gets another key and certificate: %s", str(error).partition(": remove ")[0])
            kept = None
        if kept is not None and kept.authority == self.pem:
            certificate = x509.load_pem_x509_certificate(kept.certificate)
            if not needs_renewal(certificate, moment):
                return kept
        # Keep the key, so that the files still match after an interrupted save.
        key = make_key() if kept is None else key_from_pem(kept.key, folder)
        certificate = self._issue(key.public_key(), HEAD_NAME, moment, carries_authority=True)
        credentials = Credentials(self.pem, certificate.public_bytes(Encoding.PEM), key_to_pem(key))
        credentials.save(folder)
        return credentials

    def _issue(
        self, key: ec.EllipticCurvePublicKey, name: str, now: datetime, *, carries_authority: bool = False
    ) -> x509.Certificate:
        builder = _begin(name, self.certificate.subject, key, now, CERTIFICATE_LIFE)
        own = self.certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
        issuer = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(own)
        both = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        builder = (
            builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
            .add_extension(both, critical=False)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(issuer, critical=False)
        )
        if carries_authority:
            carried = x509.UnrecognizedExtension(
                CARRIED_AUTHORITY, self.certificate.public_bytes(Encoding.DER)
            )
            builder = builder.add_extension(carried, critical=False)
        return builder.sign(self._key, hashes.SHA256())


def _make(folder: Path) -> Authority:
    key = make_key()
    name = common_name("mlx-ring cluster")
    now = datetime.now(UTC)
    builder = _begin("mlx-ring cluster", name, key.public_key(), now, _AUTHORITY_LIFE, _AUTHORITY_SLACK)
    certificate = (
        builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    write_private(folder / _KEY_FILE, key_to_pem(key))
    write_private(folder / _CERTIFICATE_FILE, certificate.public_bytes(Encoding.PEM))
    return Authority(folder, certificate, key)


def _load(folder: Path, certificate_pem: bytes, key_pem: bytes) -> Authority:
    key = key_from_pem(key_pem, folder / _KEY_FILE)
    try:
        certificate = x509.load_pem_x509_certificate(certificate_pem)
    except ValueError as error:
        raise ConfigError(f"{folder / _CERTIFICATE_FILE} cannot be read: {error}.") from error
    if certificate.public_key() != key.public_key():
        raise ConfigError(
            f"{_CERTIFICATE_FILE} and {_KEY_FILE} in {folder} do not match: restore both from a backup."
        )
    return Authority(folder, certificate, key)


def _begin(
    name: str,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    now: datetime,
    life: timedelta,
    slack: timedelta = _CLOCK_SLACK,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(common_name(name))
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - slack)
        .not_valid_after(now + life)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )
