"""Writer of `/v1/responses`: an answer's items, whole and as events, and their response."""

from __future__ import annotations

import base64
import binascii
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Literal

from mlx_ring.api.chat.request import AnswerPart, CallArguments, CallOpening, ReasoningText
from mlx_ring.api.dialect import ErrorInfo
from mlx_ring.api.errors import error_info
from mlx_ring.api.openai.responses.schemas import (
    ErrorFields,
    ItemPlace,
    ItemStatus,
    OutputTextPart,
    PartPlace,
    ReasoningPart,
    ResponseCall,
    ResponseEvent,
    ResponseItem,
    ResponseMade,
    ResponseMessage,
    ResponsePart,
    ResponseReasoning,
    ResponseUsage,
    StateEvent,
    StateKind,
)
from mlx_ring.api.openai.schemas import ScoredToken
from mlx_ring.api.streaming import new_id, time_ended
from mlx_ring.core.errors import AnswerCancelled

_SEAL_PREFIX = "mlx-ring:"


class OpenItem(ABC):
    """One growing item of an answer."""

    prefix: str
    """Prefix of the item's id."""

    def __init__(self, numbers: Iterator[int], output_index: int) -> None:
        """Create an item. It takes the numbers of the stream's events and its place in the output."""
        self.id = new_id(f"{self.prefix}_", 16)
        self.text: str = ""
        self.output_index = output_index
        self._numbers = numbers

    @abstractmethod
    def item(self, status: ItemStatus) -> ResponseItem:
        """Return the item in its current state."""

    @abstractmethod
    def opens(self) -> Iterator[ResponseEvent]: ...

    @abstractmethod
    def grows(self, text: str, logprobs: Sequence[ScoredToken]) -> Iterator[ResponseEvent]: ...

    @abstractmethod
    def ends(self) -> Iterator[ResponseEvent]: ...


class _TextItem(OpenItem):
    """Item with a single part of text."""

    def __init__(self, numbers: Iterator[int], output_index: int) -> None:
        super().__init__(numbers, output_index)
        self._at: PartPlace = {"output_index": output_index, "item_id": self.id, "content_index": 0}

    @abstractmethod
    def part(self) -> ResponsePart:
        """Return the part with the text so far."""

    @abstractmethod
    def text_done(self) -> ResponseEvent:
        """Return the event of the whole text."""

    def opens(self) -> Iterator[ResponseEvent]:
        yield {
            "type": "response.content_part.added",
            "sequence_number": next(self._numbers),
            **self._at,
            "part": self.part(),
        }

    def ends(self) -> Iterator[ResponseEvent]:
        yield self.text_done()
        yield {
            "type": "response.content_part.done",
            "sequence_number": next(self._numbers),
            **self._at,
            "part": self.part(),
        }


class OpenMessage(_TextItem):
    prefix = "msg"

    def __init__(self, numbers: Iterator[int], output_index: int) -> None:
        super().__init__(numbers, output_index)
        self._logprobs: list[ScoredToken] = []

    def item(self, status: ItemStatus) -> ResponseMessage:
        return {
            "id": self.id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": [self.part()] if status != "in_progress" else [],
        }

    def part(self) -> OutputTextPart:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": list(self._logprobs)}

    def grows(self, text: str, logprobs: Sequence[ScoredToken]) -> Iterator[ResponseEvent]:
        self.text += text
        self._logprobs += logprobs
        yield {
            "type": "response.output_text.delta",
            "sequence_number": next(self._numbers),
            **self._at,
            "delta": text,
            "logprobs": list(logprobs),
        }

    def text_done(self) -> ResponseEvent:
        return {
            "type": "response.output_text.done",
            "sequence_number": next(self._numbers),
            **self._at,
            "text": self.text,
            "logprobs": list(self._logprobs),
        }


