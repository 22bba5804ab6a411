"""A server with HTTPS, and the commands that connect to it."""

from __future__ import annotations

import ssl
from pathlib import Path

import httpx
from tests.certificates import write_certificate
from tests.processes import run_cli, run_in_process, serving


def test_commands_reach_an_https_server_if_they_trust_its_certificate(
    tiny_model: Path, tmp_path: Path
) -> None:
    certificate, key = write_certificate(tmp_path)
    flags = ("--ssl-certfile", str(certificate), "--ssl-keyfile", str(key))
    with serving(tiny_model, *flags, folder=tmp_path) as server:
        assert server.url.startswith("https://127.0.0.1:")
        trusted = ssl.create_default_context(cafile=certificate)
        answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"}, verify=trusted, timeout=60)
        assert answer.status_code == 200
        url = ("--url", server.url)
        done = run_in_process("cluster", "status", *url, "--cacert", str(certificate), folder=tmp_path)
        assert done.returncode == 0, done.stderr
        load = ("--requests", "2", "--prompt-tokens", "4", "--output-tokens", "4", "--no-progress")
        done = run_cli("bench", *url, *load, "--cacert", str(certificate), folder=tmp_path)
        assert done.returncode == 0, done.stderr
        done = run_in_process("chat", *url, folder=tmp_path)
        assert done.returncode == 2
        assert "is not trusted here" in " ".join(done.stderr.split())
        assert "--cacert" in done.stderr
        assert server.stop() == 0
