"""Profiles of measured machines, as the planner reads them. Pure."""

from __future__ import annotations

from mlx_ring.core.types import CpuWeights
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
    cpu_weights: CpuWeights = "quantized",
) -> NodeProfile:
    """Return the planner's profile of a measured machine.

    Args:
        profile: measured profile.
        name: name of the node.
        reserve_share: share of its memory that stays free for other programs.
        memory_cap: bytes that plans may use, if less than the machine has.
        beside_bytes: memory of mlx-ring's other processes there; an agent's by default.
        cpu_weights: the setting of that name; with `auto`, native kernels compute quantized weights where they run.
    """
    plain = next(
        (rate for rate in profile.rates if rate.weights == (profile.computes_in or "bfloat16")),
        profile.rates[0],
    )
    if (
        profile.device != "cpu"
        or profile.computes_in != "float32"
        or (cpu_weights == "auto" and profile.kernels)
    ):
        cpu_weights = "quantized"
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
        keeps_scales=bool(profile.kernels),
        cpu_weights=cpu_weights,
        # A GPU has memory of its own, or an advised part of it, where no process lies.
        process_bytes=profile.worker_bytes + beside if profile.device == "cpu" else 0,
        cpu_quota=_cpu_quota(profile),
        workers_at_once=max(1, profile.cores // profile.blas_threads) if profile.device == "cpu" else 1,
    )


def _cpu_quota(profile: MachineProfile) -> CpuQuota | None:
    """Return the CPU quota; None if rates were measured in wall-clock time (`stopwatch` of the worker's profile mode)."""
    share, period_s = profile.cpu_share, profile.cpu_period_s
    if profile.device != "cpu" or profile.blas_threads > 1 or share is None or share >= 1 or period_s is None:
        return None
    return CpuQuota(share, period_s)
