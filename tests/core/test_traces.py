"""Identity of a client."""

from __future__ import annotations

from mlx_ring.core.traces import client_at


def test_addresses_of_one_machine_belong_to_one_client() -> None:
    assert client_at("192.0.2.1") == client_at("::ffff:192.0.2.1") != client_at("192.0.2.2")
    assert client_at("2001:db8::1") == client_at("2001:db8::ffff:1%eth0") != client_at("2001:db8:0:1::1")
    assert client_at("testclient") == "testclient"
