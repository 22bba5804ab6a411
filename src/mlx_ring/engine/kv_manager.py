"""Management of the workers' KV: reservations, prefix cache, forks, trims and frees. Pure.

Each change becomes a cache operation, which travels with the next step. The budget and the prefix cache follow
the operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count

from mlx_ring.core.engine_stats import CacheStats
from mlx_ring.core.types import RankId
from mlx_ring.engine import rows as messages
from mlx_ring.engine.disk_kv import DiskKv, disk_counts
from mlx_ring.engine.kv_budget import KvBudget, RankKv
from mlx_ring.engine.prefix_cache import OFFERED_TOKENS, Extent, Found, Match, PrefixCache, Tokens
from mlx_ring.engine.resumption import KeptKv, LeftKv, find_left
from mlx_ring.engine.sequence import Extents, Sequence
from mlx_ring.rpc.protos import step_pb2

Operations = list[step_pb2.CacheOperation]
_FIRST_SNAPSHOT = 1 << 48
"""First id of snapshots, far from those of requests."""
_LEAST_SNAPSHOT = 64
_NOTHING = Found(None, 0)


class KvManager:
    """KV of one instance as the ranks have it after executing all sent steps."""

    def __init__(
        self, ranks: Mapping[RankId, RankKv] | None, *, prefix_cache: bool, disk: DiskKv | None = None
    ) -> None:
        self.budget, self.cache = KvBudget(ranks), PrefixCache(ranks)
        self.disk, self._enabled, self.moved_tokens = disk, prefix_cache, 0
        self._operations: Operations = []
        self._next_step, self._snapshots = 1, count(_FIRST_SNAPSHOT)
        self._kept: dict[int, KeptKv] = {}
        """KV kept since a loss, by the waiting sequence that will take it ..."""
        self._taken: dict[int, KeptKv] = {}
        """... and by those that were admitted, but not opened. It is a part of their memory."""
        self.held: set[int] = set()
        """Sequences that some rank holds or will hold, except those being freed."""
        self.arriving: dict[int, Callable[[int | None], None]] = {}
        """Functions that give up KV which still arrives for the cache. They receive the cached sequence that stays."""

    @property
    def can_draft(self) -> bool:
        """True if tokens can be rolled back after they were fed."""
        return not self.cache.recurrent

    # ---- operations

    @property
    def has_operations(self) -> bool:
        return bool(self._operations) or (self.disk is not None and self.disk.has_operations)

    def add_operations(self, operations: Iterable[step_pb2.CacheOperation]) -> None:
        """Add operations that change no sequence of this manager."""
        self._operations += operations

    def take_operations(self, step: int, now: float, *, has_rows: bool, is_prefill: bool) -> Operations:
        """Return the operations that go out with `step`, and forget them."""
        operations, self._operations, self._next_step = self._operations, [], step + 1
        if self.disk is not None:
            operations += self.disk.take_operations(now, has_rows=has_rows, is_prefill=is_prefill)
        return operations

    def settle(self, completed: int) -> None:
        """Record that every rank has executed the steps up to `completed`."""
        self.budget.settle(completed)

    def reset(self) -> None:
        """Free everything at once."""
        self._operations = [step_pb2.CacheOperation(reset=step_pb2.Reset())]
        self.cache.clear()
        if self.disk is not None:
            self.disk.clear()
        self._kept.clear()
        self._taken.clear()
        for sequence in self.held:
            self.budget.release(sequence, self._next_step)
        self.held.clear()

    def limit(self, limits: Mapping[RankId, int], longest: int) -> None:
        """Set new limits and evict cached KV beyond them. One sequence of `longest` tokens always fits."""
        self.budget.limit(limits, longest)
        while self.budget.is_over and self._evict(None):
            pass

    # ---- admission

    def admit(self, sequence: Sequence, running: Mapping[int, Sequence]) -> bool:
        """Reserve the KV that a sequence must prefill; return False if there is no room.

        Cached KV is evicted, the least recently used first, except the entry that the
        sequence itself can reuse. It takes that entry over if both do not fit.
        """
        tokens = min(sequence.fill_to + 1, sequence.max_length)
        match = self._find(sequence, running).match
        if sequence.id in self._kept:
            return self._admit_kept(sequence.id, tokens, running)
        source = match.source if match is not None and match.kept else None
        spare = len(running)
        if (
            self._make_room(tokens, sequence.id, spare=source, spare_blocks=spare)
            and self.budget.fits(tokens, sequence.id, spare_blocks=spare)
            and self._is_roomy(tokens, running, source)
        ):
            self.budget.charge(sequence.id, tokens)
            return True
        if match is None or source is None or self.budget.being_freed:
            return False
        # Both do not fit: it is admitted in place of the entry that it reuses.
        if not self._make_room_instead(tokens, sequence.id, source, spare):
            return False
        self.budget.charge(sequence.id, tokens)
        self._begin(sequence, match, take=True)
        return True

    def _make_room_instead(self, tokens: int, sequence: int, source: int, spare: int) -> bool:
        """Make room for a sequence in place of the cached or kept one that it takes over."""
        return self._make_room(tokens, sequence, instead_of=source, spare_blocks=spare) and self.budget.fits(
            tokens, sequence, without=(source,), spare_blocks=spare
        )

    def _admit_kept(self, sequence: int, tokens: int, running: Mapping[int, Sequence]) -> bool:
        """Admit a sequence in place of its kept KV; return False if there is no room."""
        kept = self._kept[sequence]
        has_room = self._make_room_instead(tokens, sequence, kept.id, len(running))
        if not has_room or not self._is_roomy(tokens, running, kept.id, kept):
            return False
        del self._kept[sequence]
        self._taken[sequence] = kept
        self.budget.hand_over(kept.id)
        self.budget.charge(sequence, tokens)
        return True

    def _make_room(
        self,
        tokens: int,
        sequence: int,
        *,
        spare: int | None = None,
        instead_of: int | None = None,
        spare_blocks: int = 0,
    ) -> bool:
        """Evict cached KV until a sequence can have `tokens`, now or after pending frees; return False if it cannot.

        Nothing is evicted if all is not enough. `spare` stays; so does `instead_of`, which counts as the sequence's.
        """
        own = () if instead_of is None else (instead_of,)
        stays = spare if instead_of is None else instead_of

        def fits(*without: int) -> bool:
            return self.budget.fits(tokens, sequence, without=without, spare_blocks=spare_blocks, freed=True)

        if not fits(*own) and not fits(*own, *self._evictable(stays)):
            return False
        while not fits(*own):
            self._evict(stays)
        return True

    def _is_roomy(
        self, tokens: int, running: Mapping[int, Sequence], spare: int | None, kept: KeptKv | None = None
    ) -> bool:
        """Return True if the ranks' reported memory leaves room too, besides what is kept; if not, evict one entry."""
        held = () if kept is None else (kept.length, kept.first_stage)
        if not running or self.budget.fits_as_held(tokens, *held):
            return True
        if not self.budget.being_freed:
            self._evict(spare)
        return False

    def begin(self, sequence: Sequence, running: Mapping[int, Sequence]) -> None:
        """Open an admitted sequence, with the longest reusable KV."""
        if sequence.id in self.held:
            return
        found = self._find(sequence, running)
        match, kept = found.match, self._taken.pop(sequence.id, None)
        if kept is not None and (match is None or match.length < kept.length):
            self._begin_kept(sequence, kept, match)
            return
        if kept is not None:
            self._free_on_ranks(kept)
        if self._enabled and self.cache.forgets:
            later = (other for other in running.values() if other.id not in self.held)
            shared = max(found.shared, sequence.shared_by_one_of(later))
            sequence.cut_at = shared if shared - (match.length if match else 0) >= _LEAST_SNAPSHOT else 0
        take = match is not None and self.cache.may_take(match, sequence.max_length)
        self._begin(sequence, match, take=take)

    def reuse(self, sequence: Sequence, running: Mapping[int, Sequence]) -> int:
        """Return the number of tokens that need no prefill if the sequence begins now."""
        if sequence.id in self.held:
            return sequence.scheduled
        match, kept = self._find(sequence, running).match, self._taken.get(sequence.id)
        on_all_stages = 0 if kept is None or kept.first_stage else kept.length
        return max(on_all_stages, 0 if match is None else match.length)

    def will_supply(self, other: Sequence, sequence: Sequence, least: int) -> bool:
        """Return True if another prompt will have at least so many of a prompt's tokens; it then offers them at once."""
        shared = other.shared_by_one_of((sequence,)) if self._enabled else 0
        if not self.cache.is_exact(shared, length=other.max_length, reached=other.max_length):
            return any(max(least, other.scheduled) <= cut <= shared for cut in other.snapshot_lengths)
        if shared >= least:
            other.offer_at = min(other.offer_at, shared)
        return shared >= least

    def shared(self, tokens: Tokens, running: Mapping[int, Sequence]) -> int:
        """Return the number of a prompt's tokens that the cache could supply now."""
        return 0 if (match := self.match(tokens, running)) is None else match.length

    def match(self, tokens: tuple[int, ...], running: Mapping[int, Sequence]) -> Match | None:
        return self.cache.find(tokens, Extents(running)).match if self._enabled else None

    def _find(self, sequence: Sequence, running: Mapping[int, Sequence]) -> Found:
        if not self._enabled or sequence.request.computes_all or sequence.id in self.held:
            return _NOTHING
        # Where caches forget positions, what others computed meanwhile counts too, and not only recorded entries.
        now = (self.cache.version, sequence.length)
        if sequence.found is None or sequence.found[:2] != now or self.cache.forgets:
            extents = Extents(running, besides=sequence.id)
            # A resumed sequence has one more known token, which is drawn again after those to prefill.
            sequence.found = (*now, self.cache.find(tuple(sequence.tokens[: sequence.fill_to]), extents))
        return sequence.found[2]

    def _begin(self, sequence: Sequence, match: Match | None, *, take: bool) -> None:
        self._operations.append(messages.open_operation(sequence))
        self.held.add(sequence.id)
        if self.disk is not None:
            self.disk.plan_ends(sequence)
        if sequence.longest_chunk is None:
            self.cache.count(sequence.length, match)
        if match is None:
            return
        self._operations.append(messages.fork_operation(match.source, sequence.id, match.length, take=take))
        sequence.scheduled = sequence.reused = match.length
        sequence.reached = match.extent.reached
        if not sequence.generation and sequence.opened_at in (None, sequence.admitted_at):
            # Neither another engine nor an earlier admission began it.
            sequence.cached_tokens = min(match.length, sequence.prompt_length)
        if take:
            sequence.taken = match.length
            self._forget(match.source)
            self.budget.hand_over(match.source)
            self.held.discard(match.source)
        else:
            self.cache.touch(match.source)
        self.note_filled(sequence)

    # ---- KV kept since a loss

    def left(
        self, running: Iterable[Sequence], unanswered: Iterable[tuple[Sequence, step_pb2.Row]], stages: int
    ) -> dict[int, LeftKv]:
        """Return the KV that a loss leaves of each sequence; `unanswered` are rows that some rank has not answered."""
        waiting = {sequence: kept.left(stages) for sequence, kept in (self._kept | self._taken).items()}
        return waiting | find_left(running, unanswered, self.held, self.cache.least_length, stages)

    def keep_for(self, sequence: Sequence, kept: KeptKv) -> None:
        """Count KV that some ranks have kept, for a sequence that waits; free it if that is too much."""
        self._kept[sequence.id] = kept
        self.held.add(kept.id)
        self.budget.charge(kept.id, kept.length)
        if self.budget.is_over:
            self.drop_kept(sequence.id)

    def kept_of(self, sequence: int) -> KeptKv | None:
        return self._kept.get(sequence)

    def drop_kept(self, sequence: int) -> None:
        """Free the KV that was kept for a sequence and that it has not taken."""
        if (kept := self._kept.pop(sequence, None)) is not None:
            self.free_kept([kept])

    def free_kept(self, kept: Iterable[KeptKv]) -> None:
        """Free KV that some ranks have kept."""
        for each in kept:
            self._free_on_ranks(each)
            self.budget.release(each.id, self._next_step)

    def _free_on_ranks(self, kept: KeptKv) -> None:
        self.held.discard(kept.id)
        self._operations.append(messages.free_operation(kept.id, first_stage=kept.first_stage))

    def _begin_kept(self, sequence: Sequence, kept: KeptKv, match: Match | None) -> None:
        """Open a sequence with its kept KV. The other stages reuse KV of their cache."""
        self.held.discard(kept.id)
        self.held.add(sequence.id)
        self.cache.count(sequence.length, match)
        self._operations += messages.continue_operations(sequence, kept.id, kept.length, kept.first_stage)
        sequence.reached, sequence.kept, sequence.kept_from = kept.reached, kept.length, kept.first_stage
        if not kept.first_stage:
            sequence.scheduled = sequence.reused = kept.length
        elif match is not None:
            fork = messages.fork_operation(
                match.source, sequence.id, match.length, take=False, end_stage=kept.first_stage
            )
            self._operations.append(fork)
            self.cache.touch(match.source)
            sequence.scheduled = sequence.reused = match.length
            sequence.reached = max(sequence.reached, match.extent.reached)

    # ---- it grows, and is cut

    def grow(self, sequence: Sequence, tokens: int) -> bool:
        """Reserve `tokens` for a running sequence, evicting cached KV; return False if there is no room."""
        if self.budget.holds(tokens, sequence.id):
            return True
        if not self._make_room(tokens, sequence.id) or not self.budget.fits(tokens, sequence.id):
            return False
        self.budget.charge(sequence.id, tokens)
        return True

    def relieve(self) -> bool:
        """Return True if the ranks hold no more than their limits, or soon will; evict one entry if needed.

        Rows of one bank share a capacity, so that ranks hold more than the account says.
        """
        return not self.budget.is_over_as_held or self.budget.being_freed > 0 or self._evict(None)

    def may_draft(self, sequence: Sequence, tokens: int) -> bool:
        """Reserve room for drafts, `tokens` in all, without evicting anything; return False if there is none."""
        if not self.budget.fits(tokens, sequence.id):
            return False
        self.budget.charge(sequence.id, tokens)
        return True

    def trim(self, sequence: Sequence, length: int) -> None:
        """Cut a running sequence to `length` tokens."""
        self._operations.append(messages.trim_operation(sequence.id, length))
        self.budget.charge(sequence.id, length + 1)

    def note_filled(self, sequence: Sequence) -> None:
        """Offer a sequence's prefilled tokens to others."""
        if self._enabled and not sequence.request.computes_all:
            sequence.offer_at = sequence.scheduled + OFFERED_TOKENS
            self.cache.note_running(sequence.id, tuple(sequence.tokens[: sequence.scheduled]))

    def after_chunk(self, sequence: Sequence) -> None:
        """Offer a sent chunk to others, and keep a snapshot at lengths that cannot be restored later."""
        if sequence.is_prefilled or sequence.scheduled >= sequence.offer_at:
            self.note_filled(sequence)
        at_cut = sequence.scheduled == sequence.cut_at
        at_end = sequence.is_prefilled and not sequence.generation and sequence.request.pooling is None
        at_end = at_end and self.cache.outgrows(sequence.scheduled, sequence.max_length)
        if self._enabled and (at_cut or at_end) and sequence.scheduled >= _LEAST_SNAPSHOT:
            self._keep_snapshot(sequence)
        if self.disk is not None:
            self._operations += self.disk.after_chunk(sequence)

    def _keep_snapshot(self, source: Sequence) -> None:
        tokens = tuple(source.tokens[: source.scheduled])
        if (entry := self.begin_entry(tokens)) is not None:
            self._operations += messages.snapshot_operations(source.id, len(tokens), entry)
            self.offer_entry(entry, tokens, source.reached)
            if self.disk is not None:
                # The sequence may not be kept at its end, when it has moved beyond its known tokens.
                self.disk.keep(entry, tokens, source.prompt_length, source.owner)

    def begin_entry(self, tokens: Tokens, *, spare: int | None = None) -> int | None:
        """Reserve room for KV under an id of its own, and return that; None if there is no room, without `spare`, or no need."""
        entry, promised = next(self._snapshots), self.budget.awaited_blocks
        is_new = bool(tokens) and not self.cache.covers(tokens)
        if not (is_new and self._make_room(len(tokens), entry, spare=spare, spare_blocks=promised)):
            return None
        # The ranks free before they fill it, because that is in earlier operations.
        self.budget.charge_freed(entry, len(tokens))
        self.held.add(entry)
        return entry

    def offer_entry(self, entry: int, tokens: Tokens, reached: int, *, is_oldest: bool = False) -> None:
        """Keep KV that the ranks have under an id of its own, as of an ended sequence."""
        for needless in self.cache.keep(entry, tokens, reached, is_oldest=is_oldest):
            self.free(needless)

    # ---- end

    def free(self, sequence: int, *, is_opened: bool = True) -> None:
        """Free a sequence's memory, or only its reservation if it was never opened."""
        self._forget(sequence)
        if (taken := self._taken.pop(sequence, None)) is not None:
            self._free_on_ranks(taken)
            self.budget.release(sequence, self._next_step)
        elif sequence in self.held and is_opened:
            self.held.discard(sequence)
            self._operations.append(messages.free_operation(sequence))
            self.budget.release(sequence, self._next_step)
        else:
            self.held.discard(sequence)
            self.budget.drop(sequence)

    def _forget(self, sequence: int) -> None:
        self.cache.forget(sequence)
        if self.disk is not None:
            self._operations += self.disk.forget(sequence)

    def keep(self, sequence: Sequence, most: int | None = None) -> None:
        """Keep an ended sequence's KV in the prefix cache, up to its known tokens and at most `most` of them."""
        known = sequence.computed if most is None else min(most, sequence.computed)
        tokens = tuple(sequence.tokens[:known])
        is_useful = self._enabled and not sequence.request.computes_all and sequence.id in self.held
        held = max(sequence.scheduled, sequence.kept)
        if not (is_useful and self.cache.is_worth_keeping(tokens, Extent(held, sequence.reached))):
            self.free(sequence.id)
            return
        if len(tokens) < held:
            self._operations.append(messages.trim_operation(sequence.id, len(tokens)))
        self._operations.append(messages.retain_operation(sequence.id))
        self.budget.charge(sequence.id, len(tokens))
        if self.disk is not None:
            self.disk.keep(sequence.id, tokens, sequence.prompt_length, sequence.owner)
        self.offer_entry(sequence.id, tokens, sequence.reached)

    def _evict(self, spare: int | None) -> bool:
        """Free KV that arrives, else what was used least recently of the cache, else what was kept for the newest sequence."""
        if self.arriving:
            self.arriving.popitem()[1](spare)
            return True
        if (oldest := self.cache.evict(spare)) is not None:
            self.free(oldest)
            return True
        newest = next((waiting for waiting, kept in reversed(self._kept.items()) if kept.id != spare), None)
        if newest is not None:
            self.drop_kept(newest)
        return newest is not None

    def _evictable(self, spare: int | None) -> Iterator[int]:
        """Yield the sequences that `_evict` could free."""
        yield from self.arriving
        yield from self.cache.kept(spare=spare)
        yield from (kept.id for kept in self._kept.values() if kept.id != spare)

    # ---- statistics

    @property
    def sequences_held(self) -> int:
        """Number of sequences whose KV some rank may still hold."""
        return len(self.held) + self.budget.being_freed

    def stats(self) -> CacheStats:
        return CacheStats(
            enabled=self._enabled,
            **self.cache.counts(),
            **disk_counts(self.disk),
            moved_tokens=self.moved_tokens,
            ranks=self.budget.use(self.cache.kept()),
        )
