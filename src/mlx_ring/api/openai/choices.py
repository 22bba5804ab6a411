"""From sequences to an HTTP answer, whole or streamed: what chat and completions share."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlx_ring.api.dialect import Json, event, json_bytes
from mlx_ring.api.generation import Answer, Generation, performance, usage
from mlx_ring.api.service import Answering
from mlx_ring.api.streaming import KEEP_ALIVE, LiveAnswer, while_connected
from mlx_ring.core.environment import package_version
from mlx_ring.core.generation import Delta, GenerateRequest
from mlx_ring.core.types import SamplingParams

DONE = b"data: [DONE]\n\n"


def system_fingerprint() -> str:
    """What answers: with another version of it, a seed may give another answer."""
    return f"mlx-ring-{package_version('mlx-ring')}"


class Writer(Protocol):
    """How one endpoint writes its choices. A streamed choice is `opening`, `piece`s, `closing`."""

    def opening(self, index: int) -> Json | None: ...
    def piece(self, index: int, delta: Delta) -> Json | None:
        """None: nothing to say of this delta."""
        ...

    def closing(self, index: int, delta: Delta) -> Json: ...
    def whole(self, index: int, answer: Answer) -> Json: ...


@dataclass(frozen=True, slots=True)
class Task:
    """All that is to be done for one HTTP request."""

    id: str
    model: str
    object: str
    chunk_object: str
    prompts: Sequence[tuple[int, ...]]
    sampling: Sequence[SamplingParams]
    """Of the answers to each prompt."""
    prompt_field: str
    """What the request calls the prompt, for errors."""
    prompt_logprobs: int | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    def generation(self, engine: Answering) -> Generation:
        """Answers in order: those to the first prompt, those to the second, and so on."""
        pairs = [(prompt, params) for prompt in self.prompts for params in self.sampling]
        requests = [
            GenerateRequest(f"{self.id}-{index}", prompt, params, self.prompt_logprobs, continues_text=True)
            for index, (prompt, params) in enumerate(pairs)
        ]
        return Generation(engine, requests, self.prompt_field, len(self.sampling))

    def body(self, kind: str, choices: Sequence[Json]) -> Json:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": system_fingerprint(),
            "choices": choices,
        }

    def costs(self, answers: Sequence[Answer]) -> Json:
        return {"usage": usage(answers, len(self.sampling)), "performance": performance(answers)}


async def answer_whole(request: Request, engine: Answering, task: Task, writer: Writer) -> Response:
    """Every choice in one body, when all have ended; stops at once when the client leaves."""
    answers = await while_connected(request.receive, run_task(engine, task))
    choices = [writer.whole(index, answer) for index, answer in enumerate(answers)]
    return JSONResponse(task.body(task.object, choices) | task.costs(answers))


async def run_task(engine: Answering, task: Task) -> list[Answer]:
    """All the answers; being cancelled stops them."""
    async with task.generation(engine) as generation:
        return await generation.run()


class AnswerStream(LiveAnswer[Generation]):
    """Server-sent events. Ends with `[DONE]`, or with an event that holds an error."""

    def __init__(
        self, engine: Answering, task: Task, writer: Writer, *, usage_chunk: bool, keep_alive_s: float
    ) -> None:
        super().__init__(lambda: task.generation(engine), self._events)
        self._task = task
        self._writer = writer
        self._usage_chunk = usage_chunk
        self._before, self._after = around_choice(task.body(task.chunk_object, []), usage_chunk=usage_chunk)
        self._keep_alive_s = keep_alive_s

    async def _events(self, generation: Generation) -> AsyncGenerator[bytes]:
        writer = self._writer
        yield self._chunks(writer.opening(index) for index in range(len(generation.answers)))
        async with aclosing(generation.batches(self._keep_alive_s)) as batches:
            async for batch in batches:
                choices: list[Json | None] = []
                for piece in batch:
                    choices.append(writer.piece(piece.index, piece.delta))
                    if piece.delta.finish_reason is not None:
                        choices.append(writer.closing(piece.index, piece.delta))
                yield self._chunks(choices) if batch else KEEP_ALIVE
        if self._usage_chunk:
            yield event(self._task.body(self._task.chunk_object, []) | self._task.costs(generation.answers))
        yield DONE

    def _chunks(self, choices: Iterable[Json | None]) -> bytes:
        """One event for each choice that has something to say."""
        return b"".join(
            b"%s%s%s" % (self._before, json_bytes(choice), self._after)
            for choice in choices
            if choice is not None
        )


def around_choice(body: Json, *, usage_chunk: bool) -> tuple[bytes, bytes]:
    """A chunk's event before and after its one choice, the same throughout a stream; `body` has no choices."""
    before = json_bytes(body).removesuffix(b"]}")
    return b"data: " + before, b'],"usage":null}\n\n' if usage_chunk else b"]}\n\n"
