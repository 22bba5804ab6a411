"""What the plan of a cluster says beside what the cluster then takes: milliseconds of a decode step, by stage and around.

    python bench/cluster_predictions.py [--rounds 3] [--tokens 32] [--json FILE]

Hosts of network namespaces with less memory and less of the processors each (control groups; root), two and then three of them, and
three strategies, which cut differently. Machines are measured once, when they join, before anything is loaded; nothing is fitted to
what they do then. What is foretold is the table that `serve` prints. A core that is granted in part is granted in periods,
of ten milliseconds and of a hundred, as containers have it: a step that is short beside them takes less than its part says.
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
"""Tokens that are promised; half of them are counted to be behind a token."""
_BOUND = 0.3


@dataclass(frozen=True)
class Row:
    """One stage, or the whole way around."""

    period_ms: int
    """In which processors' time is granted."""
    nodes: int
    strategy: str
    part: str
    predicted_ms: float
    measured_ms: float
    """The median of the rounds."""
    rounds: list[float]

    @property
    def ratio(self) -> float:
        return self.predicted_ms / self.measured_ms

    @property
    def holds(self) -> bool:
        return abs(self.ratio - 1) <= _BOUND


def measure(cluster: LanCluster, server: Server, tokens: int) -> tuple[list[float], float]:
    """Milliseconds of each stage's decode steps, as it timed them, and from token to token."""
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

    came = cluster.head.threads.submit(ask).result()
    times = cluster.get(server, "/cluster/status")["step_times"]
    return [stage["decode_compute_us"] / 1e3 for stage in times], 1e3 * (came[-1] - came[0]) / (tokens - 1)


def rows_of(
    cluster: LanCluster, period_ms: int, nodes: int, strategy: str, options: argparse.Namespace
) -> Iterator[Row]:
    joining = [machine for machine in cluster.machines[1:nodes] if not machine.has_joined]
    flags = ("--prefix-cache", "off", "--draft-tokens", "0", "--max-model-len", str(CONTEXT))
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
        f"{row.period_ms:6} {row.nodes:5} {row.strategy:9} {row.part:16} {row.predicted_ms:8.1f} {row.measured_ms:8.1f} {row.ratio:6.2f}  "
        f"{'' if row.holds else 'beyond 30 %':12} ({rounds})  load {psutil.getloadavg()[0]:.1f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=32, help="of each answer")
    parser.add_argument("--nodes", type=int, nargs="+", choices=(2, 3), default=(2, 3))
    parser.add_argument(
        "--periods-ms", type=int, nargs="+", default=(10, 100), help="in which processors' time is granted"
    )
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=STRATEGIES)
    parser.add_argument(
        "--layers", type=int, default=SHAPE.layers, help="of the model; fewer show that it runs"
    )
    parser.add_argument("--json", type=Path, help="write the rows to this file too")
    options = parser.parse_args()
    quieten_grpc()
    shape = replace(SHAPE, layers=options.layers)
    model = make(shape)
    print(f"{shape.parameters / 1e6:.0f} M random parameters in float32, machines with {LIMITS}")
    print(f"{'period':6} {'nodes':5} {'strategy':9} {'part':16} {'foretold':>8} {'measured':>8} {'ratio':>6}")
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
