"""Answers to what-if questions about a cluster: another machine or link, more context, fewer KV bits, other models. Pure.

Each case is planned by `place_replicas`, like the plan that would be loaded. Questions with many cases over many unlike machines
are planned by a quick search instead (`quick_plans`), which an answer says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, pairwise, takewhile

from mlx_ring.core.errors import PlanError
from mlx_ring.planner.cluster_file import with_machines
from mlx_ring.planner.memory_fit import least_bytes, most_of, room_at_most, room_for
from mlx_ring.planner.place import LoadedStages, plan_instances, plan_loaded, stages_of
from mlx_ring.planner.plan import WHY_LEFT_OUT, Plan, nodes_of, ranges_of, stage_texts
from mlx_ring.planner.profiles import ClusterProfile, ModelProfile, NodeProfile
from mlx_ring.planner.quick_plans import QuickSearch, search_work
from mlx_ring.planner.replicas import place_replicas, total_tokens_per_s
from mlx_ring.planner.request import USUAL_CONTEXT, Demand, Objective, PlanRequest, request_within
from mlx_ring.planner.search import MOST_NODES

_SHORTEST = 1024
_ROW_PLANS, _CURVE_PLANS = 5, 18
"""Number of plans for a row, and for the curves of a case."""
_MOST_WORK, _LEAST_WORK = 150, 2
"""Work up to which the planner's own search is used, about a second; and the work of one machine, where both find the same."""
_HALVINGS = 3
"""How often the fastest number of users is compared with others beside it."""
_FEW_CASES, _MANY_TIMES = 8, 4
"""Number of cases up to which the quick search looks farther; multiple of one user's speed that else is fast enough."""
_QUICK = "These cases are many for the planner's own search. A quick search planned them, whose plans are 1 % slower on average."


@dataclass(frozen=True, slots=True)
class Outcome:
    """Predictions for one model on one cluster."""

    label: str
    """Case: the cluster, the model or the bits of the KV cache, as far as the question varies them."""
    model: str
    fits: bool
    why: str
    """Reason why it does not fit; empty if it does."""
    context_tokens: int
    """Context of each user."""
    kv_bits: int
    prompt_tokens: int
    """Length of a request's prompt."""
    answer_tokens: int
    """Length of its answer."""
    memory_bytes: int = 0
    """Weights and KV cache of the plan's users, and if it fits, also working memory, all machines together."""
    at_once: int = 1
    """Number of requests that are sent at once; the three times below are those of each, or of the last one."""
    tokens_per_s: float = 0.0
    """Speed of one stream. This field and the following are 0 or empty if it does not fit."""
    tokens_per_s_range: tuple[float, float] = (0.0, 0.0)
    first_token_s: float = 0.0
    """Seconds to the first token."""
    first_token_s_range: tuple[float, float] = (0.0, 0.0)
    request_s: float = 0.0
    """Seconds of the whole request."""
    request_s_range: tuple[float, float] = (0.0, 0.0)
    is_measured: bool = False
    """True if each machine with layers was measured; the ranges are then those of measured machines."""
    users: int = 0
    """Number of users whose whole context fits into the memory at the same time, at most `MOST_USERS`."""
    users_tokens_per_s: float = 0.0
    """Highest speed of several of these users together; 0 if no plan for them is found."""
    fastest_users: int = 0
    """Number of users with this speed: fewer than all, if the memory of the last ones slows the others down."""
    stages: tuple[str, ...] = ()
    """Machines of each stage, and its layers; of the plan for the users with the highest speed, if throughput counts."""
    left_out: tuple[str, ...] = ()
    """Machines without layers, each with the reason."""


@dataclass(frozen=True, slots=True)
class Point:
    """Point of a curve."""

    at: int
    """Context in tokens, or number of users."""
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Curves:
    """Predicted speeds of the last case that fits."""

    label: str
    by_context: tuple[Point, ...]
    """Speed of one user, by the context."""
    by_users: tuple[Point, ...]
    """Speed of all users together, by their number."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer to a what-if question: one row for each case."""

    outcomes: tuple[Outcome, ...]
    curves: Curves | None
    """None unless they are asked for, or if nothing fits."""
    remarks: tuple[str, ...] = ()
    """Sentences on what the question's names mean, and on how its cases were planned."""


