"""Keys and values from worker to worker, when requests move to another instance of their model, or its split changes.

The head lets workers of the other instance read a sequence, with a secret key and for some time. Each of them asks every
worker that has some of its layers, and receives parts: some tokens of these layers. A part is copied between two steps of
the worker that serves it. It is copied when the one before it is being sent, so that little memory is needed there. The
reader keeps all parts until the head adopts them for a sequence.

A worker that gets another stage keeps the keys and values of the one before, as long as the head wants some of them. The
workers of the next stages read them in the same way. A worker copies its own when they are adopted.

Nothing here fails a step. A reader that does not get everything answers why, and keeps nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import grpc
import mlx.core as mx

from mlx_ring.core.errors import NotReady, PeerRefused, ProtocolError, RingError, StepFailed
from mlx_ring.core.types import fetches_of
from mlx_ring.rpc.channels import keep_alive, open_channel
from mlx_ring.rpc.failures import channel_error, failure_to_error
from mlx_ring.rpc.frames import Bytes, Frame
from mlx_ring.rpc.links import WireTensor
from mlx_ring.rpc.methods import READ_KV
from mlx_ring.rpc.protos import step_pb2, worker_pb2
from mlx_ring.rpc.tls.credentials import ChannelTrust
from mlx_ring.rpc.tls.peers import node_name
from mlx_ring.worker.compute_thread import await_while, complete
from mlx_ring.worker.kv.kv_store import KVStore
from mlx_ring.worker.tensors import failed_kv_frame, join_parts, kv_frame, read_kv_part, to_wire, token_bytes

log = logging.getLogger(__name__)

_PART_BYTES = 32 << 20
"""About the size of a part. The copy of a larger one would delay a step for longer."""
_MOST_READERS = 8
"""Calls that may read at the same time. Each holds a thread, and the worker has 16."""
_MOST_EXPORTS = 64
_EXPORT_WAIT_S = 10.0
"""Time for which a reader waits until the head lets it read, because it may come first."""
_LOOK_S = 0.5
_MOST_FETCHED_BYTES = 1 << 30
"""Bytes of one fetch, which are kept until they are adopted. Heads ask for much less at a time."""

OnCompute = Callable[[Callable[[], None]], object]
"""Function that lets the compute thread do work between two steps."""
Answer = Callable[[int, str], None]
"""Receiver of the result of a fetch: 1 if everything was read, else 0 and the reason."""
Part = tuple[Bytes, ...]
"""Arrays of some tokens of one layer."""


@dataclass(frozen=True, slots=True)
class _Export:
    """Sequence that others may read."""

    sequence: int
    length: int
    until_s: float
    """Time of its end on `time.monotonic`'s clock."""
    nodes: frozenset[str]
    left: bool
    """True if it is of the stage before."""


@dataclass(frozen=True, slots=True)
class _Stage:
    """Keys and values of a stage's layers."""

    kv: KVStore
    layers: range


@dataclass(slots=True)
class _Fetch:
    """Content that is being read, or that waits to be adopted."""

    start: int
    end: int
    answer: Answer
    sources: int
    """Number of sources that have not delivered everything."""
    own: dict[int, str] = field(default_factory=dict[int, str])
    """Key of what this worker has itself, of the stage before, by layer."""
    parts: dict[int, list[tuple[int, Part]]] = field(default_factory=dict[int, "list[tuple[int, Part]]"])
    """Number of tokens and arrays of each part, by layer."""
    calls: list[Callable[[], object]] = field(default_factory=list["Callable[[], object]"])
    """Functions that cancel calls."""
    is_answered: bool = False


