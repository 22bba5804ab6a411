"""Peers of a worker: only the previous stage may link to it, and removed machines lose access."""

# A private method assigns the stage, because loading one takes a model.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import inspect
import queue
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.machines import node_credentials

from mlx_ring.agent import loading
from mlx_ring.cluster.security.authority import Authority
from mlx_ring.core.errors import LinkLost, StepFailed
from mlx_ring.rpc.frames import Frame
from mlx_ring.rpc.hello import make_hello
from mlx_ring.rpc.links import OPENING_LIMIT_S, GrpcLink, Inbox, LinkKey, Opening
from mlx_ring.rpc.protos import hello_pb2, worker_pb2
from mlx_ring.rpc.tls.peers import Peer, node_name
from mlx_ring.worker import neighbours, reshaping
from mlx_ring.worker import server as subject
from mlx_ring.worker.compute_thread import Waits
from mlx_ring.worker.neighbours import OpenedLinks, PeerAccess
from mlx_ring.worker.replies import StageLinks
from mlx_ring.worker.reshaping import WorkerIdentity
from mlx_ring.worker.sequences import SequenceTable
from mlx_ring.worker.server import WorkerServer

NEXT = LinkKey("demo-1", 1, 1)


class LocalCall:
    """Call over a Unix socket."""

    def peer(self) -> str:
        return "unix:/run/worker"

    def cancel(self) -> None:
        """Do nothing: the call ends anyway."""


class _RemoteCall:
    """Call from another machine."""

    def __init__(self, authority: Authority, node: str) -> None:
        self._certificate = node_credentials(authority, node).certificate

    def peer(self) -> str:
        return "ipv4:10.0.0.9:40000"

    def auth_context(self) -> Mapping[str, Sequence[bytes]]:
        return {"x509_pem_cert": [self._certificate]}

    def cancel(self) -> None:
        """Do nothing: the call ends anyway."""


def assign_stage(stage: int, previous_node: str = "") -> tuple[WorkerServer, Inbox]:
    """Return a worker for this stage of three, and the inbox for its activations."""
    server = WorkerServer(WorkerIdentity("here", stage, 0, "none"))
    assignment = worker_pb2.StageAssignment(
        instance="demo-1", epoch=1, stage=stage, stages=3, previous_node=previous_node
    )
    inbox = server._assign(worker_pb2.LoadRequest(hello=make_hello(), assignment=assignment))
    return server, inbox


def test_status_reports_every_field_of_its_message() -> None:
    code = inspect.getsource(WorkerServer.status)
    fields = worker_pb2.WorkerStatus.DESCRIPTOR.fields_by_name
    assert [name for name in fields if f" {name}=" not in code] == []


def open_link(server: WorkerServer, *frames: Frame, context: object = None) -> worker_pb2.FrameAccepted:
    """Open a link, close it, and return the first answer."""
    (first,) = server.link(iter(frames), cast("Any", context or LocalCall()))
    return first


def greeting(**fields: Any) -> Frame:
    return Frame(worker_pb2.FrameHeader(hello=make_hello(**fields)))


@pytest.mark.parametrize(
    ("stage", "frames"),
    [
        (1, ()),
        (1, (greeting(),)),
        (1, (greeting(stage=0),)),
        (1, (greeting(instance="demo-2", stage=0),)),
        (1, (greeting(instance="demo-1", stage=1),)),
        (1, (greeting(instance="demo-1", stage=2),)),
        (0, (greeting(instance="demo-1", stage=1),)),
        (1, (Frame(worker_pb2.FrameHeader()),)),
        (1, (Frame(worker_pb2.FrameHeader(hello=hello_pb2.Hello(protocol=99))),)),
    ],
)
def test_link_from_any_but_the_previous_stage_is_refused_without_effect(
    stage: int, frames: tuple[Frame, ...]
) -> None:
    server, inbox = assign_stage(stage)
    assert open_link(server, *frames).HasField("failure")
    assert not inbox.holds(NEXT)


@pytest.mark.parametrize(("stage", "previous"), [(0, 2), (1, 0), (2, 1)])
def test_link_from_the_previous_stage_is_accepted_and_its_end_is_noticed(stage: int, previous: int) -> None:
    server, inbox = assign_stage(stage)
    assert open_link(server, greeting(instance="demo-1", stage=previous)).HasField("hello")
    assert inbox.holds(NEXT)


def test_broken_link_is_reported_to_this_head_and_to_the_next_one() -> None:
    server, _ = assign_stage(1)
    server._runner = cast("Any", SimpleNamespace(reset=lambda: None, last_step=0))
    streams = [server._open_stream(make_hello(instance="demo-1", epoch=1))]
    open_link(server, greeting(instance="demo-1", stage=0, node="mini-1"))
    streams.append(server._open_stream(make_hello(instance="demo-1", epoch=2)))
    for stream in streams:
        reply = stream.answers.get_nowait()
        assert reply is not None
        assert (reply.failure.kind, [*reply.failure.ends]) == ("LinkLost", ["mini-1", "here"])
    server._neighbours.prepare(worker_pb2.StageAssignment(stages=3))
    assert server._neighbours.loss is None, "other links replace the broken one"


