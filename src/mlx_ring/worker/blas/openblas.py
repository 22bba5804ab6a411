"""OpenBLAS as PyPI's `scipy-openblas32` brings it: 32-bit integers, symbols with a prefix."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from mlx_ring.worker.blas.unavailable import Unavailable

PACKAGE = "scipy_openblas32"

# Cores whose kernels for small products do not pack, and so gain from blocks (see `front.py`).
_CORES_WITH_SMALL_KERNELS = frozenset({"SkylakeX", "Cooperlake", "SapphireRapids"})


@dataclass(frozen=True, slots=True)
class OpenBlas:
    """The loaded library, by what is needed of it."""

    library: ctypes.CDLL
    version: str
    core: str

    @property
    def name(self) -> str:
        """For people: the version, where it comes from, and the processor its kernels are for."""
        return f"OpenBLAS {self.version} (scipy-openblas32), {self.core}"

    @property
    def has_small_kernels(self) -> bool:
        """Whether small products are computed without packing."""
        return self.core in _CORES_WITH_SMALL_KERNELS

    def address(self, function: str) -> int:
        """The address of `function`, named without prefix. Raises `Unavailable`."""
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
    spec = find_spec(package)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    if not folders:
        raise Unavailable(f"the package {package} is not installed")
    for folder in folders:
        if (file := Path(folder, path)).is_file():
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
