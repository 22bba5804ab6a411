"""Compare a cluster plan's predictions with measurements: milliseconds per decode step, by stage and in total.

    python bench/cluster_predictions.py [--rounds 3] [--tokens 32] [--json FILE]

Runs two and then three hosts in network namespaces, each with less memory and CPU time than the one before. Uses
three strategies that split differently. Needs root for control groups. Machines are measured once, when they join and before
anything is loaded; nothing is fitted to later measurements. Predictions are taken from the table that `serve` prints.
CPU time is granted in periods of 10 ms and 100 ms, as in containers. A step that is shorter than a period takes less
time than its share suggests.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import httpx
import psutil

sys.path.append(str(Path(__file__).parents[1]))

from random_model import Shape, make
from tests.end_to_end.lan_cluster import LanCluster, make_cluster
from tests.processes import Server

from mlx_ring.core.environment import quieten_grpc

GIB = 1 << 30
SHAPE = Shape(
    layers=24, hidden=768, intermediate=2304, heads=12, kv_heads=6, vocabulary=32_768, dtype="float32"
)
LIMITS = ((8 * GIB, 0.6), (6 * GIB, 0.4), (4 * GIB, 0.25))
STRATEGIES = ("uniform", "memory", "balanced")
CONTEXT = 256
"""Promised context in tokens; predictions assume half of it."""
_BOUND = 0.3


@dataclass(frozen=True)
class Row:
    """Prediction and measurement of one stage, or of the whole pipeline."""

    period_ms: int
    """Period of the CPU quota."""
    nodes: int
    strategy: str
    part: str
    predicted_ms: float
    measured_ms: float
    """Median of the rounds."""
    rounds: list[float]

    @property
    def ratio(self) -> float:
        return self.predicted_ms / self.measured_ms

    @property
    def holds(self) -> bool:
        return abs(self.ratio - 1) <= _BOUND


def measure(cluster: LanCluster, server: Server, tokens: int) -> tuple[list[float], float]:
    """Return the milliseconds of each stage's decode steps, as the stage timed them, and between tokens."""
    body = {
        "prompt": list(range(100, 100 + CONTEXT // 2 - tokens // 2)),
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 1.0,
        "stream": True,
    }

    def ask() -> list[float]:
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=600) as answer:
            return [time.perf_counter() for line in answer.iter_lines() if line.startswith("data: {")]

    arrivals_s = cluster.head.threads.submit(ask).result()
    times = cluster.get(server, "/cluster/status")["step_times"]
    return [stage["decode_compute_us"] / 1e3 for stage in times], 1e3 * (arrivals_s[-1] - arrivals_s[0]) / (
        tokens - 1
    )


def rows_of(
    cluster: LanCluster, period_ms: int, nodes: int, strategy: str, options: argparse.Namespace
) -> Iterator[Row]:
    joining = [machine for machine in cluster.machines[1:nodes] if not machine.has_joined]
    flags = ("--prefix-cache", "off", "--num-speculative-tokens", "0", "--max-model-len", str(CONTEXT))
    server = cluster.serve(nodes, "--strategy", strategy, *flags, joining=joining)
    rounds = [measure(cluster, server, options.tokens) for _ in range(options.rounds + 1)][1:]
    server.stop()
    parts = [f"{len(stage.layers)} layers" for stage in cluster.planned]
    for place, stage in enumerate(cluster.planned):
        found = [stages[place] for stages, _ in rounds]
        median = statistics.median(found)
        yield Row(period_ms, nodes, strategy, parts[place], stage.token_ms, median, found)
    around = [token for _, token in rounds]
    median = statistics.median(around)
    yield Row(period_ms, nodes, strategy, "token to token", cluster.token_ms, median, around)


def print_row(row: Row) -> None:
    rounds = " ".join(f"{value:.1f}" for value in row.rounds)
    print(
        f"{row.period_ms:6} {row.nodes:5} {row.strategy:9} {row.part:16} {row.predicted_ms:9.1f} {row.measured_ms:8.1f} {row.ratio:6.2f}  "
        f"{'' if row.holds else 'beyond 30 %':12} ({rounds})  load {psutil.getloadavg()[0]:.1f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=32, help="tokens per answer")
    parser.add_argument("--nodes", type=int, nargs="+", choices=(2, 3), default=(2, 3))
    parser.add_argument(
        "--periods-ms", type=int, nargs="+", default=(10, 100), help="periods of the CPU quota"
    )
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=STRATEGIES)
    parser.add_argument(
        "--layers", type=int, default=SHAPE.layers, help="layers of the model; use few to check that it runs"
    )
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args()
    quieten_grpc()
    shape = replace(SHAPE, layers=options.layers)
    model = make(shape)
    print(f"{shape.parameters / 1e6:.0f} M random parameters in float32, machines with {LIMITS}")
    print(
        f"{'period':6} {'nodes':5} {'strategy':9} {'part':16} {'predicted':>9} {'measured':>8} {'ratio':>6}"
    )
    rows: list[Row] = []
    for period_ms in options.periods_ms:
        limits = [(memory, cores, 1000 * period_ms) for memory, cores in LIMITS]
        with tempfile.TemporaryDirectory(prefix="mlx-ring-bench-") as folder, ExitStack() as stack:
            cluster = make_cluster(model, Path(folder), stack, limits)
            for nodes in options.nodes:
                for strategy in options.strategies:
                    for row in rows_of(cluster, period_ms, nodes, strategy, options):
                        print_row(row)
                        rows.append(row)
    print(f"{sum(row.holds for row in rows)} of {len(rows)} within 30 %")
    if options.json:
        options.json.write_text(json.dumps([asdict(row) | {"ratio": row.ratio} for row in rows], indent=1))


if __name__ == "__main__":
    main()
