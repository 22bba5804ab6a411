"""Links with other stages. From the stage before, as a server: who may send, and to which inbox.

An inbox has one sender at a time. When another worker takes the place of a lost one, its call replaces the older call,
whose frames and end no longer count.

Links to the next stage, and back to stage 0, are opened anew for each assignment.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar, assert_never

import grpc

from mlx_ring.core.errors import NotReady, PeerRefused, ProtocolError, RingError
from mlx_ring.rpc.backends import DirectLink, direct_link
from mlx_ring.rpc.failures import error_to_failure
from mlx_ring.rpc.frames import Frame, Packer
from mlx_ring.rpc.hello import check_hello
from mlx_ring.rpc.links import (
    FanOut,
    GrpcLink,
    Inbox,
    InboxSender,
    LinkLoss,
    LinkSender,
    Opening,
    deliver_frames,
    link_lost,
)
from mlx_ring.rpc.protos import hello_pb2, worker_pb2
from mlx_ring.rpc.tls.credentials import ChannelTrust
from mlx_ring.rpc.tls.peers import Revoked, address_of_call, is_local, peer_of_call
from mlx_ring.worker.group import GroupPort
from mlx_ring.worker.replies import StageLinks
from mlx_ring.worker.shard import StageModel

log = logging.getLogger(__name__)

_CALLER_LOOK_S = 1.0
"""Time between checks that a caller still waits."""
_GREETING_WAIT_S = 10.0
_MOST_EARLY_CALLERS = 2
"""Number of callers of one node that may wait for the stage: the stage before, also if it was loaded again."""
_MOST_EARLY_CALLERS_OF_ALL = 8
"""Number of callers of all nodes that may wait. Each holds a thread, and the worker has 16."""

Received = TypeVar("Received")
Sends = Callable[[], worker_pb2.LinkUse | None]
"""Function that reports the use of a stage's link to the next one; any thread may call it."""


@dataclass(slots=True)
class PeerAccess:
    """Connections of this worker with other machines."""

    trust: ChannelTrust | None = None
    """Credentials for other machines. None: the worker only talks with its own machine."""
    revoked: Revoked = field(default_factory=Revoked)
    port: int = 0
    """Port for other machines; 0 while they cannot connect."""
    group: GroupPort | None = None
    """Port for the other ranks of its stage; None without a group."""
    capabilities: worker_pb2.GroupMeans | None = None
    """Backends and devices by which it can join a group."""
    end_refused: Callable[[], object] = lambda: None
    """Function that ends running calls of machines whose certificates were revoked."""

    def revoke(self, serials: Iterable[str]) -> None:
        """Refuse certificates with these serials from now on, and end the calls that they opened."""
        if self.revoked.replace(serials):
            self.end_refused()


