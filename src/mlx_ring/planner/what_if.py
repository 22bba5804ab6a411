"""Answers to what-if questions about a cluster: another machine or link, more context, fewer KV bits, other models. Pure.

Each case is planned by `place`, like the plan that would be loaded. So an answer says what the planner would do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

from mlx_ring.core.errors import ConfigError, PlanError
from mlx_ring.models.model_folder import ModelFolder
from mlx_ring.planner.catalogue import accuracy, known_profile, named_links
from mlx_ring.planner.model_sizes import profile_config, profile_folder
from mlx_ring.planner.place import LoadedStages, place, plan_loaded
from mlx_ring.planner.plan import Plan
from mlx_ring.planner.profiles import ClusterProfile, ModelProfile
from mlx_ring.planner.request import Demand, PlanRequest
from mlx_ring.planner.stage_costs import held_kv_bytes
from mlx_ring.planner.strategies import METHODS, PipelineMethod
from mlx_ring.planner.tensor_search import SharedLayers
from mlx_ring.planner.timetable import Timetable
from mlx_ring.planner.weight_format import WeightFormat, read_formats
from mlx_ring.rpc.link_profile import LinkProfile

USUAL_CONTEXT = 8192
MOST_USERS = 4096
"""Users beyond which room is not counted further."""
MOST_ADDED = 16
"""Machines that one question may add."""
_SHORTEST = 1024


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
    """Weights and KV cache of one user, and if it fits, also working memory, all machines together."""
    tokens_per_s: float = 0.0
    """Speed of one user alone. This field and the following are 0 or empty if it does not fit."""
    tokens_per_s_range: tuple[float, float] = (0.0, 0.0)
    first_token_s: float = 0.0
    """Seconds to the first token of one user alone."""
    first_token_s_range: tuple[float, float] = (0.0, 0.0)
    request_s: float = 0.0
    """Seconds of the whole request of one user alone."""
    request_s_range: tuple[float, float] = (0.0, 0.0)
    is_measured: bool = False
    """True if each machine with layers was measured; the ranges are then those of measured machines."""
    users: int = 0
    """Number of users whose whole context fits into the memory at the same time, at most `MOST_USERS`."""
    users_tokens_per_s: float = 0.0
    """Speed of all these users together; 0 if no plan for them is found."""
    stages: tuple[str, ...] = ()
    """Machines of each stage, and its layers."""
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
    """Strategy, objective and lengths of the request; context, bits and numbers of sequences and users are replaced.
    Its lengths are given if `typical_tokens` is."""
    loaded: tuple[LoadedStages, ...] = ()
    """Instances that the cluster has loaded, of which "now" consists; without any, "now" is planned too."""


NamedModel = tuple[str, ModelProfile]
"""A model with its label."""


@dataclass(frozen=True, slots=True)
class _Case:
    """A model on a cluster."""

    model: ModelProfile
    cluster: ClusterProfile
    replicas: tuple[LoadedStages, ...] = ()

    def plans(self, request: PlanRequest) -> Sequence[Plan]:
        """Return the plan, or that of each loaded instance with its part of the sequences.

        Raises:
            PlanError: there is none, or the loaded stages do not fit.
        """
        if not self.replicas:
            return [place(self.model, self.cluster, request)]
        return plan_loaded(self.model, self.cluster, request, self.replicas)

    def unused(self, plans: Sequence[Plan]) -> Iterator[str]:
        """Yield the machines without layers, each with the reason."""
        if not self.replicas:
            yield from (f"{left.node}: {left.why}" for left in plans[0].left_out)
            return
        used = _nodes(plans)
        for node in self.cluster.nodes:
            if node.name not in used:
                yield f"{node.name}: the loaded plan does not use it"


def _nodes(plans: Sequence[Plan]) -> set[str]:
    return {rank.node for plan in plans for stage in plan.stages for rank in stage.ranks}


def what_if(
    models: Iterable[NamedModel],
    cluster: ClusterProfile,
    question: Question,
    is_stopped: Callable[[], bool] = lambda: False,
) -> Answer:
    """Answer a question for one or several models; once `is_stopped` is true, only with the cases so far.

    Raises:
        ConfigError: a machine or a link is unknown, the context is not positive, or it is too short for the request.
    """
    clusters = list(_clusters(cluster, question))
    outcomes: list[Outcome] = []
    fitting: tuple[Outcome, _Case, PlanRequest] | None = None
    named = list(models)
    for model_label, model in named:
        request = request_within(question.request, model.context_tokens, question.context_tokens)
        for cluster_label, machines in clusters:
            case = _Case(model, machines, question.loaded if machines is cluster else ())
            for bits in question.kv_bits:
                if is_stopped():
                    return Answer(tuple(outcomes), None)
                parts = [
                    model_label if len(named) > 1 else "",
                    cluster_label if len(clusters) > 1 else "",
                    f"{bits}-bit KV" if len(question.kv_bits) > 1 else "",
                ]
                label = ", ".join(filter(None, parts)) or model_label
                asked = replace(request, demand=replace(request.demand, kv_bits=bits))
                found = _outcome((label, model_label), case, asked)
                outcomes.append(found)
                if found.fits:
                    fitting = (found, case, asked)
    curves = _curves(*fitting) if fitting is not None and question.with_curves else None
    return Answer(tuple(outcomes), curves)


def request_within(request: PlanRequest, most_tokens: int, context_tokens: int | None) -> PlanRequest:
    """Return the request of one user with its context, in which prompt and answer have room.

    Without a context, it is 8,192 tokens, at most the model's, but at least what given lengths need. Lengths that are
    not given are shortened to the context.

    Args:
        request: the request; its lengths are given if its demand has `typical_tokens`.
        most_tokens: longest context of the model.
        context_tokens: context that is asked for, if any.

    Raises:
        ConfigError: given lengths need a longer context than is asked for, or it is not positive.
    """
    are_given = request.demand.typical_tokens is not None
    prompt, answer = request.prompt_tokens, request.answer_tokens
    context = min(USUAL_CONTEXT, most_tokens) if context_tokens is None else context_tokens
    if context_tokens is None and are_given:
        context = max(context, prompt + answer)
    if context < 1:
        raise ConfigError(f"The context is {context} tokens; it must be 1 or more.")
    if prompt + answer > context:
        if are_given:
            raise ConfigError(
                f"A prompt of {prompt} tokens and an answer of {answer} need a context of {prompt + answer}, "
                f"which is longer than {context}; give a longer context, or a shorter request."
            )
        answer = min(answer, max(1, context // 5))
        prompt = max(1, context - answer)
    demand = replace(request.demand, context_tokens=context, sequences=1)
    return replace(request, demand=demand, prompt_tokens=prompt, answer_tokens=answer, users=1)


def sizes_of(
    folder: ModelFolder, name: str, cluster: ClusterProfile, weights: WeightFormat | None = None
) -> ModelProfile:
    """Return a model's profile: that of `profile_folder`, without the forms that no machine of the cluster loads."""
    if weights is not None or folder.tensors or any(node.widens for node in cluster.nodes):
        return profile_folder(folder, name, weights)
    return profile_config(folder, name, read_formats(folder))


