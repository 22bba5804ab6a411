"""`/v1/responses`: the endpoint, and the fields of a response that its request determines."""

from __future__ import annotations

import json
import re
from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from http import HTTPStatus
from typing import Literal, cast

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Router

from mlx_ring.api.chat.answer import AnswerUpdate, ChatAnswer, answer_chat, stream_chat
from mlx_ring.api.chat.prepare import encode_conversation, prepare_chat
from mlx_ring.api.chat.request import ContentText
from mlx_ring.api.context import ApiContext
from mlx_ring.api.dialect import Json, named_event
from mlx_ring.api.journal import last_event
from mlx_ring.api.openai.chat import DONE
from mlx_ring.api.openai.responses.request import (
    FunctionTool,
    JsonSchemaFormat,
    NamedTool,
    NamespaceTool,
    ResponsesRequest,
    WebSearchTool,
    conversation_of,
)
from mlx_ring.api.openai.responses.schemas import (
    CANCELLED_RESPONSE,
    DELETED_RESPONSE,
    INPUT_ITEMS,
    INPUT_TOKENS,
    KEPT_RESPONSE,
    RESPONSE,
    ChosenTool,
    ChosenTools,
    CountedInput,
    InputItems,
    PlainFormat,
    ReasoningConfig,
    ResponseDeleted,
    ResponseEvent,
    ResponseMade,
    ResponseNamespace,
    ResponseTool,
    ResponseUsage,
    SchemaFormat,
    TextFormatConfig,
)
from mlx_ring.api.openai.responses.writer import End, ResponseWriter, usage_of
from mlx_ring.api.openai.sampling import JsonObjectFormat, echoed_sampling, sampling_params
from mlx_ring.api.openai.schemas import ScoredToken, TokenTexts
from mlx_ring.api.openapi import ApiRoute, documented_get, documented_post
from mlx_ring.api.request_body import convert, cut, parse_json
from mlx_ring.api.streaming import (
    EVENT_STREAM,
    KEEP_ALIVE,
    PLAYBACK,
    RESUMING,
    JsonAnswer,
    JsonStream,
    StreamFormat,
    json_endpoint,
    new_id,
    note_stream,
    start_in_time,
    time_created,
)
from mlx_ring.core.errors import NotReady, RequestError, RingError
from mlx_ring.core.types import SamplingParams

_NUMBER = "[0-9]{1,9}"
_MOST_ITEMS = 100
"""Most input items on a page."""
_ID_PREFIXES = {"message": "msg_", "function_call": "fc_", "function_call_output": "fco_", "reasoning": "rs_"}
"""Beginnings of the ids of input items, by type."""


