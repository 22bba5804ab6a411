"""Hellos of peers: the check of their versions, and a head's greeting with its clock."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from tests.machines import running_head

from mlx_ring.cluster.security.authority import Authority
from mlx_ring.core.errors import PeerRefused, StaleMessage, VersionMismatch, WorkerLost
from mlx_ring.rpc.channels import add_secure_port, make_aio_server
from mlx_ring.rpc.hello import Greeted, ask_greeting, check_hello, greeting_handler, make_hello
from mlx_ring.rpc.tls.credentials import Anchor


def test_matching_hellos_are_accepted() -> None:
    check_hello(make_hello(instance="a", epoch=2), make_hello(instance="a", epoch=1), "the head")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("protocol", 99, "speaks protocol 99.*install the same mlx-ring"),
        (
            "protocol",
            3,
            "speaks protocol 3.*install the same mlx-ring",
        ),  # whose digests of models have no weights
        ("mlx_ring", "0.0.1", "mlx-ring 0.0.1.*install mlx-ring"),
        ("mlx", "0.1", "mlx 0.1.*install mlx"),
        ("mlx_lm", "0.2", "mlx-lm 0.2.*install mlx-lm"),
        ("model_digest", "bbb", "model digest bbb, this side aaa"),
        ("plan_digest", "bbb", "plan digest bbb, this side aaa"),
    ],
)
def test_a_difference_is_refused_with_a_remedy(field: str, value: int | str, message: str) -> None:
    ours = make_hello(model_digest="aaa", plan_digest="aaa")
    theirs = make_hello(model_digest="aaa", plan_digest="aaa")
    setattr(theirs, field, value)
    with pytest.raises(VersionMismatch, match=message):
        check_hello(theirs, ours, "node b")


def test_an_absent_digest_is_not_compared() -> None:
    check_hello(make_hello(), make_hello(model_digest="aaa"), "the head")


@pytest.mark.parametrize(
    ("theirs", "ours", "message"),
    [
        ({"instance": "a"}, {"instance": "b"}, "instance a, but this side serves b"),
        ({"epoch": 1}, {"epoch": 2}, "epoch 1, but epoch 2 is in force"),
        ({"fencing_id": 3}, {"fencing_id": 4}, "head 3; head 4 has taken over"),
    ],
)
def test_a_stale_peer_is_refused(
    theirs: dict[str, str | int], ours: dict[str, str | int], message: str
) -> None:
    with pytest.raises(StaleMessage, match=message):
        check_hello(make_hello(**theirs), make_hello(**ours), "node b")  # pyright: ignore[reportArgumentType] - keyword sets vary


async def greet(address: str, authority: Authority) -> Greeted:
    return await asyncio.to_thread(ask_greeting, address, Anchor(authority.pem))


def test_a_head_greets_a_machine_without_a_certificate(tmp_path: Path) -> None:
    async def act() -> Greeted:
        async with running_head(tmp_path) as head:
            return await greet(head.address.enrolment, head.authority)

    greeted = asyncio.run(act())
    assert greeted.hello == make_hello()
    assert abs(greeted.skew_s) <= greeted.uncertain_s


def test_a_late_clock_is_detected(tmp_path: Path) -> None:
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


def test_a_head_of_another_cluster_and_a_stopped_one_are_refused(tmp_path: Path) -> None:
    async def act() -> None:
        async with running_head(tmp_path / "one") as head:
            with pytest.raises(PeerRefused, match="belongs to another cluster"):
                await greet(head.address.enrolment, Authority.open(tmp_path / "other"))
        with pytest.raises((WorkerLost, PeerRefused)):
            await greet(head.address.enrolment, head.authority)

    asyncio.run(act())
