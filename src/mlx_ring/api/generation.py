"""Answers of one HTTP request: its sequences as one stream, and their token counts and times."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Protocol, Self, TypeVar

from mlx_ring.api.middleware.access_log import Counted, note_answers, note_resumed
from mlx_ring.api.openai.schemas import Costs, Performance, Usage
from mlx_ring.api.service import Answering
from mlx_ring.api.streaming import PLAYBACK, QuietReason
from mlx_ring.core.errors import ContextExceeded, NotReady, RingError
from mlx_ring.core.generation import (
    ChoiceDelta,
    Delta,
    GenerateRequest,
    RequestStream,
    RequestTimings,
    Source,
)
from mlx_ring.core.types import FinishReason, TokenLogprob

T = TypeVar("T")


@dataclass(slots=True)
class Answer:
    """Answer, joined from its deltas."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    finish_reason: FinishReason | None = None
    pooled: tuple[float, ...] | None = None
    """Prompt's vector, if requested."""
    timings: RequestTimings | None = None

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.prompt_tokens = delta.prompt_tokens
        self.completion_tokens = delta.completion_tokens
        self.cached_tokens = delta.cached_tokens
        self.finish_reason = delta.finish_reason
        self.timings = delta.timings
        self.pooled = delta.pooled
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs


@dataclass(frozen=True, slots=True)
class AnswerCounts:
    """Token counts of an answer, or of its part up to an update."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0


class TokenCounted(Counted, Protocol):
    """All token counts of an answer."""

    @property
    def cached_tokens(self) -> int: ...
    @property
    def reasoning_tokens(self) -> int: ...


class Costed(TokenCounted, Protocol):
    """Token counts and times of an answer."""

    @property
    def timings(self) -> RequestTimings | None: ...


class Generation:
    """Running sequences of one request. Leaving `async with` stops those that have not ended."""

    def __init__(
        self,
        engine: Answering,
        requests: Sequence[GenerateRequest],
        prompt_field: str,
        answers_per_prompt: int = 1,
    ) -> None:
        self._engine = engine
        self._requests = requests
        self._prompt_field = prompt_field
        self._answers_per_prompt = answers_per_prompt
        self._source: Source = _EngineSource(())
        self._arrived = asyncio.Event()
        self._quiet_s: float | None = None
        self._quiet_until = 0.0
        """Time in the loop's clock at which a client should get a keep-alive."""
        self.answers = [Answer() for _ in requests]
        self.counted: Sequence[Counted] = self.answers
        """Answers as clients see them. Some end before the engine's tokens do."""

    async def __aenter__(self) -> Self:
        """Submit the sequences. Raise the engine's `RingError` if it refuses them."""
        playback = PLAYBACK.get()
        try:
            if playback is None:
                self._source = _EngineSource(self._engine.submit_all(*self._requests))
            else:
                self._source = await playback.open(self._engine.submit_all, self._requests)
        except ContextExceeded as error:
            error.param = self._prompt_field
            raise
        self._source.set_listener(self._arrived.set)
        return self

    async def __aexit__(self, *_: object) -> None:
        note_answers(self.counted, self._answers_per_prompt)
        if self._source.was_resumed:
            note_resumed()
        await self._source.aclose()

    async def batches(self, quiet_s: float | None = None) -> AsyncGenerator[list[ChoiceDelta]]:
        """Yield batches of new pieces until every answer has ended.

        An empty batch means that nothing came for `quiet_s` seconds, or that the answers have to wait (`silence`). The
        seconds count from the last events that `fill_silence` returned.

        Raises:
            RingError: a sequence failed. All pieces before the failure are yielded first.
        """
        self._quiet_s = quiet_s
        self._restart_silence()
        open_answers = len(self.answers)
        while open_answers:
            await self._wait()
            batch, failure = self._source.take()
            for piece in batch:
                self.answers[piece.index].add(piece.delta)
                open_answers -= piece.delta.finish_reason is not None
            if not batch:
                self._restart_silence()
            if batch or failure is None:
                yield batch
            if batch and failure is None and self.silence is QuietReason.PAUSED:
                yield []
            if failure is not None:
                raise failure.with_traceback(None)

    @property
    def silence(self) -> QuietReason:
        """Reason why there is no new piece."""
        return QuietReason.PAUSED if self._source.is_paused else QuietReason.QUIET

    @property
    def is_silent(self) -> bool:
        """True if the last events are `quiet_s` seconds ago."""
        return self._quiet_s is not None and asyncio.get_running_loop().time() >= self._quiet_until

    def fill_silence(self, events: Sequence[T], *, came: bool) -> Sequence[T] | QuietReason:
        """Return the events of a batch, or the reason of a silence that lasts too long.

        `came` is True if the batch had tokens. Many of them may make no event, such as those of a tool call.
        """
        if not events and came and not self.is_silent:
            return events
        self._restart_silence()
        return events or self.silence

    def _restart_silence(self) -> None:
        self._quiet_until = asyncio.get_running_loop().time() + (self._quiet_s or 0.0)

    async def run(self) -> list[Answer]:
        """Return all answers when they have ended."""
        async for _ in self.batches():
            pass
        return self.answers

    def stop(self, index: int) -> None:
        """End a complete answer now with a last piece without text."""
        self._source.stop(index)

    async def _wait(self) -> None:
        """Wait for an update, or for the end of the silence. It runs for every token, so it creates no task."""
        if not self._arrived.is_set():
            loop = asyncio.get_running_loop()
            is_timed = self._quiet_s is not None
            alarm = loop.call_at(self._quiet_until, self._arrived.set) if is_timed else None
            try:
                await self._arrived.wait()
            finally:
                if alarm is not None:
                    alarm.cancel()
        self._arrived.clear()


