"""KV on the ranks' disks: what is read before a sequence runs, and what is written after it. Pure.

Tokens are saved in blocks. A block's digest covers all tokens up to its end, so that it names the block's content. Every
rank saves its own layers. Of a prompt's blocks, as many are restored as every rank has.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import count

import numpy as np

from mlx_ring.core.types import RankId
from mlx_ring.engine.kv_budget import RankKv
from mlx_ring.engine.rows import drop_operation, restore_operations
from mlx_ring.engine.sequence import Sequence
from mlx_ring.rpc.protos import step_pb2, worker_pb2

BLOCK_TOKENS = 256
_BLOCKS_IDLE, _BLOCKS_BUSY = 2, 1
"""Blocks that are saved with one step, without rows and with them: rows wait while a rank copies blocks."""
_BYTES_PER_S, _LEAST_PAUSE_S = 2e8, 0.05
"""Speed at which each rank saves while rows run, and least time between two blocks then: copies delay rows."""
_REMEMBERED = 1 << 16
"""Number of saved blocks that are remembered."""


Keep = Callable[[tuple[int, ...], int, Callable[[int], list[step_pb2.CacheOperation]]], bool]
"""Function that keeps new KV, as `KvManager.keep_new`."""


def block_digests(tokens: Iterable[int]) -> list[bytes]:
    """Return the digests of all full blocks of a text's tokens."""
    content = np.fromiter(tokens, "<u4")
    digest, digests = b"", list[bytes]()
    for end in range(BLOCK_TOKENS, len(content) + 1, BLOCK_TOKENS):
        block = content[end - BLOCK_TOKENS : end].tobytes()
        digest = hashlib.blake2b(digest + block, digest_size=16).digest()
        digests.append(digest)
    return digests


