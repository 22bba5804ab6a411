"""KV on the ranks' disks: what is read before a sequence runs, and what is written after it. Pure.

Tokens are saved in blocks. A block's digest covers all tokens up to its end, so that it names the block's content. Every
rank saves its own layers. Of a prompt's blocks, as many are restored as every rank has, if that is predicted to be faster
than to compute them. So the ranks first count the blocks, and read them only if asked to. If several sequences begin
with the same blocks, these are read once. Few are read at a time: what is read waits in the ranks' memory until it is
copied with the steps.

A rank may lack what another machine has saved, such as its layers after a change of the stages. It then also counts with
the disks of other machines, and says how many bytes would come from each. That is one more way, with a time of its own.

When an answer has ended, the ranks count those of its blocks that need not be saved. Any rank may have removed some, or
failed to write them. The rest is saved with the next steps, a few blocks with each.

The tokens behind a text's last full block are a shorter block. It is listed by the tokens before it, and so is the block
in which the prompt ends. A text that shares only the first tokens of a listed block uses those.

Layers with windows or states forget, so that a text can be restored only at ends of blocks at which these were saved in
time. So a chunk ends at the last end of a block in a prompt, and where a prompt leaves those that it shares tokens with.
While an answer grows, windows are saved at each end of a block. States are not: they are large, and have moved on before
the head knows the tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

from mlx_ring.core.types import BLOCK_TOKENS, RankId, fetch_ids
from mlx_ring.engine.kv_budget import RankKv
from mlx_ring.engine.prefix_cache import (
    TOKEN_BYTES,
    SavedText,
    Tokens,
    block_digests,
    last_end,
    list_block,
    split_text,
)
from mlx_ring.engine.resumption import KvInMemory, ReadSpeeds
from mlx_ring.engine.rows import Restore, Restores, drop_operation, release
from mlx_ring.engine.sequence import Sequence
from mlx_ring.engine.ways_back import Choose, Fetched, Found, KvFetch, KvSave, Offer, compute_instead
from mlx_ring.rpc.protos import step_pb2, worker_pb2

_BLOCKS_IDLE, _BLOCKS_BUSY = 2, 1
"""Blocks that are saved with one step, without rows and with them: rows wait while a rank copies blocks."""
_BYTES_PER_S, _LEAST_PAUSE_S = 2e8, 0.05
"""Speed at which each rank saves while rows run, and least time between two blocks then: copies delay rows."""
_MOST_READS, _MOST_READ_BYTES = 4, 1 << 30
"""Fetches that are read at a time, and bytes on the rank with most that are read or wait to be copied.

