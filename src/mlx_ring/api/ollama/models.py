"""`/api/tags`, `/api/ps`, `/api/show`, `/api/version`, `/api/pull`, `/api/delete`, and the refused routes that make models."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from datetime import UTC, datetime
from hashlib import sha256
from importlib.metadata import version
from typing import Annotated, cast

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Router

from mlx_ring.api.context import ApiContext, workers_of_model
from mlx_ring.api.ollama import schemas
from mlx_ring.api.ollama.request import LATEST, OPTION_NAMES, find_model
from mlx_ring.api.ollama.schemas import (
    LINES,
    OllamaDetails,
    OllamaModel,
    OllamaModels,
    OllamaRunningModel,
    OllamaRunningModels,
    OllamaShown,
    OllamaStatus,
    OllamaVersion,
)
from mlx_ring.api.ollama.writer import json_line
from mlx_ring.api.openai.models import capabilities
from mlx_ring.api.openapi import ApiRoute, documented_get, documented_post
from mlx_ring.api.ops.models import Pulling, check_manager, pull_all, pulling
from mlx_ring.api.request_body import Body, Unsupported
from mlx_ring.api.service import ModelService
from mlx_ring.api.streaming import JsonAnswer, JsonStream, QuietReason, StreamFormat, while_connected
from mlx_ring.core.errors import RequestError
from mlx_ring.core.types import ADVISED_SAMPLING
from mlx_ring.models.model_folder import PullProgress

_API_VERSION = "0.12.11"
"""Version of Ollama that this API corresponds to. Clients check that it is new enough."""
_FOREVER = "9999-12-31T23:59:59Z"
_BILLION, _MILLION = 1_000_000_000, 1_000_000


class NamedModel(Body):
    model: str | None = None
    name: str | None = None
    """Name of the model in older clients' requests."""


_OVERRIDES = "the answer describes the model as it is served; leave it out."
_NoOverride = Annotated[None, Unsupported(_OVERRIDES, ("",))]
_NoLogin = Annotated[
    None, Unsupported("the server downloads with its own access token (HF_TOKEN); leave it out.", ("",))
]
"""Fields that Ollama's own client sends with every request, mostly empty."""


class ShownModel(NamedModel):
    verbose: bool | None = None
    """Accepted without effect: in Ollama it adds the token lists of a GGUF file, which does not exist here."""
    system: _NoOverride = None
    template: _NoOverride = None
    options: Annotated[None, Unsupported(_OVERRIDES, ({},))] = None


class PulledModel(NamedModel):
    stream: bool | None = None
    """False to send the answer when the model is complete, without progress."""
    insecure: bool | None = None
    """Setting of a connection to a registry. Accepted without effect."""
    username: _NoLogin = None
    password: _NoLogin = None


def routes(context: ApiContext) -> Router:
    router = Router()

    async def tags(_: Request) -> OllamaModels:
        return {"models": [_listed(model) for model in context.catalog.models]}

    async def running(_: Request) -> OllamaRunningModels:
        loaded = [model for model in context.catalog.models if model.state == "ready"]
        return {"models": [_loaded(model) for model in loaded]}

    async def show(request: Request) -> OllamaShown:
        fields = await context.read(request, ShownModel)
        return _shown(context, find_model(context, fields.model or fields.name))

    async def api_version(_: Request) -> OllamaVersion:
        return {"version": _API_VERSION, "mlx_ring": version("mlx-ring")}

    async def refuse(request: Request) -> Response:
        raise RequestError(
            f"{request.url.path} would make models or send them elsewhere, which is not supported."
        )

    documented_get(router, "/api/tags", tags, schemas.TAGS)
    documented_get(router, "/api/ps", running, schemas.RUNNING)
    documented_get(router, "/api/version", api_version, schemas.VERSION)
    documented_post(router, "/api/show", show, ShownModel, schemas.SHOW)
    _add_disk(router, context)
    for path, method in (
        ("/api/create", "POST"),
        ("/api/copy", "POST"),
        ("/api/push", "POST"),
        ("/api/blobs/{digest}", "POST"),
        ("/api/blobs/{digest}", "GET"),
    ):
        router.routes.append(ApiRoute(path, refuse, method))
    return router


