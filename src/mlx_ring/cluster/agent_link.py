"""The head's connection to an agent, local or remote, and the local agent as its child process."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
from google.protobuf.message import DecodeError

from mlx_ring.cluster.membership import SILENCE_S, Reported
from mlx_ring.core.environment import inherited_environment
from mlx_ring.core.errors import GroupStuck, ProtocolError, WorkerLost
from mlx_ring.host.child import ChildProcess
from mlx_ring.host.energy import PARTS, PartEnergy
from mlx_ring.host.interfaces import TrustedInterface
from mlx_ring.host.yielding import Yielding
from mlx_ring.rpc.channels import limit_silence, open_aio_channel
from mlx_ring.rpc.failures import channel_error, failure_to_error
from mlx_ring.rpc.hello import make_hello
from mlx_ring.rpc.methods import LOAD_STAGES, MEASURE_LINK, RELINK_WORKERS, START, STOP, WATCH
from mlx_ring.rpc.protos import agent_pb2, cluster_pb2, hello_pb2, worker_pb2
from mlx_ring.rpc.tls.handshakes import handshake_error
from mlx_ring.settings.config import Settings
from mlx_ring.settings.hostfile import read_launch
from mlx_ring.settings.process_settings import AgentSettings, as_arguments, select_settings

HEARTBEAT_S = 0.5
_RELINK_WAIT_S = 40.0
"""Time for the agent to ask its workers, of which one may compute a long step, and to end those that do not answer."""

_LONGEST_REASON = 200
_LONGEST_PROBLEM = 400

Report = Callable[[agent_pb2.StageProgress], None]
Assignments = Sequence[worker_pb2.StageAssignment]


@dataclass(frozen=True, slots=True)
class WeightsPeer:
    """A node that may serve weights."""

    address: str
    node: str = ""
    """Node whose certificate answers there; empty for the head."""


@dataclass(frozen=True, slots=True)
class Source:
    """Source of a node's model: a folder there, or peers to fetch it from."""

    path: str = ""
    weights: str = ""
    """Digest of the manifest of a model to fetch; empty for a folder."""
    peers: tuple[WeightsPeer, ...] = ()


