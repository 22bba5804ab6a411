"""Ways of sequences to their next token: what the ranks' disks have, and what is predicted of each way. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple, Protocol

from mlx_ring.core.engine_stats import Meter
from mlx_ring.core.generation import WayBack, WaysBack
from mlx_ring.core.types import BLOCK_TOKENS, KvPlace, RankId, Way
from mlx_ring.engine.prefix_cache import LEAST_TOKENS, TOKEN_BYTES, SavedText, Tokens, shared_length
from mlx_ring.engine.resumption import (
    Candidate,
    KeptKv,
    KvInMemory,
    PrefillSpeed,
    ReadSpeeds,
    choose_way,
)
from mlx_ring.engine.rows import Restore, release
from mlx_ring.engine.sequence import Sequence
from mlx_ring.rpc.protos import step_pb2, worker_pb2


@dataclass(frozen=True, slots=True)
class Offer:
    """KV that the ranks can read."""

    way: Way
    """`disk`, or with the disks of other machines `peers`."""
    tokens: int
    seconds: float
    """Predicted time until all is read."""
    nbytes: float = 0.0
    """Bytes that come from other machines."""
    link_s: float = 0.0
    """Time for which the busiest end of the links is needed for them."""
    wait_s: float = 0.0
    """Part of `seconds` in which what was chosen before is read."""

    @property
    def read_s(self) -> float:
        """Predicted time of the reading alone."""
        return self.seconds - self.wait_s


@dataclass(slots=True)
class Found:
    """Blocks that every rank has which has answered."""

    blocks: int
    ends: frozenset[int] | None = None
    """Numbers of blocks after which all these ranks can continue; None: every number up to `blocks`."""

    def take(self, blocks: int, ends: Iterable[int]) -> None:
        """Keep the largest number of blocks after which another rank can continue too."""
        if own := frozenset(ends):
            self.ends = own if self.ends is None else self.ends & own
        self.blocks = min(self.blocks, blocks)
        if self.ends is not None:
            self.blocks = max((end for end in self.ends if end <= self.blocks), default=0)


@dataclass(slots=True)
class KvFetch:
    """Blocks that the ranks count, and may then read, for sequences that begin with them."""

    tokens: tuple[int, ...]
    """Tokens that may be restored."""
    owner: str
    digests: list[bytes]
    waiting: list[Sequence]
    owed_by: set[RankId]
    found: Found
    """Blocks on the ranks' own disks, or all those that were read."""
    with_peers: Found
    """Counted: blocks with the disks of other machines."""
    from_peers: dict[RankId, worker_pb2.PeerBlocks] = field(
        default_factory=dict[RankId, worker_pb2.PeerBlocks]
    )
    """Answers of the ranks that need other machines for them, or that have read from them."""
    next_tokens: int = 0
    """Tokens of the listed block after them, in the same way."""
    is_held: bool = False
    """True if a rank has read any."""
    offer: Offer | None = None
    """Offer that was chosen; None while they are counted."""
    reads_since_s: float | None = None
    """Time at which the ranks were asked to read them; None before."""
    read_s: float = 0.0
    """Time for which the slowest rank has read them."""
    back: WayBack | None = None
    """Way back that ends once they are restored."""

    def take(self, rank: RankId, fetched: worker_pb2.KvFetched) -> None:
        """Record a rank's answer."""
        self.owed_by.discard(rank)
        self.found.take(fetched.blocks, fetched.ends)
        self.next_tokens = min(self.next_tokens, fetched.next_tokens)
        self.read_s = max(self.read_s, fetched.read_s)
        if fetched.HasField("from_peers"):
            self.from_peers[rank] = fetched.from_peers
        more = fetched.from_peers if fetched.HasField("from_peers") else fetched
        self.with_peers.take(more.blocks, more.ends)
        self.is_held |= self.reads_since_s is not None and fetched.blocks > 0

    @property
    def may_continue(self) -> bool:
        """True if the answers of further ranks matter."""
        counts = self.reads_since_s is None and self.with_peers.blocks > 0
        return bool(self.owed_by) and (counts or self.found.blocks > 0)

    def offers(self, speeds: ReadSpeeds, wait_s: float, now: float) -> list[Offer]:
        """Return what can be read once other reads have ended, the preferred offer first."""
        own, all_ = self.found.blocks * BLOCK_TOKENS, self.with_peers.blocks * BLOCK_TOKENS
        own_s = wait_s + speeds.disk_s(own, now)
        offers = [Offer("disk", own, own_s, wait_s=wait_s)] if own else []
        if all_ > own:
            nbytes, link_s = self.links()
            all_s = wait_s + speeds.peers_s(all_, link_s, now)
            offers.append(Offer("peers", all_, all_s, nbytes, link_s, wait_s))
        return offers

    def links(self) -> tuple[float, float]:
        """Return the bytes that all ranks need from other machines, and the seconds of the busiest end of the links."""
        nbytes, seconds = 0.0, defaultdict[RankId | str, float](float)
        for rank, found in self.from_peers.items():
            # A rank may have counted more blocks than the others have.
            part = min(1.0, self.with_peers.blocks / max(1, found.blocks))
            for each in found.parts:
                nbytes += part * each.bytes
                for end in (rank, each.node):
                    seconds[end] += part * each.seconds
        return nbytes, max(seconds.values(), default=0.0)


