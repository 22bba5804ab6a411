"""Dispatch in machine code between MLX and OpenBLAS, with a fast path for narrow products.

OpenBLAS packs both operands of every `cblas_sgemm`. When A has one row, as in decode, packing
reads and writes the weights before they are used once, at a third of memory speed. `cblas_sgemv`
reads them in place. With 2 to 8 rows OpenBLAS has kernels that do not pack, on AVX-512, but uses
them only for small products. So a wide product is cut into blocks of columns of that size.

The bounds are those of `kernel/x86_64/sgemm_small_kernel_permit_skylakex.c` in OpenBLAS 0.3.34.
If they change, the blocks get slower, never wrong.

The code is for x86-64 and the System V calling convention. The arguments of

    cblas_sgemm(order, transA, transB, M, N, K, alpha, A, lda, B, ldb, beta, C, ldc)

arrive in edi, esi, edx, ecx, r8d, r9d, xmm0, [rsp+8], +16, +24, +32, xmm1, +40, +48; those of

    cblas_sgemv(order, trans, m, n, alpha, A, lda, X, incX, beta, Y, incY)

are expected in edi, esi, edx, ecx, xmm0, r8, r9d, [rsp+8], +16, xmm1, +24, +32. The argument area
belongs to the callee, so a product of one row is rearranged in place and left by a jump.
"""

from __future__ import annotations

import ctypes
import mmap
import struct

from mlx_cpu_kernels.packages import Unavailable

MOST_ROWS_IN_BLOCKS = 8

