"""Search for the highest rate at which replicas keep a service level. Pure and deterministic.

The same requests arrive at every rate, only sooner or later, so that rates are compared on the same load.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from mlx_ring.core.engine_stats import Policy
from mlx_ring.engine.prefill import PROMPTS_TOGETHER
from mlx_ring.engine.shared_stages import SharedMachines
from mlx_ring.engine.simulated_load import Outcome, SimulatedInstance, Span
from mlx_ring.engine.simulated_replicas import MOST_RUNNING, Replica, Replicas
from mlx_ring.engine.simulation import Simulation
from mlx_ring.planner.request import Load, SimulatedRequest

_FEW, _MANY, _LONE = 100, 600, 10
"""Numbers of measured requests of a run, at least and at most, and of requests that run one after the other."""
_STEPS = 6_000
"""Number of decode steps at which a run has enough requests."""
_LATE_TIMES, _MOST_REQUESTS = 4, 2_000
"""Duration of a run at least, as a multiple of the time to the first token that the level allows; its most requests."""
_CONFIRMING, _CONFIRMING_STEPS = (500, 1_000), 24_000
"""Numbers of measured requests that confirm a rate, at least and at most, and of decode steps at which they suffice."""
_STEPS_OF_COUNT = 2
"""Numbers of measured requests from one to its double, so that runs at near rates have the same requests."""
_CONFIRMED_WITHIN, _NEAR_LIMIT = 1.03, 0.97
"""Factor from a rate that keeps the level to one that does not, and part of the level's times, at which the search ends."""
_SLOPE = 1.3
"""Power of the rate with which times grow, if two rates do not tell."""
_CONFIRMING_RUNS, _CLOSEST, _FARTHEST = 5, 1.01, 1.3
"""Most runs of many requests once one has kept the level, and the least and the largest factor from rate to rate."""
_SKIPPED = 50
"""Most requests before the measured ones, beside those that fill the instance."""
CLOSE, _ROUGHLY = 1.05, 1.2
"""Factors by which a rate must be better than another one, and from rate to rate at which the search with few ends."""
_MOST_RUNS = 14
_APART, _SELDOM = 4, 0.01
"""Time between lone requests, as a multiple of what one takes, and rate of rare bursts, as a part of one request's."""
_FIRST_TRY, _FIRST_STEP, _LARGEST_STEP = 0.6, 1.4, 4.0
"""Part of the rate without any waiting at which the search begins, and the first and largest factor to a lower rate."""
_QUEUED_SHARE = 0.05
"""Share of a run's requests that may wait: beyond it, the queue grows."""
_FEW_QUEUED = 16
_QUEUES_BY_CHANCE, _LEAST_LEFT = 0.05, 0.25
"""Chance of a longer queue of bursts in a run whose rate can be served, and least part of the capacity that is left."""
_QUEUED_TIMES = 2
"""Time to a first token, as a multiple of the longest one of a lone request, from which a prompt surely queued."""
_BEYOND = 1.5
"""Rate of a run whose requests queue up without end, as a multiple of the rate without any waiting."""

# ---- the service level

_SOONER = 1.1
"""Factor by which a run may have more tokens than its requests on average."""


@dataclass(frozen=True, slots=True)
class ServiceLevel:
    """Times within which a percentage of first tokens, and of further tokens, must come."""

    first_token_s: float | None = None
    between_tokens_s: float | None = None
    percent: float = 95.0

    def holds(self, outcome: Outcome) -> bool:
        """Return True if a run kept it, and requests did not queue up."""
        return not outcome.is_overrun and not self.broken(outcome)

    def excess(self, outcome: Outcome) -> float:
        """Return the times within which the percentage came, as a multiple of those that are allowed: the larger one.

        Infinite if requests queued up.
        """
        limits = (self.first_token_s, self.between_tokens_s)
        found = (outcome.first_token_within(self.percent), outcome.between_tokens_within(self.percent))
        times = (time / limit for time, limit in zip(found, limits, strict=True) if limit is not None)
        return math.inf if outcome.is_overrun else max(times, default=0.0)

    def broken(self, outcome: Outcome) -> str:
        """Return the kind of times that took too long, "first token" or "between tokens"; empty if none did."""
        if self.first_token_s is not None and self._late(
            self.first_token_s, [(wait, 1) for wait in outcome.first_token_s]
        ):
            return "first token"
        if self.between_tokens_s is not None and self._late(self.between_tokens_s, outcome.gaps):
            return "between tokens"
        return ""

    def _late(self, limit_s: float, times: Sequence[tuple[float, int]]) -> bool:
        total = sum(number for _, number in times)
        late = sum(number for seconds, number in times if seconds > limit_s)
        return late > self._allowed(total)

    def is_lost(self, measured: int, answer_tokens: float) -> Callable[[Outcome], bool]:
        """Return a function that tells early that a run cannot keep the level.

        Args:
            measured: number of measured requests.
            answer_tokens: mean length of their answers.
        """
        allowed = [
            self._allowed(measured),
            self._allowed(int(_SOONER * measured * max(0.0, answer_tokens - 1))),
        ]
        limits = (self.first_token_s, self.between_tokens_s)
        seen, late = [0, 0], [0, 0]

        def is_lost(outcome: Outcome) -> bool:
            first, between = (math.inf if limit is None else limit for limit in limits)
            late[0] += sum(wait > first for wait in outcome.first_token_s[seen[0] :])
            late[1] += sum(streams for gap_s, streams in outcome.gaps[seen[1] :] if gap_s > between)
            seen[:] = len(outcome.first_token_s), len(outcome.gaps)
            return late[0] > allowed[0] or late[1] > allowed[1]

        return is_lost

    def _allowed(self, total: int) -> int:
        """Return the number of times that may be too long; the percentile is that of the nearest rank."""
        return total - math.ceil(self.percent / 100 * total)


