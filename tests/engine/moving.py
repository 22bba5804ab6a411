"""Two engines of one model, between which requests and cached KV move."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from tests.default_settings import make_policy
from tests.engine.engines import LIMITS
from tests.engine.successions import Succession

from mlx_ring.engine.engine import Engine
from mlx_ring.engine.kv_budget import RankKv
from mlx_ring.engine.sequence import Limits
from mlx_ring.engine.takeover import move_requests
from mlx_ring.rpc.protos import step_pb2

CACHING = make_policy(num_speculative_tokens=0, prefill_chunk=8)


def engine_of(succession: Succession) -> Engine:
    assert succession.engine is not None
    return succession.engine


LARGE = replace(LIMITS, context_length=2000)


def instances_that_move_kv(
    kv: RankKv | None = None, limits: Limits = LIMITS, **shape: Any
) -> tuple[Succession, Succession]:
    """Return two loaded instances, of which the second one has this shape and can take over KV of the first."""
    source, target = Succession(policy=CACHING, kv=kv), Succession(policy=CACHING, kv=kv)
    source.moves_kv = target.moves_kv = True
    source.load(limits=limits)
    target.load(limits=limits, **shape)
    return source, target


async def move_all(source: Succession, target: Succession) -> int:
    """Move all requests while both instances work; return the number of those that moved."""
    moving = asyncio.create_task(move_requests(engine_of(source), engine_of(target)))
    while not moving.done():
        target.proceed(0)
        source.proceed(0)
        await asyncio.sleep(0)
    return await moving


def rows_of(succession: Succession) -> list[tuple[int, int]]:
    """Return the start and the number of tokens of every row."""
    assert succession.twin is not None
    return [(row.start, len(row.tokens.ids)) for step in succession.twin.sent for row in step.rows]


def adopted(succession: Succession) -> list[step_pb2.Adopt]:
    """Return the operations that take over KV from another instance."""
    assert succession.twin is not None
    operations = [operation for step in succession.twin.sent for operation in step.operations]
    return [each.adopt for each in operations if each.HasField("adopt") and each.adopt.length]