@dataclass(frozen=True, slots=True)
class Fetched:
    """Result of a fetch on all ranks."""

    id: int
    tokens: tuple[int, ...]
    """Tokens that all ranks have read."""
    waiting: list[Sequence]
    owner: str
    """Digest of the API key for which they were saved; empty: none."""
    is_held: bool
    """True if a rank may keep what it has read."""
    from_peers: int = 0
    """Number of the tokens of which a rank has read KV of another machine's disk."""
    back: WayBack | None = None
    """Way back that ends once they are restored, if it is none of a sequence."""

    def restored(self, now: float) -> None:
        """Record that the tokens are restored."""
        if self.back is not None:
            self.back.arrive(now)


def compute_instead(sequences: Ordered[Sequence], back: WayBack | None) -> None:
    """Let sequences compute what they waited for. The first one takes the way back along, if it has none."""
    if sequences and sequences[0].back is None:
        sequences[0].back = back
    for each in {id(one.back): one.back for one in sequences if one.back is not None}.values():
        each.turn("recompute", None)
    release(sequences)


@dataclass(slots=True)
class KvSave:
    """Text of an ended sequence that is saved."""

    text: SavedText
    owed_by: set[RankId]
    """Ranks that have not counted its blocks yet."""
    fetch: int = 0
    """Id of the count; 0 until the text has its turn."""
    next: int = 0
    """Number of blocks that every rank has, or was asked to save."""

    @property
    def is_counted(self) -> bool:
        return bool(self.fetch) and not self.owed_by


Choose = Callable[[Ordered[Sequence], Ordered[Offer], float], tuple[Offer, WayBack | None] | None]
"""Function that chooses between offers and computing. It returns the chosen offer and the first sequence's way back.

It receives the sequences that begin with the tokens, the offers, and the time now. Without a way back, sequences before
them need the same tokens: they wait if those are being read, and are computed otherwise. None: they are computed.
"""


class SavedKv(Protocol):
    """Saved KV of one instance."""

    def want(self, sequence: Sequence, reusable: int) -> None:
        """Let the ranks count a new sequence's blocks, if they may have more than the `reusable` tokens in memory."""
        ...

    def answered(
        self, rank: RankId, fetched: worker_pb2.KvFetched, now: float, choose: Choose
    ) -> Fetched | None:
        """Record a rank's answer; return the result of a fetch that has ended."""
        ...

    def restore(self, fetched: Fetched, kv: KvInMemory) -> list[step_pb2.CacheOperation]:
        """Keep what was fetched; return the operations that forget it if that is impossible."""
        ...

    @property
    def has_unsent(self) -> bool:
        """True if there may be requests or operations to send to the ranks."""
        ...

    @property
    def newest_restore(self) -> tuple[int, Restore] | None:
        """Restore that was begun last, with the id of what it fills; None if none is under way."""
        ...


