"""Waiting without a busy core for a neighbour of MLX's ring, where ranks share cores on Linux x86-64.

A thread of MLX's ring reads its socket in a loop until data comes. With fewer than two cores for each rank it takes
the core of the rank that it waits for: four ranks on two cores answer up to 2.5 times as fast if they wait in the
kernel. With cores to spare the loop is faster, by the microseconds that the kernel needs to wake a thread, and stays.

`libmlx.so` calls `recv` through a slot (`blas/slots.py`). The slot is pointed at code that waits for data once, for at
most `WAIT_NS`, if `recv` has found none, and tries again. MLX calls it again if there is still none. The wait is short
because the same thread may have data to send.
"""

from __future__ import annotations

import ctypes
import logging
import platform
import struct
from collections.abc import Sequence

from mlx_cpu_kernels.blas.dispatch import place_code
from mlx_cpu_kernels.blas.install import load_from_package
from mlx_cpu_kernels.blas.slots import Slot, find_slots
from mlx_cpu_kernels.packages import Unavailable

log = logging.getLogger(__name__)

WAIT_NS = 200_000
"""Longest wait of one call. A thread without data wakes 5,000 times a second, for a few microseconds each time."""
_RECV = "recv"
_CORES_PER_RANK = 2
"""One computes, and one waits in MLX's loop."""

# Machine code, the instruction it encodes (GNU assembler, Intel syntax), and why.
LISTING = """
wait:
    f30f1efa           endbr64                          # landing pad, where the processor checks indirect calls
    53                 push rbx
    55                 push rbp
    4154               push r12
    4155               push r13
    4883ec18           sub rsp, 24                      # a struct pollfd; rsp becomes a multiple of 16
    89fb               mov ebx, edi                     # the arguments of recv(socket, buffer, length, flags)
    4889f5             mov rbp, rsi
    4989d4             mov r12, rdx
    4189cd             mov r13d, ecx
    ff1559000000       call qword ptr [rip+recv]
    4883f8ff           cmp rax, -1
    7545               jne done                         # data, or the end of the stream
    ff1555000000       call qword ptr [rip+errno]
    83380b             cmp dword ptr [rax], 11          # EAGAIN: no data yet
    48c7c0ffffffff     mov rax, -1
    7533               jne done
    891c24             mov dword ptr [rsp], ebx
    c744240401000000   mov dword ptr [rsp+4], 1         # POLLIN
    4889e7             mov rdi, rsp
    be01000000         mov esi, 1
    488d153f000000     lea rdx, [rip+limit]
    31c9               xor ecx, ecx
    ff152f000000       call qword ptr [rip+ppoll]       # whatever it returns, recv tells the rest
    89df               mov edi, ebx
    4889ee             mov rsi, rbp
    4c89e2             mov rdx, r12
    4489e9             mov ecx, r13d
    ff150e000000       call qword ptr [rip+recv]
done:
    4883c418           add rsp, 24
    415d               pop r13
    415c               pop r12
    5d                 pop rbp
    5b                 pop rbx
    c3                 ret
    cccccc             .balign 8, 0xcc                  # the literals, filled in by Python
    0000000000000000   recv: .quad 0
    0000000000000000   errno: .quad 0
    0000000000000000   ppoll: .quad 0
    0000000000000000   limit: .quad 0                   # a struct timespec: seconds,
    0000000000000000   .quad 0                          # and nanoseconds
"""
_LITERALS = struct.Struct("<QQQqq")


def machine_code(wait_ns: int) -> bytes:
    """Return the code, which runs at any address."""
    words = (line.split()[0] for line in LISTING.splitlines() if line.startswith(" "))
    code = bytes.fromhex("".join(words))[: -_LITERALS.size]
    functions = map(_address, (_RECV, "__errno_location", "ppoll"))
    return code + _LITERALS.pack(*functions, *divmod(wait_ns, 1_000_000_000))


def _address(function: str) -> int:
    """Return the address of a function of the C library."""
    return ctypes.cast(ctypes.CDLL(None)[function], ctypes.c_void_p).value or 0


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
        code = place_code(machine_code(WAIT_NS))
        for slot in slots:
            slot.write(code)
    except (Unavailable, OSError) as reason:  # OSError: a /proc that is not mounted
        log.info("a rank that waits for others keeps a core busy: %s", reason)
        return []
    return slots
