"""Power of this machine: it stays awake while it has work, says how much of its battery is left, and warns of its sleep.

While it stays awake, the display may sleep, and a closed lid may end the work. On battery the machine may sleep unless
the user says `always`.

macOS: `caffeinate -i` prevents idle sleep, and with `-w` it ends with the process that it watches (caffeinate(8)).
Linux: `systemd-inhibit` holds a lock on `sleep` for as long as its command runs. The command reads a pipe from this
process, so it ends with it, even after SIGKILL (systemd-inhibit(1)).
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

if TYPE_CHECKING:
    from jeepney import DBusAddress, Message
    from jeepney.io.blocking import DBusConnection

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


# ---- warnings of sleep and shutdown, for which the system waits a while

# Linux: logind warns over D-Bus, and waits for holders of a delay lock, but not longer than `InhibitDelayMaxSec`
# (org.freedesktop.login1(5), logind.conf(5)).
# macOS: IOKit tells each process that has registered for it, and waits up to 30 s for its answer (Technical Q&A QA1340,
# IOPMLib.h). A closed lid, `pmset sleepnow` and the menu announce sleep at once. Idle sleep asks first, and every process
# may refuse; `caffeinate` does so while there is work. There are no warnings of a shutdown: launchd sends SIGTERM.

Warned = Literal["sleep", "shutdown", "awake"]
"""Content of a warning: the machine is about to sleep or to shut down, or it is awake again."""
OnWarning = Callable[[Warned], None]
_RECEIVE_S = 1.0
"""Time after which a thread looks whether it is to end."""
_ANSWER_S = 2.0


class SystemWarnings(Protocol):
    """Warnings of the operating system."""

    delay_s: float
    """Time for which the system waits; 0 without warnings."""

    def open(self) -> None:
        """Ask for warnings, in a thread. Where there are none, nothing happens."""

    def let_go(self) -> None:
        """Let the system sleep or shut down now."""

    def close(self) -> None:
        """End the warnings, and let the system sleep or shut down. The thread ends a moment later."""


def system_warnings(on_warning: OnWarning) -> SystemWarnings:
    """Return the warnings of this machine's system, which call `on_warning` in a thread."""
    return MacWarnings(on_warning) if sys.platform == "darwin" else LogindWarnings(on_warning)


_LOGIND = "org.freedesktop.login1"
_SIGNALS = {"PrepareForSleep": "sleep", "PrepareForShutdown": "shutdown"}


class LogindWarnings(SystemWarnings):
    """Warnings of logind. It waits as long as this process holds a lock."""

    def __init__(self, on_warning: OnWarning, bus: str = "SYSTEM") -> None:
        """Prepare.

        Args:
            on_warning: called by a thread.
            bus: address of the D-Bus, or its name.
        """
        self.delay_s = 0.0
        self._on_warning, self._bus = on_warning, bus
        self._lock: int | None = None
        """Descriptor whose end ends the wait of the system."""
        self._changes = threading.Lock()
        self._has_ended = threading.Event()
        self._is_awake = True

    def open(self) -> None:
        """Ask for warnings, in a thread: a bus may hang. Without logind there are none."""
        threading.Thread(target=self._run, name="power warnings", daemon=True).start()

    def _run(self) -> None:
        try:
            connection, logind = self._connect()
        except Exception as error:  # noqa: BLE001 - containers and many servers have no system bus, or no logind
            log.debug("This machine gives no warnings of sleep: %s", error)
            return
        with contextlib.closing(connection):
            try:
                while not self._has_ended.is_set():
                    self._take_lock(connection, logind)
                    try:
                        message = connection.receive(timeout=_RECEIVE_S)
                    except TimeoutError:
                        continue
                    self._receive(message)
            except Exception as error:  # noqa: BLE001 - the machine must neither wait for this lock nor stay away
                log.warning("There are no more warnings before this machine sleeps: %s", error)
            finally:
                self.let_go()
        if not self._has_ended.is_set():
            self._on_warning("awake")

    def _connect(self) -> tuple[DBusConnection, DBusAddress]:
        from jeepney import DBusAddress, MatchRule, Properties, message_bus
        from jeepney.io.blocking import open_dbus_connection

        connection = open_dbus_connection(self._bus, enable_fds=True)
        try:
            logind = DBusAddress(f"/{_LOGIND.replace('.', '/')}", _LOGIND, f"{_LOGIND}.Manager")
            ((_, delay_us),) = _ask(connection, Properties(logind).get("InhibitDelayMaxUSec"))
            self.delay_s = delay_us / 1e6
            for name in _SIGNALS:
                rule = MatchRule(type="signal", interface=logind.interface, member=name)
                _ask(connection, message_bus.AddMatch(rule))
        except BaseException:
            connection.close()
            raise
        return connection, logind

    def _take_lock(self, connection: DBusConnection, logind: DBusAddress) -> None:
        """Take a lock if there is none, unless the machine is about to sleep. A failure is tried again later."""
        from jeepney import new_method_call  # pyright: ignore[reportUnknownVariableType] - it has no types

        if not self._is_awake or self._lock is not None:
            return
        what = ("sleep:shutdown", "mlx-ring", "Its layers move to other machines.", "delay")
        try:
            (lock,) = _ask(connection, new_method_call(logind, "Inhibit", "ssss", what))
        except (TimeoutError, RuntimeError) as error:
            log.debug("There is no lock of logind yet: %s", error)
            return
        with self._changes:
            self._lock = lock.to_raw_fd()

    def _receive(self, message: Message) -> None:
        from jeepney import HeaderFields

        fields = cast("dict[HeaderFields, object]", message.header.fields)
        warned = _SIGNALS.get(str(fields.get(HeaderFields.member)))
        if warned is None:
            return
        (begins,) = cast("tuple[bool]", message.body)
        self._is_awake = not begins
        if begins:
            self._on_warning("sleep" if warned == "sleep" else "shutdown")
        else:
            # A machine that was quickly awake again may still hold the lock of before.
            self.let_go()
            self._on_warning("awake")

    def let_go(self) -> None:
        """Let the system sleep or shut down now. Once it is awake again, there is a new lock."""
        with self._changes:
            lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    def close(self) -> None:
        """End the warnings, and let the system sleep or shut down. The thread ends a moment later."""
        self._has_ended.set()
        self.let_go()


