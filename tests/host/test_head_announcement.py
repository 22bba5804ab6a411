"""Announcement of a head on the LAN, and announcements of strangers."""

from __future__ import annotations

import asyncio
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_ring.host.addresses import HeadAddress
from mlx_ring.host.head_announcement import (
    FoundHead,
    HeadAnnouncement,
    HeadPlace,
    multicast_interfaces,
    read_addresses,
    read_properties,
)
from mlx_ring.host.interfaces import LanAddress

HEAD = HeadAnnouncement("home", "mini-7f3a", "0.1.0", "0123456789abcdef")


def as_sent(head: HeadAnnouncement) -> dict[bytes, bytes | None]:
    return {name.encode(): value.encode() for name, value in head.properties().items()}


def test_sent_properties_are_read_back() -> None:
    assert read_properties(as_sent(HEAD)) == HEAD
    assert HEAD.instance(50051) == "home on mini-7f3a"
    assert HEAD.instance(6000) == "home on mini-7f3a port 6000"
    assert HEAD.host == "mlx-ring-mini-7f3a.local."


def test_only_sixteen_digits_of_the_fingerprint_are_sent() -> None:
    whole = HeadAnnouncement("home", "mini-7f3a", "0.1.0", "0123456789abcdef" * 4)
    assert whole.properties()["ca"] == "0123456789abcdef"


@given(st.text(), st.text())
def test_every_name_gives_a_valid_label_and_host(cluster: str, node: str) -> None:
    head = HeadAnnouncement(cluster, node, "0.1.0", "")
    for port in (50051, 65534):
        instance = head.instance(port)
        assert len(instance.encode()) <= 63
        assert "." not in instance
        assert instance.isprintable()
    assert head.host.removesuffix(".local.").replace("-", "").isalnum()
    assert all(len(f"{name}={value}".encode()) <= 255 for name, value in head.properties().items())


@given(st.dictionaries(st.sampled_from([b"cluster", b"node", b"version", b"ca"]), st.none() | st.binary()))
def test_properties_of_strangers_contain_no_control_characters(properties: dict[bytes, bytes | None]) -> None:
    read = read_properties(properties)
    texts = (read.cluster, read.node, read.version, read.authority)
    assert all(text.isprintable() and len(text) <= 60 for text in texts)
    assert read.authority == "" or int(read.authority, 16) >= 0


def test_addresses_are_unique_with_the_likeliest_first() -> None:
    sent = ["fe80::1%lo", "fd00::2", "169.254.3.4", "192.168.1.7", "192.168.1.7", "::", "ff02::1"]
    assert read_addresses(sent) == ("192.168.1.7", "fd00::2", "169.254.3.4", "fe80::1%lo")


def test_a_link_local_address_gets_its_interface_or_every_possible_one() -> None:
    index, name = socket.if_nameindex()[0]
    assert read_addresses([f"fe80::1%{index}"], ["en0"]) == (f"fe80::1%{name}",)
    for unknown in ("fe80::2", "fe80::2%0", "fe80::2%4000000", "fe80::2%99999999999999999999"):
        assert read_addresses([unknown], ["en0", "en1"]) == ("fe80::2%en0", "fe80::2%en1")
        assert read_addresses([unknown]) == ()


def test_a_found_head_has_addresses_for_join() -> None:
    found = FoundHead(HEAD, 50051, ("192.168.1.7", "fe80::1%en0"))
    assert found.joinable == (HeadAddress("192.168.1.7"), HeadAddress("fe80::1%en0"))
    assert list(map(str, found.joinable)) == ["192.168.1.7:50051", "[fe80::1%en0]:50051"]
    assert found.as_json()["ca"] == "0123456789abcdef"


class Clock:
    """Clock that a test sets."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


def test_a_lost_head_is_looked_for_and_asked_at_both_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    old, new, kept, looks = (
        HeadAddress("192.168.1.7"),
        HeadAddress("192.168.1.8"),
        list[HeadAddress](),
        list[str](),
    )
    clock = Clock()
    monkeypatch.setattr("mlx_ring.host.head_announcement.time", clock)

    def look(lost: HeadAddress) -> HeadAddress:
        looks.append(lost.host)
        return new

    place = HeadPlace(old, look, kept.append)

    async def chosen_after(seconds: float) -> tuple[str, bool]:
        clock.now_s += seconds
        await place.choose()
        return place.address.host, place.is_guessed

    async def act() -> None:
        place.answered()
        assert [await chosen_after(seconds) for seconds in (0, 19)] == [(old.host, False)] * 2
        assert (looks, kept) == ([], [old])
        assert await chosen_after(1) == (new.host, True)
        assert [await chosen_after(seconds) for seconds in (1, 58)] == [(old.host, False)] * 2
        assert await chosen_after(1) == (new.host, True)
        place.answered()
        assert (place.address, place.is_guessed, kept) == (new, False, [old, new])
        assert await chosen_after(100) == (new.host, False)
        assert looks == [old.host] * 2

    asyncio.run(act())


def test_a_name_that_was_given_is_kept_and_asked_beside_the_address_of_the_head(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr("mlx_ring.host.head_announcement.time", clock)
    name, found, kept = HeadAddress("head.tailnet.ts.net"), HeadAddress("192.168.1.8"), list[HeadAddress]()
    place = HeadPlace(name, lambda _: found, kept.append)

    async def chosen_after(seconds: float) -> str:
        clock.now_s += seconds
        await place.choose()
        return place.address.host

    async def act() -> None:
        assert [await chosen_after(seconds) for seconds in (0, 20)] == [name.host, found.host]
        place.answered()
        assert kept == [name]
        assert [await chosen_after(1) for _ in range(3)] == [name.host, found.host, name.host]
        place.answered()
        assert kept == [name] * 2
        assert await chosen_after(1) == name.host

    asyncio.run(act())


def test_an_address_of_another_head_is_asked_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    for seconds in ("_LOOK_AFTER_S", "_LOOK_EVERY_S"):
        monkeypatch.setattr(f"mlx_ring.host.head_announcement.{seconds}", 0.0)
    old, other = HeadAddress("192.168.1.7"), HeadAddress("192.168.1.8")
    place = HeadPlace(old, lambda _: other)

    async def act() -> None:
        await place.choose()
        assert place.address == other
        place.refuse_guess()
        for _ in range(2):
            await place.choose()
            assert place.address == old

    asyncio.run(act())


def test_a_failed_search_leaves_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: HeadAddress) -> HeadAddress:
        raise OSError("no network")

    monkeypatch.setattr("mlx_ring.host.head_announcement._LOOK_AFTER_S", 0.0)
    place = HeadPlace(HeadAddress("192.168.1.7"), fail)
    asyncio.run(place.choose())
    assert place.address == HeadAddress("192.168.1.7")


@pytest.mark.parametrize(("kind", "expected"), [("wired", ["10.0.0.1", 2]), ("tunnel", [])])
def test_multicast_uses_every_interface_except_tunnels(kind: str, expected: list[str | int]) -> None:
    addresses = [LanAddress("e", 2, address, kind) for address in ("10.0.0.1", "fd00::1", "fe80::1")]  # pyright: ignore[reportArgumentType] - a kind by parameter
    assert multicast_interfaces(addresses) == expected
