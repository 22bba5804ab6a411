"""A head tells its versions and its clock to whoever asks."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from tests.machines import running_head

from mlx_ring.cluster.security.authority import Authority
from mlx_ring.core.errors import PeerRefused, WorkerLost
from mlx_ring.rpc.channels import add_secure_port, make_aio_server
from mlx_ring.rpc.hello import Greeted, ask_greeting, greeting_handler, make_hello
from mlx_ring.rpc.tls.credentials import Anchor


async def greet(address: str, authority: Authority) -> Greeted:
    return await asyncio.to_thread(ask_greeting, address, Anchor(authority.pem))


def test_a_head_greets_a_machine_that_has_no_certificate(tmp_path: Path) -> None:
    async def act() -> Greeted:
        async with running_head(tmp_path) as head:
            return await greet(head.address.enrolment, head.authority)

    greeted = asyncio.run(act())
    assert greeted.hello == make_hello()
    assert abs(greeted.skew_s) <= greeted.uncertain_s


def test_a_clock_that_is_late_is_seen(tmp_path: Path) -> None:
    async def act() -> Greeted:
        authority = Authority.open(tmp_path)
        server = make_aio_server()
        server.add_generic_rpc_handlers((greeting_handler(clock=lambda: time.time() - 3600),))
        port = add_secure_port(server, "127.0.0.1:0", authority.head_credentials().for_strangers())
        await server.start()
        try:
            return await greet(f"127.0.0.1:{port}", authority)
        finally:
            await server.stop(None)

    greeted = asyncio.run(act())
    assert abs(greeted.skew_s + 3600) <= greeted.uncertain_s


def test_another_cluster_s_head_and_nobody_are_refused(tmp_path: Path) -> None:
    async def act() -> None:
        async with running_head(tmp_path / "one") as head:
            with pytest.raises(PeerRefused, match="is of another cluster"):
                await greet(head.address.enrolment, Authority.open(tmp_path / "other"))
        with pytest.raises((WorkerLost, PeerRefused)):
            await greet(head.address.enrolment, head.authority)

    asyncio.run(act())
