"""The agent of a machine that has joined: it listens for its head over mutual TLS, and stays when the head ends.

The node keeps one call to its head open, and opens it again whenever it ends. A signal to end it asks the head first
to move its layers to other machines.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import signal
import time
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from mlx_ring.agent.enrolment import keep_renewed
from mlx_ring.agent.leaving import LEAVE_WITHIN_S, Leave, PowerWatch
from mlx_ring.agent.link_measurements import LinkService, LinkStore, make_responder
from mlx_ring.agent.loading import FetchedModels
from mlx_ring.agent.profiling import ProfileOptions, ProfileStore, recall_or_measure
from mlx_ring.agent.server import AgentService, yielding_message
from mlx_ring.agent.supervisor import Supervisor, WorkerOptions
from mlx_ring.agent.weights.serving import WeightsService
from mlx_ring.agent.weights.store import WeightStore
from mlx_ring.agent.worker_processes import end_orphaned_workers
from mlx_ring.core.errors import ConfigError, HandshakeFailed, PeerRefused, RingError, VersionMismatch
from mlx_ring.core.folders import AGENT_LOCK, REVOKED_FILE, node_folder, weights_folder
from mlx_ring.core.logs import configure_logging
from mlx_ring.host.addresses import HeadAddress, bracketed, scoped_host
from mlx_ring.host.energy import EnergyMeter
from mlx_ring.host.head_announcement import HeadPlace
from mlx_ring.host.interfaces import Trust
from mlx_ring.host.machine import NodePorts, make_run_folder, node_name, raise_descriptor_limit
from mlx_ring.host.machine_profile import MachineProfile
from mlx_ring.host.power import KeepAwake
from mlx_ring.host.private_files import sole_holder
from mlx_ring.host.process import ending_signals, own_memory, usable_memory
from mlx_ring.host.running import agent_note, note_absence, recorded
from mlx_ring.host.yielding import YieldWatch
from mlx_ring.rpc.channels import (
    AGENT_MESSAGE_BYTES,
    FailureLog,
    add_secure_port,
    limit_silence,
    make_aio_server,
    open_aio_channel,
)
from mlx_ring.rpc.failures import channel_error, failure_to_error
from mlx_ring.rpc.hello import make_hello
from mlx_ring.rpc.methods import AGENT_SERVICE, ATTEND
from mlx_ring.rpc.protos import cluster_pb2
from mlx_ring.rpc.tls.caller_checks import AioPeerGuard, PeerGuard
from mlx_ring.rpc.tls.credentials import Credentials, load_credentials, serve_from_folder
from mlx_ring.rpc.tls.handshakes import handshake_error, log_refused_handshakes
from mlx_ring.rpc.tls.peers import HEAD_NAME, Revoked
from mlx_ring.settings.process_settings import MemberSettings

log = logging.getLogger(__name__)

_BEAT_S = 0.5
_LEAVE_WAIT_S = 0.5
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 1.0
_DISTRUST_PAUSE_S = 15.0
"""Pause after another program, or the head of another cluster, has answered at the head's address: it may stay there."""
_SILENCE_S = 5.0
"""Seconds without an answer after which the head counts as lost."""

Revoke = Callable[[tuple[str, ...]], None]
MakeYields = Callable[[Callable[[], Collection[int]]], YieldWatch]
"""Maker of the watch of a machine's user, from a function that returns the workers' process ids."""


@dataclass(frozen=True, slots=True)
class Registration:
    """Description of a node, as sent to its head."""

    node: str
    port: int
    """Port of its agent."""
    profile: MachineProfile
    memory_utilization: float
    links_port: int = 0
    """Port on which it answers probes of links; 0 for none."""
    trust: Trust = field(default_factory=Trust)
    """Interfaces on which collectives may reach other machines."""
    energy: EnergyMeter = field(default_factory=EnergyMeter)
    yields: YieldWatch | None = None
    """Watch of the machine's user; None if it does not yield."""
    process: str = field(default_factory=lambda: secrets.token_hex(8))
    """Random id of this process, by which the head tells a machine that reconnects from a copy of it."""


