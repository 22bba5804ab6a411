"""Compare stock mlx-lm, one mlx-ring worker and two stages on this machine.

    python bench/compare.py [--repeats 3] [--prompt-tokens 128] [--new-tokens 32] [--json FILE]

All answer the same prompts on the same random-weight model, in turn, so that other load affects all of them
equally. Each worker has one BLAS thread and, where the system supports pinning, its own core. Ratios are medians
over the rounds, except for the fastest eight tokens, which compares the best of all rounds. Absolute numbers
depend on the machine's load. mlx-lm is measured inside its process, mlx-ring over HTTP.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from contestants import Contestant, Ring, Speed, Stock
from machine import cores, read_bandwidth
from random_model import BYTES, Shape, add_shape_arguments, make, shape_of

_WARM_UP = 8
_KINDS: dict[str, tuple[Callable[[Path, list[int]], Contestant], int | None]] = {
    "float32": (partial(Stock, dtype="float32"), 4),
    "stored": (partial(Stock, dtype="stored"), None),
    "one": (partial(Ring, stages=1), 4),
    "two": (partial(Ring, stages=2), 4),
}
"""Contestant, and bytes that it reads per weight; None: as stored in the file."""


@dataclass(frozen=True)
class Target:
    """Minimum `ratio` of `better` to `base`, in the given `speed`."""

    better: str
    base: str
    speed: str
    ratio: float


_TARGETS = [
    Target("one", "float32", "prefill", 10.0),
    Target("one", "float32", "decode", 2.0),
    Target("one", "stored", "prefill", 10.0),
    Target("one", "stored", "decode", 2.0),
    Target("two", "one", "prefill", 0.0),
    Target("two", "one", "decode", 0.95),
    Target("two", "one", "decode_fastest", 0.95),
]


@dataclass
class Entry:
    """Contestant and its measurements."""

    contestant: Contestant
    weight_bytes: int
    speeds: list[Speed] = field(default_factory=list[Speed])

    def median(self, speed: str) -> float:
        return statistics.median(getattr(measured, speed) for measured in self.speeds)


def main() -> None:
    arguments = _parse_arguments()
    shape = shape_of(arguments)
    folder = make(shape, tokenizer=arguments.tokenizer)
    pinned = cores()
    bandwidth = read_bandwidth(pinned[0] if pinned else None)
    entries: dict[str, Entry] = {}
    try:
        for kind in arguments.contestants:
            entries[kind] = _start(kind, shape, folder, pinned)
        _measure(entries, arguments, shape.vocabulary)
    finally:
        for entry in entries.values():
            entry.contestant.stop()
    bandwidth = max(bandwidth, read_bandwidth(pinned[0] if pinned else None))
    report = _report(entries, shape, bandwidth, arguments)
    _print_report(report)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--contestants", nargs="+", choices=list(_KINDS), default=list(_KINDS))
    parser.add_argument("--json", type=Path, help="also write the report to this file")
    add_shape_arguments(parser)
    return parser.parse_args()


def _start(kind: str, shape: Shape, folder: Path, pinned: list[int]) -> Entry:
    start, weight_bytes = _KINDS[kind]
    print(f"starting {kind}", file=sys.stderr)
    return Entry(start(folder, pinned), weight_bytes or BYTES[shape.dtype])


def _measure(entries: dict[str, Entry], arguments: argparse.Namespace, vocabulary: int) -> None:
    for entry in entries.values():
        entry.contestant.run(list(range(_WARM_UP)), _WARM_UP)
    generator = random.Random(0)
    for number in range(arguments.repeats):
        # A new prompt each round, so that no prompt is in the prefix cache.
        prompt = [generator.randrange(vocabulary) for _ in range(arguments.prompt_tokens)]
        for entry in entries.values():
            print(f"round {number + 1} of {arguments.repeats}: {entry.contestant.name}", file=sys.stderr)
            entry.speeds.append(entry.contestant.run(prompt, arguments.new_tokens))


def _report(
    entries: dict[str, Entry], shape: Shape, bandwidth: float, arguments: argparse.Namespace
) -> dict[str, Any]:
    return {
        "model": asdict(shape) | {"parameters": shape.parameters},
        "prompt_tokens": arguments.prompt_tokens,
        "new_tokens": arguments.new_tokens,
        "read_bandwidth_bytes_per_s": bandwidth,
        "contestants": {kind: _row(entry, shape, bandwidth, arguments) for kind, entry in entries.items()},
        "ratios": [
            asdict(target) | {"measured": _ratio(entries[target.better], entries[target.base], target.speed)}
            for target in _TARGETS
            if target.better in entries and target.base in entries
        ],
    }


def _row(entry: Entry, shape: Shape, bandwidth: float, arguments: argparse.Namespace) -> dict[str, Any]:
    context = arguments.prompt_tokens + arguments.new_tokens / 2
    kv_numbers = shape.layers * 2 * shape.kv_heads * shape.head_dim * context
    bytes_per_token = (shape.parameters + kv_numbers) * entry.weight_bytes
    limit = bandwidth / bytes_per_token
    return {
        "name": entry.contestant.name,
        "load_s": entry.contestant.load_s,
        "prefill_tokens_per_s": entry.median("prefill"),
        "decode_tokens_per_s": entry.median("decode"),
        "decode_fastest_tokens_per_s": max(speed.decode_fastest for speed in entry.speeds),
        "bytes_per_token": bytes_per_token,
        "decode_limit_tokens_per_s": limit,
        "decode_of_limit": entry.median("decode") / limit,
        "rounds": [asdict(speed) for speed in entry.speeds],
    }


def _ratio(better: Entry, base: Entry, speed: str) -> float:
    if speed == "decode_fastest":
        ours, theirs = (max(each.decode_fastest for each in entry.speeds) for entry in (better, base))
        return ours / theirs
    pairs = zip(better.speeds, base.speeds, strict=True)
    return statistics.median(getattr(ours, speed) / getattr(theirs, speed) for ours, theirs in pairs)


def _print_report(report: dict[str, Any]) -> None:
    millions = report["model"]["parameters"] / 1e6
    print(
        f"\nQwen3, {millions:.0f} M random parameters stored as {report['model']['dtype']}; prompt"
        f" {report['prompt_tokens']} tokens, answer {report['new_tokens']}; one thread reads"
        f" {report['read_bandwidth_bytes_per_s'] / 1e9:.1f} GB/s\n"
    )
    print(
        f"{'':24}{'load s':>9}{'prefill tok/s':>15}{'decode tok/s':>14}{'fastest 8':>11}{'of bandwidth limit':>24}"
    )
    for row in report["contestants"].values():
        print(
            f"{row['name']:24}{row['load_s']:9.2f}{row['prefill_tokens_per_s']:15.1f}"
            f"{row['decode_tokens_per_s']:14.2f}{row['decode_fastest_tokens_per_s']:11.2f}{row['decode_of_limit']:16.0%} of {row['decode_limit_tokens_per_s']:.1f}"
        )
    print()
    names = {kind: row["name"] for kind, row in report["contestants"].items()}
    for ratio in report["ratios"]:
        target = ""
        if ratio["ratio"]:
            target = (
                f"  target {ratio['ratio']:g}: {'met' if ratio['measured'] >= ratio['ratio'] else 'missed'}"
            )
        pair = f"{names[ratio['better']]} / {names[ratio['base']]}"
        print(f"{pair:48}{ratio['speed'].replace('_', ' '):>15}{ratio['measured']:8.2f}x{target}")


if __name__ == "__main__":
    main()
