"""Which machine of a file is this one."""

from __future__ import annotations

import pytest

from mlx_ring.cluster.lifecycle.arguments import (
    Place,
    Target,
    head_host,
    own_addresses,
    place_of,
    resolve,
    target_of,
)
from mlx_ring.settings.devices_file import Device

OWN = frozenset({"192.168.5.2", "fd77::2", "127.0.0.1"})
NAMES = {"studio.local": {"192.168.5.2"}, "mini.local": {"192.168.5.1"}, "odd": {"127.0.1.1"}}


def names(name: str) -> set[str]:
    return NAMES.get(name, {name} if name[0].isdigit() or ":" in name else set())


@pytest.mark.parametrize(
    ("host", "address", "where"),
    [
        ("studio.local", "", "here"),
        ("mini.local", "", "elsewhere"),
        ("192.168.5.2", "", "here"),
        ("fd77::2", "", "here"),
        ("127.0.0.1", "", "here"),
        ("localhost", "", "here"),
        ("LOCALHOST", "", "here"),
        ("odd", "", "here"),
        ("unknown-alias", "", "elsewhere"),
        ("unknown-alias", "192.168.5.2", "here"),
    ],
)
def test_the_local_machine_is_recognized_by_its_addresses(host: str, address: str, where: str) -> None:
    assert place_of(Device("a", host, address=address), Target(host), OWN, names).is_here == (where == "here")


@pytest.mark.parametrize(
    ("line", "where"),
    [
        ("port 22", "here"),
        ("proxyjump none", "here"),
        ("port 2222", "elsewhere"),
        ("proxyjump me@gate", "elsewhere"),
        ("proxycommand nc %h %p", "elsewhere"),
    ],
)
def test_loopback_behind_another_port_or_a_jump_host_is_not_local(line: str, where: str) -> None:
    target = target_of(f"host box\nhostname 127.0.0.1\n{line}\n")
    assert target.host == "127.0.0.1"
    assert place_of(Device("box", "box"), target, OWN, names).is_here == (where == "here")


def test_own_addresses_contain_loopback() -> None:
    assert "127.0.0.1" in own_addresses()
    assert "127.0.0.1" in resolve("localhost")
    assert resolve("no-such-name.invalid") == frozenset()


def test_others_reach_the_coordinator_by_its_tensor_address_or_name() -> None:
    other = Place(Device("b", "b"), "127.0.0.1", is_here=False)
    assert head_host(Place(Device("a", "a", address="10.0.0.1"), "a", is_here=True), other) == "10.0.0.1"
    assert head_host(Place(Device("a", "me@a"), "a", is_here=False), other) == "a"


def test_this_machine_is_reached_by_its_address_on_the_route() -> None:
    here = Place(Device("a", "localhost"), "localhost", is_here=True)
    assert head_host(here, Place(Device("b", "b"), "127.0.0.1", is_here=False)) == "127.0.0.1"
