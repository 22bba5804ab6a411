"""Waiting without a busy core for a neighbour of MLX's ring, where ranks share cores on Linux x86-64.

A thread of MLX's ring reads its socket in a loop until data comes. With fewer than two cores for each rank it takes
the core of the rank that it waits for. Four ranks on two cores answer up to 2.5 times as fast if they wait in the
kernel. With cores to spare the loop is faster, by the microseconds that the kernel needs to wake a thread, and stays.

`libmlx.so` calls `recv` through a slot (`blas/slots.py`). The slot is pointed at compiled code (`native/waits.cpp`), which
waits for data once, for at most `WAIT_NS`, if `recv` has found none, and tries again. MLX calls it again if there is still
none. The wait is short because the same thread may have data to send. Where the kernels are not compiled, the loop stays.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Sequence

from mlx_cpu_kernels.blas.install import load_from_package
from mlx_cpu_kernels.blas.slots import Slot, find_slots
from mlx_cpu_kernels.compiled import load_recv
from mlx_cpu_kernels.packages import Unavailable

log = logging.getLogger(__name__)

WAIT_NS = 200_000
"""Longest wait of one call. A thread without data wakes 5,000 times a second, for a few microseconds each time."""
_RECV = "recv"
_CORES_PER_RANK = 2
"""One computes, and one waits in MLX's loop."""


def share_cores(group: Sequence[str], place: int, cores: int) -> bool:
    """Return true if this rank of a ring shares cores with others.

    Args:
        group: addresses of the ranks, each a host with a port, or several separated by commas.
        place: of this rank in the group.
        cores: number of this machine's cores that may be kept busy.
    """
    hosts = [addresses.partition(",")[0].rpartition(":")[0] for addresses in group]
    return cores < _CORES_PER_RANK * hosts.count(hosts[place])


def can_wait_in_the_kernel() -> bool:
    """Return true on the platforms that the code is for."""
    return (platform.system(), platform.machine(), platform.libc_ver()[0]) == ("Linux", "x86_64", "glibc")


def wait_in_the_kernel() -> list[Slot]:
    """Let MLX's ring wait for data in the kernel from now on. Return the slots that were changed.

    Where this is not supported, MLX stays as it was.
    """
    if not can_wait_in_the_kernel():
        return []
    try:
        slots = find_slots(load_from_package("mlx", "lib/libmlx.so"), frozenset({_RECV}))
        recv = load_recv(WAIT_NS)
        for slot in slots:
            slot.write(recv)
    except (Unavailable, OSError) as reason:  # OSError: a /proc that is not mounted
        log.info("A rank that waits for others keeps a core busy: %s", reason)
        return []
    return slots
