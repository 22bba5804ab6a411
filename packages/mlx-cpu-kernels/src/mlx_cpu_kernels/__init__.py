"""Fast MLX on Linux CPUs: OpenBLAS computes matrix products, and native kernels those with quantized weights.

    import mlx_cpu_kernels

    print(mlx_cpu_kernels.speed_up(threads=4))

Where a part does not apply, MLX stays as it is, and the description says why. Each part can be had alone:
`mlx_cpu_kernels.blas.install_fast_blas` and `mlx_cpu_kernels.operations.install`.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlx_cpu_kernels.blas import install_fast_blas

__all__ = ["SpeedReport", "speed_up"]


@dataclass(frozen=True, slots=True)
class SpeedReport:
    """Means by which this process computes on a CPU. Its text describes them."""

    blas: str
    """Library that multiplies, and why, if it is not OpenBLAS."""
    kernels: str = ""
    """Instruction set of the native kernels; empty without them."""
    problem: str = ""
    """Reason why quantized weights are multiplied without native kernels; empty where they are not, or on a GPU."""
    cost: str = ""
    """Further cost of the same reason; empty if there is none."""

    def __str__(self) -> str:
        if self.kernels:
            return f"{self.blas}; native kernels ({self.kernels})"
        cost = self.cost and f", so {self.cost}"
        return f"{self.blas}, without native kernels{cost}: {self.problem}" if self.problem else self.blas


def speed_up(threads: int = 1, *, kernels: bool = True) -> SpeedReport:
    """Let MLX compute on this process's CPU as fast as it can here. Safe to repeat.

    Without native kernels, products of several rows with quantized weights convert these first.

    Args:
        threads: the number of threads of each product.
        kernels: use the native kernels for quantized weights and layers, if they were built for the installed MLX.
    """
    installed = install_fast_blas(threads)
    from mlx_cpu_kernels.operations import KernelReport, install, install_fallback  # it imports MLX

    report = install(threads) if kernels else KernelReport(active=False, detail="they are switched off")
    detail = installed.detail.removesuffix(".")
    blas = f"{installed.library} ({detail})" if detail else installed.library
    if report.active:
        return SpeedReport(blas, kernels=report.detail)
    problem = report.detail if install_fallback() else ""
    cost, of_both, _ = detail.partition(f": {problem}") if problem else ("", "", "")
    if of_both:
        return SpeedReport(installed.library, problem=problem, cost=f"{cost[:1].lower()}{cost[1:]}")
    return SpeedReport(blas, problem=problem)
