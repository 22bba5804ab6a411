"""Loads, and the search for the highest rate at which replicas of one kind keep a service level. Pure and deterministic.

The same requests arrive at every rate, only sooner or later, so that rates are compared on the same load.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import islice, pairwise
from typing import Any, Literal, NamedTuple, cast, get_args

import numpy as np

from mlx_ring.core.engine_stats import Policy
from mlx_ring.core.errors import ConfigError
from mlx_ring.core.types import RankId
from mlx_ring.engine.kv_budget import RankKv, sequence_bytes
from mlx_ring.engine.prefill import PROMPTS_TOGETHER
from mlx_ring.engine.simulated_load import Outcome, ServiceLevel, SimulatedRequest, Span
from mlx_ring.engine.simulation import Simulation
from mlx_ring.planner.forecast import StepTable, forecast_plan
from mlx_ring.planner.plan import Plan
from mlx_ring.planner.profiles import ClusterProfile, ModelProfile
from mlx_ring.planner.replicas import alike_plans, likeness
from mlx_ring.planner.request import PlanRequest

MOST_RUNNING = 256
"""Most requests that run at the same time in a replica, if no number is given."""
_FEW, _MANY, _LONE = 100, 600, 10
"""Numbers of measured requests of a run, at least and at most, and of requests that run one after the other."""
_STEPS = 6_000
"""Number of decode steps at which a run has enough requests."""
_LATE_TIMES, _MOST_REQUESTS = 4, 2_000
"""Duration of a run at least, as a multiple of the time to the first token that the level allows; its most requests."""
CLOSE = 1.05
"""Factor between the rates at which the level holds and does not, from which the search ends."""
_MOST_RUNS = 14
_APART = 4
"""Time between lone requests, as a multiple of what one takes."""
_FIRST_TRY, _FIRST_STEP, _LARGEST_STEP = 0.6, 1.4, 4.0
"""Part of the rate without any waiting at which the search begins, and the first and largest factor to a lower rate."""
_QUEUED_SHARE = 0.05
"""Share of a run's requests that may wait: beyond it, the queue grows."""
_FEW_QUEUED = 16

# ---- load

Arrivals = Literal["poisson", "even", "burst"]
ARRIVALS: tuple[Arrivals, ...] = get_args(Arrivals)


class Lengths(NamedTuple):
    """Numbers of tokens from `low` to `high`, all equally likely."""

    low: int
    high: int

    @property
    def mean(self) -> float:
        return (self.low + self.high) / 2

    def draw(self, random: np.random.Generator) -> int:
        """Return one of them."""
        return int(random.integers(self.low, self.high + 1))


class Recorded(NamedTuple):
    """A recorded request."""

    prompt: int
    answer: int
    at_s: float | None = None


