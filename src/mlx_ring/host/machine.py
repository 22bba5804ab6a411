"""Resources from the operating system: a name, an address, a folder for sockets, descriptors, cores, the machine's model.

Also how much of it its user and other programs need just now.

The machine's model comes from its makers' names: nothing is measured, and MLX is not asked.
"""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import psutil

from mlx_ring.core.errors import AddressInUse, ConfigError
from mlx_ring.host.addresses import EVERY_IPV4, bare_host, scoped_host
from mlx_ring.host.power import is_on_battery
from mlx_ring.host.process import ROOT, usable_cores
from mlx_ring.host.running import RUN_FOLDER, owned, remove_abandoned

SOCKET_PATH_LIMIT = 103
"""Most bytes in a Unix socket's path: 104 with its end on macOS, 108 on Linux."""
_LONGEST_SOCKET_NAME = len("/mlx-ring-12345678/a99/worker-1000.sock")


def node_name() -> str:
    """Return the machine's name, as in logs and greetings."""
    return socket.gethostname().split(".", 1)[0] or "local"


def listen(host: str, port: int) -> socket.socket:
    """Bind the address before anything is loaded.

    Raises:
        AddressInUse: another process has it.
        ConfigError: it is not an address of this machine, or cannot be used.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            scoped_host(host, "--host"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(
            f"--host is {host}, which is not a valid address: {getattr(error, 'strerror', None) or error}. Give a name or an IP address."
        ) from error
    try:
        server = socket.socket(family, kind, protocol)
    except OSError as error:  # a system without IPv6
        raise ConfigError(
            f"--host is {host}, but this machine cannot open such an address ({error.strerror}): give another."
        ) from error
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind(address)
        server.listen(2048)
    except OSError as error:
        server.close()
        if error.errno == errno.EADDRINUSE:
            raise AddressInUse(
                f"Port {port} on {host} is in use by another process, perhaps a server that `mlx-ring ps` lists: stop it, or "
                "choose another port with --port."
            ) from error
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(
                f"--host is {host}, which is no address of this machine: give one that it has, or 0.0.0.0 for all of them."
            ) from error
        raise ConfigError(f"Port {port} on {host} cannot be opened: {error.strerror}.") from error
    return server


class NodePorts:
    """Ports on which this machine's agent and its workers listen for other machines, each picked once it is needed."""

    def __init__(self, first_and_last: Sequence[int]) -> None:
        """Use the ports from the first to the last one; without them, the system picks free ones."""
        self._ports = range(first_and_last[0], first_and_last[-1] + 1) if first_and_last else range(0)
        self._taken: Counter[int] = Counter()
        """Ports of processes that have not ended. One that was started a moment ago may not listen yet."""

    def take(self, host: str) -> int:
        """Return a port that is free on an address, and keep it; 0, with which the system picks one, without a range.

        Raises:
            AddressInUse: all of them are taken.
        """
        if not self._ports:
            return 0
        for port in self._ports:
            if not self._taken[port] and _is_free(bare_host(host), port):
                self._taken[port] += 1
                return port
        raise AddressInUse(
            f"--node-ports is {self._ports[0]}-{self._ports[-1]}, and all of these ports are taken on {host}. End what listens "
            "there, or give more ports: two for the agent, and two for each worker."
        )

    def at(self, host: str) -> str:
        """Return an address with such a port."""
        return f"{host}:{self.take(host)}"

    def give_back(self, ports: Iterable[int]) -> None:
        """Let other processes have ports of one that has ended."""
        self._taken.subtract(ports)


class ProcessPorts:
    """Ports that one process has until it ends."""

    def __init__(self, ports: NodePorts) -> None:
        """Start without a port of this machine's."""
        self._ports, self._taken = ports, list[int]()

    def at(self, host: str) -> str:
        """Return an address with another port. Raises `AddressInUse` if all are taken."""
        self._taken.append(self._ports.take(host))
        return f"{host}:{self._taken[-1]}"

    def give_back(self) -> None:
        """Let other processes have the ports, because this one has ended, or was not started."""
        taken, self._taken = self._taken, []
        self._ports.give_back(taken)


def _is_free(host: str, port: int) -> bool:
    """Report whether a server could listen there. Ended connections that the system still remembers do not matter."""
    if host == "::" and not socket.has_dualstack_ipv6():
        host = EVERY_IPV4  # as gRPC does on a system without IPv6
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            # As gRPC listens: a server on IPv4 has the port, too.
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        try:
            probe.bind(address)
            probe.listen(1)
        except OSError as error:
            return error.errno not in (errno.EADDRINUSE, errno.EACCES)
    return True


