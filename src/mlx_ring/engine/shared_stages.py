"""Events of a simulation, stages of instances that share the speed of machines in it, and replicas of a plan. Pure."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import inf
from typing import Any, NamedTuple

from mlx_ring.core.types import RankId
from mlx_ring.engine.kv_budget import RankKv, sequence_bytes
from mlx_ring.engine.simulated_load import Outcome, Sent, SimulatedInstance
from mlx_ring.planner.forecast import StepTable, forecast_plan
from mlx_ring.planner.plan import Plan, RankPlan
from mlx_ring.planner.profiles import ClusterProfile, ModelProfile, NodeProfile
from mlx_ring.planner.replicas import likeness
from mlx_ring.planner.request import PlanRequest

_MICRO = 1e6
MOST_RUNNING = 256
"""Most requests that run at the same time in a replica, if no number is given."""
Call = Callable[[Any, int, float], None]
"""Function that is called at an event, with its subject, a stage and the time."""


class Events:
    """Events to come, the next one first."""

    def __init__(self) -> None:
        self.heap: list[tuple[float, int, Call, int, Any]] = []
        self._number = 0

    def push(self, at_s: float, call: Call, stage: int, subject: object) -> None:
        """Add an event; of several at the same time, the one that was added first comes first."""
        self._number += 1
        heapq.heappush(self.heap, (at_s, self._number, call, stage, subject))


class SharedMachines:
    """Machines whose speed is shared by the stages that compute on them at the same time.

    While a machine's stages ask for more than it can run at once, each computes as much slower.
    """

    def __init__(self, most: Sequence[float], parts: Sequence[Mapping[int, float]]) -> None:
        """Prepare the machines.

        Args:
            most: number of workers that each machine runs at once at full speed.
            parts: number of workers of each stage, by machine.
        """
        self._most, self._parts = tuple(most), tuple(parts)
        self._left_s: dict[int, float] = {}
        """Seconds that the step of each computing stage would still take alone ..."""
        self._speeds: dict[int, float] = {}
        """... and the speed at which it is computed, relative to that."""
        self._at_s = 0.0

    def begin(self, stage: int, seconds: float, now: float) -> None:
        """Begin a step on an idle stage, which takes so many seconds alone."""
        self._advance(now)
        self._left_s[stage] = seconds
        self._share()

    def next_end(self) -> tuple[float, int] | None:
        """Return when the next step ends, and its stage; None if none is computed."""
        each = ((self._at_s + left / self._speeds[stage], stage) for stage, left in self._left_s.items())
        return min(each, default=None)

    def end(self, stage: int, now: float) -> None:
        """End the step on a stage."""
        self._advance(now)
        del self._left_s[stage]
        self._share()

    def _advance(self, now: float) -> None:
        for stage in self._left_s:
            self._left_s[stage] = max(0.0, self._left_s[stage] - (now - self._at_s) * self._speeds[stage])
        self._at_s = now

    def _share(self) -> None:
        taken = [0.0] * len(self._most)
        for stage in self._left_s:
            for machine, part in self._parts[stage].items():
                taken[machine] += part
        self._speeds = {
            stage: min([1.0, *(self._most[machine] / taken[machine] for machine in self._parts[stage])])
            for stage in self._left_s
        }


@dataclass(slots=True, eq=False)
class Work:
    """A step on a stage whose machine also computes others."""

    stage: int
    seconds: float
    """Seconds that it takes alone."""
    on_end: Callable[[Work, float], None]
    ready_s: float = inf
    begin_s: float = 0.0


class SharedStages:
    """Stages that compute one step after the other, each as fast as the others on its machines let it."""

    def __init__(self, machines: SharedMachines, events: Events) -> None:
        self._machines, self._events = machines, events
        self._lines: defaultdict[int, deque[Work]] = defaultdict(deque)
        self._computed: dict[int, Work] = {}
        self._changes = 0

    def add(self, stage: int, seconds: float, on_end: Callable[[Work, float], None]) -> Work:
        """Return a step that is queued on a stage, and begins after it was set ready."""
        work = Work(stage, seconds, on_end)
        self._lines[stage].append(work)
        return work

    def set_ready(self, work: Work, at_s: float, now: float) -> None:
        """Let a step begin at a time, if the steps before it have ended by then."""
        work.ready_s = at_s
        if at_s > now:
            self._events.push(at_s, self._on_ready, work.stage, work)
        else:
            self._on_ready(work, work.stage, now)

    def _on_ready(self, _: object, stage: int, now: float) -> None:
        line = self._lines[stage]
        if stage in self._computed or not line or line[0].ready_s > now:
            return
        work = self._computed[stage] = line.popleft()
        work.begin_s = now
        self._machines.begin(stage, work.seconds, now)
        self._expect()

    def _expect(self) -> None:
        """Expect the next end of a step; what was expected before no longer holds."""
        self._changes += 1
        if (found := self._machines.next_end()) is not None:
            at_s, stage = found
            self._events.push(at_s, self._on_end, stage, self._changes)

    def _on_end(self, change: int, stage: int, now: float) -> None:
        if change != self._changes:
            return
        self._machines.end(stage, now)
        work = self._computed.pop(stage)
        self._expect()
        work.on_end(work, now)
        self._on_ready(None, stage, now)


class StageLine:
    """Stages and links of an instance, through which its steps pass."""

    def __init__(
        self,
        instance: SimulatedInstance,
        first: int,
        events: Events,
        shared: SharedStages | None,
        on_answer: Callable[[Sent, int, float], None],
    ) -> None:
        """Prepare the stages.

        Args:
            instance: the instance.
            first: number of its first stage among those of all instances.
            events: receives the answers of stages.
            shared: stages on shared machines, its own among them; None if it shares none.
            on_answer: called when the head has an answer, with the step, the instance's stage, and the time.
        """
        self._costs, self._stages = instance.costs, instance.stages
        self._first, self._events, self._shared, self._on_answer = first, events, shared, on_answer
        self._free_at = [0.0] * instance.stages
        self._link_free_at = [0.0] * instance.stages
        self._awaited: dict[int, list[tuple[Work, float, float]]] = {}
        """Steps on shared machines that wait for the tokens of an earlier one, by that one."""
        self._head_s = instance.costs.head_s()
        self.outcome = Outcome(0.0, inf)

    def send(
        self,
        sent: Sent,
        now: float,
        seconds: Sequence[float],
        busy: list[float],
        after: Sent | None = None,
        back_s: float = 0.0,
    ) -> None:
        """Pass a step through the stages; `back_s` after its rows' last tokens, those of an earlier step, were sampled.

        Where no machine is shared, steps wait only for what was sent before, so their times are known.
        """
        arrives = now + self._head_s
        if self._shared is not None:
            self._send_shared(self._shared, sent, arrives, seconds, busy, after, back_s)
            return
        ready = arrives if after is None else max(arrives, after.sampled_at + back_s)
        last, outcome, free_at, first = self._stages - 1, self.outcome, self._free_at, self._first
        for stage, computing_s in enumerate(seconds):
            begin = max(ready, free_at[stage])
            end = free_at[stage] = begin + computing_s
            sent.compute_us.append(round(end * _MICRO) - round(begin * _MICRO))
            is_within = outcome.begin_s <= begin and end <= outcome.end_s
            busy[first + stage] += computing_s if is_within else self._within(begin, end)
            if sent.tokens or stage == last:
                self._events.push(end + self._head_s, self._on_answer, stage, sent)
            if stage == last:
                sent.sampled_at = end
                return
            # The head sends to every stage itself; a later one has what it needs when the one before hands it on.
            ready = max(arrives, self._handed_on(sent, stage, end))

    def _send_shared(
        self,
        shared: SharedStages,
        sent: Sent,
        arrives: float,
        seconds: Sequence[float],
        busy: list[float],
        after: Sent | None,
        back_s: float,
    ) -> None:
        """Queue a step on all stages; each begins when the one before is over."""

        def on_end(work: Work, now: float) -> None:
            stage = work.stage - self._first
            sent.compute_us.append(round(now * _MICRO) - round(work.begin_s * _MICRO))
            measured = self._within(work.begin_s, now) / max(now - work.begin_s, 1e-12)
            busy[work.stage] += work.seconds * measured
            if sent.tokens or stage == self._stages - 1:
                self._events.push(now + self._head_s, self._on_answer, stage, sent)
            if stage < self._stages - 1:
                ready = max(arrives, self._handed_on(sent, stage, now))
                shared.set_ready(works[stage + 1], ready, now)
                return
            sent.sampled_at = now
            for waiting, ready, more_s in self._awaited.pop(sent.step, ()):
                shared.set_ready(waiting, max(ready, now + more_s), now)

        works = [shared.add(self._first + stage, each, on_end) for stage, each in enumerate(seconds)]
        if after is None or after.sampled_at < inf:
            known = 0.0 if after is None else after.sampled_at + back_s
            shared.set_ready(works[0], max(arrives, known), arrives - self._head_s)
        else:
            self._awaited.setdefault(after.step, []).append((works[0], arrives, back_s))

    def _handed_on(self, sent: Sent, stage: int, end: float) -> float:
        """Return when the activations of a step that ended on a stage have arrived behind it."""
        latency_s, occupied_s = self._costs.hop_s(stage, sent.tokens)
        starts = max(end, self._link_free_at[stage])
        self._link_free_at[stage] = starts + occupied_s
        self.outcome.link_s[self._first + stage] += self._within(starts, starts + occupied_s)
        return starts + latency_s

    def _within(self, begin: float, end: float) -> float:
        """Return the seconds of a span that are measured."""
        return max(0.0, min(end, self.outcome.end_s) - max(begin, self.outcome.begin_s))


# ---- replicas


@dataclass(frozen=True)
class Replica:
    """An instance with its predicted steps and its KV memory."""

    plan: Plan
    costs: StepTable
    kv: Mapping[RankId, RankKv]

    @property
    def stages(self) -> int:
        return len(self.plan.stages)

    def room(self, tokens: int) -> int:
        """Return the number of requests of `tokens` tokens whose KV fits at the same time."""
        return min(
            (rank.limit_bytes // max(1, sequence_bytes(rank, tokens)) for rank in self.kv.values()),
            default=MOST_RUNNING,
        )


class Shares(NamedTuple):
    """Machines that compute several stages: how many workers each runs at once, and of each stage its workers by machine."""

    most: tuple[float, ...]
    parts: tuple[Mapping[int, float], ...]

    @property
    def slower(self) -> float:
        """Factor by which a step takes longer while all stages compute."""
        workers = Counter[int]()
        for parts in self.parts:
            workers.update(parts)
        return max([1.0, *(workers[machine] / most for machine, most in enumerate(self.most))])


@dataclass(frozen=True)
class Replicas:
    """Replicas of the same kind: each is one instance, or several that slow each other down on their machines."""

    members: tuple[Replica, ...]
    """Instances of one of them."""
    names: tuple[tuple[tuple[str, ...], ...], ...]
    """Machines of each stage, of one instance after the other, for each replica."""
    shares: Shares
    """Shared machines of these stages; without machines if none has more stages than it runs at once."""
    kind: object
    """Value that replicas have in common whose steps take as long."""
    unlike: tuple[Replicas, ...] = ()
    """Replicas of other kinds that these consist of; none if they are of one kind."""

    @property
    def stages(self) -> int:
        """Number of stages of the longest instance."""
        return max(member.stages for member in self.members)

    @property
    def count(self) -> int:
        return len(self.names)

    @property
    def instances(self) -> int:
        """Number of all instances."""
        return self.count * len(self.members)

    @property
    def tokens_per_s(self) -> float:
        """Predicted throughput of one of them."""
        return sum(member.plan.prediction.tokens_per_s for member in self.members)

    def machine_seconds(self, each: Sequence[Sequence[float]]) -> list[dict[int, float]]:
        """Return the seconds for which each instance takes shared machines, of all that they can compute."""
        found, stage = list[dict[int, float]](), 0
        for seconds in each:
            loads = dict[int, float]()
            for one in seconds:
                for machine, part in self.shares.parts[stage].items():
                    loads[machine] = loads.get(machine, 0.0) + one * part / self.shares.most[machine]
                stage += 1
            found.append(loads)
        return found


def replicas_of(
    model: ModelProfile, cluster: ClusterProfile, request: PlanRequest, plans: Sequence[Plan]
) -> list[Replicas]:
    """Return the replicas of these plans by kind: with the same layers on alike machines and links.

    Instances on one machine have equal parts of its memory. Those that also slow each other down there are one replica.
    """
    instances = Counter(name for plan in plans for name in {rank.node for rank in _ranks(plan)})
    nodes = {
        node.name: replace(node, memory_bytes=node.memory_bytes // max(1, instances[node.name]))
        for node in cluster.nodes
    }
    parted = replace(cluster, nodes=tuple(nodes.values()))
    kinds: dict[object, list[Sequence[Plan]]] = {}
    for together in _together(nodes, plans):
        places = {name: place for place, name in enumerate(dict.fromkeys(_names(together)))}
        alike = tuple(likeness(parted, plan) for plan in together)
        kinds.setdefault((alike, tuple(places[name] for name in _names(together))), []).append(together)
    return [_replicas(model, parted, request, kind, members) for kind, members in kinds.items()]


def _ranks(plan: Plan) -> Iterator[RankPlan]:
    return chain.from_iterable(stage.ranks for stage in plan.stages)


def _names(plans: Sequence[Plan]) -> Iterator[str]:
    return (rank.node for plan in plans for rank in _ranks(plan))


def _workers(nodes: Mapping[str, NodeProfile], plan: Plan) -> list[Counter[str]]:
    """Return the number of workers of each stage by machine, at most as many as it runs at once."""
    each = (Counter(rank.node for rank in stage.ranks) for stage in plan.stages)
    return [
        Counter({name: min(count, _most(nodes[name])) for name, count in workers.items()}) for workers in each
    ]


def _most(node: NodeProfile) -> int:
    """Return the number of workers that a machine runs at once; all of them share a CPU quota."""
    return 1 if node.cpu_quota is not None else node.workers_at_once


def _together(nodes: Mapping[str, NodeProfile], plans: Sequence[Plan]) -> list[list[Plan]]:
    """Return the plans in lists of those that share machines with more workers than these run at once."""
    total = sum((workers for plan in plans for workers in _workers(nodes, plan)), Counter[str]())
    crowded = {name for name, count in total.items() if count > _most(nodes[name])}
    found: list[tuple[set[str], list[Plan]]] = []
    for plan in plans:
        names = crowded.intersection(_names([plan]))
        joined = [each for each in found if each[0] & names] if names else []
        if not joined:
            found.append((names, [plan]))
            continue
        first, *others = joined
        for other in others:
            first[0].update(other[0])
            first[1].extend(other[1])
        first[0].update(names)
        first[1].append(plan)
        found = [each for each in found if not any(each is other for other in others)]
    return [members for _, members in found]


def _replicas(
    model: ModelProfile,
    cluster: ClusterProfile,
    request: PlanRequest,
    kind: object,
    alike: Sequence[Sequence[Plan]],
) -> Replicas:
    first, head = alike[0], cluster.nodes[0].name
    head_s = max(cluster.link(head, name).round_trip_s / 2 for name in _names(first))
    members: list[Replica] = []
    for plan in first:
        forecast, rooms = forecast_plan(model, cluster, request.demand, plan)
        kv = {
            RankId(stage, place): RankKv(*room)
            for stage, ranks in enumerate(rooms)
            for place, room in enumerate(ranks)
        }
        members.append(Replica(plan, StepTable(forecast, head_s), kv))
    names = tuple(
        tuple(tuple(rank.node for rank in stage.ranks) for plan in plans for stage in plan.stages)
        for plans in alike
    )
    return Replicas(tuple(members), names, _shares(cluster, first), (kind, head_s))


def _shares(cluster: ClusterProfile, plans: Sequence[Plan]) -> Shares:
    nodes = {node.name: node for node in cluster.nodes}
    stages = [workers for plan in plans for workers in _workers(nodes, plan)]
    names = list(dict.fromkeys(_names(plans)))
    if all(sum(workers[name] for workers in stages) <= _most(nodes[name]) for name in names):
        return Shares((), ({},) * len(stages))
    parts = tuple(
        {place: float(workers[name]) for place, name in enumerate(names) if workers[name]}
        for workers in stages
    )
    return Shares(tuple(float(_most(nodes[name])) for name in names), parts)
