"""Transport of steps to the ranks and of answers back: the contract, and its implementation over gRPC.

The tests' twin runs the ranks in the process; both pass the same tests. Over gRPC, each rank has
one long-lived stream, and every rank gets the same bytes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import grpc

from mlx_ring.core.errors import ProtocolError, RingError, ServingError, WorkerLost, WorkerStuck
from mlx_ring.core.types import KvPlace, RankId
from mlx_ring.engine.admission import GRAMMAR_WITHIN_S, Grammars, Settled, Suspects
from mlx_ring.engine.kv_budget import RankKv
from mlx_ring.engine.sequence import Sequence as EngineSequence
from mlx_ring.engine.ways_back import LinkUse, MoveTimes, link_use
from mlx_ring.rpc.channels import keep_alive, open_aio_channel
from mlx_ring.rpc.failures import channel_error, failure_to_error
from mlx_ring.rpc.hello import check_hello
from mlx_ring.rpc.methods import STEPS_RAW
from mlx_ring.rpc.protos import hello_pb2, step_pb2, worker_pb2
from mlx_ring.rpc.tls.credentials import ChannelTrust
from mlx_ring.rpc.tls.peers import node_name


def sampling_ranks(ranks: Sequence[RankId]) -> list[RankId]:
    """Return the ranks of the last stage: all of them sample, with the same result."""
    last = max(rank.stage for rank in ranks)
    return [rank for rank in ranks if rank.stage == last]


class Listener(Protocol):
    """Receiver of the ranks' answers. Every call comes in the event loop, never from inside `Executor.send`."""

    def answered(self, done: step_pb2.StepDone) -> None:
        """Receive a rank's answer to a step. A rank answers in stream order; ranks answer in any order."""
        ...

    def prepared(self, rank: RankId, prepared: worker_pb2.GrammarPrepared) -> None:
        """Receive a sampling rank's answer about a grammar, in any order."""
        ...

    def fetched(self, rank: RankId, fetched: worker_pb2.KvFetched) -> None:
        """Receive a rank's answer about KV on its disk, in any order."""
        ...

    def failed(self, error: RingError) -> None:
        """Receive the loss of the instance (a worker died, a channel broke, a deadline passed), once and last."""
        ...


class Executor(Protocol):
    """A transport that delivers every step to every rank of every stage, in one order."""

    @property
    def ranks(self) -> Sequence[RankId]:
        """Every rank of every stage, in order of stage and rank."""
        ...

    @property
    def kv_places(self) -> Sequence[KvPlace]:
        """Places of the ranks' KV, by which it moves to other instances; empty if it does not."""
        ...

    def set_listener(self, listener: Listener) -> None:
        """Set the receiver, once and before the first step."""
        ...

    def limit_kv(self, limits: Mapping[RankId, int]) -> None:
        """Set the bytes of KV that each rank may hold; also before the first step."""
        ...

    def prepare(self, wanted: worker_pb2.PrepareGrammar) -> None:
        """Make every rank of the last stage compile a grammar while steps continue."""
        ...

    def drop_grammar(self, id_: int) -> None:
        """Drop a grammar on the ranks after the steps that were sent."""
        ...

    def fetch_kv(self, wanted: worker_pb2.FetchKv) -> None:
        """Make every rank read KV, from its machine's disk or from other workers, while steps continue."""
        ...

    def export_kv(self, export: worker_pb2.ExportKv) -> None:
        """Let other workers read a sequence's KV on every rank, once the steps before have been executed."""
        ...

    def keep_left(self, sequences: Iterable[int]) -> None:
        """Let ranks free the KV of the stages that they had before this epoch, except that of some sequences."""
        ...

    def send(self, step: step_pb2.Step) -> None:
        """Send a step. Never blocks and never raises: errors reach the listener."""
        ...


log = logging.getLogger(__name__)

Call = grpc.aio.StreamStreamCall[bytes, worker_pb2.StepsReply]


