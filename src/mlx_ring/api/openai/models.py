"""`/v1/models`: the served models. `/tokenize` and `/detokenize`, in vLLM's shapes: their tokenizers."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

from pydantic import ConfigDict, Field
from starlette.requests import Request
from starlette.routing import Router

from mlx_ring.api.chat.prepare import encode_conversation
from mlx_ring.api.chat.request import Conversation
from mlx_ring.api.context import ApiContext
from mlx_ring.api.openai import schemas
from mlx_ring.api.openai.messages import (
    AnswerStart,
    AnyTool,
    Message,
    read_tool_use,
    template_messages,
)
from mlx_ring.api.openai.sampling import TokenId
from mlx_ring.api.openapi import documented_get, documented_post
from mlx_ring.api.request_body import MOST_MESSAGES, Body, convert
from mlx_ring.api.service import ModelService
from mlx_ring.core.errors import RequestError


def capabilities(context: ApiContext, model: ModelService) -> list[str]:
    """Return the model's capabilities under Ollama's names."""
    format_ = context.formats[model.tokenizer]
    can = {
        "completion": True,
        "tools": format_.calls is not None and format_.knows("tools"),
        "thinking": format_.reasons,
        "embedding": not model.pooling.refusal,
    }
    return [name for name, is_so in can.items() if is_so]


def efforts(context: ApiContext, model: ModelService) -> list[str]:
    """Return the values of `reasoning_effort` that make a difference."""
    format_ = context.formats[model.tokenizer]
    if format_.knows("reasoning_effort"):
        return ["low", "medium", "high"]
    if format_.knows("enable_thinking") or format_.knows("thinking"):
        return ["none", "medium"]
    return []


def routes(context: ApiContext) -> Router:
    router = Router()

    async def list_models(_: Request) -> schemas.ModelList:
        ids = [model.model_id for model in context.catalog.models]
        return {
            "object": "list",
            "data": [describe(context, model) for model in context.catalog.models],
            "has_more": False,
            "first_id": ids[0] if ids else None,
            "last_id": ids[-1] if ids else None,
        }

    async def retrieve_model(request: Request) -> schemas.Model:
        return describe(context, context.model(request.path_params["model"]))

    for prefix in ("/v1", ""):
        documented_get(router, f"{prefix}/models", list_models, schemas.MODELS)
        documented_get(router, f"{prefix}/models/{{model:path}}", retrieve_model, schemas.MODEL)
    return router


def describe(context: ApiContext, model: ModelService) -> schemas.Model:
    """Return the description of a model."""
    return {
        "id": model.model_id,
        "object": "model",
        "created": model.created,
        "owned_by": "mlx-ring",
        "type": "model",
        "display_name": model.model_id,
        "created_at": datetime.fromtimestamp(model.created, UTC).isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": model.context_length,
        "max_tokens": model.context_length,
        "max_model_len": model.context_length,
        "aliases": list(model.aliases),
        "state": model.state,
        "features": capabilities(context, model),
        "reasoning_efforts": efforts(context, model),
    }


# ---- tokenizers


class TokenizeRequest(AnswerStart):
    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [
                {"properties": {"prompt": {"type": "string"}}, "required": ["prompt"]},
                {"properties": {"messages": {"type": "array"}}, "required": ["messages"]},
            ]
        }
    )

    model: str | None = None
    prompt: str | None = None
    """Text to tokenize, instead of `messages`."""
    messages: Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES)] | None = None
    add_special_tokens: bool | None = None
    """With `prompt`: add the model's special tokens before the text; true by default."""
    tools: list[AnyTool] | None = None
    """With `messages`."""
    chat_template_kwargs: dict[str, object] | None = None
    """With `messages`."""
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: list[TokenId]


def tokenizer_routes(context: ApiContext) -> Router:
    router = Router()

    async def tokenize(request: Request) -> schemas.Tokenized:
        fields = await context.read(request, TokenizeRequest)
        _check_kind(fields)
        service = context.model(fields.model)
        tokens = await _tokens(context, request, service, fields)
        strings = None
        if fields.return_token_strs:
            strings = await context.prompts.names(service.tokenizer, tokens)
        return {
            "count": len(tokens),
            "max_model_len": service.context_length,
            "tokens": list(tokens),
            "token_strs": strings,
        }

    async def detokenize(request: Request) -> schemas.Detokenized:
        fields = await context.read(request, DetokenizeRequest)
        service = context.model(fields.model)
        _check_tokens(fields.tokens, service)
        return {"prompt": await context.prompts.decode(service.tokenizer, fields.tokens)}

    for prefix in ("", "/v1"):
        documented_post(router, f"{prefix}/tokenize", tokenize, TokenizeRequest, schemas.TOKENIZE)
        documented_post(router, f"{prefix}/detokenize", detokenize, DetokenizeRequest, schemas.DETOKENIZE)
    return router


def _check_tokens(tokens: list[int], service: ModelService) -> None:
    """Refuse more tokens than the longest possible prompt."""
    if len(tokens) > service.context_length:
        raise RequestError(
            f"'tokens' has {len(tokens)} tokens, but this model's context has {service.context_length}: give fewer at a time.",
            param="tokens",
        )
    for place, token in enumerate(tokens):
        check_token(token, service, f"tokens[{place}]")


def check_token(token: int, service: ModelService, param: str) -> None:
    """Raise `RequestError` for an id outside the vocabulary."""
    if token >= service.vocab_size:
        raise RequestError(
            f"'{param}' is {token}; this model's token ids are 0 to {service.vocab_size - 1}.", param=param
        )


def _check_kind(fields: TokenizeRequest) -> None:
    """Refuse a prompt together with messages, neither of them, and options of the other."""
    if (fields.prompt is None) == (fields.messages is None):
        raise RequestError("Give either 'prompt' or 'messages'.", param="prompt")
    of_messages = {
        "add_generation_prompt": fields.add_generation_prompt,
        "continue_final_message": fields.continue_final_message,
        "tools": fields.tools,
        "chat_template_kwargs": fields.chat_template_kwargs,
    }
    fields.check_start()
    if fields.prompt is None:
        if fields.add_special_tokens:
            raise RequestError(
                "'add_special_tokens' applies to 'prompt' only: messages get special tokens from the chat template.",
                param="add_special_tokens",
            )
        return
    for name, value in of_messages.items():
        if value:
            raise RequestError(f"'{name}' applies to 'messages' only; leave it out.", param=name)


async def _tokens(
    context: ApiContext, request: Request, service: ModelService, fields: TokenizeRequest
) -> tuple[int, ...]:
    if fields.prompt is not None:
        return await context.prompts.encode_plain(
            service, fields.prompt, add_special_tokens=fields.add_special_tokens is not False
        )
    conversation = Conversation(
        messages=await convert(request, lambda: template_messages(fields.messages or [])),
        tool_use=read_tool_use(fields.tools, None, parallel=None),
        template_kwargs=fields.chat_template_kwargs or {},
        continues=bool(fields.continue_final_message),
        adds_generation_prompt=fields.add_generation_prompt is not False,
    )
    return await encode_conversation(context, service, conversation)
