"""A real agent with real workers, called as a head calls it."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil
import pytest
from tests.default_settings import agent_settings
from tests.eventually import eventually

from mlx_ring.cluster.layer_split import Cut, even_split, make_assignments
from mlx_ring.core.environment import inherited_environment
from mlx_ring.host.child import ChildProcess
from mlx_ring.models.model_folder import read_model_folder
from mlx_ring.rpc.channels import open_aio_channel
from mlx_ring.rpc.hello import make_hello
from mlx_ring.rpc.methods import LOAD_STAGES, RELINK_WORKERS, START, STOP, WATCH
from mlx_ring.rpc.protos import agent_pb2, hello_pb2, worker_pb2
from mlx_ring.settings.process_settings import as_arguments

WAIT_S = 90.0


@dataclass(frozen=True, slots=True)
class Agent:
    """An agent process and a channel to it."""

    child: ChildProcess
    channel: grpc.aio.Channel
    run_dir: Path

    async def start(self, request: agent_pb2.LoadStagesRequest) -> agent_pb2.StartReply:
        """Start its workers, without loading anything."""
        start = agent_pb2.StartRequest(hello=request.hello, assignments=request.assignments)
        return await START.aio_unary_unary(self.channel)(start, wait_for_ready=True)

    async def load(self, request: agent_pb2.LoadStagesRequest) -> list[agent_pb2.StageProgress]:
        return [progress async for progress in LOAD_STAGES.aio_unary_stream(self.channel)(request)]

    async def start_all(self, request: agent_pb2.LoadStagesRequest) -> list[agent_pb2.StageProgress]:
        """Start its workers, and load their stages."""
        reply = await self.start(request)
        assert not reply.HasField("failure"), reply.failure.message
        return await self.load(request)

    async def watch(self) -> AsyncGenerator[agent_pb2.AgentEvent]:
        """Yield its events. Heartbeats are an hour apart, so only a change causes another one."""
        request = agent_pb2.WatchRequest(hello=make_hello(), heartbeat_s=3600.0)
        async for event in WATCH.aio_unary_stream(self.channel)(request, wait_for_ready=True):
            yield event

    async def stop(self, instance: str = "", hello: hello_pb2.Hello | None = None) -> int:
        request = agent_pb2.StopRequest(hello=hello, instance=instance)
        return (await STOP.aio_unary_unary(self.channel)(request)).stopped

    async def relink(
        self,
        hello: hello_pb2.Hello,
        *assignments: worker_pb2.StageAssignment,
        commit: bool = False,
        pids: Sequence[int] = (),
        leaves_others: bool = False,
    ) -> str:
        """Prepare or link workers; return the kind of the failure, empty without one."""
        request = agent_pb2.RelinkWorkersRequest(
            hello=hello, assignments=assignments, commit=commit, pids=pids, leaves_others=leaves_others
        )
        return (await RELINK_WORKERS.aio_unary_unary(self.channel)(request)).failure.kind

    def workers(self) -> list[psutil.Process]:
        return psutil.Process(self.child.pid).children(recursive=True)


@asynccontextmanager
async def running_agent(folder: Path, **changes: object) -> AsyncGenerator[Agent]:
    run_dir = Path(tempfile.mkdtemp(prefix="ring-"))
    child = await ChildProcess.start(
        "mlx_ring.agent",
        [
            *("--run-dir", str(run_dir), "--node", "here"),
            *as_arguments(agent_settings(folder / "logs", **changes)),
        ],
        name="agent",
        rank=None,
        environment=inherited_environment({}),
    )
    channel = open_aio_channel(f"unix:{run_dir / 'agent.sock'}")
    try:
        yield Agent(child, channel, run_dir)
    finally:
        await channel.close()
        await child.stop(10.0)
        shutil.rmtree(run_dir, ignore_errors=True)


def with_agent(folder: Path, use: Callable[[Agent], Awaitable[None]], **changes: object) -> None:
    async def run() -> None:
        async with asyncio.timeout(WAIT_S), running_agent(folder, **changes) as agent:
            await use(agent)

    asyncio.run(run())


def load_request(
    model: Path, stages: int = 2, instance: str = "one", *, epoch: int = 1, head: int = 0
) -> agent_pb2.LoadStagesRequest:
    folder = read_model_folder(model)
    ranges = even_split(folder.num_layers, stages)
    return agent_pb2.LoadStagesRequest(
        hello=make_hello(model_digest=folder.digest, fencing_id=head),
        model_path=str(model),
        assignments=make_assignments(
            Cut.alike(ranges),
            instance=instance,
            epoch=epoch,
            dtype="auto",
            model_digest=folder.digest,
            max_model_len=64,
        ),
    )


def all_ended(processes: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=30)
    return not alive


def test_load_reports_each_stage_until_it_is_ready_and_stop_ends_the_workers(
    tiny_model: Path, tmp_path: Path
) -> None:
    async def use(agent: Agent) -> None:
        started = (await agent.start(load_request(tiny_model))).workers
        assert [worker.stage for worker in started] == [0, 1]
        assert len({worker.address for worker in started}) == 2
        assert {worker.port for worker in started} == {0}, "no other machine can connect"
        reports = await agent.load(load_request(tiny_model))
        assert {report.stage for report in reports if report.progress.ready} == {0, 1}
        workers = agent.workers()
        assert {worker.pid for worker in workers} == {worker.pid for worker in started}
        assert await agent.stop("another") == 0
        assert await agent.stop("one") == 2
        assert all_ended(workers)
        assert agent.child.exit_reason == ""
        assert [path.name for path in agent.run_dir.iterdir()] == ["agent.sock"]

    with_agent(tmp_path, use)


def test_stop_without_an_instance_ends_the_agent_and_removes_its_folder(
    tiny_model: Path, tmp_path: Path
) -> None:
    async def use(agent: Agent) -> None:
        await agent.start_all(load_request(tiny_model, stages=1))
        workers = agent.workers()
        assert await agent.stop() == 1
        assert await agent.child.wait() == "exit code 0"
        assert all_ended(workers)
        assert not agent.run_dir.exists()

    with_agent(tmp_path, use)


def test_the_end_of_a_worker_is_reported_with_its_reason_and_the_others_live(
    tiny_model: Path, tmp_path: Path
) -> None:
    async def use(agent: Agent) -> None:
        victim = (await agent.start(load_request(tiny_model))).workers[1]
        await agent.load(load_request(tiny_model))
        events = aiter(agent.watch())
        first = await anext(events)
        while {worker.status.phase for worker in first.workers} != {"ready"}:
            first = await anext(events)  # the agent has asked them before they were loaded
        assert [worker.alive for worker in first.workers] == [True, True]
        assert first.memory_bytes > first.memory_free_bytes > 0
        os.kill(victim.pid, signal.SIGKILL)
        event = await anext(events)
        assert [(worker.stage, worker.alive, worker.exit_reason) for worker in event.workers] == [
            (0, True, ""),
            (1, False, "ended by signal 9 (SIGKILL)"),
        ]

    with_agent(tmp_path, use)


def test_a_model_that_cannot_be_loaded_is_a_failure_and_its_workers_end(
    tiny_model: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny_model, broken)
    request = load_request(broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])

    async def use(agent: Agent) -> None:
        reports = await agent.start_all(request)
        assert reports[-1].progress.failure.kind == "ModelCorrupt"
        assert "truncated" in reports[-1].progress.failure.message
        assert agent.workers() == []
        again = await agent.start_all(load_request(tiny_model, stages=1))
        assert again[-1].progress.ready

    with_agent(tmp_path, use)


@pytest.mark.parametrize("fault", ["version", "twice", "nothing"])
def test_an_invalid_start_is_refused(fault: str, tiny_model: Path, tmp_path: Path) -> None:
    async def use(agent: Agent) -> None:
        request = load_request(tiny_model, stages=1)
        if fault == "version":
            request.hello.mlx_ring = "0.0.0"
        elif fault == "nothing":
            del request.assignments[:]
        else:
            await agent.start_all(request)
        reply = await agent.start(request)
        expected = {"version": "VersionMismatch", "twice": "ProtocolError", "nothing": "ProtocolError"}
        assert reply.failure.kind == expected[fault]

    with_agent(tmp_path, use)


def test_only_stages_that_were_started_are_loaded(tiny_model: Path, tmp_path: Path) -> None:
    async def use(agent: Agent) -> None:
        await agent.start(load_request(tiny_model, stages=2))
        (report,) = await agent.load(load_request(tiny_model, stages=1))
        assert report.progress.failure.kind == "ProtocolError"
        assert "started here for stages and ranks [(0, 0), (1, 0)]" in report.progress.failure.message
        assert (await agent.load(load_request(tiny_model)))[-1].progress.ready

    with_agent(tmp_path, use)


def test_workers_end_if_the_head_disconnects_while_they_load(tiny_model: Path, tmp_path: Path) -> None:
    async def use(agent: Agent) -> None:
        events = aiter(agent.watch())
        await anext(events)
        call = asyncio.ensure_future(agent.start_all(load_request(tiny_model)))
        while len((await anext(events)).workers) < 2:
            pass
        workers = agent.workers()
        call.cancel()
        while (await anext(events)).workers:
            pass
        assert all_ended(workers)

    with_agent(tmp_path, use)
    assert " ERROR " not in (tmp_path / "logs" / "agent.log").read_text()


def test_requests_that_arrive_after_a_patch_or_from_an_older_head_change_nothing(
    tiny_model: Path, tmp_path: Path
) -> None:
    async def use(agent: Agent) -> None:
        first = (await agent.start(load_request(tiny_model, head=2))).workers
        assert (await agent.load(load_request(tiny_model, head=2)))[-1].progress.ready
        os.kill(first[1].pid, signal.SIGKILL)
        stay, new = (request := load_request(tiny_model, epoch=2, head=2)).assignments
        older, ours = make_hello(epoch=1, fencing_id=1), make_hello(epoch=1, fencing_id=2)
        for commit in (False, True):
            assert await agent.relink(older, stay, commit=commit) == "StaleMessage"
        assert await agent.relink(ours, stay) == ""
        new.first_address = first[0].address
        del request.assignments[0]
        (replacement,) = (await agent.start(request)).workers
        stay.next_address = replacement.address
        assert await agent.relink(ours, stay) == "StaleMessage", "the first phase has passed"
        assert (await agent.load(request))[-1].progress.ready
        assert await agent.relink(ours, stay, commit=True) == ""
        assert await agent.stop("one", ours) == 0, "the epoch before has no workers here"
        assert await agent.stop("one", make_hello(epoch=9, fencing_id=1)) == 0
        late = load_request(tiny_model, stages=3, head=2)
        del late.assignments[:2]
        assert (await agent.start(late)).failure.kind == "StaleMessage"
        assert {worker.pid for worker in agent.workers()} == {first[0].pid, replacement.pid}
        assert await agent.stop("one", make_hello(epoch=2, fencing_id=2)) == 2

    with_agent(tmp_path, use)


def test_a_worker_that_may_answer_again_is_left_beside_the_one_in_its_place(
    tiny_model: Path, tmp_path: Path
) -> None:
    async def use(agent: Agent) -> None:
        first = (await agent.start(load_request(tiny_model))).workers
        assert (await agent.load(load_request(tiny_model)))[-1].progress.ready
        stay, _ = (request := load_request(tiny_model, epoch=2)).assignments
        assert await agent.relink(make_hello(), stay, leaves_others=True) == ""
        del request.assignments[0]
        request.assignments[0].first_address = first[0].address
        (replacement,) = (await agent.start(request)).workers
        assert (await agent.load(request))[-1].progress.ready
        assert {worker.pid for worker in agent.workers()} == {*(each.pid for each in first), replacement.pid}
        back = load_request(tiny_model, epoch=3).assignments
        pids = [each.pid for each in first]
        back[0].next_address, back[1].first_address = first[1].address, first[0].address
        for commit in (False, True):
            relinked = await agent.relink(make_hello(), *back, commit=commit, pids=pids, leaves_others=True)
            assert relinked == ""
        assert await agent.stop("one", make_hello(epoch=2)) == 1
        assert {worker.pid for worker in agent.workers()} == set(pids)

    with_agent(tmp_path, use)


def test_a_failed_load_ends_no_worker_that_stays(tiny_model: Path, tmp_path: Path) -> None:
    async def use(agent: Agent) -> None:
        first = (await agent.start(load_request(tiny_model))).workers
        assert (await agent.load(load_request(tiny_model)))[-1].progress.ready
        os.kill(first[1].pid, signal.SIGKILL)
        stay, _ = (request := load_request(tiny_model, epoch=2)).assignments
        assert await agent.relink(make_hello(), stay) == ""
        del request.assignments[0]
        assert not (await agent.start(request)).HasField("failure")
        request.model_path = str(tmp_path / "nothing")
        assert (await agent.load(request))[-1].progress.HasField("failure")
        assert [worker.pid for worker in agent.workers()] == [first[0].pid]

    with_agent(tmp_path, use)


def inherited_by(process: psutil.Process) -> tuple[object, ...]:
    """Return what a process has from its parent, and whether it leads a session of its own."""
    scheduling = os.sched_getscheduler(process.pid) if hasattr(os, "sched_getscheduler") else 0
    leads = os.getsid(process.pid) == process.pid
    return process.environ(), process.cwd(), process.nice(), scheduling, leads


def test_a_spare_worker_takes_the_place_of_a_lost_one(tiny_model: Path, tmp_path: Path) -> None:
    async def use(agent: Agent) -> None:
        first = (await agent.start(load_request(tiny_model))).workers
        assert (await agent.load(load_request(tiny_model)))[-1].progress.ready
        before = {worker.pid: inherited_by(worker) for worker in agent.workers()}
        log = tmp_path / "logs" / "agent.log"
        await asyncio.to_thread(eventually, log.read_text, lambda text: "A spare worker waits" in text)
        (spare,) = (worker for worker in agent.workers() if worker.pid not in before)
        os.kill(first[1].pid, signal.SIGKILL)
        stay, _ = (request := load_request(tiny_model, epoch=2)).assignments
        assert await agent.relink(make_hello(), stay) == ""
        del request.assignments[0]
        request.assignments[0].first_address = first[0].address
        (replacement,) = (await agent.start(request)).workers
        assert replacement.pid == spare.pid
        assert (await agent.load(request))[-1].progress.ready
        stay.next_address = replacement.address
        assert await agent.relink(make_hello(), stay, commit=True) == ""
        assert inherited_by(spare) == before[first[0].pid]
        logged = (tmp_path / "logs" / "worker-1-0.log").read_text()
        assert logged.count(": Ready: BLAS ") == 2
        event = await anext(aiter(agent.watch()))
        assert [worker.pid for worker in event.workers] == [first[0].pid, spare.pid]
        await asyncio.to_thread(eventually, agent.workers, lambda workers: len(workers) == 3)
        ours = agent.workers()
        os.kill(agent.child.pid, signal.SIGKILL)
        assert all_ended(ours)

    with_agent(tmp_path, use, spare_worker="on")


def test_an_agent_ends_its_workers_on_sigterm(tiny_model: Path, tmp_path: Path) -> None:
    async def use(agent: Agent) -> None:
        await agent.start_all(load_request(tiny_model))
        workers = agent.workers()
        os.kill(agent.child.pid, signal.SIGTERM)
        assert await agent.child.wait() == "exit code 0"
        assert not any(worker.is_running() for worker in workers)

    with_agent(tmp_path, use)


def test_signals_that_arrive_while_an_agent_ends_change_nothing(tmp_path: Path) -> None:
    async def use(agent: Agent) -> None:
        await agent.channel.channel_ready()
        ending = asyncio.ensure_future(agent.child.wait())
        while not ending.done():
            with suppress(ProcessLookupError):
                os.kill(agent.child.pid, signal.SIGTERM)
            await asyncio.sleep(0.001)
        assert await ending == "exit code 0"
        assert not agent.run_dir.exists()

    with_agent(tmp_path, use)
