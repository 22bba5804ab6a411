"""Run a client's program against a server, and report failures."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from tests.clients.manifest import Client
from tests.eventually import eventually
from tests.processes import Server, clean_environment

KEY = "house-key"
MODEL = "house/demo"
"""Model id with a slash, like those of Hugging Face."""
_LONGEST_S = 400.0
_IDLE_WAIT_S = 30.0
_OTHERS = ("OPENAI_", "ANTHROPIC_", "OLLAMA_", "LITELLM_", "LLM_", "AIDER_", "HF_", "npm_")
"""Prefixes of variables that could point clients to other servers."""


def failures(client: Client, command: Sequence[str], server: Server, home: Path) -> str:
    """Return the failures of the client's program; empty if all checks passed."""
    home.mkdir(exist_ok=True)
    found = home / "found.jsonl"
    done = subprocess.run(
        [*command, server.url, KEY, MODEL, str(found)],
        cwd=home,
        env=_environment(client, home),
        capture_output=True,
        text=True,
        timeout=_LONGEST_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in found.read_text(encoding="utf-8").splitlines()]
    assert [line["check"] for line in lines] == client.checks
    return "\n".join(f"{client.name}, {line['check']}: {line['error']}" for line in lines if line["error"])


def becomes_idle(server: Server) -> bool:
    """Return true if the server soon becomes idle, because cancelled requests must end."""
    last = time.monotonic() + _IDLE_WAIT_S

    def is_idle() -> bool:
        stats = server.http.get("/cache/stats", headers={"authorization": f"Bearer {KEY}"}).json()
        return stats["running"] == stats["waiting"] == 0

    return eventually(lambda: (is_idle(), time.monotonic() > last), any)[0]


def _environment(client: Client, home: Path) -> dict[str, str]:
    """Return variables without the user's settings, and with a separate home folder."""
    own = {name: value for name, value in clean_environment().items() if not name.startswith(_OTHERS)}
    return own | {"HOME": str(home), "PYTHONDONTWRITEBYTECODE": "1"} | dict(client.environment)
