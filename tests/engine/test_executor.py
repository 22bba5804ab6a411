"""Contract of every executor. A new kind is a parameter of the fixture `make_executor`."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

import pytest
from tests.engine.twin import TwinExecutor

from mlx_ring.core.errors import RingError
from mlx_ring.core.types import RankId
from mlx_ring.engine import executor as subject
from mlx_ring.engine.executor import Executor, GrpcExecutor, RankAddress, sampling_ranks
from mlx_ring.rpc.channels import keep_alive, open_aio_channel
from mlx_ring.rpc.hello import make_hello
from mlx_ring.rpc.protos import step_pb2, worker_pb2

MakeExecutor = Callable[[], Executor]
STEPS = 5


def test_streams_of_steps_are_pinged_because_nothing_else_beats_on_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: list[Any] = []
    open_channel = open_aio_channel

    def record(*given: Any, more: Any) -> Any:
        opened.extend(more)
        return open_channel(*given, more=more)

    async def connect() -> None:
        address = RankAddress(RankId(0, 0), "127.0.0.1:1")
        await GrpcExecutor.connect([address], make_hello(), timeout_s=0.01)

    monkeypatch.setattr(subject, "open_aio_channel", record)
    with pytest.raises(RingError):
        asyncio.run(connect())
    assert opened == keep_alive()


@pytest.fixture(params=[lambda: TwinExecutor((1, 2))], ids=["twin"])
def make_executor(request: pytest.FixtureRequest) -> MakeExecutor:
    """Return a function that makes an executor over two stages or more, inside a running event loop."""
    return request.param


class Recorder:
    """Listener that keeps all answers; `complete` is set when every rank has answered every step."""

    def __init__(self, executor: Executor) -> None:
        self.received: list[step_pb2.StepDone] = []
        self.complete = asyncio.Event()
        self.sending = False
        self.has_grammar: list[tuple[RankId, int]] = []
        self.has_fetched: list[tuple[RankId, int, int]] = []
        self.sampling, self.ranks = len(sampling_ranks(executor.ranks)), len(executor.ranks)
        self._expected = STEPS * len(executor.ranks)

    def answered(self, done: step_pb2.StepDone) -> None:
        assert not self.sending
        self.received.append(done)
        if len(self.received) == self._expected:
            self.complete.set()

    def prepared(self, rank: RankId, prepared: worker_pb2.GrammarPrepared) -> None:
        assert not self.sending
        self.has_grammar.append((rank, prepared.id))
        if len(self.has_grammar) == self.sampling:
            self.complete.set()

    def fetched(self, rank: RankId, fetched: worker_pb2.KvFetched) -> None:
        assert not self.sending
        self.has_fetched.append((rank, fetched.id, fetched.blocks))
        if len(self.has_fetched) == self.ranks:
            self.complete.set()

    def failed(self, error: RingError) -> None:
        raise error


def record_answers(make_executor: MakeExecutor) -> tuple[Executor, list[step_pb2.StepDone]]:
    """Return the executor and all its answers to a few steps that only reset."""

    async def run() -> tuple[Executor, list[step_pb2.StepDone]]:
        executor = make_executor()
        recorder = Recorder(executor)
        executor.set_listener(recorder)
        reset = step_pb2.CacheOperation(reset=step_pb2.Reset())
        recorder.sending = True
        for number in range(1, STEPS + 1):
            executor.send(step_pb2.Step(instance="demo", epoch=1, step=number, operations=[reset]))
        recorder.sending = False
        await recorder.complete.wait()
        return executor, recorder.received

    return asyncio.run(run())


def test_every_rank_answers_every_step_once(make_executor: MakeExecutor) -> None:
    executor, received = record_answers(make_executor)
    answers = Counter((done.step, RankId(done.stage, done.rank)) for done in received)
    assert answers == {(step, rank): 1 for step in range(1, STEPS + 1) for rank in executor.ranks}


def test_each_rank_answers_in_stream_order(make_executor: MakeExecutor) -> None:
    executor, received = record_answers(make_executor)
    for rank in executor.ranks:
        steps = [done.step for done in received if (done.stage, done.rank) == rank]
        assert steps == list(range(1, STEPS + 1))


def test_an_answer_names_its_instance_and_epoch(make_executor: MakeExecutor) -> None:
    _, received = record_answers(make_executor)
    assert {(done.instance, done.epoch) for done in received} == {("demo", 1)}


def test_every_rank_answers_a_fetch_of_what_no_disk_has(make_executor: MakeExecutor) -> None:
    async def run() -> tuple[Executor, Recorder]:
        executor = make_executor()
        recorder = Recorder(executor)
        executor.set_listener(recorder)
        recorder.sending = True
        blocks = step_pb2.KvBlocks(block_tokens=4, digests=[b"one", b"two"])
        executor.fetch_kv(worker_pb2.FetchKv(id=7, blocks=blocks))
        recorder.sending = False
        await recorder.complete.wait()
        return executor, recorder

    executor, recorder = asyncio.run(run())
    assert sorted(recorder.has_fetched) == [(rank, 7, 0) for rank in executor.ranks]


def test_ranks_are_in_order_of_stage_and_rank(make_executor: MakeExecutor) -> None:
    executor, _ = record_answers(make_executor)
    assert list(executor.ranks) == sorted(executor.ranks)
    assert executor.ranks[0] == RankId(0, 0)


def test_all_and_only_sampling_ranks_prepare_a_grammar(make_executor: MakeExecutor) -> None:
    async def run() -> tuple[Executor, Recorder]:
        executor = make_executor()
        recorder = Recorder(executor)
        executor.set_listener(recorder)
        recorder.sending = True
        executor.prepare(worker_pb2.PrepareGrammar(id=7, grammar=step_pb2.Grammar(kind="regex", text="a")))
        recorder.sending = False
        await recorder.complete.wait()
        executor.drop_grammar(7)
        return executor, recorder

    executor, recorder = asyncio.run(run())
    last = max(rank.stage for rank in executor.ranks)
    assert sorted(recorder.has_grammar) == [(rank, 7) for rank in executor.ranks if rank.stage == last]


def test_a_connection_attempt_that_is_cancelled_leaves_none_open(monkeypatch: pytest.MonkeyPatch) -> None:
    greeting, ended = asyncio.Event(), list[str]()

    class Call:
        async def write(self, _message: bytes) -> None:
            greeting.set()
            await asyncio.get_running_loop().create_future()

        def cancel(self) -> None:
            ended.append("call")

    class Channel:
        async def close(self) -> None:
            ended.append("channel")

    def open_stream(address: RankAddress, _trust: object) -> Any:
        return subject._RankStream(address.place, "worker", "", cast("Any", Channel()), cast("Any", Call()))  # pyright: ignore[reportPrivateUsage] - a stream without a worker

    async def run() -> None:
        connecting = asyncio.create_task(
            GrpcExecutor.connect([RankAddress(RankId(0, 0), "unix:w")], make_hello())
        )
        await greeting.wait()
        connecting.cancel()
        await asyncio.wait((connecting,))

    monkeypatch.setattr(subject, "_open", open_stream)
    asyncio.run(run())
    assert ended == ["call", "channel"]
