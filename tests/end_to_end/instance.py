"""A real instance for tests: an agent process, its workers, and an engine over them; no HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from tests.default_settings import agent_settings, make_policy

from mlx_ring.cluster.agent_link import AgentLink, Source
from mlx_ring.cluster.layer_split import even_split
from mlx_ring.core.engine_stats import BLOCK, Policy
from mlx_ring.core.environment import inherited_environment
from mlx_ring.core.errors import WorkerStuck
from mlx_ring.core.generation import GenerateRequest
from mlx_ring.core.types import RankId, SamplingParams
from mlx_ring.engine.engine import Engine
from mlx_ring.engine.executor import GrpcExecutor, RankAddress
from mlx_ring.engine.kv_budget import RankKv
from mlx_ring.engine.sequence import Limits
from mlx_ring.engine.streams import Vocabulary
from mlx_ring.host.child import ChildProcess
from mlx_ring.host.process import SIGNAL
from mlx_ring.models.model_folder import ModelFolder, read_model_folder
from mlx_ring.rpc.backends import joined_ranks
from mlx_ring.rpc.channels import open_aio_channel
from mlx_ring.rpc.hello import make_hello
from mlx_ring.rpc.methods import STATUS
from mlx_ring.rpc.protos import worker_pb2
from mlx_ring.settings.process_settings import as_arguments

_ROOMY = 4096
_HANGS_S, _LOOK_S = 90.0, 1.0
"""Without an answer that takes milliseconds; how often that is looked at."""
_LONGEST_ANSWER_S = 300.0
"""Among others, on a machine that is busy with other things."""
NO_TEXT = Vocabulary(decode=lambda _tokens: "", special=frozenset(), size=1 << 30)
"""Tests that compare tokens need no text."""


def assignments(
    folder: ModelFolder,
    stages: int,
    dtype: str,
    kv_bits: int = 0,
    shares: Sequence[float] = (1.0,),
    link: str = "grpc",
    backend: str = "",
) -> list[worker_pb2.StageAssignment]:
    return [
        worker_pb2.StageAssignment(
            instance="test",
            epoch=1,
            stage=stage,
            stages=stages,
            rank=rank,
            tp_size=len(shares),
            shares=shares,
            first_layer=layers.start,
            end_layer=layers.end,
            dtype=dtype,
            model_digest=folder.digest,
            plan_digest=f"{stages} stages",
            max_model_len=folder.context_length,
            kv_bits=kv_bits,
            link=link,
            backend=backend,
        )
        for stage, layers in enumerate(even_split(folder.num_layers, stages))
        for rank in range(len(shares))
    ]


@asynccontextmanager
async def running_agent(log_dir: Path) -> AsyncGenerator[tuple[ChildProcess, str]]:
    """Run an agent process, and give its address. Its sockets' folder is short enough for any system."""
    run_dir = Path(tempfile.mkdtemp(prefix="ring-"))
    arguments = ["--run-dir", str(run_dir), "--node", "test", *as_arguments(agent_settings(log_dir))]
    agent = await ChildProcess.start(
        "mlx_ring.agent", arguments, name="agent", rank=None, environment=inherited_environment({})
    )
    try:
        yield agent, f"unix:{run_dir}/agent.sock"
    finally:
        await agent.stop()
        shutil.rmtree(run_dir, ignore_errors=True)


async def start_workers(
    address: str,
    folder: ModelFolder,
    stages: int,
    dtype: str = "float32",
    kv_bits: int = 0,
    shares: Sequence[float] = (1.0,),
    link: str = "grpc",
    backend: str = "",
) -> dict[RankId, tuple[str, int]]:
    """Have the agent load the model, and return each rank's address and process id."""
    agent = AgentLink(open_aio_channel(address), "the agent")
    try:
        hello = make_hello(model_digest=folder.digest, plan_digest=f"{stages} stages")
        wanted = assignments(folder, stages, dtype, kv_bits, shares, link, backend)
        workers = await agent.start(hello, wanted)
        ports = {(worker.stage, worker.rank): worker.group_port for worker in workers}
        for assignment in wanted:
            assignment.group.extend(f"127.0.0.1:{ports[place]}" for place in joined_ranks(assignment))
        await agent.load(hello, Source(str(folder.path)), wanted, lambda _progress: None)
    finally:
        await agent.close()
    return {RankId(worker.stage, worker.rank): (worker.address, worker.pid) for worker in workers}