class AgentLink:
    """A channel to an agent with its RPCs."""

    def __init__(self, channel: grpc.aio.Channel, name: str) -> None:
        """Take the channel, and the agent's name in messages, such as "the agent of mini-7f3a"."""
        self._channel = channel
        self._name = name
        self.is_silent = False
        """True if the agent was lost because it sent nothing for too long."""
        self.on_suspect: Callable[[], object] = bool
        """Callback for its silence, after which it may be lost."""
        self.on_answer: Callable[[], object] = bool
        """Callback for the end of that silence."""
        self.yielding: Yielding | None = None
        """State in the agent's last report if its machine yields to its user."""

    async def start(
        self, hello: hello_pb2.Hello, assignments: Assignments, *, waits: bool = True
    ) -> Sequence[agent_pb2.StartedWorker]:
        """Start a worker for each assignment.

        With `waits`, an agent that cannot be reached may still be starting. Its end is then noticed elsewhere.

        Raises:
            RingError: the agent's failure, after which none of these workers is left.
        """
        request = agent_pb2.StartRequest(hello=hello, assignments=assignments)
        with self._errors():
            reply = await START.aio_unary_unary(self._channel)(request, wait_for_ready=waits)
        if reply.HasField("failure"):
            raise failure_to_error(reply.failure)
        return reply.workers

    async def load(
        self,
        hello: hello_pb2.Hello,
        source: Source,
        assignments: Assignments,
        report: Report,
        *,
        only_fetch: bool = False,
        gain: worker_pb2.LoadRequest.Gain = worker_pb2.LoadRequest.NONE,
        pids: Sequence[int] = (),
    ) -> None:
        """Load the started workers from the folder or the peers of `source`; with `only_fetch`, only fetch the weights.

        With `gain`, the workers with these process ids load what a next plan gives them, and none ends on a failure.

        Raises:
            RingError: a worker's failure, after which none of these workers is left.
        """
        request = agent_pb2.LoadStagesRequest(
            hello=hello,
            model_path=source.path,
            assignments=assignments,
            weights=source.weights,
            peers=[agent_pb2.WeightsPeer(address=peer.address, node=peer.node) for peer in source.peers],
            only_fetch=only_fetch,
            gain=gain,
            pids=pids,
        )
        with self._errors():
            async for progress in LOAD_STAGES.aio_unary_stream(self._channel)(request):
                if progress.progress.HasField("failure"):
                    error = failure_to_error(progress.progress.failure)
                    if isinstance(error, GroupStuck):
                        error.reported_by(progress.stage, progress.rank)
                    raise error
                report(progress)

    async def relink(
        self,
        hello: hello_pb2.Hello,
        assignments: Assignments,
        *,
        commit: bool,
        kept: worker_pb2.KeptKv | None = None,
        pids: Sequence[int] = (),
        leaves_others: bool = False,
        halt: bool = False,
        until_steps: Sequence[int] = (),
    ) -> Sequence[agent_pb2.StartedWorker]:
        """Prepare loaded workers for other neighbours, or with `commit` link them; return those that answered.

        Args:
            hello: the head's greeting.
            assignments: the workers' assignments of the next epoch.
            commit: False for the first phase.
            kept: the KV that they keep, with `commit`.
            pids: their process ids; without any, the places decide.
            leaves_others: True if the first phase does not end the other workers of the instance.
            halt: True if they only begin no further step, before the first phase.
            until_steps: the last step that a rank of the same group has begun, for each assignment.

        Raises:
            RingError: the agent's failure, or with `commit` a worker's.
        """
        request = agent_pb2.RelinkWorkersRequest(
            hello=hello,
            assignments=assignments,
            commit=commit,
            kept=kept,
            pids=pids,
            leaves_others=leaves_others,
            halt=halt,
            until_steps=until_steps,
        )
        with self._errors():
            reply = await RELINK_WORKERS.aio_unary_unary(self._channel)(request, timeout=_RELINK_WAIT_S)
        if reply.HasField("failure"):
            raise failure_to_error(reply.failure)
        return reply.workers

    async def watch(
        self, hello: hello_pb2.Hello, *, waits: bool = True
    ) -> AsyncIterator[agent_pb2.AgentEvent]:
        """Yield the agent's reports about its workers for as long as it runs.

        With `waits`, an agent that cannot be reached may still be starting.

        Raises:
            WorkerLost: the end of the agent.
        """
        request = agent_pb2.WatchRequest(hello=hello, heartbeat_s=HEARTBEAT_S)
        with self._errors():
            async for event in WATCH.aio_unary_stream(self._channel)(request, wait_for_ready=waits):
                self.yielding = yielding_of(event)
                yield event
        raise WorkerLost(f"{self._name.capitalize()} ended its reports.")

    async def stop(self, instance: str, timeout_s: float, hello: hello_pb2.Hello | None = None) -> None:
        """Stop an instance's workers, or without a name all workers and the agent.

        An agent that has ended is ignored, and so is a connection that was closed, which comes after another stop.
        A request may arrive long after this call has ended, when other workers of the instance run there. With the
        greeting of the head, it stops none of a higher epoch, and none of a newer head.
        """
        request = agent_pb2.StopRequest(hello=hello, instance=instance)
        with contextlib.suppress(grpc.RpcError, grpc.aio.UsageError):
            await STOP.aio_unary_unary(self._channel)(request, timeout=timeout_s)

    async def end(self, timeout_s: float) -> None:
        """Stop all workers and the agent itself."""
        with contextlib.suppress(grpc.RpcError, grpc.aio.UsageError):
            await STOP.aio_unary_unary(self._channel)(agent_pb2.StopRequest(end=True), timeout=timeout_s)

    async def look(self, hello: hello_pb2.Hello, timeout_s: float) -> agent_pb2.AgentEvent | None:
        """Return the agent's current state, or None if it does not answer."""
        request = agent_pb2.WatchRequest(hello=hello, heartbeat_s=HEARTBEAT_S)
        try:
            call = WATCH.aio_unary_stream(self._channel)(request, wait_for_ready=True, timeout=timeout_s)
        except grpc.aio.UsageError:  # the channel was closed
            return None
        try:
            async for event in call:
                return event
        except grpc.RpcError:
            return None
        finally:
            call.cancel()
        return None

    async def measure_link(
        self, hello: hello_pb2.Hello, node: str, address: str, max_age_s: float, timeout_s: float
    ) -> agent_pb2.MeasureLinkReply:
        """Let the agent measure the link to another node, unless it did so in the last `max_age_s` seconds.

        Raises:
            RingError: a node out of reach, or an agent that does not answer.
        """
        request = agent_pb2.MeasureLinkRequest(hello=hello, node=node, address=address, max_age_s=max_age_s)
        with self._errors():
            reply = await MEASURE_LINK.aio_unary_unary(self._channel)(request, timeout=timeout_s)
        if reply.HasField("failure"):
            raise failure_to_error(reply.failure)
        return reply

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()

    @contextlib.contextmanager
    def _errors(self) -> Generator[None]:
        """Raise gRPC's errors as those of the agent. A recovery may have closed the channel while another one uses it."""
        try:
            yield
        except grpc.RpcError as error:
            raise handshake_error(error, self._name) or channel_error(error, self._name) from error
        except grpc.aio.UsageError as error:
            raise WorkerLost(f"The connection to {self._name} was closed.") from error