def share_cores(stages: int) -> int:
    """Return the default BLAS threads for each worker: the cores that we may use but one, shared."""
    return max(1, (usable_cores() - 1) // stages)


@contextlib.contextmanager
def make_run_folder(parent: Path | None) -> Generator[Path]:
    """Make a private folder for sockets, and remove it afterwards. Also remove those of killed processes.

    Args:
        parent: folder in which to make it; None: the system's folder for temporary files.

    Raises:
        ConfigError: the path of a socket in it would be too long, or it cannot be created.
    """
    parents = [parent] if parent is not None else [Path(tempfile.gettempdir()), Path("/tmp")]  # noqa: S108 - mkdtemp makes a private folder there
    short = [path for path in parents if len(os.fsencode(path)) + _LONGEST_SOCKET_NAME <= SOCKET_PATH_LIMIT]
    if not short:
        raise ConfigError(
            f"--run-dir is {parent}, whose path is too long for sockets in it: "
            f"use one of at most {SOCKET_PATH_LIMIT - _LONGEST_SOCKET_NAME} bytes."
        )
    try:
        short[0].mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=RUN_FOLDER, dir=short[0]))
    except OSError as error:
        raise ConfigError(f"No folder for sockets can be created in {short[0]}: {error.strerror}.") from error
    try:
        with owned(folder):
            remove_abandoned(short[0])
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def raise_descriptor_limit(wanted: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    ceiling = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < ceiling:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (ceiling, hard))


def descriptor_limit() -> int:
    """Return how many descriptors this process may have, up to a million."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else min(soft, _MOST_DESCRIPTORS)


_MOST_DESCRIPTORS = 1 << 20
_ASK_LIMIT_S = 5.0


@dataclass(frozen=True, slots=True)
class MachineIdentity:
    """Model of a machine; a field is empty if the system does not know it."""

    model: str
    processor: str
    gpus: tuple[str, ...] = ()
    """GPUs beside the processor; Apple's are part of it."""


@cache
def machine_identity() -> MachineIdentity:
    """Return the identity of this machine."""
    if platform.system() == "Darwin":
        return MachineIdentity(_ask_mac("hw.model"), _ask_mac("machdep.cpu.brand_string"))
    return linux_identity(ROOT)


def linux_identity(root: Path) -> MachineIdentity:
    """Read a Linux machine's identity below a root of the file system."""
    cards = sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))
    processor = _after_colon(root / "proc/cpuinfo", "model name") or platform.machine()
    return MachineIdentity(
        _text(root / "sys/class/dmi/id/product_name").strip(),
        processor,
        tuple(_after_colon(card, "Model") for card in cards),
    )


def _ask_mac(name: str) -> str:
    return _printed("/usr/sbin/sysctl", "-n", name).strip()


def _printed(*command: str) -> str:
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return asked.stdout


def _after_colon(file: Path, name: str) -> str:
    """Return the value in the first line that begins with a name."""
    lines = (line.partition(":") for line in _text(file).splitlines())
    return next((value.strip() for key, _, value in lines if key.strip() == name), "")


def _text(file: Path) -> str:
    try:
        return file.read_text("utf-8", errors="replace")
    except OSError:
        return ""


# ---- use by the user and other programs


@dataclass(frozen=True, slots=True)
class Use:
    """Use of this machine by its user and by other programs, at one moment."""

    cores: float
    """Cores of the machine."""
    others: float
    """Cores that other programs have used since the last reading."""
    is_on_battery: bool = False
    is_memory_short: bool = False
    idle_s: float | None = None
    """Seconds since the user's last key or movement; None if the system does not say."""


class ReadsUse(Protocol):
    """Reader of the machine's use."""

    def read(self) -> Use:
        """Return the use since the last call. May take a moment.

        Raises:
            OSError: the system does not say.
        """
        ...


_RECLASSIFIED = 30
"""Readings after which each process is asked for its program again: a new one may not have begun it."""
_SHORT_STALL = 10.0
"""Share of the last ten seconds, in percent, in which a process waited for memory (Linux's `/proc/pressure/memory`)."""
_SHORT_SHARE = 0.05
"""Share of the memory below which it is short, where Linux counts no such waits."""
_MAC_WARNS = 2
"""Level of `kern.memorystatus_vm_pressure_level` from which memory is short: 1 is normal, 2 a warning, 4 critical."""
_MAC_READ_S = 5.0
"""Time for which what a Mac's programs print is used again."""


