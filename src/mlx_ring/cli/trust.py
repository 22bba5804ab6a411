"""Which server a verb believes that asks one over HTTPS."""

from __future__ import annotations

import ssl
from pathlib import Path

import typer

from mlx_ring.core.errors import ConfigError

CACERT = typer.Option(
    "--cacert",
    metavar="FILE",
    help="PEM file of the certificate that an https:// server's must come from, or its own; the system's otherwise.",
)


def trust(given: Path | None, own: Path | None = None) -> ssl.SSLContext:
    """The system's authorities, those of a file, and `own`: what a server of this machine's settings shows.

    Raises:
        ConfigError: a file cannot be read, or holds no certificate.
    """
    context = ssl.create_default_context()
    # A server's own certificate may be all that there is.
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
    """A sentence about a certificate that is not believed; None where that is not the trouble."""
    _, found, why = str(error).partition("CERTIFICATE_VERIFY_FAILED] certificate verify failed: ")
    if not found:
        return None
    return (
        f"The certificate of {url} is not trusted here: {why.partition(' (_ssl')[0]}. "
        "Give the file of its authority, or its own, with --cacert FILE."
    )