def yielding_of(said: agent_pb2.AgentEvent | cluster_pb2.AttendRequest) -> Yielding | None:
    """Return the state in a report of a machine that yields; shares that are none count as 1."""
    if not said.HasField("yielding"):
        return None
    state = said.yielding
    speed, memory = (
        share if 0.0 < share <= 1.0 else 1.0 for share in (state.speed_share, state.memory_share)
    )
    return Yielding(state.reason[:_LONGEST_REASON], speed, memory, state.priority[:_LONGEST_REASON])


def energy_of(said: cluster_pb2.AttendRequest) -> tuple[PartEnergy, ...]:
    """Return the energy of the parts that are known here, without values that are no energy."""
    parts = {used.part: used for used in said.energy}
    known = (
        PartEnergy(part, parts[part].joules, parts[part].watts if parts[part].HasField("watts") else None)
        for part in PARTS
        if part in parts
    )
    return tuple(
        used for used in known if 0.0 <= used.joules < math.inf and 0.0 <= (used.watts or 0.0) < math.inf
    )


def report_of(node: str, session: int, said: cluster_pb2.AttendRequest) -> Reported:
    """Return the state in a node's message; raise `ProtocolError` if one of its interfaces is invalid."""
    return Reported(
        node,
        session,
        said.memory_free_bytes,
        said.agent_bytes,
        _trusted(said),
        said.trusted_problem[:_LONGEST_PROBLEM],
        energy_of(said),
        yielding_of(said),
    )


def _trusted(said: cluster_pb2.AttendRequest) -> tuple[TrustedInterface, ...]:
    """Return the trusted interfaces; raise `ProtocolError` if one has no IPv4 address."""
    trusted = tuple(TrustedInterface(one.name[:80], one.address, one.network) for one in said.trusted)
    try:
        for one in trusted:
            ipaddress.IPv4Address(one.address)
            ipaddress.IPv4Network(one.network)
    except ValueError as error:
        raise ProtocolError(f"A node reports an invalid trusted interface: {error}.") from error
    return trusted


async def first_message(requests: AsyncIterator[cluster_pb2.AttendRequest]) -> cluster_pb2.AttendRequest:
    """Return a node's first message; raise `ProtocolError` if none comes in time."""
    try:
        async with asyncio.timeout(SILENCE_S):
            return await _next(requests)
    except (StopAsyncIteration, TimeoutError):
        raise ProtocolError("A node connected and did not send its first message in time.") from None