class _EngineSource:
    """Answers as the engine makes them."""

    def __init__(self, streams: Sequence[RequestStream]) -> None:
        self._streams = streams

    @property
    def is_paused(self) -> bool:
        return any(stream.is_paused for stream in self._streams)

    @property
    def was_resumed(self) -> bool:
        return any(stream.was_resumed for stream in self._streams)

    def set_listener(self, listener: Callable[[], None]) -> None:
        for stream in self._streams:
            stream.set_listener(listener)

    def take(self) -> tuple[list[ChoiceDelta], RingError | None]:
        return take_deltas(dict(enumerate(self._streams)))

    def stop(self, index: int) -> None:
        self._streams[index].stop()

    async def aclose(self) -> None:
        async with AsyncExitStack() as closing:
            for stream in self._streams:
                closing.push_async_callback(stream.aclose)


def take_deltas(streams: Mapping[int, RequestStream]) -> tuple[list[ChoiceDelta], RingError | None]:
    """Take the new deltas of every stream by its answer's index. Return them, and the error of the first failed one."""
    batch: list[ChoiceDelta] = []
    failure: RingError | None = None
    for index, stream in streams.items():
        for delta in stream.take():
            problem = _no_end(delta)
            if problem is None:
                batch.append(ChoiceDelta(index, delta))
            failure = failure or problem
        failure = failure or stream.error
    return batch, failure


def _no_end(delta: Delta) -> RingError | None:
    """Return the error behind the two finish reasons that are failures."""
    if delta.finish_reason == "abort":
        return NotReady("The server stopped this answer.")
    if delta.finish_reason == "error":
        return RingError("The answer ended with an error.")
    return None


def costs(answers: Sequence[Costed], answers_per_prompt: int) -> Costs:
    return {"usage": usage(answers, answers_per_prompt), "performance": performance(answers)}


def usage(answers: Sequence[TokenCounted], answers_per_prompt: int) -> Usage:
    """Return OpenAI's token counts: each prompt once, and all answers."""
    prompts = answers[::answers_per_prompt]
    prompt_tokens = sum(answer.prompt_tokens for answer in prompts)
    completion_tokens = sum(answer.completion_tokens for answer in answers)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": sum(answer.cached_tokens for answer in prompts),
            "audio_tokens": 0,
        },
        "completion_tokens_details": {
            "reasoning_tokens": sum(answer.reasoning_tokens for answer in answers),
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


def performance(answers: Iterable[Costed]) -> Performance:
    """Return seconds, and tokens per second.

    Several answers share the machine, so their longest times and the tokens of all count. The time of each first token
    counts as prefill.
    """
    timed = [(answer, answer.timings) for answer in answers if answer.timings is not None]
    prompt_s = max((timings.prefill_s for _, timings in timed), default=0.0)
    generation_s = max((timings.decode_s for _, timings in timed), default=0.0)
    prompt_tokens = sum(answer.prompt_tokens - answer.cached_tokens for answer, _ in timed)
    generated = sum(max(0, answer.completion_tokens - 1) for answer, _ in timed)
    return {
        "queue_s": max((timings.queue_s for _, timings in timed), default=0.0),
        "prompt_s": prompt_s,
        "generation_s": generation_s,
        "prompt_tokens_per_second": prompt_tokens / prompt_s if prompt_s > 0 else None,
        "generation_tokens_per_second": generated / generation_s if generation_s > 0 else None,
    }
