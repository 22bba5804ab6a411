"""Two hundred clients at once, of which most stall, vanish or send rubbish: nothing of them is left, and the others get their tokens."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from tests.eventually import eventually
from tests.processes import Server, serving

CLIENTS, GOOD_EACH = 200, 4
"""Every fourth behaves."""
TOKENS = 8
GROWTH_BYTES = 48 << 20
POOLS = min(32, (os.cpu_count() or 1) + 4) + 6
"""Threads that are made for what would hold up the loop, and kept: asyncio's own, and those of bodies, texts and grammars."""
PATIENCE_S = 60.0
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"

Client = Callable[[str, int, random.Random], Coroutine[Any, Any, None]]


def asked(seed: int, **fields: object) -> dict[str, object]:
    told = {"prompt": f"Client {seed} says", "max_tokens": TOKENS, "seed": seed, "ignore_eos": True}
    greedy = {"temperature": 0.0 if seed % 2 else 1.0, "logprobs": 0, "stream": True}
    return told | greedy | fields


async def tokens_of(client: httpx.AsyncClient, seed: int) -> list[str]:
    """The tokens of an answer that is read to its end."""
    said: list[str] = []
    async with client.stream("POST", "/v1/completions", json=asked(seed)) as answer:
        assert answer.status_code == 200, await answer.aread()
        lines = [line.removeprefix("data: ") async for line in answer.aiter_lines() if line[:5] == "data:"]
    assert lines[-1] == "[DONE]"
    for line in lines[:-1]:
        (choice,) = json.loads(line)["choices"]
        said += choice["logprobs"]["tokens"] if choice["logprobs"] else []
    assert len(said) == TOKENS
    return said


@asynccontextmanager
async def connected(url: str) -> AsyncGenerator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    address = httpx.URL(url)
    reader, writer = await asyncio.open_connection(address.host, address.port, limit=1024)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


def request(seed: int, **fields: object) -> bytes:
    body = json.dumps(asked(seed, **fields)).encode()
    return HEAD + b"content-length: %d\r\n\r\n" % len(body) + body


async def stalls(url: str, seed: int, chance: random.Random) -> None:
    """Asks for a long answer, reads a bit of it, and nothing more for a while."""
    async with connected(url) as (reader, writer):
        writer.write(request(seed, max_tokens=120))
        await reader.read(256)
        await asyncio.sleep(chance.uniform(0.5, 2))


async def vanishes(url: str, seed: int, chance: random.Random) -> None:
    async with connected(url) as (reader, writer):
        writer.write(request(seed, max_tokens=120, n=2))
        if chance.random() < 0.7:
            await reader.read(chance.randrange(1, 2000))


async def sends_half(url: str, seed: int, chance: random.Random) -> None:
    async with connected(url) as (_, writer):
        whole = request(seed)
        writer.write(whole[: chance.randrange(1, len(whole))])
        await writer.drain()
        await asyncio.sleep(chance.uniform(0, 1))


async def sends_rubbish(url: str, seed: int, chance: random.Random) -> None:
    kinds = (
        chance.randbytes(300),
        request(seed).replace(b"{", b"[", 1),
        HEAD + b"content-length: 5\r\n\r\n" + request(seed),
        HEAD + b"content-length: 40000000\r\n\r\n" + chance.randbytes(50_000),
        HEAD + b"transfer-encoding: chunked\r\n\r\nffff\r\n{}\r\n",
        b"GET /" + b"a" * 30_000,
        request(seed, prompt=[10**9]),
    )
    async with connected(url) as (reader, writer):
        writer.write(chance.choice(kinds))
        async with asyncio.timeout(PATIENCE_S):
            await reader.read(1000)


BAD: tuple[Client, ...] = (stalls, vanishes, sends_half, sends_rubbish)


async def storm(url: str, quiet: dict[int, list[str]], count: int = CLIENTS) -> list[str]:
    """All at once; what good clients got that differs from a quiet run."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, limits=limits) as good:

        async def behaves(seed: int) -> str:
            same = await tokens_of(good, seed) == quiet[seed]
            return "" if same else f"client {seed} got other tokens"

        async def misbehaves(seed: int) -> str:
            with suppress(OSError):
                await BAD[seed % len(BAD)](url, seed // len(BAD), random.Random(seed))
            return ""

        clients = [
            behaves(seed) if seed % GOOD_EACH == 0 else misbehaves(seed // GOOD_EACH * 3 + seed % GOOD_EACH)
            for seed in range(count)
        ]
        return [told for told in await asyncio.gather(*clients) if told]


async def quiet_run(url: str) -> dict[int, list[str]]:
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
        return {seed: await tokens_of(client, seed) for seed in range(0, CLIENTS, GOOD_EACH)}


def tasks_of(server: Server) -> float:
    """Coroutines that the head has under way; the one that answers us is among them."""
    page = server.http.get("/metrics").text
    (line,) = [line for line in page.splitlines() if line.startswith("mlx_ring_head_tasks ")]
    return float(line.split()[1])


def until_quiet(server: Server) -> dict[str, Any]:
    """The caches' statistics once nobody is left but us."""
    head, port = psutil.Process(server.process.pid), httpx.URL(server.url).port
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:

        def look() -> tuple[dict[str, Any], int]:
            stats = client.get("/cache/stats").json()
            clients = [each for each in head.net_connections("tcp") if each.raddr and each.laddr.port == port]
            return stats, len(clients)

        stats, _ = eventually(
            look, lambda seen: seen[0]["running"] == seen[0]["waiting"] == 0 and seen[1] <= 1
        )
        return stats


@pytest.mark.alone
def test_clients_that_stall_vanish_or_send_rubbish_leave_nothing_and_harm_nobody(
    tiny_model: Path, tmp_path: Path
) -> None:
    flags = ("--stages", "2", "--client-timeout-s", "3", "--http-timeout-keep-alive", "2")
    with serving(tiny_model, *flags, folder=tmp_path) as server:
        head = psutil.Process(server.process.pid)
        quiet = asyncio.run(quiet_run(server.url))
        assert asyncio.run(storm(server.url, quiet, CLIENTS // 4)) == []
        until_quiet(server)
        before = head.memory_info().rss, head.num_fds(), head.num_threads(), tasks_of(server)
        assert asyncio.run(storm(server.url, quiet)) == []
        stats = until_quiet(server)
        after = head.memory_info().rss, head.num_fds(), head.num_threads(), tasks_of(server)
        assert stats["sequences"] == stats["prefix_cache"]["entries"], "only what caches keep is held"
        for worker in stats["workers"]:
            assert worker["used_bytes"] <= worker["limit_bytes"]
        assert after[0] - before[0] < GROWTH_BYTES
        assert after[1] <= before[1] + 2
        assert after[2] <= before[2] + POOLS
        assert after[3] <= before[3]
        assert server.stop() == 0
    log = (tmp_path / "logs" / "head.log").read_text()
    assert "Traceback" not in log
    assert "Exception in ASGI" not in log