def routes(context: ApiContext) -> Router:
    router = Router()

    async def responses(request: Request) -> ResponseMade | JsonStream[ResponseEvent]:
        fields = await context.read(request, ResponsesRequest)
        service = context.model(fields.model)
        _check_background(fields, context)
        max_tokens = fields.max_output_tokens or context.settings.default_max_tokens
        sampling = sampling_params(
            fields, service, max_tokens=max_tokens, top_logprobs=fields.wanted_logprobs
        )
        response = response_of(fields, sampling, id_=new_id("resp_", 16), model=service.model_id)
        playback = PLAYBACK.get()
        if playback is not None and playback.unfinished is not None:
            return {**response, "status": playback.unfinished}
        format_ = context.formats[service.tokenizer]
        conversation = await convert(request, lambda: conversation_of(fields, format_))
        chat = await prepare_chat(context, service, conversation, [sampling], request_id=response["id"])
        begins = bool(fields.background) and playback is not None and playback.is_first
        if begins and service.state in ("unloaded", "loading"):
            queued = await context.kept.queue_alone(request, chat.requests, streams=bool(fields.stream))
            return cast("JsonStream[ResponseEvent]", queued)
        engine = await context.answering(service)
        writer = ResponseWriter(
            response,
            seals_reasoning=fields.seals_reasoning,
            namespaces=fields.namespaces,
        )
        stream = ResponseStream(writer, TokenTexts(service.tokenizer))
        if fields.stream or begins:
            events = stream_chat(
                engine, chat, stream, keep_alive_s=context.settings.keep_alive_s, failure=stream.failure
            )
            if begins:
                begun = await context.kept.run_alone(request, events, streams=bool(fields.stream))
                return cast("JsonStream[ResponseEvent]", begun)
            return events
        try:
            [answer] = await answer_chat(request, engine, chat, lambda update: list(stream.add(update)))
        except RingError as error:
            if playback is None or playback.is_first:
                raise
            return writer.cut_off(error)
        return writer.whole(_end(answer), _usage(answer))

    async def input_tokens(request: Request) -> CountedInput:
        fields = await context.read(request, ResponsesRequest)
        service = context.model(fields.model)
        format_ = context.formats[service.tokenizer]
        conversation = await convert(request, lambda: conversation_of(fields, format_))
        prompt = await encode_conversation(context, service, conversation)
        return {"object": "response.input_tokens", "input_tokens": len(prompt)}

    for path in ("/v1/responses", "/responses"):
        documented_post(router, path, responses, ResponsesRequest, RESPONSE)
        documented_post(router, f"{path}/input_tokens", input_tokens, ResponsesRequest, INPUT_TOKENS)
        # It is no ID of a kept response, which would be refused for its method.
        router.routes.append(ApiRoute(f"{path}/compact", _is_missing, "POST"))
    return router


async def _is_missing(_: Request) -> Response:
    raise HTTPException(HTTPStatus.NOT_FOUND)


def kept_routes(context: ApiContext) -> Router:
    """Return the routes of responses that the journal keeps."""
    router = Router()

    async def retrieve(request: Request) -> Response:
        id_, streams = request.path_params["response_id"], _wants_events(request)
        after = _last_number(request, id_, streams=streams)
        if streams:
            note_stream(request)
        return await context.kept.write_again(request, id_, streams=streams, after=after)

    async def cancel(request: Request) -> Response:
        id_ = request.path_params["response_id"]
        await context.kept.cancel(request, id_)
        return await context.kept.write_again(request, id_, streams=False)

    async def list_input(request: Request) -> JsonAnswer[InputItems]:
        id_ = request.path_params["response_id"]
        body = await context.kept.body_of(request, id_)
        return await convert(request, lambda: _encode(_page(_input_items(body, id_), request)), kept=body)

    async def delete(request: Request) -> ResponseDeleted:
        id_ = request.path_params["response_id"]
        await context.kept.delete(request, id_)
        return {"id": id_, "object": "response", "deleted": True}

    for path in ("/v1/responses/{response_id}", "/responses/{response_id}"):
        documented_get(router, path, start_in_time(retrieve, has_events=True), KEPT_RESPONSE)
        documented_get(router, f"{path}/input_items", list_input, INPUT_ITEMS)
        router.routes.append(ApiRoute(path, json_endpoint(delete), "DELETE", DELETED_RESPONSE))
        router.routes.append(ApiRoute(f"{path}/cancel", json_endpoint(cancel), "POST", CANCELLED_RESPONSE))
    return router


def _input_items(body: bytes, id_: str) -> list[Json]:
    """Return the input of a request as items with ids, which are the same whenever they are listed."""
    given = cast("Json", parse_json(body.removeprefix(BOM_UTF8)))["input"]
    items: list[Json] = (
        [{"role": "user", "content": given}] if isinstance(given, str) else cast("list[Json]", given)
    )
    listed: dict[object, Json] = {}
    for place, given_item in enumerate(items):
        item = _input_item(given_item)
        if not item.get("id") or item["id"] in listed:  # pages are found by their last item's id
            digest = blake2b(f"{id_}:{place}".encode(), digest_size=16).hexdigest()
            item["id"] = f"{_ID_PREFIXES[str(item['type'])]}{digest}"
        listed[item["id"]] = item
    return [*listed.values()]


