"""Cluster files: machines by name or by numbers, and the links between them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from mlx_ring.core.errors import ConfigError
from mlx_ring.planner.catalogue import (
    backends,
    chip_of_bin,
    chip_profile,
    chips,
    described_profile,
    known_profile,
    named_links,
)
from mlx_ring.planner.profiles import ClusterProfile, NodeProfile
from mlx_ring.rpc.link_profile import ETHERNET, LinkProfile
from mlx_ring.settings.devices_file import (
    SHARE_FIELDS,
    Device,
    DevicesFile,
    lists_devices,
    load_content,
    read_devices,
    read_share,
)

_EXPONENT = re.compile(r"\d+(\.\d*)?[eE][+-]?\d+")
_DESCRIPTION = frozenset({"memory_gb", "bandwidth_gb_s", "tflops", "backend"})
"""Fields of a machine that is not known by its name."""
_UPKEEP_FIELDS = ("watts", "idle_watts", "price")
_MACHINE_FIELDS = (
    _DESCRIPTION
    | SHARE_FIELDS
    | {"name", "machine", "reserve", "trusted_interface", "wired_limit_gb", *_UPKEEP_FIELDS}
)
_FEW_NAMES = 4
MOST_ADDED = 16
"""Machines that one question may add."""
_CLUSTER_FIELDS = ("machines", "links", "usual_link")
_LINK_NUMBERS = ("round_trip_ms", "gbit_s")
_LINK_FIELDS = frozenset({"trusted", "link", *_LINK_NUMBERS})


@dataclass(frozen=True, slots=True)
class Upkeep:
    """Power and price of a machine, as far as they are known."""

    watts: float | None = None
    """Power under full load."""
    idle_watts: float | None = None
    """Power without load; as under load if it is not known."""
    price: float | None = None
    """Price of the machine, in any currency."""

    def power_watts(self, busy: float) -> float | None:
        """Return the mean power of a machine that is busy for a share of the time."""
        if self.watts is None:
            return None
        idle = self.watts if self.idle_watts is None else self.idle_watts
        return idle + (self.watts - idle) * busy


def read_cluster(text: str, where: str) -> ClusterProfile:
    """Return the cluster of a file with `machines` or `devices`, or of an MLX hostfile.

    Raises:
        ConfigError: it is not one, and why.
    """
    content = load_content(text, where)
    if lists_devices(content):
        return estimated_cluster(read_devices(content, where), where)
    if (
        not isinstance(content, dict)
        or not isinstance(content.get("machines"), list)
        or not content["machines"]
    ):
        raise ConfigError(f"{where} must have a list `machines` or `devices` with one or more entries.")
    entries = cast("dict[str, Any]", content)
    if unknown := [name for name in entries if name not in _CLUSTER_FIELDS]:
        raise ConfigError(f"{where} has no field {unknown[0]}; fields are {', '.join(_CLUSTER_FIELDS)}.")
    links: Any = [] if entries.get("links") is None else entries["links"]
    if not isinstance(links, list):
        raise ConfigError(
            f"{where}: links is {links!r}; it must be a list of links, each `between` two machines. "
            "`usual_link` is the link between all others."
        )
    nodes = tuple(_read_machine(entry, where) for entry in cast("list[Any]", entries["machines"]))
    return cluster_of(nodes, links=cast("list[Any]", links), usual=entries.get("usual_link"), where=where)


def read_upkeep(text: str, where: str) -> dict[str, Upkeep]:
    """Return the power and price of the machines of a cluster file that have some, by name.

    Raises:
        ConfigError: a value is not a number above 0, or a machine needs more power without load than under load.
    """
    content = load_content(text, where)
    listed = cast("dict[str, Any]", content).get("machines") if isinstance(content, dict) else None
    found: dict[str, Upkeep] = {}
    for entry in cast("list[Any]", listed or []):
        if isinstance(entry, dict):
            fields = cast("dict[str, Any]", entry)
            found[str(fields.get("name", fields.get("machine")))] = _machine_upkeep(fields, where)
    return {name: upkeep for name, upkeep in found.items() if upkeep != Upkeep()}


def _machine_upkeep(fields: Mapping[str, Any], where: str) -> Upkeep:
    values = {name: _positive(fields, name, where) for name in _UPKEEP_FIELDS if name in fields}
    upkeep, name = Upkeep(**values), fields.get("name", fields.get("machine"))
    if upkeep.idle_watts is not None and upkeep.idle_watts > (upkeep.watts or 0.0):
        raise ConfigError(
            f"{where}: idle_watts of {name} is {upkeep.idle_watts:g}; give it `watts`, which must be as much or more."
        )
    return upkeep


def estimated_cluster(file: DevicesFile, where: str) -> ClusterProfile:
    """Return a cluster with the stated memory, and speeds of the chip that is named or has as many GPU cores.

    Raises:
        ConfigError: a machine's memory or cores are not given, or no chip has them.
    """
    return ClusterProfile(tuple(_estimated(device, where) for device in file.devices))


def _estimated(device: Device, where: str) -> NodeProfile:
    if device.memory_gb is None or (device.gpu_cores is None and not device.chip):
        raise ConfigError(
            f"{where}: {device.name} needs `capabilities` with memory_gb and gpu_cores, because it is planned for without a profile."
        )
    chip = chips().get(device.chip) if device.chip else chip_of_bin(device.memory_gb, device.gpu_cores or 0)
    if chip is None:
        unknown = (
            f"{device.chip} is none of them"
            if device.chip
            else f"no known Mac has {device.gpu_cores} GPU cores"
        )
        raise ConfigError(
            f"{where}: {device.name} needs `capabilities` with chip, one of {', '.join(chips())}, because {unknown}."
        )
    node = chip_profile(chip, device.memory_gb, device.name, wired_gb=device.wired_limit_gb)
    if device.memory_utilization is None:
        return node
    return replace(node, reserve_share=1 - device.memory_utilization)


def cluster_of(
    nodes: tuple[NodeProfile, ...],
    *,
    links: Sequence[Any] = (),
    usual: Any = None,
    where: str = "The cluster",
) -> ClusterProfile:
    """Return a cluster of machines and links; each machine needs a name of its own."""
    names = [node.name for node in nodes]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"{where} names the machine {twice} twice; give each a `name` of its own.")
    between: dict[frozenset[str], LinkProfile] = {}
    for entry in links:
        pair = _pair(entry)
        if pair is None or not set(pair) <= set(names):
            raise ConfigError(f"{where}: the link {entry!r} must be `between` two of {', '.join(names)}.")
        if frozenset(pair) in between:
            raise ConfigError(f"{where} has two links between {pair[0]} and {pair[1]}; give one of them.")
        described = {
            name: value for name, value in cast("dict[str, Any]", entry).items() if name != "between"
        }
        between[frozenset(pair)] = _read_link(described, where)
    return ClusterProfile(nodes, between, ETHERNET if usual is None else _read_link(usual, where))


def _pair(link: Any) -> tuple[str, str] | None:
    """Return the names of the two ends of a link, which YAML may have read as numbers; None if they are not valid."""
    between = cast("dict[str, Any]", link).get("between") if isinstance(link, dict) else None
    match between:
        case [str() | int() | float() as one, str() | int() | float() as other] if one != other:
            return str(one), str(other)
        case _:
            return None


def _read_machine(entry: Any, where: str) -> NodeProfile:
    if isinstance(entry, str):
        return known_profile(entry)
    if not isinstance(entry, dict):
        raise ConfigError(
            f"{where}: a machine is {entry!r}; it must be a known machine's name, or have fields."
        )
    fields = cast("dict[str, Any]", entry)
    if unknown := sorted(set(fields) - _MACHINE_FIELDS):
        raise ConfigError(
            f"{where}: a machine has no field {unknown[0]}; fields are {', '.join(sorted(_MACHINE_FIELDS))}."
        )
    node = _known_machine(fields, where) if "machine" in fields else _described_machine(fields, where)
    _machine_upkeep(fields, where)
    node = replace(node, trusted=_has_trusted(fields, node.name, where))
    reserve = _read_reserve(fields, node.name, where)
    return node if reserve is None else replace(node, reserve_share=reserve)


def _has_trusted(fields: Mapping[str, Any], name: str, where: str) -> bool:
    """Return True if an interface for collectives is named."""
    interface = fields.get("trusted_interface")
    if interface is not None and (not isinstance(interface, str) or not interface):
        raise ConfigError(
            f"{where}: trusted_interface of {name} is {interface!r}; it must be an interface's name, as en5."
        )
    return interface is not None


def _known_machine(fields: Mapping[str, Any], where: str) -> NodeProfile:
    name = fields.get("name")
    wired = _wired_gb(fields, where)
    node = known_profile(str(fields["machine"]), None if name is None else str(name), wired_gb=wired)
    if beside := sorted(set(fields) & _DESCRIPTION):
        raise ConfigError(
            f"{where}: {node.name} has {beside[0]} beside `machine`, which sets it too: give one of them."
        )
    return node


def _described_machine(fields: Mapping[str, Any], where: str) -> NodeProfile:
    name = fields.get("name")
    if name is None:
        raise ConfigError(f"{where}: a machine has no `name`.")
    backend = fields.get("backend")
    if backend is not None and backend not in backends():
        raise ConfigError(
            f"{where}: backend of {name} is {backend!r}; it must be one of {', '.join(backends())}."
        )
    return described_profile(
        _positive(fields, "bandwidth_gb_s", where),
        _positive(fields, "tflops", where),
        _positive(fields, "memory_gb", where),
        str(name),
        backend=backend,
        wired_gb=_wired_gb(fields, where),
    )


def _wired_gb(fields: Mapping[str, Any], where: str) -> float | None:
    return _positive(fields, "wired_limit_gb", where) if "wired_limit_gb" in fields else None


def remarks_on_described(nodes: Iterable[NodeProfile]) -> tuple[str, ...]:
    """Return a sentence for each chip whose efficiencies are assumed for machines that are described by numbers."""
    alike: dict[str, list[str]] = {}
    for node in nodes:
        if node.nearest_chip:
            alike.setdefault(node.nearest_chip, []).append(node.name)
    return tuple(
        f"{named_together(names)} {'is' if len(names) == 1 else 'are'} described by numbers, and predicted like the nearest chip, {chip} ({chips()[chip].backend}). "
        "How far off that is, is not known, and may be more than ranges say. Give `machine` if it is a known one, or `backend` "
        "if it has another."
        for chip, names in alike.items()
    )


def named_together(names: Sequence[str]) -> str:
    """Return the names of machines for a sentence, or their number if they are many."""
    if len(names) > _FEW_NAMES:
        return f"{len(names):,} machines"
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _read_reserve(fields: Mapping[str, Any], name: str, where: str) -> float | None:
    """Return the share that stays free, given directly or through the usable share."""
    share, reserve = read_share(name, where, fields), fields.get("reserve")
    if reserve is None:
        return None if share is None else 1 - share
    if share is not None:
        raise ConfigError(f"{where}: {name} has both a reserve and a usable share: give one of them.")
    if type(reserve) not in (int, float) or not 0 <= cast("float", reserve) < 1:
        raise ConfigError(f"{where}: reserve of {name} is {reserve!r}; it must be a number from 0, below 1.")
    return float(cast("float", reserve))


def _read_link(entry: Any, where: str) -> LinkProfile:
    if isinstance(entry, str):
        return _named_link(entry, where)
    if not isinstance(entry, dict) or not set(cast("dict[str, Any]", entry)) <= _LINK_FIELDS:
        raise ConfigError(f"{where}: a link is {entry!r}; it must have round_trip_ms and gbit_s.")
    fields = cast("dict[str, Any]", entry)
    named = _named_link(fields["link"], where) if "link" in fields else None
    if named is not None and (beside := next((name for name in _LINK_NUMBERS if name in fields), None)):
        raise ConfigError(
            f"{where}: a link has {beside} beside `link: {fields['link']}`, which sets it too: give one of them."
        )
    trusted = fields.get("trusted", named is not None and named.trusted)
    if not isinstance(trusted, bool):
        raise ConfigError(f"{where}: trusted of a link is {trusted!r}; it must be true or false.")
    if named is not None:
        return replace(named, trusted=trusted)
    return LinkProfile(
        _positive(fields, "round_trip_ms", where) / 1e3,
        _positive(fields, "gbit_s", where) * 1e9 / 8,
        trusted=trusted,
    )


def _named_link(name: object, where: str) -> LinkProfile:
    found = named_links().get(str(name))
    if found is None:
        raise ConfigError(
            f"{where}: a link is {name!r}; it must be one of {', '.join(named_links())}, or have round_trip_ms and gbit_s."
        )
    return found


def _positive(fields: Mapping[str, Any], name: str, where: str) -> float:
    value = fields.get(name)
    if isinstance(value, str) and _EXPONENT.fullmatch(value):
        # YAML takes an exponent without a point for a text.
        value = float(value)
    if type(value) not in (int, float) or not 0 < cast("float", value) < float("inf"):
        raise ConfigError(f"{where}: {name} is {value!r}; it must be a number above 0.")
    return float(cast("float", value))


# ---- machines to add


def with_machines(cluster: ClusterProfile, names: Sequence[str], link: str | None) -> ClusterProfile:
    """Return the cluster with more machines, each joined to all others by a named link.

    Raises:
        ConfigError: a machine or the link is unknown, or too many are added.
    """
    if len(names) > MOST_ADDED:
        raise ConfigError(f"{len(names)} machines were added; add {MOST_ADDED} at most.")
    given = link_named(link)
    nodes, links = list(cluster.nodes), dict(cluster.links)
    for text in names:
        taken = {node.name for node in nodes}
        name = next(each for each in _numbered(text) if each not in taken)
        if given is not None:
            links |= {frozenset((name, other)): given for other in taken}
        nodes.append(known_profile(text, name))
    return replace(cluster, nodes=tuple(nodes), links=links)


def link_named(name: str | None) -> LinkProfile | None:
    """Return a link of the catalogue. None stays None.

    Raises:
        ConfigError: it is unknown.
    """
    if name is None:
        return None
    found = named_links().get(name)
    if found is None:
        raise ConfigError(f"The link {name} is unknown; known links are {', '.join(named_links())}.")
    return found


def _numbered(text: str) -> Iterator[str]:
    yield text
    yield from (f"{text}#{number}" for number in range(2, 10_000))
