"""Both parts in one call."""

from __future__ import annotations

from mlx_cpu_kernels.blas import install_fast_blas


def speed_up(threads: int = 1, *, kernels: bool = True) -> str:
    """Let MLX compute on this process's CPU as fast as it can here. Return a description of what computes. Safe to repeat.

    Args:
        threads: the number of threads of each product.
        kernels: use the native kernels for quantized weights and layers, if they were built for the installed MLX.
    """
    blas = install_fast_blas(threads)
    parts = [blas.library if blas.active else f"{blas.library} ({blas.detail})"]
    if kernels:
        from mlx_cpu_kernels.operations import install  # it imports MLX

        report = install(threads)
        if report.active:
            parts.append(f"native kernels ({report.detail})")
        elif report.detail:
            parts.append(f"MLX's own operations on quantized weights ({report.detail})")
    return "; ".join(parts)
