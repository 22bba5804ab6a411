"""Reading of saved blocks: from the files of this machine, and from those of other machines, whose agents send them.

A rank joins its layers and heads from the files of any ranks on any machines, and prefers those of its own machine. Agents
list files by the digests of blocks, and send ranges of their bytes. The checksums in a file's header are checked here.

Nothing here fails a fetch. A machine that does not answer, has left, or sends wrong bytes counts as without the block.
The log says why, and another machine may have it. One that did not answer is not asked again for a minute.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO, cast

import grpc

from mlx_ring.core.errors import ProtocolError, RingError, WorkerLost
from mlx_ring.rpc.channels import WEIGHTS_MESSAGE_BYTES, keep_alive, open_channel
from mlx_ring.rpc.failures import channel_error, failure_to_error
from mlx_ring.rpc.hello import make_hello
from mlx_ring.rpc.methods import LIST_BLOCKS, READ_BLOCK
from mlx_ring.rpc.protos import step_pb2, weights_pb2, worker_pb2
from mlx_ring.rpc.tls.credentials import ChannelTrust
from mlx_ring.rpc.tls.peers import node_name
from mlx_ring.worker.kv.block_files import (
    MOST_DAMAGED,
    BlockFile,
    Content,
    DamagedFiles,
    HeadShare,
    Kind,
    RemoteBlocks,
    Rows,
    Source,
    concatenate_heads,
    files_in,
    find_sources,
    header_end,
    part_of,
    ranges_of,
    read_header,
    read_layers,
)
from mlx_ring.worker.kv.block_writer import LISTED, BlockWriter, ListedTokens

log = logging.getLogger(__name__)

_LIST_WITHIN_S = 2.0
"""Time for a machine to list its files, because prompts wait for it."""
_READ_WITHIN_S, _SLOWER = 3.0, 4.0
"""Time for a machine to send a file: so many seconds, and so many times as long as its link promises."""
_ASSUMED_BYTES_PER_S = 1e8
"""Throughput of a link that was not measured."""
_BARRED_S = 60.0
"""Time for which a machine is not asked that did not answer."""
_FIRST_BYTES = 1 << 16
"""Bytes in which a header mostly fits."""
_MOST_FILE_BYTES, _MOST_RANGES = 1 << 30, 4096
"""Limits of a file, and of the ranges of one request."""

Block = dict[Kind, dict[int, Content]]
"""Content of a block by kind and layer."""


class PeerDisks:
    """Saved KV of one content on the disks of other machines. Several threads may use it."""

    def __init__(self, node: str, content: str, trust: ChannelTrust | None) -> None:
        """Ask nobody yet.

        Args:
            node: this machine.
            content: name of the folder for one model and type of KV.
            trust: this machine's credentials; None: for channels without encryption, in tests.
        """
        self._node, self._content, self._trust = node, content, trust
        self._lock = threading.Lock()
        self._channels: dict[tuple[str, str], grpc.Channel] = {}
        self._barred: dict[str, float] = {}
        """Time until which a machine is not asked, by its name."""
        self._reasons: dict[str, str] = {}
        """Reasons that were logged."""
        self._damaged: dict[tuple[str, bytes, BlockFile], None] = {}
        """Files of other machines that are not requested again."""

    def choose(self, peers: Iterable[worker_pb2.KvPeer]) -> list[worker_pb2.KvPeer]:
        """Return those of the peers that are to be asked from this machine, the fastest ones first."""
        now = time.monotonic()
        with self._lock:
            usable = [
                peer
                for peer in peers
                if peer.reader == self._node and peer.address and self._barred.get(peer.node, 0.0) <= now
            ]
        return sorted(usable, key=lambda peer: -speed_of(peer))

    def look_up(self, peers: Sequence[worker_pb2.KvPeer], digests: Sequence[bytes]) -> RemoteBlocks:
        """Return the files of blocks on other machines, which are asked together."""
        request = weights_pb2.ListBlocksRequest(
            hello=make_hello(node=self._node), content=self._content, digests=digests
        )
        found = RemoteBlocks()
        asked: list[tuple[worker_pb2.KvPeer, grpc.Future[weights_pb2.ListBlocksReply]]] = []
        for peer in peers:
            # Another thread closes a channel if the agent has got another port.
            with contextlib.suppress(ValueError):
                call = LIST_BLOCKS.unary_unary(self._channel(peer)).future(request, timeout=_LIST_WITHIN_S)
                asked.append((peer, call))
        for peer, call in asked:
            try:
                reply = call.result()
                if reply.HasField("failure"):
                    raise failure_to_error(reply.failure)
                self._file_away(found, peer, reply.blocks)
            except grpc.FutureCancelledError:
                continue
            except (grpc.RpcError, RingError) as error:
                self._bar(peer, error)
        return found

    def read_layers(
        self, blocks: RemoteBlocks, digest: bytes, file: BlockFile, wanted: Mapping[int, Rows | None]
    ) -> dict[int, Content] | None:
        """Return the wanted rows by layer of a file; None if no machine sends them, after which it counts as missing."""
        sources = blocks.files[digest][file]
        while sources:
            peer, size = sources[0]
            try:
                return self._read_layers(blocks, peer, size, digest, file, wanted)
            except grpc.RpcError as error:
                self._bar(peer, error)
                blocks.forget(peer)
            except (RingError, ValueError, IndexError, TypeError) as error:
                log.warning("KV of %s is not used, block %s: %s", peer.node, digest.hex()[:16], error)
                sources.pop(0)
                if not isinstance(error, RingError):
                    with self._lock:
                        self._damaged[peer.node, digest, file] = None
                        if len(self._damaged) > MOST_DAMAGED:
                            del self._damaged[next(iter(self._damaged))]
        return None

    def _read_layers(
        self,
        blocks: RemoteBlocks,
        peer: worker_pb2.KvPeer,
        size: int,
        digest: bytes,
        file: BlockFile,
        wanted: Mapping[int, Rows | None],
    ) -> dict[int, Content]:
        """Read from one machine.

        Raises:
            grpc.RpcError: it has left, or does not answer.
            RingError: it refuses, or does not send what was requested.
            ValueError: the file is damaged, here or on its way.
        """
        if size > _MOST_FILE_BYTES:
            raise ProtocolError(f"a file of {size / 1e9:.1f} GB is too large")
        whole, is_whole = [(0, size)], len(wanted) == file.layers.end - file.layers.start
        # Only what is received of it takes memory.
        with mmap.mmap(-1, max(1, size)) as content:
            fill, opened = (
                partial(self._fill, blocks, peer, digest, file.name, content),
                cast("BinaryIO", content),
            )
            if is_whole and not any(wanted.values()):
                fill(whole)
            else:
                first = min(size, _FIRST_BYTES)
                fill([(0, first)])
                if first < (end := min(header_end(content[:first]), size)):
                    fill([(first, end)])
                header = read_header(opened, file.layers)
                ranges = ranges_of(header, content.tell(), file.layers, wanted)
                if any(end > size for _, end in ranges):
                    raise ValueError("it is cut off")
                fill(ranges if len(ranges) <= _MOST_RANGES else whole)
            content.seek(0)
            return read_layers(opened, file.layers, wanted)

    def read_listed(self, blocks: RemoteBlocks, place: bytes, text: Sequence[int]) -> ListedTokens | None:
        """Return the block listed at a place that shares most tokens with a text; None if no machine has one."""
        best: ListedTokens | None = None
        for peer, size in blocks.lists.get(place, ()):
            content = bytearray(min(size, _FIRST_BYTES))
            try:
                self._fill(blocks, peer, place, LISTED, content, [(0, len(content))])
            except grpc.RpcError as error:
                self._bar(peer, error)
                continue
            except RingError as error:
                log.info("KV of %s is not used: %s", peer.node, error)
                continue
            found = ListedTokens.decode(bytes(content))
            if found is not None and (best is None or found.shared(text) > best.shared(text)):
                best = found
        return best

    def _fill(
        self,
        blocks: RemoteBlocks,
        peer: worker_pb2.KvPeer,
        digest: bytes,
        name: str,
        content: bytearray | mmap.mmap,
        ranges: Sequence[tuple[int, int]],
    ) -> None:
        """Receive ranges of a file into memory of its size. Raises what `_read_layers` raises."""
        nbytes = sum(end - start for start, end in ranges)
        request = weights_pb2.ReadBlockRequest(
            hello=make_hello(node=self._node),
            content=self._content,
            digest=digest,
            file=name,
            ranges=[weights_pb2.ByteRange(offset=start, length=end - start) for start, end in ranges],
        )
        within_s = _READ_WITHIN_S + _SLOWER * nbytes / speed_of(peer)
        try:
            call = READ_BLOCK.unary_stream(self._channel(peer))(request, timeout=within_s)
        except ValueError as error:
            raise WorkerLost(f"The connection to {peer.node} was closed meanwhile.") from error
        try:
            left = iter(ranges)
            start = end = 0
            for part in call:
                if part.HasField("failure"):
                    raise failure_to_error(part.failure)
                if start == end:
                    start, end = next(left, (0, 0))
                if part.offset != start or not 0 < len(part.data) <= end - start:
                    raise ProtocolError(f"{peer.node} sent bytes that were not requested.")
                content[start : start + len(part.data)] = part.data
                start += len(part.data)
                blocks.received[peer.node] += len(part.data)
            if start != end or next(left, None) is not None:
                raise ProtocolError(f"{peer.node} sent less than was requested.")
        finally:
            call.cancel()

    def _file_away(
        self, found: RemoteBlocks, peer: worker_pb2.KvPeer, blocks: Iterable[weights_pb2.BlockFiles]
    ) -> None:
        """Add the files of a machine's answer."""
        for block in blocks:
            for name, size in zip(block.names, block.sizes, strict=False):
                file = BlockFile.parse(name)
                if name == LISTED:
                    found.lists.setdefault(block.digest, []).append((peer, size))
                elif file is not None and (peer.node, block.digest, file) not in self._damaged:
                    files = found.files.setdefault(block.digest, {})
                    files.setdefault(file, []).append((peer, size))

    def _channel(self, peer: worker_pb2.KvPeer) -> grpc.Channel:
        key = (peer.address, peer.node)
        with self._lock:
            if key not in self._channels:
                # An agent that was started again has another port.
                for other in [each for each in self._channels if each[1] == peer.node]:
                    self._channels.pop(other).close()
                self._channels[key] = open_channel(
                    peer.address,
                    self._trust,
                    node_name(peer.node),
                    max_message_bytes=WEIGHTS_MESSAGE_BYTES,
                    more=keep_alive(),
                )
            return self._channels[key]

    def _bar(self, peer: worker_pb2.KvPeer, problem: grpc.RpcError | RingError) -> None:
        """Do not ask a machine for some time, and log why if that is new. A channel that was closed here says nothing."""
        if isinstance(problem, grpc.Call) and problem.code() is grpc.StatusCode.CANCELLED:
            return
        error = problem if isinstance(problem, RingError) else channel_error(problem, peer.node)
        with self._lock:
            self._barred[peer.node] = time.monotonic() + _BARRED_S
            is_new = self._reasons.get(peer.node) != str(error)
            self._reasons[peer.node] = str(error)
        level = logging.WARNING if isinstance(error, WorkerLost) else logging.INFO
        log.log(
            level if is_new else logging.DEBUG,
            "%s is not asked for KV for %.0f s: %s",
            peer.node,
            _BARRED_S,
            error,
        )


