"""Account of every rank's KV memory, and the limits of what each rank may hold. Pure.

Every rank holds the same tokens of the same sequences, so two numbers suffice: tokens, in whole blocks, and
sequences. Released memory counts until every rank has answered the step that frees it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from types import MappingProxyType

from mlx_ring.core.engine_stats import BLOCK, RankKvUse, kv_blocks
from mlx_ring.core.errors import ConfigError
from mlx_ring.core.types import RankId
from mlx_ring.rpc.protos import worker_pb2

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RankKv:
    """KV of one rank: its limit, the size of sequences, and the lengths at which they can be cut or forked."""

    limit_bytes: int
    bytes_per_token: int
    """Bytes per token in layers with full attention."""
    bytes_per_sequence: int = 0
    """Further bytes per sequence at most: sliding windows, recurrent states."""
    recurrent: bool = False
    """True if a sequence can be forked only at its current length, and not be cut."""
    slack: int = 0
    """Tokens of sliding layers that can be dropped at any length; 0 if no layer slides."""
    exact_length: int = 0
    """Length of sliding layers up to which a sequence can be cut and forked anywhere."""

    @property
    def bytes_per_first_token(self) -> int:
        """Bytes per token in all layers, up to the length from which on sliding ones drop tokens."""
        sliding = -(-self.bytes_per_sequence // self.exact_length) if self.exact_length else 0
        return self.bytes_per_token + sliding


@dataclass(slots=True, eq=False)
class _Freeing:
    """A pending free: memory that other sequences cannot have before all ranks have answered its step."""

    step: int
    blocks: int
    sequences: int = 1
    taken: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
    """Blocks and sequences of it that others took, by their id."""


class KvBudget:
    """Account of one instance."""

    def __init__(self, ranks: Mapping[RankId, RankKv] | None) -> None:
        self._ranks = dict(ranks or {})
        self._blocks: dict[int, int] = {}
        """Blocks of each sequence."""
        self._total_blocks = 0
        self._freeing: deque[_Freeing] = deque()
        """Pending frees, and the memory that they free for all."""
        self._freeing_blocks = self._freeing_sequences = 0
        self._awaited: dict[int, int] = {}
        """Further blocks of sequences that wait for pending frees."""
        self._held = dict.fromkeys(self._ranks, 0)

    @property
    def capacity_tokens(self) -> int | None:
        """Most tokens of a sequence that runs alone; None without a limit."""
        rooms = [
            (rank.limit_bytes - rank.bytes_per_sequence) // (rank.bytes_per_token * BLOCK) * BLOCK
            for rank in self._ranks.values()
            if rank.bytes_per_token
        ]
        # If KV does not grow with tokens, a sequence fits as a whole or not at all.
        rooms += [0 for rank in self._ranks.values() if rank.bytes_per_sequence > rank.limit_bytes]
        return max(0, min(rooms)) if rooms else None

    @property
    def being_freed(self) -> int:
        """Number of sequences whose memory is free once the ranks have answered."""
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
        """Return True if a sequence, which may hold some tokens already, can have `tokens`.

        Args:
            tokens: number of tokens in all.
            sequence: id of the sequence.
            without: sequences whose memory would be free for it.
            spare_blocks: blocks to leave for others.
            freed: True to count pending frees as free.
        """
        held = self._blocks.get(sequence)
        freed_blocks = [self._blocks[other] for other in without if other in self._blocks]
        blocks = kv_blocks(tokens) - (held or 0) - sum(freed_blocks) + spare_blocks
        sequences = int(held is None) - len(freed_blocks)
        if freed:
            blocks -= self._freeing_blocks
            sequences -= self._freeing_sequences
        return all(
            self._used(rank) + self._bytes(rank, blocks, sequences) <= rank.limit_bytes
            for rank in self._ranks.values()
        )

    def awaits(self, tokens: int, sequence: int) -> bool:
        """Return True if pending frees will make room for a sequence's `tokens`, beside others that wait for theirs."""
        others = self.awaited_blocks - self._awaited.get(sequence, 0)
        if not self._freeing or not self.fits(tokens, sequence, spare_blocks=others, freed=True):
            return False
        self._awaited[sequence] = kv_blocks(tokens) - self._blocks.get(sequence, 0)
        return True

    def has_room(self, tokens: int) -> bool:
        """Return True if a new sequence can have `tokens` now, and no other one waits for that memory."""
        return self.fits(tokens, -1, spare_blocks=self.awaited_blocks)

    @property
    def awaited_blocks(self) -> int:
        """Number of blocks of pending frees that are promised to sequences."""
        return sum(self._awaited.values())

    def holds(self, tokens: int, sequence: int) -> bool:
        """Return True if a sequence has the memory of `tokens` already, and no rank's account is over its limit."""
        return self._blocks.get(sequence) == kv_blocks(tokens) and not self._is_full

    def fits_as_held(self, tokens: int, kept: int = 0, kept_from: int = 0) -> bool:
        """Return True if a new sequence fits beside the memory that the ranks report, padding included.

        The stages from `kept_from` on report `kept` tokens of it already.
        """
        whole, rest = kv_blocks(tokens), kv_blocks(tokens) - kv_blocks(kept)
        return all(
            self._held[place] + self._bytes(rank, rest if place.stage >= kept_from else whole, 1)
            <= rank.limit_bytes
            for place, rank in self._ranks.items()
        )

    @property
    def limits(self) -> Mapping[RankId, int]:
        """Limit of each rank in bytes."""
        return {place: rank.limit_bytes for place, rank in self._ranks.items()}

    @property
    def even_limits(self) -> Mapping[RankId, int]:
        """Limit of each rank in bytes, which those of a stage reach with the same tokens.

        They decide by it which rows share a pass, and must decide alike. So the limit of the rank that holds the fewest
        tokens counts for all of its stage.
        """
        even: dict[RankId, int] = {}
        for place, rank in self._ranks.items():
            group = [other for at, other in self._ranks.items() if at.stage == place.stage]
            least = min(group, key=lambda other: Fraction(other.limit_bytes, _size(other)))
            even[place] = least.limit_bytes * _size(rank) // _size(least)
        return even

    def limit(self, limits: Mapping[RankId, int], longest: int) -> None:
        """Set new limits in bytes; one sequence of `longest` tokens always fits."""
        for place, nbytes in limits.items():
            rank = self._ranks[place]
            self._ranks[place] = replace(
                rank, limit_bytes=max(nbytes, self._bytes(rank, kv_blocks(longest), 1))
            )

    @property
    def is_over(self) -> bool:
        """True if the account of some rank, without pending frees, is over its limit."""
        return any(
            self._bytes(rank, self._total_blocks, len(self._blocks)) > rank.limit_bytes
            for rank in self._ranks.values()
        )

    @property
    def is_over_as_held(self) -> bool:
        """True if some rank reports more than its limit."""
        return any(self._held[place] > rank.limit_bytes for place, rank in self._ranks.items())

    def charge(self, sequence: int, tokens: int) -> None:
        """Set the number of tokens that a sequence holds."""
        blocks = kv_blocks(tokens)
        self._awaited.pop(sequence, None)
        self._total_blocks += blocks - self._blocks.get(sequence, 0)
        self._blocks[sequence] = blocks

    def charge_freed(self, sequence: int, tokens: int) -> None:
        """Set the number of tokens of a sequence that the ranks open after all pending frees.

        As far as there is no other room, it takes the memory that they free, which no other sequence gets then.
        """
        self.charge(sequence, tokens)
        for freeing in self._freeing:
            before = freeing.blocks, freeing.sequences
            while self._is_full and (freeing.blocks or freeing.sequences):
                self._take(freeing, min(1, freeing.blocks), freeing.sequences if freeing.blocks <= 1 else 0)
            freeing.taken[sequence] = before[0] - freeing.blocks, before[1] - freeing.sequences

    @property
    def _is_full(self) -> bool:
        return any(self._used(rank) > rank.limit_bytes for rank in self._ranks.values())

    def _take(self, freeing: _Freeing, blocks: int, sequences: int) -> None:
        """Take memory from a pending free."""
        freeing.blocks -= blocks
        freeing.sequences -= sequences
        self._freeing_blocks -= blocks
        self._freeing_sequences -= sequences

    def release(self, sequence: int, step: int) -> None:
        """Free a sequence's memory once every rank has answered `step`."""
        self._awaited.pop(sequence, None)
        blocks = self._blocks.pop(sequence, None)
        if blocks is not None:
            self._total_blocks -= blocks
            self._freeing_blocks += blocks
            self._freeing_sequences += 1
            self._freeing.append(_Freeing(step, blocks))

    def drop(self, sequence: int) -> None:
        """Forget a sequence that never had its memory, and give back what it took from pending frees."""
        self.hand_over(sequence)
        for freeing in self._freeing:
            blocks, sequences = freeing.taken.pop(sequence, (0, 0))
            self._take(freeing, -blocks, -sequences)

    def hand_over(self, sequence: int) -> None:
        """Forget a sequence whose memory another one took over."""
        self._awaited.pop(sequence, None)
        self._total_blocks -= self._blocks.pop(sequence, 0)

    def settle(self, completed: int) -> None:
        """Record that every rank has answered the steps up to `completed`."""
        while self._freeing and self._freeing[0].step <= completed:
            freeing = self._freeing.popleft()
            self._take(freeing, freeing.blocks, freeing.sequences)

    def report(self, rank: RankId, held_bytes: int) -> None:
        """Record the bytes that a rank reports."""
        self._held[rank] = held_bytes

    def use(self, kept: Iterable[int] = ()) -> dict[RankId, RankKvUse]:
        """Return the use of every rank's memory; `kept` are the cached sequences."""
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
            rank,
            self._total_blocks + self._freeing_blocks,
            len(self._blocks) + self._freeing_sequences,
        )

    @staticmethod
    def _bytes(rank: RankKv, blocks: int, sequences: int) -> int:
        return blocks * BLOCK * rank.bytes_per_token + sequences * rank.bytes_per_sequence


