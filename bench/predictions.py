"""Compare the planner's predictions for this machine with measurements: milliseconds per decode step, by stage.

    python bench/predictions.py [--rounds 3] [--tokens 48] [--weights 4-bit ...] [--json FILE]

Serves a random model whole and in three splits, in float32, 8 bits and 4 bits. Before each run the machine is profiled
with one BLAS thread on the first worker's core; nothing is fitted to the server's measurements. A final profile shows
how steady the machine was.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from machine import cores
from measuring import decode_speed, jobs_of, load, running
from random_model import Shape, make
from rows import decode_means_us, quantized
from servers import RingServer, blas_environment, pin_self

from mlx_ring.host.machine_profile import MachineProfile
from mlx_ring.models.model_folder import read_model_folder
from mlx_ring.planner.model_sizes import profile_folder
from mlx_ring.planner.place import place
from mlx_ring.planner.plan import Plan
from mlx_ring.planner.profiles import ClusterProfile, ModelProfile, measured_node
from mlx_ring.planner.request import Demand, PlanRequest
from mlx_ring.rpc.link_profile import LOCAL

SHAPE = Shape(
    layers=12, hidden=768, intermediate=2304, heads=12, kv_heads=6, vocabulary=32_768, dtype="float32"
)
CUTS = ((12,), (6, 6), (3, 9), (9, 3))
PROMPTS = (64, 1500)
"""Tokens of context; the second value is for the whole model only."""
_FLAGS = ("--prefix-cache", "off", "--num-speculative-tokens", "0")
_BOUND = 0.3
_FEW = 4
"""Tokens of the shorter answer, which is subtracted from the longer one."""
_BITS = {"float32": 0, "8-bit": 8, "4-bit": 4}
"""Bits per weight; 0: not quantized."""


@dataclass(frozen=True)
class Row:
    """Prediction and measurement of one stage, or of the whole pipeline."""

    model: str
    cut: tuple[int, ...]
    context: int
    part: str
    predicted_ms: float
    measured_ms: float
    """Median of the rounds."""
    rounds: list[float]
    processor_ms: float | None
    """CPU time of the worker per step; on a busy machine, closer to the duration without other load."""

    @property
    def ratio(self) -> float:
        return self.predicted_ms / self.measured_ms

    @property
    def holds(self) -> bool:
        return abs(self.ratio - 1) <= _BOUND


def profile_machine(core: int | None) -> MachineProfile:
    """Profile this machine as a worker on the given core does."""
    pin_self(core)
    command = [*blas_environment(), sys.executable, "-m", "mlx_ring.worker.profile"]
    command += ["--blas", "auto", "--blas-threads", "1"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return MachineProfile.from_json(output)


def predict(model: ModelProfile, profile: MachineProfile, cut: Sequence[int], context: int) -> Plan:
    """Plan this split with one machine per stage; a stream's context is half full."""
    nodes = tuple(measured_node(profile, f"stage {stage}") for stage in range(len(cut)))
    request = PlanRequest(Demand(2 * context, 1), strategy="custom", counts=tuple(cut))
    return place(model, ClusterProfile(nodes, usual_link=LOCAL), request)


def measure(
    folder: Path, cut: Sequence[int], prompt: int, rounds: int, tokens: int, pinned: Sequence[int]
) -> Iterator[list[float]]:
    """Measure milliseconds per round: each stage's decode steps as it timed them, between tokens, and CPU time per worker."""
    shared = pinned[0] if pinned else None
    head = shared if len(cut) > 1 else (pinned[1] if len(pinned) > 1 else None)
    pin_self(head)
    with running(lambda: RingServer(folder, *_FLAGS, counts=cut, cores=pinned, head_core=head)) as (server,):
        for number in range(rounds + 1):
            before = server.worker_cpu_s()
            load(server, jobs_of(2 * number, 1, prompt, _FEW, SHAPE.vocabulary), 1, temperature=1.0)
            between = server.worker_cpu_s()
            (record,) = load(
                server, jobs_of(2 * number + 1, 1, prompt, tokens, SHAPE.vocabulary), 1, temperature=1.0
            )
            after = server.worker_cpu_s()
            each = [mean / 1e3 for mean in decode_means_us(server)]
            # Both requests prefill a prompt; the difference is the additional decode steps.
            used = [
                1e3 * (last - 2 * middle + first) / (tokens - _FEW)
                for first, middle, last in zip(before, between, after, strict=True)
            ]
            if number:
                yield [*each, 1e3 / decode_speed(record), *used]


