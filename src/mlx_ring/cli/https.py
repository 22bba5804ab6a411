"""Certificate and key for HTTPS, read from files. Each problem with them is reported in one sentence."""

from __future__ import annotations

import logging
import ssl
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509

from mlx_ring.core.errors import ConfigError
from mlx_ring.settings.config import Settings

log = logging.getLogger(__name__)


def server_tls(settings: Settings) -> ssl.SSLContext | None:
    """Return the TLS context of the HTTP server; None without a certificate.

    Raises:
        ConfigError: a file is missing, is of another kind, or does not match the other.
    """
    certificate, key = settings.ssl_certfile, settings.ssl_keyfile
    if certificate is None:
        for name in ("ssl_keyfile", "ssl_keyfile_password"):
            if getattr(settings, name):
                raise ConfigError(f"--{name.replace('_', '-')} is given without --ssl-certfile; give both.")
        return None
    _check_readable("--ssl-certfile", certificate)
    if key is not None:
        _check_readable("--ssl-keyfile", key)
    _check_certificate(certificate)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certificate, key, _password(settings))
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(_what_is_wrong(error, settings)) from error
    return context


def _password(settings: Settings) -> str:
    """Return the password, or an empty one, which unlocks no key: OpenSSL would ask at the terminal without any."""
    return settings.ssl_keyfile_password or ""


def _check_readable(flag: str, path: Path) -> None:
    try:
        path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{flag} is {path}, which cannot be read: {error.strerror}.") from error


def _check_certificate(path: Path) -> None:
    """Check that the file holds a certificate. An expired one only logs a warning: its owner may need the server to renew it."""
    try:
        first = x509.load_pem_x509_certificates(path.read_bytes())[0]
    except ValueError:
        raise ConfigError(
            f"--ssl-certfile is {path}, which holds no certificate in PEM form "
            "(a text that contains -----BEGIN CERTIFICATE-----)."
        ) from None
    now = datetime.now(UTC)
    if not first.not_valid_before_utc <= now <= first.not_valid_after_utc:
        log.warning(
            "The certificate in %s is valid from %s to %s only: clients will refuse it.",
            path,
            first.not_valid_before_utc.date(),
            first.not_valid_after_utc.date(),
        )


def _what_is_wrong(error: Exception, settings: Settings) -> str:
    if settings.ssl_keyfile is None:
        where, path = (
            f"--ssl-certfile is {settings.ssl_certfile}, without --ssl-keyfile",
            settings.ssl_certfile,
        )
    else:
        where, path = f"--ssl-keyfile is {settings.ssl_keyfile}", settings.ssl_keyfile
    reason = getattr(error, "reason", None)
    if reason == "KEY_VALUES_MISMATCH":
        return f"{where}, whose key does not match the certificate in {settings.ssl_certfile}."
    if path is not None and b"ENCRYPTED" in path.read_bytes():
        wanted = "another password" if settings.ssl_keyfile_password else "a password"
        return f"{where}, whose key needs {wanted}: give it as MLX_RING_SSL_KEYFILE_PASSWORD."
    return f"{where}, which holds no private key in PEM form that OpenSSL accepts ({reason or error})."