def _size(rank: RankKv) -> int:
    """Return a size in proportion to the KV heads of a rank, among those of its stage."""
    return rank.bytes_per_token or rank.bytes_per_sequence or 1


def sequence_bytes(rank: RankKv, tokens: int) -> int:
    """Return the bytes of one sequence of `tokens` tokens on a rank, in whole blocks."""
    return kv_blocks(tokens) * BLOCK * rank.bytes_per_token + rank.bytes_per_sequence


RESERVE_SHARE = 0.1
"""Share of a device's memory that KV leaves to activations, the system and other programs ..."""
RESERVE_BYTES = 1 << 30
"""... and its minimum in bytes."""
KEPT_TOKENS = 8192
"""Context that an instance keeps whatever else is loaded, unless one was requested; plans reserve as much."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """Usable part of a node's memory."""

    reserve_share: float = RESERVE_SHARE
    limit_bytes: int | None = None
    """Limit that the node's owner set, if it is less than the memory."""
    claimed_bytes: int = 0
    """Bytes of weights that are about to be loaded."""
    claimed_shares: int = 0
    """Number of workers that are about to be loaded; each will have a share."""


NodeRank = tuple[str, RankId]
"""A node and a rank on it."""
Floors = Mapping[str, Mapping[RankId, int]]
"""Bytes that the ranks of each named instance keep."""


