"""Schemathesis against a running server: no response to its requests is a server error or undocumented."""

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
"""Flags that keep the responses to valid requests short."""
ENDLESS = "/cluster/events"
"""Stream that lasts until its client disconnects."""


@pytest.mark.conformance
@pytest.mark.timeout(1500)
def test_every_response_is_documented(tmp_path: Path) -> None:
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
        # On some versions of Python it cannot generate examples for all schemas; it reports this as an error, not a failure.
        tested = re.search(r"Tested: (\d+)$", done.stdout, re.MULTILINE)
        assert tested is not None, done.stdout + done.stderr
        assert int(tested[1]) == operations
        for failure in ("= FAILURES =", "Network Error", "timed out"):
            assert failure not in done.stdout, done.stdout[-20_000:]
        assert server.stop() == 0