def _ask(connection: DBusConnection, message: Message) -> tuple[Any, ...]:
    """Return the content of an answer. Raises RuntimeError for an error."""
    from jeepney import MessageType

    reply = connection.send_and_get_reply(message, timeout=_ANSWER_S)
    if reply.header.message_type == MessageType.error:
        raise RuntimeError(str(cast("object", reply.body)))
    return cast("tuple[Any, ...]", reply.body)


_IOKIT = Path("/System/Library/Frameworks/IOKit.framework/IOKit")
_CORE_FOUNDATION = Path("/System/Library/Frameworks/CoreFoundation.framework/CoreFoundation")
_CAN_SLEEP, _WILL_SLEEP, _WILL_NOT_SLEEP, _HAS_POWERED_ON = 0xE0000270, 0xE0000280, 0xE0000290, 0xE0000300
"""`kIOMessageCanSystemSleep` and so on (IOMessage.h). Others need no answer."""
_MAC_WAITS_S = 26.0
"""Part of macOS's 30 s that is used: the answer must arrive in time also on a busy machine."""
_RUN_FINISHED = 1
"""`kCFRunLoopRunFinished`: the run loop has no sources."""
_Interest = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_void_p)
"""`IOServiceInterestCallback`: the registered pointer, the service, the message and its argument."""


