"""Writer of `/v1/responses`: the items of an answer, whole and as events, and the response around them."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

from mlx_ring.api.chat.parts import AnswerPart, CallArguments, CallOpening, ReasoningText
from mlx_ring.api.dialect import ErrorInfo, Json
from mlx_ring.api.openai.responses.request import (
    FunctionTool,
    JsonSchemaFormat,
    ResponsesRequest,
    seal,
)
from mlx_ring.api.openai.sampling import JsonObjectFormat
from mlx_ring.core.types import SamplingParams

Status = Literal["in_progress", "completed", "incomplete"]
Event = tuple[str, Json]
"""Its kind, and what it tells; the writer adds where and in which order."""


class OpenItem(ABC):
    """One item of an answer, which grows."""

    prefix: str
    """Prefix of the item's id."""

    def __init__(self) -> None:
        self.id = f"{self.prefix}_{secrets.token_hex(16)}"
        self.text: str = ""

    @abstractmethod
    def item(self, status: Status) -> Json:
        """Return the item as it stands."""

    @abstractmethod
    def opens(self) -> Iterator[Event]: ...

    @abstractmethod
    def grows(self, text: str, logprobs: Sequence[Json]) -> Iterator[Event]: ...

    @abstractmethod
    def ends(self) -> Iterator[Event]: ...


class _TextItem(OpenItem):
    """An item with a single part of text."""

    kind: str
    """Kind of the text's events."""
    at: Json

    def __init__(self) -> None:
        super().__init__()
        self.at = {"item_id": self.id, "content_index": 0}

    @abstractmethod
    def part(self) -> Json:
        """Return the part with the text so far."""

    def opens(self) -> Iterator[Event]:
        yield "response.content_part.added", self.at | {"part": self.part()}

    def ends(self) -> Iterator[Event]:
        yield f"response.{self.kind}.done", self.at | self._done()
        yield "response.content_part.done", self.at | {"part": self.part()}

    def _done(self) -> Json:
        return {"text": self.text}


class Message(_TextItem):
    prefix = "msg"
    kind = "output_text"

    def __init__(self) -> None:
        super().__init__()
        self._logprobs: list[Json] = []

    def item(self, status: Status) -> Json:
        return {
            "id": self.id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": [self.part()] if status != "in_progress" else [],
        }

    def part(self) -> Json:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": list(self._logprobs)}

    def grows(self, text: str, logprobs: Sequence[Json]) -> Iterator[Event]:
        self.text += text
        self._logprobs += logprobs
        yield "response.output_text.delta", self.at | {"delta": text, "logprobs": list(logprobs)}

    def _done(self) -> Json:
        return {"text": self.text, "logprobs": list(self._logprobs)}


class ReasoningOutput(_TextItem):
    prefix = "rs"
    kind = "reasoning_text"

    def __init__(self, *, seals: bool) -> None:
        """Seal the reasoning, with `seals`, for clients that keep nothing else."""
        super().__init__()
        self._seals = seals

    def item(self, status: Status) -> Json:
        ended = status != "in_progress"
        return {
            "id": self.id,
            "type": "reasoning",
            "status": status,
            "summary": [],
            "content": [self.part()] if ended else [],
            "encrypted_content": seal(self.text) if ended and self._seals else None,
        }

    def part(self) -> Json:
        return {"type": "reasoning_text", "text": self.text}

    def grows(self, text: str, logprobs: Sequence[Json]) -> Iterator[Event]:
        del logprobs
        self.text += text
        yield "response.reasoning_text.delta", self.at | {"delta": text}


class Call(OpenItem):
    prefix = "fc"

    def __init__(self, call_id: str, name: str) -> None:
        super().__init__()
        self._call = {"call_id": call_id, "name": name}

    def item(self, status: Status) -> Json:
        head: Json = {"id": self.id, "type": "function_call", "status": status}
        return head | self._call | {"arguments": self.text}

    def opens(self) -> Iterator[Event]:
        yield from ()

    def grows(self, text: str, logprobs: Sequence[Json]) -> Iterator[Event]:
        del logprobs
        self.text += text
        yield "response.function_call_arguments.delta", {"item_id": self.id, "delta": text}

    def ends(self) -> Iterator[Event]:
        done: Json = {"item_id": self.id, "name": self._call["name"], "arguments": self.text}
        yield "response.function_call_arguments.done", done


End = Literal["completed", "incomplete", "failed"]


