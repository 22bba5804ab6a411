"""Settings of stages, ranks, links and backends that must go together, also with a hostfile that names a group."""

from __future__ import annotations

from mlx_ring.core.environment import set_for_libraries
from mlx_ring.core.errors import ConfigError
from mlx_ring.rpc.backends import AUTO, BACKENDS, LINKS, is_collective
from mlx_ring.settings.config import Settings
from mlx_ring.settings.hostfile import RING_OF_JACCL, Hostfile, load_hostfile, read_launch
from mlx_ring.settings.strategies import STRATEGIES


def rank_shares(settings: Settings) -> tuple[float, ...]:
    """Return the share of every layer by rank of a stage.

    Raises:
        ConfigError: the number of shares differs from the number of ranks.
    """
    shares = settings.tp_shares
    if not shares:
        return (1.0,) * settings.tp
    if settings.tp not in (1, len(shares)):
        raise ConfigError(
            f"--tp {settings.tp} shares every layer among {settings.tp} workers, but --tp-shares has {len(shares)} shares: "
            "give as many, or leave --tp out."
        )
    return shares


def shared_stages(settings: Settings) -> int:
    """Return the number of stages for `--tp` with `--nodes`: `--stages`, else one machine per rank."""
    if settings.stages > 1:
        return settings.stages
    return max(1, settings.nodes // len(rank_shares(settings)))


def may_share_by_plan(settings: Settings) -> bool:
    """Return True if a plan may let machines share layers without `--tp`."""
    if settings.nodes == 1:
        return False
    return STRATEGIES[settings.strategy].is_tensor_parallel or (
        settings.strategy == "auto" and bool(settings.trusted_interface)
    )


def crowding_remark(settings: Settings, cores: int) -> str:
    """Return what is wrong with `--tp` on this machine's cores, as a sentence; empty if they suffice."""
    ranks = len(rank_shares(settings))
    workers = settings.stages * ranks
    if ranks == 1 or workers <= cores:
        return ""
    fits = max(1, cores // settings.stages)
    return (
        f"--tp {ranks} makes {workers} workers for {cores} core{'s' if cores > 1 else ''}. On a CPU, each sum waits for "
        f"workers that have no core, so answers come later than with --tp {fits}."
    )


def check_ranks(settings: Settings) -> None:
    """Raise `ConfigError` if ranks cannot be placed on machines as requested."""
    ranks, nodes, stages = len(rank_shares(settings)), settings.nodes, settings.stages
    if nodes == 1:
        return
    if ranks == 1:
        if stages > 1:
            raise ConfigError(
                f"--stages {stages} splits the layers over processes of one machine, but with --nodes {nodes} each "
                "machine of the plan is a stage: leave --stages out."
            )
        if settings.strategy == "tensor":
            _check_trust(settings, "--strategy tensor shares layers between machines")
        return
    if settings.strategy not in {"auto", "custom"}:
        raise ConfigError(
            f"--strategy {settings.strategy} distributes the layers, and so does --tp {ranks} with --nodes {nodes}: "
            "leave one of them out."
        )
    stages = shared_stages(settings)
    if stages * ranks % nodes:
        near = ", ".join(str(number) for number in range(1, 9) if (stages * ranks) % number == 0)
        raise ConfigError(
            f"--tp {ranks} makes {stages * ranks} workers, which cannot be spread evenly over {nodes} machines: use --nodes {near} or another --tp."
        )
    if stages * ranks // nodes % ranks:
        _check_trust(settings, f"--tp {ranks} with --nodes {nodes} shares layers between machines")


def _check_trust(settings: Settings, requirement: str) -> None:
    """Raise `ConfigError` if no interface is trusted with traffic that is not encrypted."""
    if not settings.trusted_interface:
        raise ConfigError(
            f"{requirement}. That traffic is neither encrypted nor authenticated, so it may reach other machines only if both ends "
            "trust an interface: name it with --trusted-interface, here and on each machine that joins."
        )


def check_link(settings: Settings) -> None:
    """Raise `ConfigError` if stages cannot be linked as requested."""
    link, stages, ranks = settings.link, settings.stages, len(rank_shares(settings))
    _check_backend(settings, ranks)
    info = LINKS[link]
    if settings.nodes > 1:
        if info.backend is not None and not BACKENDS[info.backend].joins_machines:
            raise ConfigError(
                f"--link {link} joins stages on one machine only, but --nodes is {settings.nodes}: use --link ring, or leave it out."
            )
        if not info.is_encrypted:
            _check_trust(settings, f"--link {link} with --nodes {settings.nodes} joins machines")
        # Each machine of the plan is a stage.
        stages = settings.nodes
    if info.backend is None:
        return
    if ranks > 1:
        raise ConfigError(
            f"--link {link} uses the only MLX group of a process for the stages, but --tp {ranks} needs it for the ranks: "
            "leave one of them out."
        )
    if stages == 1:
        raise ConfigError(
            f"--link {link} sends activations between stages, but there is one: add --stages 2, or leave --link out."
        )
    if info.why_two_stages and stages not in {1, 2}:
        raise ConfigError(
            f"--link {link} {info.why_two_stages}, so it joins two stages, but {stages} were requested: "
            "use --link ring or grpc."
        )


def _check_backend(settings: Settings, ranks: int) -> None:
    """Raise `ConfigError` if the backend would join nothing, or belongs to another link."""
    backend, link = settings.backend, settings.link
    if backend == AUTO:
        return
    if ranks == 1 and not is_collective(link) and not may_share_by_plan(settings):
        raise ConfigError(
            f"--backend {backend} joins workers that share layers, or stages with a collective link, but there are none: "
            "add --tp 2 or --link allreduce, or leave --backend out."
        )
    if link in BACKENDS and link != backend:
        raise ConfigError(
            f"--link {link} uses MLX's backend {link}, but --backend is {backend}: leave one of them out."
        )
    if LINKS[link].sums and not BACKENDS[backend].allows_allreduce:
        raise ConfigError(
            f"--link {link} is for backends that cannot send, and {backend} can: use --link {backend}."
        )
    if settings.nodes > 1 and ranks == 1 and not BACKENDS[backend].joins_machines:
        raise ConfigError(
            f"--backend {backend} joins workers of one machine, but with --nodes {settings.nodes} each is on another: "
            "use --backend ring."
        )


# ---- a group on this machine, as a hostfile or `mlx.launch` names it


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