class Neighbours:
    """Receiving end of a worker, for whichever worker has the stage before, and losses of its links both ways."""

    def __init__(self, hello: Callable[[], hello_pb2.Hello], on_lost: LinkLoss) -> None:
        """Start without a stage.

        Args:
            hello: returns this worker's greeting.
            on_lost: receives each loss of a link, in any thread.
        """
        self._hello = hello
        self._on_lost = on_lost
        self._generation = 0
        """Number of times that it was prepared for other neighbours, whose links replace the earlier ones."""
        self.loss: RingError | None = None
        """Loss of a link, which stays until other neighbours are expected."""
        self._assigned = threading.Event()
        self._early_callers = Counter[str]()
        """Number of callers that wait for the stage, by the node of their certificate; empty for this machine."""
        self._assignment = worker_pb2.StageAssignment(stages=1)
        self._inbox: Inbox | None = None
        self._lock = threading.Lock()
        self._call: grpc.ServicerContext | None = None
        """Call of the present sender."""

    @property
    def inbox(self) -> Inbox:
        """Inbox of the stage's input. Raises `NotReady` without a stage."""
        if self._inbox is None:
            raise NotReady("This worker has no stage yet.")
        return self._inbox

    def assign(self, assignment: worker_pb2.StageAssignment) -> Inbox:
        """Set this worker's stage, and return the inbox of its input."""
        self._assignment = assignment
        self._inbox = Inbox(assignment.instance, assignment.epoch)
        self._assigned.set()
        return self._inbox

    def prepare(self, assignment: worker_pb2.StageAssignment) -> None:
        """Expect another worker as the stage before, and end what waits for the present one."""
        with self._lock:
            self._generation += 1
            self.loss = None
        self._assignment = assignment
        self.break_off(NotReady("This worker is being linked with others."))

    def loss_recorder(self) -> LinkLoss:
        """Return a function that records the loss of a link that is opened now, unless others have replaced it."""
        generation = self._generation

        def record(error: RingError) -> None:
            with self._lock:
                if generation != self._generation:
                    return
                self.loss = self.loss or error
            self._on_lost(error)

        return record

    def advance(self, epoch: int) -> None:
        """Enter a new epoch, which drops messages of earlier ones."""
        if self._inbox is not None:
            self._inbox.advance(epoch)

    def break_off(self, error: RingError) -> None:
        """End all waits for input."""
        if self._inbox is not None:
            self._inbox.break_off(error)

    def link(
        self, frames: Iterator[Frame], context: grpc.ServicerContext
    ) -> Iterator[worker_pb2.FrameAccepted]:
        """Receive what another stage sends, until it closes the stream."""
        address = address_of_call(context)
        try:
            theirs = _greeting(first_message(frames, context))
            record = self.loss_recorder()
            sender = self._admit(theirs, context)
        except RingError as error:
            log.warning("Refused a link from %s: %s", address, error)
            yield worker_pb2.FrameAccepted(failure=error_to_failure(error))
            return
        yield worker_pb2.FrameAccepted(hello=self._hello())
        try:
            deliver_frames(frames, sender)
            loss: RingError = link_lost(theirs, self._hello(), "the sender closed it")
        except ProtocolError as error:
            log.warning("Ended the link from stage %d on %s: %s", theirs.stage, theirs.node, error)
            loss = error
        except grpc.RpcError:
            loss = link_lost(theirs, self._hello(), "the connection ended")
        if sender.break_off(loss):
            record(loss)

    def _admit(self, hello: hello_pb2.Hello, context: grpc.ServicerContext) -> InboxSender:
        """Admit only the worker that the plan puts before this one, in place of an earlier sender.

        Anyone else could end its link and so the instance.
        """
        inbox = self._await_stage(context)
        peer = f"stage {hello.stage} on {hello.node}"
        ours, assignment = self._hello(), self._assignment
        check_hello(hello, ours, peer)
        if (hello.instance, hello.plan_digest) != (ours.instance, ours.plan_digest):
            raise ProtocolError(f"{peer} named no instance; this worker is of {ours.instance}.")
        if hello.stage != (ours.stage - 1) % assignment.stages:
            raise ProtocolError(f"{peer} does not come before stage {ours.stage} of {assignment.stages}.")
        _check_caller(context, hello.node, assignment.previous_node)
        with self._lock:
            before, self._call = self._call, context
            sender = inbox.admit()
        if before is not None:
            before.cancel()
        return sender

    def _await_stage(self, context: grpc.ServicerContext) -> Inbox:
        """Wait for this worker's stage as long as the caller does, because its weights may have to be fetched first.

        The limit is that of the load: when it passes, the caller is ended.
        """
        if not self._assigned.is_set():
            caller = caller_node(context)
            with self._lock:
                waiting = self._early_callers
                if waiting[caller] >= _MOST_EARLY_CALLERS or waiting.total() >= _MOST_EARLY_CALLERS_OF_ALL:
                    raise NotReady("Others wait already for this worker's stage.")
                waiting[caller] += 1
            try:
                while not self._assigned.wait(_CALLER_LOOK_S) and context.is_active():
                    pass
            finally:
                with self._lock:
                    waiting[caller] -= 1
        if self._inbox is None:
            raise NotReady("The caller left before this worker received a stage.")
        return self._inbox


def caller_node(context: grpc.ServicerContext) -> str:
    """Return the node of the caller's certificate; empty for this machine, where callers show none."""
    return "" if is_local(context) else peer_of_call(context).node


def _check_caller(context: grpc.ServicerContext, greeted_as: str, expected: str) -> None:
    """Check that the caller's certificate belongs to the node of the stage before.

    An empty node is this machine, where callers show no certificate.

    Raises:
        PeerRefused: the certificate belongs to another node.
    """
    caller = caller_node(context)
    if caller and caller != greeted_as:
        raise PeerRefused(f"{caller} greeted as {greeted_as}.")
    if caller != expected:
        raise PeerRefused(
            f"{caller or 'This machine'} opened a link for the previous stage, but that stage runs on "
            f"{expected or 'this machine'}."
        )


