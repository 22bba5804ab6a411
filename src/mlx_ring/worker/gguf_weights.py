"""Weights of GGUF files as lazy arrays of MLX, converted when they are read.

MLX reads lazily from safetensors files alone. So the arrays are those of a scratch file without a name, which is empty.
Before MLX reads the arrays of a module, its tensors are converted into that file, and afterwards it is emptied. Any
other read of an array fails. A rank's part of a matrix, for example, is thus cut as that of any file.

Types of GGUF's tensors become affine groups of 32 weights, which MLX computes with. A group's weight is `scale * q + bias` with an unsigned integer q. Blocks of all types but Q6_K are such groups: their
scales and biases are exact in float32. Workers compute in float32 on CPUs; in half precision they are rounded, as any
scale is. Q6_K has a scale for every 16 weights, and MLX none below 32. Two of its blocks become one group of 8 bits, in
steps of a quarter of the larger scale. Weights of the larger scale stay exact, the others are rounded to such a step.
"""

from __future__ import annotations

import json
import math
import os
import struct
import tempfile
import weakref
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_ring.core.errors import ModelCorrupt
from mlx_ring.models.gguf import GROUP, QUANTIZED, BlockType, read_range
from mlx_ring.models.gguf.tensors import layout_of
from mlx_ring.models.model_folder import ModelFolder, TensorEntry

_LENGTH = struct.Struct("<Q")
Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Groups = tuple[Bytes, Floats, Floats]
"""Integers (groups, 32), and each group's scale and bias."""
_LOW, _HALF = np.uint8(15), np.uint8(4)
"""Mask of a byte's low half, and its bits."""
Halves = NDArray[np.float16]
_CONVERTED_WEIGHTS = 1 << 22
"""Most weights that are converted at once."""


@dataclass(frozen=True, slots=True)
class _ConvertedArray:
    """One of the arrays that a tensor becomes. `offset` and `nbytes` are bytes, behind the scratch file's header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class ScalesOverflow(Exception):
    """A group's bias is beyond float16, which its scale is stored in."""