def speed_of(peer: worker_pb2.KvPeer) -> float:
    """Return the throughput of the link to a machine, in bytes per second."""
    return peer.bytes_per_s or _ASSUMED_BYTES_PER_S


class BlockReader:
    """Reader of the layers and heads of one rank."""

    def __init__(
        self, writer: BlockWriter, share: HeadShare | None = None, peers: PeerDisks | None = None
    ) -> None:
        """Read from the folder of a writer, and from the disks of other machines.

        Args:
            writer: the writer of this rank.
            share: the KV heads of this rank; None: all.
            peers: the disks of other machines; None: there are none.
        """
        self._writer, self._share, self.peers = writer, share, peers
        self._damaged = DamagedFiles()

    def choose_peers(self, wanted: worker_pb2.FetchKv) -> list[worker_pb2.KvPeer]:
        """Return the machines to ask now, as `PeerDisks.choose`."""
        return self.peers.choose(wanted.peers) if self.peers is not None and wanted.asks_peers else []

    def own(self, kind: Kind) -> BlockFile:
        """Return the file that this rank writes."""
        return BlockFile(kind.extent, kind.name, self._share)

    def has(self, digest: bytes, kind: Kind) -> bool:
        """Report whether the files of this machine have all that this rank has of a kind."""
        local, own = self._local(digest), self.own(kind)
        return own in local or find_sources(local, own, kind) is not None

    def _local(self, digest: bytes) -> list[BlockFile]:
        """Return the files of a block on this machine, but those that are damaged."""
        path = self._writer.path(digest)
        return [file for file in files_in(path) if path / file.name not in self._damaged]

    def _sources(
        self, files: Mapping[BlockFile, Source | None], kind: Kind
    ) -> dict[int, list[tuple[BlockFile, Rows | None]]] | None:
        """Return the files that have each layer, as `find_sources`: those of this machine, if they have all."""
        local = [file for file, source in files.items() if source is None]
        return find_sources(local, self.own(kind), kind) or find_sources([*files], self.own(kind), kind)

    def find(
        self, digest: bytes, kinds: Sequence[Kind], remote: RemoteBlocks | None = None
    ) -> frozenset[Kind]:
        """Return the kinds of content of which a block has all that this rank needs."""
        files = self._files(digest, remote)
        return frozenset(kind for kind in kinds if self._sources(files, kind) is not None)

    def _files(self, digest: bytes, remote: RemoteBlocks | None) -> dict[BlockFile, Source | None]:
        """Return the files of a block, those of this machine first, and the sources of the others."""
        local = self._local(digest)
        others = {} if remote is None else remote.files.get(digest, {})
        best = {file: sources[0] for file, sources in others.items() if sources}
        return {
            **dict.fromkeys(local),
            **{file: source for file, source in best.items() if file not in local},
        }

    def remote_bytes(self, digest: bytes, kinds: Sequence[Kind], remote: RemoteBlocks) -> dict[str, float]:
        """Return the bytes that a block needs from other machines, by machine; it has all of these kinds."""
        files = self._files(digest, remote)
        nbytes = defaultdict[str, float](float)
        for kind in kinds:
            for joined in (self._sources(files, kind) or {}).values():
                for file, rows in joined:
                    if (source := files[file]) is not None:
                        peer, size = source
                        nbytes[peer.node] += (
                            size / (file.layers.end - file.layers.start) * part_of(file, rows, self._share)
                        )
        return nbytes

    def read(self, digest: bytes, kinds: Sequence[Kind], remote: RemoteBlocks | None = None) -> Block | None:
        """Return a block's content of some kinds, or None if a layer or head is missing or damaged."""
        files = self._files(digest, remote) if kinds else {}
        block: Block = {}
        for kind in kinds:
            content = self._read_kind(digest, files, kind, remote)
            if content is None:
                return None
            block[kind] = content
        return block

    def _read_kind(
        self,
        digest: bytes,
        files: dict[BlockFile, Source | None],
        kind: Kind,
        remote: RemoteBlocks | None,
    ) -> dict[int, Content] | None:
        """Read what this rank needs of a kind. If a file cannot be read, the others may have all of it too."""
        while (sources := self._sources(files, kind)) is not None:
            wanted: dict[BlockFile, dict[int, Rows | None]] = {}
            for layer, joined in sources.items():
                for file, rows in joined:
                    wanted.setdefault(file, {})[layer] = rows
            parts: dict[BlockFile, dict[int, Content]] = {}
            for file, layers in wanted.items():
                content = None
                if files[file] is None:
                    content = self._read_file(self._writer.path(digest) / file.name, file, layers)
                if content is None and remote is not None and self.peers is not None:
                    content = self._read_remote(remote, digest, file, layers)
                if content is None:
                    del files[file]
                    break
                parts[file] = content
            else:
                return {
                    layer: concatenate_heads([parts[file][layer] for file, _ in joined])
                    for layer, joined in sources.items()
                }
        return None

    def _read_remote(
        self, remote: RemoteBlocks, digest: bytes, file: BlockFile, wanted: Mapping[int, Rows | None]
    ) -> dict[int, Content] | None:
        if self.peers is None or file not in remote.files.get(digest, {}):
            return None
        return self.peers.read_layers(remote, digest, file, wanted)

    def _read_file(
        self, path: Path, file: BlockFile, wanted: Mapping[int, Rows | None]
    ) -> dict[int, Content] | None:
        """Return the wanted rows by layer, or None if the file cannot be read. A damaged one is removed, or not used."""
        try:
            with path.open("rb") as opened:
                try:
                    return read_layers(opened, file.layers, wanted)
                except ValueError as error:
                    done = self._damaged.remove(path, opened)
                    self._writer.complain(f"A block of KV is {done}, {path}: {error}")
        except FileNotFoundError:
            pass  # it was removed meanwhile, to make room
        except OSError as error:
            self._writer.complain(f"KV cannot be read from {path}: {error.strerror or error}")
        return None

    def read_listed(self, after: step_pb2.ListedBlock, remote: RemoteBlocks | None) -> ListedTokens | None:
        """Return the listed block that shares most tokens with a text, of this machine if another one shares no more."""
        own = self._writer.read_listed(after.place)
        if remote is None or self.peers is None:
            return own
        shared = 0 if own is None else own.shared(after.tokens)
        if shared == len(after.tokens):
            return own
        other = self.peers.read_listed(remote, after.place, after.tokens)
        return own if other is None or other.shared(after.tokens) <= shared else other
