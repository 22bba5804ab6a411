"""Models in memory (`/models/load`, `/models/unload`) and on disk (`/models/pull`, `/models/delete`); `/generate`."""

from __future__ import annotations

import asyncio
import ipaddress
import secrets
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.routing import Router

from mlx_ring.api.context import ApiContext
from mlx_ring.api.dialect import event
from mlx_ring.api.generation import costs
from mlx_ring.api.openai.completions import Task, run_task
from mlx_ring.api.openai.models import describe
from mlx_ring.api.openai.sampling import Count, SamplingFields, finish_reason, sampling_params
from mlx_ring.api.openai.schemas import Costs, Model
from mlx_ring.api.openapi import JsonObject, RouteDoc, documented_get, documented_post
from mlx_ring.api.request_body import Body
from mlx_ring.api.service import ModelCatalog
from mlx_ring.api.settings import ApiSettings
from mlx_ring.api.streaming import (
    EVENT_STREAM,
    KEEP_ALIVE,
    JsonStream,
    QuietReason,
    StreamFormat,
    while_connected,
)
from mlx_ring.core.errors import Refused
from mlx_ring.models.model_folder import PullProgress
from mlx_ring.models.short_names import short_names_of

Name = Annotated[str, Field(min_length=1, max_length=4096)]


class LoadRequest(Body):
    model: Name
    """Model to load, as `mlx-ring serve` accepts it: a built-in name, a folder or GGUF file on the head's machine, a short name such as
    `qwen3:8b`, or a hub id."""


class UnloadRequest(Body):
    lasts: ClassVar[bool] = True
    model: Name
    force: bool = False
    """Unload the model even while it answers requests, which then end with an error."""


class PullRequest(Body):
    model: Name
    """Model to download to the head's machine: a short name such as `qwen3:8b`, or a hub id."""
    force: bool = False
    """Download it even if its weights exceed the memory of all machines."""
    stream: bool = False
    """Send the progress as server-sent events. The answer otherwise comes when the model is complete."""
    stop_unwatched: bool = False
    """End the download when no client waits for it any more. It otherwise continues, and the next pull joins it."""
    cancel: bool = False
    """End the download instead, for all clients. A later one continues it. The answer is its last progress."""


class DeleteRequest(Body):
    lasts: ClassVar[bool] = True

    model: Name


class PullStatus(JsonObject):
    """State of a pull."""

    model: str
    """Id on the hub, or the name if it is none."""
    status: Literal["downloading", "verifying", "done"]
    done_bytes: int
    """Bytes that are here, also from an earlier pull."""
    total_bytes: int
    """Bytes of all files; 0 if the model was complete before."""


class DeletedModel(JsonObject):
    model: str
    freed_bytes: int


class DiskModel(JsonObject):
    """Model that can be loaded without a download."""

    name: str
    """Name for `/models/load`."""
    short_names: list[str]
    source: Literal["built-in", "folder", "file", "hub", "LM Studio", "ollama"]
    model_type: str
    weight_bytes: int
    layers: int
    context_tokens: int


class InterruptedPull(JsonObject):
    name: str
    bytes: int
    """Bytes on the disk. The next pull continues from them."""


class DiskModels(JsonObject):
    models: list[DiskModel]
    pulls: list[PullStatus]
    """Pulls in progress. A pull of the same model joins the one in progress."""
    interrupted: list[InterruptedPull]
    """Pulls that ended before they were complete."""


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
    _add_disk(router, context)
    _add_generate(router, context)
    return router


