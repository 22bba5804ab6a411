"""Aider, run in a folder like by a user."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from checks import ANSWER, KEY, MODEL, QUESTION, URL, WRONG_KEY, check, expect, run

PROGRAM = Path(sys.executable).with_name("aider")
QUIET = (
    *("--no-git", "--yes-always", "--no-show-model-warnings", "--no-check-update", "--analytics-disable"),
    *("--no-pretty", "--no-fancy-input", "--no-auto-commits"),
)


def aider(message: str, *more: str, key: str = KEY) -> str:
    """Return the output of one request in an empty folder."""
    server = ("--openai-api-base", f"{URL}/v1", "--openai-api-key", key)
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [str(PROGRAM), "--model", f"openai/{MODEL}", *server, *QUIET, *more, "--message", message],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    return done.stdout + done.stderr


@check("chat, streamed")
def streams() -> None:
    output = aider(QUESTION)
    expect("Tokens:" in output and "received" in output, output)


@check("chat")
def answers() -> None:
    output = aider(QUESTION, "--no-stream")
    expect("Tokens:" in output and "received" in output, output)


@check("errors")
def errs() -> None:
    output = aider(QUESTION, key=WRONG_KEY)
    expect("AuthenticationError" in output and ANSWER not in output, output)


run()