class GgufWeights:
    """Lazy arrays of all tensors of a folder's GGUF files, by their names in mlx-lm's model.

    Scales and biases of blocks of 32 weights are float16, as in the file; those of K-quants are products of it, in
    float32. `widened` makes all float32, for a file in which a bias -8 * scale does not fit.
    """

    def __init__(self, folder: ModelFolder, *, widened: bool = False) -> None:
        self._folder = folder
        self._modules: defaultdict[str, list[tuple[TensorEntry, list[_ConvertedArray]]]] = defaultdict(list)
        described, end = dict[str, Any](), 0
        for entry in folder.tensors:
            parts = list(_parts_of(folder, entry, end, widened=widened))
            self._modules[_module(entry.name)].append((entry, parts))
            end = parts[-1].offset + parts[-1].nbytes
            for part in parts:
                offsets = [part.offset, part.offset + part.nbytes]
                described[part.name] = {"dtype": part.dtype, "shape": part.shape, "data_offsets": offsets}
        header = json.dumps(described).encode()
        self._begin = _LENGTH.size + len(header)
        self._file, path = _scratch_file()
        weakref.finalize(self, os.close, self._file)
        try:
            self._write(_LENGTH.pack(len(header)) + header, -self._begin)
            os.ftruncate(self._file, self._begin + end)
            self.arrays = cast("dict[str, mx.array]", mx.load(path, format="safetensors"))
            """Arrays, each of which can be evaluated while its module is `readable`, which is once."""
        finally:
            os.ftruncate(self._file, 0)
            with suppress(OSError):
                Path(path).unlink()

    @contextmanager
    def readable(self, module: str) -> Generator[None]:
        """Convert a module's tensors; its arrays, and no others, can be evaluated meanwhile. They are forgotten then.

        Raises:
            ModelCorrupt: the file can no longer be read, or there is no room for the converted tensors.
            ScalesOverflow: they must be `widened`.
        """
        try:
            try:
                for entry, parts in self._modules[module]:
                    self._convert(entry, parts)
            except OSError as error:
                raise ModelCorrupt(
                    f"The tensors of {module} in {self._folder.path} cannot be converted ({error.strerror}): free some "
                    "memory, or space for temporary files."
                ) from error
            yield
        finally:
            os.ftruncate(self._file, 0)
            for part in chain.from_iterable(parts for _, parts in self._modules[module]):
                self.arrays.pop(part.name, None)

    def _convert(self, entry: TensorEntry, parts: list[_ConvertedArray]) -> None:
        """Write a tensor's arrays. Some rows are converted at a time, of heads whose rows are interleaved whole heads."""
        rows = math.prod(entry.shape[: max(len(entry.shape) - 1, 1)])
        row_bytes, row_weights = entry.nbytes // rows, math.prod(entry.shape) // rows
        layout = layout_of(self._folder.config, entry.name)
        if layout.heads and rows % (2 * layout.heads):
            raise ModelCorrupt(
                f"{entry.name} in {self._folder.path} has {rows} rows, which are not {layout.heads} heads of pairs: the "
                "file contradicts itself. Fetch it again."
            )
        head = rows // layout.heads if layout.heads else 1
        step = max(_CONVERTED_WEIGHTS // row_weights // head, 1) * head
        for first in range(0, rows, step):
            count = min(step, rows - first)
            read = read_range(
                self._folder.path / entry.file, entry.offset + first * row_bytes, count * row_bytes
            )
            data = np.frombuffer(read, np.uint8)
            if layout.heads:
                data = data.reshape(-1, head // 2, 2, row_bytes).swapaxes(1, 2).reshape(-1)
            for part, array in zip(parts, _converted(entry, data, layout.offset), strict=True):
                stored = _halved(array) if entry.dtype in QUANTIZED and part.dtype == "F16" else array
                self._write(stored.tobytes(), part.offset + first * (part.nbytes // rows))

    def _write(self, data: bytes, offset: int) -> None:
        """Write bytes of the scratch file, at an offset behind its header."""
        at = self._begin + offset
        while data:
            written = os.pwrite(self._file, data, at)
            data, at = data[written:], at + written


def _module(path: str) -> str:
    return path.rpartition(".")[0]


def _scratch_file() -> tuple[int, str]:
    """Return a new file, and a path by which this process can open it: in memory where the system has such files."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("gguf", os.MFD_CLOEXEC)
        return descriptor, f"/proc/self/fd/{descriptor}"
    return tempfile.mkstemp(suffix=".safetensors")


def _parts_of(
    folder: ModelFolder, entry: TensorEntry, offset: int, *, widened: bool
) -> Iterator[_ConvertedArray]:
    """Yield the arrays that a tensor becomes, one behind the other from `offset` on."""
    kind = QUANTIZED.get(entry.dtype)
    if kind is None:
        is_shifted = layout_of(folder.config, entry.name).offset != 0
        dtype, nbytes = ("F32", 4 * math.prod(entry.shape)) if is_shifted else (entry.dtype, entry.nbytes)
        yield _ConvertedArray(entry.name, dtype, entry.shape, offset, nbytes)
        return
    *others, columns = entry.shape
    words, groups = columns * kind.bits // 32, columns // GROUP
    scales = ("F16", 2) if kind.has_half_scales and not widened else ("F32", 4)
    for name, (dtype, itemsize), size in (
        ("weight", ("U32", 4), words),
        ("scales", scales, groups),
        ("biases", scales, groups),
    ):
        nbytes = itemsize * math.prod(others) * size
        yield _ConvertedArray(f"{_module(entry.name)}.{name}", dtype, (*others, size), offset, nbytes)
        offset += nbytes


def _halved(values: Bytes | Floats) -> Halves:
    """Return numbers that have the precision of float16 in that type. Raises `ScalesOverflow` if one is too large."""
    with np.errstate(over="ignore"):
        halves = values.astype(np.float16)
    if np.any(np.isinf(halves) & np.isfinite(values)):
        raise ScalesOverflow
    return halves


def _converted(entry: TensorEntry, data: Bytes, offset: int) -> tuple[Bytes | Floats, ...]:
    """Return the arrays of a tensor's rows. `offset` is subtracted from its weights."""
    kind = QUANTIZED.get(entry.dtype)
    if kind is not None:
        integers, scales, biases = to_groups(kind, data)
        return pack(integers, kind.bits), scales, biases
    if not offset:
        return (data,)
    if entry.dtype == "BF16":
        values = np.left_shift(data.view(np.uint16), 16, dtype=np.uint32).view(np.float32)
    else:
        values = data.view(np.float32 if entry.dtype == "F32" else np.float16).astype(np.float32)
    return (values - np.float32(offset),)


# ---- blocks as groups


def to_groups(kind: BlockType, data: Bytes) -> Groups:
    """Return the groups of consecutive blocks, in order.

    Args:
        kind: a quantized type.
        data: (bytes,) whole blocks.
    """
    with np.errstate(all="ignore"):  # scales that are no numbers stay none
        return _READERS[kind.name](data.reshape(-1, kind.nbytes))


def pack(integers: Bytes, bits: int) -> Bytes:
    """Pack integers (groups, 32) of 4, 5 or 8 bits as MLX does: little-endian, without gaps. (groups, 4 * bits)."""
    if bits == 8:  # noqa: PLR2004 - whole bytes
        return integers
    if bits == 4:  # noqa: PLR2004 - two in a byte
        return integers[:, 0::2] | (integers[:, 1::2] << _HALF)
    eights = integers.reshape(-1, 8).astype("<u8")
    words = np.bitwise_or.reduce(eights << (np.arange(8, dtype="<u8") * np.uint64(bits)), axis=1)
    return words.astype("<u8").view(np.uint8).reshape(-1, 8)[:, :bits].reshape(-1, 4 * bits)


def _float(data: Bytes, at: int) -> Floats:
    """Return the float16 at a place of each block, as (blocks,)."""
    return np.ascontiguousarray(data[:, at : at + 2]).view("<f2")[:, 0].astype(np.float32)


def _nibbles(data: Bytes) -> Bytes:
    """Return the low halves of bytes, then the high ones: (..., n) to (..., 2n)."""
    return np.concatenate([data & _LOW, data >> _HALF], axis=-1)


def _fifth_bits(data: Bytes, at: int) -> Bytes:
    """Return the 32 bits at a place of each block, as (blocks, 32) of 0 or 16."""
    return np.unpackbits(data[:, at : at + 4], axis=1, bitorder="little") << _HALF


def _q4_0(data: Bytes) -> Groups:
    scale = _float(data, 0)
    return _nibbles(data[:, 2:]), scale, -8 * scale


def _q4_1(data: Bytes) -> Groups:
    return _nibbles(data[:, 4:]), _float(data, 0), _float(data, 2)


def _q5_0(data: Bytes) -> Groups:
    scale = _float(data, 0)
    return _nibbles(data[:, 6:]) | _fifth_bits(data, 2), scale, -16 * scale


def _q5_1(data: Bytes) -> Groups:
    return _nibbles(data[:, 8:]) | _fifth_bits(data, 4), _float(data, 0), _float(data, 2)


def _q8_0(data: Bytes) -> Groups:
    scale = _float(data, 0)
    return data[:, 2:] ^ np.uint8(0x80), scale, -128 * scale


def _scales_of_k(data: Bytes) -> tuple[Floats, Floats]:
    """Return scale and bias of the eight groups of each block of Q4_K or Q5_K."""
    low, middle, high = data[:, 4:8], data[:, 8:12], data[:, 12:16]
    factors = np.concatenate([low & 63, (high & 15) | ((low >> 6) << 4)], axis=1)
    minima = np.concatenate([middle & 63, (high >> 4) | ((middle >> 6) << 4)], axis=1)
    return (
        (_float(data, 0)[:, None] * factors).reshape(-1),
        (-_float(data, 2)[:, None] * minima).reshape(-1),
    )


def _q4_k(data: Bytes) -> Groups:
    return _nibbles(data[:, 16:].reshape(-1, 4, 32)).reshape(-1, GROUP), *_scales_of_k(data)


def _q5_k(data: Bytes) -> Groups:
    high = (
        np.unpackbits(data[:, 16:48].reshape(-1, 32, 1), axis=2, bitorder="little").transpose(0, 2, 1)
        << _HALF
    )
    low = _nibbles(data[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    return (low | high).reshape(-1, GROUP), *_scales_of_k(data)


def _q6_k(data: Bytes) -> Groups:
    """Return 8-bit groups of 32, each of two blocks of 16.

    With the larger scale s of the two, the steps are s/4. The larger block's weights s * q for q in [-32, 31] are 4 * q
    steps, exactly; the other's are rounded to the next step.
    """
    low = _nibbles(data[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    twos = data[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None]
    signed = (low | ((twos & np.uint8(3)) << _HALF)).astype(np.float32) - 32
    blocks = signed.reshape(-1, 2, 16)
    scales = (data[:, 192:208].view(np.int8).astype(np.float32) * _float(data, 208)[:, None]).reshape(-1, 2)
    first, second = scales[:, 0], scales[:, 1]
    larger: Floats = np.where(np.abs(first) >= np.abs(second), first, second).astype(np.float32)
    ratios = np.divide(4 * scales, larger[:, None], out=np.zeros_like(scales), where=larger[:, None] != 0)
    steps = np.rint(blocks * ratios[:, :, None]).reshape(-1, GROUP)
    return np.clip(steps + 128, 0, 255).astype(np.uint8), larger / np.float32(4), np.float32(-32) * larger


_READERS: dict[str, Callable[[Bytes], Groups]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