@dataclass(slots=True)
class _Fetch:
    """Blocks that the ranks read for a sequence."""

    sequence: Sequence
    owed_by: set[RankId]
    blocks: int
    """Number that every rank has which has answered."""
    is_held: bool = False
    """True if a rank has read any."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """Result of a fetch on all ranks."""

    id: int
    sequence: Sequence
    length: int
    """Tokens that all ranks have read."""
    is_held: bool
    """True if a rank may keep what it has read."""


class DiskKv:
    """Fetches and saves of one instance, for one epoch."""

    def __init__(self, ranks: Iterable[RankId], kv: Mapping[RankId, RankKv] | None = None) -> None:
        """Start without any, for all ranks with their KV memory."""
        self._ranks = frozenset(ranks)
        token_bytes = max((rank.bytes_per_token for rank in (kv or {}).values()), default=0)
        self._pause_s = max(_LEAST_PAUSE_S, BLOCK_TOKENS * token_bytes / _BYTES_PER_S)
        self._next_save_s = 0.0
        self._ids = count(1)
        self._fetches: dict[int, _Fetch] = {}
        self._unsent: list[worker_pb2.FetchKv] = []
        self._to_save: dict[int, list[bytes]] = {}
        """Digests of ended sequences whose last blocks are not saved yet."""
        self._checked: set[int] = set()
        """Those of them whose first blocks were looked for: ranks may have removed some, or failed to write them."""
        self._saved: dict[bytes, None] = {}
        """Blocks that were saved or restored, the last ones last."""
        self.restored_tokens = self.saved_tokens = 0

    # ---- restore

    def want(self, sequence: Sequence, reusable: int) -> None:
        """Let the ranks read a new sequence's blocks, if they may have more than the `reusable` tokens in memory."""
        most = (sequence.fill_to - 1) // BLOCK_TOKENS
        if sequence.request.computes_all or most * BLOCK_TOKENS <= reusable:
            return
        id_ = next(self._ids)
        digests = block_digests(sequence.tokens[: most * BLOCK_TOKENS])
        blocks = step_pb2.KvBlocks(block_tokens=BLOCK_TOKENS, digests=digests)
        self._fetches[id_] = _Fetch(sequence, set(self._ranks), most)
        self._unsent.append(worker_pb2.FetchKv(id=id_, blocks=blocks))
        sequence.awaits_kv = id_

    def take_unsent(self) -> list[worker_pb2.FetchKv]:
        """Return the requests to send to all ranks, and forget them."""
        unsent, self._unsent = self._unsent, []
        return unsent

    def answered(self, rank: RankId, fetched: worker_pb2.KvFetched) -> Fetched | None:
        """Record a rank's answer; return the result once all have answered, or one of them with nothing."""
        fetch = self._fetches.get(fetched.id)
        if fetch is None:
            return None
        fetch.owed_by.discard(rank)
        fetch.blocks = min(fetch.blocks, fetched.blocks)
        fetch.is_held |= fetched.blocks > 0
        if fetch.owed_by and fetch.blocks:
            return None
        del self._fetches[fetched.id]
        fetch.sequence.awaits_kv = 0
        is_held = fetch.is_held or bool(fetch.owed_by)
        return Fetched(fetched.id, fetch.sequence, fetch.blocks * BLOCK_TOKENS, is_held)

    def leave(self, sequence: Sequence) -> list[step_pb2.CacheOperation]:
        """Give up a sequence's fetch; return the operations that forget what the ranks may have read."""
        id_, sequence.awaits_kv = sequence.awaits_kv, 0
        was_sent = all(wanted.id != id_ for wanted in self._unsent)
        self._unsent = [wanted for wanted in self._unsent if wanted.id != id_]
        is_read = self._fetches.pop(id_, None) is not None and was_sent
        return [drop_operation(id_)] if is_read else []

    def restore(self, fetched: Fetched, keep: Keep) -> list[step_pb2.CacheOperation]:
        """Keep what was fetched as KV of an ended sequence; return the operations that forget it, if that is impossible."""
        tokens = tuple(fetched.sequence.tokens[: fetched.length])
        if keep(tokens, len(tokens), partial(restore_operations, fetched.id, tokens)):
            self.restored_tokens += len(tokens)
            self._remember(block_digests(tokens))
            return []
        return [drop_operation(fetched.id)] if fetched.is_held else []

    # ---- save

    def keep(self, sequence: int, tokens: tuple[int, ...]) -> None:
        """Save the blocks of an ended sequence, which the ranks keep, with the next steps."""
        if len(tokens) < BLOCK_TOKENS:
            return
        digests = block_digests(tokens)
        if digests[-1] not in self._saved:
            self._to_save[sequence] = digests

    def forget(self, sequence: int) -> None:
        """Save no more of a sequence whose KV is freed, or taken over."""
        self._to_save.pop(sequence, None)
        self._checked.discard(sequence)

    @property
    def has_saves(self) -> bool:
        return bool(self._to_save)

    def take_saves(self, busy_s: float | None) -> list[step_pb2.CacheOperation]:
        """Return the operation that saves the next blocks, if there are any.

        Args:
            busy_s: the time, if the step has rows; there must be a pause since the last save then. None: it has none.
        """
        if not self._to_save or (busy_s is not None and busy_s < self._next_save_s):
            return []
        if busy_s is not None:
            self._next_save_s = busy_s + self._pause_s
        sequence, digests = next(iter(self._to_save.items()))
        first = next(
            (place for place, digest in enumerate(digests) if digest not in self._saved), len(digests)
        )
        most = _BLOCKS_IDLE if busy_s is None else _BLOCKS_BUSY
        end = min(len(digests), first + most)
        self.saved_tokens += (end - first) * BLOCK_TOKENS
        self._remember(digests[:end])
        save = step_pb2.Save(
            sequence=sequence,
            blocks=step_pb2.KvBlocks(block_tokens=BLOCK_TOKENS, digests=digests[:end]),
            first=first if sequence in self._checked else 0,
            most=most,
            may_wait=busy_s is None,
        )
        self._checked.add(sequence)
        if end == len(digests):
            self.forget(sequence)
        return [step_pb2.CacheOperation(save=save)]

    def _remember(self, digests: list[bytes]) -> None:
        for digest in digests:
            self._saved.pop(digest, None)
            self._saved[digest] = None
        while len(self._saved) > _REMEMBERED:
            del self._saved[next(iter(self._saved))]

    def clear(self) -> None:
        """Forget what is fetched and what is to be saved."""
        for fetch in self._fetches.values():
            fetch.sequence.awaits_kv = 0
        self._fetches.clear()
        self._unsent.clear()
        self._to_save.clear()
        self._checked.clear()
