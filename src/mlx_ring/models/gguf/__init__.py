"""GGUF files: header, metadata and table of tensors, without the tensors' bytes, no MLX.

A file is input from anywhere. Each count, length and offset is compared with the file's size before it is used. So a
wrong one ends in a sentence. Values of the metadata are decoded when they are read.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, KeysView, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

from mlx_ring.core.errors import ModelCorrupt, ModelUnsupported

MAGIC = b"GGUF"
SUFFIX = ".gguf"
_VERSIONS = (2, 3)
_SCALARS = {number: f"<{form}" for number, form in enumerate("BbHhIif?  Qqd") if form != " "}
"""Formats of single values, by the number of their type."""
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")
_ARRAY_HEAD = struct.Struct("<IQ")
"""Type and number of the values of an array."""
_LEAST_ENTRY_BYTES = 13
"""Bytes of the shortest entry of the metadata: the length of its key, its type, and a value of one byte."""
_LEAST_TENSOR_BYTES = 32
"""Bytes of the shortest description of a tensor: the length of its name, one size, type and offset."""
_MOST_AXES = 4
_ALIGNMENT = 32
_MOST_ALIGNMENT = 1 << 20
_SHOWN = 60
_READ_AT_ONCE = 1 << 18
"""Bytes of the header that are read together."""
# Limits that no real file comes near, so that a harmful one takes neither memory nor hours.
_MOST_ENTRIES, _MOST_VALUES = 1 << 20, 1 << 23
_LONGEST_NAME, _LARGEST_VALUE = 1 << 16, 1 << 28
_MOST_NESTED = 8

GROUP = 32
"""Weights that MLX quantizes together."""
_BLOCK_OF_K = 256


@dataclass(frozen=True, slots=True)
class BlockType:
    """Type of a tensor: blocks of `weights` weights in `nbytes` bytes, and the bits of MLX's integers; 0 for floats."""

    name: str
    weights: int
    nbytes: int
    bits: int = 0

    @property
    def is_quantized(self) -> bool:
        return self.bits > 0

    @property
    def has_half_scales(self) -> bool:
        """True if scales and biases are numbers of float16, unless a bias -8 * scale or the like overflows."""
        return self.is_quantized and self.weights == GROUP

    def loaded_bytes(self, weights: int, scale_bytes: int) -> int:
        """Return the bytes in memory of a quantized tensor, with scales of the given number of bytes."""
        return weights * self.bits // 8 + 2 * scale_bytes * (weights // GROUP)


TYPES = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    30: BlockType("BF16", 1, 2),
    2: BlockType("Q4_0", GROUP, 18, 4),
    3: BlockType("Q4_1", GROUP, 20, 4),
    6: BlockType("Q5_0", GROUP, 22, 5),
    7: BlockType("Q5_1", GROUP, 24, 5),
    8: BlockType("Q8_0", GROUP, 34, 8),
    12: BlockType("Q4_K", _BLOCK_OF_K, 144, 4),
    13: BlockType("Q5_K", _BLOCK_OF_K, 176, 5),
    14: BlockType("Q6_K", _BLOCK_OF_K, 210, 8),
}
"""Supported types, by their numbers."""
_NAMES = (
    "F32,F16,Q4_0,Q4_1,Q4_2,Q4_3,Q5_0,Q5_1,Q8_0,Q8_1,Q2_K,Q3_K,Q4_K,Q5_K,Q6_K,Q8_K,IQ2_XXS,IQ2_XS,"
    "IQ3_XXS,IQ1_S,IQ4_NL,IQ3_S,IQ2_S,IQ4_XS,I8,I16,I32,I64,F64,IQ1_M,BF16,Q4_0_4_4,Q4_0_4_8,"
    "Q4_0_8_8,TQ1_0,TQ2_0,IQ4_NL_4_4,IQ4_NL_4_8,IQ4_NL_8_8,MXFP4,NVFP4"
)
TYPE_NAMES = dict(enumerate(_NAMES.split(",")))
"""Names of all types, for messages."""
QUANTIZED = {kind.name: kind for kind in TYPES.values() if kind.is_quantized}


