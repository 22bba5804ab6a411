"""Ways of sequences to their next token: what is predicted of the disk, of kept KV and of computing. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Ordered
from itertools import chain

from mlx_ring.core.generation import WayBack, WaysBack
from mlx_ring.core.types import RankId, Way
from mlx_ring.engine.disk_kv import DiskKv
from mlx_ring.engine.prefix_cache import Tokens
from mlx_ring.engine.resumption import (
    Candidate,
    KeptKv,
    KvInMemory,
    PrefillSpeed,
    choose_way,
    shared_beginning,
)
from mlx_ring.engine.sequence import Sequence
from mlx_ring.rpc.protos import worker_pb2


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

    def give_up_restore(self) -> bool:
        """Free what is being restored for sequences that wait, for one that runs; return False if there is none.

        They compute it. The restore that was begun last is given up first.
        """
        newest = None if self._disk is None else self._disk.newest_restore
        if newest is None:
            return False
        entry, restore = newest
        for sequence in restore.waiting:
            if sequence.back is not None:
                sequence.back.turn("recompute", None)
        self._kv.free(entry, is_opened=restore.sent > 0)
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
