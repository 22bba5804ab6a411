"""Measure the engine's targets on this machine.

    python bench/engine.py [ROW ...] [--rounds 3] [--quick] [--json FILE]

Rows: loop, server, quantized, streams, prompt, stream, prefix, lookup, latency, tensor, launch. Each row runs its
contestants in turn for several rounds, and prints the median of their ratios and the target. Every worker has its own
core and one BLAS thread. In rows that compare stages, the head, the agent and the load generator share the core of stage 0 in both
configurations. These rows use 872 M parameters of 4 bits and float32 activations. With native kernels, products of some
rows are compute-bound. Those of one row wait for memory, whose bandwidth two cores of a machine may share. So rows with
such a target have many streams, and print what the products alone gain from the second core.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import psutil
from machine import cores
from measuring import Bench, Ratio
from rows import FLOAT, ROWS
from tensor_rows import LARGE


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(ROWS)}; default: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="use small sizes, to check that it runs")
    parser.add_argument("--json", type=Path, help="also write the table to this file")
    arguments = parser.parse_args()
    unknown = set(arguments.rows) - set(ROWS)
    if unknown:
        parser.error(f"unknown row {', '.join(sorted(unknown))}; choose from {', '.join(ROWS)}")
    bench = Bench(arguments.rounds, arguments.quick, cores())
    everywhere = os.sched_getaffinity(0) if bench.cores else set[int]()
    ratios: list[Ratio] = []
    for name in arguments.rows or ROWS:
        print(f"{name}: {(ROWS[name].__doc__ or '').strip()}", file=sys.stderr)
        ratios += ROWS[name](bench)
        if everywhere:
            os.sched_setaffinity(0, everywhere)
    _print(ratios, bench)
    if arguments.json:
        results = [asdict(ratio) | {"median": ratio.median, "met": ratio.met} for ratio in ratios]
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


def _print(ratios: Sequence[Ratio], bench: Bench) -> None:
    print(
        f"\nRandom weights: {FLOAT.parameters / 1e6:.0f} M in float32; for stages and ranks {LARGE.parameters / 1e6:.0f} M "
        f"in 4 bits. {bench.rounds} rounds, cores {list(bench.cores)}, "
        f"load {psutil.getloadavg()[0]:.1f}; medians (all rounds)"
    )
    for ratio in ratios:
        rounds = " ".join(f"{value:.2f}" for value in ratio.rounds)
        verdict = f"target {ratio.target}: {'met' if ratio.met else 'missed'}  ({rounds})"
        print(f"{ratio.what:52}{ratio.median:8.3f}  {verdict if ratio.target else 'limit'}")


if __name__ == "__main__":
    main()
