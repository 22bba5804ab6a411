"""With which arguments a file's machines run `serve` and `join`. Pure.

Which of a file's machines is this one, and how the others reach the coordinator.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import subprocess
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import psutil

from mlx_ring.core.cluster_folders import logs_folder
from mlx_ring.core.errors import ConfigError
from mlx_ring.host.addresses import HeadAddress, bracketed
from mlx_ring.settings.config import Settings, field_of_key, flag_name
from mlx_ring.settings.devices_file import Device, DevicesFile
from mlx_ring.settings.settings_sources import check_values

_FROM_THE_FILE = {
    "model": "`model`",
    "nodes": "the number of `devices`",
    "cluster_host": "the coordinator's `address`",
    "cluster_port": "the coordinator's `port`",
    "strategy": "`sharding`",
    "proportions": "`sharding`",
    "memory_limit": "`capabilities`",
    "state_dir": "a device's `state_dir`",
    "log_dir": "a device's `state_dir`, with its folder `logs`,",
}
FOR_AGENTS = (
    *("log_level", "log_format", "blas", "blas_threads", "weights_limit", "model_load_timeout"),
    *("file_descriptor_limit", "run_dir", "trusted_interface"),
)
"""Of the settings under `serve`, those that `join` takes too: they hold for every machine. Others are the head's alone,
or reach the machines with what they are told to load."""
_FILES = ("api_key_file", "ssl_certfile", "ssl_keyfile")
"""Of the coordinator, where nobody knows the folder of whoever starts it."""
_STAGES = "stages"
_SECRETS = {
    "api_key": "give api-key-file, a file on the coordinator",
    "ssl_keyfile_password": "give a key that is not locked, in a file on the coordinator that only its owner reads",
}


def head_arguments(file: DevicesFile, model: str, state: str, ids: Mapping[str, str]) -> list[str]:
    """Of the coordinator.

    Args:
        file: as it was read.
        model: to serve.
        state: the coordinator's state folder.
        ids: of the nodes, by the devices' names.

    Raises:
        ConfigError: a setting under `serve` is none, has a value that it cannot have, or stands elsewhere in the file.
    """
    device, several = file.coordinator, len(file.devices) > 1
    words = ["serve", model]
    if several:
        words += ["--nodes", str(len(file.devices)), "--cluster-port", str(device.port)]
        # Its output stays in a file, where no token is to lie.
        words += ["--no-join-lines"]
        words += ["--strategy", file.strategy] if file.strategy else []
        words += ["--cluster-host", bracketed(device.address)] if device.address else []
    if several and file.proportions:
        shares = zip(file.devices, file.proportions, strict=True)
        words += ["--proportions", ",".join(f"{ids[device.name]}={share:g}" for device, share in shares)]
    return [*words, *_memory(device), *_folders(state), *_flags(_more_settings(file) | _trusted(device))]


def agent_arguments(file: DevicesFile, device: Device, head: HeadAddress, state: str) -> list[str]:
    """Of another machine, with what the file says for all of them.

    Raises:
        ConfigError: as `head_arguments`.
    """
    listen = ("--listen", bracketed(device.address)) if device.address else ()
    shared = {name: value for name, value in _more_settings(file).items() if name in FOR_AGENTS}
    return [
        "join",
        str(head),
        *listen,
        *_memory(device),
        *_folders(state),
        *_flags(shared | _trusted(device)),
    ]


def _memory(device: Device) -> Iterator[str]:
    if device.memory_gb is not None:
        yield from ("--memory-limit", f"{device.memory_gb:g}GiB")
    if device.memory_utilization is not None:
        yield from ("--memory-utilization", str(device.memory_utilization))


def _trusted(device: Device) -> dict[str, str]:
    """A device's own wins over what holds for all."""
    return {"trusted_interface": device.trusted_interface} if device.trusted_interface else {}


def _folders(state: str) -> list[str]:
    return ["--state-dir", state, "--log-dir", logs_folder(state)]


def _flags(settings: Mapping[str, str]) -> Iterator[str]:
    for name, value in settings.items():
        yield from (flag_name(name), value)


def _more_settings(file: DevicesFile) -> dict[str, str]:
    """By field of `Settings`, as flags have them."""
    found: dict[str, str] = {}
    for key, value in file.serve.items():
        name = field_of_key(str(key))
        _check_key(str(key), name, value, several=len(file.devices) > 1)
        if name in found:
            raise ConfigError(f"`serve` has the key {key} twice, under two spellings of its name.")
        found[name] = _text(value)
    check_values(found, " under `serve`")
    return found


