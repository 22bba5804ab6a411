"""Keys, values and states on this machine's disk, for restarts and for other splits of the layers and heads.

A block is the content of some tokens. A digest of all tokens up to its end is the name of its folder, whose files have
layers and heads of ranks (`block_files.py`). It lies in a folder for one model, one type of keys and values, and the same
versions of MLX. A rank joins its own layers and heads from the files of any ranks, also of those on other machines
(`block_reader.py`).

Layers that keep every token need every block. Those with a window need the blocks of its tokens, and recurrent ones their
states at the end of the last block. So a text can be restored only where all this was saved in time.

Nothing here fails a step: a block that is missing, damaged or for other layers counts as not saved.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from mlx_ring.core.errors import StepFailed
from mlx_ring.core.types import fetches_of
from mlx_ring.host.process import usable_memory
from mlx_ring.rpc.protos import step_pb2, worker_pb2
from mlx_ring.worker.compute_thread import TimedThreads
from mlx_ring.worker.kv.block_files import (
    HeadShare,
    Kind,
    RemoteBlocks,
    concatenate_tokens,
    every_token,
    from_host,
)
from mlx_ring.worker.kv.block_reader import Block, BlockReader, PeerDisks, speed_of
from mlx_ring.worker.kv.block_writer import BlockSaver, BlockWriter
from mlx_ring.worker.kv.kv_store import KVStore

log = logging.getLogger(__name__)

_FETCH_LIMIT_S = 10.0
"""Time from its turn on after which a fetch is answered with what was read, because a disk may hang. A count of blocks is
answered so long after its request at the latest."""
_BARRED_S = 60.0
"""Time for which a disk is not asked that did not answer; it lasts until that answer comes."""
_MOST_FETCHES = 4
"""Fetches that may be read or wait for that. Others find nothing."""

_CHECK_BYTES, _SPARE_BYTES = 1 << 26, 1 << 28
"""Bytes after whose reading the machine's memory is looked at, and those that are left to others."""
_WITH_PEERS = _MOST_FETCHES + 2
"""Threads that read blocks from other machines, or look for them there."""

Answer = Callable[[worker_pb2.KvFetched], object]
"""Receiver of the result of a fetch."""


@dataclass(slots=True)
class _Fetch:
    """Blocks that were requested, and what has come of them."""

    answer: Answer
    size: int
    """Tokens of a block."""
    wanted: int
    """Number of blocks."""
    only_looks: bool = False
    """True if blocks are only counted; then they have no content here."""
    for_save: bool = False
    """True if those are counted that need not be saved."""
    needs_none: bool = False
    """True if none can be saved now, so that none is copied in vain."""
    counted: list[frozenset[Kind]] = field(default_factory=list["frozenset[Kind]"])
    """Kinds that are there, by block."""
    from_peers: worker_pb2.PeerBlocks | None = None
    blocks: list[Block] = field(default_factory=list[Block])
    nbytes: int = 0
    """Size of their content."""
    checked_bytes: int = 0
    """Size at which the machine had memory for them."""
    next_tokens: int = 0
    """Tokens of the last one, if it is a listed one; 0 if it is not."""
    is_answered: bool = False
    awaits_disk: bool = False
    """True while it waits for the first answer of this machine's disk ..."""
    is_barring: bool = False
    """... and does so too long, so that others do not ask it."""
    began: float | None = None
    read_s: float = 0.0
    """Time of the reading; 0 if it has not begun."""
    copied_s: float = 0.0
    """Time of the copying so far."""
    joined: dict[int, NDArray[Any]] = field(default_factory=dict[int, "NDArray[Any]"])
    """Memory for the copies."""


