"""What is read off a certificate or a signing request."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import datetime

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from mlx_ring.core.errors import PeerRefused

CARRIED_AUTHORITY = x509.ObjectIdentifier("2.25.288715431019845320967123544087156231021")
"""An extension of the head's certificate that holds the CA's certificate (DER).

A machine that joins knows the CA's fingerprint and needs its certificate, and Python's `ssl` shows
of an unverified peer only the leaf. The arc 2.25 is for numbers drawn at random.
"""
_RENEWED_WITH_LEFT = 1 / 3

Key = ec.EllipticCurvePrivateKey


def certificate_names(certificate: x509.Certificate | x509.CertificateSigningRequest) -> Sequence[str]:
    """Every alternative name; one that is no DNS name is given by its class, so that it fits nothing."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, x509.DuplicateExtension, ValueError):
        return ()
    return [name.value if isinstance(name, x509.DNSName) else type(name).__name__ for name in names]


def carried_authority(leaf: bytes) -> x509.Certificate:
    """The CA's certificate that a head's certificate (DER) carries. Nothing of it is verified here.

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


_NO_HEAD = "What answered there is no mlx-ring head: check the address and port."


def fingerprint(certificate: x509.Certificate) -> bytes:
    """SHA-256 of the certificate (DER)."""
    return hashlib.sha256(certificate.public_bytes(Encoding.DER)).digest()


def key_digest(certificate: x509.Certificate) -> str:
    """SHA-256 of the public key, in hexadecimal: the same for every certificate of a machine."""
    public = certificate.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(public).hexdigest()


def needs_renewal(certificate: x509.Certificate, now: datetime) -> bool:
    """Whether less than a third of its life is left."""
    life = certificate.not_valid_after_utc - certificate.not_valid_before_utc
    return certificate.not_valid_after_utc - now < life * _RENEWED_WITH_LEFT
