"""Keys, values and states on this machine's disk, for restarts and for other splits of the layers and heads.

A block is the content of some tokens. A digest of all tokens up to its end is the name of its folder, whose files have
layers and heads of ranks (`block_files.py`). It lies in a folder for one model, one type of keys and values, and the same
versions of MLX. A rank joins its own layers and heads from the files of any ranks.

Layers that keep every token need every block. Those with a window need the blocks of its tokens, and recurrent ones their
states at the end of the last block. So a text can be restored only where all this was saved in time.

Nothing here fails a step: a block that is missing, damaged or for other layers counts as not saved.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from mlx_ring.core.errors import StepFailed
from mlx_ring.rpc.protos import step_pb2, worker_pb2
from mlx_ring.worker.kv.block_files import (
    BlockFile,
    Content,
    HeadShare,
    Kind,
    Rows,
    concatenate_heads,
    concatenate_tokens,
    every_token,
    files_in,
    find_sources,
    from_host,
    read_layers,
    to_host,
)
from mlx_ring.worker.kv.block_writer import BlockWriter
from mlx_ring.worker.kv.kv_store import KVStore

log = logging.getLogger(__name__)

_FETCH_LIMIT_S = 10.0
"""Time after which a fetch is answered with the blocks that were read, because a disk may hang."""
_MOST_FETCHES = 4
"""Fetches that may be read or wait for that. Others find nothing."""

Block = dict[Kind, dict[int, Content]]
"""Content of a block by kind and layer."""
Answer = Callable[[int, Sequence[int], int], None]
"""Function that receives the number of blocks after which a sequence can continue at most.

