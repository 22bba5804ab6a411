"""Measure the CPU time of an idle server: head, agent and workers.

    python bench/idle.py [--stages 2] [--tp 1] [--seconds 20]

Starts `mlx-ring serve` with the built-in demo and sends one request to warm it up. Then adds up the CPU time of all its
processes while it is idle.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil

PORT = 8191
READY_WITHIN_S = 120.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    command = [str(Path(sys.executable).with_name("mlx-ring")), "serve", "demo"]
    command += ["--stages", str(options.stages), "--tp", str(options.tp), "--port", str(PORT)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _answer_once()
        used = _measure(psutil.Process(server.pid), options.seconds)
    finally:
        os.kill(server.pid, signal.SIGINT)
        server.wait()
    for name, seconds in used.items():
        print(f"{name:<24}{100 * seconds / options.seconds:6.2f} %")
    total = sum(used.values())
    print(f"{'all':<24}{100 * total / options.seconds:6.2f} % of one core over {options.seconds:g} s")


def _answer_once() -> None:
    url = f"http://127.0.0.1:{PORT}"
    deadline = time.monotonic() + READY_WITHIN_S
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"{url}/health/ready").is_success:
                break
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    httpx.post(
        f"{url}/v1/completions", json={"prompt": "Hello", "max_tokens": 8}, timeout=60
    ).raise_for_status()


def _measure(head: psutil.Process, seconds: float) -> dict[str, float]:
    """Return the CPU seconds that each process used in that time."""
    processes = [head, *head.children(recursive=True)]
    before = [_cpu_seconds(process) for process in processes]
    time.sleep(seconds)
    return {
        f"{_role(process)} {process.pid}": _cpu_seconds(process) - start
        for process, start in zip(processes, before, strict=True)
    }


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def _role(process: psutil.Process) -> str:
    words = process.cmdline()
    return next(
        (word.removeprefix("mlx_ring.") for word in words if word in {"mlx_ring.agent", "mlx_ring.worker"}),
        "head",
    )


if __name__ == "__main__":
    main()