class SystemUse:
    """Use as the operating system counts it. Processes of mlx-ring are no other programs, nor are their children."""

    def __init__(self, root: Path = ROOT) -> None:
        """Begin to count; `root` is that of the file system."""
        self._root = root
        self._is_own: dict[psutil.Process, bool] = {}
        self._readings = 0
        self._before = self._count()
        self._mac: tuple[float, bool, float | None] | None = None

    def read(self) -> Use:
        """Return the use since the last call."""
        (then_s, busy_before_s, own_before), now = self._before, self._count()
        now_s, busy_s, own = self._before = now
        own_s = sum(max(0.0, seconds - own_before.get(process, 0.0)) for process, seconds in own.items())
        others = (busy_s - busy_before_s - own_s) / max(1e-3, now_s - then_s)
        cores = float(psutil.cpu_count() or 1)
        is_short, idle_s = self._read_mac() if sys.platform == "darwin" else (self._is_memory_short(), None)
        return Use(cores, min(cores, max(0.0, others)), is_on_battery(), is_short, idle_s)

    def _count(self) -> tuple[float, float, Mapping[psutil.Process, float]]:
        """Return the time, and the CPU seconds of all processes and of each own one."""
        self._readings += 1
        if self._readings % _RECLASSIFIED == 0:
            self._is_own.clear()
        present = {process: self._is_own.get(process) for process in psutil.process_iter()}
        own_pids = {process.pid for process, known in present.items() if known} | {os.getpid()}
        for process, known in present.items():
            if known is None and is_own(process, own_pids):
                own_pids.add(process.pid)
        self._is_own = {process: process.pid in own_pids for process in present}
        own = {process: _cpu_s(process) for process in present if process.pid in own_pids}
        times = psutil.cpu_times()
        # Interrupts may be of this program's own traffic, and so may threads of the kernel, which count as own.
        busy_s = sum(getattr(times, name, 0.0) for name in ("user", "nice", "system"))
        return time.monotonic(), busy_s, own

    def _is_memory_short(self) -> bool:
        try:
            return stalls(self._root.joinpath("proc/pressure/memory").read_text()) >= _SHORT_STALL
        except OSError:  # a kernel without it, or one that has switched it off
            memory = psutil.virtual_memory()
            return memory.available < _SHORT_SHARE * memory.total

    def _read_mac(self) -> tuple[bool, float | None]:
        now = time.monotonic()
        if self._mac is None or now - self._mac[0] >= _MAC_READ_S:
            level = _ask_mac("kern.memorystatus_vm_pressure_level")
            idle_s = mac_idle_s(_printed("/usr/sbin/ioreg", "-c", "IOHIDSystem", "-d", "4"))
            self._mac = now, level.isdigit() and int(level) >= _MAC_WARNS, idle_s
        return self._mac[1:]


_KERNEL_THREADS = 2
"""Parent of the kernel's threads on Linux. On macOS the kernel is process 0."""


def is_own(process: psutil.Process, own: Collection[int]) -> bool:
    """Report whether a process is one of mlx-ring: a child of these, by its command line, or a thread of the kernel."""
    try:
        parent = process.ppid()
        is_kernel = sys.platform == "linux" and _KERNEL_THREADS in (parent, process.pid)
        return is_kernel or not process.pid or parent in own or is_own_program(process.cmdline())
    except (psutil.Error, OSError):
        return False


def is_own_program(command: Sequence[str]) -> bool:
    """Report whether a command line is that of mlx-ring, as a module or as the installed program."""
    if any(Path(part).name == "mlx-ring" for part in command[:2]):
        return True
    modules = [after for option, after in pairwise(command[:5]) if option == "-m"]
    return any(module == "mlx_ring" or module.startswith("mlx_ring.") for module in modules)


def _cpu_s(process: psutil.Process) -> float:
    with contextlib.suppress(psutil.Error, OSError):
        return sum(process.cpu_times()[:2])
    return 0.0


def stalls(pressure: str) -> float:
    """Return the percentage of the last ten seconds in which a process waited, from a file of `/proc/pressure`; else 0."""
    found = re.search(r"^some avg10=([\d.]+)", pressure, re.MULTILINE)
    return 0.0 if found is None else float(found[1])


def mac_idle_s(registry: str) -> float | None:
    """Return the seconds since the user's last key or movement, from what `ioreg -c IOHIDSystem` prints."""
    found = re.search(r'"HIDIdleTime" = (\d+)', registry)
    return None if found is None else int(found[1]) / 1e9
