"""Keys, and the requests to have one certified for a name."""

from __future__ import annotations

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import NameOID

from mlx_ring.core.errors import ConfigError, PeerRefused
from mlx_ring.rpc.tls.certificates import Key, certificate_names


def make_key() -> Key:
    """ECDSA on P-256, which every TLS library speaks."""
    return ec.generate_private_key(ec.SECP256R1())


def key_to_pem(key: Key) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def key_from_pem(pem: bytes, where: object) -> Key:
    """Raises `ConfigError` where this is no key of ours."""
    try:
        key = load_pem_private_key(pem, password=None)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"The key in {where} cannot be read: {error}.") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"The key in {where} is {type(key).__name__}; it must be one on P-256.")
    return key


def make_signing_request(key: Key, name: str) -> bytes:
    """PEM, signed with the key: that is the proof of having it."""
    builder = x509.CertificateSigningRequestBuilder().subject_name(common_name(name))
    builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
    return builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)


def check_signing_request(pem: bytes, name: str) -> ec.EllipticCurvePublicKey:
    """The key of a request for exactly this name.

    Raises:
        PeerRefused: it cannot be read, is not signed with its own key, is for another name, or of another kind.
    """
    try:
        request = x509.load_pem_x509_csr(pem)
        key = request.public_key()
        signed = request.is_signature_valid
        names = list(certificate_names(request))
    except Exception as error:
        # Whatever a stranger's bytes make the parser raise.
        raise PeerRefused(f"The signing request cannot be read: {error}.") from error
    if not signed:
        raise PeerRefused("The signing request is not signed with its own key.")
    if names != [name]:
        raise PeerRefused(f"The signing request is for {', '.join(names) or 'no name'}, not for {name}.")
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise PeerRefused("The signing request's key is not on P-256.")
    return key


def common_name(name: str) -> x509.Name:
    """A subject; nothing is decided by it."""
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])
