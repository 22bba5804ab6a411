"""HTTPS as a person serves it, and the verbs that ask such a server."""

from __future__ import annotations

import ssl
from pathlib import Path

import httpx
from tests.certificates import write_certificate
from tests.processes import run_cli, serving


def test_a_server_of_https_is_asked_by_every_verb_that_is_told_whom_to_trust(
    tiny_model: Path, tmp_path: Path
) -> None:
    certificate, key = write_certificate(tmp_path)
    flags = ("--ssl-certfile", str(certificate), "--ssl-keyfile", str(key))
    with serving(tiny_model, *flags, folder=tmp_path) as server:
        assert server.url.startswith("https://127.0.0.1:")
        trusted = ssl.create_default_context(cafile=certificate)
        answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"}, verify=trusted, timeout=60)
        assert answer.status_code == 200
        asked = ("--url", server.url)
        told = run_cli("cluster", "status", *asked, "--cacert", str(certificate), folder=tmp_path)
        assert told.returncode == 0, told.stderr
        load = ("--requests", "2", "--prompt-tokens", "4", "--output-tokens", "4", "--no-progress")
        told = run_cli("bench", *asked, *load, "--cacert", str(certificate), folder=tmp_path)
        assert told.returncode == 0, told.stderr
        told = run_cli("chat", *asked, folder=tmp_path)
        assert told.returncode == 2
        assert "is not trusted here" in " ".join(told.stdout.split())
        assert "--cacert" in told.stdout
        assert server.stop() == 0