class GrammarRequests:
    """Requests to the ranks of one instance to compile grammars."""

    def __init__(self, executor: Executor, suspects: Suspects, settle: Callable[[Settled], None]) -> None:
        """Start without grammars.

        Args:
            executor: transport to the ranks.
            suspects: order of sequences that run alone.
            settle: receives the sequences whose wait for a grammar has ended.
        """
        self._executor, self._suspects, self._settle = executor, suspects, settle
        self._grammars = Grammars(sampling_ranks(executor.ranks))

    @property
    def unanswered(self) -> dict[int, dict[RankId, int]]:
        """Ranks that may be compiling a sequence's grammar, with 0 for each, by sequence."""
        return self._grammars.unanswered

    def send(self) -> bool:
        """Let the ranks compile the grammars that are to be compiled now; return True if some are compiled already."""
        lacking = self._suspects.take_lacking()
        for sequence in lacking:
            if (grammar := sequence.request.sampling.grammar) is None:
                continue
            if (wanted := self._grammars.want(sequence, grammar)) is not None:
                self._executor.prepare(wanted)
        if compiling := self._grammars.next_to_time():
            asyncio.get_running_loop().call_later(GRAMMAR_WITHIN_S, self._time_out, compiling)
        return not all(sequence.awaits_grammar for sequence in lacking)

    def _time_out(self, id_: int) -> None:
        self._settle(self._grammars.time_out(id_))

    def answered(self, rank: RankId, prepared: worker_pb2.GrammarPrepared) -> None:
        """Record that a rank compiled a grammar, or could not."""
        self._settle(self._grammars.answered(rank, prepared))

    def leave(self, sequence: EngineSequence, *, is_spoiled: bool = False) -> None:
        """Record the end of a sequence; let the ranks drop a grammar that is no longer used."""
        if (unwanted := self._grammars.leave(sequence, is_spoiled=is_spoiled)) is not None:
            self._executor.drop_grammar(unwanted)


@dataclass(frozen=True, slots=True)
class RankAddress:
    """Address at which a rank accepts steps."""

    place: RankId
    address: str
    node: str = ""
    """Node whose certificate answers there; empty on this machine."""


@dataclass(frozen=True, slots=True)
class KvOrigin:
    """Ranks from which KV moves: those of another engine, or those of this one with the stages that they had before."""

    places: Sequence[KvPlace]
    """Places of their KV; empty if none moves."""
    kv: Mapping[RankId, RankKv]
    send: Callable[[worker_pb2.ExportKv], None]
    error: Callable[[], RingError | None]
    """Function that returns the reason why they no longer answer; None while they do."""
    times: MoveTimes
    """Times of moves to their engine."""
    is_left: bool = False
    """True if it is of the stages that the ranks had before."""
    has: Callable[[int], bool] = bool
    """Function that returns False once a sequence, of an id that is never 0, was given up there."""

    def export(self, key: str, sequence: int, length: int, nodes: Iterable[str], within_s: float) -> None:
        """Let workers of some nodes read a sequence's first tokens, or with a length of 0 no longer."""
        if self.error() is not None:
            return
        own = {place.node for place in self.places}
        # Workers of a machine reach each other without a certificate.
        readers = {*nodes, *([""] if own & {*nodes} else [])}
        export = worker_pb2.ExportKv(
            key=key, sequence=sequence, length=length, within_s=within_s, left=self.is_left
        )
        export.nodes.extend(sorted(readers))
        self.send(export)

    def pairs(self, places: Iterable[KvPlace]) -> list[tuple[KvPlace, KvPlace]]:
        """Return ranks with those of the origin that have some of their layers, and the same heads."""
        return [
            (reader, source)
            for reader in places
            for source in self.places
            if reader.rank.rank == source.rank.rank and reader.common(source)
        ]

    def sources(self, places: Iterable[KvPlace], key: str) -> Iterator[worker_pb2.KvSource]:
        """Yield what each rank needs to read its layers, with the key for it."""
        for reader, source in self.pairs(places):
            is_own = self.is_left and reader.node == source.node
            address, node = ("", "") if is_own else source.address_from(reader.node)
            layers = reader.common(source)
            yield worker_pb2.KvSource(
                stage=reader.rank.stage,
                rank=reader.rank.rank,
                address=address,
                node=node,
                first_layer=layers.start,
                end_layer=layers.stop,
                key=key,
            )

    def objection(self, readers: Iterable[KvPlace], kv: Mapping[RankId, RankKv], reached: int) -> str:
        """Return the reason why ranks with this memory cannot read a sequence that held `reached` tokens; empty if they can."""
        ranks = [*kv.values(), *self.kv.values()]
        if any(rank.recurrent for rank in ranks):
            return "the model has recurrent layers"
        if any(rank.slack and reached > rank.exact_length for rank in ranks):
            return "sliding layers have dropped tokens"
        for ours, theirs in self.pairs(readers):
            if ours.shares != theirs.shares and max(len(ours.shares), len(theirs.shares)) > 1:
                return "ranks have other shares of the heads there"
            if not theirs.address_from(ours.node)[0]:
                return f"workers of {ours.node} do not reach those of {theirs.node}"
        return ""

    def link_use(self, readers: Iterable[KvPlace], tokens: int) -> LinkUse:
        """Return the use of links if ranks read some tokens."""
        bytes_per_token = {rank: each.bytes_per_first_token for rank, each in self.kv.items()}
        return link_use(self.pairs(readers), bytes_per_token, tokens)


