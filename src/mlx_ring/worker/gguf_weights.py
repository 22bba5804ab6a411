"""Weights of GGUF files as lazy arrays of MLX, converted when they are read.

MLX reads lazily from safetensors files alone. So the arrays are those of a scratch file without a name, which is empty.
Before MLX reads the arrays of a module, its tensors are converted into that file, and afterwards it is emptied. Any
other read of an array fails. A rank's part of a matrix, for example, is thus cut as that of any file.
"""

from __future__ import annotations

import json
import math
import os
import struct
import tempfile
import weakref
from collections import defaultdict
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_ring.core.errors import ModelCorrupt
from mlx_ring.models.gguf import GROUP, QUANTIZED, read_range
from mlx_ring.models.gguf.blocks import Bytes, Floats, pack, to_groups
from mlx_ring.models.gguf.model_config import layout_of
from mlx_ring.models.model_folder import ModelFolder, TensorEntry

_LENGTH = struct.Struct("<Q")
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