async def _next(requests: AsyncIterator[cluster_pb2.AttendRequest]) -> cluster_pb2.AttendRequest:
    try:
        return await anext(requests)
    except DecodeError as error:
        raise ProtocolError(f"A node's message cannot be parsed: {error}.") from error


async def messages_until_end(
    requests: AsyncIterator[cluster_pb2.AttendRequest], revocations: asyncio.Event
) -> AsyncGenerator[cluster_pb2.AttendRequest | None]:
    """Yield a node's messages until it ends its call, and None whenever certificates were revoked.

    Raises:
        TimeoutError: a node that was silent for too long.
    """
    requests = limit_silence(requests, SILENCE_S)
    saying, revoking = asyncio.ensure_future(_next(requests)), asyncio.ensure_future(revocations.wait())
    try:
        while True:
            await asyncio.wait((saying, revoking), return_when=asyncio.FIRST_COMPLETED)
            if revoking.done():
                revocations.clear()
                revoking = asyncio.ensure_future(revocations.wait())
                yield None
            if saying.done():
                said = saying.result()
                saying = asyncio.ensure_future(_next(requests))
                yield said
    except StopAsyncIteration:
        return
    finally:
        saying.cancel()
        revoking.cancel()
        # Retrieve the exceptions, because asyncio logs those that are never retrieved.
        await asyncio.gather(saying, revoking, return_exceptions=True)


AGENT_MODULE = "mlx_ring.agent"
STOP_WAIT_S = 8.0
"""Time to stop; the workers have three seconds each, in parallel, before they are killed."""
_ANSWER_WAIT_S = 1.5


class LocalAgent:
    """The agent of this machine, started by `start`, and stopped by `stop` or the end of this process."""

    def __init__(self, child: ChildProcess, link: AgentLink) -> None:
        self._child = child
        self.link = link
        self._hangs = False
        """True if it did not answer when it was asked last."""

    @classmethod
    async def start(
        cls,
        settings: Settings,
        *,
        node: str,
        run_dir: Path,
        blas_threads: int,
        with_spare: bool = False,
    ) -> LocalAgent:
        """Start the process.

        Args:
            settings: the head's settings.
            node: the node's ID.
            run_dir: a private empty folder; the agent listens on `agent.sock` in it and removes it at the end.
            blas_threads: the number of BLAS threads of each worker.
            with_spare: True if it starts a process at once for its first worker.
        """
        launch = read_launch()
        child = await ChildProcess.start(
            AGENT_MODULE,
            [
                *("--run-dir", str(run_dir), "--node", node),
                *as_arguments(select_settings(AgentSettings, settings, blas_threads=blas_threads)),
                *(["--lent", str(launch.meeting_place)] if launch is not None else []),
                *(["--with-spare"] if with_spare and launch is None else []),
            ],
            name="agent",
            rank=None,
            environment=inherited_environment({}),
        )
        return cls(child, AgentLink(open_aio_channel(f"unix:{run_dir / 'agent.sock'}"), "the agent"))

    @property
    def pid(self) -> int:
        """The agent's process ID."""
        return self._child.pid

    @property
    def exit_reason(self) -> str:
        """Reason why the agent ended; empty while it runs."""
        return self._child.exit_reason

    async def answers(self) -> bool:
        """Return True if the agent answers. One that was lost for its silence is not asked again."""
        self._hangs = self.link.is_silent or await self.link.look(make_hello(), _ANSWER_WAIT_S) is None
        return not self._hangs

    async def stop(self) -> None:
        """Stop all workers and the agent, and wait until the agent's process has ended, and theirs with it."""
        grace_s = 0.0
        if not self._child.exit_reason and not self._hangs and await self.answers():
            grace_s = STOP_WAIT_S
            await self.link.stop("", STOP_WAIT_S)
        await self.link.close()
        await self._child.stop(grace_s, asks_where=not self._hangs)
