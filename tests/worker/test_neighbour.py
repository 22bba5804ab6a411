"""Whom a rank of MLX's ring takes for the one before it."""

from __future__ import annotations

import socket
from collections.abc import Generator

import pytest

from mlx_ring.core.errors import PeerRefused
from mlx_ring.worker.group import check_neighbour


@pytest.fixture
def port() -> Generator[int]:
    """Address of this process, to which this machine has connected."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        number = listening.getsockname()[1]
        with socket.create_connection(("127.0.0.1", number)), listening.accept()[0]:
            yield number


def test_who_comes_from_where_the_rank_before_is_expected_is_taken(port: int) -> None:
    check_neighbour(f"127.0.0.1:{port}", "")
    check_neighbour(f"127.0.0.1:{port}", "127.0.0.1")


@pytest.mark.parametrize("also", ["", "127.0.0.1:9,"])
def test_who_comes_from_elsewhere_is_refused_at_whichever_port_the_rank_listened(
    port: int, also: str
) -> None:
    with pytest.raises(PeerRefused, match=r"127\.0\.0\.1 came .* before it comes from 10\.0\.8\.1"):
        check_neighbour(f"{also}127.0.0.1:{port}", "10.0.8.1")