def with_machines(cluster: ClusterProfile, names: Sequence[str], link: str | None) -> ClusterProfile:
    """Return the cluster with more machines, each joined to all others by a named link.

    A mesh of RDMA carries only collectives, so it counts as trusted.

    Raises:
        ConfigError: a machine or the link is unknown, or too many are added.
    """
    if len(names) > MOST_ADDED:
        raise ConfigError(f"{len(names)} machines were added; add {MOST_ADDED} at most.")
    given = link_named(link)
    nodes, links = list(cluster.nodes), dict(cluster.links)
    for text in names:
        taken = {node.name for node in nodes}
        name = next(each for each in _numbered(text) if each not in taken)
        if given is not None:
            links |= {frozenset((name, other)): given for other in taken}
        nodes.append(known_profile(text, name))
    return replace(cluster, nodes=tuple(nodes), links=links)


def link_named(name: str | None) -> LinkProfile | None:
    """Return a link of the catalogue; None stays None.

    Raises:
        ConfigError: it is unknown.
    """
    if name is None:
        return None
    found = named_links().get(name)
    if found is None:
        raise ConfigError(f"The link {name} is unknown; known links are {', '.join(named_links())}.")
    return found


def _numbered(text: str) -> Iterator[str]:
    yield text
    yield from (f"{text}#{number}" for number in range(2, 10_000))


def _clusters(cluster: ClusterProfile, question: Question) -> Iterator[tuple[str, ClusterProfile]]:
    yield "now", cluster
    if question.added:
        over = f" over {question.link}" if question.link else ""
        yield (
            f"with {' and '.join(question.added)}{over}",
            with_machines(cluster, question.added, question.link),
        )


def _outcome(labels: tuple[str, str], case: _Case, request: PlanRequest) -> Outcome:
    """Return the predictions of a case; `labels` are those of the case and of its model."""
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
    )
    try:
        plans = case.plans(request)
    except PlanError as error:
        least = model.weight_bytes + int(sum(held_kv_bytes(layer, model, demand) for layer in model.layers))
        return replace(plain, why=str(error), memory_bytes=least)
    predicted = max((plan.prediction for plan in plans), key=lambda each: each.request_s)
    users = _room(case, _for_users(request, 1))
    is_measured = all(node.is_measured for node in case.cluster.nodes if node.name in _nodes(plans))
    decode, prefill = (_accuracy(kind, is_measured=is_measured) for kind in ("decode", "prefill"))
    answer_s = predicted.request_s - predicted.first_token_s
    return replace(
        plain,
        fits=True,
        memory_bytes=sum(stage.memory_bytes for plan in plans for stage in plan.stages),
        tokens_per_s=1 / predicted.token_s,
        tokens_per_s_range=_range(1 / predicted.token_s, decode),
        first_token_s=predicted.first_token_s,
        first_token_s_range=_range(predicted.first_token_s, prefill),
        request_s=predicted.request_s,
        request_s_range=(
            predicted.first_token_s / prefill + answer_s / decode,
            predicted.first_token_s * prefill + answer_s * decode,
        ),
        is_measured=is_measured,
        users=users,
        users_tokens_per_s=_throughput(case, request, users),
        stages=tuple(_stages(plans)),
        left_out=tuple(case.unused(plans)),
    )


