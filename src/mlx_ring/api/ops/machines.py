"""Machines of the cluster: `/cluster/invite` lets one join, `/cluster/drain` takes its layers, `/cluster/readmit` allows them.

`/cluster/replan` moves a model to the best split for the machines as they are now.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic_core import to_jsonable_python
from starlette.requests import Request
from starlette.routing import Router

from mlx_ring.api.context import ApiContext
from mlx_ring.api.openapi import JsonObject, RouteDoc, documented_post
from mlx_ring.api.ops.models import client_host, is_loopback
from mlx_ring.api.ops.status import ProposalStatus
from mlx_ring.api.request_body import Body
from mlx_ring.api.service import Moved
from mlx_ring.api.streaming import JsonAnswer
from mlx_ring.core.errors import Refused

_JOIN_LIFE_S = 3600


class InviteRequest(Body):
    """Request for a join token. It has no fields."""


class JoinCommands(JsonObject):
    """Commands that join this cluster, each with another address of the head and the same token."""

    commands: list[str]
    expires_in_s: int
    """Life of the token, which one machine can use."""


class DrainRequest(Body):
    """Request to move all layers away from a machine."""

    lasts: ClassVar[bool] = True

    node: str
    """Name or id of the machine."""
    force: bool = False
    """True to take its layers even if no other machine has room for them. Answers then wait until one has."""


class ReadmitRequest(Body):
    """Request to let plans use a drained machine again."""

    lasts: ClassVar[bool] = True

    node: str
    """Name or id of the machine."""


class ReplanRequest(Body):
    """Request to move a model to the best split of its layers."""

    lasts: ClassVar[bool] = True

    model: str | None = None
    """Name of the model; only needed if several are served."""
    dry_run: bool = False
    """True to only return the best split."""
    pause: bool = False
    """True to load the model again if both splits do not fit together. Answers pause meanwhile."""


class MovedModel(JsonObject):
    """Move of an instance of a model."""

    model: str
    way: Literal["beside", "ranges", "after"]
    """`beside`: another instance was loaded beside it, and no answer paused. `ranges`: workers stayed, and loaded only
    the layers that they gained. `after`: answers paused while it was loaded again."""
    requests: int
    """Requests that moved with it."""
    seconds: float
    """Time of the move."""
    why: str | None
    """Reason why answers paused."""
    pause_s: float
    """Seconds for which answers paused, until the next split served."""
    loaded_bytes: int | None
    """With `ranges`, bytes of weights that workers loaded."""


class DrainedNode(JsonObject):
    """A machine without layers."""

    node: str
    moved: list[MovedModel]


class ReadmittedNode(JsonObject):
    """A machine that plans may use again."""

    node: str


class ReplannedModel(JsonObject):
    """The best split of a model's layers, and the move to it."""

    model: str
    proposal: ProposalStatus | None
    """The best split; null if the loaded one is as good."""
    moved: MovedModel | None
    """Null if nothing moved."""


def routes(context: ApiContext) -> Router:
    router = Router()

    async def invite(request: Request) -> JoinCommands:
        await context.read(request, InviteRequest)
        host = client_host(request)
        if not is_loopback(host):
            raise Refused(
                f"Another machine ({host}) cannot make join tokens: open this page on the head's machine, "
                "or run `mlx-ring token create` there."
            )
        return {"commands": list(context.catalog.join_commands(_JOIN_LIFE_S)), "expires_in_s": _JOIN_LIFE_S}

    documented_post(
        router,
        "/cluster/invite",
        invite,
        InviteRequest,
        RouteDoc(
            "Make a token with which one more machine can join, and the commands for it",
            JoinCommands,
            example={},
            more_statuses=(409,),
        ),
    )

    async def drain(request: Request) -> DrainedNode:
        body = await context.read(request, DrainRequest)
        _check_manager(context, request)
        moved = await context.catalog.moves.drain(body.node, force=body.force)
        return {
            "node": body.node,
            "moved": [*map(_moved, moved)],
        }

    documented_post(
        router,
        "/cluster/drain",
        drain,
        DrainRequest,
        RouteDoc(
            "Move all layers away from a machine, which gets none until it leaves; answers when they have moved",
            DrainedNode,
            example={"node": "studio"},
            more_statuses=(403, 409, 503),
        ),
    )

    async def readmit(request: Request) -> ReadmittedNode:
        body = await context.read(request, ReadmitRequest)
        _check_manager(context, request)
        await context.catalog.moves.readmit(body.node)
        return {"node": body.node}

    documented_post(
        router,
        "/cluster/readmit",
        readmit,
        ReadmitRequest,
        RouteDoc(
            "Let plans use a drained machine again",
            ReadmittedNode,
            example={"node": "studio"},
            more_statuses=(403, 409, 503),
        ),
    )

    async def replan(request: Request) -> JsonAnswer[ReplannedModel]:
        body = await context.read(request, ReplanRequest)
        _check_manager(context, request)
        model, replanning, moved = context.model(body.model), context.catalog.replanning, None
        if body.dry_run:
            proposal = await replanning.propose(model)
        else:
            proposal, moved = await replanning.replan(model, may_pause=body.pause)
        answer = ReplannedModel(
            model=model.model_id,
            proposal=proposal,
            moved=None if moved is None else _moved(moved),
        )
        return JsonAnswer(to_jsonable_python(answer))

    documented_post(
        router,
        "/cluster/replan",
        replan,
        ReplanRequest,
        RouteDoc(
            "Move a model to the best split of its layers for the machines as they are now; answers when it has moved",
            ReplannedModel,
            example={"dry_run": True},
            more_statuses=(403, 404, 409, 503),
        ),
    )
    return router


def _moved(moved: Moved) -> MovedModel:
    return {
        "model": moved.model,
        "way": moved.way,
        "requests": moved.requests,
        "seconds": round(moved.seconds, 3),
        "why": moved.why or None,
        "pause_s": round(moved.pause_s, 3),
        "loaded_bytes": moved.loaded_bytes,
    }


def _check_manager(context: ApiContext, request: Request) -> None:
    """Check that the client may move layers: on another machine, it needs an API key. Raises `Refused`."""
    if not context.settings.api_keys and not is_loopback(host := client_host(request)):
        raise Refused(
            f"Layers are moved from another machine ({host}) only with an API key: "
            "start the server with --api-key, or ask on the head's machine."
        )
