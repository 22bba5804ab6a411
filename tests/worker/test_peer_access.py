"""How a worker speaks with other machines, and with which no more."""

from __future__ import annotations

from mlx_ring.rpc.tls.certificates import node_name
from mlx_ring.rpc.tls.peers import Peer
from mlx_ring.worker.server import PeerAccess


def test_calls_of_a_machine_that_was_removed_end_when_the_worker_hears_of_it_and_not_each_time() -> None:
    ended: list[str] = []
    reach = PeerAccess(end_refused=lambda: ended.append("calls"))
    lost = Peer(node_name("lost-1"), "7f")
    reach.revoke([])
    assert (reach.revoked.refusal(lost), ended) == ("", [])
    for _ in range(3):
        reach.revoke(["7f"])
    assert "removed from the cluster" in reach.revoked.refusal(lost)
    assert ended == ["calls"]
