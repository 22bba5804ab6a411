"""What sequences hold of every rank's KV memory, and what still fits. Pure.

Every rank holds the same tokens of the same sequences, so two numbers say it all: tokens, by whole blocks, and
sequences. What was released counts until every rank has answered the step that frees it.

How much KV each rank may hold: what the person who serves said, or what its device has left. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from mlx_ring.core.engine_stats import BLOCK, RankKvUse, kv_blocks
from mlx_ring.core.errors import ConfigError
from mlx_ring.core.types import RankId
from mlx_ring.rpc.protos import worker_pb2


@dataclass(frozen=True, slots=True)
class RankKv:
    """One rank's KV: its budget, what sequences take of it, and where they can be cut or forked. Bytes and tokens."""

    limit_bytes: int
    bytes_per_token: int
    """In layers that see every token."""
    bytes_per_sequence: int = 0
    """Besides, at most: sliding windows, recurrent states."""
    recurrent: bool = False
    """Forks only where the source stands, and cannot be cut."""
    slack: int = 0
    """Sliding layers: so many tokens can be dropped at any length; 0: no layer slides."""
    exact_length: int = 0
    """Sliding layers: up to this length a sequence can be cut and forked anywhere."""


class KvBudget:
    """The account of one instance."""

    def __init__(self, ranks: Mapping[RankId, RankKv] | None) -> None:
        self._ranks = dict(ranks or {})
        self._blocks: dict[int, int] = {}
        """By sequence."""
        self._total_blocks = 0
        self._freeing: deque[tuple[int, int]] = deque()
        """Step and blocks of what is being freed."""
        self._freeing_blocks = 0
        self._held = dict.fromkeys(self._ranks, 0)

    @property
    def capacity_tokens(self) -> int | None:
        """Most tokens that a sequence can have which is alone; None without a limit."""
        rooms = [
            (rank.limit_bytes - rank.bytes_per_sequence) // (rank.bytes_per_token * BLOCK) * BLOCK
            for rank in self._ranks.values()
            if rank.bytes_per_token
        ]
        # Where KV does not grow with its tokens, a sequence fits as a whole or not at all.
        rooms += [0 for rank in self._ranks.values() if rank.bytes_per_sequence > rank.limit_bytes]
        return max(0, min(rooms)) if rooms else None

    @property
    def being_freed(self) -> int:
        """Sequences whose memory is free once the ranks have answered."""
        return len(self._freeing)

    def fits(
        self,
        tokens: int,
        sequence: int,
        *,
        without: Iterable[int] = (),
        spare_blocks: int = 0,
        freed: bool = False,
    ) -> bool:
        """Whether a sequence, which may hold some already, can have `tokens`.

        Args:
            tokens: in all.
            sequence: whose.
            without: sequences whose memory would be free for it.
            spare_blocks: to leave for others.
            freed: whether to count on what is being freed.
        """
        held = self._blocks.get(sequence)
        gone = [self._blocks[other] for other in without if other in self._blocks]
        blocks = kv_blocks(tokens) - (held or 0) - sum(gone) + spare_blocks
        sequences = int(held is None) - len(gone)
        if freed:
            blocks -= self._freeing_blocks
            sequences -= len(self._freeing)
        return all(
            self._used(rank) + self._bytes(rank, blocks, sequences) <= rank.limit_bytes
            for rank in self._ranks.values()
        )

    def fits_as_held(self, tokens: int) -> bool:
        """Whether a new sequence fits beside what the ranks say they hold, padding and room for growth included."""
        more = kv_blocks(tokens)
        return all(
            self._held[place] + self._bytes(rank, more, 1) <= rank.limit_bytes
            for place, rank in self._ranks.items()
        )

    @property
    def limits(self) -> Mapping[RankId, int]:
        """Bytes, by rank."""
        return {place: rank.limit_bytes for place, rank in self._ranks.items()}

    def limit(self, limits: Mapping[RankId, int], longest: int) -> None:
        """New limits, in bytes; one sequence of `longest` tokens fits whatever they are."""
        for place, nbytes in limits.items():
            rank = self._ranks[place]
            self._ranks[place] = replace(
                rank, limit_bytes=max(nbytes, self._bytes(rank, kv_blocks(longest), 1))
            )

    @property
    def is_over(self) -> bool:
        """Whether more is accounted for than some rank may hold, what is being freed apart."""
        return any(
            self._bytes(rank, self._total_blocks, len(self._blocks)) > rank.limit_bytes
            for rank in self._ranks.values()
        )

    @property
    def is_over_as_held(self) -> bool:
        """Whether some rank says that it holds more than it may."""
        return any(self._held[place] > rank.limit_bytes for place, rank in self._ranks.items())

    def charge(self, sequence: int, tokens: int) -> None:
        """A sequence holds so many tokens from now on."""
        blocks = kv_blocks(tokens)
        self._total_blocks += blocks - self._blocks.get(sequence, 0)
        self._blocks[sequence] = blocks

    def release(self, sequence: int, step: int) -> None:
        """A sequence's memory is free once every rank has answered `step`."""
        blocks = self._blocks.pop(sequence, None)
        if blocks is not None:
            self._total_blocks -= blocks
            self._freeing_blocks += blocks
            self._freeing.append((step, blocks))

    def drop(self, sequence: int) -> None:
        """A sequence never had its memory, or another has it now, which was charged for it."""
        self._total_blocks -= self._blocks.pop(sequence, 0)

    def settle(self, completed: int) -> None:
        """Every rank has answered the steps up to `completed`."""
        while self._freeing and self._freeing[0][0] <= completed:
            self._freeing_blocks -= self._freeing.popleft()[1]

    def report(self, rank: RankId, held_bytes: int) -> None:
        """What a rank says it holds."""
        self._held[rank] = held_bytes

    def use(self, kept: Iterable[int] = ()) -> dict[RankId, RankKvUse]:
        """How every rank stands; `kept` are the ended sequences whose KV stays."""
        blocks = [self._blocks[sequence] for sequence in kept if sequence in self._blocks]
        return {
            place: RankKvUse(
                limit_bytes=rank.limit_bytes,
                used_bytes=self._used(rank),
                held_bytes=self._held[place],
                bytes_per_token=rank.bytes_per_token,
                bytes_per_sequence=rank.bytes_per_sequence,
                kept_bytes=self._bytes(rank, sum(blocks), len(blocks)),
            )
            for place, rank in self._ranks.items()
        }

    def _used(self, rank: RankKv) -> int:
        return self._bytes(
            rank, self._total_blocks + self._freeing_blocks, len(self._blocks) + len(self._freeing)
        )

    @staticmethod
    def _bytes(rank: RankKv, blocks: int, sequences: int) -> int:
        return blocks * BLOCK * rank.bytes_per_token + sequences * rank.bytes_per_sequence


