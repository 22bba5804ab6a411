"""What was measured, as planning takes it. Pure."""

from __future__ import annotations

from mlx_ring.host.machine_profile import MachineProfile
from mlx_ring.planner.cpu_quota import CpuQuota
from mlx_ring.planner.profiles import NodeProfile


def measured_node(
    profile: MachineProfile,
    name: str,
    *,
    reserve_share: float = 0.1,
    memory_cap: int | None = None,
    beside_bytes: int | None = None,
) -> NodeProfile:
    """A machine, by its profile.

    Args:
        name: of the node.
        reserve_share: of its memory, what is left to others.
        memory_cap: bytes that its owner grants, where that is less than it has.
        beside_bytes: what runs there beside a worker, of our own: an agent, where nothing is said.
    """
    plain = next(
        (rate for rate in profile.rates if rate.weights == (profile.computes_in or "bfloat16")),
        profile.rates[0],
    )
    beside = profile.agent_bytes if beside_bytes is None else beside_bytes
    return NodeProfile(
        name=name,
        memory_bytes=min(profile.memory_bytes, memory_cap or profile.memory_bytes),
        bandwidth=plain.bandwidth,
        flops=plain.flops,
        reserve_share=reserve_share,
        rates=profile.rates,
        costs=profile.costs,
        widens=profile.computes_in == "float32",
        # A GPU has memory of its own, or an advised part of it, where no process lies.
        process_bytes=profile.worker_bytes + beside if profile.device == "cpu" else 0,
        cpu_quota=_cpu_quota(profile),
        workers_at_once=max(1, profile.cores // profile.blas_threads) if profile.device == "cpu" else 1,
    )


def _cpu_quota(profile: MachineProfile) -> CpuQuota | None:
    """None where rates are by the clock: see `stopwatch` of the worker's profile mode."""
    share, period_s = profile.cpu_share, profile.cpu_period_s
    if profile.device != "cpu" or profile.blas_threads > 1 or share is None or share >= 1 or period_s is None:
        return None
    return CpuQuota(share, period_s)