@dataclass(slots=True)
class _RankStream:
    """Stream to one rank: messages to write, and the tasks that write and read."""

    place: RankId
    peer: str
    node: str
    """Node of the rank; empty on this machine."""
    channel: grpc.aio.Channel
    call: Call
    outgoing: asyncio.Queue[bytes] = field(default_factory=asyncio.Queue[bytes])
    tasks: list[asyncio.Task[None]] = field(default_factory=list[asyncio.Task[None]])


class GrpcExecutor:
    """Executor for real workers, made by `connect`."""

    def __init__(self, streams: Sequence[_RankStream]) -> None:
        self._streams = streams
        self.kv_places: Sequence[KvPlace] = ()
        self.kv_peers: Callable[[], Iterable[worker_pb2.KvPeer]] = tuple
        """Function that returns the agents from which the ranks may read saved KV."""
        self._listener: Listener | None = None
        self._lost: RingError | None = None

    @classmethod
    async def connect(
        cls,
        addresses: Sequence[RankAddress],
        hello: hello_pb2.Hello,
        *,
        trust: ChannelTrust | None = None,
        timeout_s: float = 30.0,
    ) -> GrpcExecutor:
        """Open and greet every rank's stream.

        Args:
            addresses: address of every rank, in order of stage and rank.
            hello: the head's greeting; each worker's answer is checked against it.
            trust: the head's credentials, for workers on other machines.
            timeout_s: limit for all of them together, seconds.

        Raises:
            VersionMismatch, StaleMessage, NotReady: a worker refused.
            WorkerLost, WorkerStuck: a worker is unreachable or silent.
        """
        streams: list[_RankStream] = []
        try:
            async with asyncio.timeout(timeout_s):
                for address in addresses:
                    streams.append(_open(address, trust))
                    await _greet(streams[-1], hello)
        except BaseException as error:
            # A caller that is cancelled, because a worker was lost meanwhile, leaves no connection either.
            await _close_all(streams)
            if isinstance(error, TimeoutError):
                stuck = WorkerStuck(f"{streams[-1].peer} sent no greeting within {timeout_s:g} s.")
                raise stuck.blamed_on(streams[-1].node) from None
            if isinstance(error, RingError):
                error.blamed_on(streams[-1].node)
            raise
        return cls(streams)

    @property
    def ranks(self) -> Sequence[RankId]:
        return [stream.place for stream in self._streams]

    def set_listener(self, listener: Listener) -> None:
        self._listener = listener
        for stream in self._streams:
            stream.tasks = [
                asyncio.create_task(self._write(stream), name=f"write {stream.peer}"),
                asyncio.create_task(self._read(stream), name=f"read {stream.peer}"),
            ]

    def limit_kv(self, limits: Mapping[RankId, int]) -> None:
        for stream in self._streams:
            if stream.place in limits:
                message = worker_pb2.StepsRequest(kv_limit=limits[stream.place])
                stream.outgoing.put_nowait(message.SerializeToString())

    def prepare(self, wanted: worker_pb2.PrepareGrammar) -> None:
        self._send_to_samplers(worker_pb2.StepsRequest(prepare=wanted))

    def drop_grammar(self, id_: int) -> None:
        self._send_to_samplers(worker_pb2.StepsRequest(drop_grammar=id_))

    def _send_to_samplers(self, request: worker_pb2.StepsRequest) -> None:
        message, drawing = request.SerializeToString(), sampling_ranks(self.ranks)
        for stream in self._streams:
            if stream.place in drawing:
                stream.outgoing.put_nowait(message)

    def fetch_kv(self, wanted: worker_pb2.FetchKv) -> None:
        if wanted.asks_peers:
            wanted.peers.extend(self.kv_peers())
        self._send_to_all(worker_pb2.StepsRequest(fetch=wanted))

    def export_kv(self, export: worker_pb2.ExportKv) -> None:
        self._send_to_all(worker_pb2.StepsRequest(export=export))

    def keep_left(self, sequences: Iterable[int]) -> None:
        self._send_to_all(worker_pb2.StepsRequest(keep_left=worker_pb2.KeepLeft(sequences=sequences)))

    def send(self, step: step_pb2.Step) -> None:
        self._send_to_all(worker_pb2.StepsRequest(step=step))

    def _send_to_all(self, request: worker_pb2.StepsRequest) -> None:
        message = request.SerializeToString()
        for stream in self._streams:
            stream.outgoing.put_nowait(message)

    async def close(self) -> None:
        """Close every stream. Workers keep what they loaded."""
        self._listener = None
        await _close_all(self._streams)

    async def _write(self, stream: _RankStream) -> None:
        try:
            while True:
                await stream.call.write(await stream.outgoing.get())
        except (grpc.RpcError, asyncio.InvalidStateError) as error:
            self._fail(_stream_error(error, stream.peer).blamed_on(stream.node))

    async def _read(self, stream: _RankStream) -> None:
        try:
            while (reply := await stream.call.read()) is not grpc.aio.EOF:
                self._deliver(stream.place, reply)
            self._fail(WorkerLost(f"{stream.peer} ended its stream of answers.").blamed_on(stream.node))
        except RingError as error:
            self._fail(error)
        except grpc.RpcError as error:
            self._fail(_stream_error(error, stream.peer).blamed_on(stream.node))
        except Exception as error:
            log.exception("An answer of %s could not be processed", stream.peer)
            self._fail(ServingError(f"An answer of {stream.peer} could not be processed: {error!r}."))

    def _deliver(self, place: RankId, reply: object) -> None:
        if not isinstance(reply, worker_pb2.StepsReply):
            raise ProtocolError(f"A worker answered with {type(reply).__name__}.")
        if reply.HasField("failure"):
            raise failure_to_error(reply.failure)
        if self._listener is None or self._lost is not None:
            return
        if reply.HasField("prepared"):
            self._listener.prepared(place, reply.prepared)
        elif reply.HasField("fetched"):
            self._listener.fetched(place, reply.fetched)
        else:
            self._listener.answered(reply.done)

    def _fail(self, error: RingError) -> None:
        if self._listener is not None and self._lost is None:
            self._lost = error
            log.error("%s", error)
            self._listener.failed(error)