def rank_limits(
    instances: Mapping[str, Mapping[NodeRank, worker_pb2.WorkerStatus]],
    given_bytes: int | None,
    allowances: Mapping[str, Allowance],
    floors: Floors = MappingProxyType({}),
) -> dict[str, dict[RankId, RankKv]]:
    """Share the memory that each node has left for KV among all ranks on it.

    Args:
        instances: status of each worker; the most recent report comes last.
        given_bytes: `--kv-cache-memory` of each worker; None to share what is left.
        allowances: usable memory of each node, if it is not all but the usual reserve.
        floors: minimum of each rank, even if there is less memory.
    """
    rooms = kv_rooms(instances, allowances)
    placed = [(name, *place) for name, workers in instances.items() for place in workers]
    shares: dict[tuple[str, str, RankId], int] = {}
    for node, room in rooms.items():
        on_node = [place for place in placed if place[1] == node]
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
    instances: Mapping[str, Mapping[NodeRank, worker_pb2.WorkerStatus]], allowances: Mapping[str, Allowance]
) -> dict[str, int]:
    """Return the bytes of KV that all workers of each node may hold together."""
    by_node: dict[str, list[worker_pb2.WorkerStatus]] = {}
    for workers in instances.values():
        for (node, _), status in workers.items():
            by_node.setdefault(node, []).append(status)
    return {node: _room(statuses, allowances.get(node, Allowance())) for node, statuses in by_node.items()}


