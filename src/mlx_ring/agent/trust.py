"""Keeps MLX's collectives to where this machine's owner trusts them: they are neither encrypted nor authenticated.

Whatever a head asks for, a rank listens on loopback or on an interface that was named here, and it is started only where its way
to the next rank leaves by such a one.
"""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mlx_ring.core.errors import ConfigError, PlanError
from mlx_ring.core.trusted_interfaces import (
    FLAG,
    LOOPBACK,
    TrustedInterface,
    source_address,
    trusted_interfaces,
)
from mlx_ring.rpc.joined_ranks import joined_ranks
from mlx_ring.rpc.protos import worker_pb2

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Trust:
    """What the owner named. Interfaces come and go, so they are looked at whenever it matters."""

    named: tuple[str, ...] = ()

    def now(self) -> tuple[tuple[TrustedInterface, ...], str]:
        """Those that are there, and why one that was named is not, or nothing."""
        found, problem = list[TrustedInterface](), ""
        for name in self.named:
            try:
                found += trusted_interfaces([name])
            except ConfigError as error:
                problem = problem or str(error)
        return tuple(dict.fromkeys(found)), problem


def check_hosts(assignments: Iterable[worker_pb2.StageAssignment], trust: Trust) -> None:
    """Raises `PlanError` where a rank is to listen elsewhere than on loopback or a trusted interface."""
    hosts = {one.group_host: one for one in assignments if one.group_host not in {"", LOOPBACK}}
    if not hosts:
        return
    trusted, problem = trust.now()
    by_address = {one.address: one for one in trusted}
    for host, assignment in hosts.items():
        if host not in by_address:
            raise PlanError(
                f"Collectives of {assignment.instance} were to be spoken on {host}, which no {FLAG} of this machine names. "
                f"{problem}".strip()
            )
        log.warning(
            "collectives of %s go over %s in the clear: they are neither encrypted nor authenticated",
            assignment.instance,
            by_address[host],
        )


def check_ways(assignments: Sequence[worker_pb2.StageAssignment], trust: Trust) -> None:
    """Raises `PlanError` where a rank would listen elsewhere, or reach the next one of its group by another interface."""
    own, nexts = _hosts(assignments, 0), _hosts(assignments, 1)
    if not own | nexts:
        return
    allowed = {one.address for one in trust.now()[0]}
    if strange := sorted(own - allowed):
        raise PlanError(f"A rank was to listen on {strange[0]}, which no {FLAG} of this machine names.")
    for host in sorted(nexts):
        try:
            source = source_address(host)
        except OSError as error:
            raise PlanError(
                f"This machine has no way to {host}, where the next rank listens: {error.strerror}."
            ) from error
        # To an address of this machine itself nothing leaves it.
        if source not in {host, *allowed}:
            raise PlanError(
                f"This machine's way to {host}, where the next rank listens, leaves by {source}, which no {FLAG} names: "
                "see its routes, and that no two interfaces have the same network."
            )


def _hosts(assignments: Iterable[worker_pb2.StageAssignment], further: int) -> set[str]:
    """Where ranks listen that come so many places after these, but for loopback."""
    return {
        host
        for assignment in assignments
        if (places := joined_ranks(assignment)) and assignment.group
        for address in assignment.group[
            (places.index((assignment.stage, assignment.rank)) + further) % len(places)
        ].split(",")
        if not _is_loopback(host := address.rpartition(":")[0])
    }


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
