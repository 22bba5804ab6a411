"""Links that carry activations from one stage to the next.

A link has a sending end in one worker and a receiving end (an `Inbox`) in the
other. Messages are keyed by instance, epoch, step and purpose. So a message of
an earlier epoch is dropped, and a failed step ends the wait for it at once.
Tensors travel as raw bytes with dtype and shape: nothing here computes.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import grpc

from mlx_ring.core.errors import LinkLost, ProtocolError, RingError, StaleMessage, WorkerStuck
from mlx_ring.rpc.channels import keep_alive, open_channel
from mlx_ring.rpc.failures import failure_to_error
from mlx_ring.rpc.frames import Frame, Packer, unpack
from mlx_ring.rpc.methods import LINK
from mlx_ring.rpc.protos import hello_pb2, step_pb2, worker_pb2
from mlx_ring.rpc.tls.credentials import ChannelTrust
from mlx_ring.rpc.tls.peers import node_name

HIDDEN = worker_pb2.Activation.Purpose.HIDDEN
SAMPLED = worker_pb2.Activation.Purpose.SAMPLED
_MOST_WAITING, _MOST_WAITING_BYTES = 1024, 2 << 30
"""Limits of an inbox: far more than the steps under way."""
OPENING_LIMIT_S = 5.0
"""Seconds to open links to workers that have loaded: less than the agent waits, so that the lost link can be named."""
_UNWATCHED_AFTER_S = 1.0
"""Seconds after which gRPC no longer watches whether a channel connects. Its thread looks five times a second."""


@dataclass(frozen=True, slots=True)
class LinkKey:
    """Key of a message: a step's activations, or the tokens that it sampled."""

    instance: str
    epoch: int
    step: int
    purpose: worker_pb2.Activation.Purpose = HIDDEN

    def __str__(self) -> str:
        return f"{self.instance} epoch {self.epoch} step {self.step}"