@dataclass(frozen=True, slots=True)
class Question:
    """Cases to compare on a cluster. Without `added`, the cluster as it is counts alone."""

    added: tuple[str, ...] = ()
    """Machines to add, by the names of the catalogue."""
    link: str | None = None
    """Name of the link between added machines and all others; None for the cluster's usual link."""
    context_tokens: int | None = None
    """None for 8,192, or the model's longest context if that is less, or what given lengths need."""
    kv_bits: tuple[int, ...] = (16,)
    with_curves: bool = False
    request: PlanRequest = field(default_factory=lambda: PlanRequest(Demand(USUAL_CONTEXT, 1)))
    """Strategy, objective, users and lengths of the request; context, bits and number of sequences are replaced.
    Its lengths are given if `typical_tokens` is."""
    count: int | None = None
    """Number of replicas; None for one, or the best number for throughput."""
    loaded: tuple[LoadedStages, ...] = ()
    """Instances that the cluster has loaded, of which "now" consists; without any, "now" is planned too."""


NamedModel = tuple[str, ModelProfile]
"""A model with its label."""


class _Planner:
    """Plans for a cluster and its number of replicas: by the planner itself, or by the quick search if they are many."""

    def __init__(self, cluster: ClusterProfile, count: int | None, *, is_quick: bool, is_brief: bool) -> None:
        self.cluster = cluster
        self.is_quick = is_quick
        self.is_brief = is_brief
        self.count = count
        self._search = QuickSearch(cluster, is_brief=is_brief) if is_quick else None

    def plans(self, model: ModelProfile, request: PlanRequest, near: Sequence[Plan] = ()) -> Sequence[Plan]:
        """Return the plan of each replica; the quick search also tries plans that are `near`.

        Raises:
            PlanError: there is none.
        """
        if len(self.cluster.nodes) == 1 and (self.count or 1) > 1:
            return plan_instances(model, self.cluster, request, self.count or 1)
        try:
            if self._search is not None:
                return self._search.replicas(model, request, self.count, near)
        except PlanError:
            # The quick search gives each replica but one a machine that holds it whole.
            if len(self.cluster.nodes) > MOST_NODES or self.count in (None, 1):
                raise
        return place_replicas(model, self.cluster, request, self.count)

    def among(self, nodes: tuple[NodeProfile, ...]) -> _Planner:
        """Return the planner for some of the machines."""
        part = replace(self.cluster, nodes=nodes)
        return _Planner(part, self.count, is_quick=self.is_quick, is_brief=self.is_brief)


@dataclass(frozen=True, slots=True)
class _Case:
    """A model on a cluster."""

    model: ModelProfile
    planner: _Planner
    loaded: tuple[LoadedStages, ...] = ()

    @property
    def cluster(self) -> ClusterProfile:
        return self.planner.cluster

    def plans(self, request: PlanRequest, near: Sequence[Plan] = ()) -> Sequence[Plan]:
        """Return the plan of each replica, or that of each loaded instance with its part of the sequences.

        Raises:
            PlanError: there is none, or the loaded stages do not fit.
        """
        if self.loaded:
            return plan_loaded(self.model, self.cluster, request, self.loaded)
        return self.planner.plans(self.model, request, near)

    def tried(self, request: PlanRequest, near: Sequence[Plan] = ()) -> Sequence[Plan]:
        """Return the plans, none if there are none."""
        try:
            return self.plans(request, near)
        except PlanError:
            return ()

    def room(self, request: PlanRequest) -> int:
        """Return how many users' sequences of the request's context have room at the same time; at least one has."""
        if not self.loaded and self.planner.count in (None, 1):
            return room_for(self.model, self.cluster, request, is_quick=self.planner.is_quick)

        def are_held(users: int) -> bool:
            return bool(self.tried(replace(request, demand=replace(request.demand, sequences=users))))

        return most_of(are_held, room_at_most(self.model, self.cluster, request.demand))

    def among(self, plans: Sequence[Plan]) -> _Case | None:
        """Return the case with only the machines of these plans; None if these are all."""
        used = nodes_of(plans)
        nodes = tuple(node for node in self.cluster.nodes if node.name in used)
        if self.loaded or len(nodes) == len(self.cluster.nodes):
            return None
        return replace(self, planner=self.planner.among(nodes))

    def unused(self, plans: Sequence[Plan], objective: Objective) -> Iterator[str]:
        """Yield the machines without layers, each with the reason."""
        used, why = nodes_of(plans), {left.node: left.why for plan in plans for left in plan.left_out}
        usual = "not in the loaded plan" if self.loaded else WHY_LEFT_OUT[objective]
        for node in self.cluster.nodes:
            if node.name not in used:
                yield f"{node.name}: {usual if self.loaded else why.get(node.name, usual)}"