If it cannot continue after each block before, all numbers after which it can follow. The last argument is the number of
tokens of the listed block after them."""


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
    counted: list[frozenset[Kind]] = field(default_factory=list["frozenset[Kind]"])
    """Kinds that are there, by block."""
    blocks: list[Block] = field(default_factory=list[Block])
    next_tokens: int = 0
    """Tokens of the last one, if it is a listed one; 0 if it is not."""
    is_answered: bool = False
    read_s: float = 0.0
    """Time of the reading."""
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
    ) -> None:
        """Use `folder`, which several workers may share.

        Args:
            folder: folder of all models' blocks.
            limit_bytes: size to which the folder is kept; the blocks that were used least recently are removed.
            name: the fingerprint of this rank's content.
            layers: the numbers of this rank's layers.
            kinds: the kinds of content that they have; None: all of them keep every token.
            share: the KV heads of this rank; None: all.
        """
        self._writer = BlockWriter(folder, name, limit_bytes)
        self._places = {layer: place for place, layer in enumerate(layers)}
        """Places of this rank's layers in its store."""
        self._share = share
        self._kinds = every_token(layers) if kinds is None else tuple(kinds)
        self._forgets = any(kind.name for kind in self._kinds)
        self._reader = ThreadPoolExecutor(1, "kv-disk-reader")
        self._lock = threading.Lock()
        self._fetches: dict[int, _Fetch] = {}

    # ---- save

    def save(self, kv: KVStore, save: step_pb2.Save) -> None:
        """Copy blocks that are not saved yet, and write them in the background. Runs on the compute thread."""
        size, digests = save.blocks.block_tokens, list(save.blocks.digests)
        missing = self._missing_end(kv, save) if save.end else self._missing_blocks(save)
        for kind, number in missing:
            if not self._writer.has_room(may_wait=save.may_wait):
                break
            if kind.name == "states":
                content = kv.states(save.sequence)
            else:
                begin, end = kind.tokens(number, size)
                if number == len(digests) - 1 and save.blocks.last_tokens:
                    end = begin + save.blocks.last_tokens
                content = kv.content(save.sequence, (begin, end), kind.window)
            layers = range(kind.extent.start, kind.extent.end)
            block = [tuple(map(to_host, content[self._places[layer]])) for layer in layers]
            self._writer.write(digests[number], self._own(kind), block)
        for listed in save.listed:
            self._writer.list_block(listed, size, [self._own(kind) for kind in self._kinds], self._is_whole)
        self._writer.touch([*digests, *(listed.place for listed in save.listed)])

    def _missing_blocks(self, save: step_pb2.Save) -> list[tuple[Kind, int]]:
        """Return the blocks of layers that keep every token which are to be copied now."""
        missing = [
            (kind, number)
            for kind in self._kinds
            if not kind.name
            for number, digest in enumerate(save.blocks.digests)
            if number >= save.first and not self._is_saved(digest, kind)
        ]
        return missing[: save.most or None]

    def _missing_end(self, kv: KVStore, save: step_pb2.Save) -> list[tuple[Kind, int]]:
        """Return what the other layers lack for the end of the last block, as far as it is still in memory."""
        size, digests = save.blocks.block_tokens, save.blocks.digests

        def is_held(kind: Kind, number: int) -> bool:
            if kind.window is None:
                return kv.length(save.sequence) == size * len(digests)
            return kv.holds(save.sequence, kind.window, kind.tokens(number, size))

        return [
            (kind, number)
            for kind in self._kinds
            if kind.name
            for number in kind.blocks(len(digests), size)
            if not self._is_saved(digests[number], kind) and is_held(kind, number)
        ]

    def _is_whole(self, digest: bytes) -> bool:
        """Report whether a block's files have all that this rank needs."""
        return all(self._is_saved(digest, kind) for kind in self._kinds)

    def _is_saved(self, digest: bytes, kind: Kind) -> bool:
        """Report whether a block's files have all that this rank has of a kind."""
        path = self._writer.path(digest)
        if os.path.exists(path / self._own(kind).name):  # noqa: PTH110 - it does not raise
            return True
        return find_sources(files_in(path), self._own(kind), kind) is not None

    # ---- fetch

    def fetch(self, wanted: worker_pb2.FetchKv, answer: Answer) -> None:
        """Read or count blocks in the background, and answer with how many there are without a gap. Any thread may call it."""
        if wanted.owners:
            self._writer.remove_others(wanted.owners)
        fetch = _Fetch(answer, wanted.blocks.block_tokens, len(wanted.blocks.digests), wanted.only_looks)
        with self._lock:
            reads = sum(not (each.is_answered or each.only_looks) for each in self._fetches.values())
            self._fetches[wanted.id] = fetch
        if reads >= _MOST_FETCHES and not wanted.only_looks:
            self._answer(wanted.id, fetch)
        else:
            # From now on: one that hangs may keep the thread busy.
            timer = threading.Timer(_FETCH_LIMIT_S, self._give_up, (wanted.id, fetch))
            timer.daemon = True
            timer.start()
            self._reader.submit(self._read, wanted, fetch, timer)

    def _read(self, wanted: worker_pb2.FetchKv, fetch: _Fetch, timer: threading.Timer) -> None:
        if fetch.is_answered:
            return
        digests, began = list(wanted.blocks.digests), time.monotonic()
        try:
            if fetch.only_looks:
                self._count(fetch, digests)
            else:
                digests += self._read_all(fetch, digests, wanted.next if wanted.HasField("next") else None)
        except Exception:
            log.exception("KV cannot be read from %s", self._writer.folder)
        timer.cancel()
        fetch.read_s = time.monotonic() - began
        read = len(fetch.blocks) if len(fetch.blocks) < fetch.wanted else len(digests)
        self._answer(wanted.id, fetch)
        if not fetch.only_looks:
            self._writer.touch(digests[:read])

    def _count(self, fetch: _Fetch, digests: Sequence[bytes]) -> None:
        needed = {kind for kind in self._kinds if not kind.name}
        for digest in digests:
            kinds = self._find_block(digest)
            if fetch.is_answered or not needed <= kinds:
                return
            fetch.counted.append(kinds)

    def _read_all(
        self, fetch: _Fetch, digests: Sequence[bytes], after: step_pb2.ListedBlock | None
    ) -> list[bytes]:
        """Read the blocks, and the listed one after them; return the folders that were used for that one."""
        for number, digest in enumerate(digests):
            kinds = [kind for kind in self._kinds if number in kind.blocks(fetch.wanted, fetch.size)]
            if not self._add(fetch, self._read_block(digest, kinds)):
                return []
        listed = None if after is None else self._writer.read_listed(after.place)
        if after is None or listed is None or not (shared := listed.shared(after.tokens)):
            return []
        # Its tokens are of use only with the block, which may be missing.
        if not self._add(fetch, self._read_block(listed.digest, self._kinds), shared):
            return []
        return [listed.digest, after.place]

    def _add(self, fetch: _Fetch, block: Block | None, next_tokens: int = 0) -> bool:
        """Add a block that was read; return False if it is missing, or comes too late."""
        with self._lock:
            if block is None or fetch.is_answered:
                return False
            fetch.blocks.append(block)
            fetch.next_tokens = next_tokens
        return True

    def _give_up(self, id_: int, fetch: _Fetch) -> None:
        self._answer(
            id_, fetch, f"Reading KV from {self._writer.folder} takes longer than {_FETCH_LIMIT_S:g} s"
        )

    def _answer(self, id_: int, fetch: _Fetch, problem: str = "") -> None:
        """Answer with the blocks that were read, unless that was done before, and log why there are no more."""
        with self._lock:
            late, fetch.is_answered = fetch.is_answered, True
            found, ends, next_tokens = self._result(fetch)
            if (fetch.only_looks or not found) and self._fetches.get(id_) is fetch:
                del self._fetches[id_]
        if not late:
            if problem:
                self._writer.complain(problem)
            fetch.answer(found, ends, next_tokens)

    def _result(self, fetch: _Fetch) -> tuple[int, Sequence[int], int]:
        """Return the arguments of a fetch's answer."""
        if not self._forgets:
            found = len(fetch.counted if fetch.only_looks else fetch.blocks) - bool(fetch.next_tokens)
            return found, (), fetch.next_tokens
        if not fetch.only_looks:
            found = fetch.wanted if len(fetch.blocks) == fetch.wanted else 0
            return found, [found] if found else (), 0
        ends = [
            end
            for end in range(1, len(fetch.counted) + 1)
            if all(
                kind in fetch.counted[number]
                for kind in self._kinds
                if kind.name
                for number in kind.blocks(end, fetch.size)
            )
        ]
        return max(ends, default=0), ends, 0

    def _find_block(self, digest: bytes) -> frozenset[Kind]:
        """Return the kinds of content of which a block has all that this rank needs."""
        files = files_in(self._writer.path(digest))
        return frozenset(
            kind for kind in self._kinds if find_sources(files, self._own(kind), kind) is not None
        )

    def _read_block(self, digest: bytes, kinds: Sequence[Kind]) -> Block | None:
        """Return a block's content of some kinds, or None if a layer or head is missing or damaged."""
        folder = self._writer.path(digest)
        files = files_in(folder) if kinds else []
        block: Block = {}
        for kind in kinds:
            content = self._read_kind(folder, files, kind)
            if content is None:
                return None
            block[kind] = content
        return block

    def _read_kind(self, folder: Path, files: list[BlockFile], kind: Kind) -> dict[int, Content] | None:
        """Read what this rank needs of a kind. If a file cannot be read, the others may have all of it too."""
        while (sources := find_sources(files, self._own(kind), kind)) is not None:
            wanted: dict[BlockFile, dict[int, Rows | None]] = {}
            for layer, joined in sources.items():
                for file, rows in joined:
                    wanted.setdefault(file, {})[layer] = rows
            parts: dict[BlockFile, dict[int, Content]] = {}
            for file, layers in wanted.items():
                content = self._read_file(folder / file.name, file, layers)
                if content is None:
                    files.remove(file)
                    break
                parts[file] = content
            else:
                return {
                    layer: concatenate_heads([parts[file][layer] for file, _ in joined])
                    for layer, joined in sources.items()
                }
        return None

    def _read_file(self, path: Path, file: BlockFile, wanted: dict[int, Rows | None]) -> Any:
        """Return the wanted rows by layer, or None if the file cannot be read. A damaged one is removed."""
        try:
            with path.open("rb") as opened:
                return read_layers(opened, file.layers, wanted)
        except FileNotFoundError:
            pass  # it was removed meanwhile, to make room
        except OSError as error:
            self._writer.complain(f"KV cannot be read from {path}: {error.strerror or error}")
        except ValueError as error:
            self._writer.complain(f"A block of KV is removed, {path}: {error}")
            path.unlink(missing_ok=True)
        return None

    def adopt(self, kv: KVStore, adopt: step_pb2.Adopt) -> None:
        """Fill a part of a sequence with the first tokens of a fetch. After the last part, forget it.

        It runs on the compute thread.

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

    def reset(self) -> None:
        """Forget every fetch, and answer those that are not answered."""
        with self._lock:
            fetches, self._fetches = self._fetches, {}
            unanswered = [fetch for fetch in fetches.values() if not fetch.is_answered]
            for fetch in unanswered:
                fetch.is_answered = True
        for fetch in unanswered:
            fetch.answer(0, (), 0)

    def settle(self, limit_s: float | None = None) -> None:
        """Wait until everything is written, but no longer than a limit."""
        self._writer.settle(limit_s)

    def _own(self, kind: Kind) -> BlockFile:
        """Return the file that this rank writes."""
        return BlockFile(kind.extent, kind.name, self._share)