# Machine code, the instruction it encodes (GNU assembler, Intel syntax), and why.
LISTING = """
front:
    f30f1efa       endbr64                          # landing pad, where the processor checks indirect calls
    83ff65         cmp edi, 101                     # anything but row-major continues as it came
    752c           jne gemm
    8d4691         lea eax, [rsi-111]               # transA: 111 no, 112 yes; OpenBLAS judges others
    83f801         cmp eax, 1
    7724           ja gemm
    8d4291         lea eax, [rdx-111]               # transB: the same
    83f801         cmp eax, 1
    771c           ja gemm
    4585c9         test r9d, r9d                    # K = 0: only sgemm scales C by beta
    7e17           jle gemm
    83f901         cmp ecx, 1                       # M = 1
    7418           je row
    4183f801       cmp r8d, 1                       # N = 1
    745d           je column
    3b0db9010000   cmp ecx, dword ptr [rip+limit]   # 2 <= M <= limit
    0f8ea1000000   jle few
gemm:
    ff259d010000   jmp qword ptr [rip+sgemm]        # all arguments are still where they were
row:
    41ba01000000   mov r10d, 1
    8b442410       mov eax, dword ptr [rsp+16]      # incX = lda if A is stored as a column,
    83fe6f         cmp esi, 111
    410f44c2       cmove eax, r10d                  #        1 if it is stored as a row
    89442410       mov dword ptr [rsp+16], eax
    be6f000000     mov esi, 111
    4489c9         mov ecx, r9d
    83fa70         cmp edx, 112                     # B stored (N, K): y = B x, m = N, n = K
    4489c2         mov edx, r8d
    7407           je row_ready
    be70000000     mov esi, 112                     # B stored (K, N): y = B' x, m = K, n = N
    87ca           xchg edx, ecx
row_ready:
    4c8b442418     mov r8, qword ptr [rsp+24]       # the matrix is B,
    448b4c2420     mov r9d, dword ptr [rsp+32]      # with ldb
    488b442428     mov rax, qword ptr [rsp+40]      # y is C; x is A and lies where X belongs
    4889442418     mov qword ptr [rsp+24], rax
    4489542420     mov dword ptr [rsp+32], r10d     # incY = 1
    ff255a010000   jmp qword ptr [rip+sgemv]
column:
    41ba01000000   mov r10d, 1
    8b442420       mov eax, dword ptr [rsp+32]
    83fa70         cmp edx, 112
    410f44c2       cmove eax, r10d                  # incX = 1 if B is stored as a row, ldb if as a column
    4c8b442408     mov r8, qword ptr [rsp+8]        # the matrix is A,
    448b542410     mov r10d, dword ptr [rsp+16]     # with lda
    89442410       mov dword ptr [rsp+16], eax
    488b442418     mov rax, qword ptr [rsp+24]      # x is B
    4889442408     mov qword ptr [rsp+8], rax
    488b442428     mov rax, qword ptr [rsp+40]      # y is C,
    4889442418     mov qword ptr [rsp+24], rax
    8b442430       mov eax, dword ptr [rsp+48]      # incY = ldc
    89442420       mov dword ptr [rsp+32], eax
    89ca           mov edx, ecx
    4489c9         mov ecx, r9d
    83fe6f         cmp esi, 111                     # A stored (M, K): y = A x, m = M, n = K
    7402           je column_ready
    87ca           xchg edx, ecx
column_ready:
    4589d1         mov r9d, r10d                    # lda
    ff250a010000   jmp qword ptr [rip+sgemv]
few:
    83f902         cmp ecx, 2                       # M <= 0 is OpenBLAS's to judge
    0f8c56ffffff   jl gemm
    83fa70         cmp edx, 112                     # only the layout of a Linear's weight, (N, K), gains
    0f854dffffff   jne gemm
    4183f920       cmp r9d, 32                      # below K = 32 OpenBLAS packs anyway
    0f8c43ffffff   jl gemm
    4189d2         mov r10d, edx                    # transB, while div uses edx
    b840420f00     mov eax, 1000000                 # OpenBLAS's bound on M N K ...
    31d2           xor edx, edx
    41f7f1         div r9d
    41bbb0040000   mov r11d, 1200                   # ... and on M N
    4439d8         cmp eax, r11d
    410f47c3       cmova eax, r11d
    31d2           xor edx, edx
    f7f1           div ecx                          # eax = the largest block of columns within both
    4489d2         mov edx, r10d
    83f810         cmp eax, 16                      # smaller blocks cost more in calls than they save
    0f8c19ffffff   jl gemm
    4139c0         cmp r8d, eax                     # one block: no loop needed
    0f8e10ffffff   jle gemm
    55             push rbp
    4889e5         mov rbp, rsp
    53             push rbx
    4154           push r12
    4155           push r13
    4156           push r14
    4157           push r15
    4883ec48       sub rsp, 72                      # arguments 48, locals 24; rsp stays a multiple of 16
    4489c3         mov ebx, r8d                     # columns left
    4189c4         mov r12d, eax                    # columns per block
    4c8b6d20       mov r13, qword ptr [rbp+32]      # B of the block
    4c8b7530       mov r14, qword ptr [rbp+48]      # C of the block
    4c637d28       movsxd r15, dword ptr [rbp+40]   # bytes from one block of B to the next:
    4d0faffc       imul r15, r12
    49c1e702       shl r15, 2                       # ldb * columns * 4
    8975d0         mov dword ptr [rbp-48], esi      # transA
    894dcc         mov dword ptr [rbp-52], ecx      # M
    44894dc8       mov dword ptr [rbp-56], r9d      # K
    f30f1145c4     movss dword ptr [rbp-60], xmm0   # alpha
    f30f114dc0     movss dword ptr [rbp-64], xmm1   # beta
block:
    bf65000000     mov edi, 101
    8b75d0         mov esi, dword ptr [rbp-48]
    ba70000000     mov edx, 112
    8b4dcc         mov ecx, dword ptr [rbp-52]
    4589e0         mov r8d, r12d
    4439e3         cmp ebx, r12d
    440f4cc3       cmovl r8d, ebx                   # N = min(columns per block, columns left)
    448b4dc8       mov r9d, dword ptr [rbp-56]
    f30f1045c4     movss xmm0, dword ptr [rbp-60]
    f30f104dc0     movss xmm1, dword ptr [rbp-64]
    488b4510       mov rax, qword ptr [rbp+16]      # A
    48890424       mov qword ptr [rsp], rax
    8b4518         mov eax, dword ptr [rbp+24]      # lda
    89442408       mov dword ptr [rsp+8], eax
    4c896c2410     mov qword ptr [rsp+16], r13      # B
    8b4528         mov eax, dword ptr [rbp+40]      # ldb
    89442418       mov dword ptr [rsp+24], eax
    4c89742420     mov qword ptr [rsp+32], r14      # C
    8b4538         mov eax, dword ptr [rbp+56]      # ldc
    89442428       mov dword ptr [rsp+40], eax
    ff151f000000   call qword ptr [rip+sgemm]
    4d01fd         add r13, r15
    4f8d34a6       lea r14, [r14+r12*4]             # C moves by whole columns
    4429e3         sub ebx, r12d
    7f9f           jg block
    4883c448       add rsp, 72
    415f           pop r15
    415e           pop r14
    415d           pop r13
    415c           pop r12
    5b             pop rbx
    5d             pop rbp
    c3             ret
    cccccccc       .balign 8, 0xcc                  # the literals, filled in by Python
    0000000000000000 sgemm: .quad 0
    0000000000000000 sgemv: .quad 0
    00000000       limit: .long 0                   # the most rows that are cut into blocks; 1 cuts none
"""

_LITERALS = struct.Struct("<QQi")


def machine_code(sgemm: int, sgemv: int, rows_in_blocks: int) -> bytes:
    """Return the dispatch's bytes, which run at any address.

    `sgemm` and `sgemv` are addresses of OpenBLAS's functions with 32-bit integers. Products of 2
    to `rows_in_blocks` rows are cut into blocks; 1 cuts none.
    """
    words = (line.split()[0] for line in LISTING.splitlines() if line.startswith(" "))
    code = bytes.fromhex("".join(words))
    return code[: -_LITERALS.size] + _LITERALS.pack(sgemm, sgemv, rows_in_blocks)


def load_dispatch(sgemm: int, sgemv: int, rows_in_blocks: int) -> int:
    """Place the dispatch in executable memory and return its address. Raises `Unavailable`."""
    return place_code(machine_code(sgemm, sgemv, rows_in_blocks))


def place_code(code: bytes) -> int:
    """Place machine code in executable memory and return its address.

    The memory is never freed: MLX's threads may call it until the process ends.
    Raises `Unavailable` if the system lets no page become executable.
    """
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    address = libc.mmap(None, len(code), mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        raise Unavailable("no memory for machine code")
    ctypes.memmove(address, code, len(code))
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    if libc.mprotect(address, len(code), mmap.PROT_READ | mmap.PROT_EXEC):
        raise Unavailable("this system lets no page become executable")
    return int(address)