class MacWarnings(SystemWarnings):
    """Warnings of IOKit. macOS waits for an answer to each message that announces sleep."""

    def __init__(
        self, on_warning: OnWarning, iokit: Path = _IOKIT, core_foundation: Path = _CORE_FOUNDATION
    ) -> None:
        """Prepare.

        Args:
            on_warning: called by a thread.
            iokit: library that announces sleep.
            core_foundation: library with the run loop that receives the messages.
        """
        self.delay_s = 0.0
        self._on_warning, self._paths = on_warning, (iokit, core_foundation)
        self._frameworks: _Frameworks | None = None
        """Set while the process is registered."""
        self._root = 0
        """Port of the power management, to which answers go."""
        self._asked: int | None = None
        """Number of the message that waits for an answer."""
        self._changes = threading.Lock()
        self._has_ended = threading.Event()

    def open(self) -> None:
        """Ask for warnings, in a thread with a run loop. Without IOKit there are none."""
        threading.Thread(target=self._run, name="power warnings", daemon=True).start()

    def _run(self) -> None:
        try:
            frameworks = _Frameworks(*self._paths)
        except (OSError, AttributeError, ValueError) as error:
            log.debug("This machine gives no warnings of sleep: %s", error)
            return
        receive = _Interest(self._receive)
        port, notifier = ctypes.c_void_p(), ctypes.c_uint32()
        iokit, loops = frameworks.iokit, frameworks.loops
        self._root = iokit.IORegisterForSystemPower(None, ctypes.byref(port), receive, ctypes.byref(notifier))
        if not self._root:
            log.debug("This machine gives no warnings of sleep: IOKit does not register this process")
            return
        self._frameworks = frameworks
        source = iokit.IONotificationPortGetRunLoopSource(port)
        loops.CFRunLoopAddSource(loops.CFRunLoopGetCurrent(), source, frameworks.mode)
        self.delay_s = _MAC_WAITS_S
        while not self._has_ended.is_set():
            if loops.CFRunLoopRunInMode(frameworks.mode, _RECEIVE_S, 0) == _RUN_FINISHED:
                break
        self.let_go()
        with self._changes:
            self._frameworks = None
        loops.CFRunLoopRemoveSource(loops.CFRunLoopGetCurrent(), source, frameworks.mode)
        iokit.IODeregisterForSystemPower(ctypes.byref(notifier))
        iokit.IOServiceClose(self._root)
        iokit.IONotificationPortDestroy(port)
        if not self._has_ended.is_set():
            log.warning("There are no more warnings before this machine sleeps: the run loop has ended")
            self._on_warning("awake")

    def _receive(self, _pointer: int | None, _service: int, message: int, number: int | None) -> None:
        """Receive a message. The number is to be repeated in the answer."""
        if message not in (_CAN_SLEEP, _WILL_SLEEP, _WILL_NOT_SLEEP, _HAS_POWERED_ON):
            return
        is_asked = message in (_CAN_SLEEP, _WILL_SLEEP)
        with self._changes:
            self._asked = (number or 0) if is_asked else None
        if message == _CAN_SLEEP or self._has_ended.is_set():
            self.let_go()
            return
        try:
            self._on_warning("sleep" if message == _WILL_SLEEP else "awake")
        except RuntimeError:  # the event loop has ended
            self.let_go()

    def let_go(self) -> None:
        """Answer that the system may sleep, if it waits for that."""
        with self._changes:
            asked, self._asked = self._asked, None
            if asked is not None and self._frameworks is not None:
                self._frameworks.iokit.IOAllowPowerChange(self._root, asked)

    def close(self) -> None:
        """End the warnings, and let the system sleep. The thread ends a moment later."""
        self._has_ended.set()
        self.let_go()


class _Frameworks:
    """The functions of macOS that are used, with their types (IOPMLib.h, IOKitLib.h, CFRunLoop.h)."""

    def __init__(self, iokit: Path, core_foundation: Path) -> None:
        """Load them.

        Raises:
            OSError: a library cannot be loaded.
            AttributeError: it has no such function.
            ValueError: it has no such variable.
        """
        self.iokit, self.loops = ctypes.CDLL(str(iokit)), ctypes.CDLL(str(core_foundation))
        pointer, name = ctypes.c_void_p, ctypes.c_uint32
        out = ctypes.POINTER
        types: dict[str, tuple[Any, list[Any]]] = {
            "IORegisterForSystemPower": (name, [pointer, out(pointer), _Interest, out(name)]),
            "IODeregisterForSystemPower": (ctypes.c_int, [out(name)]),
            "IOAllowPowerChange": (ctypes.c_int, [name, ctypes.c_ssize_t]),
            "IOServiceClose": (ctypes.c_int, [name]),
            "IONotificationPortGetRunLoopSource": (pointer, [pointer]),
            "IONotificationPortDestroy": (None, [pointer]),
            "CFRunLoopGetCurrent": (pointer, []),
            "CFRunLoopAddSource": (None, [pointer, pointer, pointer]),
            "CFRunLoopRemoveSource": (None, [pointer, pointer, pointer]),
            "CFRunLoopRunInMode": (ctypes.c_int32, [pointer, ctypes.c_double, ctypes.c_ubyte]),
        }
        for function, (returns, takes) in types.items():
            found = getattr(self.iokit if function.startswith("IO") else self.loops, function)
            found.restype, found.argtypes = returns, takes
        self.mode = ctypes.c_void_p.in_dll(self.loops, "kCFRunLoopDefaultMode")
        """Mode of the run loop, a string of CoreFoundation."""