def _add_disk(router: Router, context: ApiContext) -> None:
    async def pull(request: Request) -> JsonAnswer[OllamaStatus] | JsonStream[OllamaStatus]:
        fields = await context.read(request, PulledModel)
        name = _named(fields)
        served = {each for model in context.catalog.models for each in (model.model_id, *model.aliases)}
        if name in served or name.removesuffix(LATEST) in served:
            form = None if fields.stream is False else LINES
            return JsonAnswer[OllamaStatus]({"status": "success"}, media_type=form)
        check_manager(request, context.settings)

        async def lines(
            progress: AsyncGenerator[PullProgress | QuietReason],
        ) -> AsyncGenerator[list[OllamaStatus]]:
            yield [{"status": "pulling manifest"}]
            newest: OllamaStatus = {"status": f"pulling {name}"}
            async for each in progress:
                # The format has no other line that says nothing new.
                newest = newest if isinstance(each, QuietReason) else _pull_line(name, each)
                yield [newest]

        def begin() -> Pulling:
            quiet_s = context.settings.keep_alive_s
            # A client of Ollama cancels a pull by leaving it.
            return pulling(context.catalog, name, lasts=False, quiet_s=quiet_s)

        if fields.stream is False:
            await while_connected(request.receive, pull_all(begin()))
            return JsonAnswer({"status": "success"})
        return JsonStream(begin, lines, StreamFormat(LINES, json_line))

    async def delete(request: Request) -> Response:
        check_manager(request, context.settings)
        fields = await context.read(request, NamedModel)
        await context.catalog.delete(_named(fields))
        return Response()

    documented_post(router, "/api/pull", pull, PulledModel, schemas.PULL)
    router.routes.append(ApiRoute("/api/delete", delete, "DELETE", schemas.DELETE, NamedModel))


def _named(fields: NamedModel) -> str:
    name = fields.model or fields.name
    if not name:
        raise RequestError("'model' is missing; name a model, such as qwen3:8b.", param="model")
    return name


def _pull_line(name: str, progress: PullProgress) -> OllamaStatus:
    match progress.status:
        case "downloading":
            return {
                "status": f"pulling {name}",
                "digest": f"sha256:{sha256(name.encode()).hexdigest()}",
                "total": progress.total_bytes,
                "completed": progress.done_bytes,
            }
        case "verifying":
            return {"status": "verifying sha256 digest"}
        case "done":
            return {"status": "success"}


def _listed(model: ModelService) -> OllamaModel:
    metadata = model.metadata
    return {
        "name": model.model_id,
        "model": model.model_id,
        "modified_at": _modified(model),
        "size": cast("int", metadata.get("weight_bytes_on_disk", 0)),
        "digest": str(metadata.get("digest", "")),
        "details": _details(metadata),
    }


def _loaded(model: ModelService) -> OllamaRunningModel:
    """Describe a loaded model. Its sizes are its memory on all nodes."""
    workers = workers_of_model(model)
    return {
        **_listed(model),
        "size": sum(worker.memory["weight_bytes"] + worker.memory["kv_bytes"] for worker in workers),
        "size_vram": sum(
            worker.memory["device_memory_bytes"] for worker in workers if worker.device != "cpu"
        ),
        "expires_at": _FOREVER,
        "context_length": model.context_length,
    }


def _shown(context: ApiContext, model: ModelService) -> OllamaShown:
    metadata = model.metadata
    family = str(metadata.get("model_type", "unknown"))
    return {
        "details": _details(metadata),
        "parameters": _parameters(model),
        "model_info": {
            "general.architecture": family,
            "general.parameter_count": metadata.get("parameters"),
            f"{family}.context_length": model.context_length,
            f"{family}.embedding_length": model.hidden_size,
            f"{family}.block_count": metadata.get("layers"),
        },
        "capabilities": capabilities(context, model),
        "modified_at": _modified(model),
    }


def _parameters(model: ModelService) -> str:
    """Return the default parameters of requests, one per line."""
    values = {
        OPTION_NAMES.get(name, name): getattr(model.default_sampling, name) for name in ADVISED_SAMPLING
    }
    return "\n".join(f"{name:<30} {value:g}" for name, value in values.items())


def _details(metadata: Mapping[str, object]) -> OllamaDetails:
    family = str(metadata.get("model_type", "unknown"))
    return {
        "parent_model": "",
        "format": "gguf" if metadata.get("format") == "gguf" else "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": _size(metadata.get("parameters")),
        "quantization_level": _quantization(metadata.get("quantization")),
    }


def _size(parameters: object) -> str:
    if not isinstance(parameters, int):
        return ""
    if parameters >= _BILLION:
        return f"{parameters / _BILLION:.1f}B"
    return f"{parameters / _MILLION:.2f}M"


def _quantization(quantization: object) -> str:
    if not isinstance(quantization, Mapping):
        return "none"
    return f"{cast('Mapping[str, object]', quantization).get('bits')}-bit"


def _modified(model: ModelService) -> str:
    return datetime.fromtimestamp(model.created, UTC).isoformat().replace("+00:00", "Z")
