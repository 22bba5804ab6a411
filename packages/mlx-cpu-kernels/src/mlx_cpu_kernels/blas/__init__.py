"""Fast BLAS under MLX on Linux x86-64, where the wheel of MLX links the reference BLAS.

`install.py` is the entry point and loads OpenBLAS. `slots.py` finds where `libmlx.so` calls BLAS, `native/blas.cpp`
is the code between the two, and `selfcheck.py` checks the result.
"""

from mlx_cpu_kernels.blas.install import BlasReport, install_fast_blas

__all__ = ["BlasReport", "install_fast_blas"]
