"""Certificate and key files for HTTPS: each problem is one sentence, before anything is loaded. So is a wrong scheme."""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from tests.api.clients import serving
from tests.api.twins import TwinService
from tests.certificates import write_certificate
from tests.processes import run_in_process

from mlx_ring.cli.serve import server_tls
from mlx_ring.core.errors import ConfigError
from mlx_ring.settings.config import Settings


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return write_certificate(tmp_path)


def accepts(**given: object) -> bool:
    return server_tls(Settings.model_validate(given)) is not None


def refusal(**given: object) -> str:
    with pytest.raises(ConfigError) as error:
        accepts(**given)
    return str(error.value)


def test_a_certificate_and_its_key_are_read_from_two_files_or_one(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    certificate, key = files
    assert not accepts()
    assert accepts(ssl_certfile=certificate, ssl_keyfile=key)
    both = tmp_path / "both.pem"
    both.write_bytes(certificate.read_bytes() + key.read_bytes())
    assert accepts(ssl_certfile=both)


def test_an_encrypted_key_needs_its_password_and_never_prompts(tmp_path: Path) -> None:
    certificate, key = write_certificate(tmp_path, password="open sesame")  # noqa: S106 - a test's own
    options = {"ssl_certfile": certificate, "ssl_keyfile": key}
    assert accepts(**options, ssl_keyfile_password="open sesame")  # noqa: S106 - as above
    assert "needs a password" in refusal(**options)
    assert "needs another password" in refusal(**options, ssl_keyfile_password="close")  # noqa: S106 - as above


def test_missing_invalid_and_mismatched_files_are_named(files: tuple[Path, Path], tmp_path: Path) -> None:
    certificate, key = files
    other = tmp_path / "other"
    other.mkdir()
    _, foreign = write_certificate(other)
    text = tmp_path / "notes.txt"
    text.write_text("no certificate")
    assert "--ssl-certfile" in refusal(ssl_keyfile=key)
    assert "cannot be read" in refusal(ssl_certfile=tmp_path / "none.pem", ssl_keyfile=key)
    assert "no certificate in PEM form" in refusal(ssl_certfile=text, ssl_keyfile=key)
    assert "no private key in PEM form" in refusal(ssl_certfile=certificate, ssl_keyfile=text)
    assert "no private key" in refusal(ssl_certfile=certificate)
    assert "does not match the certificate" in refusal(ssl_certfile=certificate, ssl_keyfile=foreign)


def test_an_expired_certificate_is_served_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    certificate, key = write_certificate(tmp_path, ends=datetime.now(UTC) - timedelta(days=1))
    assert accepts(ssl_certfile=certificate, ssl_keyfile=key)
    assert "clients will refuse it" in caplog.text


ASKS = [("chat", "Hello."), ("cluster", "status"), ("bench",)]
"""Commands that ask a server, each by a client of its own."""


def without_breaks(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("command", ASKS)
def test_https_to_a_server_of_plain_http_is_refused_with_the_scheme_to_give(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    with serving(TwinService()) as url:
        wrong = url.replace("http:", "https:")
        done = run_in_process(*command, "--url", wrong, folder=tmp_path)
    assert done.returncode != 0
    said = f"The server at {wrong} does not use HTTPS: give its address with http://."
    assert said in without_breaks(done.stderr)


@pytest.mark.parametrize("command", ASKS)
def test_plain_http_to_a_server_of_https_is_refused_with_the_scheme_to_give(
    command: tuple[str, ...], files: tuple[Path, Path], tmp_path: Path
) -> None:
    certificate, key = files
    tls = server_tls(Settings.model_validate({"ssl_certfile": certificate, "ssl_keyfile": key}))
    with serving(TwinService(), tls=tls) as url:
        wrong = url.replace("https:", "http:")
        done = run_in_process(*command, "--url", wrong, folder=tmp_path)
    assert done.returncode != 0
    said = f"{wrong} closed the connection without an answer. If the server uses HTTPS, give its address with https://."
    assert said in without_breaks(done.stderr)
