"""Whose activations a worker takes: those of the stage before it, and of nobody else."""

# That a worker has its stage shows only inside; loading one would take a model.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from typing import Any, cast

import pytest

from mlx_ring.rpc.frames import Frame
from mlx_ring.rpc.hello import make_hello
from mlx_ring.rpc.links import Inbox, LinkKey
from mlx_ring.rpc.protos import hello_pb2, worker_pb2
from mlx_ring.worker.front import WorkerFront, WorkerIdentity

NEXT = LinkKey("demo-1", 1, 1)


class _Local:
    """A call over a Unix socket."""

    def peer(self) -> str:
        return "unix:/run/worker"

    def cancel(self) -> None:
        """It is being ended anyway."""


def assigned(stage: int) -> tuple[WorkerFront, Inbox]:
    """A worker that is to hold this stage of three, and where its activations arrive."""
    front = WorkerFront(WorkerIdentity("here", stage, 0, "none"))
    assignment = worker_pb2.StageAssignment(instance="demo-1", epoch=1, stage=stage, stages=3)
    inbox = front._assign(worker_pb2.LoadRequest(hello=make_hello(), assignment=assignment))
    return front, inbox


def link(front: WorkerFront, *frames: Frame) -> worker_pb2.FrameAccepted:
    """Its first answer; the link is then closed."""
    (first,) = front.link(iter(frames), cast("Any", _Local()))
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
    front, inbox = assigned(stage)
    assert link(front, *frames).HasField("failure")
    assert not inbox.holds(NEXT)


@pytest.mark.parametrize(("stage", "before"), [(0, 2), (1, 0), (2, 1)])
def test_the_stage_before_is_taken_and_its_end_is_noticed(stage: int, before: int) -> None:
    front, inbox = assigned(stage)
    assert link(front, greeting(instance="demo-1", stage=before)).HasField("hello")
    assert inbox.holds(NEXT)