def read_recorded(text: str, where: str) -> tuple[Recorded, ...]:
    """Return the requests of a file of CSV or JSON lines.

    Raises:
        ConfigError: a line is no request, or they are not in order of arrival.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    is_json = bool(lines) and lines[0].lstrip().startswith("{")
    entries = map(_json_line, lines) if is_json else csv.DictReader(lines)
    found = [_one_recorded(entry, f"{where}, request {number}") for number, entry in enumerate(entries, 1)]
    if not found:
        raise ConfigError(f"{where} has no requests: give the columns prompt and answer.")
    times = [each.at_s for each in found if each.at_s is not None]
    if len(times) not in (0, len(found)) or any(later < sooner for sooner, later in pairwise(times)):
        raise ConfigError(
            f"{where}: `at` must be the seconds of every request, in order of arrival, or of none."
        )
    return tuple(found)


def _json_line(line: str) -> object:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _one_recorded(entry: object, where: str) -> Recorded:
    try:
        fields = cast("Mapping[str, Any]", entry)
        at = fields.get("at")
        found = Recorded(
            int(fields["prompt"]), int(fields["answer"]), None if at in (None, "") else float(at)
        )
    except (TypeError, KeyError, ValueError, AttributeError):
        raise ConfigError(
            f"{where}: it must have a prompt and an answer, as whole numbers of tokens."
        ) from None
    if min(found.prompt, found.answer) < 1:
        raise ConfigError(
            f"{where}: prompt {found.prompt} and answer {found.answer} must be 1 token or more."
        )
    return found


@dataclass(frozen=True)
class Load:
    """Requests and how they arrive."""

    prompt: Lengths
    answer: Lengths
    arrivals: Arrivals = "poisson"
    burst: int = 8
    """Number of requests that arrive at once, with bursts."""
    prefix_hits: float = 0.0
    """Share of each prompt that the prefix cache supplies."""
    recorded: tuple[Recorded, ...] = ()
    """Requests that are repeated in their order, in place of the lengths; with times, they arrive as recorded."""
    seed: int = 0

    @property
    def mean_prompt(self) -> float:
        return self._mean([each.prompt for each in self.recorded], self.prompt)

    @property
    def mean_answer(self) -> float:
        return self._mean([each.answer for each in self.recorded], self.answer)

    @staticmethod
    def _mean(recorded: Sequence[int], lengths: Lengths) -> float:
        return sum(recorded) / len(recorded) if recorded else lengths.mean

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and answer together."""
        if not self.recorded:
            return self.prompt.high + self.answer.high
        return max(each.prompt + each.answer for each in self.recorded)

    def requests(self, count: int, rate: float) -> list[SimulatedRequest]:
        """Return requests in order of arrival.

        Args:
            count: number of requests.
            rate: requests per second on average.
        """
        return [each._replace(at_s=each.at_s / rate) for each in islice(self.at_one_per_second(), count)]

    def at_one_per_second(self) -> Iterator[SimulatedRequest]:
        """Yield the requests without end, one per second on average."""
        random, moments = np.random.default_rng(self.seed), self._moments()
        for number, at_s in enumerate(moments):
            if self.recorded:
                prompt, answer, _ = self.recorded[number % len(self.recorded)]
            else:
                prompt, answer = self.prompt.draw(random), self.answer.draw(random)
            cached = min(prompt - 1, int(self.prefix_hits * prompt))
            yield SimulatedRequest(at_s, prompt, answer, cached)

    def _moments(self) -> Iterator[float]:
        """Yield the times of arrival for one request per second."""
        random, at = np.random.default_rng(self.seed + 1), 0.0
        recorded = [each.at_s for each in self.recorded if each.at_s is not None]
        if recorded:
            # The pause between two rounds is a mean one.
            pause = (recorded[-1] - recorded[0]) / max(1, len(recorded) - 1) or 1.0
            each = [later - sooner for sooner, later in pairwise(recorded)]
            while True:
                for gap in (pause, *each):
                    at += gap / pause
                    yield at
        while True:
            if self.arrivals == "burst":
                at += float(random.exponential()) * self.burst
                yield from (at for _ in range(self.burst))
            else:
                at += 1.0 if self.arrivals == "even" else float(random.exponential())
                yield at


# ---- replicas


