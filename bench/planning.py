"""CPU time of plans for many machines, and of simulations with many running requests.

Each row runs several times. The least and the median of the user CPU seconds of this process are printed, beside the
target. Rows are named on the command line; all run without a name.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.default_settings import make_policy
from tests.planner.clusters import cluster_of, known_sizes, model_of, node_of

from mlx_ring.engine.capacity import CapacityMeter, Question
from mlx_ring.engine.capacity_search import ServiceLevel
from mlx_ring.engine.simulated_load import SimulatedInstance
from mlx_ring.engine.simulated_replicas import replicas_of
from mlx_ring.engine.simulation import Simulation
from mlx_ring.planner.catalogue import known_profile
from mlx_ring.planner.cluster_file import cluster_of as catalogued
from mlx_ring.planner.place import place
from mlx_ring.planner.profiles import ClusterProfile, ModelProfile
from mlx_ring.planner.replicas import place_replicas
from mlx_ring.planner.request import Demand, Lengths, Load, Objective, PlanRequest, SimulatedRequest

_MACHINES, _LAYERS, _STREAMS = 64, 128, 10_000
_USERS = 256
"""Users among whom replicas are shared out."""
_MODEL = model_of(_LAYERS, layer_bytes=60_000_000)
_WIDE = model_of(48, layer_bytes=600_000_000)
"""Model for which several of these machines are needed."""


@dataclass(frozen=True)
class _Row:
    target_s: float
    prepare: Callable[[], Callable[[], object]]
    """Function that prepares a run, outside the measured time."""


def unlike(machines: int, seed: int = 0) -> ClusterProfile:
    """Return machines of random memory and speed, of which no two are alike."""
    numbers = random.Random(seed)
    return cluster_of(
        *(
            node_of(
                f"n{place}",
                numbers.uniform(2, 16),
                gb_s=numbers.uniform(50, 800),
                tflops=numbers.uniform(1, 30),
            )
            for place in range(machines)
        )
    )


def alike(machines: int) -> ClusterProfile:
    """Return machines of one kind."""
    return cluster_of(*(node_of(f"n{place}", 16) for place in range(machines)))


def _known(machines: int) -> ClusterProfile:
    one = known_profile("m3-ultra-512")
    return catalogued(tuple(replace(one, name=f"{one.name}#{number}") for number in range(machines)))


def _plan(cluster: ClusterProfile, *, users: int = 1, objective: Objective = "latency") -> _Row:
    request = PlanRequest(Demand(4096, users), objective=objective, users=users)
    return _Row(2.0, lambda: lambda: place(_MODEL, cluster, request))


def _replicas(model: ModelProfile, cluster: ClusterProfile) -> _Row:
    """Return the row of the best division of the machines into replicas."""
    request = PlanRequest(Demand(1024, _USERS), objective="throughput", users=_USERS)
    return _Row(10.0, lambda: lambda: place_replicas(model, cluster, request, None))


def _simulation(stages: int) -> _Row:
    """Return the row of a simulation in which all streams run at the same time."""

    def prepare() -> Callable[[], object]:
        machines, request = _known(stages), PlanRequest(Demand(2048, 1), strategy="uniform")
        model = known_sizes("llama-8b", machines)
        (replicas,) = replicas_of(model, machines, request, [place(model, machines, request)])
        costs, lengths = replicas.members[0].costs, random.Random(0)
        requests = [
            SimulatedRequest(0.001 * number, lengths.randint(50, 300), lengths.randint(200, 300))
            for number in range(_STREAMS)
        ]
        policy = make_policy(num_speculative_tokens=0, max_num_seqs=_STREAMS)
        return lambda: Simulation([SimulatedInstance(costs, stages)], policy).run(requests)

    return _Row(10.0, prepare)


def _capacity(stages: int) -> _Row:
    """Return the row of the highest rate of an instance in which up to 10,000 requests run at the same time."""

    def prepare() -> Callable[[], object]:
        machines = _known(stages)
        model = known_sizes("llama-8b", machines)
        load = Load(Lengths(128, 128), Lengths(256, 256))
        question = Question(
            load,
            ServiceLevel(first_token_s=60.0, between_tokens_s=None),
            PlanRequest(Demand(2048, 1), strategy="uniform"),
            make_policy(num_speculative_tokens=0),
            max_num_seqs=_STREAMS,
        )
        plan = place(model, machines, question.request)
        loaded = tuple(
            (stage.layers, tuple((rank.node, rank.share) for rank in stage.ranks)) for stage in plan.stages
        )
        return lambda: CapacityMeter(model, question).measure("now", machines, [loaded])

    return _Row(10.0, prepare)


_UNLIKE = unlike(_MACHINES)
_ROWS: Mapping[str, _Row] = {
    "alike": _plan(alike(_MACHINES)),
    "unlike": _plan(_UNLIKE),
    "users": _plan(_UNLIKE, users=8),
    "first-token": _plan(_UNLIKE, objective="first-token"),
    "first-token-users": _plan(_UNLIKE, objective="first-token", users=8),
    "throughput": _plan(_UNLIKE, objective="throughput", users=8),
    "memory": _plan(_UNLIKE, objective="memory"),
    "replicas": _replicas(_MODEL, _UNLIKE),
    "replicas-wide": _replicas(_WIDE, _UNLIKE),
    "replicas-1000": _replicas(_MODEL, alike(1000)),
    "replicas-1000-unlike": _replicas(_MODEL, unlike(1000)),
    "streams": _simulation(1),
    "streams-4": _simulation(4),
    "capacity": _capacity(1),
    "capacity-4": _capacity(4),
}


def _seconds(row: _Row, rounds: int) -> Iterator[float]:
    for _ in range(rounds):
        run = row.prepare()
        gc.collect()
        before = os.times().user
        run()
        yield os.times().user - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="*", help=f"rows to run: {', '.join(_ROWS)}")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    unknown = [name for name in arguments.rows if name not in _ROWS]
    if unknown:
        parser.error(f"There is no row {unknown[0]}; there are {', '.join(_ROWS)}.")
    print(f"{'row':20}{'least, s':>10}{'median, s':>11}{'target, s':>11}")
    for name in arguments.rows or _ROWS:
        row = _ROWS[name]
        seconds = [*_seconds(row, arguments.rounds)]
        print(
            f"{name:20}{min(seconds):10.2f}{statistics.median(seconds):11.2f}{row.target_s:11.1f}", flush=True
        )


if __name__ == "__main__":
    main()
