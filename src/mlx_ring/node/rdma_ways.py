"""Which RDMA device of each rank leads to each other one of its group, by the hostfile. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from mlx_ring.cluster.deployment import Site
from mlx_ring.core.hostfile import Hostfile, is_loopback
from mlx_ring.core.rdma import as_json, is_mesh, is_ring, part_of
from mlx_ring.node.seats import Stage
from mlx_ring.rpc.joined_ranks import joined_ranks
from mlx_ring.rpc.protos import worker_pb2


def tell_rdma(
    assignments: Iterable[worker_pb2.StageAssignment], seats: Sequence[Stage], hosts: Hostfile
) -> None:
    """Write into each rank's assignment the group's part of the matrix, where all its machines are in the file and connected."""
    if hosts.rdma is None:
        return
    for assignment in assignments:
        sites = [seats[stage][rank].site for stage, rank in joined_ranks(assignment)]
        places = [place for site in sites if (place := _place_of(site, hosts)) is not None]
        if not len(set(places)) == len(sites) > 1:
            continue
        # Of a ring some may be no neighbours, so that nothing connects them.
        part = part_of(hosts.rdma, places)
        if is_mesh(part) or is_ring(part):
            assignment.rdma = json.dumps(as_json(part))
            assignment.group_environment.update(hosts.variables)


def _place_of(site: Site, hosts: Hostfile) -> int | None:
    """The file's host that is the site, by the addresses at which others reach it."""
    addresses = {trusted.address for trusted in site.trusted} | set(site.hosts.values())
    for place, host in enumerate(hosts.hosts):
        if addresses & set(host.ips) or (site.is_local and is_loopback(host.ssh)):
            return place
    return None
