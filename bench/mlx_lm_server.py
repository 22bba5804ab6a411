"""Run `mlx_lm.server` with the BLAS of mlx-ring's workers; everything else is the stock program."""

from __future__ import annotations

import sys

from mlx_cpu_kernels.blas.install import install_fast_blas


def main() -> None:
    report = install_fast_blas(1)
    print(f"BLAS: {report.library}", file=sys.stderr)
    from mlx_lm import server  # MLX must load after the BLAS

    server.main()


if __name__ == "__main__":
    main()
