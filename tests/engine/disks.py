"""An engine whose ranks have disks, a prompt of three whole blocks, and what the ranks have saved of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tests.default_settings import make_policy
from tests.engine.engines import BYTES, Answer, collect, make_request
from tests.engine.twin import TwinExecutor

from mlx_ring.core.engine_stats import CacheStats, Policy
from mlx_ring.core.types import BLOCK_TOKENS, RankId
from mlx_ring.engine.engine import Engine
from mlx_ring.engine.kv_budget import RankKv
from mlx_ring.engine.sequence import Limits, make_sequence
from mlx_ring.engine.sequence import Sequence as Text

LIMITS = Limits(context_length=4096, vocab_size=256, eos=frozenset({0}))


SAVES = make_policy(kv_disk=1 << 30, num_speculative_tokens=0)


PROMPT = tuple(1 + place * 7 % 250 for place in range(3 * BLOCK_TOKENS + 40))


def make_engine(twin: TwinExecutor, policy: Policy = SAVES, kv: dict[RankId, RankKv] | None = None) -> Engine:
    return Engine(twin, BYTES, LIMITS, instance="demo", epoch=1, policy=policy, kv=kv)


def with_disks_of(twin: TwinExecutor, stages: int) -> TwinExecutor:
    """Return ranks of another split, all with what every rank of `twin` has saved."""
    after = TwinExecutor((1,) * stages)
    after.copy_disks(twin)
    return after


async def ask(engine: Engine, prompt: Sequence[int] = PROMPT, tokens: int = 8) -> Answer:
    request = make_request(max_tokens=tokens, ignore_eos=True)
    return await collect(engine.submit(replace_prompt(request, prompt)))


def replace_prompt(request: Any, prompt: Sequence[int]) -> Any:
    return replace(request, prompt_tokens=tuple(prompt))


async def settled(is_done: Callable[[], bool]) -> None:
    """Let the ranks work until something is true."""
    for _ in range(1000):
        if is_done():
            return
        await asyncio.sleep(0)
    raise AssertionError("It does not happen.")


def saved_blocks(twin: TwinExecutor) -> list[int]:
    return [len(disk) for disk in twin.disks.values()]


async def ask_and_save() -> tuple[TwinExecutor, Answer]:
    """Return a rank that has saved the prompt's blocks and the rest behind them, and the answer."""
    twin = TwinExecutor((1,))
    answer = await ask(make_engine(twin))
    await settled(lambda: saved_blocks(twin) == [4])
    return twin, answer


def stats_of(engine: Engine) -> CacheStats:
    return engine.stats().cache


def make_text(prompt: Sequence[int] = PROMPT) -> Text:
    return make_sequence(1, replace_prompt(make_request(), prompt), LIMITS, 0.0)


def computes(*_: object) -> None:
    """Choose to compute what the disks have."""