async def stay_registered(
    head: HeadPlace,
    credentials: Callable[[], Credentials],
    who: Registration,
    revoke: Revoke,
    leave: Leave | None = None,
) -> None:
    """Keep the node registered with its head, and register again whenever it is lost; workers stay loaded meanwhile.

    After a first answer, another program at the head's address does not end this: the head may be back there later.

    Args:
        head: place of the head.
        credentials: returns this node's credentials before each call, because they may be renewed.
        who: description of this node.
        revoke: called with the revoked certificates at each answer of the head.
        leave: request to leave, after which this returns; None: it never leaves.

    Raises:
        PeerRefused: the head refuses this node, or was never trusted; not at a guessed address.
        VersionMismatch: the head has other versions.
    """
    pause_s, leave, failures = _FIRST_PAUSE_S, leave or Leave(), FailureLog(log)
    has_answered = False
    while True:
        try:
            async for reply in _session(head.address, credentials(), who, leave):
                pause_s, has_answered = _FIRST_PAUSE_S, True
                head.answered()
                failures.end()
                leave.received(reply)
                revoke(tuple(reply.revoked))
            if leave.left.is_set():
                return
            failures.record(f"The head at {head.address} ended; asking again")
        except (PeerRefused, VersionMismatch) as error:
            is_final = not isinstance(error, HandshakeFailed)
            if isinstance(error, VersionMismatch) or not (head.is_guessed or (has_answered and not is_final)):
                raise
            if is_final:
                head.refuse_guess()
            failures.record(f"{str(error).removesuffix('.')}; asking again")
            pause_s = _DISTRUST_PAUSE_S
        except RingError as error:
            failures.record(f"{str(error).removesuffix('.')}; asking again")
        except OSError as error:
            failures.record(f"The head at {head.address} cannot be reached: {error}; asking again")
        finally:
            leave.silent()
        _raise_cancellation()
        if leave.left.is_set():
            return
        await asyncio.sleep(pause_s)
        await head.choose()
        pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)


def _raise_cancellation() -> None:
    """Raise a pending cancellation, which gRPC swallows if the call breaks at the same time."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


async def _session(
    head: HeadAddress, credentials: Credentials, who: Registration, leave: Leave
) -> AsyncIterator[cluster_pb2.AttendReply]:
    """Open one call, and yield the head's answers."""
    peer = f"The head at {head}"
    channel = open_aio_channel(head.cluster, credentials, HEAD_NAME, max_message_bytes=AGENT_MESSAGE_BYTES)
    try:
        call = ATTEND.aio_stream_stream(channel)(_messages(head, who, leave))
        async for reply in limit_silence(aiter(call), _SILENCE_S):
            if reply.HasField("failure"):
                raise failure_to_error(reply.failure)
            if reply.HasField("hello"):
                log.info(
                    "Connected to the head at %s as %s; it sends work once a plan needs this machine",
                    head,
                    who.node,
                )
            yield reply
    except TimeoutError:
        log.warning("%s has sent nothing for %g s", peer, _SILENCE_S)
    except grpc.RpcError as error:
        raise (handshake_error(error, peer) or channel_error(error, peer)) from error
    finally:
        await channel.close()


async def _messages(
    head: HeadAddress, who: Registration, leave: Leave
) -> AsyncIterator[cluster_pb2.AttendRequest]:
    """Yield a message at each beat, and a last one once the node leaves: a call may also end because it breaks."""
    message = cluster_pb2.AttendRequest(
        hello=make_hello(node=who.node),
        machine=node_name(),
        port=who.port,
        head_host=head.host,
        profile=who.profile.model_dump_json(),
        memory_utilization=who.memory_utilization,
        links_port=who.links_port,
        process=who.process,
    )
    await asyncio.to_thread(who.energy.open)
    message.MergeFrom(_now(who))
    yield message
    while not message.leaves:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_BEAT_S):
                await leave.left.wait()
        message = _now(who)
        message.leaves, message.wants_to_leave = leave.left.is_set(), leave.is_wanted
        message.leave_request = leave.request
        yield message


