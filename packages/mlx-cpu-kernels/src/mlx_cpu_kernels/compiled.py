"""Compiled functions that other libraries call by address. They need neither Python nor MLX, and are in the kernels' binary."""

from __future__ import annotations

import ctypes

from mlx_cpu_kernels.packages import Unavailable


def load_dispatch(sgemm: int, sgemv: int, rows_in_blocks: int) -> int:
    """Return the address of a `cblas_sgemm` that computes narrow products without packing (`native/blas.cpp`).

    `sgemm` and `sgemv` are addresses of OpenBLAS's functions with 32-bit integers. Products of 2 to `rows_in_blocks` rows
    are cut into blocks; 1 cuts none. Raises `Unavailable`.
    """
    library = _library()
    library.mlx_cpu_kernels_use_openblas(ctypes.c_void_p(sgemm), ctypes.c_void_p(sgemv), rows_in_blocks)
    return _address(library, "sgemm")


def load_recv(wait_ns: int) -> int:
    """Return the address of a `recv` that waits at most `wait_ns` for data in the kernel (`native/waits.cpp`).

    Raises `Unavailable`.
    """
    library = _library()
    library.mlx_cpu_kernels_set_wait(ctypes.c_int64(wait_ns))
    return _address(library, "recv")


def _library() -> ctypes.CDLL:
    """Load the binary, whose library `libmlx.so` the caller has loaded."""
    from mlx_cpu_kernels import (
        build,  # here, for `python -m` runs that module after it has imported the package
    )

    target = build.Target.installed()
    binary = build.find_binary(target)
    if binary is None:
        raise Unavailable(build.why_without(target))
    try:
        return ctypes.CDLL(str(binary))
    except OSError as error:
        raise Unavailable(f"{binary.name} cannot be loaded ({error})") from error


def _address(library: ctypes.CDLL, function: str) -> int:
    return ctypes.cast(library[f"mlx_cpu_kernels_{function}"], ctypes.c_void_p).value or 0