def _accuracy(kind: str, *, is_measured: bool) -> float:
    """Return the factor by which predictions of a kind may be off."""
    return accuracy("measured" if is_measured else kind)


def _range(value: float, factor: float) -> tuple[float, float]:
    return value / factor, value * factor


def _stages(plans: Iterable[Plan]) -> Iterator[str]:
    for plan in plans:
        for stage in plan.stages:
            yield f"{'+'.join(rank.node for rank in stage.ranks)} {stage.layers.start}-{stage.layers.end - 1}"


def _room(case: _Case, request: PlanRequest) -> int:
    """Return how many users' sequences of the request's context have room in a case at the same time."""
    if not case.replicas:
        return room_for(case.model, case.cluster, request)

    def fits(users: int) -> bool:
        try:
            case.plans(replace(request, demand=replace(request.demand, sequences=users)))
        except PlanError:
            return False
        return True

    return _most(fits, _room_at_most(case.model, case.cluster, request.demand))


def room_for(model: ModelProfile, cluster: ClusterProfile, request: PlanRequest) -> int:
    """Return how many sequences of the request's context its strategy can place at the same time; at least one fits."""

    def fits(sequences: int) -> bool:
        demand = replace(request.demand, sequences=sequences)
        return _fits(model, cluster, replace(request, demand=demand))

    return _most(fits, _room_at_most(model, cluster, request.demand))


def _room_at_most(model: ModelProfile, cluster: ClusterProfile, demand: Demand) -> int:
    """Return the number of sequences that have room if the memory of all machines were one."""
    per_sequence = sum(held_kv_bytes(layer, model, replace(demand, sequences=1)) for layer in model.layers)
    free = sum(node.usable_bytes for node in cluster.nodes) - model.weight_bytes
    return min(MOST_USERS, max(1, int(free / max(per_sequence, 1.0))))


def _most(fits: Callable[[int], bool], most: int) -> int:
    """Return the largest number up to `most` that fits; 1 does."""
    good, bad = 1, most + 1
    while bad - good > 1:
        middle = (good + bad) // 2
        if fits(middle):
            good = middle
        else:
            bad = middle
    return good


def _fits(model: ModelProfile, cluster: ClusterProfile, request: PlanRequest) -> bool:
    """Return True if `place` makes a plan; the search for the best one is left out where memory alone decides."""
    try:
        method = METHODS[request.strategy]
        if isinstance(method, PipelineMethod) and method.fits(
            Timetable(model, cluster, request.demand), request
        ):
            return True
        if isinstance(method, PipelineMethod):
            search = SharedLayers(model, cluster, request)
            return method.chooses_nodes and search.is_possible and search.fits()
        place(model, cluster, request)
    except PlanError:
        return False
    return True


def _throughput(case: _Case, request: PlanRequest, users: int) -> float:
    """Return the tokens per second of several users together; 0 if no plan for them is found."""
    try:
        return sum(plan.prediction.tokens_per_s for plan in case.plans(_for_users(request, users)))
    except PlanError:
        return 0.0


def _for_users(request: PlanRequest, users: int) -> PlanRequest:
    return replace(request, demand=replace(request.demand, sequences=users), objective="throughput")


def _curves(outcome: Outcome, case: _Case, request: PlanRequest) -> Curves:
    return Curves(
        outcome.label,
        tuple(_by_context(case, request)),
        tuple(
            Point(users, _throughput(case, request, users))
            for users in sorted({*takewhile(lambda one: one < outcome.users, _doubled(1)), outcome.users})
        ),
    )


def _by_context(case: _Case, request: PlanRequest) -> Iterator[Point]:
    # A point shows a token behind half of its context, whatever the request's lengths.
    unknown = replace(request.demand, typical_tokens=None)
    for context in takewhile(lambda one: one <= case.model.context_tokens, _doubled(_SHORTEST)):
        try:
            plans = case.plans(replace(request, demand=replace(unknown, context_tokens=context)))
        except PlanError:
            return
        yield Point(context, min(1 / plan.prediction.token_s for plan in plans))


def _doubled(first: int) -> Iterator[int]:
    value = first
    while True:
        yield value
        value *= 2
