"""The agent of a machine that has joined: it listens for its head over mutual TLS, and stays when the head goes."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

from mlx_ring.agent.attendance import Attendant, attend_for_ever
from mlx_ring.agent.enrolment import renew_if_due
from mlx_ring.agent.fetched_models import FetchedModels
from mlx_ring.agent.front import AgentFront
from mlx_ring.agent.link_store import LinkStore
from mlx_ring.agent.links import LinkFront, make_responder
from mlx_ring.agent.orphans import end_orphans
from mlx_ring.agent.profile_store import ProfileStore, recall_or_measure
from mlx_ring.agent.profiling import ProfileOptions
from mlx_ring.agent.supervisor import Supervisor, WorkerOptions
from mlx_ring.agent.trust import Trust
from mlx_ring.agent.weights.serving import WeightsFront
from mlx_ring.agent.weights.store import WeightStore
from mlx_ring.core.addresses import HeadAddress
from mlx_ring.core.cluster_folders import node_folder, weights_folder
from mlx_ring.core.errors import ConfigError, RingError
from mlx_ring.core.log_formats import LogFormat
from mlx_ring.core.private_files import try_lock
from mlx_ring.rpc.channels import AGENT_MESSAGE_BYTES, add_secure_port, make_aio_server
from mlx_ring.rpc.methods import AGENT_SERVICE
from mlx_ring.rpc.tls.credentials import Credentials, load_credentials, serve_from_folder
from mlx_ring.rpc.tls.guard import AioPeerGuard, PeerGuard
from mlx_ring.rpc.tls.peers import Revoked

log = logging.getLogger(__name__)

AGENT_LOCK = "agent.lock"
"""In the node's folder: held for as long as its agent runs."""
_RENEWAL_S = 3600.0


@dataclass(frozen=True, slots=True)
class MemberOptions:
    """How a joined machine serves its cluster."""

    head: HeadAddress
    node: str
    state: Path
    """The state folder."""
    run_dir: Path
    """Private, for sockets."""
    log_dir: Path
    log_level: str
    blas: str
    blas_threads: int
    load_timeout_s: float
    memory_utilization: float
    log_format: LogFormat = "text"
    listen: str = "[::]"
    """Address for other machines."""
    weights_limit_bytes: int | None = None
    """What fetched models may take on disk."""
    memory_limit_bytes: int | None = None
    """What plans may count on at most, whatever is measured."""
    trust: Trust = field(default_factory=Trust)
    """Where collectives may go to other machines."""


async def serve_as_member(options: MemberOptions) -> None:
    """Until SIGINT or SIGTERM, or until the head asks it to end; every worker ends first.

    Raises:
        ConfigError: this machine has no certificate, or an agent that runs already.
        PeerRefused: the head does not take it any more.
    """
    folder = node_folder(options.state)
    lock = try_lock(folder / AGENT_LOCK)
    if lock is None:
        raise ConfigError(
            f"An agent with the state in {options.state} runs on this machine already: end it first, or give --state-dir."
        )

    def credentials() -> Credentials:
        kept = load_credentials(folder)
        if kept is None:
            raise ConfigError(f"This machine has no certificate in {folder}: join with a token.")
        return kept

    credentials()
    profile = await recall_or_measure(
        ProfileStore(options.state), ProfileOptions(blas=options.blas, blas_threads=options.blas_threads)
    )
    if options.memory_limit_bytes is not None:
        profile = profile.limited_to(options.memory_limit_bytes)
    supervisor, revoked = _supervisor(options, folder), Revoked()
    store = WeightStore(weights_folder(options.state), options.weights_limit_bytes)
    fetched = FetchedModels(options.node, store, credentials)
    front = AgentFront(
        options.node, supervisor, options.load_timeout_s, ends_when_empty=False, fetched=fetched
    )
    guard = AioPeerGuard(revoked.refusal, head_only=(f"/{AGENT_SERVICE}/",))
    links = LinkFront(options.node, credentials, LinkStore(folder))
    server = make_aio_server(interceptors=[guard], max_message_bytes=AGENT_MESSAGE_BYTES)
    server.add_generic_rpc_handlers(
        (front.handler(), links.handler(), WeightsFront(options.node, store).handler())
    )
    port = add_secure_port(server, f"{options.listen}:0", serve_from_folder(folder))
    probes_guard = PeerGuard(revoked.refusal)
    responder = make_responder(options.node, probes_guard)
    links_port = add_secure_port(responder, f"{options.listen}:0", serve_from_folder(folder))
    await server.start()
    responder.start()

    heard_s = time.monotonic()

    def revoke(serials: tuple[str, ...]) -> None:
        nonlocal heard_s
        heard_s = time.monotonic()
        if serials != supervisor.revoked:
            supervisor.revoke(serials)
            revoked.replace(serials)
            guard.end_refused()
            probes_guard.end_refused()

    who = Attendant(options.node, port, profile, options.memory_utilization, links_port, options.trust)
    attending = asyncio.create_task(
        attend_for_ever(options.head, credentials, who, revoke), name="attendance"
    )
    beside = (
        asyncio.create_task(_renew_in_time(options.head, folder), name="renewal"),
        asyncio.create_task(end_orphans(supervisor, lambda: heard_s), name="orphans"),
    )
    try:
        await _until_asked_or_done(attending, front.asked_to_stop)
    finally:
        for task in (attending, *beside):
            task.cancel()
        await supervisor.stop()
        responder.stop(None)
        await server.stop(grace=0.5)
        os.close(lock)
        log.info("ended")


async def _renew_in_time(head: HeadAddress, folder: Path) -> None:
    """Looks every hour whether the certificate ends soon; where the head cannot be asked, the next hour will do."""
    while True:
        try:
            if await asyncio.to_thread(renew_if_due, head, folder):
                log.info("the certificate was renewed")
        except RingError as error:
            log.warning("the certificate ends soon and could not be renewed: %s", error)
        await asyncio.sleep(_RENEWAL_S)


def _supervisor(options: MemberOptions, credentials: Path) -> Supervisor:
    if problem := options.trust.now()[1]:
        log.warning("%s It may come later.", problem)
    return Supervisor(
        WorkerOptions(
            node=options.node,
            run_dir=options.run_dir,
            log_dir=options.log_dir,
            log_level=options.log_level,
            log_format=options.log_format,
            blas=options.blas,
            blas_threads=options.blas_threads,
            credentials=credentials,
            listen=options.listen,
            trust=options.trust,
        )
    )


async def _until_asked_or_done(work: asyncio.Task[None], asked: asyncio.Event) -> None:
    """Until the head or a signal asks to end, or the work ends; its error, where it has one, is raised."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, asked.set)
    waiting = asyncio.create_task(asked.wait())
    try:
        await asyncio.wait((work, waiting), return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            work.result()
    finally:
        waiting.cancel()
