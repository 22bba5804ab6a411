"""Restriction of MLX's collectives and of unencrypted links, which anyone can read and forge, to trusted interfaces.

A rank listens only on loopback or on an interface that was named here, whatever a head requests. It is loaded, or linked again,
only if its routes to the ranks that it exchanges with leave through such an interface.
"""

from __future__ import annotations

import ipaddress
import json
import logging
from collections.abc import Collection, Iterable

from mlx_ring.core.errors import PlanError
from mlx_ring.host.interfaces import (
    LOOPBACK,
    TRUST_FLAG,
    Trust,
    source_address,
)
from mlx_ring.rpc.backends import (
    BACKENDS,
    backend_of,
    devices_of,
    joined_ranks,
    rank_in_group,
    sends_in_the_clear,
)
from mlx_ring.rpc.protos import worker_pb2
from mlx_ring.settings.hostfile import RING_OF_JACCL

log = logging.getLogger(__name__)

_RDMA = "rdma_"
_VARIABLES = frozenset({RING_OF_JACCL})
"""Variables that a head may set for a group; others could redirect its traffic."""


def check_hosts(assignments: Iterable[worker_pb2.StageAssignment], trust: Trust) -> None:
    """Raise `PlanError` if a rank would listen elsewhere than on loopback or a trusted interface."""
    hosts = {one.group_host: one for one in assignments if one.group_host not in {"", LOOPBACK}}
    if not hosts:
        return
    trusted, problem = trust.now()
    by_address = {one.address: one for one in trusted}
    for host, assignment in hosts.items():
        if host not in by_address:
            raise PlanError(
                f"Collectives of {assignment.instance} would use {host}, which no {TRUST_FLAG} of this machine names. "
                f"{problem}".strip()
            )
        log.warning(
            "Collectives of %s go over %s in the clear: they are neither encrypted nor authenticated",
            assignment.instance,
            by_address[host],
        )


def check_routes(assignments: Iterable[worker_pb2.StageAssignment], trust: Trust) -> None:
    """Raise `PlanError` if a group's traffic would leave loopback and the trusted interfaces."""
    own, others = set[str](), set[str]()
    for assignment in assignments:
        if places := joined_ranks(assignment):
            _check_assignment(assignment, len(places), trust)
            place, backend = rank_in_group(assignment), BACKENDS[backend_of(assignment)]
            own |= _hosts(assignment.group[place])
            others |= _hosts(assignment.group[(place + 1) % len(places)])
            others |= _hosts(assignment.group[0]) if backend.meets_at_rank_0 else set[str]()
            # The rank before connects to this one.
            others |= _hosts(f"{assignment.group_from or LOOPBACK}:0")
    if own | others:
        _check_interfaces(own, others, {one.address for one in trust.now()[0]})


def check_links(assignments: Iterable[worker_pb2.StageAssignment], trust: Trust) -> None:
    """Raise `PlanError` if an unencrypted link would leave loopback and the trusted interfaces."""
    others = set[str]().union(*(_receivers(one) for one in assignments if sends_in_the_clear(one)))
    if others:
        _check_interfaces((), others, {one.address for one in trust.now()[0]})


def _receivers(assignment: worker_pb2.StageAssignment) -> set[str]:
    """Return the hosts on other machines to which a worker's links lead."""
    ends = [
        (assignment.next_address, assignment.next_node),
        (assignment.first_address, assignment.first_node),
        *((end.address, end.node) for end in (*assignment.next_ranks, *assignment.first_ranks)),
    ]
    return _hosts(",".join(address for address, node in ends if address and node))


def trusted_devices(devices: Iterable[str], trust: Trust) -> list[str]:
    """Return the RDMA devices of trusted interfaces; `rdma_en5` belongs to `en5`, which needs no address for it."""
    names = {*trust.named, *(one.name for one in trust.now()[0])}
    return [device for device in devices if device.removeprefix(_RDMA) in names]


def _check_assignment(assignment: worker_pb2.StageAssignment, ranks: int, trust: Trust) -> None:
    """Raise `PlanError` if the assignment would direct a group elsewhere."""
    backend, who = backend_of(assignment), f"The group of {assignment.instance}"
    if len(assignment.group) != ranks:
        raise PlanError(f"{who} has {ranks} ranks, but {len(assignment.group)} addresses were given.")
    if foreign := sorted(assignment.group_environment.keys() - _VARIABLES):
        raise PlanError(f"{who} was requested with {foreign[0]}, which no head may set.")
    if not BACKENDS[backend].joins_machines and (elsewhere := sorted(_hosts(",".join(assignment.group)))):
        raise PlanError(f"{who} would reach {elsewhere[0]}, but {backend} only joins workers of one machine.")
    if BACKENDS[backend].uses_rdma:
        devices = devices_of(json.loads(assignment.rdma or "[]")[rank_in_group(assignment)])
        if strange := sorted(set(devices) - set(trusted_devices(devices, trust))):
            raise PlanError(
                f"{who} would use {strange[0]}, but no {TRUST_FLAG} of this machine names its interface."
            )


def _check_interfaces(own: Iterable[str], others: Iterable[str], allowed: Collection[str]) -> None:
    if strange := sorted(set(own) - set(allowed)):
        raise PlanError(f"A rank would listen on {strange[0]}, which no {TRUST_FLAG} of this machine names.")
    for host in sorted(others):
        try:
            # A name could lead elsewhere the next time.
            source = source_address(str(ipaddress.IPv4Address(host)))
        except (OSError, ValueError) as error:
            raise PlanError(
                f"This machine has no route to {host}, the address of another rank: {error}."
            ) from error
        # Traffic to an own address does not leave this machine.
        if source not in {host, *allowed}:
            raise PlanError(
                f"The route to {host}, the address of another rank, leaves through {source}, which no {TRUST_FLAG} "
                "names. Check the routes, and that no two interfaces have the same network."
            )


def _hosts(addresses: str) -> set[str]:
    """Return the hosts of comma-separated addresses, except loopback."""
    hosts = (address.rpartition(":")[0] for address in addresses.split(",") if address)
    return {host for host in hosts if not _is_loopback(host)}


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
