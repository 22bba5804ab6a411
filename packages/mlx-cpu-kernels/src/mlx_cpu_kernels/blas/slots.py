"""Search and replacement of the slots through which a loaded ELF library calls another.

A shared library calls an imported function through a pointer in its own memory, which the dynamic
linker fills in. The relocations name the symbol and the place of that pointer. Formats: System V
ABI, chapter 5, with the AMD64 supplement, section 4.4, and `dlinfo(3)`.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mlx_cpu_kernels.packages import Unavailable

_RTLD_DI_LINKMAP = 2

_DT_NULL = 0
_DT_PLTRELSZ = 2
_DT_STRTAB = 5
_DT_SYMTAB = 6
_DT_RELA = 7
_DT_RELASZ = 8
_DT_JMPREL = 23

_R_X86_64_GLOB_DAT = 6
_R_X86_64_JUMP_SLOT = 7

_DYNAMIC = struct.Struct("<qQ")
_RELOCATION = struct.Struct("<QIIq")
_SYMBOL_BYTES = 24


@dataclass(frozen=True, slots=True)
class Slot:
    """Pointer in the memory of a library: `symbol` is called through `address`."""

    symbol: str
    address: int

    def read(self) -> int:
        """Return the address of the function that is called now."""
        return ctypes.c_uint64.from_address(self.address).value

    def write(self, function: int) -> None:
        """Call `function` from now on. The store is atomic, so other threads may be calling.

        Raises `Unavailable` if the page is protected and cannot be opened.
        """
        if _is_writable(self.address):
            ctypes.c_uint64.from_address(self.address).value = function
            return
        page = self.address & -mmap.PAGESIZE
        _protect(page, mmap.PROT_READ | mmap.PROT_WRITE)
        ctypes.c_uint64.from_address(self.address).value = function
        _protect(page, mmap.PROT_READ)


class _LinkMap(ctypes.Structure):
    """Head of the dynamic linker's record of a library (`struct link_map`, link.h)."""

    _fields_ = (
        ("base", ctypes.c_size_t),
        ("name", ctypes.c_char_p),
        ("dynamic", ctypes.c_size_t),
    )


def find_slots(library: ctypes.CDLL, symbols: frozenset[str]) -> list[Slot]:
    """Return every slot through which `library` calls one of `symbols`. Raises `Unavailable`."""
    link_map = _link_map(library)
    dynamic = dict(_dynamic_entries(link_map.dynamic))
    names = _SymbolNames(
        _pointer(dynamic, _DT_SYMTAB, link_map.base), _pointer(dynamic, _DT_STRTAB, link_map.base)
    )
    tables = ((_DT_JMPREL, _DT_PLTRELSZ), (_DT_RELA, _DT_RELASZ))
    return [
        Slot(symbol, link_map.base + offset)
        for start, size in tables
        if start in dynamic
        for offset, index in _imports(_pointer(dynamic, start, link_map.base), dynamic.get(size, 0))
        if (symbol := names[index]) in symbols
    ]


def _link_map(library: ctypes.CDLL) -> _LinkMap:
    """Ask the dynamic linker where it put `library`."""
    found = ctypes.POINTER(_LinkMap)()
    dlinfo = ctypes.CDLL(None).dlinfo
    dlinfo.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
    if dlinfo(library._handle, _RTLD_DI_LINKMAP, ctypes.byref(found)):  # noqa: SLF001 - ctypes' documented handle
        raise Unavailable("the dynamic linker does not report the address of libmlx.so")
    return found.contents


def _dynamic_entries(address: int) -> Iterator[tuple[int, int]]:
    """Yield the (tag, value) pairs of a dynamic section."""
    while True:
        tag, value = _DYNAMIC.unpack(ctypes.string_at(address, _DYNAMIC.size))
        if tag == _DT_NULL:
            return
        yield tag, value
        address += _DYNAMIC.size


def _pointer(dynamic: dict[int, int], tag: int, base: int) -> int:
    """Return an address from the dynamic section, to which glibc adds the base and other linkers do not."""
    if tag not in dynamic:
        raise Unavailable(f"libmlx.so has no dynamic entry {tag}")
    value = dynamic[tag]
    return value if value >= base else base + value


def _imports(address: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield the (offset of the slot, index of the symbol) of each function imported by a relocation table."""
    table = ctypes.string_at(address, size)
    for offset, kind, index, _ in _RELOCATION.iter_unpack(table):
        if kind in (_R_X86_64_GLOB_DAT, _R_X86_64_JUMP_SLOT):
            yield offset, index


@dataclass(frozen=True, slots=True)
class _SymbolNames:
    """Names in a dynamic symbol table, by index."""

    symbols: int
    strings: int

    def __getitem__(self, index: int) -> str:
        offset = ctypes.c_uint32.from_address(self.symbols + index * _SYMBOL_BYTES).value
        return ctypes.string_at(self.strings + offset).decode(errors="replace")


def _is_writable(address: int) -> bool:
    """Report whether the page at `address` is mapped for writing."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        bounds, permissions = line.split(maxsplit=2)[:2]
        start, end = (int(bound, 16) for bound in bounds.split("-"))
        if start <= address < end:
            return "w" in permissions
    raise Unavailable("a slot of libmlx.so is in no mapping")


def _protect(page: int, protection: int) -> None:
    mprotect = ctypes.CDLL(None).mprotect
    mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    if mprotect(page, mmap.PAGESIZE, protection):
        raise Unavailable("the slots of libmlx.so are protected against writing")
