"""Measure what a head does about a machine that gets slower while it serves. Two machines on loopback have a core each.

    python bench/replan.py [MODEL] [--streams 4] [--cores 0.25] [--then 120]
    python bench/replan.py [MODEL] --oscillate 20 --then 300

A control group gives the worker of the last stage a share of a core in mid-stream. The table has the tokens per second of all
streams: before, while it is slow, and after the move, beside the new plan's prediction. Moves are counted until `--then`
seconds after the first one. With `--oscillate`, the share is given and taken away in turn, each for that many seconds, and
moves are counted for `--then` seconds. It needs the right to make control groups.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.cgroups import ControlGroup, limited
from tests.end_to_end.loopback_cluster import running_cluster
from tests.machines import free_pair_of_ports
from tests.processes import Server, client_of

_WINDOW_S = 15.0
"""Time over which a speed is measured."""
_GENERATED = "mlx_ring_generation_tokens_total{"
_LONGEST_S = 600.0


class Streams:
    """Streams that are asked for again whenever they end."""

    def __init__(self, server: Server, count: int, prompt: int) -> None:
        self.errors = 0
        self._server, self._prompt = server, prompt
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._keep, args=(number,)) for number in range(count)]
        for thread in self._threads:
            thread.start()

    def __len__(self) -> int:
        return len(self._threads)

    def end(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def pace(self, seconds: float = _WINDOW_S) -> float:
        """Return the tokens per second from now on, as the server counts them: a token may add no text to a stream."""
        before, began = self.generated(), time.monotonic()
        time.sleep(seconds)
        return (self.generated() - before) / (time.monotonic() - began)

    def generated(self) -> float:
        """Return the number of tokens that were generated."""
        lines = self._server.http.get("/metrics").raise_for_status().text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(_GENERATED))

    def _keep(self, number: int) -> None:
        with client_of(self._server.url) as client:
            while not self._ended.is_set():
                body = {
                    "prompt": [100 + (number * 37 + place) % 100 for place in range(self._prompt)],
                    "max_tokens": 1500,
                    "ignore_eos": True,
                    "temperature": 0,
                    "stream": True,
                }
                with client.stream("POST", "/v1/completions", json=body, timeout=600) as answer:
                    for line in answer.iter_lines():
                        if self._ended.is_set():
                            break
                        if line.startswith("data: {"):
                            with self._lock:
                                self.errors += "error" in json.loads(line.removeprefix("data: "))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--cores", type=float, default=0.25)
    parser.add_argument("--oscillate", type=float, default=0.0)
    parser.add_argument("--then", type=float, default=120.0)
    given = parser.parse_args()
    flags = ("--optimize-for", "throughput", "--max-num-seqs", str(given.streams), "--max-model-len", "2048")
    more = (
        "--expected-users",
        str(given.streams),
        "--kv-cache-memory",
        "256MiB",
        "--replan",
        "auto",
        "--replicas",
        "1",
        # Predictions count no drafts.
        "--num-speculative-tokens",
        "0",
    )
    with tempfile.TemporaryDirectory(prefix="mlx-ring-bench-") as folder, ExitStack() as stack:
        ports = free_pair_of_ports()
        server = stack.enter_context(
            running_cluster(given.model, 2, Path(folder), ports, "--strategy", "auto", *flags, *more)
        )
        _show("loaded", server)
        streams = Streams(server, given.streams, given.prompt)
        stack.callback(streams.end)
        _wait(lambda: streams.generated() > 50 * given.streams, "tokens")
        _compare("before", server, streams.pace())
        group = stack.enter_context(limited(8 << 30, 1.0))
        _slow_down(server, group)
        if given.oscillate:
            _oscillate(server, group, given.cores, given.oscillate, given.then)
        else:
            _throttle(server, streams, group, given.cores, given.then)
        print(f"errors     {streams.errors:8d}", flush=True)


def _slow_down(server: Server, group: ControlGroup) -> None:
    """Move the worker of the last stage into the group. It is on the other machine, unless one has all layers."""
    group.add(server.status()["instances"][-1]["stages"][-1]["pid"])


def _throttle(server: Server, streams: Streams, group: ControlGroup, cores: float, then_s: float) -> None:
    first = _instance(server)
    group.set_cores(cores)
    began = time.monotonic()
    _compare("slow", server, streams.pace())
    _wait(lambda: _instance(server) != first, "a move")
    _wait(lambda: len(server.status()["instances"]) == 1, "the end of the first instance")
    print(f"moved      {time.monotonic() - began:8.1f} s later", flush=True)
    # Streams whose tokens are computed again have none meanwhile.
    before = streams.generated()
    _wait(lambda: streams.generated() - before > 50 * len(streams), "tokens after the move")
    pace = streams.pace()
    _show("loaded", server)
    _compare("after", server, pace)
    print(f"then       {1 + _moves(server, then_s):8d} moves", flush=True)


def _oscillate(server: Server, group: ControlGroup, cores: float, every_s: float, then_s: float) -> None:
    ended = threading.Event()

    def alternate() -> None:
        slow = True
        while not ended.is_set():
            group.set_cores(cores if slow else 1.0)
            slow = not slow
            ended.wait(every_s)

    thread = threading.Thread(target=alternate)
    thread.start()
    try:
        print(f"oscillates {_moves(server, then_s):8d} moves in {then_s:.0f} s", flush=True)
    finally:
        ended.set()
        thread.join()


def _moves(server: Server, seconds: float) -> int:
    """Return the number of moves within a time."""
    seen, end = {_instance(server)}, time.monotonic() + seconds
    while time.monotonic() < end:
        seen.add(_instance(server))
        time.sleep(1.0)
    return len(seen) - 1


def _instance(server: Server) -> str:
    return [instance["name"] for instance in server.status()["instances"]][-1]


def _show(what: str, server: Server) -> None:
    for instance in server.status()["instances"]:
        stages: list[dict[str, Any]] = instance["stages"]
        layers = ", ".join(
            f"{stage['node']} {stage['layers'][0]}-{stage['layers'][1] - 1}" for stage in stages
        )
        print(f"{what:10} {layers}", flush=True)


def _compare(what: str, server: Server, pace: float) -> None:
    """Print a measured speed beside the one that was promised when the instance was planned, and the times of its stages."""
    instance = server.status()["instances"][-1]
    promised = instance["promise"]["tokens_per_s"]
    print(f"{what:10} {pace:8.1f} tokens/s, predicted {promised:.1f}: {pace / promised:.2f}", flush=True)
    for node in server.status()["nodes"]:
        print(f"  {node['name']:10} {node['step_time_ratios']}", flush=True)
    for stage in instance["stages"]:
        for step in stage["times"]["decode"]:
            times = ", ".join(
                f"{name.removesuffix('_ms')} {step[name]:.2f}"
                for name in ("measured_ms", "predicted_ms", "corrected_ms", "link_wait_ms", "link_send_ms")
                if step[name] is not None
            )
            print(f"  {stage['node']:10} {step['rows']} rows, {step['steps']} steps: {times} ms", flush=True)


def _wait(until: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + _LONGEST_S
    while not until():
        if time.monotonic() > end:
            sys.exit(f"There was no {what} within {_LONGEST_S:.0f} s.")
        time.sleep(0.1)


if __name__ == "__main__":
    main()