class KvTransfers:
    """Reading and serving of one worker's keys and values. Any thread may call it, except where it says otherwise."""

    def __init__(self, on_compute: OnCompute, trust: ChannelTrust | None = None) -> None:
        """Start without a stage.

        Args:
            on_compute: lets the compute thread do work between two steps.
            trust: credentials for other machines.
        """
        self._on_compute, self._trust = on_compute, trust
        self._kv: KVStore | None = None
        self._left: _Stage | None = None
        self.left_bytes = 0
        """Bytes of KV of the stage before; other threads may read it."""
        self._layers, self._place, self._model_digest = range(0), (0, 0), ""
        self._unmovable = ""
        """Reason why nothing can be moved from or to the stage; empty if it can."""
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._exports: dict[str, _Export] = {}
        self._readers = 0
        self._fetches: dict[int, _Fetch] = {}
        self._channels: dict[tuple[str, str], grpc.Channel] = {}
        """Channels by address and node."""
        self._threads: ThreadPoolExecutor | None = None

    def attach(
        self, kv: KVStore, assignment: worker_pb2.StageAssignment, caches: Sequence[int] | None = None
    ) -> None:
        """Serve the keys and values of a loaded stage; `caches` are the numbers of its caches, one for each layer if None."""
        self._kv, self._layers = kv, range(assignment.first_layer, assignment.end_layer)
        is_usual = caches is None or [*caches] == [*self._layers]
        self._unmovable = "" if is_usual else "the model does not have one cache for each layer"
        self._place, self._model_digest = (assignment.stage, assignment.rank), assignment.model_digest

    def detach(self) -> None:
        """Serve nothing any more: the stage is dropped, and its memory is to be freed."""
        self.reset()
        self._kv, self._layers = None, range(0)

    def leave(self) -> None:
        """Serve the present stage as the one before, until the head wants none of it. Runs on the compute thread."""
        if self._kv is not None and not self._unmovable:
            self._left, self.left_bytes = _Stage(self._kv, self._layers), self._kv.nbytes

    def keep_left(self, sequences: Collection[int]) -> None:
        """Free all sequences of the stage before, but these. Runs on the compute thread."""
        if self._left is None:
            return
        kv = self._left.kv
        kv.free(*({*kv.sequences} - {*sequences}))
        self.left_bytes = kv.nbytes
        if not kv.sequences:
            self._left, self.left_bytes = None, 0
            log.info("The KV of the stage before is freed")

    def reset(self, epoch: int | None = None) -> None:
        """Forget everything for a new head, or, because all sequences are freed, all but the fetches of other epochs."""
        with self._lock:
            self._exports.clear()
            fetches = [(id_, self._fetches[id_]) for id_ in fetches_of(epoch, self._fetches)]
        for id_, fetch in fetches:
            self._drop(id_, fetch, "all sequences were freed")
        self._close_others(())

    # ---- serve

    def export(self, export: worker_pb2.ExportKv) -> None:
        """Let others read a sequence from now on, or no longer. The steps before it have been executed."""
        with self._lock:
            now = time.monotonic()
            self._exports = {key: each for key, each in self._exports.items() if each.until_s > now}
            self._exports.pop(export.key, None)
            if export.sequence and len(self._exports) < _MOST_EXPORTS:
                self._exports[export.key] = _Export(
                    *(export.sequence, export.length, now + export.within_s, frozenset(export.nodes)),
                    left=export.left,
                )
            self._changed.notify_all()

    def read(
        self, request: worker_pb2.ReadKvRequest, caller: str, is_active: Callable[[], bool]
    ) -> Iterator[Frame]:
        """Yield the requested tokens of some layers, part by part, or the reason why there are no more.

        Args:
            request: what is read.
            caller: node of the caller's certificate; empty for this machine.
            is_active: returns False once the caller has left.
        """
        with self._lock:
            is_free = self._readers < _MOST_READERS
            self._readers += is_free
        if not is_free:
            yield failed_kv_frame(NotReady(f"{_MOST_READERS} workers read KV here already."))
            return
        try:
            yield from self._serve(request, caller, is_active)
        except RingError as error:
            log.warning("KV is not sent to %s: %s", caller or "another worker of this machine", error)
            yield failed_kv_frame(error)
        finally:
            with self._lock:
                self._readers -= 1

    def _serve(
        self, request: worker_pb2.ReadKvRequest, caller: str, is_active: Callable[[], bool]
    ) -> Iterator[Frame]:
        export = self._await_export(request.key, is_active)
        if caller not in export.nodes:
            raise PeerRefused(f"{caller or 'This machine'} may not read this sequence.")
        kv, layers = self._check(request, export)
        nbytes = sum(map(token_bytes, map(kv.kinds, layers)))
        step = max(1, _PART_BYTES // max(1, nbytes))
        ranges = [(at, min(at + step, request.end)) for at in range(request.start, request.end, step)]
        parts = [self._copy(request.key, export, kv, layers, each) for each in ranges[:1]]
        for number, tokens in enumerate(ranges):
            arrays = await_while(parts.pop(), is_active)
            # The next part is copied while this one is sent.
            parts = [
                self._copy(request.key, export, kv, layers, each) for each in ranges[number + 1 : number + 2]
            ]
            yield kv_frame(tokens, arrays)

    def _await_export(self, key: str, is_active: Callable[[], bool]) -> _Export:
        end_s = time.monotonic() + _EXPORT_WAIT_S
        with self._lock:
            while (found := self._exports.get(key)) is None and time.monotonic() < end_s and is_active():
                self._changed.wait(_LOOK_S)
        if found is None or found.until_s <= time.monotonic():
            raise PeerRefused("The head has not allowed to read this sequence, or no longer.")
        return found

    def _check(self, request: worker_pb2.ReadKvRequest, export: _Export) -> tuple[KVStore, Sequence[int]]:
        """Return the store, and the numbers of the requested layers in it."""
        stage = self._stage_of(export)
        if request.model_digest != self._model_digest:
            raise ProtocolError("The reader serves another model.")
        wanted = range(request.first_layer, request.end_layer)
        if not wanted or any(layer not in stage.layers for layer in wanted):
            raise ProtocolError(f"This worker has layers {stage.layers}, not {wanted}.")
        if not request.start < request.end <= export.length:
            raise ProtocolError(f"Tokens [{request.start}, {request.end}) of {export.length} were requested.")
        return stage.kv, [layer - stage.layers.start for layer in wanted]

    def _stage_of(self, export: _Export) -> _Stage:
        """Return the stage whose sequence may be read."""
        if export.left:
            if (left := self._left) is None:
                raise NotReady("The KV of the stage before was freed.")
            return left
        if self._kv is None:
            raise NotReady("This worker has not loaded a stage yet.")
        if self._unmovable:
            raise ProtocolError(f"KV cannot be moved: {self._unmovable}.")
        return _Stage(self._kv, self._layers)

    def _copy(
        self, key: str, export: _Export, kv: KVStore, layers: Sequence[int], tokens: tuple[int, int]
    ) -> Future[Sequence[WireTensor]]:
        """Let the compute thread copy a part."""
        copied: Future[Sequence[WireTensor]] = Future()

        def copy() -> Sequence[WireTensor]:
            if self._exports.get(key) is not export:
                raise PeerRefused("The head no longer allows to read this sequence.")
            copies = [array for layer in layers for array in kv.layer_content(export.sequence, layer, tokens)]
            return [to_wire(array) for array in copies]

        self._on_compute(partial(complete, copied, copy))
        return copied

    # ---- fetch

    def fetch(self, wanted: worker_pb2.FetchKv, answer: Answer) -> None:
        """Read this rank's layers from others in the background, and answer once all are there, or one is not."""
        sources = [each for each in wanted.sources if (each.stage, each.rank) == self._place]
        others = [each for each in sources if each.address]
        own = {layer: each.key for each in sources if not each.address for layer in layers_of(each)}
        fetch = _Fetch(wanted.start, wanted.end, answer, len(others), own)
        self._close_others(others)
        with self._lock:
            self._fetches[wanted.id] = fetch
            if self._threads is None:
                self._threads = ThreadPoolExecutor(_MOST_READERS, "kv-fetch")
        if problem := self._objection(wanted, sources):
            self._drop(wanted.id, fetch, problem)
        elif not others:
            fetch.is_answered = True
            answer(1, "")
        for source in () if problem else others:
            self._threads.submit(self._read_from, wanted, source, fetch)

    def _objection(self, wanted: worker_pb2.FetchKv, sources: Sequence[worker_pb2.KvSource]) -> str:
        """Return the reason why a fetch cannot be read; empty if it can."""
        if self._kv is None:
            return "this worker has not loaded a stage yet"
        if self._unmovable:
            return self._unmovable
        given = [layer for each in sources for layer in layers_of(each)]
        if sorted(given) != [*self._layers] or wanted.start >= wanted.end:
            return f"the sources have layers {sorted(given)}, tokens [{wanted.start}, {wanted.end})"
        per_token = sum(token_bytes(self._kv.kinds(number)) for number in range(len(self._layers)))
        nbytes = per_token * (wanted.end - wanted.start)
        if nbytes > _MOST_FETCHED_BYTES:
            return f"it is {nbytes / 1e9:.1f} GB, more than the limit of {_MOST_FETCHED_BYTES / 1e9:.1f} GB"
        return ""

    def _read_from(self, wanted: worker_pb2.FetchKv, source: worker_pb2.KvSource, fetch: _Fetch) -> None:
        peer = source.node or "another worker of this machine"
        try:
            self._read_all(wanted, source, fetch)
        except grpc.RpcError as error:
            self._drop(wanted.id, fetch, str(channel_error(error, peer)))
        except RingError as error:
            self._drop(wanted.id, fetch, f"{peer}: {error}")
        except Exception as error:
            log.exception("KV cannot be read")
            self._drop(wanted.id, fetch, f"{peer}: {error}")
        else:
            with self._lock:
                fetch.sources -= 1
                ends = not fetch.sources and not fetch.is_answered
                fetch.is_answered |= ends
            if ends:
                fetch.answer(1, "")

    def _read_all(self, wanted: worker_pb2.FetchKv, source: worker_pb2.KvSource, fetch: _Fetch) -> None:
        request = worker_pb2.ReadKvRequest(
            key=source.key,
            model_digest=self._model_digest,
            first_layer=source.first_layer,
            end_layer=source.end_layer,
            start=wanted.start,
            end=wanted.end,
        )
        channel = self._channel(source.address, source.node)
        call = READ_KV.unary_stream(channel)(request, timeout=wanted.within_s or None)
        with self._lock:
            fetch.calls.append(call.cancel)
            is_over = fetch.is_answered
        if is_over:
            call.cancel()
        at = wanted.start
        for frame in call:
            at = self._file(frame, source, fetch, at)
        if at != wanted.end:
            raise ProtocolError(f"it ended at token {at} of {wanted.end}")

    def _channel(self, address: str, node: str) -> grpc.Channel:
        """Return the channel to a worker. It stays open for the next fetches."""
        with self._lock:
            if (address, node) not in self._channels:
                name = node_name(node) if node else ""
                self._channels[address, node] = open_channel(address, self._trust, name, more=keep_alive())
            return self._channels[address, node]

    def _close_others(self, sources: Sequence[worker_pb2.KvSource]) -> None:
        """Close the channels to workers of earlier instances, unless some are still read."""
        used = {(each.address, each.node) for each in sources}
        with self._lock:
            if all(fetch.is_answered for fetch in self._fetches.values()):
                for other in self._channels.keys() - used:
                    self._channels.pop(other).close()

    def _file(self, frame: Frame, source: worker_pb2.KvSource, fetch: _Fetch, at: int) -> int:
        """Check a part, and keep it; return the end of its tokens."""
        part, payload = frame.header.kv, memoryview(frame.payload)
        if not frame.header.HasField("kv"):
            raise ProtocolError(frame.problem or "a part was expected, but another frame came")
        if part.HasField("failure"):
            raise failure_to_error(part.failure)
        if part.start != at or not at < part.end <= fetch.end:
            raise ProtocolError(f"tokens [{part.start}, {part.end}) came after {at}")
        kv, start = self._kv, self._layers.start
        kinds = {layer: [] if kv is None else kv.kinds(layer - start) for layer in layers_of(source)}
        found = read_kv_part(part, payload, kinds)
        with self._lock:
            if fetch.is_answered:
                raise NotReady("the fetch has ended")
            for layer, arrays in found.items():
                fetch.parts.setdefault(layer, []).append((part.end - part.start, arrays))
        return part.end

    def _drop(self, id_: int, fetch: _Fetch, problem: str) -> None:
        """Forget a fetch, unless that was done before, and answer that it failed, if nothing was answered yet."""
        with self._lock:
            if self._fetches.get(id_) is not fetch:
                return
            del self._fetches[id_]
            late, fetch.is_answered = fetch.is_answered, True
            calls = [*fetch.calls]
            fetch.parts.clear()
        for cancel in calls:
            cancel()
        if not late:
            fetch.answer(0, problem)

    def forget(self, id_: int) -> None:
        """Forget a fetch, and end it if it is not complete."""
        with self._lock:
            fetch = self._fetches.get(id_)
        if fetch is not None:
            self._drop(id_, fetch, "it is not needed any more")

    def adopt(self, kv: KVStore, adopt: step_pb2.Adopt) -> None:
        """Append what was fetched to a sequence, or a part of its layers, and forget it. Runs on the compute thread.

        Raises:
            StepFailed: it is not there any more, or is for other tokens.
        """
        parts, layers = max(1, adopt.parts), [*enumerate(self._layers)]
        is_last = adopt.part + 1 == parts
        with self._lock:
            fetch = (self._fetches.pop if is_last else self._fetches.get)(adopt.fetch, None)
        if fetch is None or fetch.sources or (fetch.start, fetch.end) != (adopt.start, adopt.length):
            raise StepFailed(f"No KV of fetch {adopt.fetch} is there.")
        first, end = (len(layers) * each // parts for each in (adopt.part, adopt.part + 1))
        for number, layer in layers[first:end]:
            found, kinds = fetch.parts.pop(layer, []), kv.kinds(number)
            if (key := fetch.own.get(layer)) is not None:
                arrays = self._own_content(key, layer, (adopt.start, adopt.length))
            else:
                arrays = [
                    join_parts([(tokens, part[place]) for tokens, part in found], kind)
                    for place, kind in enumerate(kinds)
                ]
            if arrays:
                heads = (0, arrays[0].shape[0])
                kv.write(adopt.sequence, number, heads, (adopt.start, adopt.length), arrays)
        if is_last:
            kv.adopt(adopt.sequence, adopt.length)
            log.info("Took over tokens [%d, %d), in %d steps", adopt.start, adopt.length, parts)

    def _own_content(self, key: str, layer: int, tokens: tuple[int, int]) -> Sequence[mx.array]:
        """Return copies of what this worker has of a layer since it had another stage. Runs on the compute thread."""
        with self._lock:
            export = self._exports.get(key)
        left = self._left
        if export is None or not export.left or left is None or layer not in left.layers:
            raise StepFailed(f"The KV of layer {layer} of the stage before was freed.")
        return left.kv.layer_content(export.sequence, layer - left.layers.start, tokens)


def layers_of(source: worker_pb2.KvSource) -> range:
    """Return the layers that a rank reads from a source."""
    return range(source.first_layer, source.end_layer)
