"""Predictions for the running cluster with other machines, links, contexts or models, and what they are made of.

`/cluster/what-if` plans here. `/cluster/planning` gives what a simulation needs to whoever runs one, because it takes
seconds of computing time, which answers need.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from pydantic_core import to_jsonable_python
from starlette.requests import Request
from starlette.routing import Router

from mlx_ring.api.context import ApiContext
from mlx_ring.api.openapi import JsonObject, RouteDoc, documented_get, documented_post
from mlx_ring.api.request_body import Body
from mlx_ring.api.service import ModelService
from mlx_ring.api.streaming import JsonAnswer, while_connected
from mlx_ring.core.errors import ConfigError, Conflict, ModelNotFound, NotReady, RequestError
from mlx_ring.models.model_source import describe_model
from mlx_ring.models.short_names import is_hub_id
from mlx_ring.planner.catalogue import machine_names, named_links
from mlx_ring.planner.cluster_file import MOST_ADDED, link_named, with_machines
from mlx_ring.planner.known_models import find_known_model, popular_models
from mlx_ring.planner.memory_fit import MOST_USERS
from mlx_ring.planner.model_sizes import sizes_of
from mlx_ring.planner.place import PlanningBasis
from mlx_ring.planner.profiles import ClusterProfile
from mlx_ring.planner.request import OBJECTIVES, USUAL_CONTEXT, Objective, PlanRequest
from mlx_ring.planner.what_if import Answer, NamedModel, Question, what_if

Tokens = Annotated[int, Field(ge=1, le=10**8)]
_NAMED = "served model, hub id, short name such as qwen3:8b, or number of parameters such as 70B-4bit"


class WhatIfChoices(JsonObject):
    """Names that a question may use."""

    machines: list[str]
    """Machines that can be added."""
    links: list[str]
    models: list[str]
    """Popular models; others have short names too."""
    objectives: list[Objective]
    """Objectives of the plans."""


_MOST_LETTERS = 200
"""Length of a model's name."""


class WhatIfRequest(Body):
    """Question about the running cluster with other machines, links, contexts or models."""

    model: Annotated[str, Field(min_length=1, max_length=_MOST_LETTERS)] | None = None
    """Served model, short name such as `qwen3:8b`, or hub id; the default model if it is missing."""
    what_fits: bool = False
    """Answer for popular models instead."""
    add: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=100)]], Field(max_length=MOST_ADDED)
    ] = Field(default_factory=list)
    """Machines to add, such as `m3-ultra-512`."""
    link: Annotated[str, Field(max_length=100)] | None = None
    """Link of these machines to all others, such as `tb5-rdma`."""
    context_tokens: Tokens | None = None
    """Context of each user."""
    prompt_tokens: Tokens | None = None
    """Prompt of the request whose time is minimized; the head's usual one if it is missing."""
    answer_tokens: Tokens | None = None
    """Answer of this request."""
    users: Annotated[int, Field(ge=1, le=MOST_USERS)] | None = None
    """Number of such requests at once; the head's usual one if it is missing."""
    optimize_for: Objective | None = None
    """Objective of the plans; the head's own if it is missing."""
    kv_bits: Annotated[list[Literal[4, 8, 16]], Field(min_length=1, max_length=3)] | None = None
    """Bits of the KV cache; several are compared. The head's own if they are missing."""
    curves: bool = False
    """Predict the speed over the context and over users, too."""


def routes(context: ApiContext) -> Router:
    router = Router()
    one_at_a_time = asyncio.Lock()

    async def choices(_: Request) -> WhatIfChoices:
        return {
            "machines": await asyncio.to_thread(machine_names),
            "links": list(named_links()),
            "models": await asyncio.to_thread(_popular_names),
            "objectives": list(OBJECTIVES),
        }

    async def answer_in_turn(fields: WhatIfRequest) -> Answer:
        async with one_at_a_time:
            is_done = threading.Event()
            try:
                problem = await _measure(context)
                return await asyncio.to_thread(_answer, context, fields, is_done.is_set, problem)
            finally:
                # If the client has left, the thread stops after the present case.
                is_done.set()

    async def ask(request: Request) -> JsonAnswer[Answer]:
        fields = await context.read(request, WhatIfRequest)
        answer = await while_connected(request.receive, answer_in_turn(fields))
        return JsonAnswer(to_jsonable_python(answer))

    async def planning(request: Request) -> JsonAnswer[PlanningBasis]:
        running = await asyncio.to_thread(context.catalog.running, context.default)
        problem = None if running.machines.nodes else await _measure(context)
        basis = await asyncio.to_thread(_planning_basis, context, request.query_params.get("model"), problem)
        return JsonAnswer(to_jsonable_python(basis))

    documented_get(
        router,
        "/cluster/planning",
        planning,
        RouteDoc(
            "Describe what plans are made of: a model's sizes, machines, links, loaded stages",
            PlanningBasis,
            query={
                "model": "Served model, short name such as qwen3:8b, or hub id. Default: the first served model."
            },
            more_statuses=(404, 409),
        ),
    )
    documented_get(
        router,
        "/cluster/what-if",
        choices,
        RouteDoc("List the machines, links and models that a what-if question may name", WhatIfChoices),
    )
    documented_post(
        router,
        "/cluster/what-if",
        ask,
        WhatIfRequest,
        RouteDoc(
            "Predict speeds and room for users with other machines, links, contexts or models",
            Answer,
            example={"add": ["m3-ultra-512"], "link": "tb5-rdma", "context_tokens": 4096},
            more_statuses=(409,),
        ),
    )
    return router


