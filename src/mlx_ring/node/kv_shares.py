"""Memory for KV, shared among the instances that are loaded: whoever comes or goes changes what the others may hold."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from mlx_ring.engine.engine import Engine
from mlx_ring.engine.executor import RankId
from mlx_ring.engine.kv_limits import Allowance, Place, rank_limits
from mlx_ring.engine.policy import RankKv
from mlx_ring.rpc.protos import agent_pb2, worker_pb2

_LOOKED_AGAIN_S = 2.5
"""Workers tell how their memory stands every second."""


@dataclass(slots=True)
class _Share:
    workers: dict[Place, worker_pb2.WorkerStatus]
    engine: Engine | None = None


class KvShares:
    """Who is loaded."""

    def __init__(self, given_bytes: int | None) -> None:
        """`given_bytes` is each worker's where it was said; else every node's is shared out."""
        self._given_bytes = given_bytes
        self._allowances: dict[str, Allowance] = {}
        """By node."""
        self._claims: dict[str, Mapping[str, int]] = {}
        """By instance that is being loaded: bytes of weights, by node."""
        self._shares: dict[str, _Share] = {}
        self._freed_at: float | None = None
        """When an instance left whose memory has not been given out again."""

    def expect(self, instance: str, weights: Mapping[str, int]) -> None:
        """Weights of so many bytes are about to be loaded, by node: what is kept of ended requests makes way for them."""
        self._claims[instance] = weights
        self._apply(self._limits())

    def is_alone(self, instance: str) -> bool:
        """Whether nothing else is loaded."""
        return not self._shares.keys() - {instance}

    def join(
        self,
        instance: str,
        workers: Mapping[Place, worker_pb2.WorkerStatus],
        allowances: Mapping[str, Allowance],
    ) -> Mapping[RankId, RankKv]:
        """What a newcomer may hold; the others give it up.

        Args:
            instance: the newcomer.
            workers: as they say they are.
            allowances: by node.
        """
        self._shares.pop(instance, None)
        self._shares[instance] = _Share(dict(workers))
        self._allowances |= allowances
        self._claims.pop(instance, None)
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
        if self._freed_at is not None and time.monotonic() - self._freed_at > _LOOKED_AGAIN_S:
            self._freed_at = None
            self._apply(self._limits())

    def leave(self, instance: str) -> None:
        """An instance is gone: what it held is the others'."""
        claimed = self._claims.pop(instance, None)
        gone = self._shares.pop(instance, None)
        if gone is None:
            if claimed:
                self._apply(self._limits())
            return
        # What it held is free once its workers have ended, and is known when the others have looked again.
        self._freed_at = time.monotonic()

    def _limits(self) -> dict[str, dict[RankId, RankKv]]:
        told = {instance: share.workers for instance, share in self._shares.items()}
        claimed = Counter[str]()
        for claim in self._claims.values():
            claimed.update(claim)
        allowances = {
            node: replace(self._allowances.get(node, Allowance()), claimed_bytes=claimed[node])
            for node in self._allowances.keys() | claimed.keys()
        }
        return rank_limits(told, self._given_bytes, allowances)

    def _apply(self, limits: Mapping[str, Mapping[RankId, RankKv]]) -> None:
        if self._given_bytes is not None:
            return
        for instance, share in self._shares.items():
            if share.engine is not None and share.engine.error is None:
                share.engine.limit_kv({rank: kv.limit_bytes for rank, kv in limits[instance].items()})
