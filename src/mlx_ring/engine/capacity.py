"""Capacity of a cluster: the highest rate of requests at which a service level holds. Pure and deterministic.

The replicas of a kind are simulated once, and unlike ones together (`capacity_search.py`).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from mlx_ring.core.engine_stats import Policy
from mlx_ring.engine.capacity_search import CLOSE, Found, Search, ServiceLevel
from mlx_ring.engine.simulated_load import Outcome
from mlx_ring.engine.simulated_replicas import MOST_RUNNING, Replicas, joined, replicas_of
from mlx_ring.planner.cluster_file import Upkeep
from mlx_ring.planner.place import LoadedStages, plan_loaded
from mlx_ring.planner.plan import Plan
from mlx_ring.planner.profiles import ClusterProfile, ModelProfile
from mlx_ring.planner.replicas import place_for_load
from mlx_ring.planner.request import Load, PlanRequest

_YEAR_S = 365.25 * 86_400
_HEAD_REQUEST_S, _HEAD_TOKEN_S = 3e-3, 0.3e-3
"""Seconds of one core that the head takes for a request, and for each streamed token of its answer: HTTP, scheduling,
detokenizing. Measured as its CPU time per request of one token, and per token of 8 to 64 streams of the model demo, on
an AMD EPYC. The head computes on one core, whatever the number of replicas."""
_FULL = 0.999
_FAR_BELOW = 0.5
"""Part of the rate without any waiting up to which a replica probably serves what the head can handle."""
_HEAD = "The head computes all of the time: it handles no more requests, however many machines there are."
_SPREAD, _RECORDED_SPREAD = 1.5, 3.5
"""Twice the standard deviation of found rates among five seeds, as their part, times the root of the measured requests.
Recorded requests are not chosen as typical ones are, so they count as drawn at random."""
_NO_PLAN = "No plan was found for these machines."
_BUSY, _WAITING = 0.8, 0.1
"""Share of the time from which a stage or link is the limit, and below it, from which waiting is."""

Names = Sequence[Sequence[Sequence[str]]]
"""Machines of each stage of each replica."""

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
    """Users who wait for an answer or think; 0 if requests queue up without end."""
    tokens_per_s: float = 0.0
    """Tokens of answers; those that are served, if requests come faster."""
    first_token_s: float = 0.0
    """Percentile of the level; infinite if requests queue up without end."""
    between_tokens_s: float = 0.0
    request_s: float = 0.0
    """Mean time of a request."""
    max_num_seqs: int = 0
    """Most requests that run at the same time in each replica."""
    head_busy: float = 0.0
    """Share of a core's time that the head computes; it has one core."""
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
        made = plans or place_for_load(self._model, cluster, request)
        cases = [case for each in made for case in self._variants(self._searches(cluster, request, each))]
        best = Capacity(label, holds=False, why=_NO_PLAN)
        for searches in sorted(cases, key=_bound, reverse=True):
            if not self._is_surely_less(searches, best):
                found = _capacity(label, searches, self._within_head(searches), self._question)
                best = max(found, best, key=_rank)
        return best

    def _is_surely_less(self, searches: Sequence[Search], best: Capacity) -> bool:
        """Return True if plans cannot take as many requests, or the level does not hold at a little more of them."""
        if not best.holds or self._question.rate is not None:
            return False
        if _bound(searches) <= best.requests_per_s:
            return True
        (search, *others) = searches
        if others or search.key in self._found:
            return False
        rate = CLOSE * best.requests_per_s / search.replicas.count
        outcome = search.run(rate)
        if not self._question.level.holds(outcome):
            return True
        self._found[search.key] = search.highest(Found(rate, outcome, None, search.policy))
        return False

    def _searches(self, cluster: ClusterProfile, request: PlanRequest, plans: Sequence[Plan]) -> list[Search]:
        """Return the searches for replicas of plans: one if all are alike or simulated together, else one for each kind.

        All replicas run as many requests at the same time, as those of the kind that fits the most of them.
        """
        question = self._question
        kinds = replicas_of(self._model, cluster, request, plans)
        searches = [Search(each, question.load, question.level, question.policy) for each in joined(kinds)]
        return _with_most(searches, max(self._numbers(searches)))

    def _numbers(self, searches: Sequence[Search]) -> set[int]:
        """Return how many requests fit at the same time, for each kind of replica."""
        return {
            _most_fitting(replace(search, replicas=kind), self._question.max_num_seqs)
            for search in searches
            for kind in search.replicas.unlike or (search.replicas,)
        }

    def _variants(self, searches: list[Search]) -> Iterator[list[Search]]:
        """Yield searches, and if their replicas are unlike, some with fewer requests at the same time."""
        yield searches
        if len(searches) == 1 and searches[0].replicas.unlike:
            _, *fewer = sorted(self._numbers(searches), reverse=True)
            for number in sorted({*fewer[len(fewer) // 2 :][:1], *fewer[-1:]}, reverse=True):
                yield _with_most(searches, number)

    def _within_head(self, searches: Sequence[Search]) -> list[Found]:
        """Return what is found of each kind, at as many requests as the head can handle."""
        if (known := self._at_head_limit(searches)) is not None:
            return known
        found = self._results(searches)
        if self._question.rate is not None:
            return found
        total = sum(each.rate * search.replicas.count for each, search in zip(found, searches, strict=True))
        most = 1 / _head_s(self._question.load)
        if total <= most:
            return found
        return [
            search.at(each.rate * most / total) if each.rate else each
            for each, search in zip(found, searches, strict=True)
        ]

    def _at_head_limit(self, searches: Sequence[Search]) -> list[Found] | None:
        """Return what is found where the head surely is the limit: the highest rate of a replica need not be searched."""
        share = 1 / _head_s(self._question.load) / _bound(searches)
        if self._question.rate is not None or share > _FAR_BELOW:
            return None
        if any(search.key in self._found for search in searches):
            return None
        found = [search.at(share * search.most) for search in searches]
        return found if all(self._question.level.holds(each.outcome) for each in found) else None

    def _results(self, searches: Sequence[Search]) -> list[Found]:
        if self._question.rate is not None:
            return _at_rate(searches, self._question.rate)
        found: list[Found] = []
        for search in searches:
            if search.key not in self._found:
                self._found[search.key] = search.highest()
            found.append(self._found[search.key])
        return found


def _with_most(searches: Sequence[Search], number: int) -> list[Search]:
    return [replace(each, policy=replace(each.policy, max_num_seqs=number)) for each in searches]


def _most_fitting(search: Search, most_running: int | None) -> int:
    """Return a number of running requests: the given one, or as many as keep the time between tokens."""
    if most_running is not None:
        return most_running
    replicas, load, limit_s = search.replicas, search.load, search.level.between_tokens_s
    context = load.mean_prompt + load.mean_answer / 2
    tokens = round(load.mean_prompt + load.mean_answer)
    most = max(1, min(MOST_RUNNING, *(member.room(tokens) for member in replicas.members)))

    def keeps(rows: int) -> bool:
        """Return True if a token comes in time where each micro-batch of all instances has so many rows."""
        each = [
            [member.costs.decode_s(stage, rows, context) for stage in range(member.stages)]
            for member in replicas.members
        ]
        hops = [
            sum(sum(member.costs.hop_s(stage, rows)) for stage in range(member.stages - 1))
            for member in replicas.members
        ]
        rounds = [max(sum(one) + hop, len(one) * max(one)) for one, hop in zip(each, hops, strict=True)]
        cycles = Counter[int]()
        for one, loads in zip(each, replicas.machine_seconds(each), strict=True):
            cycles.update({machine: len(one) * seconds for machine, seconds in loads.items()})
        return limit_s is None or max([*rounds, *cycles.values()]) <= limit_s

    rows = max((rows for rows in range(1, most // replicas.stages + 1) if keeps(rows)), default=1)
    return min(most, rows * replicas.stages)


def _head_s(load: Load) -> float:
    """Return the seconds that the head computes for a request."""
    return _HEAD_REQUEST_S + load.mean_answer * _HEAD_TOKEN_S


def _bound(searches: Sequence[Search]) -> float:
    """Return the requests per second that the busiest stages or links of all replicas can take."""
    return sum(search.most * search.replicas.count for search in searches)


def _rank(found: Capacity) -> tuple[bool, float, float]:
    return found.holds, found.requests_per_s, -found.first_token_s if found.replicas else -math.inf


def _request(question: Question) -> PlanRequest:
    """Return the request for plans of a load."""
    load = question.load
    typical = int(load.mean_prompt + load.mean_answer / 2)
    demand = replace(
        question.request.demand, context_tokens=load.longest, sequences=1, typical_tokens=typical
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
    total = sum(rates) if question.rate is None else question.rate
    request_s = sum(
        rate * _mean(outcome.request_s) for rate, outcome in zip(rates, outcomes, strict=True)
    ) / (total or 1.0)
    head_busy = total * _head_s(load)
    is_overrun, given = any(outcome.is_overrun for outcome in outcomes), question.rate is not None
    tokens_per_s = min(sum(map(_served_per_s, searches, outcomes, rates)), load.mean_answer / _head_s(load))
    watts, price = _upkeep(searches, outcomes, question)
    paid = None if price is None else _paid_per_s(price, watts, question)
    worst = max(
        zip(found, searches, strict=True),
        key=lambda pair: (not pair[0].rate, pair[0].rate * pair[1].replicas.count),
    )
    return Capacity(
        label=label,
        holds=all(map(level.holds, outcomes)) and head_busy <= 1 if given else total > 0,
        why=_HEAD if head_busy > _FULL else _why(*worst, is_given=given),
        requests_per_s=total,
        users=0.0 if is_overrun or head_busy > 1 / _FULL else total * (question.thinking_s + request_s),
        tokens_per_s=tokens_per_s,
        first_token_s=max(outcome.first_token_within(level.percent) for outcome in outcomes),
        between_tokens_s=max(outcome.between_tokens_within(level.percent) for outcome in outcomes),
        request_s=request_s,
        max_num_seqs=searches[0].policy.max_num_seqs,
        head_busy=head_busy,
        replicas=sum(search.replicas.instances for search in searches),
        stages=tuple(
            text
            for search in searches
            for kind in search.replicas.unlike or (search.replicas,)
            for text in _stage_texts(kind)
        ),
        uses=tuple(_uses((search.replicas.names[:1] for search in searches), outcomes)),
        watts=watts,
        price=price,
        tokens_per_joule=tokens_per_s / watts if watts else None,
        tokens_per_price=tokens_per_s / paid if paid else None,
    )


def _served_per_s(search: Search, outcome: Outcome, rate: float) -> float:
    """Return the tokens of answers that replicas serve at a rate, per second."""
    asked = rate * search.load.mean_answer
    return (
        min(asked, search.replicas.count * outcome.tokens / outcome.span_s) if outcome.is_overrun else asked
    )


def _at_rate(searches: Sequence[Search], rate: float) -> list[Found]:
    """Return what is measured at a rate, of which each replica gets its share by its predicted throughput."""
    speeds = [search.replicas.tokens_per_s for search in searches]
    each = zip(searches, speeds, strict=True)
    total = sum(speed * search.replicas.count for search, speed in each)
    return [
        search.at(rate * speed / total, ends_early=False)
        for search, speed in zip(searches, speeds, strict=True)
    ]


def _paid_per_s(price: float, watts: float | None, question: Question) -> float | None:
    """Return the price of a second: machines over their years, and energy; None if its amount is not known."""
    if watts is None and question.kwh_price:
        return None
    return price / (question.years * _YEAR_S) + (watts or 0.0) / 3.6e6 * question.kwh_price


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _stage_texts(replicas: Replicas) -> Iterator[str]:
    """Yield the machines and layers of each stage of one replica, with the number of alike ones."""
    stages = chain.from_iterable(member.plan.stages for member in replicas.members)
    layers = (f"{stage.layers.start}-{stage.layers.end - 1}" for stage in stages)
    texts = Counter(
        f"{'+'.join(names)} {each}" for names, each in zip(replicas.names[0], layers, strict=True)
    )
    for text, count in texts.items():
        times = count * replicas.count
        yield f"{times} x {text}" if times > 1 else text


def _uses(names: Iterable[Names], outcomes: Sequence[Outcome]) -> Iterator[Use]:
    """Yield the use of each machine, by the machines of the stages of replicas, and what is measured of these."""
    busy, prefill = defaultdict[str, float](float), defaultdict[str, float](float)
    for replicas, outcome in zip(names, outcomes, strict=True):
        for stage, machines in (pair for replica in replicas for pair in enumerate(replica)):
            for machine in set(machines):
                busy[machine] += outcome.busy(stage)
                prefill[machine] += outcome.prefill_s[stage] / outcome.span_s
    yield from (Use(name, min(1.0, share), min(1.0, prefill[name])) for name, share in busy.items())


def _upkeep(
    searches: Sequence[Search], outcomes: Sequence[Outcome], question: Question
) -> tuple[float | None, float | None]:
    """Return the power and the price of all machines with layers; None for what is not known of one."""
    watts: list[float | None] = []
    prices: list[float | None] = []
    for use in _uses((search.replicas.names for search in searches), outcomes):
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
        if search.level.broken(found.outcome) or found.beyond is None:
            return "Even one request at a time is too slow."
        late = search.level.broken(found.beyond)
        fault = {
            "first token": "the first token comes too late",
            "between tokens": "tokens come too late after each other",
            "": "they queue up",
        }[late]
        return f"One request at a time is fast enough, but of requests that arrive together {fault}."
    begin = {
        "first token": "Beyond it the first token comes too late",
        "between tokens": "Beyond it tokens come too late after each other",
        "": "Beyond it requests queue up",
    }[search.level.broken(found.beyond) if found.beyond else ""]
    spread = _RECORDED_SPREAD if search.load.recorded else _SPREAD
    spread /= math.sqrt(max(1, len(found.outcome.first_token_s)))
    return f"{begin}: {busiest}. Other arrivals may give {spread:.0%} more or less."


def _busiest(search: Search, outcome: Outcome) -> str:
    """Return what is in use most, or what requests wait for."""
    machines = search.replicas.names[0]
    names = ["+".join(each) for each in machines]
    link = max(range(len(names)), key=lambda place: outcome.link_s[place])
    use = max(_uses([[machines]], [outcome]), key=lambda use: use.busy)
    busy, linked = use.busy, outcome.link_s[link] / outcome.span_s
    if (
        max(outcome.waits_for_memory_s, outcome.waits_for_place_s) > _WAITING * outcome.span_s
        and max(busy, linked) < _BUSY
    ):
        if outcome.waits_for_memory_s > outcome.waits_for_place_s:
            return "requests wait for KV memory"
        return f"{search.policy.max_num_seqs} requests run at the same time, and others wait (--max-num-seqs)"
    if linked > busy:
        return f"the link behind {names[link]} is busy {linked:.0%} of the time"
    stages = [name for name, each in zip(names, machines, strict=True) if use.machine in each]
    name = stages[0] if len(set(stages)) == 1 else use.machine
    return f"{name} computes {busy:.0%} of the time, {use.prefill / max(1e-9, busy):.0%} of that prompts"
