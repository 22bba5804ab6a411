"""Power of this machine: it stays awake while it has work, and says how much of its battery is left.

While it stays awake, the display may sleep, and a closed lid may end the work. On battery the machine may sleep unless
the user says `always`.

macOS: `caffeinate -i` prevents idle sleep, and with `-w` it ends with the process that it watches (caffeinate(8)).
Linux: `systemd-inhibit` holds a lock on `sleep` for as long as its command runs. The command reads a pipe from this
process, so it ends with it, even after SIGKILL (systemd-inhibit(1)).
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

log = logging.getLogger(__name__)

KeepAwakeMode = Literal["auto", "always", "never"]
_END_S = 2.0
_SUPPLIES = Path("/sys/class/power_supply")
"""Power supplies of Linux (sysfs-class-power). The `scope` of one that powers a peripheral is `Device`."""
_CAFFEINATE = "caffeinate"
_INHIBIT = (
    "systemd-inhibit",
    "--what=sleep",
    "--mode=block",
    "--who=mlx-ring",
    "--why=It answers a request.",
    "--no-ask-password",
    "cat",
)


def awake_program() -> Sequence[str]:
    """Return the command that keeps this machine awake until its input ends; empty where there is none."""
    programs = {"darwin": (_CAFFEINATE, "-i", "-w", str(os.getpid())), "linux": _INHIBIT}
    command = programs.get(sys.platform, _INHIBIT)
    return command if shutil.which(command[0]) else ()


def is_on_battery() -> bool:
    """Report whether this machine runs on its battery. One without a battery, or that does not say, has power."""
    return battery_left() is not None


def battery_left() -> float | None:
    """Return the share of the battery that is left while the machine runs on it; None while it has power."""
    import psutil  # modules that start quickly import this one

    try:
        battery = psutil.sensors_battery()
    except (OSError, RuntimeError, AttributeError, ValueError):  # some systems and containers do not say
        return None
    if battery is not None and _is_of_device():
        return None
    return None if battery is None or battery.power_plugged is not False else battery.percent / 100


def _is_of_device() -> bool:
    """Report whether psutil reads the battery of a wireless mouse or the like: it takes the first that Linux names."""
    try:
        names = [path.name for path in _SUPPLIES.iterdir()]
        names = [name for name in names if name.startswith("BAT") or "battery" in name.lower()]
        return bool(names) and (_SUPPLIES / min(names) / "scope").read_text().strip() == "Device"
    except OSError:
        return False


class KeepAwake:
    """Hold on this machine's sleep. Only one thread uses it."""

    def __init__(
        self,
        mode: KeepAwakeMode,
        program: Callable[[], Sequence[str]] = awake_program,
        on_battery: Callable[[], bool] = is_on_battery,
    ) -> None:
        """Start without a hold."""
        self._mode = mode
        self._program, self._on_battery = program, on_battery
        self.process: subprocess.Popen[bytes] | None = None
        """The program, from its start to the end of the hold."""
        self._is_refused = False
        """True once the program has ended by itself: it is not tried again."""

    @property
    def is_held(self) -> bool:
        """True while the program runs."""
        return self.process is not None and self.process.poll() is None

    def hold(self, *, has_work: bool) -> None:
        """Begin or end the hold. Call it again while there is work, so that it ends when the power is cut off."""
        wanted = has_work and self._mode != "never" and (self._mode == "always" or not self._on_battery())
        if not wanted:
            self.release()
        elif self.process is None and not self._is_refused:
            self._begin()
        elif self.process is not None and (code := self.process.poll()) is not None:
            self._note_refusal(code)

    def release(self) -> None:
        """End the hold, if there is one."""
        process, self.process = self.process, None
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _begin(self) -> None:
        command = self._program()
        if not command:
            self._is_refused = True
            log.debug("Found no program that keeps this machine awake")
            return
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            self._is_refused = True
            log.warning(
                "%s cannot be started (%s): this machine may sleep during an answer", command[0], error
            )

    def _note_refusal(self, code: int) -> None:
        self._is_refused = True
        log.info("The system refused to stay awake (exit code %d): it may sleep during an answer", code)
        self.release()
