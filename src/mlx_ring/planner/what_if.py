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
from mlx_ring.planner.place import place
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
    fits: bool
    why: str
    """Reason why it does not fit; empty if it does."""
    context_tokens: int
    """Context of each user, and length of the prompt of `first_token_s`."""
    kv_bits: int
    memory_bytes: int = 0
    """Weights and KV cache of one user, and if it fits, also working memory, all machines together."""
    tokens_per_s: float = 0.0
    """Speed of one user alone. This field and the next are 0 or empty if it does not fit."""
    tokens_per_s_range: tuple[float, float] = (0.0, 0.0)
    first_token_s: float = 0.0
    """Seconds to the first token of a prompt that fills the context."""
    first_token_s_range: tuple[float, float] = (0.0, 0.0)
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
    """None for 8,192, or the model's longest context if that is less."""
    kv_bits: tuple[int, ...] = (16,)
    with_curves: bool = False
    request: PlanRequest = field(default_factory=lambda: PlanRequest(Demand(USUAL_CONTEXT, 1)))
    """Strategy and objective of the plans; its demand and prompt are replaced."""


NamedModel = tuple[str, ModelProfile]
"""A model with its label."""


def what_if(
    models: Iterable[NamedModel],
    cluster: ClusterProfile,
    question: Question,
    is_stopped: Callable[[], bool] = lambda: False,
) -> Answer:
    """Answer a question for one or several models; once `is_stopped` is true, only with the cases so far.

    Raises:
        ConfigError: a machine or a link is unknown, or the context is not positive.
    """
    clusters = list(_clusters(cluster, question))
    outcomes: list[Outcome] = []
    fitting: tuple[Outcome, ModelProfile, ClusterProfile] | None = None
    named = list(models)
    for model_label, model in named:
        for cluster_label, machines in clusters:
            for bits in question.kv_bits:
                if is_stopped():
                    return Answer(tuple(outcomes), None)
                parts = [
                    model_label if len(named) > 1 else "",
                    cluster_label if len(clusters) > 1 else "",
                    f"{bits}-bit KV" if len(question.kv_bits) > 1 else "",
                ]
                label = ", ".join(filter(None, parts)) or model_label
                found = _outcome(label, model, machines, question, bits)
                outcomes.append(found)
                if found.fits:
                    fitting = (found, model, machines)
    curves = _curves(*fitting, question) if fitting is not None and question.with_curves else None
    return Answer(tuple(outcomes), curves)


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
    """Return a link of the catalogue; one for collectives only counts as trusted. None stays None.

    Raises:
        ConfigError: it is unknown.
    """
    if name is None:
        return None
    found = named_links().get(name)
    if found is None:
        raise ConfigError(f"The link {name} is unknown; known links are {', '.join(named_links())}.")
    return replace(found, trusted=found.is_mesh)


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


def _outcome(
    label: str, model: ModelProfile, cluster: ClusterProfile, question: Question, kv_bits: int
) -> Outcome:
    context = question.context_tokens
    if context is None:
        context = min(USUAL_CONTEXT, model.context_tokens)
    if context < 1:
        raise ConfigError(f"The context is {context} tokens; it must be 1 or more.")
    demand = Demand(context, 1, kv_bits)
    request = replace(question.request, demand=demand, prompt_tokens=context)
    try:
        plan = place(model, cluster, request)
    except PlanError as error:
        least = model.weight_bytes + int(sum(held_kv_bytes(layer, model, demand) for layer in model.layers))
        return Outcome(
            label, fits=False, why=str(error), context_tokens=context, kv_bits=kv_bits, memory_bytes=least
        )
    predicted = plan.prediction
    users = room_for(model, cluster, _for_users(request, 1))
    return Outcome(
        label,
        fits=True,
        why="",
        context_tokens=context,
        kv_bits=kv_bits,
        memory_bytes=sum(stage.memory_bytes for stage in plan.stages),
        tokens_per_s=1 / predicted.token_s,
        tokens_per_s_range=_range(1 / predicted.token_s, "decode"),
        first_token_s=predicted.first_token_s,
        first_token_s_range=_range(predicted.first_token_s, "prefill"),
        users=users,
        users_tokens_per_s=_throughput(model, cluster, request, users),
        stages=tuple(_stages(plan)),
        left_out=tuple(f"{left.node}: {left.why}" for left in plan.left_out),
    )


def _range(value: float, kind: str) -> tuple[float, float]:
    factor = accuracy(kind)
    return value / factor, value * factor


def _stages(plan: Plan) -> Iterator[str]:
    for stage in plan.stages:
        yield f"{'+'.join(rank.node for rank in stage.ranks)} {stage.layers.start}-{stage.layers.end - 1}"


def room_for(model: ModelProfile, cluster: ClusterProfile, request: PlanRequest) -> int:
    """Return how many sequences of the request's context its strategy can place at the same time; at least one fits."""
    demand = replace(request.demand, sequences=1)
    per_sequence = sum(held_kv_bytes(layer, model, demand) for layer in model.layers)
    free = sum(node.usable_bytes for node in cluster.nodes) - model.weight_bytes
    good, bad = 1, min(MOST_USERS, max(1, int(free / max(per_sequence, 1.0)))) + 1
    while bad - good > 1:
        middle = (good + bad) // 2
        if _fits(model, cluster, replace(request, demand=replace(demand, sequences=middle))):
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


def _throughput(model: ModelProfile, cluster: ClusterProfile, request: PlanRequest, users: int) -> float:
    """Return the tokens per second of several users together; 0 if no plan for them is found."""
    try:
        return place(model, cluster, _for_users(request, users)).prediction.tokens_per_s
    except PlanError:
        return 0.0


def _for_users(request: PlanRequest, users: int) -> PlanRequest:
    return replace(request, demand=replace(request.demand, sequences=users), objective="throughput")


def _curves(outcome: Outcome, model: ModelProfile, cluster: ClusterProfile, question: Question) -> Curves:
    demand = Demand(outcome.context_tokens, 1, outcome.kv_bits)
    request = replace(question.request, demand=demand)
    return Curves(
        outcome.label,
        tuple(_by_context(model, cluster, request)),
        tuple(
            Point(users, _throughput(model, cluster, request, users))
            for users in sorted({*takewhile(lambda one: one < outcome.users, _doubled(1)), outcome.users})
        ),
    )


def _by_context(model: ModelProfile, cluster: ClusterProfile, request: PlanRequest) -> Iterator[Point]:
    for context in takewhile(lambda one: one <= model.context_tokens, _doubled(_SHORTEST)):
        try:
            plan = place(
                model, cluster, replace(request, demand=replace(request.demand, context_tokens=context))
            )
        except PlanError:
            return
        yield Point(context, 1 / plan.prediction.token_s)


def _doubled(first: int) -> Iterator[int]:
    value = first
    while True:
        yield value
        value *= 2
