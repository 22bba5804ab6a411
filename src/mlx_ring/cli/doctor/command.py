"""`mlx-ring doctor`: runs every check and tells what was found, with a fix for each trouble.

Every check, in the order in which one trouble explains another.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from mlx_ring.cli.doctor.finding import Finding, Level
from mlx_ring.cli.doctor.head import check_head, check_own_certificate
from mlx_ring.cli.doctor.machine import (
    check_address_space,
    check_descriptors,
    check_disk,
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
    check_lan,
    check_name,
    check_port,
    check_round_trip,
    check_throughput,
)
from mlx_ring.core.cluster_folders import node_folder
from mlx_ring.host.addresses import CLUSTER_PORT, HeadAddress, parse_head_address
from mlx_ring.host.interfaces import lan_addresses
from mlx_ring.settings.config import Settings, state_folder
from mlx_ring.settings.settings_sources import load_settings

_STYLES: dict[Level, str] = {"ok": "green", "note": "cyan", "warning": "yellow", "broken": "red"}


def doctor(
    head: Annotated[
        str | None,
        typer.Argument(metavar="[HEAD[:PORT]]", help="A head to compare versions and clocks with."),
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST[:PORT]", help="Another machine to reach; may be given several times."),
    ] = None,
    port: Annotated[int | None, typer.Option(help="The port that a server here would have.")] = None,
    state_dir: Annotated[str | None, typer.Option(metavar="DIR", help="This machine's state folder.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Look for what keeps this machine from serving, alone or in a cluster. Exit code 1 where something is broken."""
    from mlx_ring.cli.doctor.command import examine  # gRPC, for one command

    settings = load_settings({"state_dir": state_dir, "port": port})
    asked = parse_head_address(head) if head is not None else None
    peers = [parse_head_address(text) for text in peer or ()]
    findings: list[Finding] = []
    for finding in examine(settings, asked, peers):
        findings.append(finding)
        if not as_json:
            _show(finding)
    broken = sum(finding.level == "broken" for finding in findings)
    if as_json:
        print(json.dumps({"broken": broken, "findings": [one.as_json() for one in findings]}, indent=1))
    else:
        print(f"\n{broken} of {len(findings)} findings must be mended." if broken else "\nNothing is broken.")
    if broken:
        raise typer.Exit(1)


def _show(finding: Finding) -> None:
    console = Console(soft_wrap=True, highlight=False)
    line = Text.assemble(
        (f"{finding.level:8}", _STYLES[finding.level]), (f"{finding.what}: ", "bold"), finding.value
    )
    console.print(line)
    if finding.fix:
        console.print(Text(f"        {finding.fix}"))
    sys.stdout.flush()


def examine(settings: Settings, head: HeadAddress | None, peers: Sequence[HeadAddress]) -> Iterator[Finding]:
    """Every check, one by one: some take seconds."""
    state = state_folder(settings)
    yield check_installed()
    yield check_mlx()
    yield check_memory()
    yield check_address_space()
    yield from check_wired_limit()
    yield check_descriptors(settings.file_descriptor_limit)
    yield check_state_folder(state)
    yield check_disk(state)
    yield from check_own_certificate(node_folder(state))
    yield from _examine_network(settings.port)
    if head is not None:
        yield from _examine_head(head, node_folder(state))
    for peer in peers:
        yield from _examine_way(peer, (peer.port,))


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
    way = list(_examine_way(head, (head.port, head.enrolment_port)))
    yield from way
    if any(finding.level == "broken" for finding in way):
        yield Finding("note", f"head {head}", "neither compared nor measured: it was not reached", _MEND)
    else:
        yield from check_head(head, folder)
        yield check_throughput(head, folder)


_MEND = "Mend the way to it first."


def _examine_way(address: HeadAddress, ports: Sequence[int]) -> Iterator[Finding]:
    name = check_name(address.host)
    yield name
    if name.level != "broken":
        yield from (check_round_trip(address.host, port) for port in ports)
