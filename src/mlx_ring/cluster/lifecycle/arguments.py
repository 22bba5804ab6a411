"""Arguments of `serve` and `join` for the machines of a devices file.

It also finds the local machine among them, and the address at which the others reach the coordinator.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import subprocess
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import psutil

from mlx_ring.core.errors import ConfigError
from mlx_ring.core.folders import logs_folder
from mlx_ring.host.addresses import HeadAddress, bracketed, is_link_local
from mlx_ring.settings.config import Settings
from mlx_ring.settings.devices_file import Device, DevicesFile
from mlx_ring.settings.fields import flag_name
from mlx_ring.settings.process_settings import MemberSettings, names_of
from mlx_ring.settings.settings_sources import check_values, field_of_key

_FROM_THE_FILE = {
    "model": "`model`",
    "nodes": "the number of `devices`",
    "node_ids": "the list of `devices`",
    "cluster_host": "the coordinator's `address`",
    "cluster_port": "the coordinator's `port`",
    "strategy": "`sharding`",
    "proportions": "`sharding`",
    "memory_limit": "`capabilities`",
    "state_dir": "a device's `state_dir`",
    "log_dir": "a device's `state_dir`, with its folder `logs`,",
}
_OF_EACH_DEVICE = ("log_dir", "memory_limit", "memory_utilization")
FOR_AGENTS = tuple(name for name in names_of(MemberSettings) if name not in _OF_EACH_DEVICE)
"""Settings under `serve` that `join` accepts too, because they apply to every machine.

The others concern the head alone, or reach the machines with the command to load a model.
"""
_FILES = ("api_key_file", "ssl_certfile", "ssl_keyfile")
"""Files on the coordinator: they need absolute paths, because the working folder there is unknown."""
_STAGES = "stages"
_SECRETS = {
    "api_key": "use api-key-file, a file on the coordinator",
    "ssl_keyfile_password": "use a key without a password, in a file on the coordinator that only its owner can read",
}


def head_arguments(file: DevicesFile, model: str, state: str, ids: Mapping[str, str]) -> list[str]:
    """Return the arguments of `serve` on the coordinator.

    Args:
        file: the devices file.
        model: the model to serve.
        state: the coordinator's state folder.
        ids: node IDs by device name.

    Raises:
        ConfigError: an unknown or invalid setting under `serve`, or one that another key of the file sets.
    """
    device, several = file.coordinator, len(file.devices) > 1
    for each in file.devices if several else ():
        if is_link_local(each.address):
            raise ConfigError(
                f"The `address` of {each.name} is {each.address}, a link-local one, to which each machine names an interface of "
                "its own: give another address, or remove `address`."
            )
    words = ["serve", model]
    if several:
        others = ",".join(ids[other.name] for other in file.devices if other is not device)
        # A machine that the file no longer lists may still belong to the cluster.
        words += ["--nodes", str(len(file.devices)), "--node-ids", others]
        words += ["--cluster-port", str(device.port)]
        # The output is kept in a file, which must not hold a token.
        words += ["--no-join-lines"]
        words += ["--strategy", file.strategy] if file.strategy else []
        words += ["--cluster-host", bracketed(device.address)] if device.address else []
    if several and file.proportions:
        shares = zip(file.devices, file.proportions, strict=True)
        words += ["--proportions", ",".join(f"{ids[device.name]}={share:g}" for device, share in shares)]
    return [*words, *_memory(device), *_folders(state), *_flags(_more_settings(file) | _trusted(device))]


def agent_arguments(file: DevicesFile, device: Device, head: HeadAddress, state: str) -> list[str]:
    """Return the arguments of `join` on another machine, shared settings included.

    Raises:
        ConfigError: the same errors as in `head_arguments`.
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
    """Return the device's own setting, which overrides the shared one."""
    return {"trusted_interface": device.trusted_interface} if device.trusted_interface else {}


def _folders(state: str) -> list[str]:
    return ["--state-dir", state, "--log-dir", logs_folder(state)]


def _flags(settings: Mapping[str, str]) -> Iterator[str]:
    for name, value in settings.items():
        yield from (flag_name(name), value)


def _more_settings(file: DevicesFile) -> dict[str, str]:
    """Return the settings under `serve` by field of `Settings`, written as flag values."""
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
        raise ConfigError(
            f"`serve` has the key {key}, which {_FROM_THE_FILE[name]} sets: remove it from `serve`."
        )
    if name == _STAGES and several:
        raise ConfigError(
            f"`serve` has the key {key}, which the planner sets if there are several devices: remove it."
        )
    if name in _SECRETS:
        raise ConfigError(f"`serve` has the key {key}, a secret: {_SECRETS[name]}.")
    if name in _FILES and not str(value).startswith(("/", "~")):
        raise ConfigError(
            f"`serve` has the key {key} with the value {value}: give the file's absolute path on the coordinator."
        )
    if name not in Settings.model_fields:
        raise ConfigError(
            f"`serve` has the key {key}, which is no setting; `mlx-ring serve --help` lists them."
        )


