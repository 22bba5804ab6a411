"""Address of a head as a user types it."""

from __future__ import annotations

import pytest

from mlx_ring.core.errors import ConfigError
from mlx_ring.host.addresses import HeadAddress, parse_head_address


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mini.local", HeadAddress("mini.local", 50051)),
        ("192.168.1.7:6000", HeadAddress("192.168.1.7", 6000)),
        (" mini:6000 ", HeadAddress("mini", 6000)),
        ("fe80::1", HeadAddress("fe80::1", 50051)),
        ("[fe80::1%en0]:6000", HeadAddress("fe80::1%en0", 6000)),
        ("[::1]", HeadAddress("::1", 50051)),
    ],
)
def test_host_names_and_ipv4_and_ipv6_addresses_are_parsed(text: str, expected: HeadAddress) -> None:
    assert parse_head_address(text) == expected


@pytest.mark.parametrize("text", ["", "a b", "mini:", "mini:0", "mini:65535", "mini:http", "[::1", "a:b:c"])
def test_an_invalid_address_is_refused_with_its_value(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_head_address(text)
    assert str(caught.value).startswith(f"{text!r} is no address of a head")


def test_the_enrolment_port_is_the_next_one() -> None:
    assert parse_head_address("mini:6000").enrolment == "mini:6001"
    assert parse_head_address("::1").enrolment == "[::1]:50052"
