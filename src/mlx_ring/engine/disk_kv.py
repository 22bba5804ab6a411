"""KV on the ranks' disks: what is read before a sequence runs, and what is written after it. Pure.

Tokens are saved in blocks. A block's digest covers all tokens up to its end, so that it names the block's content. Every
rank saves its own layers. Of a prompt's blocks, as many are restored as every rank has, if that is predicted to be faster
than to compute them. So the ranks first count the blocks, and read them only if asked to. If several sequences begin
with the same blocks, these are read once.

The tokens behind a text's last full block are a shorter block. It is listed by the tokens before it, and so is the block
in which the prompt ends. A text that shares only the first tokens of a listed block uses those.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from functools import partial
from itertools import chain, count

from mlx_ring.core.generation import WayBack, WaysBack
from mlx_ring.core.types import RankId, Way
from mlx_ring.engine.admission import Restores, release
from mlx_ring.engine.kv_budget import RankKv
from mlx_ring.engine.prefix_cache import (
    BLOCK_TOKENS,
    SavedText,
    Tokens,
    block_digests,
    list_block,
    split_text,
)
from mlx_ring.engine.resumption import (
    Candidate,
    KeptKv,
    KvInMemory,
    PrefillSpeed,
    choose_way,
    shared_beginning,
)
from mlx_ring.engine.rows import drop_operation
from mlx_ring.engine.sequence import Sequence
from mlx_ring.rpc.protos import step_pb2, worker_pb2

_BLOCKS_IDLE, _BLOCKS_BUSY = 2, 1
"""Blocks that are saved with one step, without rows and with them: rows wait while a rank copies blocks."""
_BYTES_PER_S, _LEAST_PAUSE_S = 2e8, 0.05
"""Speed at which each rank saves while rows run, and least time between two blocks then: copies delay rows."""
_ASSUMED_BYTES_PER_S = 1e9
"""Speed at which a rank reads, until it was measured. It is high, so that a disk is tried."""
_WEIGHT, _FORGET_S = 0.5, 600.0
"""Weight of the newest measurement, and seconds after which a low speed is forgotten."""
_SPEED = "disk"
"""Name of the measurement: the seconds of a token, and the time of the last one."""
_REMEMBERED = 1 << 16
"""Number of saved blocks that are remembered."""


@dataclass(slots=True)
class _Fetch:
    """Blocks that the ranks count, and may then read, for sequences that begin with them."""

    tokens: tuple[int, ...]
    """Tokens that may be restored."""
    digests: list[bytes]
    waiting: list[Sequence]
    owed_by: set[RankId]
    blocks: int
    """Number that every rank has which has answered."""
    next_tokens: int = 0
    """Tokens of the listed block after them, in the same way."""
    is_held: bool = False
    """True if a rank has read any."""
    reads_since_s: float | None = None
    """Time from which they are read; None while they are counted."""
    back: WayBack | None = None
    """Way back that ends once they are restored."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """Result of a fetch on all ranks."""

    id: int
    tokens: tuple[int, ...]
    """Tokens that all ranks have read."""
    waiting: list[Sequence]
    is_held: bool
    """True if a rank may keep what it has read."""


Choose = Callable[[Ordered[Sequence], int, float, float], WayBack | None]
"""Function that chooses between disk and computing. It returns the first sequence's way back, if that is the disk.