def _stream_error(error: Exception, peer: str) -> RingError:
    if isinstance(error, grpc.RpcError):
        return channel_error(error, peer)
    return WorkerLost(f"The stream to {peer} has ended.")


def _open(address: RankAddress, trust: ChannelTrust | None) -> _RankStream:
    place = address.place
    name = node_name(address.node) if address.node else ""
    channel = open_aio_channel(address.address, trust, name, more=keep_alive())
    peer = f"worker {place.rank} of stage {place.stage}" + (f" on {address.node}" if address.node else "")
    return _RankStream(
        place, peer, address.node, channel, STEPS_RAW.aio_stream_stream(channel)(wait_for_ready=True)
    )


async def _greet(stream: _RankStream, hello: hello_pb2.Hello) -> None:
    try:
        await stream.call.write(worker_pb2.StepsRequest(hello=hello).SerializeToString())
        reply = await stream.call.read()
    except grpc.RpcError as error:
        raise channel_error(error, stream.peer) from error
    if not isinstance(reply, worker_pb2.StepsReply):
        raise WorkerLost(f"{stream.peer} closed its stream before greeting.")
    if reply.HasField("failure"):
        raise failure_to_error(reply.failure)
    check_hello(reply.hello, hello, stream.peer)


async def _close_all(streams: Sequence[_RankStream]) -> None:
    for stream in streams:
        for task in stream.tasks:
            task.cancel()
        stream.call.cancel()
    await asyncio.gather(*(task for stream in streams for task in stream.tasks), return_exceptions=True)
    for stream in streams:
        await stream.channel.close()
