"""Certificates that commands accept from an HTTPS server."""

from __future__ import annotations

import ssl
from pathlib import Path

import typer

from mlx_ring.core.errors import ConfigError

CACERT = typer.Option(
    "--cacert",
    metavar="FILE",
    help="PEM file of the authority or certificate of an https:// server; the system's authorities by default.",
)


def trust(given: Path | None, own: Path | None = None) -> ssl.SSLContext:
    """Return a context that trusts the system's authorities, a file, and `own`, the certificate in this machine's settings.

    Raises:
        ConfigError: a file cannot be read, or holds no certificate.
    """
    context = ssl.create_default_context()
    # The file may hold only the server's own certificate.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    for flag, path in (("--cacert", given), ("ssl-certfile", own)):
        if path is not None:
            try:
                context.load_verify_locations(path)
            except OSError as error:
                reason = (
                    error.strerror if not isinstance(error, ssl.SSLError) else "no certificate in PEM form"
                )
                raise ConfigError(f"{flag} is {path}, which cannot be used: {reason}.") from error
    return context


def distrust(error: Exception, url: str) -> str | None:
    """Return a sentence about an untrusted certificate; None for any other error."""
    _, found, why = str(error).partition("CERTIFICATE_VERIFY_FAILED] certificate verify failed: ")
    if not found:
        return None
    return (
        f"The certificate of {url} is not trusted here: {why.partition(' (_ssl')[0]}. "
        "Give the file of its authority, or of the certificate itself, with --cacert FILE."
    )
