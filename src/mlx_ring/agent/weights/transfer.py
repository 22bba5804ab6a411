"""One fetch: hands work to the streams of every peer, checks what comes, and finds out who was wrong."""

from __future__ import annotations

import asyncio
import logging
import textwrap
from collections import Counter, defaultdict, deque
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import grpc

from mlx_ring.agent.weights.shares import Board, PiecePart, join_ranges, rest_of
from mlx_ring.agent.weights.store import StoredModel, parts_of
from mlx_ring.core.errors import ModelNotFound, ProtocolError, RingError, WeightsMissing, WorkerLost
from mlx_ring.core.types import ByteProgress
from mlx_ring.models.weights_manifest import Piece, unpack_indexes
from mlx_ring.rpc.failures import channel_error, failure_to_error
from mlx_ring.rpc.hello import make_hello
from mlx_ring.rpc.methods import FETCH, HAVE
from mlx_ring.rpc.protos import weights_pb2
from mlx_ring.rpc.tls.handshakes import handshake_error

log = logging.getLogger(__name__)

# ---- peers

_FINAL = (
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
)


@dataclass(frozen=True, slots=True)
class PeerChannel:
    """A node that may have weights. Its channel is the caller's to close; `WEIGHTS_MESSAGE_BYTES` is its limit."""

    name: str
    channel: grpc.aio.Channel


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """Limits of a fetch from peers."""

    streams: int = 3
    """Concurrent streams to each peer."""
    silence_s: float = 20.0
    """Seconds without a byte after which a stream counts as broken."""
    tries: int = 8
    """Consecutive broken streams without a byte in between, after which a peer counts as lost."""
    pause_s: float = 0.25
    """Pause after the first broken stream, doubled after each further one up to `longest_pause_s`."""
    longest_pause_s: float = 4.0


def broken(error: grpc.RpcError | TimeoutError, peer: str) -> RingError:
    """Return the error that the end of a call means."""
    if isinstance(error, TimeoutError):
        return WorkerLost(f"{peer} stopped sending.")
    return handshake_error(error, peer) or channel_error(error, peer)


def is_final(error: grpc.RpcError | TimeoutError) -> bool:
    """Return True if a retry would not help."""
    return isinstance(error, grpc.aio.AioRpcError) and error.code() in _FINAL


def short(reason: object) -> str:
    """Shorten a peer's text, which may have any length."""
    return textwrap.shorten(str(reason), 300, placeholder=" ...")


# ---- the fetch


@dataclass(slots=True)
class Fetched:
    """Bytes that a fetch received, by peer."""

    received: dict[str, int] = field(default_factory=dict[str, int])

    @property
    def nbytes(self) -> int:
        return sum(self.received.values())