class ResponseWriter:
    """Takes one answer's parts in their order; of each it makes events, and keeps what they add up to."""

    def __init__(self, response: Mapping[str, object], *, seals_reasoning: bool = False) -> None:
        """Take the fields of the response that are known from the start."""
        self._response = dict(response)
        self._seals_reasoning = seals_reasoning
        self._numbered = 0
        self._open: OpenItem | None = None
        self._output: list[Json] = []
        """The items that have ended."""

    def opening(self) -> Iterator[Json]:
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, {"response": self._whole()})

    def part(self, part: AnswerPart, logprobs: Sequence[Json] = ()) -> Iterator[Json]:
        """Yield the events of a part; `logprobs` are those of its tokens."""
        match part:
            case CallOpening():
                yield from self._start(Call(part.id, part.name))
            case CallArguments():
                yield from self._grow(part.text)
            case ReasoningText():
                if not isinstance(self._open, ReasoningOutput):
                    yield from self._start(ReasoningOutput(seals=self._seals_reasoning))
                yield from self._grow(part.text)
            case _:
                if not isinstance(self._open, Message):
                    yield from self._start(Message())
                yield from self._grow(part.text, logprobs)

    def closing(self, end: End, usage: Json) -> Iterator[Json]:
        yield from self._stop("completed" if end == "completed" else "incomplete")
        self._end(end, usage)
        yield self._event(f"response.{end}", {"response": self._whole()})

    def failing(self, info: ErrorInfo) -> Iterator[Json]:
        """Yield the events of an error, once for readers of events, and once as SDKs raise it."""
        yield from self._stop("incomplete")
        self._response |= {
            "status": "failed",
            "error": {"code": _failure_code(info), "message": info.message},
        }
        yield self._event("response.failed", {"response": self._whole()})
        fields: Json = {"code": info.code, "message": info.message, "param": info.param}
        yield self._event("error", fields | {"error": fields | {"type": info.type}})

    def whole(self, end: End, usage: Json) -> Json:
        """Return the response, after its last part."""
        list(self.closing(end, usage))
        return self._whole()

    def _whole(self) -> Json:
        return self._response | {"output": list(self._output)}

    def _end(self, end: End, usage: Json) -> None:
        self._response |= {"status": end, "usage": usage}
        if end == "completed":
            self._response["completed_at"] = int(time.time())
        elif end == "incomplete":
            self._response["incomplete_details"] = {"reason": "max_output_tokens"}

    def _start(self, item: OpenItem) -> Iterator[Json]:
        yield from self._stop("completed")
        self._open = item
        yield self._event("response.output_item.added", self._place() | {"item": item.item("in_progress")})
        yield from self._events(item.opens())

    def _grow(self, text: str, logprobs: Sequence[Json] = ()) -> Iterator[Json]:
        if self._open is not None:
            yield from self._events(self._open.grows(text, logprobs))

    def _stop(self, status: Status) -> Iterator[Json]:
        item, place, self._open = self._open, self._place(), None
        if item is not None:
            yield from self._events(item.ends())
            ended = item.item(status)
            self._output.append(ended)
            yield self._event("response.output_item.done", place | {"item": ended})

    def _events(self, events: Iterable[Event]) -> Iterator[Json]:
        place = self._place()
        for kind, fields in events:
            yield self._event(kind, place | fields)

    def _place(self) -> Json:
        """Return the position of the open item."""
        return {"output_index": len(self._output)}

    def _event(self, kind: str, fields: Json) -> Json:
        event = {"type": kind, "sequence_number": self._numbered} | fields
        self._numbered += 1
        return event


def _failure_code(info: ErrorInfo) -> str:
    """Return the nearest of OpenAI's few codes."""
    return {"rate_limit_error": "rate_limit_exceeded", "server_error": "server_error"}.get(
        info.type, "invalid_prompt"
    )


def response_of(fields: ResponsesRequest, sampling: SamplingParams, **identity: object) -> Json:
    """Return the fields of the response that are known before the answer.

    Args:
        fields: the request.
        sampling: sampling parameters, with the model's defaults.
        identity: `id`, `model` and `created_at`.
    """
    return identity | {
        "object": "response",
        "status": "in_progress",
        "background": False,
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
        "store": False,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "text": _text(fields),
        "tool_choice": _tool_choice(fields),
        "tools": [_tool(tool) for tool in fields.tools or ()],
        "top_logprobs": fields.top_logprobs or 0,
        "truncation": "disabled",
        "usage": None,
        "user": fields.user,
    }


def usage_of(prompt: int, cached: int, completion: int, reasoning: int) -> Json:
    """Return the token counts; cached tokens are part of the prompt, and reasoning is part of the completion."""
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": prompt + completion,
    }


def _reasoning(fields: ResponsesRequest) -> Json:
    given = fields.reasoning
    return (
        {"effort": None, "summary": None}
        if given is None
        else {"effort": given.effort, "summary": given.summary}
    )


def _text(fields: ResponsesRequest) -> Json:
    given = fields.text
    shown = {"type": "text"} if given is None or given.format is None else _format(given.format)
    return {"format": shown, "verbosity": (given and given.verbosity) or "medium"}


def _format(given: object) -> Json:
    if isinstance(given, JsonSchemaFormat):
        return {
            "type": "json_schema",
            "name": given.name,
            "schema": given.schema_,
            "description": given.description,
            "strict": given.strict,
        }
    return {"type": "json_object" if isinstance(given, JsonObjectFormat) else "text"}


def _tool_choice(fields: ResponsesRequest) -> object:
    choice = fields.tool_choice or "auto"
    return choice if isinstance(choice, str) else choice.model_dump()


def _tool(tool: FunctionTool) -> Json:
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": bool(tool.strict),
    }