# ---- the highest rate


@lru_cache(maxsize=8)
def _typical(load: Load, count: int) -> list[SimulatedRequest]:
    return load.typical(count)


def _requests(load: Load, count: int, skipped: int, rate: float) -> list[SimulatedRequest]:
    """Return `count` typical requests that come at a rate, after the last `skipped` ones of those, as if they went around."""
    if load.recorded:
        return load.requests(skipped + count, rate)
    around = _typical(load, count)
    rounds = -(-skipped // count)
    return [
        around[place % count]._replace(
            at_s=(around[place % count].at_s + (place // count + rounds) * count) / rate
        )
        for place in range(-skipped, count)
    ]


def _rounded(count: int) -> int:
    """Return the next larger one of few numbers of requests."""
    return round(_FEW * 2 ** (math.ceil(_STEPS_OF_COUNT * math.log2(count / _FEW) - 1e-9) / _STEPS_OF_COUNT))


def _never(_: Outcome) -> bool:
    return False


def _between(low: tuple[float, float] | None, high: tuple[float, float] | None) -> float:
    """Return a rate at which times probably are those of the level.

    `low` and `high` are rates below and above it, each with its times as a multiple of the level's.
    """
    if low is None or high is None:
        rate, excess = low or high or (0.0, 1.0)
        factor = min(_FARTHEST, max(1 / _FARTHEST, excess ** (1 / _SLOPE)))
        return rate / (_CLOSEST * factor) if low is None else rate * max(_CLOSEST, 1 / factor)
    if not (low[1] > 0 and high[1] < math.inf):
        return math.sqrt(low[0] * high[0])
    part = -math.log(low[1]) / math.log(high[1] / low[1])
    rate = low[0] * (high[0] / low[0]) ** part / _CLOSEST
    return min(high[0] / _CLOSEST, max(low[0] * _CLOSEST, rate))


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

    @property
    def key(self) -> object:
        """Value that searches with the same result have in common."""
        return self.replicas.kind, self.policy

    def run(self, rate: float, *, ends_early: bool = True, least: int = 0) -> Outcome:
        """Return what is measured at a rate, in requests per second, after as many requests as fill the instance.

        With `ends_early` the run ends as soon as requests queue up, or the level cannot be kept. With `least`, at least so
        many requests are measured, however late they are.
        """
        measured = self.load.in_bursts(_rounded(max(least, self._count(rate))))
        skipped = min(_SKIPPED, measured // 4) + math.ceil(2 * self._streams(rate))
        count = measured + skipped
        queued = max(_FEW_QUEUED, self._in_queued_bursts(rate, count), int(_QUEUED_SHARE * count))
        is_lost = self.level.is_lost(measured, self.load.mean_answer) if ends_early and not least else _never
        outcome = self._simulation(queued, is_lost, ends_early=ends_early).run(
            _requests(self.load, measured, skipped, rate),
            skipped=skipped,
            drains=False,
        )
        outcome.is_overrun |= rate > self.most or self._falls_behind(outcome, rate)
        return outcome

    def _in_queued_bursts(self, rate: float, count: int) -> int:
        """Return the most requests that wait in a run of so many if bursts come at a rate that is served for ever.

        The chance that more than k bursts wait before a busy server falls as exp(-2 (1 - load) k), by Kingman's
        approximation of heavy traffic. Requests that come one by one have `_FEW_QUEUED` and `_QUEUED_SHARE`.
        """
        at_once, left = self.load.at_once, max(_LEAST_LEFT, 1 - rate / self.most)
        queued = 2 + math.log(max(1.0, count / at_once) / _QUEUES_BY_CHANCE) / (2 * left)
        return 0 if at_once == 1 else int(queued * at_once)

    def _falls_behind(self, outcome: Outcome, rate: float) -> bool:
        """Return True if prompts queued during the whole run, and still fewer were answered than arrive at a rate.

        Then they queue up without end, even if the queue is still short when the run ends.
        """
        if not outcome.first_token_s or outcome.begun >= rate * outcome.span_s:
            return False
        return min(outcome.first_token_s) > _QUEUED_TIMES * self._fullest_s

    @cached_property
    def _fullest_s(self) -> float:
        """Seconds of a step of as many prompts, and of one of as many rows, as there may be, through all stages."""
        rows, prompts = self._fullest
        spans, context = [self._mean_span] * prompts, self.load.mean_prompt + self.load.mean_answer / 2
        each = (
            sum(
                member.costs.chunk_s(stage, spans) + member.costs.decode_s(stage, rows, context)
                for stage in range(member.stages)
            )
            for member in self.replicas.members
        )
        return self.replicas.shares.slower * max(each)

    @property
    def _mean_span(self) -> Span:
        """Tokens of a mean prompt that are computed."""
        cached = int(self.load.mean_prompt * self.load.prefix_hits)
        return Span(cached, max(1, int(self.load.mean_prompt) - cached))

    @property
    def _fullest(self) -> tuple[int, int]:
        """Most rows, and most mean prompts, of a step."""
        rows = max(1, -(-self.policy.max_num_seqs // self.replicas.stages))
        return rows, max(1, PROMPTS_TOGETHER * self.policy.prefill_chunk // self._mean_span.tokens)

    @cached_property
    def alone(self) -> Outcome:
        """Measurements of requests that come one after the other."""
        apart_s = _APART * self._request_s(1)
        requests = self.load.requests(_LONE, 1.0)
        spread = [request._replace(at_s=number * apart_s) for number, request in enumerate(requests)]
        return self._simulation(None, _never).run(spread)

    def _simulation(
        self, queued: int | None, is_over: Callable[[Outcome], bool], *, ends_early: bool = True
    ) -> Simulation:
        instances = [
            SimulatedInstance(member.costs, member.stages, member.kv, member.long_chunk)
            for member in self.replicas.members
        ]
        shares = self.replicas.shares
        shared = SharedMachines(*shares) if shares.most else None
        return Simulation(
            instances,
            self.policy,
            shared=shared,
            most_waiting=queued,
            is_over=is_over,
            ends_early=ends_early,
        )

    def _request_s(self, rows: int) -> float:
        """Return the mean seconds that a request takes of all stages and links, in steps of so many rows."""
        occupied = [self._occupied_s(member, rows, 1) for member in self.replicas.members]
        # Faster instances answer more of the requests.
        speeds = [1 / max([*stages, *links]) for stages, links in occupied]
        weighted = (
            speed * (sum(stages) + sum(links))
            for speed, (stages, links) in zip(speeds, occupied, strict=True)
        )
        return self.replicas.shares.slower * sum(weighted) / sum(speeds)

    def _occupied_s(self, member: Replica, rows: int, prompts: int) -> tuple[list[float], list[float]]:
        """Return the seconds that a request takes of each stage and link, in steps of so many rows or prompts."""
        costs, load, span = member.costs, self.load, self._mean_span
        context = load.mean_prompt + load.mean_answer / 2
        # The prompt's last step draws the first token.
        decoded = load.mean_answer - 1
        stages: list[float] = []
        for stage in range(member.stages):
            decode_s = costs.decode_s(stage, rows, context) / rows
            prefill_s = costs.chunk_s(stage, [span] * prompts) / prompts
            stages.append(decoded * decode_s + prefill_s)
        tokens = int(span.tokens + decoded)
        return stages, [costs.hop_s(stage, tokens)[1] for stage in range(member.stages - 1)]

    @cached_property
    def most(self) -> float:
        """Requests per second that the busiest stages, machines or links can take, in steps as full as they may be."""
        return 1 / min(self._busiest_s.values())

    @cached_property
    def _busiest_s(self) -> dict[int, float]:
        """Seconds from request to request as the busiest stages can take them, by the rows of a step, fewest first."""
        rows, prompts = self._fullest
        fuller = sorted({rows >> shift or 1 for shift in range(rows.bit_length())})
        return {count: self._apart_s(count, prompts) for count in fuller}

    def _apart_s(self, rows: int, prompts: int) -> float:
        """Return the least seconds from request to request of all instances together, with so many rows or prompts in a step."""
        # Instances of fewer stages have as many more rows in a step.
        stages = self.replicas.stages
        each = [
            self._occupied_s(member, -(-rows * stages // member.stages), prompts)
            for member in self.replicas.members
        ]
        loads = self.replicas.machine_seconds([stages for stages, _ in each])
        busiest = [
            max([*stages, *links, *load.values()]) for (stages, links), load in zip(each, loads, strict=True)
        ]
        apart_s = 1 / sum(1 / seconds for seconds in busiest)
        # All requests take their time on a machine of all instances.
        common = set(loads[0]).intersection(*loads)
        return max([apart_s, *(min(load[machine] for load in loads) for machine in common)])

    def at(self, rate: float, *, ends_early: bool = True) -> Found:
        """Return what is measured at a rate.

        Requests that queue up without end keep stages as busy at any higher rate, so they come at one of those.
        """
        outcome = self.run(min(rate, _BEYOND * self.most), ends_early=ends_early)
        return Found(rate, outcome, outcome, self.policy)

    def _streams(self, rate: float) -> float:
        """Return about as many requests as come at a rate until their number no longer rises."""
        rows = max(1, self.policy.max_num_seqs // self.replicas.stages)
        most = min(self._most_running, rate * self._request_s(rows) * rows)
        if most <= MOST_RUNNING or rate >= self.most:
            return most
        # Steps just as full as serves them; near the highest rate, it takes much longer until they are.
        rows = next(rows for rows, busiest_s in self._busiest_s.items() if rate * busiest_s <= 1)
        rows *= len(self.replicas.members)
        return min(most, max(MOST_RUNNING, rows * self.replicas.stages / (1 - rate / self.most)))

    @property
    def _most_running(self) -> float:
        """Most requests that run at the same time in all instances of a replica."""
        return float(self.policy.max_num_seqs * len(self.replicas.members))

    def _count(self, rate: float) -> int:
        """Return the number of requests to measure at about a rate."""
        streams = min(self._most_running, rate * self._request_s(1))
        few = min(_MANY, max(_FEW, _STEPS * streams / self.load.mean_answer))
        return round(max(few, min(_MOST_REQUESTS, _LATE_TIMES * rate * (self.level.first_token_s or 0.0))))

    def highest(self, known: Found | None = None) -> Found:
        """Return the highest rate at which the level holds for many requests; `known` is a rate at which it does for few."""
        low, high, step = 0.0, self.most, _FIRST_STEP
        if known is None:
            found = Found(0.0, self.alone, None, self.policy)
            if self.level.broken(self.alone):
                return replace(found, beyond=self.alone)
            if self.load.at_once > 1 and not self.level.holds(rare := self.run(_SELDOM / self._request_s(1))):
                return replace(found, beyond=rare)
            rate = _FIRST_TRY * high
        else:
            found, low = known, known.rate
            rate = math.sqrt(low * min(high, low * step))
        for _ in range(_MOST_RUNS):
            if low and high < low * _ROUGHLY:
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
        return self._confirmed(found, math.sqrt(low * min(high, low * _ROUGHLY)), high) if low else found

    def _confirmed(self, found: Found, rate: float, beyond: float) -> Found:
        """Return about the highest rate at which the level holds for many requests, from a rate near it on.

        At a rate `beyond` it, the level does not hold for few requests.
        """
        low = high = None
        for run in range(_MOST_RUNS):
            outcome = self.run(rate, least=self._many(rate))
            excess = self.level.excess(outcome)
            if self.level.holds(outcome):
                low, found = (rate, excess), replace(found, rate=rate, outcome=outcome)
            else:
                high, found = (rate, excess), replace(found, beyond=outcome)
            is_near = low is not None and (low[1] > _NEAR_LIMIT or low[0] >= self.most)
            if is_near or (
                low and ((high and high[0] < _CONFIRMED_WITHIN * low[0]) or run >= _CONFIRMING_RUNS)
            ):
                return found
            rate = min(self.most, _between(low, high))
            if low and not high and low[0] < beyond:
                rate = min(rate, math.sqrt(low[0] * beyond))
        return found if low else replace(found, rate=0.0, outcome=self.alone)

    def _many(self, rate: float) -> int:
        """Return the number of requests that confirm a rate."""
        streams = min(self._most_running, rate * self._request_s(1))
        return round(
            min(_CONFIRMING[1], max(_CONFIRMING[0], _CONFIRMING_STEPS * streams / self.load.mean_answer))
        )