def sequence_bytes(rank: RankKv, tokens: int) -> int:
    """What one sequence of so many tokens takes of a rank, by whole blocks."""
    return kv_blocks(tokens) * BLOCK * rank.bytes_per_token + rank.bytes_per_sequence


RESERVE_SHARE = 0.1
"""Of a device's memory that KV leaves alone: activations, the system, and whoever else works there ..."""
RESERVE_BYTES = 1 << 30
"""... and at least so much."""
KEPT_TOKENS = 8192
"""Of the context that an instance keeps whoever else is loaded, where none was insisted on; plans leave room for as much."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """What of a node's memory may be used."""

    reserve_share: float = RESERVE_SHARE
    limit_bytes: int | None = None
    """That its owner grants in all, where that is less than there is."""
    claimed_bytes: int = 0
    """For weights that are about to be loaded."""
    claimed_shares: int = 0
    """For workers that are about to be loaded: each will have one."""


Place = tuple[str, RankId]
"""A node and a rank on it."""
Floors = Mapping[str, Mapping[RankId, int]]
"""Bytes that the ranks of an instance keep, by instance: none where it is not named."""


def rank_limits(
    instances: Mapping[str, Mapping[Place, worker_pb2.WorkerStatus]],
    given_bytes: int | None,
    allowances: Mapping[str, Allowance],
    floors: Floors = MappingProxyType({}),
) -> dict[str, dict[RankId, RankKv]]:
    """Each rank's budget, by instance: what a node has left for KV is shared out among all ranks on it.

    Args:
        instances: what each worker says of its KV and of its device's memory; the one that has spoken last comes last.
        given_bytes: `--kv-cache-memory`, for each worker; else what is left is shared out.
        allowances: by node, what of its memory may be used, where it is not all but the usual reserve.
        floors: what each has at least, even where there is not so much.
    """
    rooms = kv_rooms(instances, allowances)
    seats = [(name, *place) for name, workers in instances.items() for place in workers]
    shares: dict[tuple[str, str, RankId], int] = {}
    for node, room in rooms.items():
        on_node = [seat for seat in seats if seat[1] == node]
        coming = allowances.get(node, Allowance()).claimed_shares
        least = [floors.get(name, {}).get(rank, 0) for name, _, rank in on_node]
        shares |= zip(on_node, share_out(room, [*least, *[0] * coming]), strict=False)
    return {
        name: {
            rank: _rank_kv(status, shares[name, node, rank] if given_bytes is None else given_bytes)
            for (node, rank), status in workers.items()
        }
        for name, workers in instances.items()
    }


