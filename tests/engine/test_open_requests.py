"""What the engine tells of requests that have not ended."""

from __future__ import annotations

import asyncio

from tests.engine.engines import ask, make_engine

from mlx_ring.core.engine_stats import Policy
from mlx_ring.engine.twin import TwinExecutor


def test_each_request_waits_reads_or_answers_until_it_has_ended() -> None:
    async def run() -> None:
        twin = TwinExecutor((1,), automatic=False)
        engine = make_engine(
            twin, Policy(max_num_seqs=2, prefill_chunk=8, prefix_cache=False, num_speculative_tokens=0)
        )
        streams = [engine.submit(ask(prompt, max_tokens=4)) for prompt in (3, 30, 5)]
        told = engine.requests()
        assert [request.state for request in told] == ["answering", "reading", "waiting"]
        assert [request.prompt_tokens for request in told] == [3, 30, 5]
        assert told[0].read_tokens == 3
        assert 0 < told[1].read_tokens < 30
        assert (told[2].read_tokens, told[2].tokens) == (0, 0)
        for stream in streams:
            await stream.aclose()
        assert engine.requests() == []

    asyncio.run(run())
