"""KV memory, shared among the loaded instances: each load or unload changes the shares of the others.

No share falls below one sequence of the instance's kept context. A load that would require this is refused.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mlx_ring.core.engine_stats import BLOCK
from mlx_ring.core.errors import ContextKept, PlanError, RingError
from mlx_ring.core.types import LONG_CHUNK_TOKENS, LayerRange, RankId
from mlx_ring.engine.engine import Engine
from mlx_ring.engine.kv_budget import (
    KEPT_TOKENS,
    Allowance,
    Floors,
    KvBudget,
    NodeRank,
    RankKv,
    fitting_context,
    floor_of,
    kv_rooms,
    rank_limits,
)
from mlx_ring.planner.profiles import LAYERS_AHEAD_WITH_CUDA, ModelProfile
from mlx_ring.planner.stage_costs import PART_FOR_LONG_CHUNKS, long_chunk_bytes
from mlx_ring.rpc.protos import agent_pb2, worker_pb2

Workers = Mapping[NodeRank, worker_pb2.WorkerStatus]
"""Status of an instance's workers."""


def are_on_gpus(workers: Workers) -> bool:
    """Return True if all these workers compute on GPUs."""
    return all(status.device == "gpu" for status in workers.values())


@dataclass(frozen=True, slots=True)
class KvUser:
    """Instance that uses KV memory."""

    instance: str
    model: str
    """Name of the model for users."""
    context_tokens: int
    """Context that it would have, memory permitting."""
    insisted: bool
    """True if the context was requested explicitly."""

    def kept_of(self, context_tokens: int) -> int:
        """Return the tokens of a context that are reserved against other models."""
        return context_tokens if self.insisted else min(context_tokens, KEPT_TOKENS)


@dataclass(frozen=True, slots=True)
class Reservation:
    """Memory that a loading instance will use on a node."""

    weight_bytes: int
    workers: int


@dataclass(frozen=True, slots=True)
class KvKeeper:
    """Instance that keeps memory on a node."""

    user: KvUser
    kept_tokens: int
    kept_bytes: int


def no_room(
    user: KvUser, node: str, takes: str, needed: int, left: int, keepers: Sequence[KvKeeper]
) -> PlanError:
    """Return the error of an instance that does not fit.

    Args:
        user: the new instance.
        node: node with too little memory.
        takes: description of what needs the bytes.
        needed: bytes needed.
        left: bytes that are left.
        keepers: instances that keep the rest, at least one.
    """
    insisted = any(keeper.user.insisted for keeper in keepers)
    kept = ", and ".join(
        f"{keeper.user.model} keeps {_size(keeper.kept_bytes)} for one request of {keeper.kept_tokens} tokens"
        for keeper in keepers
    )
    others = " and ".join(dict.fromkeys(keeper.user.model for keeper in keepers))
    if others == user.model:
        refused, remedy = f"Another replica of {others} does not fit", "Ask for fewer --replicas"
    else:
        refused, remedy = f"{user.model} does not fit beside {others}", f"Unload {others}"
    turns = ", or with --model-memory, with which models are loaded in turn" if insisted else ""
    kind = ContextKept if insisted else PlanError
    return kind(
        f"{refused} on {node}: {takes} {_size(needed)}, and {_size(left)} are left there, for {kept}. {remedy}, or start "
        f"the server with a --max-model-len below {max(keeper.kept_tokens for keeper in keepers)}{turns}."
    )


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 10**9 else f"{nbytes / 1e6:.1f} MB"


_LOOKED_AGAIN_S = 2.5
"""Time after which workers have reported freed memory; they report twice a second."""


@dataclass(slots=True)
class _Share:
    user: KvUser
    workers: dict[NodeRank, worker_pb2.WorkerStatus]
    kept_tokens: int = 0
    floor: Mapping[RankId, int] | None = None
    """Bytes that each rank keeps for one sequence of `kept_tokens`."""
    engine: Engine | None = None
    chunk_bytes: Mapping[str, float] = field(default_factory=dict[str, float])
    """Bytes on each node that long chunks of prompts may take."""

    def keep(self, limits: Mapping[RankId, RankKv]) -> None:
        """Keep the present limits from now on, up to the kept context."""
        capacity = KvBudget(limits).capacity_tokens
        context = self.user.context_tokens
        tokens = self.user.kept_of(context if capacity is None else min(capacity, context))
        if self.floor is None or tokens > self.kept_tokens:
            self.kept_tokens, self.floor = tokens, floor_of(limits, tokens)


