"""Programs to compare. Each runs in its own processes and answers the same jobs."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import httpx
import psutil
from machine import pin
from servers import blas_environment, free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

_LIMIT_S = 600
_STOP_LIMIT_S = 20
_WINDOW = 8
_WORKER = "mlx_ring.worker"


@dataclass(frozen=True)
class Speed:
    """Tokens per second as a client sees them; `own_*` as the program reports them, if it does."""

    prefill: float
    """Prompt tokens divided by the time to the first token."""
    decode: float
    decode_fastest: float
    """Speed of the fastest eight consecutive tokens, which shows the program without disturbances."""
    own_prefill: float | None = None
    own_decode: float | None = None


def measured_speed(
    prompt_tokens: int, arrivals_s: list[float], new_tokens: int, own: dict[str, float] | None = None
) -> Speed:
    """Return the speed of an answer of `new_tokens`, from the seconds at which its pieces arrived."""
    decode = (new_tokens - 1) / (arrivals_s[-1] - arrivals_s[0])
    spans = [later - earlier for earlier, later in zip(arrivals_s, arrivals_s[_WINDOW:], strict=False)]
    return Speed(
        prefill=prompt_tokens / arrivals_s[0],
        decode=decode,
        decode_fastest=_WINDOW / min(spans) if len(arrivals_s) == new_tokens and spans else decode,
        own_prefill=(own or {}).get("prompt_tokens_per_second"),
        own_decode=(own or {}).get("generation_tokens_per_second"),
    )


class Contestant(Protocol):
    """Model that answers one job at a time. The constructor starts its processes, pinned to `cores` in turn."""

    name: str
    load_s: float
    """Seconds from the start of the first process until the model can answer."""

    def run(self, prompt: list[int], new_tokens: int) -> Speed: ...

    def stop(self) -> None: ...


class Stock:
    """mlx-lm in one process, with its wheel's BLAS or with ours."""

    def __init__(self, model: Path, cores: list[int], *, dtype: str, fast_blas: bool = False) -> None:
        self.name = f"mlx-lm, {dtype}" + " with our BLAS" * fast_blas
        script = str(Path(__file__).with_name("stock.py"))
        command = [*blas_environment(), sys.executable, script, str(model), dtype]
        command += ["fast-blas"] * fast_blas
        started = time.perf_counter()
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        if cores:
            pin(self._process.pid, cores[0])
        self._answer()
        self.load_s = time.perf_counter() - started

    def run(self, prompt: list[int], new_tokens: int) -> Speed:
        print(json.dumps({"prompt": prompt, "new_tokens": new_tokens}), file=self._process.stdin, flush=True)
        return measured_speed(len(prompt), self._answer()["arrivals_s"], new_tokens)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        line = next(iter(self._process.stdout or []), None)
        if line is None:
            raise SystemExit(f"{self.name} ended with exit code {self._process.wait()}.")
        return json.loads(line)


class Ring:
    """`mlx-ring serve` over HTTP. Each worker is pinned to its own core; the head is not pinned."""

    def __init__(self, model: Path, cores: list[int], *, stages: int) -> None:
        self.name = "mlx-ring, one worker" if stages == 1 else f"mlx-ring, {stages} stages"
        program = shutil.which("mlx-ring", path=str(Path(sys.executable).parent)) or "mlx-ring"
        port = free_port()
        self._logs = tempfile.TemporaryDirectory(prefix="mlx-ring-bench-")
        serve = [program, "serve", str(model), "--stages", str(stages), "--port", str(port)]
        serve += ["--blas-threads", "1", "--log-dir", self._logs.name]
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=_LIMIT_S)
        started = time.perf_counter()
        self._output = Path(self._logs.name) / "output"
        with self._output.open("wb") as output:
            command = [*blas_environment(), *serve]
            self._process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            self._wait_until_ready(started + _LIMIT_S)
            self.load_s = time.perf_counter() - started
            self._pin_workers(stages, cores)
        except BaseException:
            self.stop()
            raise

    def run(self, prompt: list[int], new_tokens: int) -> Speed:
        job = {
            "prompt": prompt,
            "max_tokens": new_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        arrivals: list[float] = []
        usage: dict[str, Any] = {}
        own: dict[str, Any] = {}
        started = time.perf_counter()
        with self._client.stream("POST", "/v1/completions", json=job) as response:
            if not response.is_success:
                raise SystemExit(f"{self.name} answered {response.status_code}: {response.read().decode()}")
            for event in events(response):
                if any(choice.get("text") for choice in event.get("choices", [])):
                    arrivals.append(time.perf_counter() - started)
                usage = event.get("usage") or usage
                own = event.get("performance") or own
        if usage.get("completion_tokens") != new_tokens:
            raise SystemExit(f"{self.name} returned {usage} for {new_tokens} requested tokens.")
        return measured_speed(len(prompt), arrivals, new_tokens, own)

    def stop(self) -> None:
        self._client.close()
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(_STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._logs.cleanup()

    def _wait_until_ready(self, deadline: float) -> None:
        while time.perf_counter() < deadline:
            if self._process.poll() is not None:
                output = self._output.read_text(errors="replace")
                raise SystemExit(f"{self.name} ended with exit code {self._process.returncode}:\n{output}")
            with contextlib.suppress(httpx.TransportError):
                if self._client.get("/health/ready").is_success:
                    return
            time.sleep(0.1)
        raise SystemExit(f"{self.name} was not ready after {_LIMIT_S} s.")

    def _pin_workers(self, stages: int, cores: list[int]) -> None:
        children = psutil.Process(self._process.pid).children(recursive=True)
        workers = [child for child in children if _WORKER in child.cmdline()]
        if len(workers) != stages:
            raise SystemExit(f"{self.name} runs {len(workers)} workers, not {stages}.")
        for index, worker in enumerate(workers if cores else []):
            pin(worker.pid, cores[index % len(cores)])


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """Yield the events of a stream as JSON objects."""
    for line in response.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise SystemExit(f"The stream ended with an error: {event['error']}")
            yield event
