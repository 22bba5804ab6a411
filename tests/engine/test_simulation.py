"""Simulation with counted rows, beside the engine's scheduler step by step, and what it measures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from tests.engine.step_simulation import Simulation as StepSimulation
from tests.engine.step_simulation import Times
from tests.planner.costs import LinearCost

from mlx_ring.core.engine_stats import Policy
from mlx_ring.core.generation import GenerateRequest
from mlx_ring.core.types import RankId, SamplingParams
from mlx_ring.engine.kv_budget import RankKv
from mlx_ring.engine.scheduler import Scheduler
from mlx_ring.engine.sequence import Advance, Limits, make_sequence
from mlx_ring.engine.simulated_load import SimulatedRequest, Span
from mlx_ring.rpc.protos import step_pb2

LIMITS = Limits(context_length=1 << 20, vocab_size=1000, eos=frozenset())


@dataclass(frozen=True)
class Costs:
    """The same linear costs on every stage, with constant hops."""

    linear: tuple[LinearCost, ...]
    hop: float
    head: float

    def decode_s(self, stage: int, rows: int, context_tokens: float) -> float:
        cost = self.linear[stage]
        each = cost.per_row_s + cost.per_token_s + cost.per_context_s * context_tokens
        return cost.per_step_s + rows * each

    def chunk_s(self, stage: int, spans: Sequence[Span]) -> float:
        cost = self.linear[stage]
        return cost.per_step_s + sum(
            cost.per_row_s
            + cost.per_token_s * tokens
            + cost.per_context_s * (tokens * start + tokens * (tokens - 1) / 2)
            for start, tokens in spans
        )

    def hop_s(self, stage: int, tokens: int) -> tuple[float, float]:
        return self.hop, 0.0

    def back_s(self, rows: int) -> float:
        return self.hop

    def head_s(self) -> float:
        return self.head


def by_steps(
    costs: Costs, policy: Policy, requests: Sequence[SimulatedRequest], kv: dict[RankId, RankKv] | None
) -> tuple[dict[int, list[float]], int]:
    """Return the times of each request's tokens on the engine's own scheduler, and its preemptions."""
    stages = len(costs.linear)
    ranks = [RankId(stage, 0) for stage in range(stages)]
    scheduler = Scheduler(ranks, instance="demo", epoch=1, policy=policy, kv=kv)

    def stage_s(stage: int, step: step_pb2.Step) -> float:
        return costs.linear[stage](step)

    def arrival(number: int, request: SimulatedRequest) -> Callable[[float], None]:
        tokens = tuple(Random(number).randrange(1000) for _ in range(request.prompt_tokens))
        made = GenerateRequest(str(number), tokens, SamplingParams(max_tokens=request.answer_tokens))

        def arrive(now: float) -> None:
            scheduler.add(make_sequence(number, made, LIMITS, now))

        return arrive

    def taken(advances: list[Advance]) -> list[tuple[int, int]]:
        return [(advance.sequence.id, len(advance.tokens)) for advance in advances]

    simulation = StepSimulation(scheduler, Times(stage_s, costs.hop, costs.head), stages, taken=taken)
    outcome = simulation.run([(request.at_s, arrival(n, request)) for n, request in enumerate(requests, 1)])
    times = {number: list(each.tokens_s) for number, each in outcome.sequences.items()}
    return times, scheduler.stats().num_preemptions


def gaps_of(times: dict[int, list[float]]) -> list[float]:
    return sorted(b - a for each in times.values() for a, b in zip(each, each[1:], strict=False))
