"""Weights are sent only between members of the cluster."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from cryptography import x509
from tests.agent.weights.nodes import all_pieces, ignore_progress, write_pieces
from tests.machines import listening, node_credentials

from mlx_ring.agent.weights.serving import WeightsService
from mlx_ring.agent.weights.stages import fetch, fetch_manifest
from mlx_ring.agent.weights.store import WeightStore
from mlx_ring.agent.weights.transfer import PeerChannel
from mlx_ring.cluster.security.authority import Authority
from mlx_ring.core.errors import WeightsMissing
from mlx_ring.rpc.channels import WEIGHTS_MESSAGE_BYTES, open_aio_channel
from mlx_ring.rpc.tls.caller_checks import AioPeerGuard
from mlx_ring.rpc.tls.peers import Revoked, node_name, peer_of_certificate

MB = 1 << 20


def test_only_members_of_the_cluster_get_weights(tmp_path: Path) -> None:
    authority, other = Authority.open(tmp_path / "cluster"), Authority.open(tmp_path / "other")
    server, member, removed = (node_credentials(authority, name) for name in ("big-1", "mini-1", "former-1"))
    serial = peer_of_certificate(x509.load_pem_x509_certificate(removed.certificate)).serial
    manifest = write_pieces(tmp_path / "model", [MB, MB])
    service = WeightsService("big-1", None)
    service.offer(tmp_path / "model", manifest)
    cases = {
        "member": (member, node_name("big-1"), ""),
        "removed": (removed, node_name("big-1"), "has been removed from the cluster"),
        "stranger": (node_credentials(other, "mini-1"), node_name("big-1"), "big: "),
        "deceived": (member, node_name("huge-1"), "big: "),
    }

    async def act() -> None:
        async with listening(server, AioPeerGuard(Revoked([serial]).refusal), service.handler()) as address:
            for case, (credentials, name, refusal) in cases.items():
                model = WeightStore(tmp_path / case).create(manifest)
                limit = WEIGHTS_MESSAGE_BYTES
                async with open_aio_channel(address, credentials, name, max_message_bytes=limit) as channel:
                    peers = [PeerChannel("big", channel)]
                    if refusal:
                        with pytest.raises(WeightsMissing, match=refusal):
                            await fetch_manifest(manifest.digest, peers, "mini")
                        with pytest.raises(WeightsMissing, match=refusal):
                            await fetch(model, all_pieces(manifest), peers, "mini", ignore_progress)
                        assert model.have == frozenset()
                    else:
                        assert await fetch_manifest(manifest.digest, peers, "mini") == manifest
                        got = await fetch(model, all_pieces(manifest), peers, "mini", ignore_progress)
                        assert got.nbytes == 2 * MB

    asyncio.run(act())
