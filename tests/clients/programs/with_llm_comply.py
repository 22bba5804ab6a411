"""The suite `llm-comply`, which checks responses against the published schemas of three APIs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from checks import KEY, MODEL, URL, check, equal, expect, run

PROGRAM = Path(sys.executable).with_name("llm-comply")
NO_IMAGES = "only text models are supported, so images are refused by name"
ONE_MODEL = "a request without a model is answered by the served model"
NO_CITATIONS = (
    "text without citations has no key for them, because a null broke every answer in @ai-sdk/anthropic"
)
DIFFERENCES: Mapping[str, str] = {
    "chat-image-input": NO_IMAGES,
    "image-input": NO_IMAGES,
    "anth-image-input": NO_IMAGES,
    "chat-error-handling": ONE_MODEL,
    "error-handling": ONE_MODEL,
    "anth-basic-response": NO_CITATIONS,
    "anth-multi-turn": NO_CITATIONS,
    "anth-system-prompt": NO_CITATIONS,
}
"""Tests that this server fails on purpose, with the reason. If one passes, the run fails."""


@cache
def results(format_: str, *more: str) -> Sequence[Mapping[str, Any]]:
    done = subprocess.run(
        [str(PROGRAM), "--format", format_, "-u", f"{URL}/v1", "-k", KEY, "-m", MODEL, "--json", *more],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    if not done.stdout.strip():
        raise AssertionError(done.stderr)
    return json.loads(done.stdout)["results"]


def compare(format_: str, *more: str) -> None:
    reported = results(format_, *more)
    expect(any(result["status"] == "passed" for result in reported), reported)
    failed = {result["id"]: result for result in reported if result["status"] == "failed"}
    known = {result["id"] for result in reported} & DIFFERENCES.keys()
    unexpected = {name: result for name, result in failed.items() if name not in DIFFERENCES}
    equal(unexpected, {})
    equal(known - failed.keys(), set())


@check("openai-chat")
def chat() -> None:
    compare("openai-chat")


@check("open-responses")
def responses() -> None:
    compare("open-responses")


@check("anthropic")
def anthropic() -> None:
    compare("anthropic", "--auth-header", "x-api-key", "--no-bearer", "-H", "anthropic-version:2023-06-01")


run()
