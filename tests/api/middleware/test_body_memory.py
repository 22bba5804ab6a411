"""The memory limit of all request bodies: each client must leave free as much as it reserves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import httpx
from hypothesis import given
from hypothesis import strategies as st
from tests.api.clients import Api, error_of
from tests.api.twins import TwinCatalog, TwinService
from tests.default_settings import make_api_settings

from mlx_ring.api.app import build_app
from mlx_ring.api.middleware.guard import RequestBodyMemory

KIB = 1024


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 60))))
def test_new_client_can_always_reserve_half_of_the_free_memory(requested: list[tuple[str, int]]) -> None:
    memory = RequestBodyMemory(100)
    reserved = [(client, size) for client, size in requested if memory.reserve(client, size)]
    assert memory.held_bytes == sum(size for _, size in reserved)
    left = 100 - memory.held_bytes
    for client in "abcd":
        assert sum(size for each, size in reserved if each == client) <= 50
    assert memory.reserve("e", left // 2)
    memory.release("e", left // 2)
    for client, size in reserved:
        memory.release(client, size)
    assert (memory.held_bytes, memory.reserve("a", 50), memory.reserve("a", 1)) == (0, True, False)


def body(size: int) -> bytes:
    return json.dumps({"prompt": "x", "user": "u" * size}).encode()


async def post(app: object, size: int, *, key: str, client: str = "127.0.0.1") -> httpx.Response:
    transport = httpx.ASGITransport(app, client=(client, 1))  # pyright: ignore[reportArgumentType] - an ASGI application
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        return await http.post("/v1/completions", content=body(size), headers={"x-api-key": key})


async def wait_until_running(service: TwinService, count: int) -> None:
    while service.engine.stats().scheduler.running < count:  # noqa: ASYNC110 - the engine has no event for that
        await asyncio.sleep(0)


def test_body_without_room_is_503_and_each_api_key_has_its_own_share() -> None:
    settings = make_api_settings(max_bodies_bytes=100 * KIB, api_keys=("one", "two"))
    service = TwinService(automatic=False)
    app = build_app(TwinCatalog(service), settings)

    async def run() -> None:
        running = asyncio.ensure_future(post(app, 40 * KIB, key="one"))
        await wait_until_running(service, 1)
        refused = await post(app, 20 * KIB, key="one")
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
        assert refused.headers["connection"] == "close"
        assert error_of(refused)["code"] == "bodies_full"
        other = asyncio.ensure_future(post(app, 20 * KIB, key="two"))
        await wait_until_running(service, 2)
        for each in (running, other):
            each.cancel()
        await asyncio.gather(running, other, return_exceptions=True)
        again = asyncio.ensure_future(post(app, 40 * KIB, key="one"))
        await wait_until_running(service, 1)
        again.cancel()
        await asyncio.gather(again, return_exceptions=True)

    asyncio.run(run())


def test_refused_body_is_read_to_its_end() -> None:
    sent = 0

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(20):
            sent += 1
            yield b"x" * KIB

    api = Api(settings=make_api_settings(max_bodies_bytes=10 * KIB, max_body_bytes=8 * KIB))
    refused = api.request("POST", "/v1/completions", content=pieces())
    assert (refused.status_code, sent) == (503, 20)


def test_unverified_key_gives_a_client_no_share_of_its_own() -> None:
    service = TwinService(automatic=False)
    app = build_app(TwinCatalog(service), make_api_settings(max_bodies_bytes=100 * KIB))

    async def run() -> None:
        running = asyncio.ensure_future(post(app, 40 * KIB, key="one"))
        await wait_until_running(service, 1)
        assert (await post(app, 20 * KIB, key="two")).status_code == 503
        other = asyncio.ensure_future(post(app, 20 * KIB, key="one", client="192.0.2.1"))
        await wait_until_running(service, 2)
        for each in (running, other):
            each.cancel()
        await asyncio.gather(running, other, return_exceptions=True)

    asyncio.run(run())
