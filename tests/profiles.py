"""A made-up profile of a machine."""

from __future__ import annotations

from typing import Any

from mlx_ring.host.machine_profile import PROFILE_VERSION, MachineProfile, StepCosts, WeightRate

COSTS = StepCosts(
    step_s=0.5e-3, layer_s=0.3e-3, quantized_layer_s=0.1e-3, draw_s=0.7e-3, logit_s=1e-9, attention_s=5e-10
)
RATES = (
    WeightRate(weights="float32", bandwidth=20e9, row_s=1e-7, spread=0.02, flops=90e9),
    WeightRate(weights="bfloat16", bandwidth=2e9, row_s=0.0, spread=0.02, flops=5e9),
    WeightRate(weights="8-bit", bandwidth=1.2e9, row_s=0.0, spread=0.02, flops=2.3e9),
    WeightRate(weights="4-bit", bandwidth=0.7e9, row_s=0.0, spread=0.02, flops=2.3e9),
)


def made_up_profile(**changes: Any) -> MachineProfile:
    values: dict[str, Any] = {
        "version": PROFILE_VERSION,
        "device": "cpu",
        "device_name": "Some CPU",
        "computes_in": "float32",
        "memory_bytes": 16 * 10**9,
        "memory_available_bytes": 12 * 10**9,
        "memory_limited_by": "the machine",
        "cores": 4,
        "cpu_share": None,
        "cpu_period_s": None,
        "worker_bytes": 0,
        "agent_bytes": 0,
        "blas": "OpenBLAS",
        "kernels": "",
        "blas_threads": 3,
        "mlx": "0.32.4",
        "rates": RATES,
        "costs": COSTS,
        "seconds": 2.5,
    }
    return MachineProfile(**(values | changes))
