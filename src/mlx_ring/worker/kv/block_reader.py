"""Reading of saved blocks: from the files of this machine, and from those of other machines, whose agents send them.

A rank joins its layers and heads from the files of any ranks on any machines, and prefers those of its own machine. Agents
list files by the digests of blocks, and send ranges of their bytes. The checksums in a file's header are checked here.

Nothing here fails a fetch. A machine that does not answer, has left, or sends wrong bytes counts as without the block.
The log says why, and another machine may have it. One that did not answer is not asked again for a minute.
"""

from __future__ import annotations

import io
import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

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
    BlockFile,
    Content,
    HeadShare,
    Kind,
    Rows,
    concatenate_heads,
    files_in,
    find_sources,
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
Source = tuple[worker_pb2.KvPeer, int]
"""A machine that has a file, and the file's size there."""


@dataclass(slots=True)
class RemoteBlocks:
    """Files of blocks on other machines, and the bytes that came from each of these."""

    files: dict[bytes, dict[BlockFile, list[Source]]] = field(
        default_factory=dict[bytes, "dict[BlockFile, list[Source]]"]
    )
    """Sources by digest and file, the fastest ones first."""
    lists: dict[bytes, list[Source]] = field(default_factory=dict[bytes, "list[Source]"])
    """Sources of the lists of short blocks, by place."""
    received: Counter[str] = field(default_factory=Counter[str])
    """Bytes by machine."""


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
        asked = [
            (peer, LIST_BLOCKS.unary_unary(self._channel(peer)).future(request, timeout=_LIST_WITHIN_S))
            for peer in peers
        ]
        found = RemoteBlocks()
        for peer, call in asked:
            try:
                reply: weights_pb2.ListBlocksReply = call.result()
                if reply.HasField("failure"):
                    raise failure_to_error(reply.failure)
                _file_away(found, peer, reply.blocks)
            except grpc.RpcError as error:
                self._bar(peer, channel_error(error, peer.node))
            except RingError as error:
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
                self._bar(peer, channel_error(error, peer.node))
                _forget(blocks, peer)
            except (RingError, ValueError, IndexError, TypeError) as error:
                log.warning("KV of %s is not used, block %s: %s", peer.node, digest.hex()[:16], error)
                sources.pop(0)
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
        content, is_whole = bytearray(size), len(wanted) == file.layers.end - file.layers.start
        whole, fill = [(0, size)], partial(self._fill, blocks, peer, digest, file.name, content)
        if is_whole and not any(wanted.values()):
            fill(whole)
        else:
            fill([(0, min(size, _FIRST_BYTES))])
            opened = io.BytesIO(content)
            header = read_header(opened, file.layers)
            ranges = ranges_of(header, opened.tell(), file.layers, wanted)
            if any(end > size for _, end in ranges):
                raise ValueError("it is cut off")
            fill(ranges if len(ranges) <= _MOST_RANGES else whole)
        return read_layers(io.BytesIO(content), file.layers, wanted)

    def read_listed(self, blocks: RemoteBlocks, place: bytes, text: Sequence[int]) -> ListedTokens | None:
        """Return the block listed at a place that shares most tokens with a text; None if no machine has one."""
        best: ListedTokens | None = None
        for peer, size in blocks.lists.get(place, ()):
            content = bytearray(min(size, _FIRST_BYTES))
            try:
                self._fill(blocks, peer, place, LISTED, content, [(0, len(content))])
            except grpc.RpcError as error:
                self._bar(peer, channel_error(error, peer.node))
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
        content: bytearray,
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
        call = READ_BLOCK.unary_stream(self._channel(peer))(request, timeout=within_s)
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

    def _bar(self, peer: worker_pb2.KvPeer, error: RingError) -> None:
        """Do not ask a machine for some time, and log why if that is new."""
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


def _file_away(
    found: RemoteBlocks, peer: worker_pb2.KvPeer, blocks: Iterable[weights_pb2.BlockFiles]
) -> None:
    """Add the files of a machine's answer."""
    for block in blocks:
        for name, size in zip(block.names, block.sizes, strict=False):
            if name == LISTED:
                found.lists.setdefault(block.digest, []).append((peer, size))
            elif (file := BlockFile.parse(name)) is not None:
                files = found.files.setdefault(block.digest, {})
                files.setdefault(file, []).append((peer, size))


def _forget(blocks: RemoteBlocks, peer: worker_pb2.KvPeer) -> None:
    """Forget the files of a machine."""
    for files in blocks.files.values():
        for sources in files.values():
            sources[:] = [source for source in sources if source[0] is not peer]


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

    def own(self, kind: Kind) -> BlockFile:
        """Return the file that this rank writes."""
        return BlockFile(kind.extent, kind.name, self._share)

    def has(self, digest: bytes, kind: Kind) -> bool:
        """Report whether the files of this machine have all that this rank has of a kind."""
        path = self._writer.path(digest)
        return (path / self.own(kind).name).exists() or self._sources(files_in(path), kind) is not None

    def _sources(
        self, files: Sequence[BlockFile], kind: Kind
    ) -> dict[int, list[tuple[BlockFile, Rows | None]]] | None:
        return find_sources(files, self.own(kind), kind)

    def find(
        self, digest: bytes, kinds: Sequence[Kind], remote: RemoteBlocks | None = None
    ) -> frozenset[Kind]:
        """Return the kinds of content of which a block has all that this rank needs."""
        files = [file for file, _ in self._files(digest, remote)]
        return frozenset(kind for kind in kinds if self._sources(files, kind) is not None)

    def _files(self, digest: bytes, remote: RemoteBlocks | None) -> list[tuple[BlockFile, Source | None]]:
        """Return the files of a block, those of this machine first, and the sources of the others."""
        local = files_in(self._writer.path(digest))
        others = {} if remote is None else remote.files.get(digest, {})
        return [
            *((file, None) for file in local),
            *((file, sources[0]) for file, sources in others.items() if sources and file not in local),
        ]

    def remote_bytes(self, digest: bytes, kinds: Sequence[Kind], remote: RemoteBlocks) -> dict[str, float]:
        """Return the bytes that a block needs from other machines, by machine; it has all of these kinds."""
        files = dict(self._files(digest, remote))
        nbytes = defaultdict[str, float](float)
        for kind in kinds:
            for joined in (self._sources([*files], kind) or {}).values():
                for file, rows in joined:
                    if (source := files[file]) is not None:
                        peer, size = source
                        nbytes[peer.node] += (
                            size / (file.layers.end - file.layers.start) * _part_of(file, rows, self._share)
                        )
        return nbytes

    def read(self, digest: bytes, kinds: Sequence[Kind], remote: RemoteBlocks | None = None) -> Block | None:
        """Return a block's content of some kinds, or None if a layer or head is missing or damaged."""
        files = dict(self._files(digest, remote)) if kinds else {}
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
        while (sources := self._sources([*files], kind)) is not None:
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


def _part_of(file: BlockFile, rows: Rows | None, share: HeadShare | None) -> float:
    """Return the part of a file's heads that are read."""
    if rows is None:
        return 1.0
    if file.share is not None:
        heads = file.share.own.end - file.share.own.start
    else:
        heads = rows[1] if share is None else share.total
    return (rows[1] - rows[0]) / heads
