"""Whose activations a worker takes: those of the stage before it, and of nobody else."""

# That a worker has its stage shows only inside; loading one would take a model.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from tests.machines import node_credentials

from mlx_ring.cluster.security.authority import Authority
from mlx_ring.rpc.frames import Frame
from mlx_ring.rpc.hello import make_hello
from mlx_ring.rpc.links import Inbox, LinkKey
from mlx_ring.rpc.protos import hello_pb2, worker_pb2
from mlx_ring.worker.server import WorkerIdentity, WorkerServer

NEXT = LinkKey("demo-1", 1, 1)


class _Local:
    """A call over a Unix socket."""

    def peer(self) -> str:
        return "unix:/run/worker"

    def cancel(self) -> None:
        """Do nothing: the call ends anyway."""


class _From:
    """A call from another machine."""

    def __init__(self, authority: Authority, node: str) -> None:
        self._certificate = node_credentials(authority, node).certificate

    def peer(self) -> str:
        return "ipv4:10.0.0.9:40000"

    def auth_context(self) -> Mapping[str, Sequence[bytes]]:
        return {"x509_pem_cert": [self._certificate]}

    def cancel(self) -> None:
        """Do nothing: the call ends anyway."""


def assigned(stage: int, previous_node: str = "") -> tuple[WorkerServer, Inbox]:
    """Return a worker for this stage of three, and the inbox for its activations."""
    server = WorkerServer(WorkerIdentity("here", stage, 0, "none"))
    assignment = worker_pb2.StageAssignment(
        instance="demo-1", epoch=1, stage=stage, stages=3, previous_node=previous_node
    )
    inbox = server._assign(worker_pb2.LoadRequest(hello=make_hello(), assignment=assignment))
    return server, inbox


def link(server: WorkerServer, *frames: Frame, context: object = None) -> worker_pb2.FrameAccepted:
    """Return its first answer; the link is then closed."""
    (first,) = server.link(iter(frames), cast("Any", context or _Local()))
    return first


def greeting(**said: Any) -> Frame:
    return Frame(worker_pb2.FrameHeader(hello=make_hello(**said)))


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
def test_a_link_of_anybody_but_the_stage_before_is_refused_and_breaks_nothing(
    stage: int, frames: tuple[Frame, ...]
) -> None:
    server, inbox = assigned(stage)
    assert link(server, *frames).HasField("failure")
    assert not inbox.holds(NEXT)


@pytest.mark.parametrize(("stage", "before"), [(0, 2), (1, 0), (2, 1)])
def test_the_stage_before_is_taken_and_its_end_is_noticed(stage: int, before: int) -> None:
    server, inbox = assigned(stage)
    assert link(server, greeting(instance="demo-1", stage=before)).HasField("hello")
    assert inbox.holds(NEXT)


def test_a_link_is_taken_from_the_node_that_has_the_stage_before_and_from_no_other_member(
    tmp_path: Path,
) -> None:
    authority = Authority.open(tmp_path)
    server, inbox = assigned(1, "mini-1")
    for node, greeted_as in (("mini-2", "mini-2"), ("mini-2", "mini-1"), ("mini-1", "mini-2")):
        greets = greeting(instance="demo-1", stage=0, node=greeted_as)
        assert link(server, greets, context=_From(authority, node)).failure.kind == "PeerRefused"
    assert link(server, greeting(instance="demo-1", stage=0, node="mini-1")).failure.kind == "PeerRefused"
    assert not inbox.holds(NEXT)
    greets = greeting(instance="demo-1", stage=0, node="mini-1")
    assert link(server, greets, context=_From(authority, "mini-1")).HasField("hello")


def test_nobody_from_elsewhere_links_where_the_stage_before_is_on_this_machine(tmp_path: Path) -> None:
    server, _ = assigned(1)
    greets = greeting(instance="demo-1", stage=0, node="mini-1")
    refused = link(server, greets, context=_From(Authority.open(tmp_path), "mini-1"))
    assert refused.failure.message == "mini-1 linked as the stage before, which is on this machine."