@dataclass(frozen=True, slots=True)
class WireTensor:
    """Array on the wire: its own dtype, row-major, little-endian."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview | bytes
    tokens: tuple[int, ...] = ()
    """Token ids of the step, if the next stage cannot know them from the step."""
    failure: step_pb2.Failure | None = None
    """Failure of rows that it names, which are therefore neither in the array nor in `tokens`."""


def _size(message: WireTensor | RingError) -> int:
    return memoryview(message.data).nbytes if isinstance(message, WireTensor) else 0


class LinkSender(Protocol):
    """Sending end of a link."""

    def send(self, key: LinkKey, tensor: WireTensor) -> None:
        """Send the tensor; return before it has arrived. Raises `LinkLost` on a broken link."""
        ...

    def send_failure(self, key: LinkKey, failure: step_pb2.Failure) -> None:
        """Send a tombstone, which ends waits for `key`. Never raises."""
        ...

    def close(self) -> None: ...


class FanOut:
    """Sender to every rank of a stage. All get the same tensors, and learn at once that a step has failed."""

    def __init__(self, links: Sequence[LinkSender]) -> None:
        self._links = tuple(links)

    def send(self, key: LinkKey, tensor: WireTensor) -> None:
        for link in self._links:
            link.send(key, tensor)

    def send_failure(self, key: LinkKey, failure: step_pb2.Failure) -> None:
        for link in self._links:
            link.send_failure(key, failure)

    def close(self) -> None:
        for link in self._links:
            link.close()


class Inbox:
    """Receiving end: messages wait here under their keys until the compute thread takes them."""

    def __init__(self, instance: str, epoch: int) -> None:
        self._instance = instance
        self._epoch = epoch
        self._arrived = threading.Condition()
        self._messages: dict[LinkKey, WireTensor | RingError] = {}
        self._broken: RingError | None = None
        """Error that ends all waits in this epoch."""
        self._sender_loss: RingError | None = None
        """End of the present sender, which ends all waits until another one is admitted."""
        self._sender = 0

    def admit(self) -> InboxSender:
        """Admit a sender in place of an earlier one, whose messages and end no longer count."""
        with self._arrived:
            self._sender += 1
            self._sender_loss = None
            return InboxSender(self, self._sender)

    def is_admitted(self, sender: int) -> bool:
        """Report whether this sender was admitted last."""
        return sender == self._sender

    def put(self, key: LinkKey, message: WireTensor | RingError) -> None:
        """Store a message; one of another instance or epoch is dropped.

        A head greets every worker before its first step, so every worker knows an epoch before others send in it.

        Raises:
            ProtocolError: more messages wait than a pipeline has under way.
        """
        with self._arrived:
            if (key.instance, key.epoch) == (self._instance, self._epoch):
                self._check(key, message)
                self._messages[key] = message
                self._arrived.notify_all()

    def _check(self, key: LinkKey, message: WireTensor | RingError) -> None:
        nbytes = sum(map(_size, (message, *self._messages.values())))
        if len(self._messages) >= _MOST_WAITING or nbytes > _MOST_WAITING_BYTES:
            raise ProtocolError(
                f"With the one for {key}, {len(self._messages) + 1} messages of {nbytes} bytes wait on a link; "
                f"{_MOST_WAITING} and {_MOST_WAITING_BYTES} are allowed."
            )

    def recv(self, key: LinkKey, deadline: float | None = None) -> WireTensor:
        """Wait for a message.

        Args:
            key: key of the message.
            deadline: on `time.monotonic`'s clock, seconds; None waits until the epoch changes.

        Raises:
            RingError: the tombstone's error, when the step failed upstream.
            StaleMessage: the epoch is later than the key's.
            WorkerStuck: the deadline passed.
            LinkLost: the link broke, or the sending end has closed.
        """
        with self._arrived:
            while True:
                if key.epoch < self._epoch:
                    raise StaleMessage(f"Waited for {key}; epoch {self._epoch} is in force.")
                message = self._messages.pop(key, None)
                if message is not None:
                    self._drop_before(key)
                if isinstance(message, RingError):
                    raise message
                if message is not None:
                    return message
                error = self._broken or self._sender_loss
                if error is not None:
                    raise error
                remaining = None if deadline is None else deadline - time.monotonic()
                if remaining is not None and remaining <= 0:
                    raise WorkerStuck(f"No activations arrived for {key} before the deadline.")
                self._arrived.wait(remaining)

    def holds(self, key: LinkKey, wait_s: float = 0.0) -> bool:
        """Report whether `recv` would answer or fail at once; otherwise wait so long for it."""

        def is_settled() -> bool:
            is_broken = (self._broken or self._sender_loss) is not None
            return key in self._messages or is_broken or key.epoch < self._epoch

        with self._arrived:
            return is_settled() if wait_s <= 0 else self._arrived.wait_for(is_settled, wait_s)

    def _drop_before(self, key: LinkKey) -> None:
        """Drop activations of earlier, failed steps, because they are taken in order of steps.

        Sampled tokens stay: stage 0 may ask for a later step's while an earlier one's are arriving.
        """
        if key.purpose == HIDDEN:
            for old in [old for old in self._messages if old.purpose == HIDDEN and old.step < key.step]:
                del self._messages[old]

    def take_arrived(
        self, purpose: worker_pb2.Activation.Purpose
    ) -> list[tuple[LinkKey, WireTensor | RingError]]:
        """Take every message of a purpose that has come, without waiting."""
        with self._arrived:
            keys = [key for key in self._messages if key.purpose == purpose]
            return [(key, self._messages.pop(key)) for key in keys]

    def advance(self, epoch: int) -> None:
        """Enter a new epoch: older messages are dropped, and waits for them end."""
        with self._arrived:
            self._epoch = max(self._epoch, epoch)
            self._messages = {key: kept for key, kept in self._messages.items() if key.epoch >= self._epoch}
            self._broken = self._sender_loss = None
            self._arrived.notify_all()

    def break_off(self, error: RingError) -> None:
        """End all waits in this epoch. Messages that have come can still be taken."""
        with self._arrived:
            self._broken = error
            self._arrived.notify_all()

    def lose(self, sender: int, error: RingError) -> bool:
        """End all waits until another sender is admitted; return False, without an effect, if one has been."""
        with self._arrived:
            if sender != self._sender:
                return False
            self._sender_loss = error
            self._arrived.notify_all()
            return True


class InboxSender:
    """Sender's access to an inbox."""

    def __init__(self, inbox: Inbox, number: int) -> None:
        self._inbox, self._number = inbox, number

    def put(self, key: LinkKey, message: WireTensor | RingError) -> None:
        """Store a message, unless another sender has been admitted since."""
        if self._inbox.is_admitted(self._number):
            self._inbox.put(key, message)

    def break_off(self, error: RingError) -> bool:
        """End all waits. Return False, without an effect, if another sender has been admitted since."""
        return self._inbox.lose(self._number, error)


