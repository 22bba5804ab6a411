"""A group on this machine as a hostfile or `mlx.launch` names it: how many ranks, by which backend, listening where."""

from __future__ import annotations

from mlx_ring.core.environment import set_for_libraries
from mlx_ring.core.errors import ConfigError
from mlx_ring.rpc.backends import AUTO, BACKENDS, is_collective
from mlx_ring.settings.config import Settings
from mlx_ring.settings.hostfile import RING_OF_JACCL, Hostfile, load_hostfile, read_launch
from mlx_ring.settings.rank_settings import may_share_by_plan, rank_shares


def with_named_group(settings: Settings) -> Settings:
    """Return the settings with the ranks and the backend that a hostfile names; set its variables for the workers.

    Raises:
        ConfigError: the hosts are other machines, or more or fewer than the settings ask for.
    """
    hosts = _named(settings)
    if hosts is None:
        return settings
    if settings.nodes > 1:
        _check_machines(settings, hosts)
        return settings.model_copy(update=_backend_of(settings, hosts))
    _check(settings, hosts)
    set_for_libraries(hosts.variables)
    size, ranks, changes = len(hosts.hosts), len(rank_shares(settings)), dict[str, object]()
    if not is_collective(settings.link) and ranks == settings.stages == 1:
        changes["tp"] = size
    elif is_collective(settings.link) and settings.stages == 1:
        changes["stages"] = size
    elif size != (asked := settings.stages if is_collective(settings.link) else ranks):
        raise ConfigError(
            f"{_source(settings)} names {size} ranks, but {asked} were requested: request as many, or leave --tp and --stages out."
        )
    return settings.model_copy(update=changes | _backend_of(settings, hosts))


def named_machines(settings: Settings) -> Hostfile | None:
    """Return the hostfile if it names the cluster's machines and their RDMA devices."""
    hosts = _named(settings) if settings.nodes > 1 else None
    return None if hosts is None or hosts.rdma is None else hosts


def _backend_of(settings: Settings, hosts: Hostfile) -> dict[str, object]:
    is_open = settings.backend == AUTO and settings.link not in BACKENDS
    is_wanted = is_collective(settings.link) or len(rank_shares(settings)) > 1 or may_share_by_plan(settings)
    return (
        {"backend": hosts.backend} if hosts.backend and is_open and (is_wanted or settings.nodes == 1) else {}
    )


def _check_machines(settings: Settings, hosts: Hostfile) -> None:
    """Refuse a hostfile that names anything but RDMA devices and the backend of a cluster's machines."""
    source = _source(settings)
    if any(host.listens for host in hosts.hosts):
        raise ConfigError(
            f"{source} names workers of this machine, but --nodes is {settings.nodes}: leave one of them out."
        )
    if hosts.rdma is None and not hosts.backend:
        raise ConfigError(
            f"{source} has neither `rdma` nor `backend`, the only entries that a cluster uses: leave it out."
        )
    if foreign := sorted(hosts.variables.keys() - {RING_OF_JACCL}):
        raise ConfigError(
            f"{source} has {foreign[0]} under `envs`, which reaches no other machine: set it on the machines themselves."
        )


def named_addresses(settings: Settings) -> tuple[str, ...]:
    """Return the addresses of each rank, separated by commas; none if no hostfile names them."""
    hosts = _named(settings) if settings.nodes == 1 else None
    if hosts is None or not all(host.listens for host in hosts.hosts):
        return ()
    return tuple(",".join(host.listens) for host in hosts.hosts)


def _named(settings: Settings) -> Hostfile | None:
    if settings.hostfile is not None:
        return load_hostfile(settings.hostfile)
    launch = read_launch()
    return None if launch is None else launch.hosts


def _check(settings: Settings, hosts: Hostfile) -> None:
    source = _source(settings)
    if elsewhere := [host.ssh for host in hosts.hosts if not host.is_here]:
        raise ConfigError(
            f"{source} names {', '.join(elsewhere)}, and `serve` starts workers at 127.0.0.1 alone: for other machines use "
            f"`mlx-ring cluster start -c {settings.hostfile} --model {settings.model}`."
        )
    if hosts.rdma is not None:
        raise ConfigError(f"{source}: rdma connects machines, but all hosts are this one: leave `rdma` out.")
    groups = (settings.replicas or 1) * (1 + len(settings.more_models))
    groups *= settings.stages if not is_collective(settings.link) and len(rank_shares(settings)) > 1 else 1
    if groups > 1 and any(host.listens for host in hosts.hosts):
        raise ConfigError(
            f"{source} names ports for one group of workers, but there would be {groups}: serve one model with --tp or --stages, once."
        )


def _source(settings: Settings) -> str:
    return f"--hostfile {settings.hostfile}" if settings.hostfile is not None else "mlx.launch"
