"""Diagnosis of this machine alone: memory, limits, folders, MLX, firewalls, fast links, and RDMA over Thunderbolt on a Mac."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlx_cpu_kernels.build import advice
from mlx_ring.cli.doctor import Finding
from mlx_ring.core.environment import inherited_environment, package_version
from mlx_ring.core.folders import is_there
from mlx_ring.host.energy import find_counters
from mlx_ring.host.interfaces import LanAddress
from mlx_ring.host.process import UsableMemory, usable_memory

ROOT = Path("/")
GIB = 1 << 30
_LITTLE_MEMORY, _LITTLE_LEFT = 4 * GIB, GIB
_LITTLE_DISK, _NO_DISK = 10 * GIB, GIB
_FEW_FILES = 512
"""Open files and connections with which a server answers few clients at a time."""
_OPEN_TO_OTHERS = 0o077
_MLX_S, _ASK_S = 120.0, 10.0
_TRY_MLX = (
    "import mlx.core as mx, mlx_cpu_kernels; "
    # As workers import mlx-lm, which asks for more open files than a machine may allow.
    "from mlx_ring.core.lean_imports import import_mlx_lm; import_mlx_lm(); "
    "print(mx.default_device().type.name, int(mx.sum(mx.ones((8, 8)) @ mx.ones((8, 8))).item())); "
    "products = mlx_cpu_kernels.speed_up(); print(products); print(products.kernels)"
)
_MLX_SAYS = "512"


def check_installed() -> Finding:
    """Check the packages whose versions must be equal in a cluster."""
    versions = {name: package_version(name) for name in ("mlx-ring", "mlx", "mlx-lm")}
    translated = sys.platform == "darwin" and ask(("sysctl", "-n", "sysctl.proc_translated")) == "1"
    return judge_installed(versions, is_translated=translated)


def judge_installed(versions: Mapping[str, str], *, is_translated: bool) -> Finding:
    """Judge the versions of packages, by name. A translated Python is one for Intel on a Mac with Apple silicon."""
    absent = [name for name, version in versions.items() if version == "absent"]
    value = ", ".join(f"{name} {version}" for name, version in versions.items())
    if is_translated:
        return Finding(
            "broken",
            "versions",
            f"{value}; this Python is for Intel, and Rosetta translates it",
            "MLX needs a Python for Apple silicon: delete .venv and run `make setup`, which finds or fetches one.",
        )
    if absent:
        return Finding(
            "broken", "versions", value, f"Install {' and '.join(absent)}: `make setup` in the checkout."
        )
    return Finding("ok", "versions", value)


def check_mlx() -> Iterator[Finding]:
    """Check that MLX computes, and on a CPU by what. It does in its own process: this one must not hold a device."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TRY_MLX], capture_output=True, text=True, timeout=_MLX_S, check=False
        )
    except subprocess.TimeoutExpired:
        yield Finding("broken", "MLX", f"no answer in {_MLX_S:g} s", _MEND_MLX)
        return
    first, _, products = done.stdout.partition("\n")
    device, _, result = first.partition(" ")
    if done.returncode == 0 and result == _MLX_SAYS:
        yield Finding("ok", "MLX", f"computes on the {device.upper()}")
        if device == "cpu" and sys.platform == "linux":
            description, _, kernels = products.strip("\n").partition("\n")
            yield judge_products(description, kernels=kernels)
        return
    last = next(
        (line for line in reversed(done.stderr.splitlines()) if line.strip()), f"exit {done.returncode}"
    )
    yield Finding("broken", "MLX", last.strip(), _MEND_MLX)


_WITHOUT_KERNELS = (
    "Models with quantized weights are slow here, or take about seven times the memory (--cpu-weights)."
)


def judge_products(products: str, *, kernels: str) -> Finding:
    """Judge what computes products on this CPU, with its description. `kernels` is empty without native kernels."""
    if kernels:
        return Finding("ok", "products", products)
    return Finding("warning", "products", products, f"{_WITHOUT_KERNELS} {advice()}")


_MEND_MLX = (
    "Reinstall mlx and mlx-lm in this environment; on a Mac, macOS and Python must be for Apple silicon."
)


def check_memory(root: Path = ROOT) -> Finding:
    """Check the memory that processes may use, with a container's limit."""
    return judge_memory(usable_memory(root))


