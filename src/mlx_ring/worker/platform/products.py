"""Choice of what computes matrix products on a CPU."""

from __future__ import annotations

from mlx_cpu_kernels import speed_up


def choose_products(mode: str, threads: int) -> str:
    """Choose by `--blas`, for products of `threads` threads each. Return a description. It imports MLX.

    - `auto`: OpenBLAS, and native kernels for quantized weights;
    - `openblas`: OpenBLAS alone;
    - `off`: what MLX brings along.
    """
    if mode == "off":
        return "MLX's own (OpenBLAS is switched off by --blas off)"
    return speed_up(threads, kernels=mode == "auto")
