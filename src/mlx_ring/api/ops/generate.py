"""`/generate`: a prompt in, its continuation out, nothing else to know."""

from __future__ import annotations

import secrets
from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import JSONResponse, Response

from mlx_ring.api.connection import while_connected
from mlx_ring.api.openai.answering import Task, run_task
from mlx_ring.api.openai.sampling import SamplingFields, finish_reason, sampling_params
from mlx_ring.api.openapi import documented
from mlx_ring.api.ops import answers as about
from mlx_ring.api.routes import ApiContext

_DEFAULT_MAX_TOKENS = 50


class GenerateFields(SamplingFields):
    prompt: str
    max_tokens: Annotated[int, Field(ge=1)] = _DEFAULT_MAX_TOKENS


def routes(context: ApiContext) -> APIRouter:
    router = APIRouter()

    async def generate(request: Request) -> Response:
        fields = await context.read(request, GenerateFields)
        service = context.model(fields.model)
        sampling = sampling_params(fields, service, max_tokens=fields.max_tokens, top_logprobs=None)
        engine = await context.answering(service)
        task = Task(
            id=f"gen-{secrets.token_hex(12)}",
            model=service.model_id,
            object="generation",
            chunk_object="generation",
            prompts=[await context.prompts.encode(service, fields.prompt)],
            sampling=[sampling],
            prompt_field="prompt",
        )
        answers = await while_connected(request.receive, run_task(engine, task))
        body = {
            "id": task.id,
            "model": task.model,
            "text": answers[0].text,
            "finish_reason": finish_reason(answers[0].finish_reason),
        }
        return JSONResponse(body | task.costs(answers))

    documented(router, "/generate", generate, GenerateFields, about.GENERATE)
    return router
