"""Aider, run in a folder like by a user."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from checks import ANSWER, KEY, MODEL, QUESTION, URL, WRONG_KEY, check, expect, run

PROGRAM = Path(sys.executable).with_name("aider")
QUIETLY = (
    *("--no-git", "--yes-always", "--no-show-model-warnings", "--no-check-update", "--analytics-disable"),
    *("--no-pretty", "--no-fancy-input", "--no-auto-commits"),
)


def aider(message: str, *more: str, key: str = KEY) -> str:
    """Return the output of one request in an empty folder."""
    reach = ("--openai-api-base", f"{URL}/v1", "--openai-api-key", key)
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [str(PROGRAM), "--model", f"openai/{MODEL}", *reach, *QUIETLY, *more, "--message", message],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    return done.stdout + done.stderr


@check("chat, streamed")
def streams() -> None:
    said = aider(QUESTION)
    expect("Tokens:" in said and "received" in said, said)


@check("chat")
def answers() -> None:
    said = aider(QUESTION, "--no-stream")
    expect("Tokens:" in said and "received" in said, said)


@check("errors")
def errs() -> None:
    said = aider(QUESTION, key=WRONG_KEY)
    expect("AuthenticationError" in said and ANSWER not in said, said)


run()