class ReasoningOutput(_TextItem):
    prefix = "rs"

    def __init__(self, numbers: Iterator[int], output_index: int, *, seals: bool) -> None:
        """Create an item. With `seals` the reasoning is sealed, for clients that keep nothing else."""
        super().__init__(numbers, output_index)
        self._seals = seals

    def item(self, status: ItemStatus) -> ResponseReasoning:
        ended = status != "in_progress"
        return {
            "id": self.id,
            "type": "reasoning",
            "status": status,
            "summary": [],
            "content": [self.part()] if ended else [],
            "encrypted_content": seal(self.text) if ended and self._seals else None,
        }

    def part(self) -> ReasoningPart:
        return {"type": "reasoning_text", "text": self.text}

    def grows(self, text: str, logprobs: Sequence[ScoredToken]) -> Iterator[ResponseEvent]:
        del logprobs
        self.text += text
        yield {
            "type": "response.reasoning_text.delta",
            "sequence_number": next(self._numbers),
            **self._at,
            "delta": text,
        }

    def text_done(self) -> ResponseEvent:
        return {
            "type": "response.reasoning_text.done",
            "sequence_number": next(self._numbers),
            **self._at,
            "text": self.text,
        }


class OpenCall(OpenItem):
    prefix = "fc"

    def __init__(
        self, numbers: Iterator[int], output_index: int, call_id: str, name: str, namespace: str | None
    ) -> None:
        super().__init__(numbers, output_index)
        self._at: ItemPlace = {"output_index": output_index, "item_id": self.id}
        self._call_id, self._name, self._namespace = call_id, name, namespace

    def item(self, status: ItemStatus) -> ResponseCall:
        item: ResponseCall = {
            "id": self.id,
            "type": "function_call",
            "status": status,
            "call_id": self._call_id,
            "name": self._name,
            "arguments": self.text,
        }
        if self._namespace is not None:
            item["namespace"] = self._namespace
        return item

    def opens(self) -> Iterator[ResponseEvent]:
        yield from ()

    def grows(self, text: str, logprobs: Sequence[ScoredToken]) -> Iterator[ResponseEvent]:
        del logprobs
        self.text += text
        yield {
            "type": "response.function_call_arguments.delta",
            "sequence_number": next(self._numbers),
            **self._at,
            "delta": text,
        }

    def ends(self) -> Iterator[ResponseEvent]:
        yield {
            "type": "response.function_call_arguments.done",
            "sequence_number": next(self._numbers),
            **self._at,
            "name": self._name,
            "arguments": self.text,
        }


End = Literal["completed", "incomplete"]


