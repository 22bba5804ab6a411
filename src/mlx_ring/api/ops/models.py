"""`/models/load` and `/models/unload`, which manage memory, and `/generate`, which continues a prompt."""

from __future__ import annotations

import ipaddress
import secrets
from typing import Annotated, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.routing import Router

from mlx_ring.api.context import ApiContext
from mlx_ring.api.generation import costs
from mlx_ring.api.openai.completions import Task, run_task
from mlx_ring.api.openai.models import describe
from mlx_ring.api.openai.sampling import Count, SamplingFields, finish_reason, sampling_params
from mlx_ring.api.openai.schemas import Costs, Model
from mlx_ring.api.openapi import RouteDoc, documented_post
from mlx_ring.api.request_body import Body
from mlx_ring.api.settings import ApiSettings
from mlx_ring.api.streaming import while_connected
from mlx_ring.core.errors import Refused

Name = Annotated[str, Field(min_length=1, max_length=4096)]


class LoadRequest(Body):
    model: Name
    """Model to load, as `mlx-ring serve` accepts it: a built-in name, a folder or GGUF file on the head's machine, or a hub id."""


class UnloadRequest(Body):
    model: Name
    force: bool = False
    """Unload the model even while it answers requests, which then end with an error."""


def routes(context: ApiContext) -> Router:
    router = Router()

    async def load(request: Request) -> Model:
        check_manager(request, context.settings)
        fields = await context.read(request, LoadRequest)
        model = await while_connected(request.receive, context.catalog.load(fields.model))
        return describe(context, model)

    async def unload(request: Request) -> Model:
        check_manager(request, context.settings)
        fields = await context.read(request, UnloadRequest)
        model = context.model(fields.model)
        await context.catalog.unload(model, force=fields.force)
        return describe(context, model)

    documented_post(
        router,
        "/models/load",
        load,
        LoadRequest,
        RouteDoc("Load a model and serve it from now on", Model, more_statuses=(409,)),
    )
    documented_post(
        router,
        "/models/unload",
        unload,
        UnloadRequest,
        RouteDoc("Free a model's memory until the next request for it", Model, more_statuses=(409,)),
    )
    _add_generate(router, context)
    return router


def check_manager(request: Request, settings: ApiSettings) -> None:
    """Check that the client may load and unload models.

    Clients on other machines need an API key, because a model may be any folder, or fill the disk.

    Raises:
        Refused: the server has no API keys, and the client is on another machine.
    """
    host = "" if request.client is None else request.client.host
    if not settings.api_keys and not is_loopback(host):
        raise Refused(
            f"Models are loaded and unloaded from another machine ({host}) only with an API key: "
            "start the server with --api-key."
        )


def is_loopback(host: str) -> bool:
    """Report whether an address is one of this machine's loopback interface."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


_DEFAULT_MAX_TOKENS = 50


class GenerateFields(SamplingFields):
    prompt: str
    max_tokens: Count = _DEFAULT_MAX_TOKENS


class Generated(Costs):
    """Continuation of a prompt."""

    id: str
    model: str
    text: str
    finish_reason: Literal["stop", "length"] | None


def _add_generate(router: Router, context: ApiContext) -> None:
    async def generate(request: Request) -> Generated:
        fields = await context.read(request, GenerateFields)
        service = context.model(fields.model)
        sampling = sampling_params(fields, service, max_tokens=fields.max_tokens, top_logprobs=None)
        engine = await context.answering(service)
        task = Task(
            id=f"gen-{secrets.token_hex(12)}",
            model=service.model_id,
            prompts=[await context.prompts.encode(service, fields.prompt)],
            sampling=[sampling],
            prompt_field="prompt",
        )
        answers = await while_connected(request.receive, run_task(engine, task))
        return {
            "id": task.id,
            "model": task.model,
            "text": answers[0].text,
            "finish_reason": finish_reason(answers[0].finish_reason),
            **costs(answers, 1),
        }

    documented_post(
        router,
        "/generate",
        generate,
        GenerateFields,
        RouteDoc("Continue a prompt", Generated, example={"prompt": "Once upon a time", "max_tokens": 16}),
    )
