"""Fast MLX on Linux CPUs: OpenBLAS computes matrix products, and native kernels those with quantized weights.

    import mlx_cpu_kernels

    print(mlx_cpu_kernels.speed_up(threads=4))

Where a part does not apply, MLX stays as it is, and the description says why. Each part can be had alone:
`mlx_cpu_kernels.blas.install_fast_blas` and `mlx_cpu_kernels.operations.install`.
"""

from mlx_cpu_kernels.speed_up import SpeedReport, speed_up

__all__ = ["SpeedReport", "speed_up"]
