"""Assignment of MPI ranks to workers before they are loaded."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from mlx_ring.agent.mpi.pmix import COMMON
from mlx_ring.core.environment import inherited_environment
from mlx_ring.core.errors import ConfigError, WorkerStuck
from mlx_ring.host.child import ChildProcess
from mlx_ring.rpc.backends import backend_of, joined_ranks
from mlx_ring.rpc.protos import worker_pb2

_MODULE = "mlx_ring.agent.mpi"
_MPI = "mpi"
_READY_WITHIN_S = 20.0


async def give_places(assignments: Iterable[worker_pb2.StageAssignment], run_dir: Path) -> list[ChildProcess]:
    """Fill in the environment variables of MPI ranks.

    Returns:
        The MPI server processes, one for each group; the caller stops them after the workers.

    Raises:
        ConfigError: Open MPI is not installed.
        WorkerStuck: An MPI server process is not ready in time.
    """
    groups: dict[tuple[tuple[int, int], ...], list[worker_pb2.StageAssignment]] = {}
    for assignment in assignments:
        if joined := joined_ranks(assignment):
            groups.setdefault(tuple(joined), []).append(assignment)
    serving: list[ChildProcess] = []
    try:
        for joined, members in groups.items():
            if backend_of(members[0]) == _MPI:
                serving.append(await _serve(joined, members, run_dir))
    except BaseException:
        await asyncio.gather(*(child.stop() for child in serving))
        raise
    return serving


async def _serve(
    joined: Sequence[tuple[int, int]], members: Sequence[worker_pb2.StageAssignment], run_dir: Path
) -> ChildProcess:
    folder = tempfile.mkdtemp(prefix="mpi-", dir=run_dir)
    socket = f"{folder}/s"
    received: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def receive(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.set_result(await reader.read())
        writer.close()

    async with await asyncio.start_unix_server(receive, socket):
        child = await ChildProcess.start(
            _MODULE,
            ["--ranks", str(len(joined)), "--folder", folder, "--socket", socket],
            name="mpi",
            rank=None,
            environment=inherited_environment(COMMON),
        )
        try:
            places = await _places(child, received)
        except BaseException:
            await child.stop()
            raise
    for member in members:
        place = places[joined.index((member.stage, member.rank))]
        member.group_environment.update({**COMMON, **place})
    return child


async def _places(child: ChildProcess, received: asyncio.Future[bytes]) -> Sequence[Mapping[str, str]]:
    end = asyncio.ensure_future(child.wait())
    await asyncio.wait((received, end), timeout=_READY_WITHIN_S, return_when=asyncio.FIRST_COMPLETED)
    end.cancel()
    if received.done():
        return json.loads(received.result())
    if child.exit_reason:
        raise ConfigError(child.exit_reason.partition(": ")[2] or child.exit_reason)
    raise WorkerStuck(
        f"MPI: the process that assigns the ranks (pid {child.pid}) was not ready within {_READY_WITHIN_S:g} s: see the logs."
    )
