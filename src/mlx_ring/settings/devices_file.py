"""Files that list machines: `devices`, `model` and `sharding`, or an MLX hostfile. Pure.

    {"devices": [{"device_id": "studio", "hostname": "studio.local", "port": 50051, "role": "coordinator",
                  "capabilities": {"memory_gb": 48, "gpu_cores": 30}}, ...],
     "model": {"name": "Qwen3-1.7B-8bit", "provider": "mlx-community"},
     "sharding": {"strategy": "custom", "custom_proportions": [0.7, 0.3]}}

    [{"ssh": "127.0.0.1", "ips": ["192.168.5.2"]}, {"ssh": "mini1@192.168.5.1", "ips": ["192.168.5.1"]}]

It accepts the names of earlier prototypes and of `mlx.launch`. A name without a meaning here is refused.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any, cast

from typing_extensions import override

from mlx_ring.core.errors import ConfigError
from mlx_ring.host.addresses import CLUSTER_PORT
from mlx_ring.settings.hostfile import Hostfile, is_hostfile, read_hostfile
from mlx_ring.settings.strategies import STRATEGIES, current_strategy

if TYPE_CHECKING:
    import yaml

SHARE_FIELDS = frozenset({"gpu_memory_utilization", "memory_utilization"})
"""Names of the setting, vLLM's and the own one."""
_COORDINATOR, _WORKER = ("coordinator", "head", "master"), ("worker", "node")
_FIELDS = frozenset({"devices", "model", "sharding", "serve", "wheels"})
_DEVICE_FIELDS = SHARE_FIELDS | {
    *("device_id", "hostname", "port", "role", "capabilities", "ssh", "address", "program", "state_dir"),
    "trusted_interface",
}
_CAPABILITIES = SHARE_FIELDS | {"memory_gb", "gpu_cores", "chip", "wired_limit_gb"}
_SHARDING_FIELDS = frozenset({"strategy", "custom_proportions"})
_MODEL_FIELDS = frozenset({"name", "provider"})
_MOST_PORT, _MOST_NODES = 65534, 8


@dataclass(frozen=True, slots=True)
class Device:
    """Machine of a file of devices."""

    name: str
    ssh: str
    """Destination for `ssh`: a host name, an alias of its configuration, or `user@host`."""
    is_coordinator: bool = False
    address: str = ""
    """Address of the interface for tensors; if empty, that of the route to the machine."""
    port: int = CLUSTER_PORT
    """Port of the coordinator for the other machines."""
    memory_gb: float | None = None
    """Memory that plans may use at most."""
    memory_utilization: float | None = None
    """Share of the memory that plans may fill; None for the default."""
    gpu_cores: int | None = None
    chip: str = ""
    """Chip and GPU bin, as `m4-max-40`; if empty, the one with the memory and GPU cores."""
    wired_limit_gb: float | None = None
    """Memory that the machine grants its GPU, if its owner has set that."""
    trusted_interface: str = ""
    """Interface for collectives to other machines; if empty, that of `serve`."""
    program: str = ""
    """Path of `mlx-ring` on the machine; if empty, it is searched for."""
    state_dir: str = ""


@dataclass(frozen=True, slots=True)
class DevicesFile:
    """Machines, and the model and settings to serve."""

    devices: tuple[Device, ...]
    model: str = ""
    strategy: str = ""
    """Strategy of `serve`; empty if the file has none."""
    proportions: tuple[float, ...] = ()
    serve: Mapping[str, object] = field(default_factory=dict[str, object])
    """Further settings of `mlx-ring serve`, except the share of memory, which each device has."""
    wheels: str = ""
    """Folder of packages for machines of another system; empty if there is none."""
    notes: tuple[str, ...] = ()
    """Sentences about fields of the file without effect."""

    @property
    def coordinator(self) -> Device:
        return next(device for device in self.devices if device.is_coordinator)