A larger text is read alone."""
_LEAST_WITHIN_S, _MOST_WITHIN_S, _WITHIN = 10.0, 120.0, 4.0
"""Time after which ranks answer with what they have read: so many seconds at least and at most, and so many times the
predicted time."""


class DiskKv:
    """Fetches and saves of one instance, for one epoch."""

    def __init__(
        self,
        ranks: Iterable[RankId],
        kv: Mapping[RankId, RankKv] | None = None,
        measured: dict[str, list[float]] | None = None,
        owners: Iterable[str] = (),
        epoch: int = 0,
    ) -> None:
        """Start without any.

        Args:
            ranks: all ranks.
            kv: their KV memory.
            measured: measurements of earlier engines, which this changes.
            owners: owners of KV, as `owner_of` names them; the ranks remove KV of others. Empty: they remove none.
            epoch: the instance's epoch.
        """
        self._ranks = frozenset(ranks)
        given = list((kv or {}).values())
        self._token_bytes = max((rank.bytes_per_token for rank in given), default=0)
        self._slack = max((rank.slack for rank in given), default=0)
        self._has_states = any(rank.recurrent for rank in given)
        self._speeds = ReadSpeeds({} if measured is None else measured, self._token_bytes)
        self._last_read_s = 0.0
        """Time at which the last read ended."""
        self._pause_s = max(_LEAST_PAUSE_S, BLOCK_TOKENS * self._token_bytes / _BYTES_PER_S)
        self._next_save_s = 0.0
        self._ids = fetch_ids(epoch)
        self._fetches: dict[int, KvFetch] = {}
        self._queue: list[int] = []
        """Fetches that were chosen, and are not read yet."""
        self._unsent: list[worker_pb2.FetchKv] = []
        if known := sorted(map(bytes.fromhex, owners)):
            self._unsent.append(worker_pb2.FetchKv(id=next(self._ids), only_looks=True, owners=known))
        self._restores = Restores()
        self._to_save: dict[int, KvSave] = {}
        """Texts of ended sequences, the next one first."""
        self.restored_tokens = self.saved_tokens = self.peer_tokens = 0

    # ---- restore

    def want(self, sequence: Sequence, reusable: int) -> None:
        """Let the ranks count a new sequence's blocks, if they may have more than the `reusable` tokens in memory."""
        most = last_end(sequence.fill_to) // BLOCK_TOKENS
        if sequence.request.computes_all or most * BLOCK_TOKENS <= reusable:
            return
        tokens = tuple(sequence.tokens[: sequence.fill_to - 1])
        if self._restores.join(sequence, tokens[: most * BLOCK_TOKENS], is_whole=self._forgets):
            return
        digests = block_digests(sequence.text[: TOKEN_BYTES * len(tokens)], sequence.owner)
        for id_, fetch in self._fetches.items():
            # Content of a longer text cannot be cut if some layers forget.
            if fetch.digests[: None if self._forgets else most] == digests:
                fetch.waiting.append(sequence)
                sequence.awaits_kv = id_
                return
        id_ = next(self._ids)
        self._fetches[id_] = KvFetch(
            tokens, sequence.owner, digests, [sequence], set(self._ranks), Found(most), Found(most)
        )
        blocks = step_pb2.KvBlocks(block_tokens=BLOCK_TOKENS, digests=digests)
        self._unsent.append(worker_pb2.FetchKv(id=id_, blocks=blocks, only_looks=True, asks_peers=True))
        sequence.awaits_kv = id_

    def _start_reads(self, now: float) -> None:
        """Let the ranks read the fetches that were chosen, as far as there is room for them."""
        while self._queue:
            id_ = self._queue[0]
            if (fetch := self._fetches.get(id_)) is None or fetch.offer is None:
                del self._queue[0]
                continue
            reading = [each for each in self._fetches.values() if each.reads_since_s is not None]
            held = self._restores.nbytes + sum(map(self._nbytes, reading))
            is_full = held and held + self._nbytes(fetch) > _MOST_READ_BYTES
            if is_full or len(reading) >= _MOST_READS:
                return
            del self._queue[0]
            fetch.reads_since_s = now
            self._read(id_, fetch, fetch.offer)

    def _nbytes(self, fetch: KvFetch) -> int:
        """Return the bytes of what a fetch reads on the rank with most."""
        return 0 if fetch.offer is None else fetch.offer.tokens * self._token_bytes

    def _read(self, id_: int, fetch: KvFetch, offer: Offer) -> None:
        """Ask all ranks for the blocks that they have, and for as much as they have of the next one."""
        fetch.owed_by, fetch.found = set(self._ranks), Found(offer.tokens // BLOCK_TOKENS)
        fetch.from_peers, fetch.read_s = {}, 0.0
        digests, length = fetch.digests[: fetch.found.blocks], offer.tokens
        rest = fetch.tokens[length : length + BLOCK_TOKENS]
        fetch.next_tokens = len(rest)
        self._unsent.append(
            worker_pb2.FetchKv(
                id=id_,
                blocks=step_pb2.KvBlocks(block_tokens=BLOCK_TOKENS, digests=digests),
                next=None if self._forgets else list_block(digests[-1], rest, fetch.owner),
                asks_peers=offer.way == "peers",
                within_s=min(max(_LEAST_WITHIN_S, _WITHIN * offer.read_s), _MOST_WITHIN_S),
            )
        )

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent or self._queue or self.has_saves)

    def take_unsent(self, now: float) -> list[worker_pb2.FetchKv]:
        """Return the requests to send to all ranks now, and forget them."""
        self._start_reads(now)
        unsent, self._unsent = self._unsent, []
        return unsent

    def answered(
        self, rank: RankId, fetched: worker_pb2.KvFetched, now: float, choose: Choose
    ) -> Fetched | None:
        """Record a rank's answer; return the result once all have answered, or one of them with nothing.

        Once all have counted the blocks, `choose` says whether they are read, and from where.
        """
        fetch = self._fetches.get(fetched.id)
        if fetch is None:
            self._counted(rank, fetched)
            return None
        fetch.take(rank, fetched)
        if fetch.may_continue:
            return None
        is_read = fetch.reads_since_s is not None
        if not is_read:
            offers = fetch.offers(self._speeds, self._wait_s(now), now)
            offer, back = (choose(fetch.waiting, offers, now) if offers else None) or (None, None)
            if offer is not None and back is not None:
                fetch.offer, fetch.back = offer, back
                self._queue.append(fetched.id)
                return None
            if offer is not None and self._wait_for_others(fetched.id, offer):
                return None
            fetch.found.blocks = 0
        del self._fetches[fetched.id]
        self._last_read_s = now if is_read else self._last_read_s
        self._end(fetch, now, has_begun=fetched.read_s > 0)
        blocks = fetch.found.blocks
        tokens = fetch.tokens[: blocks * BLOCK_TOKENS + fetch.next_tokens if blocks else 0]
        is_held = fetch.is_held or (is_read and bool(fetch.owed_by))
        other_blocks = max((found.blocks for found in fetch.from_peers.values()), default=0) if is_read else 0
        from_peers = min(len(tokens), other_blocks * BLOCK_TOKENS)
        back = None if any(fetch.back is each.back for each in fetch.waiting) else fetch.back
        return Fetched(fetched.id, tokens, fetch.waiting, fetch.owner, is_held, from_peers, back)

    def _wait_for_others(self, id_: int, offer: Offer) -> bool:
        """Let the sequences of a fetch wait for the same tokens, which are read for others; return False if they are not."""
        fetch, blocks = self._fetches[id_], offer.tokens // BLOCK_TOKENS
        tokens = fetch.tokens[: offer.tokens]
        for other_id, other in self._fetches.items():
            # Content of a longer text cannot be cut if some layers forget.
            most = len(other.digests) if other.offer is None else other.offer.tokens // BLOCK_TOKENS
            fits = most == blocks if self._forgets else most >= blocks
            if other is not fetch and fits and other.digests[:blocks] == fetch.digests[:blocks]:
                for sequence in fetch.waiting:
                    sequence.awaits_kv = other_id
                other.waiting += fetch.waiting
                break
        else:
            joined = [self._restores.join(each, tokens, is_whole=self._forgets) for each in fetch.waiting]
            if not all(joined):
                return False
        del self._fetches[id_]
        return True

    def _wait_s(self, now: float) -> float:
        """Return the predicted seconds until the reads are done that were chosen before: a rank reads one after the other."""
        chosen = [each.offer.read_s for each in self._fetches.values() if each.offer is not None]
        reading = [
            (each.reads_since_s, each.offer.read_s)
            for each in self._fetches.values()
            if each.offer is not None and each.reads_since_s is not None
        ]
        since_s, first_s = min(reading, default=(now, 0.0))
        return sum(chosen) - min(first_s, max(0.0, now - max(since_s, self._last_read_s)))

    def _end(self, fetch: KvFetch, now: float, *, has_begun: bool) -> None:
        """Learn the speed from a fetch that was read, or let its sequences compute its tokens.

        `has_begun` is False if the rank that has read nothing had not begun, which says nothing of other fetches.
        """
        if fetch.offer is None:
            return
        tokens, offer = fetch.found.blocks * BLOCK_TOKENS, fetch.offer
        if not tokens:
            compute_instead(fetch.waiting, fetch.back)
            if has_begun:
                self._give_up_queue(offer)
        elif fetch.read_s and offer.way == "disk":
            self._speeds.record_disk(tokens, fetch.read_s, now)
        elif fetch.read_s and tokens == offer.tokens:
            self._speeds.record_peers(tokens, offer.link_s, offer.nbytes, fetch.read_s, now)

    def _give_up_queue(self, failed: Offer) -> None:
        """Let the sequences compute that wait for a turn to read from where nothing could be read."""
        for id_ in [*self._queue]:
            other = self._fetches.get(id_)
            if other is not None and other.offer is not None and failed.way in ("disk", other.offer.way):
                self._queue.remove(id_)
                del self._fetches[id_]
                compute_instead(other.waiting, other.back)

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
            if tokens:
                compute_instead(fetched.waiting, fetched.back)
            release(fetched.waiting)
            return [drop_operation(fetched.id)] if fetched.is_held else []
        nbytes, offer = len(tokens) * self._token_bytes, partial(self._offer, kv, entry, fetched)
        self._restores.begin(entry, fetched.id, tokens, fetched.waiting, nbytes, offer, fetched.back)
        return []

    def _offer(self, kv: KvInMemory, entry: int, restored: Fetched, now: float) -> None:
        restored.restored(now)
        self.restored_tokens += len(restored.tokens)
        self.peer_tokens += restored.from_peers
        # Windows are restored without the tokens before them by which they could be cut.
        kv.offer_entry(entry, restored.tokens, len(restored.tokens) + self._slack)

    def take_operations(
        self, now: float, *, has_rows: bool, is_prefill: bool
    ) -> list[step_pb2.CacheOperation]:
        """Return the operations that restore and save the next parts, if there are any, as `take_saves`."""
        restores = self._restores.take(now, is_prefill=is_prefill)
        return [*restores, *self.take_saves(now if has_rows else None)]

    @property
    def newest_restore(self) -> tuple[int, Restore] | None:
        """Restore that was begun last, with the id of what it fills; None if none is under way."""
        return self._restores.newest

    # ---- save

    def keep(self, sequence: int, tokens: Tokens, prompt_length: int, owner: str = "") -> None:
        """Save the blocks of an ended sequence, which the ranks keep, with the next steps."""
        if self._forgets:
            text = SavedText(block_digests(tokens, owner))
        else:
            text = split_text(tokens, prompt_length, owner)
        if text.digests:
            self._to_save[sequence] = KvSave(text, set(self._ranks))
            self._count_next()

    def _count_next(self) -> None:
        """Let the ranks count the blocks of the next text to save."""
        saving = next(iter(self._to_save.values()), None)
        if saving is None or saving.fetch:
            return
        saving.fetch = next(self._ids)
        text = saving.text
        blocks = step_pb2.KvBlocks(
            block_tokens=BLOCK_TOKENS, digests=text.digests, last_tokens=text.last_tokens
        )
        self._unsent.append(
            worker_pb2.FetchKv(id=saving.fetch, blocks=blocks, only_looks=True, for_save=True)
        )

    def _counted(self, rank: RankId, fetched: worker_pb2.KvFetched) -> None:
        """Record how many blocks of the next text a rank need not save."""
        sequence, saving = next(iter(self._to_save.items()), (0, None))
        if saving is None or saving.fetch != fetched.id:
            return
        saving.next = (
            fetched.blocks if len(saving.owed_by) == len(self._ranks) else min(saving.next, fetched.blocks)
        )
        saving.owed_by.discard(rank)
        saving.next = min(saving.next, len(saving.text.digests))
        if saving.is_counted and saving.next == len(saving.text.digests) and not saving.text.listed:
            self._end_save(sequence)

    def _end_save(self, sequence: int) -> None:
        self._to_save.pop(sequence, None)
        self._count_next()

    def forget(self, sequence: int) -> list[step_pb2.CacheOperation]:
        """Save or restore no more of a sequence whose KV is freed, or taken over; return the operations that forget it."""
        self._end_save(sequence)
        return self._restores.forget(sequence)

    @property
    def has_saves(self) -> bool:
        """True if the next text's blocks are counted, so that a step can save some."""
        return next((saving.is_counted for saving in self._to_save.values()), False)

    @property
    def has_operations(self) -> bool:
        return self.has_saves or self._restores.has_parts

    def take_saves(self, busy_s: float | None) -> list[step_pb2.CacheOperation]:
        """Return the operation that saves the next blocks, if there are any.

        Args:
            busy_s: the time, if the step has rows; there must be a pause since the last save then. None: it has none.
        """
        if not self.has_saves or (busy_s is not None and busy_s < self._next_save_s):
            return []
        if busy_s is not None:
            self._next_save_s = busy_s + self._pause_s
        sequence, saving = next(iter(self._to_save.items()))
        text, digests, first = saving.text, saving.text.digests, saving.next
        most = _BLOCKS_IDLE if busy_s is None else _BLOCKS_BUSY
        saving.next = end = min(len(digests), first + most)
        self.saved_tokens += text.tokens_in(first, end)
        is_last = end == len(digests)
        last_tokens = text.last_tokens if is_last else 0
        save = step_pb2.Save(
            sequence=sequence,
            blocks=step_pb2.KvBlocks(
                block_tokens=BLOCK_TOKENS, digests=digests[:end], last_tokens=last_tokens
            ),
            first=first,
            most=most,
            may_wait=busy_s is None,
            listed=text.listed if is_last else (),
        )
        if is_last:
            self._end_save(sequence)
        return [step_pb2.CacheOperation(save=save)]

    @property
    def _forgets(self) -> bool:
        """True if some layers can be saved only while a sequence stands near the end of a block."""
        return self._has_states or self._slack > 0

    def plan_ends(self, sequence: Sequence) -> None:
        """Let chunks of a sequence that begins end where layers that forget are saved."""
        if self._forgets and sequence.may_be_continued:
            sequence.save_at = (last_end(sequence.cut_at + 1), last_end(sequence.fill_to))

    def after_chunk(self, sequence: Sequence) -> list[step_pb2.CacheOperation]:
        """Return the operation that saves layers that forget, if a chunk has ended there."""
        return self._save_end(sequence, sequence.scheduled) if sequence.scheduled in sequence.save_at else []

    def after_tokens(self, sequence: Sequence) -> list[step_pb2.CacheOperation]:
        """Return the operation that saves windows, if an answer has passed the end of a block."""
        end = sequence.computed // BLOCK_TOKENS * BLOCK_TOKENS
        if end <= sequence.saved_to or not self._forgets or self._has_states:
            return []
        sequence.saved_to = end
        return self._save_end(sequence, end) if sequence.may_be_continued else []

    def _save_end(self, sequence: Sequence, end: int) -> list[step_pb2.CacheOperation]:
        """Return the operation that saves what layers that forget need to continue at a length."""
        digests = block_digests(sequence.tokens[:end], sequence.owner)
        blocks = step_pb2.KvBlocks(block_tokens=BLOCK_TOKENS, digests=digests)
        return [step_pb2.CacheOperation(save=step_pb2.Save(sequence=sequence.id, blocks=blocks, end=True))]

    def clear(self) -> None:
        """Forget what is fetched and what is to be saved."""
        for fetch in self._fetches.values():
            release(fetch.waiting)
        self._restores.clear()
        self._fetches.clear()
        self._queue.clear()
        self._unsent.clear()
        self._to_save.clear()


def disk_counts(disk: DiskKv | None) -> dict[str, int]:
    """Return the counts of tokens for `CacheStats`; all are 0 without disks."""
    names = ("restored_tokens", "peer_tokens", "saved_tokens")
    return {name: 0 if disk is None else getattr(disk, name) for name in names}