def share_out(room: int, floors: Sequence[int]) -> list[int]:
    """Return equal shares of `room`; an entry with a higher floor gets its floor, and the others share the rest."""
    shares = list(floors)
    left, waiting = room, sorted(range(len(floors)), key=lambda place: -floors[place])
    while waiting:
        equal = max(0, left) // len(waiting)
        if floors[waiting[0]] <= equal:
            for place in waiting:
                shares[place] = equal
            break
        left -= floors[waiting.pop(0)]
    return shares


def floor_of(ranks: Mapping[RankId, RankKv], tokens: int) -> dict[RankId, int]:
    """Return the bytes of one sequence of `tokens` tokens on each rank."""
    return {rank: sequence_bytes(kv, tokens) for rank, kv in ranks.items()}


def _room(statuses: Sequence[worker_pb2.WorkerStatus], allowance: Allowance) -> int:
    """Return the bytes of KV that a node's workers may hold, by the most recent report of its memory."""
    last = statuses[-1]
    reserve = max(RESERVE_BYTES, int(last.memory_bytes * allowance.reserve_share))
    # A worker knows its own share of a GPU's memory, but not that of others.
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
    """Return the most tokens of one sequence that every rank can hold, `wanted` at most.

    Raises:
        ConfigError: they are fewer than `wanted` and `insisted` is set, or less than one block.
    """
    capacity = KvBudget(limits).capacity_tokens
    if capacity is None or capacity >= wanted:
        return wanted
    # Memory is in whole blocks, so the last block may hold the rest even if it is not full.
    if insisted or capacity < BLOCK:
        raise ConfigError(_too_little(limits, capacity, wanted))
    return capacity


def _too_little(limits: Mapping[RankId, RankKv], capacity: int, wanted: int) -> str:
    rank, kv = min(limits.items(), key=lambda item: item[1].limit_bytes - sequence_bytes(item[1], wanted))
    if capacity < BLOCK:
        return (
            f"The KV cache of stage {rank.stage} may take {kv.limit_bytes / 1e6:.1f} MB, but even {BLOCK} tokens need "
            f"{sequence_bytes(kv, BLOCK) / 1e6:.1f} MB there. Raise --kv-cache-memory or the machine's --memory-limit, "
            "or serve a smaller model."
        )
    return (
        f"The KV cache of stage {rank.stage} may take {kv.limit_bytes / 1e6:.0f} MB, but one request of "
        f"{wanted} tokens needs {sequence_bytes(kv, wanted) / 1e6:.0f} MB there: {capacity} tokens fit. "
        "Give --max-model-len that many or fewer, raise --kv-cache-memory, or try --kv-bits 8 if this model can have it."
    )


def log_new_context(instance: str, before: int, now: int) -> None:
    """Log that an instance's context has changed, in tokens, if it has."""
    if now != before:
        _log.log(
            logging.WARNING if now < before else logging.INFO,
            "The context of %s changes to %d tokens from %d, because it shares KV memory with other loaded models. "
            "Set --max-model-len to keep it constant.",
            instance,
            now,
            before,
        )
