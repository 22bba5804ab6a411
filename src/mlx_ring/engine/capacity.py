"""Capacity of a cluster: the highest rate of requests at which a service level holds. Pure and deterministic.

Each kind of replica is simulated with its share of the requests. The same requests arrive at every rate, only sooner or
later, so that rates are compared on the same load.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from mlx_ring.core.engine_stats import Policy
from mlx_ring.core.types import RankId
from mlx_ring.engine.kv_budget import RankKv, sequence_bytes
from mlx_ring.engine.prefill import PROMPTS_TOGETHER
from mlx_ring.engine.simulated_load import Load, Outcome, ServiceLevel, Span
from mlx_ring.engine.simulation import Simulation
from mlx_ring.planner.cluster_file import Upkeep
from mlx_ring.planner.forecast import StepTable, forecast_plan
from mlx_ring.planner.place import LoadedStages, plan_loaded
from mlx_ring.planner.plan import Plan
from mlx_ring.planner.profiles import ClusterProfile, ModelProfile
from mlx_ring.planner.replicas import alike_plans, likeness, place_for_load
from mlx_ring.planner.request import PlanRequest

MOST_RUNNING = 256
"""Most requests that run at the same time in a replica, if no number is given."""
_FEW, _MANY, _LONE = 100, 600, 10
"""Numbers of measured requests of a run, at least and at most, and of requests that run one after the other."""
_STEPS = 6_000
"""Number of decode steps at which a run has enough requests."""
_LATE_TIMES, _MOST_REQUESTS = 4, 2_000
"""Duration of a run at least, as a multiple of the time to the first token that the level allows; its most requests."""
_CLOSE = 1.05
"""Factor between the rates at which the level holds and does not, from which the search ends."""
_MOST_RUNS = 14
_FIRST_TRY, _FIRST_STEP, _LARGEST_STEP = 0.6, 1.4, 4.0
"""Part of the rate without any waiting at which the search begins, and the first and largest factor to a lower rate."""
_YEAR_S, _APART = 365.25 * 86_400, 4
"""Seconds of a year, and the time between lone requests, as a multiple of what one takes."""
_NO_PLAN = "No plan was found for these machines."
_QUEUED_SHARE = 0.05
"""Share of a run's requests that may wait: beyond it, the queue grows."""
_FEW_QUEUED = 16
_BUSY, _WAITING = 0.8, 0.1
"""Share of the time from which a stage or link is the limit, and below it, from which waiting is."""

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
    """What it has in common with replicas whose steps take as long."""

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
            self.load.requests(count, rate), skipped=skipped, drains=False
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

    @property
    def most(self) -> float:
        """Requests per second that the busiest stage or link can take, in steps as full as they may be."""
        cached = int(self.load.mean_prompt * self.load.prefix_hits)
        computed = max(1, int(self.load.mean_prompt) - cached)
        prompts = max(1, PROMPTS_TOGETHER * self.policy.prefill_chunk // computed)
        rows = max(1, -(-self.policy.max_num_seqs // self.replicas.stages))
        fuller = {rows >> shift or 1 for shift in range(rows.bit_length())}
        return 1 / min(max(self._occupied_s(count, prompts)) for count in fuller)

    def at(self, rate: float) -> Found:
        """Return what is measured at a rate."""
        outcome = self.run(rate)
        return Found(rate, outcome, outcome, self.policy)

    def _streams(self, rate: float) -> float:
        """Return about as many requests as run at the same time at a rate, none waiting."""
        rows = max(1, self.policy.max_num_seqs // self.replicas.stages)
        return min(float(self.policy.max_num_seqs), rate * self._request_s(rows) * rows)

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
            if low and high < low * _CLOSE:
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


# ---- cases


@dataclass(frozen=True)
class Question:
    """Load, service level and costs of a cluster."""

    load: Load
    level: ServiceLevel
    request: PlanRequest
    """Bits of the KV cache, and context; the rest follows from the load."""
    policy: Policy
    max_num_seqs: int | None = None
    """Most requests that run at the same time in a replica; None for as many as the level allows."""
    rate: float | None = None
    """Requests per second at which to measure; None for the highest rate."""
    thinking_s: float = 60.0
    """Seconds from an answer to its user's next request."""
    upkeep: Mapping[str, Upkeep] = field(default_factory=dict[str, Upkeep])
    """Power and price of machines by name."""
    years: float = 3.0
    """Years over which prices are spread."""
    kwh_price: float = 0.0


@dataclass(frozen=True, slots=True)
class Use:
    """Use of a machine."""

    machine: str
    busy: float
    """Share of the time in which it computes."""
    prefill: float
    """Share of the time in which it computes prompts."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """Capacity of a cluster, or what a given rate of requests gets."""

    label: str
    holds: bool
    """True if the level holds."""
    why: str
    """Reason why it does not hold, or what limits the rate."""
    requests_per_s: float = 0.0
    users: float = 0.0
    """Users who wait for an answer or think."""
    tokens_per_s: float = 0.0
    """Tokens of answers."""
    first_token_s: float = 0.0
    """Percentile of the level."""
    between_tokens_s: float = 0.0
    request_s: float = 0.0
    """Mean time of a request."""
    max_num_seqs: int = 0
    """Most requests that run at the same time, of the kind of replica with the most."""
    replicas: int = 0
    stages: tuple[str, ...] = ()
    """Machines and layers of each stage, and use of the machines, of one replica of each kind."""
    uses: tuple[Use, ...] = ()
    watts: float | None = None
    """None if the power of a used machine is not known."""
    price: float | None = None
    """Price of all used machines; None if one is not known."""
    tokens_per_joule: float | None = None
    tokens_per_price: float | None = None
    """Tokens for one unit of the currency: machines over their years, and energy."""


class CapacityMeter:
    """Measurements of clusters with one model and question. Replicas of the same kind are searched once."""

    def __init__(self, model: ModelProfile, question: Question) -> None:
        self._model, self._question = model, question
        self._found: dict[object, Found] = {}

    def measure(self, label: str, cluster: ClusterProfile, loaded: Sequence[LoadedStages] = ()) -> Capacity:
        """Return the capacity of a cluster with the best of several plans, or with its loaded instances.

        Raises:
            PlanError: the model does not fit.
        """
        request = _request(self._question)
        plans = [plan_loaded(self._model, cluster, request, loaded)] if loaded else None
        cases = [
            self._searches(cluster, request, made)
            for made in plans or place_for_load(self._model, cluster, request)
        ]
        best = Capacity(label, holds=False, why=_NO_PLAN)
        for searches in sorted(cases, key=_bound, reverse=True):
            if not self._is_surely_less(searches, best):
                found = _capacity(label, searches, self._results(searches), self._question)
                best = max(found, best, key=_rank)
        return best

    def _is_surely_less(self, searches: Sequence[Search], best: Capacity) -> bool:
        """Return True if plans cannot take as many requests, or the level does not hold at a little more of them."""
        if not best.holds or self._question.rate is not None:
            return False
        if _bound(searches) <= best.requests_per_s:
            return True
        (search, *others) = searches
        if others or search.replicas.kind in self._found:
            return False
        rate = _CLOSE * best.requests_per_s / search.replicas.count
        outcome = search.run(rate)
        if not self._question.level.holds(outcome):
            return True
        self._found[search.replicas.kind] = search.highest(Found(rate, outcome, None, search.policy))
        return False

    def _searches(self, cluster: ClusterProfile, request: PlanRequest, plans: Sequence[Plan]) -> list[Search]:
        question = self._question
        kinds = replicas_of(self._model, cluster, request, plans)
        first = (Search(kind, question.load, question.level, question.policy) for kind in kinds)
        return [replace(each, policy=fitting_policy(each, question.max_num_seqs)) for each in first]

    def _results(self, searches: Sequence[Search]) -> list[Found]:
        if self._question.rate is not None:
            return _at_rate(searches, self._question.rate)
        found: list[Found] = []
        for search in searches:
            kind = search.replicas.kind
            if kind not in self._found:
                self._found[kind] = search.highest()
            found.append(self._found[kind])
        return found


def _bound(searches: Sequence[Search]) -> float:
    """Return the requests per second that the busiest stages or links of all replicas can take."""
    return sum(search.most * search.replicas.count for search in searches)


def _rank(found: Capacity) -> tuple[bool, float, float]:
    return found.holds, found.requests_per_s, -found.first_token_s if found.replicas else -math.inf


def _request(question: Question) -> PlanRequest:
    """Return the request for plans of a load."""
    load, (prompt, answer) = question.load, question.load.longest
    typical = int(load.mean_prompt + load.mean_answer / 2)
    demand = replace(
        question.request.demand, context_tokens=prompt + answer, sequences=1, typical_tokens=typical
    )
    return replace(
        question.request,
        demand=demand,
        prompt_tokens=max(1, int(load.mean_prompt)),
        answer_tokens=max(1, int(load.mean_answer)),
    )


def _capacity(label: str, searches: Sequence[Search], found: Sequence[Found], question: Question) -> Capacity:
    load, level = question.load, question.level
    rates = [each.rate * search.replicas.count for each, search in zip(found, searches, strict=True)]
    outcomes = [each.outcome for each in found]
    total = sum(rates)
    request_s = sum(
        rate * _mean(outcome.request_s) for rate, outcome in zip(rates, outcomes, strict=True)
    ) / (total or 1.0)
    tokens_per_s, given = total * load.mean_answer, question.rate is not None
    watts, price = _upkeep(searches, outcomes, question)
    paid = None if price is None else _paid_per_s(price, watts, question)
    worst = max(
        zip(found, searches, strict=True),
        key=lambda pair: (not pair[0].rate, pair[0].rate * pair[1].replicas.count),
    )
    return Capacity(
        label=label,
        holds=all(map(level.holds, outcomes)) if given else total > 0,
        why=_why(*worst, is_given=given),
        requests_per_s=total,
        users=total * (question.thinking_s + request_s),
        tokens_per_s=tokens_per_s,
        first_token_s=max(outcome.first_token_within(level.percent) for outcome in outcomes),
        between_tokens_s=max(outcome.between_tokens_within(level.percent) for outcome in outcomes),
        request_s=request_s,
        max_num_seqs=max(search.policy.max_num_seqs for search in searches),
        replicas=sum(search.replicas.count for search in searches),
        stages=tuple(text for search in searches for text in _stage_texts(search.replicas)),
        uses=tuple(chain.from_iterable(map(_first_uses, searches, outcomes))),
        watts=watts,
        price=price,
        tokens_per_joule=tokens_per_s / watts if watts else None,
        tokens_per_price=tokens_per_s / paid if paid else None,
    )


def _at_rate(searches: Sequence[Search], rate: float) -> list[Found]:
    """Return what is measured at a rate, of which each replica gets its share by its predicted throughput."""
    speeds = [search.replicas.plan.prediction.tokens_per_s for search in searches]
    each = zip(searches, speeds, strict=True)
    total = sum(speed * search.replicas.count for search, speed in each)
    return [search.at(rate * speed / total) for search, speed in zip(searches, speeds, strict=True)]


def _paid_per_s(price: float, watts: float | None, question: Question) -> float | None:
    """Return the price of a second: machines over their years, and energy; None if its amount is not known."""
    if watts is None and question.kwh_price:
        return None
    return price / (question.years * _YEAR_S) + (watts or 0.0) / 3.6e6 * question.kwh_price


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _stage_texts(replicas: Replicas) -> Iterator[str]:
    times = f"{replicas.count} x " if replicas.count > 1 else ""
    for stage, names in zip(replicas.plan.stages, replicas.names[0], strict=True):
        yield f"{times}{'+'.join(names)} {stage.layers.start}-{stage.layers.end - 1}"


def _first_uses(search: Search, outcome: Outcome) -> Iterator[Use]:
    return _uses(search.replicas.names[0], outcome)


def _uses(names: Sequence[Sequence[str]], outcome: Outcome) -> Iterator[Use]:
    for stage, machines in enumerate(names):
        for machine in machines:
            yield Use(machine, outcome.busy(stage), outcome.prefill_s[stage] / outcome.span_s)


def _upkeep(
    searches: Sequence[Search], outcomes: Sequence[Outcome], question: Question
) -> tuple[float | None, float | None]:
    """Return the power and the price of all machines with layers; None for what is not known of one."""
    watts: list[float | None] = []
    prices: list[float | None] = []
    for search, outcome in zip(searches, outcomes, strict=True):
        for names in search.replicas.names:
            for use in _uses(names, outcome):
                upkeep = question.upkeep.get(use.machine) or question.upkeep.get(
                    use.machine.partition("#")[0], Upkeep()
                )
                watts.append(upkeep.power_watts(use.busy))
                prices.append(upkeep.price)
    return _sum(watts), _sum(prices)


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _why(found: Found, search: Search, *, is_given: bool) -> str:
    """Return what limits the rate, or what happens at a given one, in a sentence."""
    busiest = _busiest(search, found.outcome)
    if is_given:
        return f"At this rate {busiest}."
    if not found.rate:
        return "Even one request at a time is too slow."
    begin = {
        "first token": "Beyond it the first token comes too late",
        "between tokens": "Beyond it tokens come too late after each other",
        "": "Beyond it requests queue up",
    }[search.level.broken(found.beyond) if found.beyond else ""]
    return f"{begin}: {busiest}."


def _busiest(search: Search, outcome: Outcome) -> str:
    """Return what is in use most, or what requests wait for."""
    names = ["+".join(each) for each in search.replicas.names[0]]
    stage = max(range(len(names)), key=outcome.busy)
    link = max(range(len(names)), key=lambda place: outcome.link_s[place])
    busy, linked = outcome.busy(stage), outcome.link_s[link] / outcome.span_s
    if (
        max(outcome.waits_for_memory_s, outcome.waits_for_place_s) > _WAITING * outcome.span_s
        and max(busy, linked) < _BUSY
    ):
        if outcome.waits_for_memory_s > outcome.waits_for_place_s:
            return "requests wait for KV memory"
        return f"{search.policy.max_num_seqs} requests run at the same time, and others wait (--max-num-seqs)"
    if linked > busy:
        return f"the link behind {names[link]} is busy {linked:.0%} of the time"
    prompts = outcome.prefill_s[stage] / max(1e-9, outcome.prefill_s[stage] + outcome.decode_s[stage])
    return f"{names[stage]} computes {busy:.0%} of the time, {prompts:.0%} of that prompts"