class KvDisk:
    """Blocks of one rank's layers and heads. Its own threads read and write files."""

    def __init__(
        self,
        folder: Path,
        limit_bytes: int,
        name: str,
        layers: Sequence[int],
        kinds: Sequence[Kind] | None = None,
        share: HeadShare | None = None,
        peers: PeerDisks | None = None,
    ) -> None:
        """Use `folder`, which several workers may share.

        Args:
            folder: folder of all models' blocks.
            limit_bytes: size to which the folder is kept; the blocks that were used least recently are removed.
            name: the fingerprint of this rank's content.
            layers: the numbers of this rank's layers.
            kinds: the kinds of content that they have; None: all of them keep every token.
            share: the KV heads of this rank; None: all.
            peers: the disks of other machines; None: they are not asked.
        """
        self._writer = BlockWriter(folder, name, limit_bytes)
        self._blocks = BlockReader(self._writer, share, peers)
        self._places = {layer: place for place, layer in enumerate(layers)}
        """Places of this rank's layers in its store."""
        self._kinds = every_token(layers) if kinds is None else tuple(kinds)
        self._forgets = any(kind.name for kind in self._kinds)
        self._saver = BlockSaver(self._writer, self._kinds, self._places, self._blocks.has, self._blocks.own)
        # One after the other is read: the first ones are there sooner, and the learned speed is that of one.
        self._reader = TimedThreads("kv-disk-reader", _MOST_FETCHES, at_once=1)
        self._counter = TimedThreads("kv-disk-counter", 1, at_once=1)
        self._peer_reader = TimedThreads("kv-peer-reader", _WITH_PEERS, at_once=_WITH_PEERS)
        self._lock = threading.Lock()
        self._fetches: dict[int, _Fetch] = {}
        self._barring, self._barred_until = 0, 0.0

    # ---- save

    def save(self, kv: KVStore, save: step_pb2.Save) -> None:
        """Copy blocks that are not saved yet, and write them in the background. Runs on the compute thread."""
        self._saver.save(kv, save)

    # ---- fetch

    def fetch(self, wanted: worker_pb2.FetchKv, answer: Answer) -> None:
        """Read or count blocks in the background, and answer with how many there are without a gap. Any thread may call it."""
        if wanted.owners:
            self._writer.remove_others(wanted.owners)
        size, only_looks = wanted.blocks.block_tokens, wanted.only_looks or wanted.for_save
        fetch = _Fetch(answer, size, len(wanted.blocks.digests), only_looks, wanted.for_save)
        with self._lock:
            reads = sum(not (each.is_answered or each.only_looks) for each in self._fetches.values())
            self._fetches[wanted.id] = fetch
        if wanted.for_save:
            # A disk that hangs saves nothing meanwhile.
            self._writer.after_writes(partial(self._count_saved, wanted.id, fetch, [*wanted.blocks.digests]))
        elif self._is_barred or (reads >= _MOST_FETCHES and not wanted.only_looks):
            self._answer(wanted.id, fetch)
        else:
            asks = wanted.asks_peers and bool(wanted.peers)
            limit_s = max(_FETCH_LIMIT_S, wanted.within_s)
            where = f"{self._writer.folder}{' and other machines' if asks else ''}"
            problem = f"Reading KV from {where} takes longer than {limit_s:g} s"
            threads = self._peer_reader if asks else self._counter if only_looks else self._reader
            expire = partial(self._expire, wanted.id, fetch, problem)
            give_up = partial(self._answer, wanted.id, fetch, problem) if only_looks else None
            threads.put(limit_s, partial(self._read, wanted, fetch), expire, give_up)

    @property
    def _is_barred(self) -> bool:
        with self._lock:
            return self._barring > 0 or time.monotonic() < self._barred_until

    def _expire(self, id_: int, fetch: _Fetch, problem: str) -> None:
        """Answer a fetch that takes too long. Others do not wait for a disk that has given it nothing."""
        with self._lock:
            fetch.is_barring = bars = fetch.awaits_disk
            if bars:
                self._barring, self._barred_until = self._barring + 1, time.monotonic() + _BARRED_S
                problem += f", so that it is not asked for {_BARRED_S:.0f} s"
        self._answer(id_, fetch, "" if fetch.began is None else problem)
        for threads in (self._reader, self._counter) if bars else ():
            threads.expire_waiting()

    def _on_disk_answer(self, fetch: _Fetch) -> None:
        """Record that this machine's disk does not hang."""
        with self._lock:
            self._barring -= fetch.is_barring
            fetch.awaits_disk = fetch.is_barring = False

    def _read(self, wanted: worker_pb2.FetchKv, fetch: _Fetch) -> None:
        digests: list[bytes] = []
        try:
            if not (fetch.is_answered or self._is_barred):
                fetch.began, fetch.awaits_disk = time.monotonic(), fetch.only_looks or not wanted.peers
                digests += self._read_or_count(wanted, fetch)
        except Exception:
            log.exception("KV cannot be read from %s", self._writer.folder)
        self._on_disk_answer(fetch)
        read = len(fetch.blocks) if len(fetch.blocks) < fetch.wanted else len(digests)
        self._answer(wanted.id, fetch)
        if not fetch.only_looks:
            self._writer.touch(digests[:read])

    def _read_or_count(self, wanted: worker_pb2.FetchKv, fetch: _Fetch) -> list[bytes]:
        """Fill a fetch; return the folders that were used."""
        peers, digests = self._blocks.choose_peers(wanted), list(wanted.blocks.digests)
        if not fetch.only_looks:
            return digests + self._read_all(fetch, wanted, peers)
        fetch.counted = self._count(fetch, digests)
        self._on_disk_answer(fetch)
        if peers:
            self._count_with_peers(fetch, digests, peers)
        return digests

    def _count_saved(self, id_: int, fetch: _Fetch, digests: Sequence[bytes]) -> None:
        try:
            fetch.counted = self._count(fetch, digests)
        except Exception:
            log.exception("KV cannot be found in %s", self._writer.folder)
        fetch.needs_none = not self._writer.can_write
        self._answer(id_, fetch)
        self._writer.touch(digests[: len(fetch.counted)])

    def _count(
        self, fetch: _Fetch, digests: Sequence[bytes], remote: RemoteBlocks | None = None
    ) -> list[frozenset[Kind]]:
        """Return the kinds that are there, by block, up to the first one without a layer that keeps every token."""
        needed, counted = {kind for kind in self._kinds if not kind.name}, list[frozenset[Kind]]()
        for digest in digests:
            kinds = self._blocks.find(digest, self._kinds, remote)
            if fetch.is_answered or not needed <= kinds:
                break
            counted.append(kinds)
        return counted

    def _count_with_peers(
        self, fetch: _Fetch, digests: Sequence[bytes], peers: Sequence[worker_pb2.KvPeer]
    ) -> None:
        """Count the blocks with those of other machines, if there are too few here."""
        own, _ = self._ends(fetch.counted, fetch.size)
        if self._blocks.peers is None or own == fetch.wanted:
            return
        remote = self._blocks.peers.look_up(peers, digests)
        counted = self._count(fetch, digests, remote)
        blocks, ends = self._ends(counted, fetch.size)
        if blocks <= own:
            return
        nbytes, speeds = Counter[str](), {peer.node: speed_of(peer) for peer in peers}
        for number, digest in enumerate(digests[:blocks]):
            kinds = [kind for kind in self._kinds if number in kind.blocks(blocks, fetch.size)]
            nbytes.update(self._blocks.remote_bytes(digest, kinds, remote))
        parts = [
            worker_pb2.PeerPart(node=node, bytes=round(size), seconds=size / speeds[node])
            for node, size in nbytes.items()
        ]
        fetch.from_peers = worker_pb2.PeerBlocks(blocks=blocks, ends=ends, parts=parts)

    def _read_all(
        self, fetch: _Fetch, wanted: worker_pb2.FetchKv, peers: Sequence[worker_pb2.KvPeer]
    ) -> list[bytes]:
        """Read the blocks, and the listed one after them; return the folders that were used for that one."""
        digests, after = list(wanted.blocks.digests), wanted.next if wanted.HasField("next") else None
        remote = None
        if peers and self._blocks.peers is not None:
            places = [] if after is None else [after.place]
            remote = self._blocks.peers.look_up(peers, [*digests, *places])
            fetch.from_peers = worker_pb2.PeerBlocks()
        for number, digest in enumerate(digests):
            kinds = [kind for kind in self._kinds if number in kind.blocks(fetch.wanted, fetch.size)]
            if not self._add(fetch, self._read_block(fetch, digest, kinds, remote)):
                return []
        listed = None if after is None else self._blocks.read_listed(after, remote)
        if after is None or listed is None or not (shared := listed.shared(after.tokens)):
            return []
        # Its tokens are of use only with the block, which may be missing.
        if remote is not None and self._blocks.peers is not None:
            remote.files |= self._blocks.peers.look_up(
                self._blocks.choose_peers(wanted), [listed.digest]
            ).files
        if not self._add(fetch, self._read_block(fetch, listed.digest, self._kinds, remote), shared):
            return []
        return [listed.digest, after.place]

    def _read_block(
        self, fetch: _Fetch, digest: bytes, kinds: Sequence[Kind], remote: RemoteBlocks | None
    ) -> Block | None:
        """Read a block, and record what came from other machines."""
        before = 0 if remote is None else remote.received.total()
        block = self._blocks.read(digest, kinds, remote)
        if remote is not None and block is not None and remote.received.total() > before:
            parts = [worker_pb2.PeerPart(node=node, bytes=nbytes) for node, nbytes in remote.received.items()]
            with self._lock:
                blocks = 1 + (0 if fetch.from_peers is None else fetch.from_peers.blocks)
                fetch.from_peers = worker_pb2.PeerBlocks(blocks=blocks, parts=parts)
        return block

    def _add(self, fetch: _Fetch, block: Block | None, next_tokens: int = 0) -> bool:
        """Add a block that was read; return False if it is missing, or comes too late."""
        if block is None or not self._has_memory(fetch, block):
            return False
        with self._lock:
            if fetch.is_answered:
                return False
            fetch.blocks.append(block)
            fetch.next_tokens = next_tokens
        self._on_disk_answer(fetch)
        return True

    def _has_memory(self, fetch: _Fetch, block: Block) -> bool:
        """Return False if the machine lacks memory for a copy of what was read, which a sequence will have."""
        arrays = (array for layers in block.values() for content in layers.values() for array in content)
        fetch.nbytes += sum(array.nbytes for array in arrays)
        if fetch.nbytes < fetch.checked_bytes + _CHECK_BYTES:
            return True
        fetch.checked_bytes, left = fetch.nbytes, usable_memory().available_bytes
        if left >= fetch.nbytes + _SPARE_BYTES:
            return True
        self._writer.complain(
            f"Memory has no room for more than {fetch.nbytes / 1e9:.1f} GB of saved KV, so that the rest is computed"
        )
        return False

    def _answer(self, id_: int, fetch: _Fetch, problem: str = "") -> None:
        """Answer with the blocks that were read, unless that was done before, and log why there are no more."""
        with self._lock:
            late, fetch.is_answered = fetch.is_answered, True
            if not late and fetch.began is not None:
                fetch.read_s = time.monotonic() - fetch.began
            result = self._result(id_, fetch)
            if (fetch.only_looks or not result.blocks) and self._fetches.get(id_) is fetch:
                del self._fetches[id_]
        if not late:
            if problem:
                self._writer.complain(problem)
            fetch.answer(result)

    def _result(self, id_: int, fetch: _Fetch) -> worker_pb2.KvFetched:
        result = worker_pb2.KvFetched(id=id_, read_s=0.0 if fetch.only_looks else fetch.read_s)
        if fetch.from_peers is not None and fetch.from_peers.blocks:
            result.from_peers.CopyFrom(fetch.from_peers)
        if fetch.for_save:
            result.blocks = fetch.wanted if fetch.needs_none else len(fetch.counted)
        elif fetch.only_looks:
            result.blocks, ends = self._ends(fetch.counted, fetch.size)
            result.ends.extend(ends)
        elif not self._forgets:
            result.blocks, result.next_tokens = len(fetch.blocks) - bool(fetch.next_tokens), fetch.next_tokens
        elif len(fetch.blocks) == fetch.wanted:
            result.MergeFrom(worker_pb2.KvFetched(blocks=fetch.wanted, ends=[fetch.wanted]))
        return result

    def _ends(self, counted: Sequence[frozenset[Kind]], size: int) -> tuple[int, Sequence[int]]:
        """Return the number of blocks after which a sequence can continue at most, and all such numbers if some layers forget."""
        if not self._forgets:
            return len(counted), ()
        ends = [
            end
            for end in range(1, len(counted) + 1)
            if all(
                kind in counted[number]
                for kind in self._kinds
                if kind.name
                for number in kind.blocks(end, size)
            )
        ]
        return max(ends, default=0), ends

    def adopt(self, kv: KVStore, adopt: step_pb2.Adopt) -> None:
        """Fill a part of a sequence with a fetch's first tokens; the last part forgets it. Runs on the compute thread.

        Raises:
            StepFailed: it is not there any more, or a sequence cannot continue after these tokens.
        """
        parts = max(1, adopt.parts)
        is_last = adopt.part + 1 == parts
        with self._lock:
            fetch = self._fetches.get(adopt.fetch)
            if fetch is not None:
                fetch.is_answered = True
            if is_last or not adopt.length:
                self._fetches.pop(adopt.fetch, None)
        if not adopt.length:
            return
        if fetch is None:
            raise StepFailed(f"No KV of fetch {adopt.fetch} is there.")
        if self._forgets and adopt.length != fetch.wanted * fetch.size:
            raise StepFailed(
                f"The KV of fetch {adopt.fetch} is for {fetch.wanted * fetch.size} tokens, not {adopt.length}."
            )
        began = time.monotonic()
        layers = [(kind, layer) for kind in self._kinds if kind.name != "states" for layer in kind.layers]
        for kind, layer in layers[
            len(layers) * adopt.part // parts : len(layers) * (adopt.part + 1) // parts
        ]:
            self._fill(kv, adopt, fetch, kind, layer)
        if is_last:
            self._fill_states(kv, adopt.sequence, fetch)
            kv.adopt(adopt.sequence, adopt.length)
        fetch.copied_s += time.monotonic() - began
        if is_last:
            times = (fetch.read_s, fetch.copied_s, parts)
            log.info("Restored %d tokens: read in %.2f s, copied in %.2f s, %d steps", adopt.length, *times)

    def _fill(self, kv: KVStore, adopt: step_pb2.Adopt, fetch: _Fetch, kind: Kind, layer: int) -> None:
        """Fill a sequence with one layer's content of one kind."""
        sequence, length = adopt.sequence, adopt.length
        begin = kind.begin(length)
        numbers = kind.blocks(-(-length // fetch.size), fetch.size)
        contents = [fetch.blocks[number][kind].pop(layer) for number in numbers]
        arrays = [
            concatenate_tokens(parts, fetch.joined, place)
            for place, parts in enumerate(zip(*contents, strict=True))
        ]
        # A window's blocks may have more tokens before it, and other layers' more behind `length`.
        given = [
            array[:, : length - begin] if kind.window is None else array[:, begin - length :]
            for array in arrays
        ]
        kv.fill(sequence, self._places[layer], (begin, length), given, kind.window)

    def _fill_states(self, kv: KVStore, sequence: int, fetch: _Fetch) -> None:
        states = {
            self._places[layer]: [from_host(array) for array in arrays]
            for kind in self._kinds
            if kind.name == "states"
            for layer, arrays in fetch.blocks[-1][kind].items()
        }
        if states:
            kv.fill_states(sequence, states)

    def reset(self, epoch: int | None = None) -> None:
        """Forget every fetch, or those of an epoch, and answer those that are not answered."""
        with self._lock:
            fetches = {id_: self._fetches.pop(id_) for id_ in fetches_of(epoch, self._fetches)}
            unanswered = {id_: fetch for id_, fetch in fetches.items() if not fetch.is_answered}
            for fetch in unanswered.values():
                fetch.is_answered = True
        for id_, fetch in unanswered.items():
            fetch.answer(worker_pb2.KvFetched(id=id_))

    def settle(self, limit_s: float | None = None) -> None:
        """Wait until everything is written, but no longer than a limit."""
        self._writer.settle(limit_s)