def _now(who: Registration) -> cluster_pb2.AttendRequest:
    """Return the values that may change from message to message."""
    trusted, problem = who.trust.now()
    return cluster_pb2.AttendRequest(
        memory_free_bytes=usable_memory().available_bytes,
        agent_bytes=own_memory(),
        trusted=[
            cluster_pb2.TrustedInterface(name=one.name, address=one.address, network=one.network)
            for one in trusted
        ],
        trusted_problem=problem,
        energy=[
            cluster_pb2.PartEnergy(part=used.part, joules=used.joules, watts=used.watts)
            for used in who.energy.read()
        ],
        yielding=yielding_message(who.yields),
    )


@dataclass(frozen=True, slots=True)
class MemberOptions:
    """Options of a joined machine."""

    head: HeadPlace
    node: str
    state: Path
    """The state folder."""
    run_dir: Path
    """Private folder for sockets."""
    settings: MemberSettings
    listen: str = "[::]"
    """Address to listen on for other machines."""
    may_be_away: bool = True
    """True if it leaves before its machine sleeps, and while the battery is low."""
    make_yields: MakeYields = YieldWatch
    """Makes the watch of the machine's user, if it is to yield."""


def run_member(
    head: HeadPlace,
    node: str,
    state: Path,
    settings: MemberSettings,
    *,
    listen: str,
    to_stderr: bool = True,
    may_be_away: bool = True,
    make_yields: MakeYields = YieldWatch,
) -> None:
    """Start this process's log, and serve as `serve_as_member` does.

    Args:
        head: place of the head.
        node: this node's ID.
        state: the state folder.
        settings: this machine's settings.
        listen: address to listen on for other machines.
        to_stderr: True to write log lines to stderr too.
        may_be_away: True to leave before the machine sleeps, and while its battery is low.
        make_yields: makes the watch of the machine's user, if it is to yield.
    """
    configure_logging(
        process="agent",
        node=node,
        rank=None,
        level=settings.log_level,
        log_dir=settings.log_dir,
        to_stderr=to_stderr,
        log_format=settings.log_format,
        is_for_people=True,
    )
    log_refused_handshakes()
    raise_descriptor_limit(settings.file_descriptor_limit)
    place_of_head = str(head.address)
    with (
        recorded(state, "agent", place_of_head, LEAVE_WITHIN_S),
        make_run_folder(settings.run_dir) as run_dir,
    ):
        place = bracketed(scoped_host(listen, "--listen"))
        options = MemberOptions(head, node, state, run_dir, settings, place, may_be_away, make_yields)
        asyncio.run(serve_as_member(options))


async def serve_as_member(options: MemberOptions) -> None:
    """Serve until SIGINT or SIGTERM, or until the head asks it to end; every worker ends first.

    Raises:
        ConfigError: this machine has no certificate, or an agent that runs already.
        PeerRefused: the head refuses this machine.
    """
    folder = node_folder(options.state)
    refusal = f"An agent with the state in {options.state} already runs on this machine: stop it first, or give --state-dir."
    with sole_holder(folder / AGENT_LOCK, refusal, agent_note(options.head.address.port)):
        await _serve(options, folder)


