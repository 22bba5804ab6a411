"""A machine that leaves its cluster, at its end or for a while: the head moves its layers first.

It is away while it sleeps, and while its battery is low. It joins again afterwards.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from mlx_ring.host.power import OnWarning, SystemWarnings, Warned, battery_left, system_warnings
from mlx_ring.rpc.protos import cluster_pb2

log = logging.getLogger(__name__)

LEAVE_WITHIN_S = 60.0
"""Time for the layers to move elsewhere after SIGTERM: an operating system that shuts down waits somewhat longer."""
_SPARE_S = 1.0
"""Time that is left of the system's when the machine leaves before it sleeps."""


class Leave:
    """Request to leave, which the head prepares by moving the machine's layers, and the end of the agent."""

    def __init__(
        self,
        ended: asyncio.Event | None = None,
        *,
        has_workers: Callable[[], bool] = lambda: True,
        on_absence: Callable[[str], None] = lambda _why: None,
    ) -> None:
        """Start without a request.

        Args:
            ended: set once the agent ends.
            has_workers: reports whether the machine has layers.
            on_absence: called with the reason once the machine is away, and with an empty one before it joins again.
        """
        self.ended = ended or asyncio.Event()
        self.left = asyncio.Event()
        """Set once the machine leaves, which the head then knows at once."""
        self.is_wanted = False
        self.request = 0
        """Number of the last request to the head, which repeats it in its answer."""
        self.is_connected = False
        """True while the head answers."""
        self._has_workers, self._on_absence = has_workers, on_absence
        self._reason = ""
        self._is_final = self._is_patient = True
        self._absences: set[str] = set()
        """Reasons for which it is to be away."""
        self._returned = asyncio.Event()
        """Set while there are none."""
        self._returned.set()
        self._on_left: dict[str, Callable[[], None]] = {}
        """Callback for each reason, until it is called or the reason has ended."""
        self._limit: asyncio.TimerHandle | None = None

    def want(self, *, is_patient: bool) -> None:
        """Ask the head, then end. End at once if the machine has no layers, without a head, or at the second request.

        Args:
            is_patient: True to stay if no other machine has room for the layers; False to end then.
        """
        is_second = self.is_wanted and self._is_final
        self._is_final = True
        if is_second or self.left.is_set() or not self._must_ask:
            self.end()
            return
        log.warning("Moving this machine's layers to others before it leaves. Ctrl-C again leaves at once.")
        self._ask(is_patient=is_patient, within_s=None if is_patient else LEAVE_WITHIN_S)

    def end(self) -> None:
        """Leave at once, and end."""
        self._is_final = True
        for event in (self.ended, self.left, self._returned):
            event.set()

    def go_away(self, why: str, *, within_s: float | None, on_left: Callable[[], None]) -> None:
        """Ask the head, then leave for a while.

        Args:
            why: the reason. The machine is away while there is one.
            within_s: time after which it leaves in any case; None to stay if no other machine has room.
            on_left: called once it has left.
        """
        is_new = why not in self._absences
        self._on_left[why] = on_left
        self._absences.add(why)
        self._returned.clear()
        if self.left.is_set():
            # A machine that was awake only for a moment may say again that it is about to sleep.
            self._call_on_left()
            return
        if not is_new:
            return
        self._is_final = self._is_final and self.is_wanted
        if not self._has_workers() or (within_s is not None and not self.is_connected):
            self._leave()
        elif not self.is_wanted or within_s is not None:
            log.warning("Moving this machine's layers to others, because %s", why)
            self._ask(is_patient=within_s is None, within_s=within_s)

    def come_back(self, why: str) -> None:
        """End a reason to be away. Without another one, the machine is or becomes a member."""
        self._absences.discard(why)
        self._on_left.pop(why, None)
        if self._absences:
            return
        self._returned.set()
        if not self._is_final:
            # The head may still move its layers. The machine leaves if they have moved, to join anew.
            self._cancel_limit()
            self._is_patient = True

    async def attend(self, stay_registered: Callable[[], Awaitable[None]]) -> None:
        """Be a member, and again after each absence, until the end.

        Args:
            stay_registered: returns once the machine has left.
        """
        while True:
            await stay_registered()
            self._call_on_left()
            while self._absences and not self.ended.is_set():
                why = " and ".join(sorted(self._absences))
                log.warning("This machine is not in its cluster, because %s", why)
                self._on_absence(why)
                await self._returned.wait()
            if self.ended.is_set():
                return
            log.warning("This machine joins its cluster again")
            self._on_absence("")
            self._withdraw()
            self.left.clear()

    def _call_on_left(self) -> None:
        calls, self._on_left = self._on_left, {}
        for call in calls.values():
            call()

    @property
    def _must_ask(self) -> bool:
        return self._has_workers() and self.is_connected

    def _ask(self, *, is_patient: bool, within_s: float | None) -> None:
        loop = asyncio.get_running_loop()
        if within_s is not None and (self._limit is None or loop.time() + within_s < self._limit.when()):
            self._cancel_limit()
            self._limit = loop.call_later(within_s, self._leave)
        self.is_wanted, self._is_patient = True, is_patient and self._limit is None
        self.request, self._reason = self.request + 1, ""

    def _withdraw(self) -> None:
        self._cancel_limit()
        self.is_wanted, self._reason = False, ""

    def _cancel_limit(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None

    def _leave(self) -> None:
        self._cancel_limit()
        if self._is_final:
            self.end()
        else:
            self.left.set()

    def received(self, reply: cluster_pb2.AttendReply) -> None:
        """Receive an answer of the head."""
        self.is_connected = True
        if not self.is_wanted:
            return
        if reply.may_leave:
            # If it is to be back already, it leaves nevertheless: its head gives it no layers before it joins again.
            self._leave()
        if not reply.stay_reason or reply.leave_request != self.request:
            return
        if reply.stay_reason != self._reason:
            self._reason = reply.stay_reason
            log.error("This machine's layers cannot move: %s %s", reply.stay_reason, self._consequence)
        if not self._is_patient:
            self._leave()
        elif not self._is_final and not self._absences:
            self._withdraw()

    @property
    def _consequence(self) -> str:
        if not self._is_patient:
            return "It leaves nevertheless."
        if not self._is_final:
            return "It stays in its cluster."
        return "Ctrl-C again leaves nevertheless; answers then wait until another machine has room."

    def silent(self) -> None:
        """Record that the call to the head has ended: nobody moves the layers, unless there is another call."""
        self.is_connected = False
        if self.is_wanted and (self._is_final or not self._is_patient):
            self._leave()


_LOOK_S = 30.0
_CHARGED = 0.05
"""Share above the bound from which a machine that still runs on its battery is back."""
_SLEEP, _SHUTDOWN = "it is about to sleep", "it is about to shut down"
_BATTERY = "its battery is below --min-battery"


class PowerWatch:
    """Absence of a machine while it sleeps, and while its battery is low."""

    def __init__(
        self,
        leave: Leave,
        min_battery: float,
        *,
        make_warnings: Callable[[OnWarning], SystemWarnings] = system_warnings,
        battery: Callable[[], float | None] = battery_left,
    ) -> None:
        """Prepare.

        Args:
            leave: the machine's absence.
            min_battery: share of the battery below which it is away; 0: never.
            make_warnings: makes the system's warnings, which call a function in a thread.
            battery: returns the share that is left, or None with power.
        """
        self._leave, self._min_battery = leave, min_battery
        self._make_warnings, self._battery = make_warnings, battery

    async def run(self) -> None:
        """Watch until it is cancelled."""
        loop = asyncio.get_running_loop()

        def warned(what: Warned) -> None:
            loop.call_soon_threadsafe(self.on_warning, what, warnings)

        warnings = self._make_warnings(warned)
        warnings.open()
        try:
            while True:
                self.look_at_battery()
                await asyncio.sleep(_LOOK_S)
        finally:
            warnings.close()

    def on_warning(self, what: Warned, warnings: SystemWarnings) -> None:
        """Leave within the time that the system waits, or come back."""
        if what == "awake":
            self._leave.come_back(_SLEEP)
            self._leave.come_back(_SHUTDOWN)
            return
        why = _SLEEP if what == "sleep" else _SHUTDOWN
        within_s = max(0.0, warnings.delay_s - _SPARE_S)
        self._leave.go_away(why, within_s=within_s, on_left=warnings.let_go)

    def look_at_battery(self) -> None:
        """Leave if the battery is low, or come back."""
        left = self._battery() if self._min_battery else None
        if left is not None and left < self._min_battery:
            self._leave.go_away(_BATTERY, within_s=None, on_left=lambda: None)
        elif left is None or left >= self._min_battery + _CHARGED:
            self._leave.come_back(_BATTERY)