def judge_memory(memory: UsableMemory) -> Finding:
    value = (
        f"{_gib(memory.total_bytes)}, of which {_gib(memory.available_bytes)} are free; "
        f"the limit is {memory.limited_by}"
    )
    if memory.limited_by != "the machine" and memory.total_bytes < _LITTLE_MEMORY:
        fix = "Give this container more memory (docker run --memory, or the unit's MemoryMax)."
        return Finding("warning", "memory", value, fix)
    if memory.total_bytes < _LITTLE_MEMORY:
        return Finding("warning", "memory", value, "Only stages of small models fit on this machine.")
    if memory.available_bytes < _LITTLE_LEFT:
        return Finding("warning", "memory", value, "Close other programs before loading a model.")
    if memory.limited_by != "the machine":
        fix = "Raise that limit if a model does not fit (docker run --memory, or the unit's MemoryMax)."
        return Finding("note", "memory", value, fix)
    return Finding("ok", "memory", value)


def check_energy(root: Path = ROOT) -> Finding:
    """Check which parts of this machine count their energy, for `/metrics` and the page."""
    counters, problems = find_counters(root)
    parts = sorted({part for counter in counters for part in counter.read()})
    value = f"counted by {', '.join(parts)}" if parts else "not counted"
    if problems:
        is_file = any(problem.endswith("root alone") for problem in problems)
        fix = "Run as root, or let this user read the file. Nothing else needs it." if is_file else ""
        return Finding("note", "energy", f"{value}; {'; '.join(problems)}", fix)
    return Finding("ok", "energy", value if parts else f"{value}: this system has no counters of it")


def check_address_space() -> Finding:
    """Check `ulimit -v`, because it also counts mapped weights."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY:
        return Finding("ok", "address space", "unlimited")
    fix = (
        "Raise it with `ulimit -v unlimited`, or LimitAS=infinity in the unit: models are mapped into memory."
    )
    return Finding("broken" if soft < _LITTLE_MEMORY else "warning", "address space", _gib(soft), fix)


def check_descriptors(wanted: int) -> Finding:
    """Check the limit of open files and connections; `serve` raises the soft limit up to the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
    value = f"{soft}, at most {most}"
    if hard != resource.RLIM_INFINITY and hard < wanted:
        fix = f"Raise the hard limit to {wanted}: `ulimit -Hn`, /etc/security/limits.conf, or LimitNOFILE in the unit."
        return Finding("broken" if hard < _FEW_FILES else "warning", "open files", value, fix)
    return Finding("ok", "open files", value)


def check_wired_limit() -> Sequence[Finding]:
    """Check the memory that a Mac's GPU may hold; other machines have no such setting."""
    if sys.platform != "darwin":
        return ()
    text = ask(["/usr/sbin/sysctl", "-n", "iogpu.wired_limit_mb"])
    return (judge_wired_limit(text),)


def judge_wired_limit(text: str) -> Finding:
    """Judge the limit; 0 means macOS's default, two thirds to three quarters."""
    if text in ("", "0"):
        return Finding("note", "GPU memory", "macOS's own limit", _RAISE_WIRED)
    return Finding("ok", "GPU memory", f"{text} MB")


_RAISE_WIRED = (
    "If a model barely does not fit: `sudo sysctl iogpu.wired_limit_mb=MB`, but leave some GB to macOS."
)


def check_state_folder(folder: Path) -> Finding:
    """Check that the state folder can be written, and that other users cannot read it."""
    value = str(folder)
    there = _nearest(folder)
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        fix = f"Make {there} writable for you, or choose another folder with --state-dir."
        return Finding("broken", "state folder", f"{value} cannot be written ({error.strerror})", fix)
    if there != folder:
        return Finding("ok", "state folder", f"{value}, not created yet")
    if folder.stat().st_mode & _OPEN_TO_OTHERS:
        return Finding(
            "warning", "state folder", f"{value} is open to others", f"Close it: chmod -R go= '{folder}'."
        )
    return Finding("ok", "state folder", value)


def check_disk(folder: Path) -> Finding:
    """Check the free space for weights."""
    there = _nearest(folder)
    free = shutil.disk_usage(there).free
    value = f"{_gib(free)} free at {there}"
    fix = "Free some space: a node keeps the weights of its layers on disk."
    if free < _LITTLE_DISK:
        return Finding("broken" if free < _NO_DISK else "warning", "disk", value, fix)
    return Finding("ok", "disk", value)


def check_fast_links(addresses: Sequence[LanAddress], root: Path = ROOT) -> Finding:
    """Look for Thunderbolt and RDMA, which are faster than a network card."""
    found = [f"{one.kind} at {one.address}" for one in addresses if one.kind in ("thunderbolt", "infiniband")]
    found += _rdma_devices(root)
    if found:
        return Finding("ok", "fast links", ", ".join(found))
    if _has_thunderbolt(root):
        return Finding("note", "fast links", "Thunderbolt without an address", _CABLE)
    return Finding("note", "fast links", "neither Thunderbolt nor RDMA", _ETHERNET_WILL_DO)


