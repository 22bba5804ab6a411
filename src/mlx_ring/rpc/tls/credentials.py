"""Credentials of a machine, and TLS settings made of them.

Both sides show a certificate of the cluster's CA, and TLS is 1.2 at least (gRPC's own lower bound).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import grpc

from mlx_ring.core.errors import ConfigError, RingError
from mlx_ring.core.folders import AUTHORITY_FILE
from mlx_ring.host.private_files import file_mark, read_private, write_private

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

    def check(self) -> None:
        """Check in memory what gRPC would refuse without a reason: files may not be written on a full disk.

        Raises:
            ValueError: a part cannot be read, or key and certificate do not belong together.
        """
        from cryptography import x509  # slow to import, and a single machine has no certificates
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        x509.load_pem_x509_certificate(self.authority)
        certificate = x509.load_pem_x509_certificate(self.certificate)
        try:
            key = load_pem_private_key(self.key, password=None)
        except TypeError as error:  # the key has a password
            raise ValueError(str(error)) from error
        if key.public_key() != certificate.public_key():
            raise ValueError("the key is not the certificate's")

    def save(self, folder: Path) -> None:
        """Write three files, each whole or not at all. The certificate comes last, and completes the set."""
        write_private(folder / KEY_FILE, self.key)
        write_private(folder / AUTHORITY_FILE, self.authority)
        write_private(folder / CERTIFICATE_FILE, self.certificate)


@dataclass(frozen=True, slots=True)
class KeptCredentials:
    """The credentials in a folder, as they are at each connection: they are renewed while processes run."""

    folder: Path

    def for_channel(self) -> grpc.ChannelCredentials:
        """Return the settings of a channel; raise `ConfigError` without usable credentials."""
        return require_credentials(self.folder).for_channel()


_Marks = tuple[tuple[int, int, int] | None, ...]
_loaded: dict[Path, tuple[_Marks, Credentials]] = {}
"""Credentials of each folder that were checked, with the marks of their files."""


def load_credentials(folder: Path) -> Credentials | None:
    """Load the credentials that `save` wrote; None if there is no certificate yet. Unchanged files are read only once.

    Raises:
        ConfigError: a file is missing, cannot be read, or does not belong to the others.
    """
    try:
        marks = tuple(file_mark(folder / name) for name in (CERTIFICATE_FILE, AUTHORITY_FILE, KEY_FILE))
    except OSError:  # reading tells what is wrong
        return _read(folder)
    known = _loaded.get(folder)
    if known is not None and known[0] == marks:
        return known[1]
    credentials = _read(folder)
    if credentials is not None:
        _loaded[folder] = marks, credentials
    return credentials


def require_credentials(folder: Path) -> Credentials:
    """Load the credentials that `save` wrote.

    Raises:
        ConfigError: as `load_credentials`, or there are none.
    """
    credentials = load_credentials(folder)
    if credentials is None:
        raise ConfigError(f"There is no certificate in {folder}: join the cluster with a token.")
    return credentials


def _read(folder: Path) -> Credentials | None:
    """Read and check the credentials.

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
        credentials.check()
    except ValueError as error:
        raise ConfigError(
            f"The certificate and key in {folder} cannot be used ({error}): remove it and join again with a token."
        ) from error
    return credentials


def serve_from_folder(folder: Path) -> grpc.ServerCredentials:
    """Return server settings that also use renewed certificates in the folder, from the next connection on.

    Raises:
        ConfigError: there are no credentials in the folder now.
    """
    return serve_renewed(lambda: require_credentials(folder))


def serve_renewed(
    current: Callable[[], Credentials], *, admits_strangers: bool = False
) -> grpc.ServerCredentials:
    """Return server settings that use what `current` returns at each handshake.

    Args:
        current: returns the credentials of now, in any thread; their certificate may have been renewed.
        admits_strangers: True to ask clients for no certificate: only for enrolment.

    Raises:
        ConfigError: `current` raises it now. Later errors leave the previous credentials in use.
    """
    shown = current()

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        """Return the changed configuration; None without changes. gRPC asks before each handshake."""
        nonlocal shown
        try:
            found = current()
        except (RingError, OSError) as error:
            log.warning("The renewed certificate cannot be used, so the previous one stays in use: %s", error)
            return None
        if found == shown:
            return None
        shown = found
        return _configuration(found, admits_strangers=admits_strangers)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(shown, admits_strangers=admits_strangers),
        renewed,  # pyright: ignore[reportArgumentType] - gRPC's own words: None keeps the last one
        require_client_authentication=not admits_strangers,
    )


def _configuration(
    credentials: Credentials, *, admits_strangers: bool
) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(credentials.key, credentials.certificate)], None if admits_strangers else credentials.authority
    )
