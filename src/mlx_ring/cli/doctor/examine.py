"""All checks of `mlx-ring doctor`, ordered so that a problem comes before its consequences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from mlx_ring.cli.doctor import Finding
from mlx_ring.cli.doctor.machine_checks import (
    check_address_space,
    check_descriptors,
    check_disk,
    check_energy,
    check_fast_links,
    check_installed,
    check_memory,
    check_mlx,
    check_rdma,
    check_state_folder,
    check_wired_limit,
)
from mlx_ring.cli.doctor.network import (
    check_firewall,
    check_head,
    check_lan,
    check_name,
    check_own_certificate,
    check_port,
    check_round_trip,
    check_throughput,
)
from mlx_ring.core.folders import node_folder, state_folder
from mlx_ring.host.addresses import CLUSTER_PORT, HeadAddress
from mlx_ring.host.interfaces import lan_addresses
from mlx_ring.settings.config import Settings


def examine(settings: Settings, head: HeadAddress | None, peers: Sequence[HeadAddress]) -> Iterator[Finding]:
    """Yield the result of each check; some checks take seconds."""
    state = state_folder(settings.state_dir)
    yield check_installed()
    yield from check_mlx()
    yield check_memory()
    yield check_address_space()
    yield from check_wired_limit()
    yield check_energy()
    yield check_descriptors(settings.file_descriptor_limit)
    yield check_state_folder(state)
    yield check_disk(state)
    yield from check_own_certificate(node_folder(state))
    yield from _examine_network(settings.port)
    if head is not None:
        yield from _examine_head(head, node_folder(state))
    for peer in peers:
        yield from _examine_route(peer, (peer.port,))


def _examine_network(http_port: int) -> Iterator[Finding]:
    addresses = lan_addresses()
    yield check_lan(addresses)
    yield check_fast_links(addresses)
    yield from check_rdma()
    if http_port:
        yield check_port(http_port, "HTTP")
    yield check_port(CLUSTER_PORT, "members of the cluster")
    yield check_port(CLUSTER_PORT + 1, "machines that join")
    yield check_firewall((CLUSTER_PORT, CLUSTER_PORT + 1))


def _examine_head(head: HeadAddress, folder: Path) -> Iterator[Finding]:
    findings = list(_examine_route(head, (head.port, head.enrolment_port)))
    yield from findings
    if any(finding.level == "broken" for finding in findings):
        yield Finding(
            "note", f"head {head}", "neither compared nor measured, because it was not reached", _MEND
        )
    else:
        yield from check_head(head, folder)
        yield check_throughput(head, folder)


_MEND = "Fix the connection to it first."


def _examine_route(address: HeadAddress, ports: Sequence[int]) -> Iterator[Finding]:
    name = check_name(address.host)
    yield name
    if name.level != "broken":
        yield from (check_round_trip(address.host, port) for port in ports)