def _text(value: object) -> str:
    if isinstance(value, list):
        return ",".join(map(str, cast("list[object]", value)))
    if isinstance(value, bool):
        # YAML reads an unquoted `on` as a boolean.
        return "on" if value else "off"
    return str(value)


_LOOPBACK_NAMES = ("localhost", "localhost.localdomain", "ip6-localhost")
_SSH_S = 10.0
_ANY_PORT = 9
Resolve = Callable[[str], Collection[str]]
"""Function that returns a name's addresses; none if the name has none."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine of the file, as seen from the local one."""

    device: Device
    host: str
    """The name or address in ssh's configuration."""
    is_here: bool

    @property
    def name(self) -> str:
        """The device's name."""
        return self.device.name


@dataclass(frozen=True, slots=True)
class SshTarget:
    """A destination as ssh resolves it."""

    host: str
    is_direct: bool = True
    """True if ssh connects to the usual port, without a jump host or proxy."""


def find_machines(devices: Sequence[Device]) -> list[Machine]:
    """Return the machines, the local one recognized by the addresses of its interfaces."""
    own = own_addresses()
    return [machine_of(device, ssh_target(device.ssh), own, resolve) for device in devices]


def machine_of(device: Device, target: SshTarget, own: Collection[str], resolve: Resolve) -> Machine:
    """Return one machine, with `is_here` set if it has a local or a loopback address.

    With another port or a jump host, a loopback address leads to a tunnel or a virtual machine instead.
    """
    names = [device.address, *([target.host] if target.is_direct else [])]
    return Machine(device, target.host, any(_is_here(name, own, resolve) for name in names if name))


def _is_here(name: str, own: Collection[str], resolve: Resolve) -> bool:
    if name.lower() in _LOOPBACK_NAMES:
        return True
    return any(address in own or _is_loopback(address) for address in resolve(name))


def _is_loopback(address: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address).is_loopback
    return False


def own_addresses() -> frozenset[str]:
    """Return the addresses of all interfaces, without scopes."""
    return frozenset(
        found.address.partition("%")[0]
        for all_found in psutil.net_if_addrs().values()
        for found in all_found
        if found.family in (socket.AF_INET, socket.AF_INET6)
    )


def resolve(name: str) -> frozenset[str]:
    """Return a name's addresses; none for an alias that only a jump host knows."""
    with contextlib.suppress(OSError, UnicodeError):
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        return frozenset(str(entry[4][0]).partition("%")[0] for entry in found)
    return frozenset()


def ssh_target(destination: str) -> SshTarget:
    """Resolve a destination with the user's ssh configuration, without a connection."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            ["ssh", "-G", "--", destination], capture_output=True, text=True, timeout=_SSH_S, check=False
        )
        found = target_of(done.stdout)
        if found.host:
            return found
    return SshTarget(destination.rpartition("@")[2])


def target_of(configuration: str) -> SshTarget:
    """Parse the output of `ssh -G`."""
    options = {
        key.lower(): value for key, _, value in (line.partition(" ") for line in configuration.splitlines())
    }
    proxies = {options.get(name, "none") for name in ("proxyjump", "proxycommand")}
    return SshTarget(options.get("hostname", ""), options.get("port", "22") == "22" and proxies == {"none"})


def head_host(coordinator: Machine, other: Machine) -> str:
    """Return the address at which `other` reaches the coordinator's ports.

    Raises:
        ConfigError: a link-local address, whose scope is an interface of this machine.
    """
    if coordinator.device.address:
        return coordinator.device.address
    host = _source_address_for(other) if coordinator.is_here else coordinator.host
    if is_link_local(host):
        raise ConfigError(
            f"{other.name} would reach {coordinator.name} at {host}, a link-local address, for which it needs an interface of its "
            f"own. Give {coordinator.name} another `address` in the file, or let the machines join by hand."
        )
    return host


def _source_address_for(other: Machine) -> str:
    """Return the local address on the route to `other`.

    A datagram socket only looks up the route, so nothing is sent.
    """
    with contextlib.suppress(OSError):
        family, kind, protocol, _, address = socket.getaddrinfo(
            other.host, _ANY_PORT, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    # Perhaps `other` is behind a jump host: this machine's name may lead back.
    return socket.gethostname()


def unlisted_nodes(
    nodes: Iterable[Mapping[str, Any]], ids: Container[str], coordinator: str
) -> dict[str, str]:
    """Return a sentence, by node ID, about each machine that is connected with the head but not listed in the file.

    The file names machines as its author likes; only the id in a machine's state folder tells which node it is. The head's
    own node is on the coordinator, and has another id while it serves alone.

    Args:
        nodes: nodes in the head's status.
        ids: node IDs of all machines of the file.
        coordinator: name of the coordinator in the file.
    """
    return {
        node[
            "id"
        ]: f"{node['id']} ({node['name']} at {node['address']}) belongs to the cluster, but the file does not list it. "
        f"{'It has layers' if node['stages'] else 'It may get layers'}. Remove it by `mlx-ring node remove {node['id']}` "
        f"on {coordinator}, or add it to the file."
        for node in nodes
        if not node["is_head"] and node["state"] != "gone" and node["id"] not in ids
    }
