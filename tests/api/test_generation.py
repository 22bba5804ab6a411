"""The sequences of one request as one stream, with their usage and performance."""

from __future__ import annotations

import asyncio

import pytest
from tests.api.twins import TwinService

from mlx_ring.api.generation import Answer, Generation, performance, usage
from mlx_ring.core.errors import ContextExceeded, NotReady, StepFailed
from mlx_ring.core.generation import Delta, GenerateRequest, RequestStream, RequestTimings
from mlx_ring.core.types import SamplingParams


def requests_of_lengths(*lengths: int) -> list[GenerateRequest]:
    return [
        GenerateRequest(f"r{index}", (65,) * length, SamplingParams(max_tokens=3))
        for index, length in enumerate(lengths)
    ]


def test_no_sequence_starts_if_one_is_refused_and_the_error_names_the_field() -> None:
    service = TwinService(automatic=False)

    async def run() -> None:
        async with Generation(service.engine, requests_of_lengths(1, 2, 9999), "messages[7]"):
            pytest.fail("a prompt over the context was taken")

    with pytest.raises(ContextExceeded) as refused:
        asyncio.run(run())
    assert refused.value.param == "messages[7]"
    assert service.engine.stats().scheduler.steps_sent == 0


def test_leaving_the_context_aborts_every_sequence() -> None:
    service = TwinService(automatic=False)

    async def run() -> None:
        async with Generation(service.engine, requests_of_lengths(1, 1), "prompt") as generation:
            batches = generation.batches(quiet_s=0.001)
            assert await anext(batches) == []

    asyncio.run(run())
    assert service.engine.stats().finished == {"abort": 2}


class ScriptedEngine:
    """Engine that sends each sequence one delta, and then an error to the second."""

    def __init__(self, error: Delta | Exception) -> None:
        self._error = error
        self._streams: list[RequestStream] = []
        self.aborted = 0

    def submit_all(self, *requests: GenerateRequest) -> list[RequestStream]:
        return [self._start(request) for request in requests]

    def _start(self, request: GenerateRequest) -> RequestStream:
        stream = RequestStream(abort=self._count)
        stream.put(Delta("a", (97,), (), len(request.prompt_tokens), 1))
        self._streams.append(stream)
        if len(self._streams) == 2:
            if isinstance(self._error, Delta):
                stream.put(self._error)
            else:
                stream.fail(self._error)  # pyright: ignore[reportArgumentType] - a RingError, as listed
        return stream

    def stats(self) -> None:
        raise NotImplementedError

    def _count(self) -> None:
        self.aborted += 1


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (StepFailed("It broke."), StepFailed),
        (Delta("", (), (), 1, 1, finish_reason="abort"), NotReady),
    ],
)
def test_error_ends_all_answers_after_their_earlier_deltas(
    error: Delta | Exception, raised: type[Exception]
) -> None:
    engine = ScriptedEngine(error)

    async def run() -> list[str]:
        async with Generation(engine, requests_of_lengths(1, 1), "prompt") as generation:  # pyright: ignore[reportArgumentType] - the test reads no stats
            with pytest.raises(raised):
                await generation.run()
            return [answer.text for answer in generation.answers]

    assert asyncio.run(run()) == ["a", "a"]
    assert engine.aborted == 1


def answer(prompt: int, completion: int, cached: int, prefill_s: float, decode_s: float) -> Answer:
    return Answer(
        prompt_tokens=prompt,
        completion_tokens=completion,
        cached_tokens=cached,
        timings=RequestTimings(0.5, prefill_s, decode_s),
    )


def test_usage_counts_each_prompt_once_and_every_answer() -> None:
    answers = [answer(10, 1, 4, 1, 1), answer(10, 2, 10, 1, 1), answer(7, 3, 0, 1, 1), answer(7, 4, 7, 1, 1)]
    counted = usage(answers, 2)
    assert (counted["prompt_tokens"], counted["completion_tokens"], counted["total_tokens"]) == (17, 10, 27)
    assert counted["prompt_tokens_details"] == {"cached_tokens": 4, "audio_tokens": 0}


def test_performance_is_tokens_over_the_longest_time() -> None:
    measured = performance([answer(10, 5, 4, 2, 4), answer(10, 3, 0, 1, 2)])
    assert measured["prompt_tokens_per_second"] == 16 / 2
    assert measured["generation_tokens_per_second"] == 6 / 4
    assert performance([answer(10, 1, 0, 1, 0)])["generation_tokens_per_second"] is None
    assert performance([])["prompt_tokens_per_second"] is None
