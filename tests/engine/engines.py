"""Engine over the twin's ranks, with requests and answers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlx_ring.core.engine_stats import BLOCK, Policy
from mlx_ring.core.generation import Delta, GenerateRequest, RequestStream
from mlx_ring.core.types import SamplingParams
from mlx_ring.engine.engine import Engine
from mlx_ring.engine.kv_budget import RankKv
from mlx_ring.engine.sequence import Limits
from mlx_ring.engine.streams import Vocabulary
from mlx_ring.engine.twin import KV_BYTES_PER_TOKEN, NextToken, TwinExecutor, hash_token

EOS = 0
BYTES = Vocabulary(lambda tokens: bytes(tokens).decode("utf-8", "replace"), frozenset(), 256)
LIMITS = Limits(context_length=64, vocab_size=256, eos=frozenset({EOS}))


def scripted(answer: bytes, prompt: int = 3) -> NextToken:
    """Return a model that gives this answer to a prompt of that many tokens, and then ends."""

    def next_token(history: Sequence[int]) -> int:
        place = len(history) - prompt
        return answer[place] if place < len(answer) else EOS

    return next_token


def make_request(
    prompt: int = 3, *, prompt_logprobs: int | None = None, **sampling: object
) -> GenerateRequest:
    tokens = tuple(range(65, 65 + prompt))
    return GenerateRequest("r", tokens, replace(SamplingParams(), **sampling), prompt_logprobs)


PLAIN = Policy(prefix_cache=False, num_speculative_tokens=0)


def kv_of(blocks: int, **traits: Any) -> RankKv:
    """Return the KV memory of a twin's rank that holds so many blocks."""
    return RankKv(blocks * BLOCK * KV_BYTES_PER_TOKEN, KV_BYTES_PER_TOKEN, **traits)


def make_engine(twin: TwinExecutor, policy: Policy = PLAIN) -> Engine:
    return Engine(twin, BYTES, LIMITS, instance="demo", epoch=1, policy=policy)


@dataclass(frozen=True)
class Answer:
    """All deltas of a stream."""

    deltas: tuple[Delta, ...]

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def token_ids(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.token_ids]

    @property
    def last(self) -> Delta:
        return self.deltas[-1]


async def collect(stream: RequestStream) -> Answer:
    async with stream:
        return Answer(tuple([delta async for delta in stream]))


def answer_of(twin_answer: NextToken, request: GenerateRequest, tp_sizes: tuple[int, ...] = (1, 1)) -> Answer:
    """Return the answer of an engine of its own; check that its ranks hold no sequence afterwards."""

    async def run() -> Answer:
        twin = TwinExecutor(tp_sizes, next_token=twin_answer)
        engine = make_engine(twin)
        answer = await collect(engine.submit(request))
        await twin.idle()
        assert not any(twin.held().values())
        return answer

    return asyncio.run(run())


def make_manual_engine(tp_sizes: tuple[int, ...] = (1, 1)) -> tuple[Engine, TwinExecutor]:
    """Return an engine whose ranks continue only when the test runs them."""
    twin = TwinExecutor(tp_sizes, next_token=hash_token(256), automatic=False)
    return make_engine(twin), twin


def run_all(twin: TwinExecutor) -> None:
    """Execute the steps of every rank, and deliver all answers."""
    while twin.runnable():
        for rank in twin.runnable():
            twin.run(rank)
        for rank in twin.answering():
            twin.deliver(rank)