def test_link_is_accepted_only_from_the_node_of_the_previous_stage(
    tmp_path: Path,
) -> None:
    authority = Authority.open(tmp_path)
    server, inbox = assign_stage(1, "mini-1")
    for node, claimed_node in (("mini-2", "mini-2"), ("mini-2", "mini-1"), ("mini-1", "mini-2")):
        frame = greeting(instance="demo-1", stage=0, node=claimed_node)
        assert open_link(server, frame, context=_RemoteCall(authority, node)).failure.kind == "PeerRefused"
    assert (
        open_link(server, greeting(instance="demo-1", stage=0, node="mini-1")).failure.kind == "PeerRefused"
    )
    assert not inbox.holds(NEXT)
    frame = greeting(instance="demo-1", stage=0, node="mini-1")
    assert open_link(server, frame, context=_RemoteCall(authority, "mini-1")).HasField("hello")


def test_no_remote_node_may_link_if_the_previous_stage_is_local(tmp_path: Path) -> None:
    server, _ = assign_stage(1)
    frame = greeting(instance="demo-1", stage=0, node="mini-1")
    refused = open_link(server, frame, context=_RemoteCall(Authority.open(tmp_path), "mini-1"))
    assert (
        refused.failure.message
        == "mini-1 opened a link for the previous stage, but that stage runs on this machine."
    )


def test_calls_of_a_removed_machine_end_once() -> None:
    ended: list[str] = []
    access = PeerAccess(end_refused=lambda: ended.append("calls"))
    removed = Peer(node_name("removed-1"), "7f")
    access.revoke([])
    assert (access.revoked.refusal(removed), ended) == ("", [])
    for _ in range(3):
        access.revoke(["7f"])
    assert "removed from the cluster" in access.revoked.refusal(removed)
    assert ended == ["calls"]


class _EndedCall(LocalCall):
    """Call that notes its end."""

    def __init__(self) -> None:
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


def test_a_new_sender_replaces_the_one_before_whose_messages_and_end_no_longer_count() -> None:
    server, inbox = assign_stage(1)
    frames = [greeting(instance="demo-1", stage=0), _tombstone(NEXT)]
    lost, calls = _EndedCall(), list[object]()

    def first_sender() -> Iterator[Frame]:
        yield frames[0]
        # While this call waits for a frame, another worker links as the stage before.
        calls.append(next(server.link(iter(frames[:1]), cast("Any", LocalCall()))))
        yield frames[1]

    assert [answer.HasField("hello") for answer in server.link(first_sender(), cast("Any", lost))] == [True]
    assert lost.is_cancelled
    assert len(calls) == 1
    assert not inbox.holds(NEXT)


def _tombstone(key: LinkKey) -> Frame:
    stone = worker_pb2.Tombstone(instance=key.instance, epoch=key.epoch, step=key.step)
    return Frame(worker_pb2.FrameHeader(tombstone=stone))


class _WaitingCall(LocalCall):
    """Call that is asked several times whether it still waits; then something happens."""

    def __init__(self, happens: Callable[[], object], *, stays: bool) -> None:
        self._looks, self._happens, self._stays = 0, happens, stays

    def is_active(self) -> bool:
        self._looks += 1
        if self._looks == 3:
            self._happens()
        return self._looks < 3 or self._stays


@pytest.mark.parametrize("stays", [True, False])
def test_a_link_waits_for_the_stage_as_long_as_its_caller(
    monkeypatch: pytest.MonkeyPatch, *, stays: bool
) -> None:
    monkeypatch.setattr(neighbours, "_CALLER_LOOK_S", 1e-3)
    server = WorkerServer(WorkerIdentity("here", 1, 0, "none"))
    assignment = worker_pb2.StageAssignment(instance="demo-1", epoch=1, stage=1, stages=3)
    request = worker_pb2.LoadRequest(hello=make_hello(), assignment=assignment)
    # Its node fetches the weights first, for however long.
    call = _WaitingCall(lambda: server._assign(request) if stays else None, stays=stays)
    frames = [greeting(instance="demo-1", stage=0)]
    (answer, *_) = server.link(iter(frames), cast("Any", call))
    assert answer.HasField("hello") == stays
    assert answer.failure.kind == ("" if stays else "NotReady")


class _WaitingRemoteCall(_WaitingCall, _RemoteCall):
    """Such a call from another machine."""

    def __init__(self, happens: Callable[[], object], remote: _RemoteCall) -> None:
        super().__init__(happens, stays=False)
        self.peer, self.auth_context = remote.peer, remote.auth_context