class KvShares:
    """Shares of the loaded instances."""

    def __init__(self, given_bytes: int | None) -> None:
        """Start with `given_bytes` for each worker, or None to share each node's memory."""
        self._given_bytes = given_bytes
        self._allowances: dict[str, Allowance] = {}
        """Usable memory of each node."""
        self._reservations: dict[str, Mapping[str, Reservation]] = {}
        """Reservations by loading instance and node."""
        self._shares: dict[str, _Share] = {}
        self._freed_at: float | None = None
        """Time at which an instance left, until its memory is shared again."""

    def expect(self, user: KvUser, reservations: Mapping[str, Reservation]) -> None:
        """Reserve memory for weights, which evicts cached KV.

        Args:
            user: the loading instance.
            reservations: reservation on each node.

        Raises:
            PlanError: too little is left for the contexts that others keep.
        """
        if self._given_bytes is None and self._freed_at is None:
            self._refuse_weights(user, reservations)
        self._reservations[user.instance] = reservations
        self._apply(self._limits())

    def join(
        self,
        user: KvUser,
        workers: Mapping[NodeRank, worker_pb2.WorkerStatus],
        allowances: Mapping[str, Allowance],
    ) -> tuple[Mapping[RankId, RankKv], int]:
        """Give a loaded instance its share; return its limits and the context that fits.

        Args:
            user: the newcomer.
            workers: status of its workers.
            allowances: usable memory of each node.

        Raises:
            PlanError: the share is too small beside what others keep.
            ConfigError: the share is too small even alone.
        """
        self._shares.pop(user.instance, None)
        self._allowances |= allowances
        others = dict(self._shares)
        self._shares[user.instance] = newcomer = _Share(user, dict(workers))
        reservation = self._reservations.pop(user.instance, None)
        try:
            limits = self._limits_with(newcomer)
            context = fitting_context(limits[user.instance], user.context_tokens, insisted=user.insisted)
        except RingError:
            self._shares = others
            if reservation is not None:
                self._reservations[user.instance] = reservation
            raise
        newcomer.keep(limits[user.instance])
        self._apply(limits)
        return limits[user.instance], context

    def long_chunk(
        self, instance: str, sizes: ModelProfile | None, ranges: Sequence[LayerRange], kv_bits: str
    ) -> int:
        """Return the most tokens of a prompt alone that an instance's GPUs may compute in a step; 0 if it is no more than usual.

        A part of each machine's memory stays free of weights and KV, and activations of so many tokens must fit into half of
        it. Where other instances were given that, this one gets the rest.

        Args:
            instance: one that has joined.
            sizes: the model's; None if they are unknown.
            ranges: layers of each stage.
            kv_bits: `--kv-bits`.
        """
        share = self._shares[instance]
        if sizes is None or not are_on_gpus(share.workers):
            return 0
        taken: dict[str, float] = defaultdict(float)
        for (node, rank), status in share.workers.items():
            ahead = LAYERS_AHEAD_WITH_CUDA if status.uses_cuda else 0.0
            layers, quantizes_kv = len(ranges[rank.stage]), kv_bits != "off"
            taken[node] += long_chunk_bytes(sizes, layers, ahead, quantizes_kv=quantizes_kv)
            others = sum(
                other.chunk_bytes.get(node, 0.0) for other in self._shares.values() if other is not share
            )
            allowance = self._allowances[node]
            memory = min(status.memory_bytes, allowance.limit_bytes or status.memory_bytes)
            if others + taken[node] > PART_FOR_LONG_CHUNKS * allowance.reserve_share * memory:
                return 0
        share.chunk_bytes = taken
        return LONG_CHUNK_TOKENS

    def attach(self, instance: str, engine: Engine) -> Engine:
        """Set an instance's engine, which receives changes of its share, and return it."""
        self._shares[instance].engine = engine
        return engine

    def record_workers(self, event: agent_pb2.AgentEvent) -> None:
        """Record an agent's report of its workers' memory."""
        for state in event.workers:
            share = self._shares.get(state.instance)
            place = (event.hello.node, RankId(state.stage, state.rank))
            if share is not None and place in share.workers and state.status.phase == "ready":
                share.workers[place] = state.status
        if self._freed_at is not None and time.monotonic() - self._freed_at > _LOOKED_AGAIN_S:
            self._freed_at = None
            self._apply(self._limits())

    def leave(self, instance: str) -> None:
        """Release the share and the reservation of an instance."""
        claimed, removed = self._reservations.pop(instance, None), self._shares.pop(instance, None)
        if claimed is not None or removed is not None:
            # The memory is free once the workers have ended, which later reports show.
            self._freed_at = time.monotonic()

    # ---- limits of each instance

    def _limits(self, more: Floors | None = None) -> dict[str, dict[RankId, RankKv]]:
        floors = {instance: share.floor for instance, share in self._shares.items() if share.floor}
        return rank_limits(self._reported(), self._given_bytes, self._allowed(), floors | dict(more or {}))

    def _limits_with(self, newcomer: _Share) -> dict[str, dict[RankId, RankKv]]:
        """Return the limits with room for the new instance's kept context.

        Without an explicit request for that context, one block is enough.
        """
        user, instance = newcomer.user, newcomer.user.instance
        limits = self._limits()
        if self._given_bytes is not None:
            return limits
        wanted = [user.kept_of(user.context_tokens)]
        if not user.insisted:
            wanted.append(min(wanted[0], BLOCK))
        for tokens in wanted:
            floor = floor_of(limits[instance], tokens)
            if self._short_of(newcomer, floor) is None:
                return self._limits({instance: floor})
        self._refuse_kv(newcomer, wanted[-1], floor_of(limits[instance], wanted[-1]))
        return limits

    def _short_of(self, newcomer: _Share, floor: Mapping[RankId, int]) -> tuple[str, int, int] | None:
        """Return a node with too little memory, and the bytes needed and left; None if all have enough."""
        rooms = kv_rooms(self._reported(), self._allowed())
        for node in dict.fromkeys(node for node, _ in newcomer.workers):
            needed = sum(floor[rank] for at, rank in newcomer.workers if at == node)
            left = rooms[node] - sum(keeper.kept_bytes for keeper in self._keepers(node))
            if needed > left:
                return node, needed, max(0, left)
        return None

    def _allowed(self, but: str = "") -> dict[str, Allowance]:
        """Return each node's usable memory with the reservations on it, except those of `but`."""
        reservations = [
            reservations for instance, reservations in self._reservations.items() if instance != but
        ]
        nodes = self._allowances.keys() | {node for each in reservations for node in each}
        return {
            node: replace(
                self._allowances.get(node, Allowance()),
                claimed_bytes=sum(each[node].weight_bytes for each in reservations if node in each),
                claimed_shares=sum(each[node].workers for each in reservations if node in each),
            )
            for node in nodes
        }

    def _reported(self) -> dict[str, dict[NodeRank, worker_pb2.WorkerStatus]]:
        return {instance: share.workers for instance, share in self._shares.items()}

    def _keepers(self, node: str) -> list[KvKeeper]:
        """Return the instances that keep memory on a node."""
        return [
            KvKeeper(share.user, share.kept_tokens, kept)
            for share in self._shares.values()
            if (kept := _on_node(node, share))
        ]

    # ---- refusing

    def _refuse_weights(self, user: KvUser, reservations: Mapping[str, Reservation]) -> None:
        rooms = kv_rooms(self._reported(), self._allowed(but=user.instance))
        for node, reservation in reservations.items():
            keepers = self._keepers(node)
            left = rooms.get(node, 0) - sum(keeper.kept_bytes for keeper in keepers)
            if keepers and reservation.weight_bytes > left:
                raise no_room(user, node, "its weights take", reservation.weight_bytes, max(0, left), keepers)

    def _refuse_kv(self, newcomer: _Share, tokens: int, floor: Mapping[RankId, int]) -> None:
        """Raise if others keep the missing memory; `fitting_context` raises for an instance alone."""
        short = self._short_of(newcomer, floor)
        if short is not None and (keepers := self._keepers(short[0])):
            node, needed, left = short
            takes = f"the KV of one request of {tokens} tokens takes"
            raise no_room(newcomer.user, node, takes, needed, left, keepers)

    def _apply(self, limits: Mapping[str, Mapping[RankId, RankKv]]) -> None:
        if self._given_bytes is not None:
            return
        for instance, share in self._shares.items():
            if share.engine is not None and share.engine.error is None:
                share.engine.limit_kv({rank: kv.limit_bytes for rank, kv in limits[instance].items()})
                share.keep(limits[instance])


def _on_node(node: str, share: _Share) -> int:
    """Return the bytes that an instance keeps on a node."""
    floor = share.floor or {}
    return sum(floor[rank] for rank in _ranks(node, share.workers) if rank in floor)


def _ranks(node: str, places: Iterable[NodeRank]) -> list[RankId]:
    return [rank for at, rank in places if at == node]