@asynccontextmanager
async def running_engine(
    path: Path,
    stages: int,
    log_dir: Path,
    *,
    max_num_seqs: int = 16,
    dtype: str = "float32",
    policy: Policy | None = None,
    kv_blocks: int | None = None,
    kv_bits: int = 0,
    shares: Sequence[float] = (1.0,),
    link: str = "grpc",
    backend: str = "",
) -> AsyncGenerator[tuple[Engine, list[int]]]:
    """Run an engine over real worker processes, and give their process ids in order of stages and ranks.

    With `kv_blocks` every worker has KV memory for so many blocks of tokens.
    """
    folder = read_model_folder(path)
    limits = Limits(folder.context_length, folder.vocab_size, folder.eos_token_ids)
    async with running_agent(log_dir) as (agent, address):
        async with _report_stacks_if_stuck([agent.pid]):
            workers = await start_workers(address, folder, stages, dtype, kv_bits, shares, link, backend)
            pids = [pid for _, pid in workers.values()]
            executor = await GrpcExecutor.connect(
                [RankAddress(rank, address) for rank, (address, _) in workers.items()],
                make_hello(
                    model_digest=folder.digest, plan_digest=f"{stages} stages", fencing_id=os.getpid()
                ),
            )
            addresses = {rank: address for rank, (address, _) in workers.items()}
            kv = await _kv_of(addresses, kv_blocks or _ROOMY)
        policy = policy or make_policy(max_num_seqs=max_num_seqs)
        engine = Engine(executor, NO_TEXT, limits, instance="test", epoch=1, policy=policy, kv=kv)
        watching = asyncio.create_task(_watch(engine, [agent.pid, *pids]), name="watch")
        try:
            yield engine, pids
        finally:
            watching.cancel()
            await engine.close()
            await executor.close()


@asynccontextmanager
async def _report_stacks_if_stuck(pids: Sequence[int]) -> AsyncGenerator[None]:
    """Fail after far too long a time, and let the processes print their stacks."""
    try:
        async with asyncio.timeout(_HANGS_S):
            yield
    except TimeoutError:
        await _print_stacks(pids)
        raise


async def _watch(engine: Engine, pids: Sequence[int]) -> None:
    """Fail the engine if a step stays unanswered too long, and print the stacks and the state of the engine."""
    while True:
        await asyncio.sleep(_LOOK_S)
        owed = engine.oldest_unanswered()
        if owed is not None and owed.waited_s > _HANGS_S:
            await _print_stacks(pids)
            for task in asyncio.all_tasks():
                task.print_stack()
            engine.fail(WorkerStuck(f"{owed}; {engine.stats()}"))


async def _print_stacks(pids: Sequence[int]) -> None:
    """Make these processes print their stacks to the output of the agent, which this process passes on to stderr."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, SIGNAL)
    await asyncio.sleep(_LOOK_S)


async def _kv_of(workers: dict[RankId, str], blocks: int) -> dict[RankId, RankKv]:
    """Ask each worker about its KV, and return that with a budget of so many blocks."""
    kv: dict[RankId, RankKv] = {}
    for rank, address in workers.items():
        async with open_aio_channel(address) as channel:
            status = await STATUS.aio_unary_unary(channel)(worker_pb2.StatusRequest())
        traits = status.kv
        limit = blocks * (BLOCK * traits.bytes_per_token + traits.bytes_per_sequence)
        kv[rank] = RankKv(
            limit,
            traits.bytes_per_token,
            traits.bytes_per_sequence,
            traits.recurrent,
            traits.slack,
            traits.exact_length,
        )
    return kv


def request(prompt: Sequence[int], count: int, sampling: SamplingParams | None = None) -> GenerateRequest:
    """Request exactly `count` tokens, also past the end of an answer."""
    given = replace(sampling or SamplingParams(), max_tokens=count, ignore_eos=True)
    return GenerateRequest(request_id="test", prompt_tokens=tuple(prompt), sampling=given)


async def generate(
    engine: Engine, prompt: Sequence[int], count: int, sampling: SamplingParams | None = None
) -> list[int]:
    """Return the whole answer to `request`."""
    tokens: list[int] = []
    try:
        async with asyncio.timeout(_LONGEST_ANSWER_S):
            async for delta in engine.submit(request(prompt, count, sampling)):
                tokens += delta.token_ids
    except TimeoutError as error:
        error.add_note(
            f"{len(tokens)} of {count} tokens came; {engine.oldest_unanswered()}; {engine.stats()}"
        )
        raise
    return tokens