class ResponseWriter:
    """Converter of one answer's parts to events; it also keeps the whole response."""

    def __init__(
        self,
        response: ResponseMade,
        *,
        seals_reasoning: bool = False,
        namespaces: Mapping[str, tuple[str, str]] | None = None,
    ) -> None:
        """Create a writer.

        Args:
            response: the response before its answer.
            seals_reasoning: seal reasoning, for clients that keep nothing else.
            namespaces: function and namespace by the name that the model calls.
        """
        self._response = response
        self._namespaces = namespaces or {}
        self._seals_reasoning = seals_reasoning
        self._numbers = count()
        self._open: OpenItem | None = None
        self._output: list[ResponseItem] = []
        """Ended items."""

    def opening(self) -> Iterator[ResponseEvent]:
        if self._response["background"]:
            self._response["status"] = "queued"
            yield self._state("response.created")
            yield self._state("response.queued")
            self._response["status"] = "in_progress"
        else:
            yield self._state("response.created")
        yield self._state("response.in_progress")

    def part(self, part: AnswerPart, logprobs: Sequence[ScoredToken] = ()) -> Iterator[ResponseEvent]:
        """Yield the events of a part; `logprobs` are those of its tokens."""
        match part:
            case CallOpening():
                yield from self._stop("completed")
                name, namespace = self._namespaces.get(part.name, (part.name, None))
                yield from self._start(OpenCall(self._numbers, len(self._output), part.id, name, namespace))
            case CallArguments():
                yield from self._grow(part.text)
            case ReasoningText():
                if not isinstance(self._open, ReasoningOutput):
                    yield from self._stop("completed")
                    seals = self._seals_reasoning
                    yield from self._start(ReasoningOutput(self._numbers, len(self._output), seals=seals))
                yield from self._grow(part.text)
            case _:
                if not isinstance(self._open, OpenMessage):
                    yield from self._stop("completed")
                    yield from self._start(OpenMessage(self._numbers, len(self._output)))
                yield from self._grow(part.text, logprobs)

    def closing(self, end: End, usage: ResponseUsage) -> Iterator[ResponseEvent]:
        yield from self._stop(end)
        self._response["status"] = end
        self._response["usage"] = usage
        if end == "completed":
            self._response["completed_at"] = time_ended()
            yield self._state("response.completed")
        else:
            self._response["incomplete_details"] = {"reason": "max_output_tokens"}
            yield self._state("response.incomplete")

    def failing(self, info: ErrorInfo) -> Iterator[ResponseEvent]:
        """Yield two events of an error: one for readers of events, and one that SDKs raise."""
        yield from self._stop("incomplete")
        self._response["status"] = "failed"
        self._response["error"] = {"code": _failure_code(info), "message": info.message}
        yield self._state("response.failed")
        fields: ErrorFields = {"code": info.code, "message": info.message, "param": info.param}
        yield {
            "type": "error",
            "sequence_number": next(self._numbers),
            **fields,
            "error": {**fields, "type": info.type},
        }

    def cancelling(self) -> Iterator[ResponseEvent]:
        """Yield the events of a cancelled response."""
        yield from self._stop("incomplete")
        self._response["status"] = "cancelled"
        yield self._state("response.incomplete")

    def without_end(self, error: Exception) -> Iterator[ResponseEvent]:
        """Yield the events of a response that an error ended."""
        yield from (
            self.cancelling() if isinstance(error, AnswerCancelled) else self.failing(error_info(error))
        )

    def cut_off(self, error: Exception) -> ResponseMade:
        """Return the response that an error ended."""
        list(self.without_end(error))
        return self._whole()

    def whole(self, end: End, usage: ResponseUsage) -> ResponseMade:
        """Return the response, after its last part."""
        list(self.closing(end, usage))
        return self._whole()

    def _whole(self) -> ResponseMade:
        return {**self._response, "output": list(self._output)}

    def _state(self, kind: StateKind) -> StateEvent:
        return {"type": kind, "sequence_number": next(self._numbers), "response": self._whole()}

    def _start(self, item: OpenItem) -> Iterator[ResponseEvent]:
        self._open = item
        yield {
            "type": "response.output_item.added",
            "sequence_number": next(self._numbers),
            "output_index": item.output_index,
            "item": item.item("in_progress"),
        }
        yield from item.opens()

    def _grow(self, text: str, logprobs: Sequence[ScoredToken] = ()) -> Iterator[ResponseEvent]:
        if self._open is not None:
            yield from self._open.grows(text, logprobs)

    def _stop(self, status: ItemStatus) -> Iterator[ResponseEvent]:
        item, self._open = self._open, None
        if item is not None:
            yield from item.ends()
            ended = item.item(status)
            self._output.append(ended)
            yield {
                "type": "response.output_item.done",
                "sequence_number": next(self._numbers),
                "output_index": item.output_index,
                "item": ended,
            }


def _failure_code(info: ErrorInfo) -> str:
    """Return the nearest of OpenAI's error codes."""
    return {"rate_limit_error": "rate_limit_exceeded", "server_error": "server_error"}.get(
        info.type, "invalid_prompt"
    )


def usage_of(prompt: int, cached: int, completion: int, reasoning: int) -> ResponseUsage:
    """Return the token counts. The prompt includes cached tokens, the completion reasoning."""
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": prompt + completion,
    }


def seal(reasoning: str) -> str:
    """Return reasoning as an opaque text that clients send back in the next request."""
    return _SEAL_PREFIX + base64.b64encode(reasoning.encode()).decode()


def unseal(sealed: str) -> str:
    """Return the reasoning that this server sealed. Another server's seal cannot be opened."""
    if not sealed.startswith(_SEAL_PREFIX):
        return ""
    try:
        return base64.b64decode(sealed.removeprefix(_SEAL_PREFIX), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""