def _add_disk(router: Router, context: ApiContext) -> None:
    catalog = context.catalog

    async def pull(request: Request) -> PullStatus | JsonStream[PullStatus]:
        check_manager(request, context.settings)
        fields = await context.read(request, PullRequest)
        model = fields.model
        if fields.cancel:
            progress = dict(catalog.pulls)
            name = await catalog.cancel_pull(model)
            return _pull_status(name, progress.get(name, PullProgress("downloading", 0, 0)))

        async def events(
            progress: AsyncGenerator[PullProgress | QuietReason],
        ) -> AsyncGenerator[list[PullStatus] | QuietReason]:
            async for each in progress:
                yield each if isinstance(each, QuietReason) else [_pull_status(model, each)]

        def begin() -> Pulling:
            quiet_s = context.settings.keep_alive_s
            return pulling(
                catalog, model, force=fields.force, lasts=not fields.stop_unwatched, quiet_s=quiet_s
            )

        if fields.stream:
            return JsonStream(begin, events, StreamFormat(EVENT_STREAM, event, KEEP_ALIVE))
        return _pull_status(model, await while_connected(request.receive, pull_all(begin())))

    async def delete(request: Request) -> DeletedModel:
        check_manager(request, context.settings)
        fields = await context.read(request, DeleteRequest)
        model, freed_bytes = await catalog.delete(fields.model)
        return {"model": model, "freed_bytes": freed_bytes}

    async def on_disk(_: Request) -> DiskModels:
        pulls = [_pull_status(name, progress) for name, progress in catalog.pulls.items()]
        models, parts = await asyncio.to_thread(lambda: (_disk_models(catalog), catalog.interrupted_pulls()))
        interrupted: list[InterruptedPull] = [
            {"name": name, "bytes": size} for name, size in parts.items() if name not in catalog.pulls
        ]
        return {"models": models, "pulls": pulls, "interrupted": interrupted}

    documented_post(
        router,
        "/models/pull",
        pull,
        PullRequest,
        RouteDoc(
            "Download a model to the head's machine, and list it as unloaded",
            PullStatus,
            {EVENT_STREAM: PullStatus},
            {"model": "qwen3:0.6b"},
            more_statuses=(409,),
            description=(
                "It continues an earlier pull. Sizes and SHA-256 are compared with the hub's. "
                "A pull continues when no client waits for it, until it is complete or cancelled, or the server ends. "
                "The next one joins or continues it. `/cluster/models` lists those in progress."
            ),
        ),
    )
    documented_post(
        router,
        "/models/delete",
        delete,
        DeleteRequest,
        RouteDoc(
            "Remove a model that is not loaded from the head's disk",
            DeletedModel,
            example={"model": "qwen3:0.6b"},
            more_statuses=(409,),
        ),
    )
    documented_get(
        router,
        "/cluster/models",
        on_disk,
        RouteDoc("List the models on the head's disk, and the pulls in progress or interrupted", DiskModels),
    )


def _disk_models(catalog: ModelCatalog) -> list[DiskModel]:
    return [
        {
            "name": model.name,
            "short_names": list(short_names_of(model.name)),
            "source": model.kind,
            "model_type": model.folder.model_type,
            "weight_bytes": model.folder.weight_bytes,
            "layers": model.folder.num_layers,
            "context_tokens": model.folder.context_length,
        }
        for model in catalog.local_models()
    ]


def _pull_status(model: str, progress: PullProgress) -> PullStatus:
    return {
        "model": model,
        "status": progress.status,
        "done_bytes": progress.done_bytes,
        "total_bytes": progress.total_bytes,
    }


async def pull_all(pull: Pulling) -> PullProgress:
    """Wait for the end of a pull, and return its last progress."""
    last = PullProgress("done", 0, 0)
    async with pull as progress:
        async for each in progress:
            last = each if isinstance(each, PullProgress) else last
    return last


Pulling = AbstractAsyncContextManager[AsyncGenerator[PullProgress | QuietReason]]


@asynccontextmanager
async def pulling(
    catalog: ModelCatalog,
    model: str,
    *,
    force: bool = False,
    lasts: bool = True,
    quiet_s: float | None = None,
) -> AsyncGenerator[AsyncGenerator[PullProgress | QuietReason]]:
    """Start a pull, or join one, and yield its progress, of which the last is "done". The pull is left with the context.

    Args:
        catalog: the models.
        model: name of the model.
        force: as for `ModelCatalog.pull`.
        lasts: as for `ModelCatalog.pull`.
        quiet_s: time without progress after which a reason for the silence is yielded; None for never.

    Raises:
        RingError: the model cannot be fetched. Checks come before the context begins.
    """
    queue = asyncio.Queue[PullProgress | None]()
    task = asyncio.ensure_future(catalog.pull(model, force=force, report=queue.put_nowait, lasts=lasts))
    task.add_done_callback(lambda _: queue.put_nowait(None))
    try:
        first = await queue.get()
        if first is None:
            task.result()
        yield _progress(task, queue, first, quiet_s)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _progress(
    task: asyncio.Future[str],
    queue: asyncio.Queue[PullProgress | None],
    newest: PullProgress | None,
    quiet_s: float | None,
) -> AsyncGenerator[PullProgress | QuietReason]:
    total_bytes = 0
    while newest is not None:
        total_bytes = newest.total_bytes
        # The files are here before the model is listed.
        if newest.status != "done":
            yield newest
        waiting = asyncio.ensure_future(queue.get())
        try:
            while not (await asyncio.wait((waiting,), timeout=quiet_s))[0]:
                yield QuietReason.QUIET
        finally:
            waiting.cancel()
        newest = waiting.result()
    task.result()
    yield PullProgress("done", total_bytes, total_bytes)


def check_manager(request: Request, settings: ApiSettings) -> None:
    """Check that the client may load, unload, pull and delete models.

    Clients on other machines need an API key, because a model may be any folder, or fill the disk.

    Raises:
        Refused: the server has no API keys, and the client is on another machine.
    """
    host = client_host(request)
    if not settings.api_keys and not is_loopback(host):
        raise Refused(
            f"Models are managed from another machine ({host}) only with an API key: "
            "start the server with --api-key."
        )


def client_host(request: Request) -> str:
    """Return the address of a request's client; empty if there is none."""
    return "" if request.client is None else request.client.host


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