def _input_item(given: Json) -> Json:
    item = {key: value for key, value in given.items() if value is not None}
    kind = item.setdefault("type", "message")
    if kind != "reasoning":
        item.setdefault("status", "completed")
    content = item.get("content")
    if isinstance(content, str):
        is_answer = item["role"] == "assistant"
        item["content"] = (
            [{"type": "output_text", "text": content, "annotations": []}]
            if is_answer
            else [{"type": "input_text", "text": content}]
        )
    return item


def _page(items: list[Json], request: Request) -> InputItems:
    """Return the page of the items that a request for them asks for."""
    given = request.query_params
    limit, order, after = given.get("limit", "20"), given.get("order", "desc"), given.get("after")
    count = int(limit) if re.fullmatch(_NUMBER, limit) else 0
    if not 1 <= count <= _MOST_ITEMS:
        raise RequestError(
            f"'limit' is '{cut(limit)}'; give a number from 1 to {_MOST_ITEMS}.", param="limit"
        )
    if order not in ("asc", "desc"):
        raise RequestError(f"'order' is '{cut(order)}'; give 'asc' or 'desc'.", param="order")
    listed = items if order == "asc" else items[::-1]
    ids = [str(item["id"]) for item in listed]
    if after is not None and after not in ids:
        raise RequestError(f"'after' is '{cut(after)}', which is no id of an input item.", param="after")
    start = 0 if after is None else ids.index(after) + 1
    end = start + count
    page = ids[start:end]
    return {
        "object": "list",
        "data": listed[start:end],
        "first_id": page[0] if page else None,
        "last_id": page[-1] if page else None,
        "has_more": end < len(ids),
    }


def _encode(page: InputItems) -> JsonAnswer[InputItems]:
    """Return a page as an answer. No other thread runs while an item is encoded."""
    items = (json.dumps(item, ensure_ascii=False, separators=(",", ":")).encode() for item in page["data"])
    return JsonAnswer({**page, "data": []}, first_list=b",".join(items))


class ResponseStream:
    """Events of a response."""

    stream_format = StreamFormat(EVENT_STREAM, named_event, KEEP_ALIVE, lambda: RESUMING, DONE)

    def __init__(self, writer: ResponseWriter, texts: TokenTexts) -> None:
        self._writer = writer
        self._texts = texts
        self._scored: list[ScoredToken] = []
        """Log-probabilities of tokens whose text is not yet complete."""

    def opening(self, answers: Sequence[ChatAnswer]) -> Iterator[ResponseEvent]:
        del answers
        return self._writer.opening()

    def update(
        self, updates: Sequence[AnswerUpdate], answers: Sequence[ChatAnswer]
    ) -> Iterator[ResponseEvent]:
        del answers
        for one in updates:
            yield from self.add(one)

    def closing(self, answers: Sequence[ChatAnswer]) -> Iterator[ResponseEvent]:
        [answer] = answers
        return self._writer.closing(_end(answer), _usage(answer))

    def failure(self, error: Exception) -> bytes:
        return self.stream_format.encode_some(self._writer.without_end(error))

    def add(self, update: AnswerUpdate) -> Iterator[ResponseEvent]:
        """Yield the events of an update. Only the answer's text has log-probabilities."""
        self._scored += map(self._texts.scored, update.logprobs)
        for part in update.parts:
            scored, self._scored = self._scored, []
            yield from self._writer.part(part, scored if isinstance(part, ContentText) else ())


def _end(answer: ChatAnswer) -> End:
    return "incomplete" if answer.end == "length" else "completed"


def _usage(answer: ChatAnswer) -> ResponseUsage:
    return usage_of(
        answer.prompt_tokens, answer.cached_tokens, answer.completion_tokens, answer.reasoning_tokens
    )


def _wants_events(request: Request) -> bool:
    given = request.query_params.get("stream", "false").lower()
    if given not in ("true", "false"):
        raise RequestError(f"'stream' is '{cut(given)}'; give true or false.", param="stream")
    return given == "true"