def what_if(
    models: Iterable[NamedModel],
    cluster: ClusterProfile,
    question: Question,
    is_stopped: Callable[[], bool] = lambda: False,
    remarks: Sequence[str] = (),
) -> Answer:
    """Answer a question for one or several models; once `is_stopped` is true, only with the cases so far.

    Args:
        models: models with their labels.
        cluster: machines and links; without machines, those that are added count alone.
        question: cases to compare.
        is_stopped: function that returns True once nobody waits for the answer.
        remarks: sentences on the models.

    Raises:
        ConfigError: a machine or a link is unknown, the context is not positive, or it is too short for the request.
    """
    named = list(models)
    clusters = list(_clusters(cluster, question))
    rows = len(named) * len(question.kv_bits) * (_ROW_PLANS + _CURVE_PLANS * question.with_curves)
    work = rows * sum(search_work(machines) for _, machines in clusters)
    is_quick = question.request.strategy == "auto" and work > _MOST_WORK
    is_brief = is_quick and len(named) * len(question.kv_bits) * len(clusters) > _FEW_CASES
    is_brief |= question.request.strategy == "hybrid"
    planners = [
        (label, _Planner(machines, question.count, is_quick=is_quick, is_brief=is_brief))
        for label, machines in clusters
    ]
    outcomes: list[Outcome] = []
    fitting: tuple[Outcome, _Case, PlanRequest] | None = None
    remarks = (
        *remarks,
        *(
            [_QUICK]
            if is_quick and any(search_work(machines) > _LEAST_WORK for _, machines in clusters)
            else ()
        ),
    )
    for model_label, model in named:
        request = request_within(question.request, model.context_tokens, question.context_tokens)
        for bits in question.kv_bits:
            asked, near, best = replace(request, demand=replace(request.demand, kv_bits=bits)), (), None
            for cluster_label, planner in planners:
                if is_stopped():
                    return Answer(tuple(outcomes), None, remarks)
                parts = [
                    model_label if len(named) > 1 else "",
                    cluster_label if len(clusters) > 1 or not cluster.nodes else "",
                    f"{bits}-bit KV" if len(question.kv_bits) > 1 else "",
                ]
                label = ", ".join(filter(None, parts)) or model_label
                case = _Case(model, planner, question.loaded if planner.cluster is cluster else ())
                found, near, best = _outcome((label, model_label), case, asked, near, best)
                outcomes.append(found)
                if found.fits:
                    fitting = (found, case, asked)
    curves = _curves(*fitting) if fitting is not None and question.with_curves else None
    return Answer(tuple(outcomes), curves, remarks)


def _clusters(cluster: ClusterProfile, question: Question) -> Iterator[tuple[str, ClusterProfile]]:
    if cluster.nodes:
        yield "now", cluster
    if question.added:
        over = f" over {question.link}" if question.link else ""
        yield (
            f"{'with ' if cluster.nodes else ''}{' and '.join(question.added)}{over}",
            with_machines(cluster, question.added, question.link),
        )


def _outcome(
    labels: tuple[str, str], case: _Case, request: PlanRequest, near: Sequence[Plan], before: _Together | None
) -> tuple[Outcome, Sequence[Plan], _Together | None]:
    """Return the predictions of a case, its plans and its fastest users; `labels` are those of the case and of its model."""
    model, demand = case.model, request.demand
    plain = Outcome(
        label=labels[0],
        model=labels[1],
        fits=False,
        why="",
        context_tokens=demand.context_tokens,
        kv_bits=demand.kv_bits,
        prompt_tokens=request.prompt_tokens,
        answer_tokens=request.answer_tokens,
        at_once=request.users,
    )
    try:
        plans = case.plans(request, near)
    except PlanError as error:
        return replace(plain, why=str(error), memory_bytes=least_bytes(model, demand)), (), None
    users = max(request.users, case.room(_for_users(request, 1)))
    best = _fastest(case, request, plans, users, before)
    if request.objective == "throughput" and best.plans:
        # One plan for all of them is what the objective asks for.
        plans = best.plans if request.users == 1 else _with_users(case, request, best)
    predicted = max((plan.prediction for plan in plans), key=lambda each: each.request_s)
    is_measured = all(node.is_measured for node in case.cluster.nodes if node.name in nodes_of(plans))
    ranges = ranges_of(predicted, is_measured=is_measured)
    found = replace(
        plain,
        fits=True,
        memory_bytes=sum(stage.memory_bytes for plan in plans for stage in plan.stages),
        tokens_per_s=1 / predicted.token_s,
        tokens_per_s_range=ranges.tokens_per_s,
        first_token_s=predicted.first_token_s,
        first_token_s_range=ranges.first_token_s,
        request_s=predicted.request_s,
        request_s_range=ranges.request_s,
        is_measured=is_measured,
        users=users,
        users_tokens_per_s=best.tokens_per_s,
        fastest_users=best.users,
        stages=tuple(stage_texts(plans)),
        left_out=tuple(case.unused(plans, request.objective)),
    )
    return found, plans, best


