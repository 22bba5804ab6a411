"""A fast BLAS under MLX on Linux x86-64, where the wheel of MLX links the reference BLAS.

`install.py` is the way in; `slots.py` finds where `libmlx.so` calls BLAS, `openblas.py` loads the
library that is called instead, `front.py` stands between the two, `selfcheck.py` judges the result.
"""

from mlx_ring.worker.platform.blas.install import BlasReport, choose_blas, install_fast_blas

__all__ = ["BlasReport", "choose_blas", "install_fast_blas"]