def _popular_names() -> list[str]:
    return [known.name for known in popular_models()]


def _check(fields: WhatIfRequest) -> None:
    """Raise `RequestError` for fields that contradict each other, or an unknown link."""
    if fields.link is not None and not fields.add:
        raise RequestError(f"link is {fields.link}, but no machine is added; give one in add.", param="link")
    if fields.model is not None and fields.what_fits:
        raise RequestError(f"what_fits lists popular models; leave {fields.model} out.", param="model")
    try:
        link_named(fields.link)
    except ConfigError as error:
        raise RequestError(str(error), param="link") from error


async def _measure(context: ApiContext) -> NotReady | None:
    """Measure the head's machine if nobody did, but not while it loads the model. Return why that must wait."""
    if isinstance(context.default.error, NotReady):
        return context.default.error
    try:
        await context.catalog.measure()
    except NotReady as error:
        return error
    return None


def _answer(
    context: ApiContext, fields: WhatIfRequest, is_stopped: Callable[[], bool], problem: NotReady | None
) -> Answer:
    _check(fields)
    served = _served(context, fields)
    running = context.catalog.running(served)
    models, remarks = _models(context, fields, served, running.machines)
    try:
        with_machines(running.machines, fields.add, fields.link)
    except ConfigError as error:
        raise RequestError(str(error), param="add") from error
    if not running.machines.nodes:
        if not fields.add:
            raise problem or _unmeasured(context)
        remarks = (*remarks, "No machine of the cluster is measured, so only the added ones count.")
    question = Question(
        added=tuple(fields.add),
        link=fields.link,
        context_tokens=fields.context_tokens,
        kv_bits=tuple(dict.fromkeys(fields.kv_bits or (running.request.demand.kv_bits,))),
        with_curves=fields.curves,
        request=_request(running.request, fields),
        count=running.count,
        loaded=running.replicas,
    )
    try:
        return what_if(models, running.machines, question, is_stopped, remarks)
    except ConfigError as error:
        raise RequestError(str(error), param="context_tokens") from error


def _planning_basis(context: ApiContext, name: str | None, problem: NotReady | None) -> PlanningBasis:
    if name is not None and len(name) > _MOST_LETTERS:
        raise RequestError(
            f"'model' has {len(name)} characters; give a name of at most {_MOST_LETTERS}.", param="model"
        )
    fields = WhatIfRequest(model=name or None)
    served = _served(context, fields)
    running = context.catalog.running(served)
    if not running.machines.nodes:
        raise problem or _unmeasured(context)
    models, remarks = _models(context, fields, served, running.machines)
    ((_, sizes),) = models
    return PlanningBasis.of(running, sizes, remarks)


def _unmeasured(context: ApiContext) -> Conflict:
    """Return the error if no machine can be measured: a retry does not help."""
    return Conflict(
        f"No machine of the cluster is measured: run `{context.settings.profile_command}` on the head's machine, which "
        "says why, and ask again."
    )


def _request(own: PlanRequest, fields: WhatIfRequest) -> PlanRequest:
    """Return the head's request for a plan, with the fields that the question gives."""
    answer = fields.answer_tokens or own.answer_tokens
    usual = max(1, USUAL_CONTEXT - answer) if fields.what_fits else own.prompt_tokens
    prompt = fields.prompt_tokens or usual
    is_given = fields.prompt_tokens is not None or fields.answer_tokens is not None
    # The head's own lengths are not shortened to the usual context.
    is_given |= fields.context_tokens is None and not fields.what_fits and prompt + answer > USUAL_CONTEXT
    return replace(
        own,
        objective=fields.optimize_for or own.objective,
        users=fields.users or own.users,
        prompt_tokens=prompt,
        answer_tokens=answer,
        demand=replace(own.demand, typical_tokens=prompt + answer // 2 if is_given else None),
    )


def _served(context: ApiContext, fields: WhatIfRequest) -> ModelService | None:
    """Return the served model of a question; None if it is about others."""
    if fields.what_fits:
        return None
    if fields.model is None:
        return context.default
    named = (model for model in context.catalog.models if fields.model in (model.model_id, *model.aliases))
    return next(named, None)


def _models(
    context: ApiContext, fields: WhatIfRequest, served: ModelService | None, machines: ClusterProfile
) -> tuple[Iterable[NamedModel], tuple[str, ...]]:
    """Return the models of a question with their labels, and how a name is read: popular ones, a served one, or another by its name.

    Raises:
        ModelNotFound: no model has this name, or the hub cannot be asked for its configuration.
    """
    if served is not None:
        return [(served.model_id, context.catalog.sizes(served, machines))], ()
    if fields.model is None:
        popular = popular_models()
        return ((known.name, sizes_of(known.folder, known.name, machines)) for known in popular), ()
    named = (local for local in context.catalog.local_models() if local.name == fields.model)
    if local := next(named, None):
        return [(local.name, sizes_of(local.folder, local.name, machines))], ()
    try:
        known = find_known_model(fields.model, _NAMED)
    except ModelNotFound:
        if not is_hub_id(fields.model) or Path(fields.model).exists():
            raise
        described = describe_model(fields.model)
        return [(described.name, sizes_of(described.folder, described.name, machines))], ()
    return [(known.name, sizes_of(known.folder, known.name, machines))], (known.remark,)
