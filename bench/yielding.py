"""Measure what another program gets beside a model that serves, with and without `--yield-to-user`.

    python bench/yielding.py [MODEL] [--streams 4] [--seconds 20] [--rounds 2]

A loop of another program and the worker of a model that answers share one core. The table has the CPU time of both, which do
not depend on what else runs, and the tokens per second of all streams. The servers run one after the other, in each round.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import psutil
from bench.replan import Streams
from tests.processes import give_profile, serving

_WAIT_S = 60.0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=2)
    given = parser.parse_args()
    for flags in ((), ("--yield-to-user",)) * given.rounds:
        with tempfile.TemporaryDirectory(prefix="mlx-ring-bench-") as folder, ExitStack() as stack:
            state = Path(folder) / "state"
            give_profile(state)
            arguments = ("--blas-threads", "1", "--state-dir", str(state), *flags)
            server = stack.enter_context(serving(given.model, *arguments, folder=Path(folder)))
            streams = Streams(server, given.streams, 64)
            stack.callback(streams.end)
            while streams.tokens < 50:
                time.sleep(0.1)
            worker: int = server.status()["devices"][0]["pid"]
            core = min(os.sched_getaffinity(0))
            with _loop() as other:
                _pin(worker, core)
                _pin(other, core)
                priority = ""
                began = time.monotonic()
                while flags and not priority and time.monotonic() - began < _WAIT_S:
                    time.sleep(0.1)
                    state_now = server.status()["nodes"][0]["yielding"]
                    priority = state_now["priority"] if state_now else ""
                after_s = time.monotonic() - began
                before = _cpu_s(other), _cpu_s(worker)
                pace = streams.pace(given.seconds)
                loop_s, worker_s = _cpu_s(other) - before[0], _cpu_s(worker) - before[1]
            print(
                f"{' '.join(flags) or 'without':16} loop {loop_s:5.2f} s, worker {worker_s:5.2f} s of CPU time: the loop has "
                f"{loop_s / (loop_s + worker_s):.0%} of what both get; {pace:.1f} tokens/s"
                + (f"; {priority} after {after_s:.1f} s" if flags else ""),
                flush=True,
            )


@contextmanager
def _loop() -> Generator[int]:
    """Run a loop that is no child of this process, in a session of its own."""
    command = '"$0" -c "while True: pass" >/dev/null 2>&1 & echo $!'
    started = subprocess.run(
        ["setsid", "sh", "-c", command, sys.executable], capture_output=True, text=True, check=True
    )
    pid = int(started.stdout)
    try:
        yield pid
    finally:
        os.kill(pid, 9)


def _pin(pid: int, core: int) -> None:
    for task in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(task.name), {core})


def _cpu_s(pid: int) -> float:
    return sum(psutil.Process(pid).cpu_times()[:2])


if __name__ == "__main__":
    main()