class Ways:
    """Ways of an engine's sequences to their next token: what is predicted of each, and which one is taken."""

    def __init__(
        self,
        speed: PrefillSpeed,
        kv: KvInMemory,
        disk: SavedKv | None,
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
            self._disk.want(sequence, self._in_memory(sequence))

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
        compute_instead(restore.waiting, restore.back)
        self._kv.free(entry, is_opened=restore.sent > 0)
        return True

    def choose(
        self, sequences: Ordered[Sequence], offers: Ordered[Offer], now: float
    ) -> tuple[Offer, WayBack | None] | None:
        """Choose between what can be read and computing, as `Choose`."""
        first = sequences[0]
        kept, start = self._kv.kept_of(first.id), self._start(first)
        useful = [offer for offer in offers if offer.tokens > self._in_memory(first)]
        offers = [offer for offer in useful if offer.tokens > start]
        if not offers:
            return (useful[0], None) if useful and kept is None else None
        compute_s = self._compute_s(first, start, kept)
        rests = [self._compute_s(first, offer.tokens, kept) for offer in offers]
        reads = [
            Candidate(offer.way, None if rest_s is None else offer.seconds + rest_s)
            for offer, rest_s in zip(offers, rests, strict=True)
        ]
        compute = Candidate("recompute" if kept is None else "kept", compute_s)
        chosen = choose_way([*reads, compute] if kept is None else [compute, *reads])
        if chosen is compute:
            if first.back is None:
                more_s = None if compute_s is None else compute_s + self._queue_s(first)
                parts = [
                    f"{offer.way}: {in_seconds(read.seconds)} for {_amount(offer)} and the rest"
                    for offer, read in zip(offers, reads, strict=True)
                ]
                about = f" ({'; '.join(parts)})"
                first.back = self._begin(first, about).begin(compute.way, more_s, now)
            return None
        offer, rest_s = next(
            each for each, read in zip(zip(offers, rests, strict=True), reads, strict=True) if read is chosen
        )
        first.reads_s = rest_s or 0.0
        more_s = None if chosen.seconds is None or compute_s is None else chosen.seconds - compute_s
        for sequence in sequences:
            if sequence.back is not None:
                sequence.back.turn(offer.way, more_s)
        if first.back is not None:
            return offer, first.back
        about = f" ({_amount(offer)}; recompute: {in_seconds(compute_s)}, {in_seconds(rest_s)} of it for the rest)"
        return offer, self._begin(first, about).begin(offer.way, offer.seconds, now)

    def _begin(self, sequence: Sequence, about: str) -> WaysBack:
        return WaysBack(sequence.request.request_id, self._record, about)

    def _start(self, sequence: Sequence) -> int:
        """Return the tokens that the sequence need not compute: cached ones, or those that an earlier one computes."""
        text, least = sequence.text, LEAST_TOKENS * TOKEN_BYTES
        alike = (other.text for other in self._ahead(sequence) if other.text[:least] == text[:least])
        shared = max((shared_length(other, text) // TOKEN_BYTES for other in alike), default=0)
        return max(self._in_memory(sequence), shared if shared >= LEAST_TOKENS else 0)

    def _in_memory(self, sequence: Sequence) -> int:
        return self._kv.shared(_to_prefill(sequence), self._running)

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


# ---- moves from another instance

_LOCAL_BYTES_PER_S, _REMOTE_BYTES_PER_S = 1e9, 1e8
"""Assumed throughput within a machine, and of a link between machines that was not measured."""
_ASSUMED = (1.0, 0.02)
"""Factor by which moves take longer than links promise, and seconds for connections and waits, until they are measured."""
_SPEED, _WEIGHT, _FORGET_S = "move", 0.5, 600.0
"""Name of the measurement, the weight of the newest one, and the seconds after which slow ones are forgotten."""
_LARGE_BYTES = 4 << 20
"""Size from which a move measures the factor. The time of a smaller one is mostly that of connections and waits."""


class LinkUse(NamedTuple):
    """Use of links by a move of KV."""

    seconds: float
    """Time that the busiest machine needs at the speed of its links."""
    nbytes: float
    """Bytes of all machines."""


def link_use(
    pairs: Iterable[tuple[KvPlace, KvPlace]], bytes_per_token: Mapping[RankId, float], tokens: int
) -> LinkUse:
    """Return the use of links if ranks read some tokens of the layers that they have in common with sources.

    Args:
        pairs: readers with their sources.
        bytes_per_token: bytes of a token on each source.
        tokens: number of tokens.
    """
    seconds, nbytes = defaultdict[tuple[str, str], float](float), 0.0
    for reader, source in pairs:
        layers = max(1, source.layers.end - source.layers.start)
        of_pair = tokens * bytes_per_token.get(source.rank, 0.0) / layers * len(reader.common(source))
        speed = source.bytes_per_s.get(reader.node) or _REMOTE_BYTES_PER_S
        nbytes += of_pair
        for end in {("from", source.node), ("to", reader.node)}:
            seconds[end] += of_pair / (_LOCAL_BYTES_PER_S if reader.node == source.node else speed)
    return LinkUse(max(seconds.values(), default=0.0), nbytes)


class MoveTimes:
    """Predicted times of moves to one instance, learnt from those before."""

    def __init__(self, meter: Meter, clock: Callable[[], float]) -> None:
        """Start with what was measured.

        Args:
            meter: measurements of the replica.
            clock: the engine's clock.
        """
        self._meter, self._clock = meter, clock

    def _measured(self, other: MoveTimes) -> tuple[float, float]:
        """Return the factor and the seconds by which times are predicted."""
        known = self._meter.measured.get(_SPEED) or other._meter.measured.get(_SPEED)
        if known is None:
            return _ASSUMED
        factor, setup_s, measured_at = known
        if self._clock() - measured_at > _FORGET_S:
            return min(factor, _ASSUMED[0]), min(setup_s, _ASSUMED[1])
        return factor, setup_s

    def predict_s(self, use: LinkUse, other: MoveTimes) -> float:
        """Return the time of a move; `other` is asked if none came to this instance yet."""
        factor, setup_s = self._measured(other)
        return setup_s + factor * use.seconds

    def measure(self, use: LinkUse, taken_s: float, other: MoveTimes) -> None:
        """Learn from the time of a move."""
        factor, setup_s = self._measured(other)
        if use.nbytes < _LARGE_BYTES:
            setup_s += _WEIGHT * (max(0.0, taken_s - factor * use.seconds) - setup_s)
        else:
            factor += _WEIGHT * (max(0.0, taken_s - setup_s) / use.seconds - factor)
        self._meter.measured[_SPEED] = [factor, setup_s, self._clock()]


def _to_prefill(sequence: Sequence) -> Tokens:
    return tuple(sequence.tokens[: sequence.fill_to])


def in_seconds(seconds: float | None) -> str:
    """Return a predicted time as text."""
    return "unknown" if seconds is None else f"{seconds:.2f} s"


def _amount(offer: Offer) -> str:
    """Describe what is read."""
    others = f", {offer.nbytes / 1e6:.1f} MB of them from other machines" if offer.nbytes else ""
    return f"{offer.tokens} tokens{others}"