def _last_number(request: Request, id_: str, *, streams: bool) -> int:
    """Return the number of the last event of a response that the client has; -1: none."""
    after = request.query_params.get("starting_after", "")
    if streams and not after and "last-event-id" in request.headers:
        # A browser's `EventSource` comes back with it.
        given, number = last_event(request)
        if given != id_:
            raise RequestError(f"Last-Event-ID names an event of '{given}', not of '{id_}'.")
        return number
    after = after or "-1"
    if not re.fullmatch(f"-?{_NUMBER}", after):
        raise RequestError(
            f"'starting_after' is '{cut(after)}'; give the sequence_number of the last event that you have.",
            param="starting_after",
        )
    return int(after)


def _check_background(fields: ResponsesRequest, context: ApiContext) -> None:
    if not fields.background or PLAYBACK.get() is not None:
        return
    if context.journal is None:
        raise RequestError(
            "'background' is true, but this server keeps no answers: start it with `--journal SIZE`, or leave it out.",
            param="background",
        )
    if fields.store is False:
        raise RequestError(
            "'background' needs an answer that is kept: leave 'store' out.", param="background"
        )
    raise NotReady("The server is shutting down.")


def response_of(fields: ResponsesRequest, sampling: SamplingParams, *, id_: str, model: str) -> ResponseMade:
    """Return the response before its answer.

    Args:
        fields: the request.
        sampling: sampling parameters, with the model's defaults.
        id_: the response's id.
        model: id of the model.
    """
    return {
        "id": id_,
        "model": model,
        "created_at": time_created(),
        "object": "response",
        "status": "in_progress",
        "background": bool(fields.background),
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "max_tool_calls": fields.max_tool_calls,
        "metadata": fields.metadata or {},
        "output": [],
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "previous_response_id": None,
        "prompt_cache_key": fields.prompt_cache_key,
        "reasoning": _reasoning(fields),
        "safety_identifier": fields.safety_identifier,
        "service_tier": "default",
        "store": PLAYBACK.get() is not None,
        **echoed_sampling(sampling),
        "text": _text(fields),
        "tool_choice": _tool_choice(fields),
        "tools": [_tool(tool) for tool in fields.tools or () if not isinstance(tool, WebSearchTool)],
        "top_logprobs": fields.top_logprobs or 0,
        "truncation": "disabled",
        "usage": None,
        "user": fields.user,
    }


def _reasoning(fields: ResponsesRequest) -> ReasoningConfig:
    given = fields.reasoning
    return (
        {"effort": None, "summary": None}
        if given is None
        else {"effort": given.effort, "summary": given.summary}
    )


def _text(fields: ResponsesRequest) -> TextFormatConfig:
    given = fields.text
    return {
        "format": _format(None if given is None else given.format),
        "verbosity": (given and given.verbosity) or "medium",
    }


def _format(given: object) -> PlainFormat | SchemaFormat:
    if isinstance(given, JsonSchemaFormat):
        return {
            "type": "json_schema",
            "name": given.name,
            "schema": given.schema_,
            "description": given.description,
            "strict": given.strict,
        }
    return {"type": "json_object" if isinstance(given, JsonObjectFormat) else "text"}


def _tool_choice(
    fields: ResponsesRequest,
) -> Literal["none", "auto", "required"] | ChosenTool | ChosenTools:
    choice = fields.tool_choice or "auto"
    if isinstance(choice, str):
        return choice
    if isinstance(choice, NamedTool):
        return _chosen(choice)
    return {"type": choice.type, "mode": choice.mode, "tools": [_chosen(tool) for tool in choice.tools]}


def _chosen(tool: NamedTool) -> ChosenTool:
    return {"type": tool.type, "name": tool.name}


def _tool(tool: FunctionTool | NamespaceTool) -> ResponseTool | ResponseNamespace:
    if isinstance(tool, FunctionTool):
        return _function(tool)
    return {
        "type": tool.type,
        "name": tool.name,
        "description": tool.description,
        "tools": [_function(function) for function in tool.tools],
    }


def _function(tool: FunctionTool) -> ResponseTool:
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": bool(tool.strict),
    }
