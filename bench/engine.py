"""What the engine promises, measured side by side on this machine.

    python bench/engine.py [ROW ...] [--rounds 3] [--quick] [--json FILE]

Rows: loop, server, streams, prompt, stream, prefix, lookup, latency, tensor, launch. Each runs its contestants in turn, several rounds, and
prints the medians of their ratios beside the target. Every worker has a core of its own and one BLAS thread. In the rows that
compare stages, head, agent and load generator share the core of stage 0, in both arms alike, and weights have 4 bits with
float32 activations, so that computation binds and not the memory, of which two cores have no more than one.
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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(ROWS)}; all otherwise")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--quick", action="store_true", help="small sizes: shows that it runs, measures little"
    )
    parser.add_argument("--json", type=Path, help="write the table to this file too")
    arguments = parser.parse_args()
    unknown = set(arguments.rows) - set(ROWS)
    if unknown:
        parser.error(f"there is no row {', '.join(sorted(unknown))}; rows are {', '.join(ROWS)}")
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
        told = [asdict(ratio) | {"median": ratio.median, "met": ratio.met} for ratio in ratios]
        arguments.json.write_text(json.dumps(told, indent=1) + "\n")


def _print(ratios: Sequence[Ratio], bench: Bench) -> None:
    print(
        f"\n{FLOAT.parameters / 1e6:.0f} M random parameters, {bench.rounds} rounds, cores {list(bench.cores)}, "
        f"load {psutil.getloadavg()[0]:.1f}; medians, and the rounds they are of"
    )
    for ratio in ratios:
        rounds = " ".join(f"{value:.2f}" for value in ratio.rounds)
        print(
            f"{ratio.what:52}{ratio.median:8.3f}  target {ratio.target}: "
            f"{'met' if ratio.met else 'missed'}  ({rounds})"
        )


if __name__ == "__main__":
    main()
