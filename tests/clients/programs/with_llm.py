"""The command `llm`, as a person uses it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import (
    ANSWER,
    KEY,
    LAMP_REQUEST,
    LAMP_SCHEMA,
    MODEL,
    QUESTION,
    URL,
    WEATHER_ANSWER,
    WEATHER_QUESTION,
    WEATHER_RESULT,
    WRONG_KEY,
    check,
    equal,
    expect,
    is_lamp,
    run,
)

LLM = Path(sys.executable).with_name("llm")
HOME = Path(tempfile.mkdtemp())
"""Its settings folder, among the temporary files that the operating system deletes."""
WEATHER = f"""
def get_weather(city: str) -> str:
    "Get the weather of a city"
    return {WEATHER_RESULT!r} if city == "Paris" else "{{}}"
"""
(HOME / "extra-openai-models.yaml").write_text(
    f"""
- model_id: ring
  model_name: {MODEL}
  api_base: {URL}/v1
  api_key_name: ring
  supports_tools: true
  supports_schema: true
""",
    encoding="utf-8",
)


def llm(*arguments: str, key: str = KEY) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(LLM), *arguments, "--key", key],
        env=os.environ | {"LLM_USER_PATH": str(HOME)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def output(*arguments: str) -> str:
    done = llm("-m", "ring", "-o", "temperature", "0", *arguments)
    expect(done.returncode == 0, done.stderr)
    return done.stdout.strip()


@check("chat")
def answers() -> None:
    equal(output("--no-stream", QUESTION), ANSWER)


@check("chat, streamed")
def streams() -> None:
    equal(output(QUESTION), ANSWER)


@check("continued chat")
def goes_on() -> None:
    output(QUESTION)
    expect(output("--continue", "And of Italy?"))


@check("tools")
def calls_tools() -> None:
    equal(output("--functions", WEATHER, WEATHER_QUESTION), WEATHER_ANSWER)


@check("schema")
def holds_to_schema() -> None:
    expect(is_lamp(json.loads(output("--schema", json.dumps(LAMP_SCHEMA), LAMP_REQUEST))))


@check("errors")
def errs() -> None:
    done = llm("-m", "ring", QUESTION, key=WRONG_KEY)
    expect(done.returncode != 0 and "API key" in done.stderr, done.stderr)


run()
