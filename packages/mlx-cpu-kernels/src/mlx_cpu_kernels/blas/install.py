"""Redirection of MLX's matrix products on a Linux CPU to OpenBLAS.

The Linux wheel of MLX links the reference BLAS, 30 to 60 times slower than the processor. Its calls
go through slots in `libmlx.so`. Those of `cblas_sgemm`, `cblas_dgemm` and `cblas_cgemm` are pointed
at OpenBLAS, the first through a compiled dispatch for narrow products (`native/blas.cpp`). Where that is not compiled,
products of one row take 2.5 to 4.5 times as long.

OpenBLAS comes from PyPI's `scipy-openblas32`: 32-bit integers, symbols with a prefix.
"""

from __future__ import annotations

import ctypes
import platform
import re
import sys
import threading
from dataclasses import dataclass, replace
from pathlib import Path

from mlx_cpu_kernels.blas.selfcheck import Product, first_wrong_product
from mlx_cpu_kernels.blas.slots import Slot, find_slots
from mlx_cpu_kernels.compiled import load_dispatch
from mlx_cpu_kernels.packages import Unavailable, folders_of

PACKAGE = "scipy_openblas32"

_MOST_ROWS_IN_BLOCKS = 8
# Cores whose kernels for small products do not pack, and so gain from blocks (see `native/blas.cpp`).
_CORES_WITH_SMALL_KERNELS = frozenset({"SkylakeX", "Cooperlake", "SapphireRapids"})


@dataclass(frozen=True, slots=True)
class OpenBlas:
    """Loaded library, reduced to what is needed of it."""

    library: ctypes.CDLL
    version: str
    core: str

    @property
    def name(self) -> str:
        """Version, origin, and the processor that its kernels are for, as text."""
        return f"OpenBLAS {self.version} (scipy-openblas32), {self.core}"

    @property
    def has_small_kernels(self) -> bool:
        """True if small products are computed without packing."""
        return self.core in _CORES_WITH_SMALL_KERNELS

    def address(self, function: str) -> int:
        """Return the address of `function`, named without prefix. Raises `Unavailable`."""
        try:
            symbol = self.library[f"scipy_{function}"]
        except AttributeError:
            raise Unavailable(f"{PACKAGE} has no {function}") from None
        return ctypes.cast(symbol, ctypes.c_void_p).value or 0

    def set_threads(self, threads: int) -> int:
        """Compute each product on `threads` threads; return how many it will be."""
        self.library.scipy_openblas_set_num_threads(ctypes.c_int(threads))
        return int(self.library.scipy_openblas_get_num_threads())


def load_openblas() -> OpenBlas:
    """Load the package's library. Raises `Unavailable` if it is missing or of another build."""
    library = load_from_package(PACKAGE, "lib/libscipy_openblas.so")
    try:
        config = _text(library, "scipy_openblas_get_config")
        core = _text(library, "scipy_openblas_get_corename")
    except AttributeError:
        raise Unavailable(f"{PACKAGE} has other symbols than expected") from None
    if "USE64BITINT" in config:
        raise Unavailable(f"{PACKAGE} is built for 64-bit integers")
    version = re.search(r"\d+\.\d+\.\d+", config)
    return OpenBlas(library, version.group() if version else "of unknown version", core)


def load_from_package(package: str, path: str) -> ctypes.CDLL:
    """Load the shared library at `path` in an installed package, without importing the package."""
    for folder in folders_of(package):
        if (file := folder / path).is_file():
            return _load(file)
    raise Unavailable(f"the package {package} has no {path}")


def _load(file: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(file))
    except OSError as error:
        raise Unavailable(f"{file.name} cannot be loaded ({error})") from error


def _text(library: ctypes.CDLL, function: str) -> str:
    call = library[function]
    call.restype = ctypes.c_char_p
    return (call() or b"").decode()


_SGEMM = "cblas_sgemm"
_PRODUCTS = frozenset({_SGEMM, "cblas_dgemm", "cblas_cgemm"})
_REFERENCE = "the BLAS of the mlx wheel"