def first_message(messages: Iterator[Received], context: grpc.ServicerContext) -> Received:
    """Return a stream's greeting. A stream without one is ended because it holds a thread.

    Raises:
        ProtocolError: no greeting came.
    """
    patience = threading.Timer(_GREETING_WAIT_S, context.cancel)
    patience.start()
    try:
        return next(messages)
    except (StopIteration, grpc.RpcError):
        raise ProtocolError("The stream ended, or was too slow, before its greeting.") from None
    finally:
        patience.cancel()


def _greeting(frame: Frame) -> hello_pb2.Hello:
    """Return the greeting of a frame, or raise `ProtocolError` if it holds none."""
    if not frame.header.HasField("hello"):
        raise ProtocolError(frame.problem or "A link begins with a greeting, but another frame arrived.")
    return frame.header.hello


# ---- links to the neighbours


@dataclass(frozen=True, slots=True)
class OpenedLinks:
    """Links to the neighbours."""

    links: StageLinks
    sends: Sends


def _packer(assignment: worker_pb2.StageAssignment) -> Packer | None:
    """Return a packer, or None if frames to the next stage are never compressed."""
    if assignment.link_compression == "off" or not assignment.next_node or assignment.next_bytes_per_s <= 0:
        return None
    return Packer(assignment.next_bytes_per_s)


def _sends(assignment: worker_pb2.StageAssignment, packer: Packer | None) -> worker_pb2.LinkUse | None:
    if packer is not None:
        return packer.use()
    if not assignment.next_address:
        return None
    if not assignment.next_node:
        return worker_pb2.LinkUse(why="both stages are on one machine")
    is_off = assignment.link_compression == "off"
    return worker_pb2.LinkUse(why="--link-compression is off" if is_off else "the link was not measured")


@dataclass(frozen=True, slots=True)
class LinkOpener:
    """Links to the neighbours of a stage, which are opened anew for each assignment."""

    model: StageModel
    inbox: Inbox
    trust: ChannelTrust | None
    loss_recorder: Callable[[], LinkLoss] | None

    def open_links(
        self,
        assignment: worker_pb2.StageAssignment,
        hello: hello_pb2.Hello,
        opening: Opening | None = None,
    ) -> OpenedLinks:
        """Open the links to the neighbours of an assignment. Only rank 0 sends, to every rank of the other stage.

        Args:
            assignment: the stage's assignment.
            hello: this worker's greeting.
            opening: the attempt, which is given up if a link cannot be opened.
        """
        packer = _packer(assignment)
        try:
            links = self._open(assignment, hello, packer, opening)
        except RingError:
            if opening is not None:
                opening.give_up()
            raise
        return OpenedLinks(links, partial(_sends, assignment, packer))

    def _open(
        self,
        ours: worker_pb2.StageAssignment,
        hello: hello_pb2.Hello,
        packer: Packer | None,
        opening: Opening | None,
    ) -> StageLinks:
        if ours.rank:
            return StageLinks(self.inbox)
        opener = partial(self._open_one, direct_link(ours), hello, opening)
        to_next = back = None
        if not self.model.is_last:
            speed = ours.next_bytes_per_s
            to_next = _to_all(opener, ours.next_address, ours.next_node, ours.next_ranks, packer, speed)
        elif not self.model.is_first:
            back = _to_all(opener, ours.first_address, ours.first_node, ours.first_ranks)
        return StageLinks(self.inbox, to_next, back)

    def _open_one(
        self,
        kind: DirectLink,
        hello: hello_pb2.Hello,
        opening: Opening | None,
        address: str,
        node: str,
        packer: Packer | None,
        bytes_per_s: float,
    ) -> LinkSender:
        match kind:
            case "grpc":
                return GrpcLink(
                    address,
                    hello,
                    trust=self.trust,
                    node=node,
                    packer=packer,
                    bytes_per_s=bytes_per_s,
                    on_lost=None if self.loss_recorder is None else self.loss_recorder(),
                    opening=opening,
                )
            case _:
                assert_never(kind)


def _to_all(
    open_link: Callable[[str, str, Packer | None, float], LinkSender],
    address: str,
    node: str,
    others: Iterable[worker_pb2.RankEnd],
    packer: Packer | None = None,
    bytes_per_s: float = 0.0,
) -> LinkSender:
    """Open a link to each rank of a stage: rank 0 at this address, and the others."""
    # A packer belongs to one thread, so each link has its own; status shows the first one's.
    ends = [(address, node, packer)]
    ends += [
        (other.address, other.node, Packer(packer.bytes_per_s) if packer and other.node else None)
        for other in others
    ]
    opened = [open_link(address, node, packer, bytes_per_s) for address, node, packer in ends]
    return opened[0] if len(opened) == 1 else FanOut(opened)
