"""Measure the pause of a stream when a worker is lost or processes stand still, beside a client that asks again.

    python bench/recovery.py [--rounds 3] [--model demo] [--stages 3] [--spare-worker auto]

For each fault it prints seconds from the fault: until the client is notified, and until the next token of the same
stream (`--resume on`), or the first token of a new request after an error (`--resume off`). The server
runs for a while first, because a loss soon after a load is followed by a pause.

For processes that stand still for a moment, it prints the seconds from its end until the next token. It also prints
whether the instance stayed the same. An agent that stands still does not continue.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.processes import Server, serving

BODY = {"prompt": [5, 6, 7], "max_tokens": 400, "ignore_eos": True, "temperature": 0, "stream": True}
FAULTS = (signal.SIGKILL, signal.SIGSTOP)
STANDSTILLS: dict[str, tuple[Callable[[Server], psutil.Process], float]] = {
    "worker": (lambda server: server.child("mlx_ring.worker", "--stage", "1"), 2.5),
    "agent": (lambda server: server.child("mlx_ring.agent"), 0.0),
    "head": (lambda server: psutil.Process(server.process.pid), 5.0),
}
"""Processes that stand still, and for how many seconds; 0: for good."""
_TOKENS_AFTERWARDS = 100
_FAULT_AFTER = 20
"""Number of events before the fault."""
_STEADY_S = 11.0
_ASK_AGAIN_S = 0.05


@dataclass(frozen=True)
class Times:
    """Seconds from the fault."""

    notified: float
    """Until the client is notified: of the pause, or of the error."""
    token: float
    """Until the next token."""


@dataclass(frozen=True)
class Served:
    """Model and settings of each server."""

    model: str
    stages: int
    spare_worker: str

    @property
    def words(self) -> tuple[str, ...]:
        """Arguments of `mlx-ring serve`."""
        return self.model, "--stages", str(self.stages), "--spare-worker", self.spare_worker


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--stages", type=int, default=3)
    parser.add_argument("--spare-worker", default="auto")
    arguments = parser.parse_args()
    served = Served(arguments.model, arguments.stages, arguments.spare_worker)
    print(f"{arguments.model}, {arguments.stages} stages, medians of {arguments.rounds} rounds, in seconds")
    print(f"{'fault':10}{'notified':>10}{'resumed':>10}{'error':>8}{'asked again':>13}")
    for fault in FAULTS:
        rounds = {"on": list[Times](), "off": list[Times]()}
        for _ in range(arguments.rounds):
            for resume, times in rounds.items():
                times.append(measure(served, fault, resume))
        notified, token = (
            {resume: median(getattr(each, name) for each in times) for resume, times in rounds.items()}
            for name in ("notified", "token")
        )
        print(
            f"{fault.name:10}{notified['on']:10.2f}{token['on']:10.2f}{notified['off']:8.2f}{token['off']:13.2f}"
        )
    print(f"\n{'standstill':20}{'next token':>12}{'longest gap':>13}  same instance")
    for name, (_, seconds) in STANDSTILLS.items():
        measured = [measure_standstill(served, name) for _ in range(arguments.rounds)]
        token, gap = (median(each[number] for each in measured) for number in (0, 1))
        label = f"{name}, {seconds:g} s" if seconds else f"{name}, for good"
        print(f"{label:20}{token:12.2f}{gap:13.2f}  {all(each[2] for each in measured)}")


def measure_standstill(served: Served, name: str) -> tuple[float, float, bool]:
    """Let a process stand still once.

    Returns:
        Seconds until the next token, the longest gap afterwards, and True if the instance stayed the same.
    """
    find, seconds = STANDSTILLS[name]
    with tempfile.TemporaryDirectory() as folder, serving(*served.words, folder=Path(folder)) as server:
        before, process, times = server.status()["epoch"], find(server), list[float]()
        with server.http.stream("POST", "/v1/completions", json=BODY) as answer:
            lines = (line for line in answer.iter_lines() if line.startswith("data: {"))
            for _ in range(_FAULT_AFTER):
                next(lines)
            reader = threading.Thread(target=lambda: times.extend(time.monotonic() for _ in lines))
            reader.start()
            process.suspend()
            time.sleep(seconds)
            if seconds:
                process.resume()
            ended = time.monotonic()
            while len([each for each in times if each > ended]) < _TOKENS_AFTERWARDS and reader.is_alive():
                time.sleep(0.1)
            same = server.status()["epoch"] == before
            server.stop()
            reader.join()
    since = [ended, *(each for each in times if each > ended)][: _TOKENS_AFTERWARDS + 1]
    gaps = [after - earlier for earlier, after in pairwise(since)]
    return gaps[0], max(gaps), same


def measure(served: Served, fault: signal.Signals, resume: str) -> Times:
    """Interrupt a stream once."""
    words = (*served.words, "--resume", resume)
    with tempfile.TemporaryDirectory() as folder, serving(*words, folder=Path(folder)) as server:
        time.sleep(_STEADY_S)
        worker = server.child("mlx_ring.worker", "--stage", str(served.stages // 2))
        with server.http.stream("POST", "/v1/completions", json=BODY) as answer:
            lines = (line for line in answer.iter_lines() if line)
            for _ in range(_FAULT_AFTER):
                next(lines)
            worker.send_signal(fault)
            began = time.monotonic()
            notified, token = _follow(lines)
        if token is None:
            token = _ask_again(server)
        return Times(notified - began, token - began)


def _follow(lines: Iterator[str]) -> tuple[float, float | None]:
    """Return the time at which the client was notified, and that of the next token; None after an error."""
    for line in lines:
        if line == ": resuming":
            notified = time.monotonic()
            next(each for each in lines if each.startswith("data: {"))
            return notified, time.monotonic()
        if '"error"' in line:
            return time.monotonic(), None
    raise RuntimeError("The stream ended before the fault was noticed: ask for more tokens.")


def _ask_again(server: Server) -> float:
    """Ask until a new stream has its first token, and return that time."""
    while True:
        with server.http.stream("POST", "/v1/completions", json=BODY) as answer:
            if answer.is_success:
                for line in answer.iter_lines():
                    if line.startswith("data: {") and json.loads(line[6:])["choices"][0]["text"]:
                        return time.monotonic()
        time.sleep(_ASK_AGAIN_S)


if __name__ == "__main__":
    main()
