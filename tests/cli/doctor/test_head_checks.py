"""Comparison of a head with this machine: versions, clocks, clusters, certificates."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography import x509
from tests.machines import NOW, node_credentials, running_head

from mlx_ring.cli.doctor import Finding
from mlx_ring.cli.doctor.network import (
    check_clock,
    check_dates,
    check_head,
    check_own_certificate,
    check_versions,
)
from mlx_ring.cluster.security.authority import Authority
from mlx_ring.host.addresses import HeadAddress
from mlx_ring.rpc.channels import add_secure_port, make_aio_server
from mlx_ring.rpc.hello import Greeted, greeting_handler, make_hello
from mlx_ring.rpc.protos import hello_pb2


def levels(findings: list[Finding]) -> dict[str, str]:
    return {finding.what: finding.level for finding in findings}


@asynccontextmanager
async def greeting(
    folder: Path, hello: Callable[[], hello_pb2.Hello] = make_hello, clock: Callable[[], float] = time.time
) -> AsyncGenerator[HeadAddress]:
    """Start a head that only answers a greeting."""
    server = make_aio_server()
    server.add_generic_rpc_handlers((greeting_handler(hello, clock),))
    credentials = Authority.open(folder).head_credentials().for_strangers()
    port = add_secure_port(server, "127.0.0.1:0", credentials)
    await server.start()
    try:
        yield HeadAddress("127.0.0.1", port - 1)
    finally:
        await server.stop(None)


def examined(folder: Path, **options: Callable[[], object]) -> list[Finding]:
    """Return the findings about a head that greets with these options."""

    async def act() -> list[Finding]:
        async with greeting(folder, **options) as address:  # pyright: ignore[reportArgumentType] - by name
            return await asyncio.to_thread(check_head, address, folder / "node")

    return asyncio.run(act())


def old_hello() -> hello_pb2.Hello:
    hello = make_hello()
    hello.mlx = "0.1.0"
    return hello


def test_a_head_with_equal_versions_passes_and_another_mlx_is_named(tmp_path: Path) -> None:
    assert set(levels(examined(tmp_path)).values()) <= {"ok", "note"}
    found = examined(tmp_path, hello=old_hello)
    assert levels(found) | {"mlx": "broken", "mlx-lm": "ok"} == levels(found)
    (mlx,) = [finding for finding in found if finding.what == "mlx"]
    assert mlx.value.startswith("0.1.0 on the head, ")
    assert mlx.fix.startswith("Install mlx 0.1.0 here")


def test_a_skewed_clock_is_found(tmp_path: Path) -> None:
    assert levels(examined(tmp_path, clock=lambda: time.time() - 60))["clock"] == "warning"
    assert levels(examined(tmp_path, clock=lambda: time.time() + 7200))["clock"] == "broken"


def test_a_slow_link_is_no_clock_skew() -> None:
    assert check_clock(Greeted(make_hello(), 9.0, 9.0)).level == "ok"


def test_another_protocol_is_the_only_finding() -> None:
    (finding,) = check_versions(hello_pb2.Hello(protocol=9), make_hello())
    assert (finding.level, finding.what) == ("broken", "protocol")


def test_a_head_of_another_cluster_is_recognized(tmp_path: Path) -> None:
    async def act() -> tuple[list[Finding], list[Finding]]:
        async with running_head(tmp_path / "one") as one, running_head(tmp_path / "two") as two:
            await one.join(tmp_path / "node", one.token())
            own = await asyncio.to_thread(check_head, one.address, tmp_path / "node")
            return own, await asyncio.to_thread(check_head, two.address, tmp_path / "node")

    own, other = asyncio.run(act())
    assert own[0].level == "ok"
    assert (other[0].level, "belongs to another cluster" in other[0].value) == ("broken", True)


def test_without_a_head_a_note_says_that_nothing_was_compared(tmp_path: Path) -> None:
    found = check_head(HeadAddress("127.0.0.1", 1), tmp_path)
    assert [finding.level for finding in found] == ["broken", "note"]
    assert "not compared" in found[1].value


@pytest.mark.parametrize(("days", "level"), [(0, "ok"), (-300, "note"), (-366, "broken"), (30, "broken")])
def test_a_certificate_s_dates_are_checked_against_this_clock(days: int, level: str, tmp_path: Path) -> None:
    authority = Authority.open(tmp_path / "cluster")
    credentials = node_credentials(authority, "mini-7f3a", NOW + timedelta(days=days))
    credentials.save(tmp_path / "node")
    (finding,) = check_own_certificate(tmp_path / "node")
    assert (finding.level, finding.what) == (level, "certificate of this machine")
    assert finding.level == "ok" or finding.fix


def test_a_machine_that_has_not_joined_has_no_certificate_to_check(tmp_path: Path) -> None:
    assert check_own_certificate(tmp_path) == ()


def test_a_head_whose_certificate_is_not_valid_yet_points_at_the_clock(tmp_path: Path) -> None:
    shown = Authority.open(tmp_path).head_credentials().certificate
    certificate = x509.load_pem_x509_certificate(shown)
    finding = check_dates("certificate", certificate, NOW - timedelta(days=3))
    assert (finding.level, "clock" in finding.fix) == ("broken", True)