@cache
def _unique_keys() -> type[yaml.SafeLoader]:
    """Return a loader that refuses a key that stands twice in one mapping; YAML's own takes the last one."""
    from yaml import SafeLoader, ScalarNode  # takes a while, and most commands read no file

    class UniqueKeys(SafeLoader):
        @override
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
            lines: dict[str, int] = {}
            for key, _ in node.value:
                if isinstance(key, ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                    line = key.start_mark.line + 1
                    if key.value in lines:
                        raise ConfigError(
                            f"gives {key.value!r} twice, in lines {lines[key.value]} and {line}."
                        )
                    lines[key.value] = line
            return super().construct_mapping(node, deep=deep)

    return UniqueKeys


def load_content(text: str, where: str) -> object:
    """Return the content of a YAML or JSON file.

    Raises:
        ConfigError: it is neither, or a key stands twice in it.
    """
    import yaml  # as above

    try:
        return yaml.load(text, _unique_keys())  # noqa: S506 - a SafeLoader
    except ConfigError as error:
        raise ConfigError(f"{where} {error}") from None
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        place = f" in line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        said = problem or str(error).partition("\n")[0]
        raise ConfigError(f"{where} is neither YAML nor JSON: {said}{place}.") from error


def lists_devices(content: object) -> bool:
    """Return True if the content lists devices or is an MLX hostfile."""
    return is_hostfile(content) or (isinstance(content, dict) and "devices" in content)


def read_devices(content: object, where: str) -> DevicesFile:
    """Read either kind of file.

    Raises:
        ConfigError: a field is wrong; the message has its name and value.
    """
    if is_hostfile(content):
        return _of_hosts(read_hostfile(content, where), where)
    return _read_file(content, where)


# ---- files of devices


def _read_file(content: object, where: str) -> DevicesFile:
    fields = _fields(content, _FIELDS, where, "the file")
    entries = fields.get("devices")
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{where}: `devices` must be a list with one or more entries.")
    devices = [_read_device(entry, where) for entry in cast("list[object]", entries)]
    strategy, proportions = _read_sharding(fields.get("sharding"), len(devices), where)
    chosen = _one_coordinator(devices, where)
    serve = _fields(fields.get("serve") or {}, None, where, "`serve`")
    return DevicesFile(
        _with_share(chosen, read_share("`serve`", where, serve)),
        model=_read_model(fields.get("model"), where),
        strategy=strategy,
        proportions=proportions,
        serve={key: value for key, value in serve.items() if not is_share(key)},
        wheels=_text(fields, "wheels", where),
        notes=tuple(_notes(chosen, fields.get("sharding") or {}, strategy)),
    )


def _with_share(devices: Sequence[Device], share: float | None) -> tuple[Device, ...]:
    """Return the devices, with the common share of memory where they have none."""
    return tuple(
        device if device.memory_utilization is not None else replace(device, memory_utilization=share)
        for device in devices
    )


def _notes(devices: Sequence[Device], sharding: Mapping[str, Any], strategy: str) -> Iterator[str]:
    if len(devices) == 1:
        yield from _notes_of_one(devices[0], sharding)
    for device in devices:
        if not device.is_coordinator and device.port != CLUSTER_PORT:
            yield f"{device.name}: port {device.port} has no effect, because nodes use any free port."
    if sharding.get("custom_proportions") and strategy != "custom":
        yield f"custom_proportions has no effect with the strategy {strategy or 'auto'}."


def _notes_of_one(device: Device, sharding: Mapping[str, Any]) -> Iterator[str]:
    """Yield notes about fields that need several machines."""
    given = {"port": device.port != CLUSTER_PORT, "address": device.address, "`sharding`": sharding}
    if names := [name for name, value in given.items() if value]:
        verb = "do" if len(names) > 1 else "does"
        yield f"{device.name} is the only device: {' and '.join(names)} {verb} nothing."


def _read_device(entry: object, where: str) -> Device:
    fields = _fields(entry, _DEVICE_FIELDS, where, "a device")
    host = _text(fields, "hostname", where)
    ssh = _text(fields, "ssh", where) or host
    name = _text(fields, "device_id", where) or ssh
    if not ssh:
        raise ConfigError(f"{where}: the device {name or entry} has no `hostname`.")
    capabilities = _fields(fields.get("capabilities") or {}, _CAPABILITIES, where, f"capabilities of {name}")
    cores = _positive(capabilities, "gpu_cores", where)
    return Device(
        name=name,
        ssh=ssh,
        is_coordinator=_is_coordinator(fields.get("role"), name, where),
        address=_text(fields, "address", where),
        trusted_interface=_text(fields, "trusted_interface", where),
        port=_port(fields.get("port", CLUSTER_PORT), name, where),
        memory_gb=_positive(capabilities, "memory_gb", where),
        memory_utilization=read_share(name, where, fields, capabilities),
        gpu_cores=None if cores is None else int(cores),
        chip=_text(capabilities, "chip", where),
        wired_limit_gb=_positive(capabilities, "wired_limit_gb", where),
        program=_text(fields, "program", where),
        state_dir=_text(fields, "state_dir", where),
    )


def _is_coordinator(role: object, name: str, where: str) -> bool:
    if role is not None and role not in _COORDINATOR + _WORKER:
        raise ConfigError(f"{where}: the role of {name} is {role!r}; it must be coordinator or worker.")
    return role in _COORDINATOR


def _one_coordinator(devices: Sequence[Device], where: str) -> tuple[Device, ...]:
    """Return the devices with one coordinator: the named one, or the first."""
    names = [device.name for device in devices]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"{where} names the device {twice} twice; give each a `device_id` of its own.")
    if len(devices) > _MOST_NODES:
        raise ConfigError(f"{where} has {len(devices)} devices; a cluster has {_MOST_NODES} at most.")
    named = [device.name for device in devices if device.is_coordinator] or names[:1]
    if len(named) > 1:
        raise ConfigError(f"{where} has {len(named)} coordinators, {' and '.join(named)}; there must be one.")
    return tuple(replace(device, is_coordinator=device.name == named[0]) for device in devices)