def rows_of(
    name: str, folder: Path, profile: MachineProfile, options: argparse.Namespace, pinned: Sequence[int]
) -> Iterator[Row]:
    model = profile_folder(read_model_folder(folder), name)
    for cut, prompt in [*((cut, PROMPTS[0]) for cut in CUTS), (CUTS[0], PROMPTS[1])]:
        context = prompt + options.tokens // 2
        plan = predict(model, profile, cut, context)
        parts = [f"layers {stage.layers}" for stage in plan.stages]
        predicted = [1e3 * stage.token_s for stage in plan.stages]
        found = list(measure(folder, cut, prompt, options.rounds, options.tokens, pinned))
        columns = [list(column) for column in zip(*found, strict=True)]
        used = [statistics.median(column) for column in columns[len(parts) + 1 :]]
        for part, predicted_ms, rounds, processor in zip(
            [*parts, "token to token"],
            [*predicted, 1e3 * plan.prediction.token_s],
            columns[: len(parts) + 1],
            [*used, None],
            strict=True,
        ):
            row = Row(
                name, tuple(cut), context, part, predicted_ms, statistics.median(rounds), rounds, processor
            )
            print_row(row)
            yield row


def print_row(row: Row) -> None:
    cut = "+".join(map(str, row.cut))
    rounds = " ".join(f"{value:.1f}" for value in row.rounds)
    processor = "" if row.processor_ms is None else f"{row.processor_ms:.2f}"
    print(
        f"{row.model:8} {cut:5} {row.context:7} {row.part:16} {row.predicted_ms:9.2f} {row.measured_ms:8.2f} "
        f"{row.ratio:6.2f} {processor:>9}  {'' if row.holds else 'beyond 30 %':12} ({rounds})",
        flush=True,
    )


def print_profile(when: str, profile: MachineProfile) -> None:
    rates = {rate.weights: rate for rate in profile.rates}
    listed = ", ".join(
        f"{name} {rates[name].bandwidth / 1e9:.2f} GB/s" for name in ("float32", "8-bit", "4-bit")
    )
    costs = profile.costs
    print(
        f"profile {when}: {listed}; {1e9 * rates['float32'].row_s:.0f} ns per row; step {1e3 * costs.step_s:.2f} ms, "
        f"layer {1e3 * costs.layer_s:.2f} ms ({1e3 * costs.quantized_layer_s:.2f} ms quantized), draw {1e3 * costs.draw_s:.2f} ms; load {psutil.getloadavg()[0]:.1f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=48, help="tokens per answer")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--weights", nargs="+", choices=list(_BITS), default=list(_BITS))
    options = parser.parse_args()
    models = {name: quantized(SHAPE, bits) if bits else make(SHAPE) for name, bits in _BITS.items()}
    pinned = cores()
    core = pinned[0] if pinned else None
    print(f"{SHAPE.parameters / 1e6:.0f} M random parameters, cores {pinned}")
    print(
        f"{'weights':8} {'cut':5} {'context':>7} {'part':16} {'predicted':>9} {'measured':>8} {'ratio':>6} {'CPU':>9}"
    )
    rows: list[Row] = []
    for name in options.weights:
        profile = profile_machine(core)
        print_profile(f"before {name}", profile)
        rows += rows_of(name, models[name], profile, options, pinned)
    print_profile("after all", profile_machine(core))
    print(f"{sum(row.holds for row in rows)} of {len(rows)} within 30 %")
    if options.json:
        options.json.write_text(json.dumps([asdict(row) | {"ratio": row.ratio} for row in rows], indent=1))


if __name__ == "__main__":
    main()
