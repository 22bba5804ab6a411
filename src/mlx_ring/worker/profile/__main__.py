"""Measure the device as a worker would use it, print the profile and end: `python -m mlx_ring.worker.profile`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from mlx_ring.core.errors import RingError
from mlx_ring.core.lean_imports import import_mlx_lm
from mlx_ring.host.child import watch_lifeline
from mlx_ring.settings.process_settings import BlasMode
from mlx_ring.worker.compute_thread import prefer_throughput


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and write the profile to a file or to the output, as JSON. Return the exit code."""
    options = _parse(arguments)
    if options.lifeline_fd is not None:
        watch_lifeline(options.lifeline_fd, lambda: os._exit(0))
    prefer_throughput()
    import_mlx_lm()

    from mlx_ring.worker.platform.device import (
        choose_products,
        keep_compiled_kernels,
    )  # MLX must load after mlx-lm
    from mlx_ring.worker.profile.measure import Bounds, measure

    keep_compiled_kernels()
    products = choose_products(options.blas, options.blas_threads)

    try:
        bounds = Bounds(options.seconds, options.memory_share)
        profile = measure(bounds, products=products, blas_threads=options.blas_threads)
    except (RingError, RuntimeError) as error:
        print(error, file=sys.stderr)  # noqa: T201 - the parent reads the last line as the reason
        return 1
    text = profile.model_dump_json(indent=1)
    if options.output is None:
        print(text)  # noqa: T201 - output of this command
    else:
        options.output.write_text(text, "utf-8")
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="mlx_ring.worker.profile", description=__doc__)
    parser.add_argument("--output", type=Path, help="file for the profile; printed otherwise")
    parser.add_argument("--seconds", type=float, default=2.5, help="approximate time for measuring")
    parser.add_argument("--memory-share", type=float, default=0.25, help="share of the free memory to use")
    parser.add_argument("--blas", choices=get_args(BlasMode), required=True)
    parser.add_argument("--blas-threads", type=int, required=True)
    parser.add_argument("--lifeline-fd", type=int)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
