"""Schemathesis against a running server: whatever it makes of `/openapi.json`, no answer is the server's failure, or one that the document does not tell."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import httpx
import pytest
from tests.clients.environments import command_of
from tests.clients.manifest import Client
from tests.processes import serving

TOOL = Client("schemathesis", "schemathesis", "", "")
KEY = "house-key"
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "unsupported_method",
    "ignored_auth",
)
BRIEF = ("--default-max-tokens", "4", "--max-model-len", "128")
"""What a sound request asks for is made soon."""
ENDLESS = "/cluster/events"
"""A stream that goes on until its client leaves."""


@pytest.mark.conformance
@pytest.mark.timeout(1500)
def test_every_answer_is_one_that_the_document_tells(tmp_path: Path) -> None:
    python = command_of(TOOL)[0]
    with serving("demo", *BRIEF, "--api-key", KEY, folder=tmp_path) as server:
        key = {"Authorization": f"Bearer {KEY}"}
        document = httpx.get(f"{server.url}/openapi.json", headers=key, timeout=60).json()
        operations = sum(len(methods) for path, methods in document["paths"].items() if path != ENDLESS)
        done = subprocess.run(
            [
                str(Path(python).with_name("schemathesis")),
                *("run", f"{server.url}/openapi.json"),
                *("--header", f"Authorization: Bearer {KEY}"),
                *("--checks", ",".join(CHECKS), "--phases", "examples,coverage,fuzzing"),
                *("--max-examples", "10", "--seed", "1", "--exclude-path", ENDLESS, "--no-color"),
            ],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=1400,
            check=False,
        )
        # What it cannot make examples of on some versions of Python counts as its error, and is no failure of the server's.
        tested = re.search(r"Tested: (\d+)$", done.stdout, re.MULTILINE)
        assert tested is not None, done.stdout + done.stderr
        assert int(tested[1]) == operations
        for trouble in ("= FAILURES =", "Network Error", "timed out"):
            assert trouble not in done.stdout, done.stdout[-20_000:]
        assert server.stop() == 0
