"""Engine over the twin's ranks, with requests and answers."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
from tests.default_settings import make_policy
from tests.engine.twin import Draw, TwinExecutor
from tests.engine.twin_rank import KV_BYTES_PER_TOKEN, NextToken, hash_token

from mlx_ring.core.engine_stats import BLOCK, Policy
from mlx_ring.core.generation import Delta, GenerateRequest, RequestStream
from mlx_ring.core.types import SamplingParams
from mlx_ring.engine.engine import Engine
from mlx_ring.engine.kv_budget import RankKv
from mlx_ring.engine.sequence import Limits
from mlx_ring.engine.step_times import ChunkSizer
from mlx_ring.engine.streams import Vocabulary
from mlx_ring.rpc.protos import step_pb2

EOS = 0
BYTES = Vocabulary(lambda tokens: bytes(tokens).decode("utf-8", "replace"), frozenset(), 256)
LIMITS = Limits(context_length=64, vocab_size=256, eos=frozenset({EOS}))


def scripted(answer: bytes, prompt: int = 3) -> NextToken:
    """Return a model that gives this answer to a prompt of that many tokens, and then ends."""

    def next_token(history: Sequence[int]) -> int:
        place = len(history) - prompt
        return answer[place] if place < len(answer) else EOS

    return next_token


@contextmanager
def drafting_at_no_cost() -> Generator[None]:
    """Let drafts cost nothing. Otherwise answers of twins rarely get one, because no step is timed."""

    def cost(_sizer: ChunkSizer, _draft_tokens: int) -> float:
        return 1.0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChunkSizer, "verifying_cost", cost)
        yield


_PERIOD = 3


def draw_by_parameters(opened: step_pb2.Open, history: Sequence[int]) -> step_pb2.TokenLogprobs:
    """Draw from a model that mostly repeats its last tokens, under every parameter of a sequence, below 97.

    As a worker's, the token is a function of the history, of where the prompt ends, of the seed and of the position.
    """
    sampling, answer = opened.sampling, history[opened.prompt_length :]
    likely = history[-_PERIOD:][0] % 97
    other = zlib.crc32(",".join(map(str, history)).encode()) % 97
    found = {EOS: 0.5, other: 1.0, (likely + 1) % 97: 1.5, likely: 2.0}
    for token, bias in sampling.logit_bias.items():
        found[token] = found.get(token, 0.0) + bias
    for token, score in found.items():
        noise = zlib.crc32(f"{opened.seed}/{len(history)}/{token}".encode()) / 2**32
        repeated = score / (sampling.repetition_penalty or 1.0) if token in history else score
        penalty = sampling.presence_penalty * (token in answer) + sampling.frequency_penalty * answer.count(
            token
        )
        found[token] = repeated - penalty + 2 * sampling.temperature * noise
    barred = opened.eos if len(answer) < sampling.min_tokens else ()
    best = sorted((-score, token) for token, score in found.items() if token not in barred)
    top = best[: sampling.top_logprobs] if sampling.logprobs else []
    return step_pb2.TokenLogprobs(
        token=best[0][1],
        logprob=best[0][0] if sampling.logprobs else 0.0,
        top_tokens=[token for _, token in top],
        top_logprobs=[logprob for logprob, _ in top],
    )


def make_request(
    prompt: int = 3, *, prompt_logprobs: int | None = None, **sampling: object
) -> GenerateRequest:
    tokens = tuple(range(65, 65 + prompt))
    return GenerateRequest("r", tokens, replace(SamplingParams(), **sampling), prompt_logprobs)


PLAIN = make_policy(prefix_cache=False, num_speculative_tokens=0)


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


def answer_of(
    twin_answer: NextToken | None,
    request: GenerateRequest,
    tp_sizes: tuple[int, ...] = (1, 1),
    *,
    draw: Draw | None = None,
) -> Answer:
    """Return the answer of an engine of its own; check that its ranks hold no sequence afterwards."""

    async def run() -> Answer:
        twin = TwinExecutor(tp_sizes, next_token=twin_answer, draw=draw)
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
