"""Measure what streams notice while the layers of a machine move to others. Three machines on loopback share the cores.

    python bench/moves.py [MODEL] [--streams 8] [--tokens 400] [--rounds 3] [--model-memory SIZE]

Each round, the streams run, a machine is drained, and it is readmitted once they have ended. The table has the median time
between two tokens of a stream in milliseconds: before the move, while the other instance is loaded and computes the known
tokens, and after the move, when fewer machines compute. The pause is the time between the last token of the one instance
and the first of the other one. The table has its median and 95th percentile over the streams, and the latter as a multiple
of the time between tokens before. With `--model-memory` for a single instance (demo: 30MiB), answers pause.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.end_to_end.loopback_cluster import running_cluster
from tests.machines import free_pair_of_ports
from tests.processes import Server, client_of

_MACHINES = 3
_CHANGE_S = 1.0
"""Time around the end of a move in which the change lies."""
_BEFORE = 40
"""Tokens of each stream before the drain."""


@dataclass(slots=True)
class Stream:
    """Times at which a stream's tokens came, in seconds."""

    times: list[float] = field(default_factory=list[float])
    error: str = ""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--prompt", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model-memory", metavar="SIZE")
    given = parser.parse_args()
    flags = ("--strategy", "uniform", "--max-model-len", "2048", "--max-num-seqs", str(given.streams))
    kv = () if given.model_memory else ("--kv-cache-memory", "256MiB")
    limits = ("--model-memory", given.model_memory) if given.model_memory else ()
    with tempfile.TemporaryDirectory(prefix="mlx-ring-bench-") as folder, ExitStack() as stack:
        cluster = running_cluster(
            given.model,
            _MACHINES,
            Path(folder),
            free_pair_of_ports(),
            *flags,
            *kv,
            *limits,
        )
        server = stack.enter_context(cluster)
        print("way    requests      s ITL before  during   after pause p50     p95 p95/before   errors")
        for _ in range(given.rounds):
            _round(server, given.streams, given.tokens, given.prompt)


def _round(server: Server, count: int, tokens: int, prompt: int) -> None:
    streams = [Stream() for _ in range(count)]
    threads = [
        threading.Thread(target=_read, args=(server, stream, number, tokens, prompt))
        for number, stream in enumerate(streams)
    ]
    for thread in threads:
        thread.start()
    while any(len(stream.times) < _BEFORE and not stream.error for stream in streams):
        time.sleep(0.01)
    drained_s = time.perf_counter()
    other = next(node["id"] for node in server.status()["nodes"] if not node["is_head"] and node["stages"])
    (moved,) = (
        server.http.post("/cluster/drain", json={"node": other}, timeout=600)
        .raise_for_status()
        .json()["moved"]
    )
    moved_s = time.perf_counter()
    for thread in threads:
        thread.join()
    server.http.post("/cluster/readmit", json={"node": other}).raise_for_status()
    ended_s = min(stream.times[-1] for stream in streams)
    gaps = (
        _between(streams, 0.0, drained_s),
        _between(streams, drained_s, moved_s),
        _between(streams, moved_s, ended_s),
    )
    before, during, after = (1e3 * median(each) if each else float("nan") for each in gaps)
    pauses = sorted(
        1e3 * pause
        for pause in _pauses(streams, moved_s, max(_CHANGE_S, moved["seconds"] * (moved["way"] == "after")))
    )
    p95 = pauses[round(0.95 * (len(pauses) - 1))]
    errors = sum(bool(stream.error) for stream in streams)
    print(
        f"{moved['way']:6} {moved['requests']:8d} {moved['seconds']:6.1f} {before:10.1f} {during:7.1f} {after:7.1f}"
        f" {median(pauses):9.1f} {p95:7.1f} {p95 / before:8.2f} {errors:8d}",
        flush=True,
    )


def _pauses(streams: list[Stream], moved_s: float, within_s: float) -> list[float]:
    """Return each stream's pause at the change: the moment, near the end of the move, when all together waited longest."""

    def waits(moment_s: float) -> list[float]:
        pairs = (pair for stream in streams for pair in pairwise(stream.times))
        return [late - early for early, late in pairs if early <= moment_s < late]

    moments = [
        (early + late) / 2
        for stream in streams
        for early, late in pairwise(stream.times)
        if moved_s - within_s <= early <= moved_s
    ]
    return max((waits(moment_s) for moment_s in moments), key=sum, default=[0.0])


def _between(streams: list[Stream], begin_s: float, end_s: float) -> list[float]:
    return [gap for stream in streams for gap in _of(stream, begin_s, end_s)]


def _of(stream: Stream, begin_s: float, end_s: float) -> list[float]:
    return [late - early for early, late in pairwise(stream.times) if begin_s <= late <= end_s]


def _read(server: Server, stream: Stream, number: int, tokens: int, prompt: int) -> None:
    body = {
        "prompt": [100 + (number * 37 + place) % 100 for place in range(prompt)],
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 1,
        "seed": number,
        "stream": True,
    }
    with (
        client_of(server.url) as client,
        client.stream("POST", "/v1/completions", json=body, timeout=600) as answer,
    ):
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                stream.error = event["error"]["message"]
            else:
                stream.times.append(time.perf_counter())


if __name__ == "__main__":
    main()
