"""Ranks of a group that are halted: they compute only the steps that another rank has begun."""

# A private method assigns the stage, because loading one takes a model.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.worker.test_server import LocalCall, assign_stage, greet_steps

from mlx_ring.core.errors import NotReady, RingError
from mlx_ring.rpc.hello import make_hello
from mlx_ring.rpc.links import LinkKey, WireTensor
from mlx_ring.rpc.protos import step_pb2, worker_pb2
from mlx_ring.worker import step as step_module


class HaltableRank:
    """Rank of a group at stage 1 that can be halted, and records the steps that it computes."""

    def __init__(self) -> None:
        self.server, self.inbox = assign_stage(1)
        self.computed: list[int] = []
        self.server._runner = cast(
            "Any",
            SimpleNamespace(
                last_step=0, reset=list[object], take=self._take, finish=list[object], spoiled=None
            ),
        )
        self.server._built = cast("Any", SimpleNamespace(disk=None))
        assert not greet_steps(self.server, 1).HasField("failure")
        self.run_job()
        assert self.server._stream is not None
        self.stream = self.server._stream

    def _take(self, step: step_pb2.Step, _arrived_us: int, begin: Callable[[int], None]) -> list[object]:
        with contextlib.suppress(RingError):
            self.inbox.recv(LinkKey("demo-1", 1, step.step))
            begin(step.step)
            self.computed.append(step.step)
        return []

    def run_job(self) -> None:
        self.server._jobs.get()()

    def receive(self, step: int) -> None:
        """Receive the input of a step."""
        self.inbox.put(LinkKey("demo-1", 1, step), WireTensor("float32", (0,), b""))

    def execute(self, step: int) -> None:
        self.server.execute(self.stream, step_pb2.Step(step=step), 0)

    def relinked(self, *, halt: bool, until_step: int = 0) -> worker_pb2.RelinkReply:
        assignment = worker_pb2.StageAssignment(instance="demo-1", epoch=2, stage=1, stages=3)
        request = worker_pb2.RelinkRequest(
            hello=make_hello(fencing_id=1), assignment=assignment, halt=halt, until_step=until_step
        )
        return self.server.relink(request, cast("Any", LocalCall()))

    @contextlib.contextmanager
    def executing(self, step: int) -> Generator[ThreadPoolExecutor]:
        """Execute a step in a thread of two, and halt the rank before the step's input has come.

        Afterwards the rank runs what it was asked meanwhile.
        """
        with ThreadPoolExecutor(2) as threads:
            computing = threads.submit(self.execute, step)
            assert self.relinked(halt=True).begun_step == 0
            yield threads
            computing.result()
            self.run_job()

    def prepared(self, until_step: int) -> str:
        """Prepare it for other neighbours, and return the failure."""
        return self.relinked(halt=False, until_step=until_step).failure.message


def test_a_halted_worker_executes_only_the_steps_that_another_rank_has_begun() -> None:
    rank = HaltableRank()
    for step in range(4, 8):
        rank.receive(step)
    rank.execute(4)
    assert rank.relinked(halt=True).begun_step == 4
    rank.execute(5)
    with ThreadPoolExecutor(1) as threads:
        preparing = threads.submit(rank.prepared, 5)
        # A step that came before the request is still in the queue.
        job = rank.server._jobs.get()
        rank.execute(6)
        job()
        assert preparing.result() == ""
        assert rank.relinked(halt=True).begun_step == 5
        preparing = threads.submit(rank.prepared, 6)
        rank.run_job()
        assert preparing.result() == ""
    assert rank.computed == [4, 5, 6]


@pytest.mark.parametrize("is_held", [False, True])
def test_a_halted_rank_waits_for_input_that_another_rank_has_had(
    monkeypatch: pytest.MonkeyPatch, *, is_held: bool
) -> None:
    monkeypatch.setattr(step_module, "_INPUT_WAIT_S", 60.0)
    rank, released = HaltableRank(), threading.Event()
    release = rank.server._halt.release

    def note(step: int) -> None:
        released.set()
        release(step)

    monkeypatch.setattr(rank.server._halt, "release", note)
    with ThreadPoolExecutor(2) as threads:
        computing = None if is_held else threads.submit(rank.execute, 4)
        assert rank.relinked(halt=True).begun_step == 0
        if is_held:
            rank.execute(4)
        preparing = threads.submit(rank.prepared, 4)
        released.wait()
        rank.receive(4)
        if computing is not None:
            computing.result()
        rank.run_job()
        assert preparing.result() == ""
    assert rank.computed == [4]


def test_a_rank_is_lost_if_input_that_another_rank_has_had_does_not_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step_module, "_INPUT_WAIT_S", 0.01)
    rank = HaltableRank()
    with rank.executing(4) as threads:
        preparing = threads.submit(rank.prepared, 4)
    assert preparing.result() == "The input of step 4, which other ranks have begun, did not arrive."
    assert rank.computed == []


def test_a_rank_begins_no_step_after_it_was_halted_that_no_other_has_begun() -> None:
    rank = HaltableRank()
    with rank.executing(4) as threads:
        rank.receive(4)
        preparing = threads.submit(rank.prepared, 0)
    assert preparing.result() == ""
    assert rank.computed == []


def test_a_halted_rank_that_has_input_ends_its_wait_with_its_worker() -> None:
    rank = HaltableRank()
    rank.relinked(halt=True)
    rank.receive(4)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(rank.server._halt.begin, 4)
        rank.server.stop()
        with pytest.raises(NotReady):
            waiting.result()