_ETHERNET_WILL_DO = "Gigabit Ethernet suffices for a stage on each machine; faster cables shorten the time to the first token."
_CABLE = (
    "Two machines with a Thunderbolt cable between them are a fast network. On Linux load thunderbolt-net; "
    "on a Mac either use the Thunderbolt Bridge, for IP between stages, or turn it off, for MLX's ring and jaccl "
    "(tensor parallelism). See docs/macos.md."
)


def _rdma_devices(root: Path) -> list[str]:
    """List RDMA devices: from `/sys` on Linux, by a program on macOS 26.2 or newer."""
    folder = root / "sys" / "class" / "infiniband"
    devices = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    if sys.platform == "darwin" and ask(["/usr/bin/rdma_ctl", "status"]) == "enabled":
        devices.append("Thunderbolt")
    return [f"RDMA over {device}" for device in devices]


def _has_thunderbolt(root: Path) -> bool:
    folder = root / "sys" / "bus" / "thunderbolt" / "devices"
    return sys.platform == "darwin" or (folder.is_dir() and any(folder.iterdir()))


def check_firewall(ports: Sequence[int], root: Path = ROOT) -> Finding:
    """Check whether a firewall is active. Only a try from another machine would show what its rules block."""
    firewalls = _MAC_FIREWALLS if sys.platform == "darwin" else _LINUX_FIREWALLS
    # None of the programs changes anything.
    said = [(each, _state_of(each.command)) for each in firewalls if _program(each.command[0])]
    active = [each.name for each, output in said if output and firewall_is_on(each.name, output)]
    answered = [each.name for each, output in said if output is not None]
    failed = [each for each, _ in said if each.name not in answered]
    if "ufw" in {each.name for each in failed} and _is_enabled(root / _UFW_FILE):
        active.insert(0, "ufw")
    needed = (
        f"TCP ports {' and '.join(map(str, ports))} and UDP port 5353; and, from the machines of the cluster, every TCP port, "
        "because agents, workers and links listen on free ones"
    )
    if active:
        return Finding("note", "firewall", f"{', '.join(active)} is on", firewall_remedy(active, needed))
    if failed:
        value = f"unknown, because {', '.join(each.command[0] for each in failed)} gave no answer"
        commands = ", ".join(f"`{shlex.join(('sudo', *each.command))}`" for each in failed)
        remedy = firewall_remedy([each.name for each in failed], needed)
        who = (
            "Ask as root"
            if os.geteuid()
            else "Root gets no answer here, as in a container. Ask on the machine itself"
        )
        fix = f"{who}: {commands}. Only if one is on: {remedy}"
        return Finding("note", "firewall", value, fix)
    return Finding("ok", "firewall", "none was found on this machine")


def firewall_remedy(active: Sequence[str], needed: str) -> str:
    """Return what to do about active firewalls, of which macOS's allows programs and not ports."""
    if _OF_MACOS not in active:
        return f"Let other machines reach {needed}."
    python = shlex.quote(str(Path(sys.executable).resolve()))
    return (
        "macOS asks once for each Python, in a window that nobody sees over ssh. Allow this one by "
        f"`sudo {_SOCKET_FILTER} --add {python} --unblockapp {python}`, and again after an update of Python."
    )


_OF_MACOS = "macOS's firewall"
_SOCKET_FILTER = "/usr/libexec/ApplicationFirewall/socketfilterfw"
_UFW_FILE = "etc/ufw/ufw.conf"
"""File that every user may read, below the root. It says whether ufw starts with the machine."""


@dataclass(frozen=True, slots=True)
class _Firewall:
    name: str
    command: tuple[str, ...]
    """Command that prints its state."""
    active: str
    """Pattern of a line that it prints if it is active."""


_MAC_FIREWALLS = (_Firewall(_OF_MACOS, (_SOCKET_FILTER, "--getglobalstate"), r"State = [12]"),)
_LINUX_FIREWALLS = (
    _Firewall("ufw", ("ufw", "status"), r"^Status: active"),
    _Firewall("firewalld", ("firewall-cmd", "--state"), r"^running"),
    _Firewall("nftables", ("nft", "list", "chains"), r"hook input .*policy (drop|reject)"),
    _Firewall("iptables", ("iptables", "-S", "INPUT"), r"^-P INPUT DROP|-j (DROP|REJECT)"),
)
_ACTIVE = {each.name: each.active for each in (*_MAC_FIREWALLS, *_LINUX_FIREWALLS)}


def firewall_is_on(name: str, output: str) -> bool:
    """Return True if a firewall's program reports that it is active."""
    return re.search(_ACTIVE[name], output, re.MULTILINE) is not None


def _is_enabled(file: Path) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return re.search(r"(?im)^\s*ENABLED=[\"']?yes\b", file.read_text()) is not None
    return False