It receives the sequences that begin with the tokens on the disk. Then follow the number of these tokens, the predicted
seconds to read them, and the time now.
"""


class DiskKv:
    """Fetches and saves of one instance, for one epoch."""

    def __init__(
        self,
        ranks: Iterable[RankId],
        kv: Mapping[RankId, RankKv] | None = None,
        measured: dict[str, list[float]] | None = None,
    ) -> None:
        """Start without any.

        Args:
            ranks: all ranks.
            kv: their KV memory.
            measured: measurements of earlier engines, which this changes.
        """
        self._ranks = frozenset(ranks)
        self._token_bytes = max((rank.bytes_per_token for rank in (kv or {}).values()), default=0)
        self._measured = {} if measured is None else measured
        self._pause_s = max(_LEAST_PAUSE_S, BLOCK_TOKENS * self._token_bytes / _BYTES_PER_S)
        self._next_save_s = 0.0
        self._ids = count(1)
        self._fetches: dict[int, _Fetch] = {}
        self._unsent: list[worker_pb2.FetchKv] = []
        self._restores = Restores()
        self._to_save: dict[int, SavedText] = {}
        """Ended sequences whose last blocks are not saved yet."""
        self._checked: set[int] = set()
        """Those of them whose first blocks were looked for: ranks may have removed some, or failed to write them."""
        self._saved: dict[bytes, None] = {}
        """Blocks that were saved or restored, the last ones last."""
        self.restored_tokens = self.saved_tokens = 0

    # ---- restore

    def want(self, sequence: Sequence, reusable: int) -> None:
        """Let the ranks count a new sequence's blocks, if they may have more than the `reusable` tokens in memory."""
        most = (sequence.fill_to - 1) // BLOCK_TOKENS
        if sequence.request.computes_all or most * BLOCK_TOKENS <= reusable:
            return
        tokens = tuple(sequence.tokens[: sequence.fill_to - 1])
        if self._restores.join(sequence, tokens[: most * BLOCK_TOKENS]):
            return
        digests = block_digests(tokens)
        for id_, fetch in self._fetches.items():
            if fetch.digests[:most] == digests:
                fetch.waiting.append(sequence)
                sequence.awaits_kv = id_
                return
        id_ = next(self._ids)
        self._fetches[id_] = _Fetch(tokens, digests, [sequence], set(self._ranks), most)
        blocks = step_pb2.KvBlocks(block_tokens=BLOCK_TOKENS, digests=digests)
        self._unsent.append(worker_pb2.FetchKv(id=id_, blocks=blocks, only_looks=True))
        sequence.awaits_kv = id_

    def _read(self, id_: int, fetch: _Fetch) -> None:
        """Ask all ranks for the blocks that they have, and for as much as they have of the next one."""
        digests, length = fetch.digests[: fetch.blocks], fetch.blocks * BLOCK_TOKENS
        rest = fetch.tokens[length : length + BLOCK_TOKENS]
        fetch.next_tokens = len(rest)
        blocks = step_pb2.KvBlocks(block_tokens=BLOCK_TOKENS, digests=digests)
        next_block = list_block(digests[-1], rest)
        self._unsent.append(worker_pb2.FetchKv(id=id_, blocks=blocks, next=next_block))

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def take_unsent(self) -> list[worker_pb2.FetchKv]:
        """Return the requests to send to all ranks, and forget them."""
        unsent, self._unsent = self._unsent, []
        return unsent

    def answered(
        self, rank: RankId, fetched: worker_pb2.KvFetched, now: float, choose: Choose
    ) -> Fetched | None:
        """Record a rank's answer; return the result once all have answered, or one of them with nothing.

        Once all have counted the blocks, `choose` says whether they are read.
        """
        fetch = self._fetches.get(fetched.id)
        if fetch is None:
            return None
        fetch.owed_by.discard(rank)
        fetch.blocks = min(fetch.blocks, fetched.blocks)
        fetch.next_tokens = min(fetch.next_tokens, fetched.next_tokens)
        is_read = fetch.reads_since_s is not None
        fetch.is_held |= is_read and fetched.blocks > 0
        if fetch.owed_by and fetch.blocks:
            return None
        if fetch.blocks and not is_read:
            tokens = fetch.blocks * BLOCK_TOKENS
            fetch.back = choose(fetch.waiting, tokens, self.predict_s(tokens, now), now)
            if fetch.back is not None:
                fetch.owed_by, fetch.reads_since_s = set(self._ranks), now
                self._read(fetched.id, fetch)
                return None
            fetch.blocks = 0
        del self._fetches[fetched.id]
        self._measure(fetch, now)
        tokens = fetch.tokens[: fetch.blocks * BLOCK_TOKENS + fetch.next_tokens if fetch.blocks else 0]
        is_held = fetch.is_held or (is_read and bool(fetch.owed_by))
        return Fetched(fetched.id, tokens, fetch.waiting, is_held)

    def _measure(self, fetch: _Fetch, now: float) -> None:
        """Learn the speed from a fetch that was read, and end its way back."""
        if fetch.reads_since_s is None:
            return
        if fetch.blocks:
            token_s = max(0.0, now - fetch.reads_since_s) / (fetch.blocks * BLOCK_TOKENS)
            before = self._measured.get(_SPEED, [token_s])[0]
            self._measured[_SPEED] = [before + _WEIGHT * (token_s - before), now]
        on_their_way = [sequence.back for sequence in fetch.waiting if sequence.back is not None]
        for back in () if fetch.blocks else on_their_way:
            back.turn("recompute", None)
        if fetch.back is not None and fetch.back not in on_their_way:
            fetch.back.arrive(now if fetch.blocks else None)

    def predict_s(self, tokens: int, now: float) -> float:
        """Return the predicted seconds until all ranks have read some tokens, by the slowest one of the last fetches.

        A speed that was measured long ago, when a disk may have been busy, counts no longer if it was low.
        """
        assumed_s = self._token_bytes / _ASSUMED_BYTES_PER_S
        token_s, measured_at = self._measured.get(_SPEED, (assumed_s, -math.inf))
        if now - measured_at > _FORGET_S:
            token_s = min(token_s, assumed_s)
        return tokens * token_s

    def leave(self, sequence: Sequence) -> list[step_pb2.CacheOperation]:
        """Give up a sequence's fetch; return the operations that forget what the ranks may have read."""
        id_, sequence.awaits_kv = sequence.awaits_kv, 0
        self._restores.leave(sequence)
        fetch = self._fetches.get(id_)
        if fetch is None:
            return []
        fetch.waiting.remove(sequence)
        if fetch.waiting:
            return []
        was_sent = all(wanted.id != id_ for wanted in self._unsent)
        self._unsent = [wanted for wanted in self._unsent if wanted.id != id_]
        del self._fetches[id_]
        return [drop_operation(id_)] if was_sent or fetch.reads_since_s is not None else []

    def restore(self, fetched: Fetched, kv: KvInMemory) -> list[step_pb2.CacheOperation]:
        """Keep what was fetched as KV of an ended sequence, with the next steps. Its sequences wait for that.

        If that is impossible, return the operations that forget it.
        """
        tokens = fetched.tokens
        entry = kv.begin_entry(tokens)
        if entry is None:
            release(fetched.waiting)
            return [drop_operation(fetched.id)] if fetched.is_held else []
        self.restored_tokens += len(tokens)
        self._remember(block_digests(tokens))
        offer = partial(kv.offer_entry, entry, tokens, len(tokens))
        nbytes = len(tokens) * self._token_bytes
        self._restores.begin(entry, fetched.id, tokens, fetched.waiting, nbytes, offer)
        return []

    def take_operations(self, busy_s: float | None, *, is_prefill: bool) -> list[step_pb2.CacheOperation]:
        """Return the operations that restore and save the next parts, if there are any, as `take_saves`."""
        return [*self._restores.take(is_prefill=is_prefill), *self.take_saves(busy_s)]

    # ---- save

    def keep(self, sequence: int, tokens: tuple[int, ...], prompt_length: int) -> None:
        """Save the blocks of an ended sequence, which the ranks keep, with the next steps."""
        text = split_text(tokens, prompt_length)
        if text.digests and text.digests[-1] not in self._saved:
            self._to_save[sequence] = text

    def forget(self, sequence: int) -> list[step_pb2.CacheOperation]:
        """Save or restore no more of a sequence whose KV is freed, or taken over; return the operations that forget it."""
        self._to_save.pop(sequence, None)
        self._checked.discard(sequence)
        return self._restores.forget(sequence)

    @property
    def has_saves(self) -> bool:
        return bool(self._to_save)

    @property
    def has_operations(self) -> bool:
        return self.has_saves or self._restores.has_parts

    def take_saves(self, busy_s: float | None) -> list[step_pb2.CacheOperation]:
        """Return the operation that saves the next blocks, if there are any.

        Args:
            busy_s: the time, if the step has rows; there must be a pause since the last save then. None: it has none.
        """
        if not self._to_save or (busy_s is not None and busy_s < self._next_save_s):
            return []
        if busy_s is not None:
            self._next_save_s = busy_s + self._pause_s
        sequence, text = next(iter(self._to_save.items()))
        digests = text.digests
        first = next(
            (place for place, digest in enumerate(digests) if digest not in self._saved), len(digests)
        )
        most = _BLOCKS_IDLE if busy_s is None else _BLOCKS_BUSY
        end = min(len(digests), first + most)
        self.saved_tokens += text.tokens_in(first, end)
        self._remember(digests[:end])
        is_last = end == len(digests)
        last_tokens = text.last_tokens if is_last else 0
        save = step_pb2.Save(
            sequence=sequence,
            blocks=step_pb2.KvBlocks(
                block_tokens=BLOCK_TOKENS, digests=digests[:end], last_tokens=last_tokens
            ),
            first=first if sequence in self._checked else 0,
            most=most,
            may_wait=busy_s is None,
            listed=text.listed if is_last else (),
        )
        self._checked.add(sequence)
        if is_last:
            del self._to_save[sequence]
            self._checked.discard(sequence)
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
            release(fetch.waiting)
        self._restores.clear()
        self._fetches.clear()
        self._unsent.clear()
        self._to_save.clear()
        self._checked.clear()


