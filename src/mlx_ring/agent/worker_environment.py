"""What processes that compute are started with: settings that are read before any argument is."""

from __future__ import annotations

import sys

from mlx_ring.core.environment import inherited_environment

_TUNABLES, _HUGE_PAGES = "GLIBC_TUNABLES", "glibc.malloc.hugetlb"


def worker_environment(blas_threads: int) -> dict[str, str]:
    """The whole environment of a worker whose BLAS has so many threads.

    On Linux it asks for large pages of memory where the system gives them only to who asks (`madvise`, as most
    distributions have it): weights are then read with one entry of the address tables for 2 MiB instead of 4 KiB.
    Decoding 130 M parameters in float32 went 5 to 17 % faster with them. What a person has set stays.
    """
    threads = str(blas_threads)
    environment = inherited_environment({"OPENBLAS_NUM_THREADS": threads, "OMP_NUM_THREADS": threads})
    tunables = environment.get(_TUNABLES, "")
    if sys.platform == "linux" and _HUGE_PAGES not in tunables:
        environment[_TUNABLES] = ":".join(filter(None, (tunables, f"{_HUGE_PAGES}=1")))
    return environment
