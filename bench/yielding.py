"""Measure what another program gets beside a model that serves, with and without `--yield-to-user`.

    python bench/yielding.py [MODEL] [--streams 4] [--loops 2] [--seconds 20]

Loops of another program start while the model answers. The table has the cores that the loops get, the tokens per second of
all streams, and after how long the workers yielded. Both servers run one after the other.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import psutil
from bench.replan import Streams
from tests.processes import Server, give_profile, serving

_WAIT_S = 60.0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--loops", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=20.0)
    given = parser.parse_args()
    for flags in ((), ("--yield-to-user",)):
        with tempfile.TemporaryDirectory(prefix="mlx-ring-bench-") as folder, ExitStack() as stack:
            state = Path(folder) / "state"
            give_profile(state)
            arguments = ("--stages", "2", "--state-dir", str(state), *flags)
            server = stack.enter_context(serving(given.model, *arguments, folder=Path(folder)))
            streams = Streams(server, given.streams, 64)
            stack.callback(streams.end)
            _measure(server, streams, given.loops, given.seconds, " ".join(flags) or "without")


def _measure(server: Server, streams: Streams, loops: int, seconds: float, name: str) -> None:
    while streams.tokens < 200:
        time.sleep(0.1)
    alone = streams.pace(seconds)
    with _other_program(loops) as pids:
        began = time.monotonic()
        yielded: float | None = None
        while yielded is None and time.monotonic() - began < (_WAIT_S if name != "without" else 5.0):
            time.sleep(0.1)
            if _yielding(server) is not None:
                yielded = time.monotonic() - began
        what = _yielding(server)
        before, start = _cpu_s(pids), time.monotonic()
        pace = streams.pace(seconds)
        cores = (_cpu_s(pids) - before) / (time.monotonic() - start)
    after = "" if yielded is None else f", yielded after {yielded:.1f} s: {what}"
    print(
        f"{name:16} loops get {cores:.2f} cores; tokens/s {alone:.1f} alone, {pace:.1f} beside them{after}",
        flush=True,
    )


def _yielding(server: Server) -> dict[str, object] | None:
    return server.status()["nodes"][0]["yielding"]


@contextmanager
def _other_program(loops: int) -> Generator[Sequence[int]]:
    """Run loops that are no children of this process, each in a session of its own."""
    command = '"$0" -c "while True: pass" >/dev/null 2>&1 & echo $!'
    pids = [
        int(
            subprocess.run(
                ["setsid", "sh", "-c", command, sys.executable], capture_output=True, text=True, check=True
            ).stdout
        )
        for _ in range(loops)
    ]
    try:
        yield pids
    finally:
        for pid in pids:
            os.kill(pid, 9)


def _cpu_s(pids: Sequence[int]) -> float:
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


if __name__ == "__main__":
    main()