class Transfer:
    """One run of `fetch`."""

    def __init__(
        self,
        model: StoredModel,
        wanted: frozenset[int],
        node: str,
        progress: ByteProgress,
        patience: FetchLimits,
    ) -> None:
        self._model = model
        self._wanted = wanted
        self._node = node
        self._report_progress = progress
        self._patience = patience
        self._board = Board(model.manifest, [])
        self._changed = asyncio.Condition()
        self._left = set(wanted - model.have)
        self._parts_left: dict[int, int] = {}
        self._given: defaultdict[int, list[_FetchedBytes]] = defaultdict(list)
        self._suspects: dict[int, list[tuple[_FetchedBytes, str]]] = {}
        self._fruitless: Counter[str] = Counter()
        self._reasons: dict[str, str] = {}
        self._total = model.manifest.nbytes(wanted)
        self._done = self._total - model.manifest.nbytes(self._left)
        self.fetched = Fetched()

    async def run(self, peers: Sequence[PeerChannel]) -> None:
        await self._plan()
        self._report_progress(self._done, self._total)
        if self._left:
            await asyncio.gather(*(self._ask(peer) for peer in peers))
            streams = [
                asyncio.create_task(self._stream(peer))
                for _ in range(self._patience.streams)
                for peer in peers
            ]
            await _all_of(streams)
        if self._left:
            raise WeightsMissing(self._what_is_missing())

    async def _plan(self) -> None:
        """Put every part on the board that is not on disk."""
        wanted: list[PiecePart] = []
        for index in sorted(self._left):
            piece, there = self._model.manifest.pieces[index], self._model.parts(index)
            parts = [
                PiecePart(index, number, piece.file, start, end)
                for number, (start, end) in enumerate(parts_of(piece))
                if number not in there
            ]
            self._parts_left[index] = len(parts)
            self._done += piece.nbytes - sum(part.nbytes for part in parts)
            wanted += parts
        self._board.add(wanted)
        await self._end_pieces([index for index, parts in self._parts_left.items() if not parts])

    async def _ask(self, peer: PeerChannel) -> None:
        """Learn which pieces a peer has."""
        request = weights_pb2.HaveRequest(
            hello=make_hello(node=self._node), model=self._model.manifest.digest
        )
        try:
            reply = await HAVE.aio_unary_unary(peer.channel)(request, timeout=self._patience.silence_s)
            if reply.HasField("failure"):
                raise failure_to_error(reply.failure)
            self._board.peers[peer.name] = unpack_indexes(reply.pieces, len(self._model.manifest.pieces))
        except grpc.RpcError as error:
            await self._drop(peer.name, str(broken(error, peer.name)))
        except ModelNotFound as error:
            log.info("%s", error)
            self._reasons[peer.name] = short(error)
        except RingError as error:
            await self._drop(peer.name, str(error))

    async def _stream(self, peer: PeerChannel) -> None:
        """Take run after run, until there is nothing more that could come to this peer."""
        board, name = self._board, peer.name
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: board.can_take(name) or not board.may_take_later(name))
                run = board.take(name)
            if not run:
                return
            await self._fetch_run(peer, deque(run))
            if tries := self._fruitless[name]:
                pause_s = self._patience.pause_s * 2 ** (tries - 1)
                await asyncio.sleep(min(pause_s, self._patience.longest_pause_s))

    async def _fetch_run(self, peer: PeerChannel, run: deque[PiecePart]) -> None:
        """Fetch a run; return unfinished parts to the board in any case."""
        reached = 0
        try:
            async with aclosing(self._receive(peer, list(run))) as received:
                async for offset, data in received:
                    await asyncio.to_thread(self._model.write, run[0].file, offset, data)
                    self._count(peer.name, len(data))
                    reached = await self._finish_parts(peer.name, run, reached + len(data))
                    if peer.name not in self._board.peers:
                        return
        except ProtocolError as error:
            await self._drop(peer.name, f"it violated the protocol: {error}")
        except (grpc.RpcError, TimeoutError) as error:
            await self._note_break(peer.name, str(broken(error, peer.name)), final=is_final(error))
        except RingError as error:
            await self._drop(peer.name, str(error))
        except OSError as error:
            raise WeightsMissing(f"{self._model.folder} cannot be written: {error.strerror}.") from error
        finally:
            await self._return_unfinished(peer.name, run, reached)

    async def _receive(self, peer: PeerChannel, run: list[PiecePart]) -> AsyncGenerator[tuple[int, bytes]]:
        """Yield offsets and bytes as they arrive, each checked against the request."""
        ranges = list(join_ranges(run))
        call = FETCH.aio_unary_stream(peer.channel)(
            weights_pb2.FetchRequest(
                hello=make_hello(node=self._node),
                model=self._model.manifest.digest,
                file=run[0].file,
                ranges=[weights_pb2.ByteRange(offset=start, length=end - start) for start, end in ranges],
            )
        )
        try:
            for start, end in ranges:
                offset = start
                while offset < end:
                    async with asyncio.timeout(self._patience.silence_s):
                        part = await call.read()
                    data = _checked(part, offset, end)
                    yield offset, data
                    offset += len(data)
            async with asyncio.timeout(self._patience.silence_s):
                rest = await call.read()
            if rest is not grpc.aio.EOF:
                raise ProtocolError("it sent more than was requested.")
        finally:
            call.cancel()

    def _count(self, peer: str, nbytes: int) -> None:
        self._fruitless[peer] = 0
        self.fetched.received[peer] = self.fetched.received.get(peer, 0) + nbytes
        self._done += nbytes
        self._report_progress(self._done, self._total)

    async def _finish_parts(self, peer: str, run: deque[PiecePart], reached: int) -> int:
        """Remove the received parts from a run; return how many bytes of the next one have arrived."""
        done: list[PiecePart] = []
        while run and reached >= run[0].nbytes:
            done.append(run.popleft())
            reached -= done[-1].nbytes
        await self._note(peer, done)
        for _ in done:
            self._board.finish()
        if not self._board.in_progress:
            await self._wake()
        return reached

    async def _note(self, peer: str, done: Iterable[PiecePart]) -> None:
        """Record received parts; check the pieces that they complete."""
        parts: list[tuple[int, int]] = []
        whole: list[int] = []
        for part in done:
            self._given[part.piece].append(_FetchedBytes(part.start, part.end, peer))
            self._parts_left[part.piece] -= 1
            if self._parts_left[part.piece]:
                parts.append((part.piece, part.number))
            else:
                whole.append(part.piece)
        if parts:
            await asyncio.to_thread(self._model.note_parts, parts)
        await self._end_pieces(whole)

    async def _return_unfinished(self, peer: str, run: deque[PiecePart], reached: int) -> None:
        if run and reached:
            part = run[0]
            if part.alone:
                self._done -= reached
            else:
                self._given[part.piece].append(_FetchedBytes(part.start, part.start + reached, peer))
        self._board.return_unfinished(rest_of(run, reached))
        await self._wake()

    async def _end_pieces(self, indexes: Sequence[int]) -> None:
        """Check pieces that are complete on disk."""
        if not indexes:
            return
        wrong = await asyncio.to_thread(self._model.check, indexes)
        for index in indexes:
            given = self._given.pop(index, [])
            if index in wrong:
                await self._want_again(index, given)
            else:
                self._left.discard(index)
                await self._blame(index)

    async def _want_again(self, index: int, given: Sequence[_FetchedBytes]) -> None:
        """Handle a wrong piece: drop its only peer, or fetch it whole from one of several to find the wrong one."""
        piece = self._model.manifest.pieces[index]
        await asyncio.to_thread(self._model.forget, [index])
        names = {part.peer for part in given}
        if len(names) == 1 and sum(part.end - part.start for part in given) == piece.nbytes:
            await self._drop(names.pop(), _wrong(piece))
        else:
            log.warning(
                "Received wrong bytes of %s from %s: requesting all of it from one of them",
                piece,
                sorted(names),
            )
            self._suspects[index] = [(part, await self._digest(index, part)) for part in given]
        self._done -= piece.nbytes
        self._parts_left[index] = 1
        self._board.add([PiecePart(index, -1, piece.file, piece.offset, piece.end, alone=True)])
        await self._wake()

    async def _blame(self, index: int) -> None:
        """Find the peers whose parts of a corrected piece were wrong."""
        for part, digest in self._suspects.pop(index, []):
            if digest != await self._digest(index, part):
                await self._drop(part.peer, _wrong(self._model.manifest.pieces[index]))

    async def _digest(self, index: int, part: _FetchedBytes) -> str:
        file = self._model.manifest.pieces[index].file
        return await asyncio.to_thread(self._model.digest_of, file, part.start, part.end)

    async def _note_break(self, peer: str, reason: str, *, final: bool) -> None:
        self._fruitless[peer] += 1
        if final or self._fruitless[peer] >= self._patience.tries:
            await self._drop(peer, reason)

    async def _drop(self, peer: str, reason: str) -> None:
        """Use a peer no more."""
        if peer not in self._reasons:
            self._reasons[peer] = short(reason)
            log.warning("%s sends this node no more weights: %s", peer, self._reasons[peer])
        self._board.drop(peer)
        await self._wake()

    async def _wake(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _what_is_missing(self) -> str:
        pieces = self._model.manifest.pieces
        first = ", ".join(str(pieces[index]) for index in sorted(self._left)[:3])
        reasons = " ".join(f"{peer}: {reason.rstrip('.')}." for peer, reason in self._reasons.items())
        return (
            f"{len(self._left)} pieces of model {self._model.manifest.digest[:16]} "
            f"({self._model.manifest.nbytes(self._left) / 1e6:.1f} MB) are missing and no node has them, among them "
            f"{first}. {reasons or 'No other node has them.'} Start a node that has the model; the other pieces are kept."
        )


@dataclass(frozen=True, slots=True)
class _FetchedBytes:
    """Bytes `[start, end)` of a file that came from a peer."""

    start: int
    end: int
    peer: str


def _wrong(piece: Piece) -> str:
    return f"it sent {piece} with another SHA-256 than the manifest's"


def _checked(part: weights_pb2.FetchPart | object, offset: int, end: int) -> bytes:
    if not isinstance(part, weights_pb2.FetchPart):
        raise ProtocolError(f"it ended before byte {end} of the file.")
    if part.HasField("failure"):
        raise failure_to_error(part.failure)
    if part.offset != offset or not 0 < len(part.data) <= end - offset:
        raise ProtocolError(
            f"it sent {len(part.data)} bytes from {part.offset} instead of bytes [{offset}, {end})."
        )
    return part.data


async def _all_of(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Wait for all; at the first error the others are ended."""
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