# ---- users


@dataclass(frozen=True, slots=True)
class _Together:
    """Speed of several users together."""

    users: int
    plans: Sequence[Plan]
    tokens_per_s: float


def _together(case: _Case, request: PlanRequest, users: int, near: Sequence[Plan] = ()) -> _Together:
    """Return the speed of so many users together; 0 if no plan for them is found."""
    plans = case.tried(_for_users(request, users), near)
    speed = total_tokens_per_s(plans, users) if plans else 0.0
    return _Together(users, plans, speed)


def _fastest(
    case: _Case, request: PlanRequest, plans: Sequence[Plan], users: int, before: _Together | None
) -> _Together:
    """Return the number of users with the highest speed together.

    Memory for the last few users may need slow machines. So those that fewer users need, or that were best in the case
    `before`, are also filled alone.
    """
    tried = [_together(case, request, users)]
    fewer, falls = users // 2, 0
    while fewer and falls <= 1:
        tried.append(_together(case, request, fewer))
        falls += tried[-1].tokens_per_s <= tried[-2].tokens_per_s
        fewer = 0 if case.planner.is_brief else fewer // 2
    if not case.planner.is_brief:
        tried += _between(case, request, tried)
    if before is not None and before.plans:
        same = case.among(before.plans) or case
        tried.append(_together(same, request, min(users, before.users), before.plans))
    best = max(tried, key=lambda each: each.tokens_per_s)
    many = _MANY_TIMES / max(plan.prediction.token_s for plan in plans)
    if case.planner.is_brief and best.tokens_per_s > many:
        return best
    seen = list[set[str]]()
    for some in (plans, best.plans if best.users < users else ()):
        part = case.among(some) if some else None
        if part is not None and nodes_of(some) not in seen:
            seen.append(nodes_of(some))
            tried.append(_together(part, request, part.room(_for_users(request, 1)), some))
    return max(tried, key=lambda each: each.tokens_per_s)


def _between(case: _Case, request: PlanRequest, tried: Sequence[_Together]) -> Iterator[_Together]:
    """Yield the speeds of numbers of users between the best one and its neighbours."""
    known = {each.users: each for each in tried}
    for _ in range(_HALVINGS):
        numbers = sorted(known)
        place = numbers.index(max(numbers, key=lambda number: known[number].tokens_per_s))
        for one, other in pairwise(numbers[max(0, place - 1) : place + 2]):
            if (middle := (one + other) // 2) not in known:
                known[middle] = _together(case, request, middle)
                yield known[middle]


def _with_users(case: _Case, request: PlanRequest, together: _Together) -> Sequence[Plan]:
    """Return the plans of several users, predicted for as many requests at once as the question has."""
    demand = replace(request.demand, sequences=max(together.users, request.users))
    return plan_loaded(
        case.model, case.cluster, replace(request, demand=demand), list(map(stages_of, together.plans))
    )


def _for_users(request: PlanRequest, users: int) -> PlanRequest:
    return replace(request, demand=replace(request.demand, sequences=users), objective="throughput", users=1)


def _curves(outcome: Outcome, case: _Case, request: PlanRequest) -> Curves:
    return Curves(
        outcome.label,
        tuple(_by_context(case, request)),
        tuple(
            Point(users, _together(case, request, users).tokens_per_s)
            for users in sorted(
                {
                    *takewhile(lambda one: one < outcome.users, (1 << shift for shift in count())),
                    outcome.users,
                    outcome.fastest_users,
                }
            )
        ),
    )


def _by_context(case: _Case, request: PlanRequest) -> Iterator[Point]:
    # A point shows a token behind half of its context, whatever the request's lengths.
    unknown = replace(request.demand, typical_tokens=None)
    for context in takewhile(
        lambda one: one <= case.model.context_tokens, (_SHORTEST << shift for shift in count())
    ):
        try:
            plans = case.plans(replace(request, demand=replace(unknown, context_tokens=context)))
        except PlanError:
            return
        yield Point(context, min(1 / plan.prediction.token_s for plan in plans))
