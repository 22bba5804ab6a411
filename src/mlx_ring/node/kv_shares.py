"""Memory for KV, shared among the instances that are loaded: whoever comes or goes changes what the others may hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mlx_ring.engine.engine import Engine
from mlx_ring.engine.executor import RankId
from mlx_ring.engine.kv_limits import Place, rank_limits
from mlx_ring.engine.policy import RankKv
from mlx_ring.rpc.protos import agent_pb2, worker_pb2


@dataclass(slots=True)
class _Share:
    workers: dict[Place, worker_pb2.WorkerStatus]
    engine: Engine | None = None


class KvShares:
    """Who is loaded."""

    def __init__(self, given_bytes: int | None) -> None:
        """`given_bytes` is each worker's where it was said; else every node's is shared out."""
        self._given_bytes = given_bytes
        self._reserve_shares: dict[str, float] = {}
        self._shares: dict[str, _Share] = {}

    def join(
        self,
        instance: str,
        workers: Mapping[Place, worker_pb2.WorkerStatus],
        reserve_shares: Mapping[str, float],
    ) -> Mapping[RankId, RankKv]:
        """What a newcomer may hold; the others give it up.

        Args:
            instance: the newcomer.
            workers: as they say they are.
            reserve_shares: by node, what is kept free of its memory.
        """
        self._shares.pop(instance, None)
        self._shares[instance] = _Share(dict(workers))
        self._reserve_shares |= reserve_shares
        limits = self._limits()
        self._apply(limits)
        return limits[instance]

    def attach(self, instance: str, engine: Engine) -> None:
        """The newcomer's engine: it is told when its share changes."""
        self._shares[instance].engine = engine

    def hear(self, event: agent_pb2.AgentEvent) -> None:
        """Take in how workers stand now."""
        for state in event.workers:
            share = self._shares.get(state.instance)
            place = (event.hello.node, RankId(state.stage, state.rank))
            if share is not None and place in share.workers and state.status.phase == "ready":
                share.workers[place] = state.status

    def leave(self, instance: str) -> None:
        """An instance is gone: what it held is the others'."""
        gone = self._shares.pop(instance, None)
        if gone is None:
            return
        for (node, _), status in gone.workers.items():
            self._give_back(node, status)
        self._apply(self._limits())

    def _give_back(self, node: str, gone: worker_pb2.WorkerStatus) -> None:
        for share in self._shares.values():
            for (other, _), status in share.workers.items():
                if other == node and gone.device != "gpu":
                    status.memory_left_bytes += gone.device_memory_bytes

    def _limits(self) -> dict[str, dict[RankId, RankKv]]:
        told = {instance: share.workers for instance, share in self._shares.items()}
        return rank_limits(told, self._given_bytes, self._reserve_shares)

    def _apply(self, limits: Mapping[str, Mapping[RankId, RankKv]]) -> None:
        if self._given_bytes is not None:
            return
        for instance, share in self._shares.items():
            if share.engine is not None and share.engine.error is None:
                share.engine.limit_kv({rank: kv.limit_bytes for rank, kv in limits[instance].items()})
