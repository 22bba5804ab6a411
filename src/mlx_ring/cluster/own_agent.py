"""The agent of the head's own machine in a cluster, which the head starts and which outlives it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from mlx_ring.cluster.control import Control
from mlx_ring.cluster.membership import Event, FormerMember, SessionEnded
from mlx_ring.core.environment import environment_with_grpc_logs, inherited_environment
from mlx_ring.core.errors import NotReady, RingError, without_number
from mlx_ring.core.folders import AGENT_LOCK, node_folder, state_folder
from mlx_ring.host.addresses import HeadAddress, bare_host, bracketed
from mlx_ring.host.interfaces import TRUST_FLAG, Trust, TrustedInterface
from mlx_ring.host.machine import share_cores
from mlx_ring.host.private_files import is_held
from mlx_ring.host.running import end_stray_agent
from mlx_ring.settings.config import Settings
from mlx_ring.settings.process_settings import MemberSettings, as_arguments, select_settings

log = logging.getLogger(__name__)

_MODULE = "mlx_ring.agent.head_member"
_RETURNS_WITHIN_S = 1.0
"""Time in which an agent that missed the head's messages connects again."""
_END_WAIT_S = 5.0
_RETRY_S = 5.0
"""Time after which an agent that could not be started is started again."""


class OwnAgent:
    """Agent of the head's own machine. If this head started it and it hangs or crashes, another one replaces it."""

    def __init__(self, settings: Settings, control: Control, address: HeadAddress) -> None:
        """Start without an agent; `address` is the head's for members."""
        self._settings = settings
        self._control = control
        self._address = address
        self._process: subprocess.Popen[bytes] | None = None
        self._left_before: FormerMember | None = None
        """Last leaving of an agent of this machine when this one was started."""
        self._starting = asyncio.Lock()
        self._replacing: asyncio.Task[None] | None = None

    @property
    def is_own(self) -> bool:
        """True if this head started it."""
        return self._process is not None

    @property
    def _is_absent(self) -> bool:
        """True if an agent that this head started is no longer connected, although it runs."""
        runs = self._process is not None and self._process.poll() is None
        was = self._control.membership.former.get(self._control.node)
        return runs and was is not None and was is not self._left_before

    @property
    def _has_crashed(self) -> bool:
        """True if an agent that this head started has ended, but not by itself or because it was asked to."""
        return self._process is not None and self._process.poll() not in (None, 0)

    def replace_soon(self) -> None:
        """Replace the agent, which does not answer, once it counts as disconnected."""
        if self._replacing is None or self._replacing.done():
            self._replacing = asyncio.create_task(self._replace(), name="own agent")

    async def _replace(self) -> None:
        await self._control.wait_until_absent(self._control.node)
        while True:
            try:
                return await self.ensure()
            except RingError as error:
                log.warning("%s It is tried again in %g s.", error, _RETRY_S)
            await asyncio.sleep(_RETRY_S)

    async def keep(self, is_awaited: Callable[[], bool]) -> None:
        """Replace the agent whenever it no longer answers or has crashed, forever, except while `is_awaited`.

        One that was asked to end says so before it ends its workers, and is not replaced.
        """
        left = asyncio.Event()

        def on_event(event: Event) -> None:
            if isinstance(event, SessionEnded) and event.node == self._control.node and not event.is_final:
                left.set()

        with self._control.watching(on_event):
            while True:
                await left.wait()
                left.clear()
                while (self._has_crashed or self._is_absent) and not await self.attends(_RETURNS_WITHIN_S):
                    if not is_awaited():
                        self.replace_soon()
                        break

    async def ensure(self) -> None:
        """Start the agent unless one runs that serves this head.

        Raises:
            ConfigError: one that serves another address does not end.
            NotReady: it cannot be started now.
        """
        async with self._starting:
            await self._ensure()

    async def _ensure(self) -> None:
        if self._is_absent and not await self.attends(_RETURNS_WITHIN_S):
            log.warning("The agent of this machine does not answer: replacing it")
            await self._kill()
        if self._process is not None and self._process.poll() is None:
            return  # one that has just started may not hold the lock yet
        state = state_folder(self._settings.state_dir)
        started = self._start(state)
        if started is None and await asyncio.to_thread(end_stray_agent, state, self._address.port):
            started = self._start(state)
        if started is not None:
            self._process = started
            self._left_before = self._control.membership.former.get(self._control.node)

    def _start(self, state: Path) -> subprocess.Popen[bytes] | None:
        host = "127.0.0.1" if self._address.is_every else self._address.host
        head = HeadAddress(host, self._address.port)
        try:
            return ensure_head_member(self._settings, state, self._control.node, head)
        except OSError as error:
            raise NotReady(
                f"The agent of this machine cannot be started: {without_number(str(error))}."
            ) from error

    async def attends(self, timeout_s: float) -> bool:
        """Wait until it is connected; return False if it is not in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._control.wait_for(1, including=self._control.node)
        return self._control.node in self._control.membership.members

    async def end(self) -> None:
        """Wait for the end of an agent that this head started, which was asked to end, and kill it if it hangs."""
        if self._replacing is not None:
            self._replacing.cancel()
            await asyncio.wait((self._replacing,))
        if self._process is None:
            return
        if not self._is_absent:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._process.wait, _END_WAIT_S)
        if self._process.poll() is None:
            log.warning("The agent of this machine does not end: killing it")
            await self._kill()

    async def _kill(self) -> None:
        """Kill it. Its workers end with it."""
        if self._process is not None:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)


def ensure_head_member(
    settings: Settings, state: Path, node: str, head: HeadAddress
) -> subprocess.Popen[bytes] | None:
    """Start the agent; return None if one already runs, perhaps an earlier head's.

    It leads its own session and shares no open file with the head, so it survives the head's end.
    """
    if is_held(node_folder(state) / AGENT_LOCK):
        return None
    passed_on = select_settings(
        MemberSettings,
        settings,
        log_dir=settings.log_dir.absolute(),
        blas_threads=settings.blas_threads or share_cores(1),
        keep_awake="never",  # the head keeps its machine awake
    )
    return subprocess.Popen(
        [
            *(sys.executable, "-m", _MODULE, "--head", head.cluster, "--node", node, "--state", str(state)),
            *("--listen", bracketed(bare_host(settings.cluster_host)), *as_arguments(passed_on)),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env=environment_with_grpc_logs(inherited_environment({})),
    )


def stale_trust(kept: Iterable[TrustedInterface], named: tuple[str, ...]) -> str:
    """Return a warning if an earlier head's agent trusts other interfaces than this head names; otherwise empty."""
    trusted, wanted = (sorted(map(str, found)) for found in (kept, Trust(named).now()[0]))
    if trusted == wanted:
        return ""
    return (
        "This machine's agent was started by an earlier head. "
        f"It trusts {', '.join(trusted) or 'nothing'} with collectives, and this head names {', '.join(wanted) or 'nothing'}. "
        "The agent's setting applies. To change it, stop this head, which also stops the agent, and start it again with "
        f"the new {TRUST_FLAG}."
    )