def _check_key(key: str, name: str, value: object, *, several: bool) -> None:
    if name in _FROM_THE_FILE:
        raise ConfigError(f"`serve` has the key {key}, which {_FROM_THE_FILE[name]} says.")
    if name == _STAGES and several:
        raise ConfigError(f"`serve` has the key {key}, which the plan says where there are several devices.")
    if name in _SECRETS:
        raise ConfigError(f"`serve` has the key {key}, a secret: {_SECRETS[name]}.")
    if name in _FILES and not str(value).startswith(("/", "~")):
        raise ConfigError(
            f"`serve` has the key {key}, and it is {value}: give the file's whole path on the coordinator."
        )
    if name not in Settings.model_fields:
        raise ConfigError(
            f"`serve` has the key {key}, which is no setting; `mlx-ring serve --help` lists them."
        )


def _text(value: object) -> str:
    if isinstance(value, list):
        return ",".join(map(str, cast("list[object]", value)))
    if isinstance(value, bool):
        # As YAML reads an unquoted `on`.
        return "on" if value else "off"
    return str(value)


_LOOPBACK_NAMES = ("localhost", "localhost.localdomain", "ip6-localhost")
_SSH_S = 10.0
_ANY_PORT = 9
Resolve = Callable[[str], Collection[str]]
"""A name's addresses; none where it has none."""


@dataclass(frozen=True, slots=True)
class Place:
    """A machine of the file, seen from here."""

    device: Device
    host: str
    """Its name or address, as ssh's configuration has it."""
    is_here: bool

    @property
    def name(self) -> str:
        return self.device.name


@dataclass(frozen=True, slots=True)
class Target:
    """What ssh makes of a destination."""

    host: str
    is_direct: bool = True
    """To the usual port, and by no other machine or program."""


def find_places(devices: Sequence[Device]) -> list[Place]:
    """Each machine, this one found among them by the addresses of its interfaces."""
    own = own_addresses()
    return [place_of(device, ssh_target(device.ssh), own, resolve) for device in devices]


def place_of(device: Device, target: Target, own: Collection[str], resolve: Resolve) -> Place:
    """One machine; it is this one where an address of it is, or it is called by loopback's.

    Behind a port of its own or another machine, loopback is not this one's: a tunnel or a virtual machine.
    """
    names = [device.address, *([target.host] if target.is_direct else [])]
    return Place(device, target.host, any(_is_here(name, own, resolve) for name in names if name))


def _is_here(name: str, own: Collection[str], resolve: Resolve) -> bool:
    if name.lower() in _LOOPBACK_NAMES:
        return True
    return any(address in own or _is_loopback(address) for address in resolve(name))


def _is_loopback(address: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address).is_loopback
    return False


def own_addresses() -> frozenset[str]:
    """Of every interface, without scopes."""
    return frozenset(
        found.address.partition("%")[0]
        for all_found in psutil.net_if_addrs().values()
        for found in all_found
        if found.family in (socket.AF_INET, socket.AF_INET6)
    )


def resolve(name: str) -> frozenset[str]:
    """A name's addresses; none where it has none here, as an alias that only a jump host knows."""
    with contextlib.suppress(OSError, UnicodeError):
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        return frozenset(str(entry[4][0]).partition("%")[0] for entry in found)
    return frozenset()


def ssh_target(destination: str) -> Target:
    """What is behind a destination, the user's configuration heeded; nothing is connected to."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            ["ssh", "-G", "--", destination], capture_output=True, text=True, timeout=_SSH_S, check=False
        )
        found = target_of(done.stdout)
        if found.host:
            return found
    return Target(destination.rpartition("@")[2])


def target_of(configuration: str) -> Target:
    """Out of what `ssh -G` prints."""
    told = {
        key.lower(): value for key, _, value in (line.partition(" ") for line in configuration.splitlines())
    }
    ways = [told.get(name, "none") for name in ("proxyjump", "proxycommand")]
    return Target(told.get("hostname", ""), told.get("port", "22") == "22" and set(ways) == {"none"})


def head_host(coordinator: Place, other: Place) -> str:
    """By which address `other` reaches the coordinator's ports."""
    if coordinator.device.address:
        return coordinator.device.address
    return _own_way_to(other) if coordinator.is_here else coordinator.host


def _own_way_to(other: Place) -> str:
    """By which address this machine goes there. Nothing is sent: a datagram's socket only asks the routes."""
    with contextlib.suppress(OSError):
        family, kind, protocol, _, address = socket.getaddrinfo(
            other.host, _ANY_PORT, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    # Reached by a jump host perhaps: the name of this machine may lead back.
    return socket.gethostname()