def _read_model(entry: object, where: str) -> str:
    if entry is None or isinstance(entry, str):
        return entry or ""
    fields = _fields(entry, _MODEL_FIELDS, where, "`model`")
    name, provider = _text(fields, "name", where), _text(fields, "provider", where)
    if not name:
        raise ConfigError(f"{where}: `model` has no `name`.")
    if provider and "/" in name and not name.startswith(f"{provider}/"):
        raise ConfigError(
            f"{where}: the model's provider is {provider}, but its name {name} already has one: give one of them."
        )
    return f"{provider}/{name}" if provider and "/" not in name else name


def _read_sharding(entry: object, devices: int, where: str) -> tuple[str, tuple[float, ...]]:
    fields = _fields(entry or {}, _SHARDING_FIELDS, where, "`sharding`")
    strategy = current_strategy(_text(fields, "strategy", where))
    if strategy and strategy not in STRATEGIES:
        raise ConfigError(f"{where}: the strategy is {strategy}; it must be one of {', '.join(STRATEGIES)}.")
    given = fields.get("custom_proportions")
    if given is not None and (
        not isinstance(given, list) or not all(map(_is_positive, cast("list[object]", given)))
    ):
        raise ConfigError(f"{where}: custom_proportions is {given!r}; it must be a list of numbers above 0.")
    proportions = tuple(float(share) for share in cast("list[float]", given or []))
    if strategy != "custom":
        return strategy, ()
    if len(proportions) != devices:
        raise ConfigError(
            f"{where}: the strategy custom takes custom_proportions for each of the {devices} devices; "
            f"{len(proportions)} are there."
        )
    return strategy, proportions


# ---- MLX's hostfiles


def _of_hosts(hosts: Hostfile, where: str) -> DevicesFile:
    devices = [Device(name=host.ssh, ssh=host.ssh, address=next(iter(host.ips), "")) for host in hosts.hosts]
    return DevicesFile(_one_coordinator(devices, where), notes=tuple(_unused(hosts)))


def _unused(hosts: Hostfile) -> Iterator[str]:
    if hosts.rdma is not None:
        yield "rdma has no effect here: `serve` reads it from --hostfile."
    if hosts.backend:
        yield f"backend {hosts.backend} has no effect here: `serve` reads it from --hostfile."
    if hosts.variables:
        yield f"envs has no effect: set {', '.join(hosts.variables)} on the machines themselves."


# ---- values


def _fields(entry: object, known: frozenset[str] | None, where: str, what: str) -> dict[str, Any]:
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: {what} is {entry!r}; it must have fields.")
    fields = cast("dict[str, Any]", entry)
    if known is not None and (unknown := sorted(map(str, fields.keys() - known))):
        raise ConfigError(
            f"{where}: {what} has the field {unknown[0]}, which does not exist; fields are {', '.join(sorted(known))}."
        )
    return fields


def _text(fields: Mapping[str, Any], name: str, where: str) -> str:
    value: object = fields.get(name)
    if value is not None and (not isinstance(value, str) or not value.isprintable()):
        raise ConfigError(f"{where}: {name} is {value!r}; it must be a text of one line.")
    return value or ""


def _is_positive(value: object) -> bool:
    return type(value) in (int, float) and 0 < cast("float", value) < float("inf")


def _positive(fields: Mapping[str, Any], name: str, where: str) -> float | None:
    value: object = fields.get(name)
    if value is not None and not _is_positive(value):
        raise ConfigError(f"{where}: {name} is {value!r}; it must be a number above 0.")
    return None if value is None else float(cast("float", value))


def _port(value: object, name: str, where: str) -> int:
    if type(value) is not int or not 1 <= value <= _MOST_PORT:
        raise ConfigError(
            f"{where}: the port of {name} is {value!r}; it must be a whole number from 1 to {_MOST_PORT}."
        )
    return value


# ---- the share of a machine's memory


def read_share(name: str, where: str, *places: Mapping[str, Any]) -> float | None:
    """Return the share of memory of a machine; None if no place states one.

    Args:
        name: name of the machine, for errors.
        where: name of the file, for errors.
        places: fields that may contain it; under `serve` names may have dashes for underscores.

    Raises:
        ConfigError: the value is no share, or there are two.
    """
    given = [
        (key, value)
        for place in places
        for key, value in place.items()
        if is_share(key) and value is not None
    ]
    if len(given) > 1:
        twice = " and ".join(key for key, _ in given)
        raise ConfigError(f"{where}: the share of memory of {name} is given twice, as {twice}: give one.")
    for key, value in given:
        if type(value) not in (int, float) or not 0 < cast("float", value) <= 1:
            raise ConfigError(
                f"{where}: {key} of {name} is {value!r}; it must be a number above 0, at most 1."
            )
        return float(cast("float", value))
    return None


def is_share(key: object) -> bool:
    """Return True if a field is a share of memory."""
    return str(key).replace("-", "_") in SHARE_FIELDS