# ---- the choice


class Ways:
    """Ways of an engine's sequences to their next token: what is predicted of each, and which one is taken."""

    def __init__(
        self,
        speed: PrefillSpeed,
        kv: KvInMemory,
        disk: DiskKv | None,
        running: Mapping[int, Sequence],
        waiting: Mapping[int, Sequence],
        record: Callable[[Way, float | None, float], None],
    ) -> None:
        """Prepare for the sequences of an engine; `record` receives ways of single sequences, as `WaysBack` does."""
        self.speed = speed
        self._kv, self._disk, self._record = kv, disk, record
        self._running, self._waiting = running, waiting

    def add(self, sequence: Sequence) -> None:
        """Predict the way of a sequence that is about to wait, and let the ranks look for its blocks on their disks."""
        kept, start = self._kv.kept_of(sequence.id), self._start(sequence)
        compute_s = self._compute_s(sequence, start, kept)
        sequence.reads_s = compute_s or 0.0
        if sequence.back is not None and sequence.back.way == "recompute":
            more_s = None if compute_s is None else compute_s + self._queue_s(sequence)
            sequence.back.turn("recompute" if kept is None else "kept", more_s)
        if self._disk is None or sequence.runs_alone:
            return
        # A disk may hang, so a sequence with kept KV does not wait for one that can save little.
        at_best = [Candidate("kept", compute_s), Candidate("disk", 0.0)]
        if kept is None or choose_way(at_best).way == "disk":
            self._disk.want(sequence, self._kv.shared(_to_prefill(sequence), self._running))

    def fetched(self, rank: RankId, fetched: worker_pb2.KvFetched, now: float) -> bool:
        """Record that a rank has found KV on its disk; return True if there is something to send."""
        if self._disk is None:
            return False
        if (result := self._disk.answered(rank, fetched, now, self.choose)) is None:
            return self._disk.has_unsent
        self._kv.add_operations(self._disk.restore(result, self._kv))
        return True

    def choose(self, sequences: Ordered[Sequence], tokens: int, disk_s: float, now: float) -> WayBack | None:
        """Choose between the disk and computing, as `Choose`."""
        first = sequences[0]
        kept, start = self._kv.kept_of(first.id), self._start(first)
        if tokens <= start:
            return None
        compute_s = self._compute_s(first, start, kept)
        rest_s = self._compute_s(first, tokens, kept)
        disk = Candidate("disk", None if rest_s is None else disk_s + rest_s)
        compute = Candidate("recompute" if kept is None else "kept", compute_s)
        chosen = choose_way([disk, compute] if kept is None else [compute, disk])
        if chosen is not disk:
            if first.back is None:
                more_s = None if compute_s is None else compute_s + self._queue_s(first)
                about = f" (disk: {_in_seconds(disk.seconds)} for {tokens} tokens and the rest)"
                first.back = self._begin(first, about).begin(compute.way, more_s, now)
            return None
        first.reads_s = rest_s or 0.0
        more_s = None if disk.seconds is None or compute_s is None else disk.seconds - compute_s
        for sequence in sequences:
            if sequence.back is not None:
                sequence.back.turn("disk", more_s)
        if first.back is not None:
            return first.back
        about = f" ({tokens} tokens; recompute: {_in_seconds(compute_s)}, {_in_seconds(rest_s)} of it for the rest)"
        return self._begin(first, about).begin("disk", disk_s, now)

    def _begin(self, sequence: Sequence, about: str) -> WaysBack:
        return WaysBack(sequence.request.request_id, self._record, about)

    def _start(self, sequence: Sequence) -> int:
        """Return the tokens that the sequence need not compute: cached ones, or those that an earlier one computes."""
        tokens = _to_prefill(sequence)
        ahead = (other.tokens for other in self._ahead(sequence))
        return max(self._kv.shared(tokens, self._running), shared_beginning(tokens, ahead))

    def _ahead(self, sequence: Sequence) -> Iterable[Sequence]:
        others = chain(self._running.values(), self._waiting.values())
        return (other for other in others if other.id < sequence.id)

    def _queue_s(self, sequence: Sequence) -> float:
        """Return the predicted seconds until the sequences before it are prefilled."""
        return sum(
            other.reads_s * max(0, other.fill_to - other.scheduled) / max(1, other.fill_to - other.reused)
            for other in self._ahead(sequence)
        )

    def _compute_s(self, sequence: Sequence, start: int, kept: KeptKv | None) -> float | None:
        """Return the predicted seconds to compute the tokens after the first `start`."""
        length = start if kept is None else max(start, kept.length)
        behind = None if kept is None else kept.first_stage
        parts = (self.speed.seconds(start, length, behind), self.speed.seconds(length, sequence.fill_to))
        return None if None in parts else sum(filter(None, parts))


def _to_prefill(sequence: Sequence) -> Tokens:
    return tuple(sequence.tokens[: sequence.fill_to])


def _in_seconds(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{seconds:.2f} s"
