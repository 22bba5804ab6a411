"""An answer in the words of `/v1/responses`: its items as events, and as they stand in the end."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

from mlx_ring.api.conversation.parts import AnswerPart, CallArguments, CallOpening, Reasoning
from mlx_ring.api.error_bodies import Trouble
from mlx_ring.api.json_lines import Json
from mlx_ring.api.openai.responses.open_items import Call, Event, Message, OpenItem, Status, Thought

End = Literal["completed", "incomplete", "failed"]


class ResponseWriter:
    """Takes one answer's parts in their order; of each it makes events, and keeps what they add up to."""

    def __init__(self, response: Mapping[str, object], *, seals_reasoning: bool = False) -> None:
        """`response` is what is known of the whole from the start."""
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
        """`logprobs` are of the tokens of a text."""
        match part:
            case CallOpening():
                yield from self._start(Call(part.id, part.name))
            case CallArguments():
                yield from self._grow(part.text)
            case Reasoning():
                if not isinstance(self._open, Thought):
                    yield from self._start(Thought(seals=self._seals_reasoning))
                yield from self._grow(part.text)
            case _:
                if not isinstance(self._open, Message):
                    yield from self._start(Message())
                yield from self._grow(part.text, logprobs)

    def closing(self, end: End, usage: Json) -> Iterator[Json]:
        yield from self._stop("completed" if end == "completed" else "incomplete")
        self._end(end, usage)
        yield self._event(f"response.{end}", {"response": self._whole()})

    def failing(self, trouble: Trouble) -> Iterator[Json]:
        """What ended the answer: once for who reads events, once as SDKs raise it."""
        yield from self._stop("incomplete")
        self._response |= {
            "status": "failed",
            "error": {"code": _failure_code(trouble), "message": trouble.message},
        }
        yield self._event("response.failed", {"response": self._whole()})
        told: Json = {"code": trouble.code, "message": trouble.message, "param": trouble.param}
        yield self._event("error", told | {"error": told | {"type": trouble.type}})

    def whole(self, end: End, usage: Json) -> Json:
        """The response, after its last part."""
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
        """Of the item that is open."""
        return {"output_index": len(self._output)}

    def _event(self, kind: str, fields: Json) -> Json:
        event = {"type": kind, "sequence_number": self._numbered} | fields
        self._numbered += 1
        return event


def _failure_code(trouble: Trouble) -> str:
    """OpenAI's few."""
    return {"rate_limit_error": "rate_limit_exceeded", "server_error": "server_error"}.get(
        trouble.type, "invalid_prompt"
    )