@dataclass(frozen=True)
class Replicas:
    """Replicas of the same kind."""

    plan: Plan
    costs: StepTable
    kv: Mapping[RankId, RankKv]
    names: tuple[tuple[tuple[str, ...], ...], ...]
    """Machines of each stage, for each replica."""
    kind: object
    """Value that replicas have in common whose steps take as long."""

    @property
    def stages(self) -> int:
        return len(self.plan.stages)

    @property
    def count(self) -> int:
        return len(self.names)

    def room(self, tokens: int) -> int:
        """Return the number of requests of `tokens` tokens whose KV fits at the same time."""
        return min(
            (rank.limit_bytes // max(1, sequence_bytes(rank, tokens)) for rank in self.kv.values()),
            default=MOST_RUNNING,
        )


def replicas_of(
    model: ModelProfile, cluster: ClusterProfile, request: PlanRequest, plans: Sequence[Plan]
) -> list[Replicas]:
    """Return the replicas of these plans by kind: with the same layers on alike machines and links."""
    return [_replicas(model, cluster, request, members) for members in alike_plans(cluster, plans)]


def _replicas(
    model: ModelProfile, cluster: ClusterProfile, request: PlanRequest, plans: Sequence[Plan]
) -> Replicas:
    forecast, rooms = forecast_plan(model, cluster, request.demand, plans[0])
    kv = {
        RankId(stage, place): RankKv(*room)
        for stage, ranks in enumerate(rooms)
        for place, room in enumerate(ranks)
    }
    head = cluster.nodes[0].name
    machines = [rank.node for stage in plans[0].stages for rank in stage.ranks]
    head_s = max(cluster.link(head, name).round_trip_s / 2 for name in machines)
    names = tuple(tuple(tuple(rank.node for rank in stage.ranks) for stage in plan.stages) for plan in plans)
    kind = likeness(cluster, plans[0]), head_s
    return Replicas(plans[0], StepTable(forecast, head_s), kv, names, kind)


# ---- the highest rate


class _Drawn:
    """Requests of a load, each drawn once for all rates."""

    def __init__(self, load: Load) -> None:
        self._made: list[SimulatedRequest] = []
        self._more = load.at_one_per_second()

    def requests(self, count: int, rate: float) -> list[SimulatedRequest]:
        """Return the first requests of the load, `rate` of them per second on average."""
        self._made += islice(self._more, max(0, count - len(self._made)))
        return [
            SimulatedRequest(at_s / rate, prompt, answer, cached)
            for at_s, prompt, answer, cached in self._made[:count]
        ]


@lru_cache(maxsize=1)
def _drawn(load: Load) -> _Drawn:
    return _Drawn(load)


@dataclass(frozen=True)
class Found:
    """Highest rate of one replica at which the level holds."""

    rate: float
    """Requests per second; 0 if it does not hold for requests one after the other."""
    outcome: Outcome
    """Run at that rate."""
    beyond: Outcome | None
    """Run at a little higher rate, at which the level does not hold."""
    policy: Policy


@dataclass(frozen=True)
class Search:
    """Runs of one kind of replica."""

    replicas: Replicas
    load: Load
    level: ServiceLevel
    policy: Policy

    def run(self, rate: float) -> Outcome:
        """Return what is measured at a rate, in requests per second, after as many requests as fill the instance."""
        measured = self._count(rate)
        skipped = measured // 4 + math.ceil(2 * self._streams(rate))
        count = measured + skipped
        queued = max(_FEW_QUEUED, 2 * self.load.burst, int(_QUEUED_SHARE * count))
        return self._simulation(queued, self.level.is_lost(measured, self.load.mean_answer)).run(
            _drawn(self.load).requests(count, rate), skipped=skipped, drains=False
        )

    def alone(self) -> Outcome:
        """Return what is measured of requests that come one after the other."""
        apart_s = _APART * self._request_s(1)
        requests = self.load.requests(_LONE, 1.0)
        spread = [request._replace(at_s=number * apart_s) for number, request in enumerate(requests)]
        return self._simulation(None, lambda _: False).run(spread)

    def _simulation(self, queued: int | None, is_over: Callable[[Outcome], bool]) -> Simulation:
        costs, stages, kv = self.replicas.costs, self.replicas.stages, self.replicas.kv
        return Simulation(costs, stages, self.policy, kv=kv, most_waiting=queued, is_over=is_over)

    def _request_s(self, rows: int) -> float:
        """Return the seconds that a request takes of all stages and links, in steps of so many rows."""
        return sum(self._occupied_s(rows, 1))

    def _occupied_s(self, rows: int, prompts: int) -> Iterator[float]:
        """Yield the seconds that a request takes of each stage and link, in steps of so many rows or prompts."""
        costs, load = self.replicas.costs, self.load
        answer, prompt = load.mean_answer, load.mean_prompt
        cached = int(prompt * load.prefix_hits)
        computed = max(1, int(prompt) - cached)
        for stage in range(self.replicas.stages):
            decode_s = costs.decode_s(stage, rows, prompt + answer / 2) / rows
            yield answer * decode_s + costs.chunk_s(stage, [Span(cached, computed)] * prompts) / prompts
            if stage < self.replicas.stages - 1:
                yield costs.hop_s(stage, int(computed + answer))[1]

    @cached_property
    def most(self) -> float:
        """Requests per second that the busiest stage or link can take, in steps as full as they may be."""
        return 1 / min(self._busiest_s.values())

    @cached_property
    def _busiest_s(self) -> dict[int, float]:
        """Seconds that a request takes of the busiest stage or link, by the rows of a step, fewest first."""
        cached = int(self.load.mean_prompt * self.load.prefix_hits)
        computed = max(1, int(self.load.mean_prompt) - cached)
        prompts = max(1, PROMPTS_TOGETHER * self.policy.prefill_chunk // computed)
        rows = max(1, -(-self.policy.max_num_seqs // self.replicas.stages))
        fuller = sorted({rows >> shift or 1 for shift in range(rows.bit_length())})
        return {count: max(self._occupied_s(count, prompts)) for count in fuller}

    def at(self, rate: float) -> Found:
        """Return what is measured at a rate."""
        outcome = self.run(rate)
        return Found(rate, outcome, outcome, self.policy)

    def _streams(self, rate: float) -> float:
        """Return about as many requests as come at a rate until their number no longer rises."""
        rows = max(1, self.policy.max_num_seqs // self.replicas.stages)
        most = min(float(self.policy.max_num_seqs), rate * self._request_s(rows) * rows)
        if most <= MOST_RUNNING or rate >= self.most:
            return most
        # Steps just as full as serves them; near the highest rate, it takes much longer until they are.
        rows = next(rows for rows, busiest_s in self._busiest_s.items() if rate * busiest_s <= 1)
        return min(most, max(MOST_RUNNING, rows * self.replicas.stages / (1 - rate / self.most)))

    def _count(self, rate: float) -> int:
        """Return the number of requests to measure at about a rate."""
        streams = min(float(self.policy.max_num_seqs), rate * self._request_s(1))
        few = min(_MANY, max(_FEW, _STEPS * streams / self.load.mean_answer))
        return round(max(few, min(_MOST_REQUESTS, _LATE_TIMES * rate * (self.level.first_token_s or 0.0))))

    def highest(self, known: Found | None = None) -> Found:
        """Return the highest rate at which the level holds, to within 5 %; `known` is a rate at which it does."""
        low, high, step = 0.0, self.most, _FIRST_STEP
        if known is None:
            alone = self.alone()
            found = Found(0.0, alone, None, self.policy)
            if self.level.broken(alone):
                return replace(found, beyond=alone)
            rate = _FIRST_TRY * high
        else:
            found, low = known, known.rate
            rate = math.sqrt(low * min(high, low * step))
        for _ in range(_MOST_RUNS):
            if low and high < low * CLOSE:
                break
            outcome = self.run(rate)
            if self.level.holds(outcome):
                low, found = rate, replace(found, rate=rate, outcome=outcome)
            else:
                high, found = rate, replace(found, beyond=outcome)
            if low:
                rate = math.sqrt(low * min(high, low * step * step))
            else:
                # Ever larger steps down, until the level holds.
                step = min(step * step, _LARGEST_STEP)
                rate = high / step
        return found


def fitting_policy(search: Search, most_running: int | None) -> Policy:
    """Return the policy with a number of running requests: the given one, or as many as keep the time between tokens."""
    if most_running is not None:
        return replace(search.policy, max_num_seqs=most_running)
    replicas, load, limit_s = search.replicas, search.load, search.level.between_tokens_s
    context = load.mean_prompt + load.mean_answer / 2
    most = max(1, min(MOST_RUNNING, replicas.room(round(load.mean_prompt + load.mean_answer))))

    def keeps(rows: int) -> bool:
        stages = range(replicas.stages)
        each = [replicas.costs.decode_s(stage, rows, context) for stage in stages]
        hops = [sum(replicas.costs.hop_s(stage, rows)) for stage in stages[:-1]]
        round_s = sum(each) + sum(hops)
        return limit_s is None or max(round_s, replicas.stages * max(each)) <= limit_s

    rows = max((rows for rows in range(1, most // replicas.stages + 1) if keeps(rows)), default=1)
    return replace(search.policy, max_num_seqs=min(most, rows * replicas.stages))
