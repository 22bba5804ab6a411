"""Certificates, signing requests, keys, and the names in them.

Machines change addresses, so a certificate names the node, and no address is checked.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import datetime

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import NameOID

from mlx_ring.core.errors import ConfigError, PeerRefused

CARRIED_AUTHORITY = x509.ObjectIdentifier("2.25.288715431019845320967123544087156231021")
"""Extension of the head's certificate that holds the CA's certificate (DER).

A machine that joins knows the CA's fingerprint and needs its certificate, and Python's `ssl` shows
of an unverified peer only the leaf. The arc 2.25 is for numbers drawn at random.
"""
_RENEWED_WITH_LEFT = 1 / 3

Key = ec.EllipticCurvePrivateKey


def certificate_names(certificate: x509.Certificate | x509.CertificateSigningRequest) -> Sequence[str]:
    """Return every alternative name. One that is no DNS name is replaced by its class, which matches nothing."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, x509.DuplicateExtension, ValueError):
        return ()
    return [name.value if isinstance(name, x509.DNSName) else type(name).__name__ for name in names]


def carried_authority(leaf: bytes) -> x509.Certificate:
    """Return the CA's certificate that a head's certificate (DER) carries. Nothing of it is verified here.

    Raises:
        PeerRefused: this is no head's certificate.
    """
    try:
        extensions = x509.load_der_x509_certificate(leaf).extensions
        carried = extensions.get_extension_for_oid(CARRIED_AUTHORITY).value
        if isinstance(carried, x509.UnrecognizedExtension):
            return x509.load_der_x509_certificate(carried.value)
    except (ValueError, x509.ExtensionNotFound, x509.DuplicateExtension) as error:
        raise PeerRefused(_NO_HEAD) from error
    raise PeerRefused(_NO_HEAD)


_NO_HEAD = "The server at this address is no mlx-ring head: check the address and port."


def fingerprint(certificate: x509.Certificate) -> bytes:
    """Return the SHA-256 of the certificate (DER)."""
    return hashlib.sha256(certificate.public_bytes(Encoding.DER)).digest()


def key_digest(certificate: x509.Certificate) -> str:
    """Return the SHA-256 of the public key, in hexadecimal: the same for every certificate of a machine."""
    public = certificate.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(public).hexdigest()


def needs_renewal(certificate: x509.Certificate, now: datetime) -> bool:
    """Report whether less than a third of its life is left, or it is not valid yet, because a clock was ahead."""
    if now < certificate.not_valid_before_utc:
        return True
    life = certificate.not_valid_after_utc - certificate.not_valid_before_utc
    return certificate.not_valid_after_utc - now < life * _RENEWED_WITH_LEFT


def make_key() -> Key:
    """Make an ECDSA key on P-256, which every TLS library supports."""
    return ec.generate_private_key(ec.SECP256R1())


def key_to_pem(key: Key) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def key_from_pem(pem: bytes, where: object) -> Key:
    """Read a key. Raises `ConfigError` if it is no key on P-256."""
    try:
        key = load_pem_private_key(pem, password=None)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"The key in {where} cannot be read: {error}.") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"The key in {where} is {type(key).__name__}; it must be a P-256 key.")
    return key


def make_signing_request(key: Key, name: str) -> bytes:
    """Make a signing request in PEM, signed with the key to prove its possession."""
    builder = x509.CertificateSigningRequestBuilder().subject_name(common_name(name))
    builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
    return builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)


def check_signing_request(pem: bytes, name: str) -> ec.EllipticCurvePublicKey:
    """Return the key of a request for exactly this name.

    Raises:
        PeerRefused: it cannot be read, is not signed with its own key, is for another name, or of another kind.
    """
    try:
        request = x509.load_pem_x509_csr(pem)
        key = request.public_key()
        signed = request.is_signature_valid
        names = list(certificate_names(request))
    except Exception as error:
        # The parser may raise anything for a stranger's bytes.
        raise PeerRefused(f"The signing request cannot be read: {error}.") from error
    if not signed:
        raise PeerRefused("The signing request is not signed with its own key.")
    if names != [name]:
        raise PeerRefused(f"The signing request is for {', '.join(names) or 'no name'}, not for {name}.")
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise PeerRefused("The signing request's key is not a P-256 key.")
    return key


def common_name(name: str) -> x509.Name:
    """Return a subject, which decides nothing."""
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])
