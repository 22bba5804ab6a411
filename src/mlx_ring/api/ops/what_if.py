"""`/cluster/what-if`: predictions for the running cluster with other machines, links, contexts or models."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from typing import Annotated, Literal

from pydantic import Field
from pydantic_core import to_jsonable_python
from starlette.requests import Request
from starlette.routing import Router

from mlx_ring.api.context import ApiContext
from mlx_ring.api.openapi import JsonObject, RouteDoc, documented_get, documented_post
from mlx_ring.api.request_body import Body
from mlx_ring.api.streaming import JsonAnswer, while_connected
from mlx_ring.core.errors import ConfigError, NotReady, RequestError
from mlx_ring.planner.catalogue import machine_names, named_links
from mlx_ring.planner.known_models import find_known_model, popular_models
from mlx_ring.planner.profiles import ClusterProfile
from mlx_ring.planner.what_if import MOST_ADDED, Answer, NamedModel, Question, link_named, sizes_of, what_if

_FULL_PRECISION: tuple[Literal[16]] = (16,)


class WhatIfChoices(JsonObject):
    """Names that a question may use."""

    machines: list[str]
    """Machines that can be added."""
    links: list[str]
    models: list[str]
    """Popular models; others have short names too."""


class WhatIfRequest(Body):
    """Question about the running cluster with other machines, links, contexts or models."""

    model: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    """Served model, or a short name such as `llama-70b`; the default model if it is missing."""
    what_fits: bool = False
    """Answer for popular models instead."""
    add: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=100)]], Field(max_length=MOST_ADDED)
    ] = Field(default_factory=list)
    """Machines to add, such as `m3-ultra-512`."""
    link: Annotated[str, Field(max_length=100)] | None = None
    """Link of these machines to all others, such as `tb5-rdma`."""
    context_tokens: Annotated[int, Field(ge=1, le=10**8)] | None = None
    """Context of each user."""
    kv_bits: Annotated[list[Literal[4, 8, 16]], Field(min_length=1, max_length=3)] = Field(
        default_factory=lambda: list(_FULL_PRECISION)
    )
    """Bits of the KV cache; several are compared."""
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
        }

    async def answer_in_turn(fields: WhatIfRequest) -> Answer:
        async with one_at_a_time:
            is_done = threading.Event()
            try:
                return await asyncio.to_thread(_answer, context, fields, is_done.is_set)
            finally:
                # If the client has left, the thread stops after the present case.
                is_done.set()

    async def ask(request: Request) -> JsonAnswer[Answer]:
        fields = await context.read(request, WhatIfRequest)
        answer = await while_connected(request.receive, answer_in_turn(fields))
        return JsonAnswer(to_jsonable_python(answer))

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


def _answer(context: ApiContext, fields: WhatIfRequest, is_stopped: Callable[[], bool]) -> Answer:
    _check(fields)
    machines = context.catalog.machines()
    if not machines.nodes:
        raise NotReady(
            "No machine of the cluster is measured: run `mlx-ring profile` on the head's machine, and start the server again."
        )
    question = Question(
        added=tuple(fields.add),
        link=fields.link,
        context_tokens=fields.context_tokens,
        kv_bits=tuple(dict.fromkeys(fields.kv_bits)),
        with_curves=fields.curves,
    )
    try:
        return what_if(_models(context, fields, machines), machines, question, is_stopped)
    except ConfigError as error:
        raise RequestError(str(error), param="add") from error


def _models(context: ApiContext, fields: WhatIfRequest, machines: ClusterProfile) -> Iterable[NamedModel]:
    """Return the models of a question with their labels: popular ones, a served one, or one by a short name."""
    if fields.what_fits:
        return ((known.name, sizes_of(known.folder, known.name, machines)) for known in popular_models())
    served = [model for model in context.catalog.models if fields.model in (model.model_id, *model.aliases)]
    if fields.model is None or served:
        model = served[0] if served else context.default
        return [(model.model_id, context.catalog.sizes(model, machines))]
    known = find_known_model(fields.model)
    return [(known.name, sizes_of(known.folder, known.name, machines))]
