"""Two hundred clients at once: most stall, disconnect or send invalid data, and the others get their tokens."""

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

CLIENTS, GOOD_EVERY = 200, 4
"""Number of clients, and the period of those that behave well."""
TOKENS = 8
GROWTH_BYTES = 48 << 20
POOLS = min(32, (os.cpu_count() or 1) + 4) + 6
"""Threads that the head keeps: those of asyncio, and those for request bodies, texts and grammars."""
TIMEOUT_S = 60.0
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"

Client = Callable[[str, int, random.Random], Coroutine[Any, Any, None]]


def completion_body(seed: int, **fields: object) -> dict[str, object]:
    body = {"prompt": f"Client {seed} says", "max_tokens": TOKENS, "seed": seed, "ignore_eos": True}
    sampling = {"temperature": 0.0 if seed % 2 else 1.0, "logprobs": 0, "stream": True}
    return body | sampling | fields


async def read_tokens(client: httpx.AsyncClient, seed: int) -> list[str]:
    """Return the tokens of an answer that is read to its end."""
    tokens: list[str] = []
    async with client.stream("POST", "/v1/completions", json=completion_body(seed)) as answer:
        assert answer.status_code == 200, await answer.aread()
        lines = [line.removeprefix("data: ") async for line in answer.aiter_lines() if line[:5] == "data:"]
    assert lines[-1] == "[DONE]"
    for line in lines[:-1]:
        (choice,) = json.loads(line)["choices"]
        tokens += choice["logprobs"]["tokens"] if choice["logprobs"] else []
    assert len(tokens) == TOKENS
    return tokens


@asynccontextmanager
async def connected(url: str) -> AsyncGenerator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    address = httpx.URL(url)
    reader, writer = await asyncio.open_connection(address.host, address.port, limit=1024)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


def request(seed: int, **fields: object) -> bytes:
    body = json.dumps(completion_body(seed, **fields)).encode()
    return HEAD + b"content-length: %d\r\n\r\n" % len(body) + body


async def stall(url: str, seed: int, chance: random.Random) -> None:
    """Request a long answer, read a little of it, and pause with the connection open."""
    async with connected(url) as (reader, writer):
        writer.write(request(seed, max_tokens=120))
        await reader.read(256)
        await asyncio.sleep(chance.uniform(0.5, 2))


async def disconnect(url: str, seed: int, chance: random.Random) -> None:
    async with connected(url) as (reader, writer):
        writer.write(request(seed, max_tokens=120, n=2))
        if chance.random() < 0.7:
            await reader.read(chance.randrange(1, 2000))


async def send_half(url: str, seed: int, chance: random.Random) -> None:
    async with connected(url) as (_, writer):
        whole = request(seed)
        writer.write(whole[: chance.randrange(1, len(whole))])
        await writer.drain()
        await asyncio.sleep(chance.uniform(0, 1))


async def send_invalid_data(url: str, seed: int, chance: random.Random) -> None:
    invalid = (
        chance.randbytes(300),
        request(seed).replace(b"{", b"[", 1),
        HEAD + b"content-length: 5\r\n\r\n" + request(seed),
        HEAD + b"content-length: 40000000\r\n\r\n" + chance.randbytes(50_000),
        HEAD + b"transfer-encoding: chunked\r\n\r\nffff\r\n{}\r\n",
        b"GET /" + b"a" * 30_000,
        request(seed, prompt=[10**9]),
    )
    async with connected(url) as (reader, writer):
        writer.write(chance.choice(invalid))
        async with asyncio.timeout(TIMEOUT_S):
            await reader.read(1000)


BAD: tuple[Client, ...] = (stall, disconnect, send_half, send_invalid_data)


async def run_clients(url: str, expected: dict[int, list[str]], count: int = CLIENTS) -> list[str]:
    """Run all clients at once, and name each good one whose tokens differ from those of a quiet run."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits) as good:

        async def behave(seed: int) -> str:
            same = await read_tokens(good, seed) == expected[seed]
            return "" if same else f"client {seed} got other tokens"

        async def misbehave(seed: int) -> str:
            with suppress(OSError):
                await BAD[seed % len(BAD)](url, seed // len(BAD), random.Random(seed))
            return ""

        clients = [
            behave(seed) if seed % GOOD_EVERY == 0 else misbehave(seed // GOOD_EVERY * 3 + seed % GOOD_EVERY)
            for seed in range(count)
        ]
        return [difference for difference in await asyncio.gather(*clients) if difference]


async def quiet_run(url: str) -> dict[int, list[str]]:
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as client:
        return {seed: await read_tokens(client, seed) for seed in range(0, CLIENTS, GOOD_EVERY)}


def head_tasks(server: Server) -> float:
    """Return the number of coroutines in the head, with the one that answers this request."""
    page = server.http.get("/metrics").text
    (line,) = [line for line in page.splitlines() if line.startswith("mlx_ring_head_tasks ")]
    return float(line.split()[1])


def wait_until_idle(server: Server) -> dict[str, Any]:
    """Wait until no other client is left, and return the statistics of the caches."""
    head, port = psutil.Process(server.process.pid), httpx.URL(server.url).port
    with httpx.Client(base_url=server.url, timeout=TIMEOUT_S) as client:

        def look() -> tuple[dict[str, Any], int]:
            stats = client.get("/cache/stats").json()
            clients = [each for each in head.net_connections("tcp") if each.raddr and each.laddr.port == port]
            return stats, len(clients)

        stats, _ = eventually(
            look, lambda seen: seen[0]["running"] == seen[0]["waiting"] == 0 and seen[1] <= 1
        )
        return stats


@pytest.mark.alone
@pytest.mark.faults
def test_misbehaving_clients_leak_nothing_and_leave_other_answers_unchanged(
    tiny_model: Path, tmp_path: Path
) -> None:
    flags = ("--stages", "2", "--client-timeout-s", "3", "--http-timeout-keep-alive", "2")
    with serving(tiny_model, *flags, folder=tmp_path) as server:
        head = psutil.Process(server.process.pid)
        expected = asyncio.run(quiet_run(server.url))
        assert asyncio.run(run_clients(server.url, expected, CLIENTS // 4)) == []
        wait_until_idle(server)
        before = head.memory_info().rss, head.num_fds(), head.num_threads(), head_tasks(server)
        assert asyncio.run(run_clients(server.url, expected)) == []
        stats = wait_until_idle(server)
        after = head.memory_info().rss, head.num_fds(), head.num_threads(), head_tasks(server)
        assert stats["sequences"] == stats["prefix_cache"]["entries"], "only the prefix cache holds sequences"
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
