"""Selection of a machine's interfaces by name, address or network."""

from __future__ import annotations

import pytest

from mlx_ring.core.errors import ConfigError
from mlx_ring.host.interfaces import OwnAddress, TrustedInterface, find_trusted, source_address

INTERFACES = {
    "lo": [OwnAddress("127.0.0.1", "255.0.0.0"), OwnAddress("::1")],
    "eth0": [OwnAddress("192.168.1.7", "255.255.255.0"), OwnAddress("fd00::7")],
    "thunder0": [OwnAddress("fe80::9"), OwnAddress("10.0.8.2", "255.255.255.252")],
    "six0": [OwnAddress("fd08::2")],
    "tunnel0": [OwnAddress("100.64.3.4", "255.255.255.255")],
}
CABLE = TrustedInterface("thunder0", "10.0.8.2", "10.0.8.0/30")


@pytest.mark.parametrize("named", ["thunder0", "10.0.8.2", "10.0.8.0/30"])
def test_an_interface_is_found_by_its_name_its_address_or_its_network(named: str) -> None:
    assert find_trusted([named], INTERFACES) == (CABLE,)


def test_a_named_network_is_kept_as_given() -> None:
    assert find_trusted(["100.64.0.0/10"], INTERFACES) == (
        TrustedInterface("tunnel0", "100.64.3.4", "100.64.0.0/10"),
    )


def test_interfaces_keep_their_order_and_appear_once() -> None:
    found = find_trusted(["thunder0", "eth0", "10.0.8.0/24"], INTERFACES)
    assert [one.name for one in found] == ["thunder0", "eth0", "thunder0"]
    assert find_trusted(["eth0", "eth0"], INTERFACES) == find_trusted(["eth0"], INTERFACES)


@pytest.mark.parametrize(
    ("named", "message"),
    [
        (
            "thunder1",
            r"names thunder1, but this machine has no such interface that is up: it has eth0, lo, six0",
        ),
        ("10.1.0.0/16", "no such interface"),
        ("six0", "six0, which has no IPv4 address: MLX's collectives need one"),
        ("fd08::/64", "has no IPv4 address"),
    ],
)
def test_a_missing_interface_or_one_without_ipv4_is_refused(named: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_trusted([named], INTERFACES)


def test_the_source_address_of_loopback_is_loopback() -> None:
    assert source_address("127.0.0.1") == "127.0.0.1"