LinkLoss = Callable[[RingError], None]
"""Receiver of the loss of a link, in any thread."""


def link_lost(sender: hello_pb2.Hello, receiver: hello_pb2.Hello, reason: str) -> LinkLost:
    """Return the error for a broken link."""
    error = LinkLost(
        f"The link from stage {sender.stage} on {sender.node} to stage {receiver.stage} on {receiver.node} "
        f"broke: {reason}."
    )
    return error.between(sender.node, receiver.node)


class Opening:
    """Links that are being opened. Another thread may give them up, so that the one that opens them does not wait."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ends: list[Callable[[], object]] = []
        self.is_given_up = False

    def add(self, end: Callable[[], object]) -> None:
        """Add a function that ends a wait or closes a link; it is called at once if the links were given up."""
        with self._lock:
            if not self.is_given_up:
                self._ends.append(end)
                return
        end()

    def give_up(self) -> None:
        """End all waits, and close the links that are open already."""
        with self._lock:
            self.is_given_up = True
            ends, self._ends = self._ends, []
        for end in ends:
            end()

    @contextmanager
    def within(self, limit_s: float) -> Generator[None]:
        """Give the links up if they are not open after so many seconds."""
        patience = threading.Timer(limit_s, self.give_up)
        patience.daemon = True
        patience.start()
        try:
            yield
        finally:
            patience.cancel()

    def done(self) -> bool:
        """Keep the links from now on; return False if they were given up."""
        with self._lock:
            self._ends = []
            return not self.is_given_up


class GrpcLink:
    """Sending end of a stream between two workers. gRPC's own thread does the sending."""

    def __init__(
        self,
        address: str,
        hello: hello_pb2.Hello,
        timeout_s: float = 30.0,
        *,
        trust: ChannelTrust | None = None,
        node: str = "",
        packer: Packer | None = None,
        bytes_per_s: float = 0.0,
        on_lost: LinkLoss | None = None,
        opening: Opening | None = None,
    ) -> None:
        """Connect and greet.

        Args:
            address: address of the next worker.
            hello: greeting of this worker.
            timeout_s: limit of the connection.
            trust: credentials, for a worker on another machine.
            node: the other machine's node.
            packer: packer of sent frames; None sends them as they are.
            bytes_per_s: bandwidth of the link; 0: unknown.
            on_lost: receives the end of the link, unless `close` ends it.
            opening: by which another thread ends the waits of this method.

        Raises:
            LinkLost: no worker answered in time, or the link was given up.
            RingError: the worker refused the link.
        """
        opening = opening or Opening()
        self.packer = packer
        self._hello, self._receiver = hello, hello_pb2.Hello(node=node or hello.node)
        self._on_lost = on_lost
        self._closed = False
        name = node_name(node) if node else ""
        self._channel = open_channel(address, trust, name, more=keep_alive(bytes_per_s))
        self._frames: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self._frames.put(Frame(worker_pb2.FrameHeader(hello=hello)))
        connected = grpc.channel_ready_future(self._channel)
        opening.add(connected.cancel)
        try:
            connected.result(timeout_s)
            self._call = LINK.stream_stream(self._channel)(self._outgoing())
            opening.add(self._call.cancel)
            self._await_hello()
        except grpc.FutureTimeoutError:
            self._abandon()
            error = LinkLost(f"No worker answered at {address} within {timeout_s:g} s.")
            raise error.between(hello.node, self._receiver.node) from None
        except grpc.FutureCancelledError:
            self._abandon()
            error = LinkLost(f"No worker answered at {address} before the link was given up.")
            raise error.between(hello.node, self._receiver.node) from None
        except BaseException:
            self._abandon()
            raise
        opening.add(self._abandon)
        if not self._call.add_callback(self._report_end):
            self._report_end()

    def _outgoing(self) -> Iterator[Frame]:
        """Yield outgoing frames in gRPC's thread, so that the compute thread waits for no compression."""
        for frame in iter(self._frames.get, None):
            yield frame if self.packer is None else self.packer.packed(frame)

    def _await_hello(self) -> None:
        try:
            accepted = next(self._call)
        except grpc.RpcError as error:
            raise self._loss() from error
        if accepted.HasField("failure"):
            raise failure_to_error(accepted.failure)
        self._receiver = accepted.hello

    def _report_end(self) -> None:
        if self._on_lost is not None and not self._closed:
            self._on_lost(self._loss())

    def _loss(self) -> LinkLost:
        return link_lost(self._hello, self._receiver, self._call.details() or "the receiver ended it")

    def send(self, key: LinkKey, tensor: WireTensor) -> None:
        if not self._call.is_active():
            raise self._loss()
        activation = worker_pb2.Activation(
            instance=key.instance,
            epoch=key.epoch,
            step=key.step,
            purpose=key.purpose,
            dtype=tensor.dtype,
            shape=tensor.shape,
            tokens=tensor.tokens,
            failure=tensor.failure,
        )
        self._frames.put(Frame(worker_pb2.FrameHeader(activation=activation), tensor.data))

    def send_failure(self, key: LinkKey, failure: step_pb2.Failure) -> None:
        tombstone = worker_pb2.Tombstone(
            instance=key.instance, epoch=key.epoch, step=key.step, purpose=key.purpose, failure=failure
        )
        self._frames.put(Frame(worker_pb2.FrameHeader(tombstone=tombstone)))

    def close(self) -> None:
        self._closed = True
        self._frames.put(None)
        self._channel.close()

    def _abandon(self) -> None:
        """Close a link that was refused or given up, but its channel only when gRPC's thread no longer watches it.

        That thread fails if the channel is closed, or no longer referred to, meanwhile.
        """
        self._closed = True
        self._frames.put(None)
        closing = threading.Timer(_UNWATCHED_AFTER_S, self._channel.close)
        closing.daemon = True
        closing.start()


def deliver_frames(frames: Iterator[Frame], inbox: Inbox | InboxSender) -> None:
    """Store what arrives on a link, until its sender ends it. Raises `ProtocolError` for a malformed frame."""
    for frame in frames:
        header = frame.header
        if header.HasField("activation"):
            head = header.activation
            key = LinkKey(head.instance, head.epoch, head.step, head.purpose)
            failure = head.failure if head.HasField("failure") else None
            data = (
                unpack(head.dtype, head.packed_bytes, frame.payload) if head.packed_bytes else frame.payload
            )
            tensor = WireTensor(head.dtype, tuple(head.shape), data, tuple(head.tokens), failure)
            inbox.put(key, tensor)
        elif header.HasField("tombstone"):
            stone = header.tombstone
            key = LinkKey(stone.instance, stone.epoch, stone.step, stone.purpose)
            inbox.put(key, failure_to_error(stone.failure))
        else:
            raise ProtocolError(frame.problem or "A link frame has neither activations nor a tombstone.")
