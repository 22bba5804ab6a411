"""Ends of a link over a collective, which stay synchronized even if steps fail."""

from __future__ import annotations

import os
import queue
import signal
from collections.abc import Callable, Iterator

import pytest
from tests.worker.collective.in_process import FORM, InProcessTransport
from tests.worker.collective.pairs import KINDS, Pair, joined_pair
from tests.worker.in_process_link import InProcessLink
from tests.worker.stages import Steps, chunk

from mlx_ring.core.errors import StepFailed, WorkerLost
from mlx_ring.rpc.failures import error_to_failure
from mlx_ring.rpc.links import Inbox, LinkKey, WireTensor
from mlx_ring.rpc.protos import step_pb2
from mlx_ring.worker.collective.link_ends import CollectiveReceiver, CollectiveSender
from mlx_ring.worker.inputs import step_key

WHOLE = WireTensor("float32", (2, 3), bytes(range(24)))
KEY = LinkKey("test", 1, 1)
FAILURE = error_to_failure(StepFailed("matmul went wrong"))


class Link:
    """Both ends of a link, over a twin of a collective."""

    def __init__(self) -> None:
        self.inbox = Inbox("test", 1)
        self.transport = InProcessTransport()
        self.errors: queue.SimpleQueue[Exception] = queue.SimpleQueue()
        self.sender = CollectiveSender(self.transport, FORM, InProcessLink(self.inbox), self.errors.put)
        self.receiver = CollectiveReceiver(self.transport, FORM, self.inbox, "stage 0", self.errors.put)
        self._steps = Steps()

    def step(self) -> step_pb2.Step:
        """Announce the next step to both ends."""
        step = self._steps.make(chunk(1, 0, [4, 5]))
        self.sender.expect(step)
        self.receiver.expect(step)
        return step


@pytest.fixture
def link() -> Iterator[Link]:
    link = Link()
    yield link
    link.sender.close()
    link.receiver.close()
    assert link.errors.empty()


def fail_row(link: Link, step: step_pb2.Step) -> None:
    failure = step_pb2.Failure(kind="StepFailed", message="no", sequences=[1])
    link.sender.send(step_key(step), WireTensor("float32", (1, 3), bytes(12), failure=failure))
    message = link.inbox.recv(step_key(step))
    assert message.failure == failure
    assert message.shape == (1, 3)


def fail_step(link: Link, step: step_pb2.Step) -> None:
    link.sender.send_failure(step_key(step), FAILURE)
    with pytest.raises(StepFailed, match="matmul"):
        link.inbox.recv(step_key(step))


def fail_after_sending(link: Link, step: step_pb2.Step) -> None:
    link.sender.send(step_key(step), WHOLE)
    link.sender.send_failure(step_key(step), FAILURE)


def fail_twice(link: Link, step: step_pb2.Step) -> None:
    fail_step(link, step)
    link.sender.send_failure(step_key(step), FAILURE)


@pytest.mark.parametrize("fail", [fail_row, fail_step, fail_after_sending, fail_twice])
def test_the_step_after_a_failed_one_gets_its_own_message(
    link: Link, fail: Callable[[Link, step_pb2.Step], None]
) -> None:
    for _ in range(2):
        fail(link, link.step())
        step = link.step()
        link.sender.send(step_key(step), WHOLE)
        assert bytes(link.inbox.recv(step_key(step)).data) == WHOLE.data


def test_messages_not_received_in_time_are_still_filed(link: Link) -> None:
    first, second = link.step(), link.step()
    for step in (first, second):
        link.sender.send(step_key(step), WHOLE)
    assert bytes(link.inbox.recv(step_key(second)).data) == WHOLE.data


def test_error_ends_waits_and_is_reported() -> None:
    link = Link()
    step = link.step()
    link.transport.fail(RuntimeError("[recv] Socket was closed"))
    with pytest.raises(WorkerLost, match=r"The collective with stage 0 failed: \[recv\] Socket was closed"):
        link.inbox.recv(step_key(step))
    assert "Socket" in str(link.errors.get(timeout=60))
    link.sender.close()


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with joined_pair(request.param) as pair:
        yield pair


LOSSES = [
    pytest.param(kind, victim, marks=[pytest.mark.thorough] if (number + victim) % 2 else [])
    for number, kind in enumerate(kind for kind in KINDS if kind != "mpi")
    for victim in (0, 1)
]
"""Each kind of link and each of its ends; both ends of each kind with `--thorough`.

MPI is left out, because a waiting process learns nothing: its agent ends it.
"""


@pytest.mark.parametrize(("pair", "victim"), LOSSES, indirect=["pair"])
def test_worker_ends_when_its_peer_is_killed(pair: Pair, victim: int) -> None:
    pair.send(KEY, WHOLE)
    pair.inbox.recv(KEY)
    os.kill(pair.pids[victim], signal.SIGKILL)
    assert pair.exit_code_of(victim) == -signal.SIGKILL
    # A socket that no process reads any more still accepts the first messages.
    for step in (2, 3, 4):
        pair.send_to_survivor(1 - victim, LinkKey("test", 1, step), WHOLE)
    assert pair.exit_code_of(1 - victim) == 1