@dataclass(frozen=True, slots=True)
class BlasReport:
    """BLAS that computes MLX's matrix products on the CPU of this process.

    `detail` is a sentence about why the fast BLAS, or a part of it, is not in use; else empty.
    `threads` is how many threads compute one product.
    """

    library: str
    active: bool
    detail: str
    threads: int


@dataclass(frozen=True, slots=True)
class _Installed:
    """State of an installation, for the next call."""

    openblas: OpenBlas
    report: BlasReport


_lock = threading.Lock()
_installed: _Installed | None = None


def install_fast_blas(threads: int = 1) -> BlasReport:
    """Let MLX compute its matrix products on the CPU with OpenBLAS, on `threads` threads each.

    Works before and after `import mlx.core`, and does not import it. A further call only changes
    the number of threads. If OpenBLAS cannot be used, MLX stays as it was, and the report
    says why; nothing is raised.
    """
    global _installed  # noqa: PLW0603 - the slots of libmlx.so are global too
    with _lock:
        try:
            if _installed is None:
                _installed = _install()
        except (Unavailable, OSError) as reason:  # OSError: a /proc that is not mounted
            return BlasReport(
                _library_without(), active=False, detail=f"MLX keeps its own BLAS: {reason}.", threads=1
            )
        return replace(_installed.report, threads=_installed.openblas.set_threads(max(1, threads)))


def _library_without() -> str:
    return "Accelerate" if platform.system() == "Darwin" else _REFERENCE


def _install() -> _Installed:
    _require_platform()
    openblas = load_openblas()
    openblas.set_threads(1)
    slots = find_slots(load_from_package("mlx", "lib/libmlx.so"), _PRODUCTS)
    if not any(slot.symbol == _SGEMM for slot in slots):
        raise Unavailable("libmlx.so does not call cblas_sgemm through a slot")
    detail = _redirect(slots, openblas)
    return _Installed(openblas, BlasReport(openblas.name, active=True, detail=detail, threads=1))


def _require_platform() -> None:
    """Check for x86-64 Linux with glibc, which the slots and the dispatch need."""
    system, machine = platform.system(), platform.machine()
    if system == "Darwin":
        raise Unavailable("Apple's Accelerate is fast")
    if system != "Linux" or machine != "x86_64" or sys.maxsize < 2**32:
        raise Unavailable(f"OpenBLAS is used on Linux x86-64 only, but this is {system} {machine}")
    if platform.libc_ver()[0] != "glibc":
        raise Unavailable("the C library is not glibc")


def _redirect(slots: list[Slot], openblas: OpenBlas) -> str:
    """Point `slots` at OpenBLAS, with the dispatch if it works here, and return what is wrong."""
    detail = ""
    try:
        sgemm = _checked(_front(openblas))
    except Unavailable as reason:
        detail = f"Each token takes 2.5 to 4.5 times as long: {reason}."
        sgemm = _checked(openblas.address(_SGEMM))
    functions = {symbol: openblas.address(symbol) for symbol in _PRODUCTS} | {_SGEMM: sgemm}
    before = [(slot, slot.read()) for slot in slots]
    try:
        for slot in slots:
            slot.write(functions[slot.symbol])
        _check_slots(slots)
    except Unavailable:
        for slot, function in before:
            slot.write(function)
        raise
    return detail


def _front(openblas: OpenBlas) -> int:
    rows_in_blocks = _MOST_ROWS_IN_BLOCKS if openblas.has_small_kernels else 1
    return load_dispatch(openblas.address(_SGEMM), openblas.address("cblas_sgemv"), rows_in_blocks)


def _check_slots(slots: list[Slot]) -> None:
    """Compute through the slots, as MLX will."""
    for slot in slots:
        if slot.symbol == _SGEMM:
            _checked(slot.read())


def _checked(sgemm: int) -> int:
    """Return the address of a `cblas_sgemm` that computes correctly. Raises `Unavailable`."""
    wrong = first_wrong_product(sgemm)
    if wrong:
        raise Unavailable(f"the self-check found a wrong product, {_shape(wrong)}")
    return sgemm


def _shape(product: Product) -> str:
    return f"({product.rows}, {product.inner}) x ({product.inner}, {product.columns})"