def kv_rooms(
    instances: Mapping[str, Mapping[Place, worker_pb2.WorkerStatus]], allowances: Mapping[str, Allowance]
) -> dict[str, int]:
    """Bytes that all workers of a node may hold of KV together, by node."""
    told: dict[str, list[worker_pb2.WorkerStatus]] = {}
    for workers in instances.values():
        for (node, _), status in workers.items():
            told.setdefault(node, []).append(status)
    return {node: _room(statuses, allowances.get(node, Allowance())) for node, statuses in told.items()}


def share_out(room: int, floors: Sequence[int]) -> list[int]:
    """Equal shares of `room`; who keeps more than that has what it keeps, and the others share the rest."""
    shares = list(floors)
    left, waiting = room, sorted(range(len(floors)), key=lambda seat: -floors[seat])
    while waiting:
        equal = max(0, left) // len(waiting)
        if floors[waiting[0]] <= equal:
            for seat in waiting:
                shares[seat] = equal
            break
        left -= floors[waiting.pop(0)]
    return shares


def floor_of(ranks: Mapping[RankId, RankKv], tokens: int) -> dict[RankId, int]:
    """Bytes that one sequence of so many tokens takes of each rank."""
    return {rank: sequence_bytes(kv, tokens) for rank, kv in ranks.items()}


def _room(statuses: Sequence[worker_pb2.WorkerStatus], allowance: Allowance) -> int:
    """What a node's workers may hold of KV together, as the last of them found its memory."""
    last = statuses[-1]
    reserve = max(RESERVE_BYTES, int(last.memory_bytes * allowance.reserve_share))
    # A worker knows what it holds of a GPU's memory, and not what the others do.
    others = sum(status.device_memory_bytes for status in statuses[:-1]) if last.device == "gpu" else 0
    held = sum(status.kv_bytes for status in statuses)
    left = last.memory_left_bytes - others + held - reserve
    if allowance.limit_bytes is not None:
        weights = sum(status.device_memory_bytes - status.kv_bytes for status in statuses)
        left = min(left, int(allowance.limit_bytes * (1 - allowance.reserve_share)) - weights)
    return max(0, left - allowance.claimed_bytes)


def _rank_kv(status: worker_pb2.WorkerStatus, limit_bytes: int) -> RankKv:
    traits = status.kv
    return RankKv(
        limit_bytes=limit_bytes,
        bytes_per_token=traits.bytes_per_token,
        bytes_per_sequence=traits.bytes_per_sequence,
        recurrent=traits.recurrent,
        slack=traits.slack,
        exact_length=traits.exact_length,
    )


def fitting_context(limits: Mapping[RankId, RankKv], wanted: int, *, insisted: bool) -> int:
    """Most tokens of one sequence that every rank can hold, `wanted` at most.

    Raises:
        ConfigError: they are fewer than `wanted`, which the person who serves insists on, or too few for anything.
    """
    capacity = KvBudget(limits).capacity_tokens
    if capacity is None or capacity >= wanted:
        return wanted
    # Memory goes by whole blocks, so the last of them may hold what is wanted even where it is not full.
    if insisted or capacity < BLOCK:
        raise ConfigError(_too_little(limits, capacity, wanted))
    return capacity


def _too_little(limits: Mapping[RankId, RankKv], capacity: int, wanted: int) -> str:
    rank, kv = min(limits.items(), key=lambda item: item[1].limit_bytes - sequence_bytes(item[1], wanted))
    return (
        f"The KV cache of stage {rank.stage} may take {kv.limit_bytes / 1e6:.0f} MB, and one request of "
        f"{wanted} tokens takes {sequence_bytes(kv, wanted) / 1e6:.0f} MB there: {capacity} tokens fit. "
        "Give --max-model-len that many or fewer, raise --kv-cache-memory, or try --kv-bits 8."
    )
