"""The application: every route, behind the guard."""

from __future__ import annotations

from importlib.metadata import version

from fastapi import FastAPI

from mlx_ring.api.anthropic import messages as anthropic
from mlx_ring.api.errors import install_error_handlers
from mlx_ring.api.guard import Guard
from mlx_ring.api.ollama import chat as ollama_chat
from mlx_ring.api.ollama import embed as ollama_embed
from mlx_ring.api.ollama import generate as ollama_generate
from mlx_ring.api.ollama import models as ollama_models
from mlx_ring.api.openai import chat, completions, embeddings, models, tokens
from mlx_ring.api.openai.responses import route as responses
from mlx_ring.api.ops import cache, cluster, generate, health
from mlx_ring.api.ops import models as loading
from mlx_ring.api.ops import service as service_routes
from mlx_ring.api.routes import ApiContext
from mlx_ring.api.service import ModelCatalog
from mlx_ring.api.settings import ApiSettings


def build_app(catalog: ModelCatalog, settings: ApiSettings) -> FastAPI:
    """The HTTP side of the models that are served. Its pages load nothing from other servers, so there are no docs pages."""
    app = FastAPI(
        title="mlx-ring", version=version("mlx-ring"), docs_url=None, redoc_url=None, redirect_slashes=False
    )
    context = ApiContext(catalog, settings)
    for module in (
        *(chat, completions, embeddings, tokens, models, responses, anthropic),
        *(ollama_chat, ollama_generate, ollama_embed, ollama_models),
        *(generate, loading, health, cluster, cache, service_routes),
    ):
        app.include_router(module.routes(context))
    install_error_handlers(app)
    app.add_middleware(Guard, settings=settings)
    return app