Value = TypeVar("Value", int, float, str, bool)


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Tensor of a GGUF file. `offset` and `nbytes` are bytes of the file; `shape` is slowest axis first."""

    name: str
    kind: BlockType
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Span:
    """Bytes of an encoded value: `count` values of one type, or a single one if it is None."""

    kind: int
    count: int | None
    start: int
    end: int


@dataclass(frozen=True)
class GgufFile:
    """Header of a GGUF file."""

    path: Path
    nbytes: int
    header_bytes: int
    """Bytes before the first tensor."""
    tensors: Mapping[str, GgufTensor]
    _spans: Mapping[str, _Span]

    @property
    def keys(self) -> KeysView[str]:
        """Return the names of all values of the metadata."""
        return self._spans.keys()

    def single(self, key: str) -> object:
        """Return a single value of the metadata, whatever its type."""
        return self._decode(key, self._spans[key])

    def is_array(self, key: str) -> bool:
        """Report whether the metadata has an array of this name."""
        span = self._spans.get(key)
        return span is not None and span.count is not None

    def value(self, key: str, kind: type[Value]) -> Value | None:
        """Return a single value of the metadata, or None if it is not there.

        Raises:
            ModelCorrupt: it has another type.
        """
        span = self._spans.get(key)
        if span is None:
            return None
        if span.count is not None:
            raise self._wrong(f"{key} as an array; it must be a {kind.__name__}")
        found = self._decode(key, span)
        if kind is float and type(found) is int:
            found = float(found)
        if type(found) is not kind or (isinstance(found, float) and not math.isfinite(found)):
            raise self._wrong(f"{key} as {shown(found)}; it must be a {kind.__name__}")
        return cast("Value", found)

    def values(self, key: str, most: int = _MOST_VALUES) -> list[Any] | None:
        """Return an array of the metadata, or None if it is not there.

        Raises:
            ModelCorrupt: it is no array, or has more than `most` values.
            ModelUnsupported: its values are arrays.
        """
        span = self._spans.get(key)
        if span is None:
            return None
        if span.count is None:
            raise self._wrong(f"{key} as {shown(self._decode(key, span))}; it must be an array")
        if span.count > most:
            raise self._wrong(f"{key} {span.count} values; {most} are the most")
        if span.kind == _ARRAY:
            raise ModelUnsupported(
                f"{self.path} gives {key} as an array of arrays, which no supported model has: serve the model from a "
                "folder with safetensors."
            )
        return cast("list[Any]", self._decode(key, span))

    def _wrong(self, problem: str) -> ModelCorrupt:
        return ModelCorrupt(f"{self.path} gives {problem}. Fetch the file again.")

    def _decode(self, key: str, span: _Span) -> object:
        if span.end - span.start > _LARGEST_VALUE:
            raise self._wrong(f"{key} {span.end - span.start} bytes; {_LARGEST_VALUE} are the most")
        data = read_range(self.path, span.start, span.end - span.start)
        if span.kind == _STRING:
            texts = list(_texts(data, 1 if span.count is None else span.count))
            return texts[0] if span.count is None else texts
        form = _SCALARS[span.kind]
        values = struct.unpack(f"<{1 if span.count is None else span.count}{form[1]}", data)
        return values[0] if span.count is None else list(values)


def read_range(path: Path, start: int, nbytes: int) -> bytes:
    """Return bytes of a file. Raises `ModelCorrupt` if it has fewer."""
    try:
        with path.open("rb", buffering=0) as stream:
            stream.seek(start)
            data = stream.read(nbytes)
            while len(data) < nbytes and (more := stream.read(nbytes - len(data))):
                data += more
    except OSError as error:
        raise ModelCorrupt(f"{path} cannot be read: {error.strerror}. Fetch it again.") from error
    if len(data) < nbytes:
        raise ModelCorrupt(f"{path} ends before byte {start + nbytes}: it was changed. Fetch it again.")
    return data


def read_gguf(path: Path) -> GgufFile:
    """Read and check the header of a file.

    Raises:
        ModelCorrupt: it is truncated, no GGUF file, or contradicts itself.
        ModelUnsupported: its version, its byte order or the type of a tensor is not supported.
    """
    try:
        with path.open("rb", buffering=0) as stream:
            size = stream.seek(0, 2)
            if size < _LENGTH.size:
                raise ModelCorrupt(
                    f"{path} has {size} bytes: it is truncated, or no GGUF file. Fetch it again."
                )
            return _Header(path, stream, size).read()
    except OSError as error:
        raise ModelCorrupt(f"{path} cannot be read: {error.strerror}. Fetch it again.") from error


def shown(value: object) -> str:
    """Write a value from a file for a message, shortened."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


