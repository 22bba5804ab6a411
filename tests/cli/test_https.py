"""What is wrong with a certificate's files is one sentence, before anything is loaded."""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from tests.certificates import write_certificate

from mlx_ring.cli.https import server_tls
from mlx_ring.core.errors import ConfigError
from mlx_ring.settings.config import Settings


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return write_certificate(tmp_path)


def taken(**given: object) -> bool:
    return server_tls(Settings.model_validate(given)) is not None


def refused(**given: object) -> str:
    with pytest.raises(ConfigError) as error:
        taken(**given)
    return str(error.value)


def test_a_certificate_with_its_key_is_taken_from_two_files_or_one(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    certificate, key = files
    assert not taken()
    assert taken(ssl_certfile=certificate, ssl_keyfile=key)
    both = tmp_path / "both.pem"
    both.write_bytes(certificate.read_bytes() + key.read_bytes())
    assert taken(ssl_certfile=both)


def test_a_locked_key_is_opened_with_its_password_and_nobody_is_asked_for_it(tmp_path: Path) -> None:
    certificate, key = write_certificate(tmp_path, password="open sesame")  # noqa: S106 - a test's own
    told = {"ssl_certfile": certificate, "ssl_keyfile": key}
    assert taken(**told, ssl_keyfile_password="open sesame")  # noqa: S106 - as above
    assert "wants a password" in refused(**told)
    assert "wants another password" in refused(**told, ssl_keyfile_password="close")  # noqa: S106 - as above


def test_files_that_are_missing_no_certificate_or_of_another_one_are_named(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    certificate, key = files
    other = tmp_path / "other"
    other.mkdir()
    _, foreign = write_certificate(other)
    text = tmp_path / "notes.txt"
    text.write_text("no certificate")
    assert "--ssl-certfile" in refused(ssl_keyfile=key)
    assert "cannot be read" in refused(ssl_certfile=tmp_path / "none.pem", ssl_keyfile=key)
    assert "no certificate in PEM form" in refused(ssl_certfile=text, ssl_keyfile=key)
    assert "no private key in PEM form" in refused(ssl_certfile=certificate, ssl_keyfile=text)
    assert "no private key" in refused(ssl_certfile=certificate)
    assert "is not that of the certificate" in refused(ssl_certfile=certificate, ssl_keyfile=foreign)


def test_a_certificate_that_is_over_is_served_and_said_to_be(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    certificate, key = write_certificate(tmp_path, ends=datetime.now(UTC) - timedelta(days=1))
    assert taken(ssl_certfile=certificate, ssl_keyfile=key)
    assert "clients will refuse it" in caplog.text
