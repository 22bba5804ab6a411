"""Credentials of a machine, and TLS settings made of them.

Both sides show a certificate of the cluster's CA, and TLS is 1.2 at least (gRPC's own lower bound).
"""

from __future__ import annotations

import logging
import ssl
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import grpc

from mlx_ring.core.errors import ConfigError
from mlx_ring.core.folders import AUTHORITY_FILE
from mlx_ring.host.private_files import read_private, write_private

log = logging.getLogger(__name__)

CERTIFICATE_FILE, KEY_FILE = "certificate.pem", "key.pem"


class ChannelTrust(Protocol):
    """Trust of a channel: the CA, and perhaps an own certificate."""

    def for_channel(self) -> grpc.ChannelCredentials: ...


@dataclass(frozen=True, slots=True)
class Anchor:
    """The cluster's CA alone, for a machine that has no certificate of its own yet."""

    authority: bytes
    """Certificate of the CA, in PEM."""

    def for_channel(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.authority)


@dataclass(frozen=True, slots=True)
class Credentials:
    """The cluster's CA, and one machine's certificate and key. All PEM."""

    authority: bytes
    certificate: bytes
    key: bytes = field(repr=False)

    def for_channel(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.authority, self.key, self.certificate)

    def for_server(self) -> grpc.ServerCredentials:
        """Return settings for a server that refuses clients without a certificate of the cluster."""
        return grpc.ssl_server_credentials(
            [(self.key, self.certificate)], self.authority, require_client_auth=True
        )

    def for_strangers(self) -> grpc.ServerCredentials:
        """Return settings for a server that asks for no certificate: only for enrolment."""
        return grpc.ssl_server_credentials([(self.key, self.certificate)])

    def socket_client(self) -> ssl.SSLContext:
        """Check the credentials as gRPC would use them; raise the error that gRPC hides."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_verify_locations(cadata=self.authority.decode())
        with _as_files(self) as folder:
            context.load_cert_chain(folder / CERTIFICATE_FILE, folder / KEY_FILE)
        return context

    def save(self, folder: Path) -> None:
        """Write three files, each whole or not at all. The certificate comes last, and completes the set."""
        write_private(folder / KEY_FILE, self.key)
        write_private(folder / AUTHORITY_FILE, self.authority)
        write_private(folder / CERTIFICATE_FILE, self.certificate)


def load_credentials(folder: Path) -> Credentials | None:
    """Load the credentials that `save` wrote; None if there is no certificate yet.

    Raises:
        ConfigError: a file is missing, cannot be read, or does not belong to the others.
    """
    certificate = read_private(folder / CERTIFICATE_FILE)
    if certificate is None:
        return None
    rest = {name: read_private(folder / name) for name in (AUTHORITY_FILE, KEY_FILE)}
    authority, key = rest[AUTHORITY_FILE], rest[KEY_FILE]
    if authority is None or key is None:
        missing = next(name for name, content in rest.items() if content is None)
        raise ConfigError(f"{folder / missing} is missing: remove {folder} and join again with a token.")
    credentials = Credentials(authority, certificate, key)
    try:
        credentials.socket_client()
    except (ssl.SSLError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"The certificate and key in {folder} cannot be used ({error}): remove it and join again with a token."
        ) from error
    return credentials


def serve_from_folder(folder: Path) -> grpc.ServerCredentials:
    """Return server settings that also use renewed certificates in the folder, from the next connection on.

    Raises:
        ConfigError: there are no credentials in the folder now.
    """
    shown = read_private(folder / CERTIFICATE_FILE)

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        """Return the changed configuration; None without changes. gRPC asks before each handshake."""
        nonlocal shown
        try:
            found = read_private(folder / CERTIFICATE_FILE)
            if found == shown or found is None:
                return None
            configuration = _configuration(folder)
        except ConfigError as error:
            log.warning("The renewed certificate cannot be used, so the previous one stays in use: %s", error)
            return None
        shown = found
        return configuration

    return grpc.dynamic_ssl_server_credentials(
        _configuration(folder),
        renewed,  # pyright: ignore[reportArgumentType] - gRPC's own words: None keeps the last one
        require_client_authentication=True,
    )


def _configuration(folder: Path) -> grpc.ServerCertificateConfiguration:
    credentials = load_credentials(folder)
    if credentials is None:
        raise ConfigError(f"There is no certificate in {folder}: join the cluster with a token.")
    return grpc.ssl_server_certificate_configuration(
        [(credentials.key, credentials.certificate)], credentials.authority
    )


@contextmanager
def _as_files(credentials: Credentials) -> Generator[Path]:
    """Write certificate and key to a private folder, because `ssl` only reads files."""
    with tempfile.TemporaryDirectory(prefix="mlx-ring-") as name:
        folder = Path(name)
        write_private(folder / CERTIFICATE_FILE, credentials.certificate)
        write_private(folder / KEY_FILE, credentials.key)
        yield folder