def _program(name: str) -> str | None:
    """Return the path of a program, also in the folders for root's programs, which a user's PATH may lack."""
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")


def _state_of(command: Sequence[str]) -> str | None:
    """Return the output of a firewall's program; None if it fails, as most do for ordinary users."""
    words = (_program(command[0]) or command[0], *command[1:])
    english = inherited_environment({"LC_ALL": "C"})
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_ASK_S, check=False, env=english)
    except (OSError, subprocess.TimeoutExpired):
        return None
    # firewalld says that it is off by an exit code too.
    has_answered = done.returncode == 0 or "not running" in done.stdout + done.stderr
    return done.stdout if has_answered else None


def ask(command: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """Return a program's output; nothing if it is missing or fails."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_ASK_S, check=False, env=environment
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _nearest(folder: Path) -> Path:
    """Return the folder, or its nearest parent that exists."""
    return next(path for path in (folder, *folder.parents) if is_there(path))


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.1f} GiB"


_FIRST_MACOS = (26, 2)
_NAME = "RDMA"
_RECOVERY = (
    "Shut the Mac down, hold its power button until it shows its options, open a Terminal in Recovery, run "
    "`rdma_ctl enable` and restart. Both machines need it."
)
_PORTS = (
    "Thunderbolt 4 hardware never has RDMA, whatever `rdma_ctl` says. With Thunderbolt 5, connect the machines by a "
    "Thunderbolt 5 cable, of a Mac Studio not at the port next to Ethernet."
)
_BRIDGE = (
    "For jaccl, turn the Thunderbolt Bridge off on all machines, or ranks fail with RTR errno 22: "
    "`sudo networksetup -setnetworkserviceenabled 'Thunderbolt Bridge' off`. For IP over it, leave it on."
)
_NO_IPV4 = (
    "Give each port an IPv4 address (System Settings > Network, DHCP or by hand): RDMA needs one, or ranks fail with "
    "RTR errno 22."
)
_NEXT = (
    "`mlx.distributed_config --backend jaccl` writes a hostfile that names the device for each connection."
)


def check_rdma() -> Iterator[Finding]:
    """Check RDMA on a Mac; MLX supports jaccl nowhere else."""
    if sys.platform == "darwin":
        devices = ask(["/usr/bin/ibv_devices"])
        yield judge_rdma(platform.mac_ver()[0], ask(["/usr/bin/rdma_ctl", "status"]), devices)
        if names := _rdma_names(devices):
            ports = {name: ask(["/sbin/ifconfig", name.removeprefix("rdma_")]) for name in names}
            yield judge_rdma_ports(ports, ask(["/sbin/ifconfig", "bridge0"]))


def judge_rdma(macos: str, status: str, devices: str) -> Finding:
    """Name the first requirement that is missing.

    Args:
        macos: version of macOS.
        status: output of `rdma_ctl status`; empty without that program.
        devices: output of `ibv_devices`, a table with names in its first column.
    """
    version = tuple(int(part) for part in macos.split(".")[:2] if part.isdecimal())
    if version < _FIRST_MACOS:
        return Finding(
            "note",
            _NAME,
            f"macOS {macos} has none",
            "Update to macOS 26.2 or newer for RDMA over Thunderbolt 5.",
        )
    if status != "enabled":
        return Finding("note", _NAME, f"it is {status or 'not there'}", _RECOVERY)
    names = _rdma_names(devices)
    if not names:
        return Finding("note", _NAME, "enabled, without a device", _PORTS)
    return Finding("ok", _NAME, f"{', '.join(names)}. {_NEXT}")


def _rdma_names(devices: str) -> list[str]:
    return [line.split()[0] for line in devices.splitlines() if line.strip().startswith("rdma_")]


def judge_rdma_ports(ports: Mapping[str, str], bridge: str) -> Finding:
    """Judge whether the connected ports can carry RDMA.

    Args:
        ports: output of `ifconfig` for the interface of each RDMA device.
        bridge: output of `ifconfig bridge0`; empty without a Thunderbolt Bridge.
    """
    active = [name for name, said in ports.items() if "status: active" in said]
    bridged = [name for name in active if f"member: {name.removeprefix('rdma_')} " in bridge]
    if bridged:
        value = f"the Thunderbolt Bridge holds the ports of {', '.join(bridged)}"
        return Finding("note", "RDMA ports", value, _BRIDGE)
    bare = [name for name in active if "inet " not in ports[name]]
    if bare:
        return Finding("note", "RDMA ports", f"no IPv4 address at {', '.join(bare)}", _NO_IPV4)
    if not active:
        return Finding("note", "RDMA ports", "no cable is active", _PORTS)
    return Finding("ok", "RDMA ports", f"{', '.join(active)} have IPv4 addresses outside the bridge")