class _Header:
    """Position in a file's header while it is read, and the bytes around it: a file may shrink meanwhile."""

    def __init__(self, path: Path, stream: BinaryIO, size: int) -> None:
        self._path = path
        self._stream, self._size = stream, size
        self._at = 0
        self._data = b""
        self._first = 0
        """Place in the file of the bytes in `_data`."""
        self._values_left = _MOST_VALUES

    def _place(self, at: int, nbytes: int) -> int:
        """Return where bytes of the file are in `_data`; read them if they are not there."""
        if not self._first <= at <= at + nbytes <= self._first + len(self._data):
            wanted = min(max(nbytes, _READ_AT_ONCE), self._size - at)
            self._stream.seek(at)
            data = self._stream.read(wanted)
            while len(data) < wanted and (more := self._stream.read(wanted - len(data))):
                data += more
            if len(data) < nbytes:
                raise self._wrong(f"no longer has the {self._size} bytes that it had: it was changed")
            self._first, self._data = at, data
        return at - self._first

    def read(self) -> GgufFile:
        self._check_version()
        tensor_count = self._unpack("<Q", "count of tensors")
        entry_count = self._unpack("<Q", "count of values")
        for count, what, least in (
            (tensor_count, "tensors", _LEAST_TENSOR_BYTES),
            (entry_count, "values of metadata", _LEAST_ENTRY_BYTES),
        ):
            if count * least > self._size - self._at:
                raise self._wrong(f"announces {count} {what}, more than its {self._size} bytes can hold")
            if count > _MOST_ENTRIES:
                raise self._wrong(f"announces {count} {what}; {_MOST_ENTRIES} are the most")
        spans: dict[str, _Span] = {}
        for _ in range(entry_count):
            key = self._text("a key")
            if key in spans:
                raise self._wrong(f"has the key {shown(key)} twice")
            spans[key] = self._span(key)
        described = [self._tensor() for _ in range(tensor_count)]
        alignment = self._alignment(spans)
        header_bytes = -(-self._at // alignment) * alignment
        tensors = self._placed(described, header_bytes, alignment)
        return GgufFile(self._path, self._size, min(header_bytes, self._size), tensors, spans)

    def _check_version(self) -> None:
        self._place(0, len(MAGIC))
        magic = self._data[: len(MAGIC)]
        if magic != MAGIC:
            raise ModelCorrupt(f"{self._path} begins with {magic!r}, not with {MAGIC!r}: it is no GGUF file.")
        self._at = len(MAGIC)
        version = self._unpack("<I", "version")
        if version in _VERSIONS:
            return
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        if swapped in (1, *_VERSIONS):
            raise ModelUnsupported(
                f"{self._path} is a big-endian GGUF file (version {swapped}); only little-endian ones are read: convert "
                "the model again, or fetch the usual file."
            )
        raise ModelUnsupported(
            f"{self._path} is a GGUF file of version {version}; versions 2 and 3 are read: convert the model again with "
            "a present llama.cpp."
        )

    def _span(self, key: str) -> _Span:
        kind = self._unpack("<I", f"type of {shown(key)}")
        if kind != _ARRAY:
            start = self._at
            self._skip(kind, 1, key)
            return _Span(kind, None, start, self._at)
        kind = self._unpack("<I", f"type of {shown(key)}")
        count = self._unpack("<Q", f"length of {shown(key)}")
        start = self._at
        self._skip(kind, count, key)
        return _Span(kind, count, start, self._at)

    def _skip(self, kind: int, count: int, key: str, depth: int = 0) -> None:
        least = struct.calcsize(_SCALARS.get(kind, "<B"))
        least = {_STRING: _LENGTH.size, _ARRAY: _ARRAY_HEAD.size}.get(kind, least)
        if count * least > self._size - self._at:
            raise self._wrong(f"gives {shown(key)} {count} values, more than its {self._size} bytes can hold")
        self._values_left -= count
        if self._values_left < 0:
            raise self._wrong(f"gives {shown(key)} {count} values; {_MOST_VALUES} are the most of a file")
        if kind == _STRING:
            self._skip_texts(count, key)
        elif kind in _SCALARS:
            self._at += count * least
        elif kind == _ARRAY and depth < _MOST_NESTED:
            for _ in range(count):
                place = self._place(self._at, self._left(_ARRAY_HEAD.size, f"arrays of {shown(key)}"))
                inner, size = _ARRAY_HEAD.unpack_from(self._data, place)
                self._at += _ARRAY_HEAD.size
                self._skip(inner, size, key, depth + 1)
        elif kind == _ARRAY:
            raise self._wrong(f"puts arrays of {shown(key)} more than {_MOST_NESTED} deep into each other")
        else:
            raise self._wrong(f"gives {shown(key)} values of type {kind}, which is none of GGUF's")

    def _skip_texts(self, count: int, key: str) -> None:
        at, last, unpack = self._at, self._size - _LENGTH.size, _LENGTH.unpack_from
        first, data, end = self._first, self._data, self._first + len(self._data) - _LENGTH.size
        for _ in range(count):
            if at > last:
                break
            if not first <= at <= end:
                self._place(at, _LENGTH.size)
                first, data, end = self._first, self._data, self._first + len(self._data) - _LENGTH.size
            at += _LENGTH.size + cast("int", unpack(data, at - first)[0])
        else:
            if at <= self._size:
                self._at = at
                return
        raise self._wrong(f"ends within the texts of {shown(key)}, or gives one of them a wrong length")

    def _tensor(self) -> tuple[str, BlockType, tuple[int, ...], int]:
        """Return name, type, shape and offset behind the header."""
        name = self._text("the name of a tensor")
        axes = self._unpack("<I", f"axes of {shown(name)}")
        if not 1 <= axes <= _MOST_AXES:
            raise self._wrong(f"gives tensor {shown(name)} {axes} axes; 1 to {_MOST_AXES} are possible")
        sizes = [self._unpack("<Q", f"sizes of {shown(name)}") for _ in range(axes)]
        number = self._unpack("<I", f"type of {shown(name)}")
        offset = self._unpack("<Q", f"offset of {shown(name)}")
        kind = TYPES.get(number)
        if kind is None:
            raise ModelUnsupported(
                f"{self._path} has tensor {shown(name)} in the type {TYPE_NAMES.get(number, number)}, which is not "
                f"supported; supported are {', '.join(each.name for each in TYPES.values())}: choose a file of the model "
                "in another quantization, such as Q4_K_M or Q8_0."
            )
        if not all(sizes) or sizes[0] % kind.weights:
            raise self._wrong(
                f"gives tensor {shown(name)} the sizes {sizes}, but {kind.name} needs whole blocks of {kind.weights}"
            )
        return name, kind, tuple(reversed(sizes)), offset

    def _alignment(self, spans: Mapping[str, _Span]) -> int:
        span = spans.get("general.alignment")
        if span is None:
            return _ALIGNMENT
        if span.count is not None or span.kind not in _SCALARS:
            raise self._wrong("gives general.alignment as no number")
        form = _SCALARS[span.kind]
        place = self._place(span.start, struct.calcsize(form))
        value = struct.unpack_from(form, self._data, place)[0]
        if type(value) is not int or not 0 < value <= _MOST_ALIGNMENT or value % 8:
            raise self._wrong(f"gives general.alignment as {value!r}; it must be a multiple of 8")
        return value

    def _placed(
        self, described: list[tuple[str, BlockType, tuple[int, ...], int]], begin: int, alignment: int
    ) -> dict[str, GgufTensor]:
        """Return the tensors with their ranges, which neither overlap nor exceed the file."""
        tensors: dict[str, GgufTensor] = {}
        end, before = begin, ""
        for name, kind, shape, offset in sorted(described, key=lambda each: each[3]):
            nbytes = math.prod(shape) // kind.weights * kind.nbytes
            first = begin + offset
            if name in tensors:
                raise self._wrong(f"has tensor {shown(name)} twice")
            if offset % alignment:
                raise self._wrong(
                    f"puts tensor {shown(name)} at {offset}, which is no multiple of {alignment}"
                )
            if first < end:
                raise self._wrong(f"lets tensors {shown(before)} and {shown(name)} overlap at byte {first}")
            end, before = first + nbytes, name
            if end > self._size:
                raise self._wrong(
                    f"gives tensor {shown(name)} the bytes [{first}, {end}) but has {self._size}: it is truncated"
                )
            tensors[name] = GgufTensor(name, kind, shape, first, nbytes)
        return tensors

    def _text(self, what: str) -> str:
        length = self._unpack("<Q", f"length of {what}")
        if length > self._size - self._at:
            raise self._wrong(f"gives {what} {length} bytes, more than it has")
        if length > _LONGEST_NAME:
            raise self._wrong(f"gives {what} {length} bytes; {_LONGEST_NAME} are the most")
        place = self._place(self._at, length)
        self._at += length
        return self._data[place : place + length].decode("utf-8", "replace")

    def _unpack(self, form: str, what: str) -> int:
        size = self._left(struct.calcsize(form), what)
        place = self._place(self._at, size)
        value = struct.unpack_from(form, self._data, place)[0]
        self._at += size
        return value

    def _left(self, nbytes: int, what: str) -> int:
        """Return `nbytes` if the file has that many more."""
        if nbytes > self._size - self._at:
            raise self._wrong(f"ends before the {what}: it is truncated")
        return nbytes

    def _wrong(self, problem: str) -> ModelCorrupt:
        return ModelCorrupt(f"{self._path} {problem}. Fetch the file again.")


def _texts(data: bytes, count: int) -> Iterator[str]:
    at = 0
    for _ in range(count):
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size + length
        yield data[at - length : at].decode("utf-8", "replace")
