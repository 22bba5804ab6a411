"""Addresses of a machine that others can reach."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlx_ring.host.addresses import HeadAddress, parse_head_address
from mlx_ring.host.interfaces import (
    InterfaceKind,
    LanAddress,
    choose_addresses,
    join_lines,
    lan_addresses,
    lan_urls,
    linux_kind,
    mac_kinds,
    own_names,
)

PORTS = """
Hardware Port: Ethernet
Device: en0
Ethernet Address: 00:00:5e:00:53:01

Hardware Port: Thunderbolt Bridge
Device: bridge0
Ethernet Address: 00:00:5e:00:53:02

Hardware Port: Wi-Fi
Device: en1
Ethernet Address: 00:00:5e:00:53:03

Hardware Port: Thunderbolt Ethernet Slot 2
Device: en7
Ethernet Address: 00:00:5e:00:53:04

Hardware Port: USB 10/100/1000 LAN
Device: en8
Ethernet Address: 00:00:5e:00:53:05

Hardware Port: iPhone USB
Device: en9
Ethernet Address: N/A
"""


def chosen(kinds: dict[str, InterfaceKind], **addresses: list[str]) -> list[str]:
    indexes = {name: number for number, name in enumerate(addresses, start=1)}
    found = choose_addresses(addresses, indexes, lambda name: kinds.get(name, "network"))
    return [f"{one.interface} {one.address}" for one in found]


@pytest.mark.parametrize(
    "interface",
    [
        *("lo", "lo0", "docker0", "br-0123456789ab", "virbr0", "veth12ab", "podman0", "cni0", "vboxnet0"),
        *("bridge100", "vmenet0", "awdl0", "llw0", "anpi1", "flannel.1"),
    ],
)
def test_loopback_and_bridges_of_containers_and_virtual_machines_are_left_out(interface: str) -> None:
    found = choose_addresses({interface: ["172.17.0.1"]}, {interface: 3}, lambda _: "network")
    assert found == []


def test_wired_precedes_wireless_and_link_local_is_last_without_its_scope() -> None:
    kinds: dict[str, InterfaceKind] = {"en1": "wireless", "en0": "wired", "bridge0": "thunderbolt"}
    found = chosen(
        kinds,
        en1=["192.168.1.8"],
        bridge0=["169.254.7.7"],
        en0=["fe80::1%en0", "fd00::1", "192.168.1.7"],
    )
    assert found == [
        "en0 192.168.1.7",
        "en0 fd00::1",
        "en1 192.168.1.8",
        "en0 fe80::1",
        "bridge0 169.254.7.7",
    ]


def test_link_local_addresses_of_a_tunnel_are_left_out() -> None:
    assert chosen({"utun3": "tunnel"}, utun3=["fe80::5%utun3", "100.64.0.9"]) == ["utun3 100.64.0.9"]


def test_addresses_of_this_machine_have_no_loopback_interface() -> None:
    assert all(found.interface != "lo" and found.index > 0 for found in lan_addresses())


def test_each_address_except_ipv6_link_local_has_a_join_line() -> None:
    addresses = [
        LanAddress("en0", 4, address, "wired")
        for address in ("192.168.1.7", "fd00::1", "fe80::1", "169.254.7.7")
    ]
    lines = join_lines(HeadAddress("::", 6000), addresses, "mlxring1abc")
    assert lines == [
        "mlx-ring join 192.168.1.7:6000 --token mlxring1abc",
        "mlx-ring join [fd00::1]:6000 --token mlxring1abc",
        "mlx-ring join 169.254.7.7:6000 --token mlxring1abc",
    ]
    assert parse_head_address(lines[1].split()[2]) == HeadAddress("fd00::1", 6000)


def test_without_an_address_the_join_line_relies_on_discovery() -> None:
    head = HeadAddress("::", 50051)
    assert join_lines(head, [], "t") == ["mlx-ring join --token t"]
    assert join_lines(head, [LanAddress("e", 1, "fe80::1", "wired")], "t") == ["mlx-ring join --token t"]


def test_a_head_with_one_listen_address_is_joined_there() -> None:
    addresses = [LanAddress("en0", 4, "192.168.1.7", "wired"), LanAddress("en1", 5, "10.0.0.7", "wired")]
    assert join_lines(HeadAddress("10.0.0.7", 6000), addresses, "t") == [
        "mlx-ring join 10.0.0.7:6000 --token t"
    ]


def test_other_machines_get_no_address_with_a_scope_of_this_one() -> None:
    assert join_lines(HeadAddress("fe80::7%en0", 6000), [], "t") == ["mlx-ring join --token t"]
    assert lan_urls("fe80::7", 8100, "http", [], ["mini.local"]) == []


@pytest.mark.parametrize(
    ("name", "files", "expected"),
    [
        ("eth0", {"type": "1", "device/x": ""}, "wired"),
        ("wlan0", {"type": "1", "device/x": "", "wireless/x": ""}, "wireless"),
        ("eth0", {"type": "1"}, "network"),
        ("ib0", {"type": "32", "device/x": ""}, "infiniband"),
        ("tailscale0", {"type": "65534", "tun_flags": "0x1001"}, "tunnel"),
        ("wg0", {"type": "65534"}, "tunnel"),
        ("thunderbolt0", {"type": "1", "device/x": ""}, "thunderbolt"),
        ("missing0", {}, "network"),
    ],
)
def test_linux_reports_the_kind_of_an_interface(
    name: str, files: dict[str, str], expected: InterfaceKind, tmp_path: Path
) -> None:
    for file, text in files.items():
        path = tmp_path / "sys" / "class" / "net" / name / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert linux_kind(name, tmp_path) == expected


def test_macos_reports_the_kind_of_an_interface() -> None:
    assert mac_kinds(PORTS) == {
        "en0": "wired",
        "bridge0": "thunderbolt",
        "en1": "wireless",
        "en7": "wired",
        "en8": "wired",
        "en9": "network",
    }


def test_other_machines_reach_a_server_by_its_name_and_its_addresses() -> None:
    found = [
        LanAddress("en0", 1, "192.168.1.7", "wired"),
        LanAddress("en0", 1, "fd00::7", "wired"),
        LanAddress("en0", 1, "fe80::7", "wired"),
    ]
    names = ("mini.local", "mini")
    both = lan_urls("::", 8100, "https", found, names)
    assert both == ["https://mini.local:8100", "https://192.168.1.7:8100", "https://[fd00::7]:8100"]
    assert lan_urls("0.0.0.0", 8100, "http", found, names) == [  # noqa: S104 - compared, not bound
        "http://mini.local:8100",
        "http://192.168.1.7:8100",
    ]
    assert lan_urls("192.168.1.7", 8100, "http", found, names) == ["http://192.168.1.7:8100"]
    assert lan_urls("0.0.0.0", 8100, "http", [], names) == []  # noqa: S104 - compared, not bound
    for local in ("127.0.0.1", "::1", "localhost"):
        assert lan_urls(local, 8100, "http", found, names) == []


def test_own_names_begin_with_the_one_that_mdns_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, names in (
        ("Mini.local", ("mini.local", "mini")),
        ("studio.office.example", ("studio.local", "studio", "studio.office.example")),
        ("localhost", ()),
    ):
        monkeypatch.setattr("socket.gethostname", lambda name=name: name)
        assert own_names() == names