def test_two_callers_of_a_machine_may_wait_for_the_stage(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Refuse a third one at once, so that no machine takes all threads of a worker or keeps others away."""
    monkeypatch.setattr(neighbours, "_CALLER_LOOK_S", 1e-3)
    server = WorkerServer(WorkerIdentity("here", 1, 0, "none"))
    remote = _RemoteCall(Authority.open(tmp_path), "mini-1")
    frames, refused = [greeting(instance="demo-1", stage=0)], list[bool]()

    def call(happens: Callable[[], object] = lambda: None, *, is_remote: bool = False) -> None:
        call = _WaitingRemoteCall(happens, remote) if is_remote else _WaitingCall(happens, stays=False)
        (answer, *_) = server.link(iter(frames), cast("Any", call))
        refused.append("Others wait already" in answer.failure.message)

    def call_remote(happens: Callable[[], object] = lambda: None) -> None:
        call(happens, is_remote=True)

    call(lambda: call(lambda: call(call_remote)))
    assert refused == [True, False, False]
    refused.clear()
    call_remote(lambda: call_remote(lambda: (call_remote(), call())))
    assert refused == [True, False, False, False]
    call_remote()
    assert not refused[-1]


def test_an_empty_worker_is_not_linked_with_others() -> None:
    server, _ = assign_stage(1)
    assignment = worker_pb2.StageAssignment(instance="demo-1", epoch=2, stage=1, stages=3)
    request = worker_pb2.RelinkRequest(hello=make_hello(), assignment=assignment)
    assert server.relink(request, cast("Any", LocalCall())).failure.kind == "NotReady"


def relink(server: WorkerServer, fencing_id: int) -> str:
    """Ask for other neighbours as a head with this number, and return the kind of the failure."""
    assignment = worker_pb2.StageAssignment(instance="demo-1", epoch=2, stage=1, stages=3)
    request = worker_pb2.RelinkRequest(hello=make_hello(fencing_id=fencing_id), assignment=assignment)
    return server.relink(request, cast("Any", LocalCall())).failure.kind


def test_an_older_head_cannot_link_a_worker_with_others() -> None:
    server = WorkerServer(WorkerIdentity("here", 1, 0, "none"))
    assignment = worker_pb2.StageAssignment(instance="demo-1", epoch=1, stage=1, stages=3)
    loaded_by = make_hello(fencing_id=2)
    server._assign(worker_pb2.LoadRequest(hello=loaded_by, assignment=assignment))
    assert [relink(server, head) for head in (1, 2, 3, 2)] == [
        *("StaleMessage", "NotReady", "NotReady"),
        "StaleMessage",
    ]


def test_a_neighbour_that_has_died_keeps_no_worker_from_being_prepared_again() -> None:
    server, _ = assign_stage(1)
    opening, entered = queue.SimpleQueue[Opening](), list[object]()

    def open_links(_assignment: object, hello: hello_pb2.Hello, opened: Opening) -> OpenedLinks:
        given_up = threading.Event()
        opened.add(given_up.set)
        opening.put(opened)
        if hello.epoch == 2:
            # The neighbour does not answer.
            given_up.wait()
            raise LinkLost("No worker answered in time.")
        return OpenedLinks(StageLinks(inbox=cast("Any", None)), lambda: None)

    server._built = cast("Any", SimpleNamespace(open_links=open_links))
    server._runner = cast("Any", SimpleNamespace(finish=list[object], relink=entered.append, last_step=0))

    def relinked(epoch: int, *, commit: bool) -> str:
        assignment = worker_pb2.StageAssignment(instance="demo-1", epoch=epoch, stage=1, stages=3)
        request = worker_pb2.RelinkRequest(hello=make_hello(), assignment=assignment, commit=commit)
        return server.relink(request, cast("Any", LocalCall())).failure.kind

    def run_job() -> None:
        server._jobs.get()()

    with ThreadPoolExecutor(2) as threads:
        linking = threads.submit(relinked, 2, commit=True)
        opening.get()
        preparing = threads.submit(relinked, 3, commit=False)
        run_job()
        assert (preparing.result(), linking.result()) == ("", "LinkLost")
        linking = threads.submit(relinked, 3, commit=True)
        run_job()
        assert linking.result() == ""
        # Another first phase comes after the links are open, and before the epoch is entered.
        linking = threads.submit(relinked, 4, commit=True)
        opening.get()
        opening.get().give_up()
        run_job()
        assert linking.result() == "StaleMessage"
    assert len(entered) == 1
    assert server.hello().epoch == 3


def test_a_neighbour_that_cannot_be_reached_is_named_before_the_agent_gives_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert OPENING_LIMIT_S < loading._LINK_WAIT_S
    monkeypatch.setattr(reshaping, "OPENING_LIMIT_S", 0.1)
    server, _ = assign_stage(1)
    request = worker_pb2.RelinkRequest(hello=make_hello(), commit=True)
    request.assignment.CopyFrom(
        worker_pb2.StageAssignment(instance="demo-1", epoch=2, stage=1, stages=3, next_node="mini-2")
    )
    # It takes in connections, and answers nothing.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"

        def open_links(to: worker_pb2.StageAssignment, hello: hello_pb2.Hello, opening: Opening) -> object:
            return GrpcLink(address, hello, node=to.next_node, opening=opening)

        server._built = cast("Any", SimpleNamespace(open_links=open_links))
        failure = server.relink(request, cast("Any", LocalCall())).failure
    assert (failure.kind, [*failure.ends]) == ("LinkLost", ["here", "mini-2"])


def greet_steps(server: WorkerServer, fencing_id: int) -> worker_pb2.StepsReply:
    """Open a stream of steps as a head with this number, and return the first answer."""
    hello = worker_pb2.StepsRequest(hello=make_hello(instance="demo-1", epoch=1, fencing_id=fencing_id))
    return next(server.steps(iter([hello]), cast("Any", LocalCall())))


class _RecordingWorker(WorkerServer):
    """Worker that records the streams from which it takes steps."""

    taken: tuple[object, ...] = ()

    def __setattr__(self, name: str, value: object) -> None:
        if name == "_stream" and value is not None:
            self.taken += (value,)
        super().__setattr__(name, value)


def test_steps_of_an_older_head_are_not_taken_even_for_a_moment() -> None:
    server = _RecordingWorker(WorkerIdentity("here", 0, 0, "none"))
    assignment = worker_pb2.StageAssignment(instance="demo-1", epoch=1, stages=3)
    server._assign(worker_pb2.LoadRequest(hello=make_hello(), assignment=assignment))
    assert greet_steps(server, 2).failure.kind == "NotReady"
    server._runner = cast(
        "Any",
        SimpleNamespace(last_step=7, kv_bytes=0, num_sequences=0, reset=list[object], waits=Waits()),
    )
    assert not greet_steps(server, 2).HasField("failure")
    assert server.status(worker_pb2.StatusRequest(), cast("Any", LocalCall())).hello.fencing_id == 2
    refused = greet_steps(server, 1).failure
    assert (refused.kind, refused.message) == ("StaleMessage", "the head is head 1; head 2 has taken over.")
    assert len(server.taken) == 1
    assert not greet_steps(server, 3).HasField("failure")
    assert len(server.taken) == 2


class _Disk:
    """Disk that records what is fetched from it."""

    def __init__(self) -> None:
        self.fetched: list[int] = []

    def fetch(self, wanted: worker_pb2.FetchKv, _answer: object) -> None:
        self.fetched.append(wanted.id)

    def reset(self) -> None:
        self.fetched.clear()


def test_kv_that_a_new_head_fetches_stays_when_the_sequences_of_the_head_before_are_freed() -> None:
    """Free them late, as after a long step of the compute thread: the new head does not wait for that."""
    server, disk = assign_stage(1)[0], _Disk()
    server._built = cast("Any", SimpleNamespace(disk=disk))
    sequences = SequenceTable(cast("Any", SimpleNamespace(reset=list[object])), 8, disk=cast("Any", disk))
    server._runner = cast("Any", SimpleNamespace(reset=sequences.reset, last_step=0))
    wanted = worker_pb2.FetchKv(id=1)
    before = server._open_stream(make_hello(instance="demo-1", epoch=1))
    server._jobs.get()()
    server._fetch(before, wanted)
    stream = server._open_stream(make_hello(instance="demo-1", epoch=2))
    assert disk.fetched == [], "nothing of the head before is read any more"
    server._fetch(stream, wanted)
    server._jobs.get()()
    assert disk.fetched == [1]


def test_a_worker_joins_its_group_only_after_it_has_reported_so(monkeypatch: pytest.MonkeyPatch) -> None:
    server = WorkerServer(WorkerIdentity("here", 0, 0, "none"))
    received: list[str] = []
    at_join: list[str] = []

    def build(*arguments: Any, **_: object) -> None:
        arguments[3](worker_pb2.LoadProgress(phase="group"))
        at_join.extend(received)
        server.stop()
        raise StepFailed("no model")

    monkeypatch.setattr(subject, "build_stage", build)
    assignment = worker_pb2.StageAssignment(instance="demo-1", epoch=1, stages=1)
    request = worker_pb2.LoadRequest(hello=make_hello(), assignment=assignment)

    def load() -> None:
        for message in server.load(request, cast("Any", None)):
            received.append(message.phase)  # noqa: PERF401 - the other thread reads it meanwhile

    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(load)
        server.compute()
        loading.result(60)
    assert at_join == ["group"]