async def _serve(options: MemberOptions, folder: Path) -> None:
    settings = options.settings
    trust = Trust(settings.trusted_interface)

    def credentials() -> Credentials:
        kept = load_credentials(folder)
        if kept is None:
            raise ConfigError(f"This machine has no certificate in {folder}: join with a token.")
        return kept

    credentials()
    profile = await _profile(options.state, settings)
    ports, revoked = NodePorts(settings.node_ports), Revoked(file=folder / REVOKED_FILE)
    supervisor = _supervisor(options, folder, trust, ports)
    supervisor.revoke(revoked.serials)
    store = WeightStore(weights_folder(options.state), settings.weights_limit)
    fetched = FetchedModels(options.node, store, credentials)
    service = AgentService(
        options.node,
        supervisor,
        settings.model_load_timeout,
        ends_when_empty=False,
        fetched=fetched,
        awake=KeepAwake(settings.keep_awake),
    )
    guard = AioPeerGuard(revoked.refusal, head_only=(f"/{AGENT_SERVICE}/",))
    links = LinkService(options.node, credentials, LinkStore(folder))
    server = make_aio_server(interceptors=[guard], max_message_bytes=AGENT_MESSAGE_BYTES)
    server.add_generic_rpc_handlers(
        (
            service.handler(),
            links.handler(),
            WeightsService(options.node, store, settings.kv_disk_dir if settings.kv_disk else None).handler(),
        )
    )
    port = add_secure_port(server, ports.at(options.listen), serve_from_folder(folder))
    probes_guard = PeerGuard(revoked.refusal)
    responder = make_responder(options.node, probes_guard)
    links_port = add_secure_port(responder, ports.at(options.listen), serve_from_folder(folder))
    await server.start()
    responder.start()

    answers = _Answers(supervisor, revoked, (guard, probes_guard))
    who = Registration(
        options.node,
        port,
        profile,
        settings.memory_utilization,
        links_port,
        trust,
        yields=options.make_yields(supervisor.pids) if settings.yielding == "on" else None,
    )
    leave = Leave(
        service.stop_requested,
        has_workers=lambda: bool(supervisor.workers),
        on_absence=lambda why: note_absence(options.state, why),
    )
    attending = asyncio.create_task(
        leave.attend(lambda: stay_registered(options.head, credentials, who, answers.record, leave)),
        name="attendance",
    )
    beside = (
        *(
            (asyncio.create_task(PowerWatch(leave, settings.min_battery).run(), name="power"),)
            if options.may_be_away
            else ()
        ),
        *(() if who.yields is None else (asyncio.create_task(who.yields.run(), name="yielding"),)),
        asyncio.create_task(keep_renewed(options.head, folder), name="renewal"),
        asyncio.create_task(end_orphaned_workers(supervisor, lambda: answers.last_s), name="orphans"),
    )
    try:
        await _until_end(attending, leave)
    finally:
        await asyncio.wait((attending,), timeout=_LEAVE_WAIT_S)
        for task in (attending, *beside):
            task.cancel()
        await supervisor.stop()
        responder.stop(None)
        await server.stop(grace=0.5)
        log.info("Ended")


class _Answers:
    """The head's answers: their time, and the certificates that they revoke."""

    def __init__(
        self,
        supervisor: Supervisor,
        revoked: Revoked,
        guards: tuple[AioPeerGuard, PeerGuard],
    ) -> None:
        self._supervisor, self._revoked, self._guards = supervisor, revoked, guards
        self.last_s = time.monotonic()
        """Time of the last answer, or of the start."""

    def record(self, serials: tuple[str, ...]) -> None:
        """Record an answer with the serials of all revoked certificates."""
        self.last_s = time.monotonic()
        if serials != self._supervisor.revoked:
            self._supervisor.revoke(serials)
            self._revoked.replace(serials)
            for guard in self._guards:
                guard.end_refused()


async def _profile(state: Path, settings: MemberSettings) -> MachineProfile:
    """Return this machine's profile, with the memory that plans may use."""
    measured = ProfileOptions(settings.blas, settings.blas_threads)
    profile = await recall_or_measure(ProfileStore(state), measured, accepts_noise=False)
    return profile if settings.memory_limit is None else profile.limited_to(settings.memory_limit)


def _supervisor(options: MemberOptions, credentials: Path, trust: Trust, ports: NodePorts) -> Supervisor:
    if problem := trust.now()[1]:
        log.warning("%s It may come later.", problem)
    return Supervisor(
        WorkerOptions(
            options.node, options.run_dir, options.settings, credentials, options.listen, ports, trust
        )
    )


async def _until_end(work: asyncio.Task[None], leave: Leave) -> None:
    """Wait until the agent ends, for the head or a signal asks for it, or the work ends; raise its error, if any."""
    loop = asyncio.get_running_loop()
    for number in ending_signals():
        loop.add_signal_handler(number, _on_signal, number, leave)
    waiting = asyncio.create_task(leave.ended.wait())
    try:
        await asyncio.wait((work, waiting), return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            work.result()
    finally:
        waiting.cancel()
        leave.end()


def _on_signal(number: signal.Signals, leave: Leave) -> None:
    leave.want(is_patient=number == signal.SIGINT)
