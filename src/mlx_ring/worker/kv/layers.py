"""Contents that each owned layer must keep, read from the fresh caches that the model itself makes.

mlx-lm's plain, sliding and chunked caches become rows of a `Bank`. Everything else (recurrent state, unknown kinds of
cache) stays an object of mlx-lm, one for each sequence. Rows that decode together share a pass, so their states
are put side by side. They stay so as long as the same rows continue together. Each row knows its index in them.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import mlx.core as mx
from mlx_lm.models import cache as mlx_lm_cache

from mlx_cpu_kernels.decoder_layers import append
from mlx_ring.core.errors import ModelUnsupported
from mlx_ring.core.types import BLOCK_TOKENS

_KVCache = cast("type[Any]", mlx_lm_cache.KVCache)
_RotatingKVCache = cast("type[Any]", mlx_lm_cache.RotatingKVCache)
_ChunkedKVCache = cast("type[Any]", mlx_lm_cache.ChunkedKVCache)
_ArraysCache = cast("type[Any]", mlx_lm_cache.ArraysCache)
_CacheList = cast("type[Any]", mlx_lm_cache.CacheList)

_GROUP_SIZES = (64, 32)
_MIN_BLOCK = 64


@dataclass(frozen=True, slots=True)
class Plane:
    """One stored array of a part: `(slots, heads, capacity, width)` in a bank."""

    heads: int
    width: int
    dtype: mx.Dtype


def write(plane: mx.array, rows: mx.array, slot: int, begin: int) -> mx.array:
    """Write `(slots, heads, tokens, width)` into a plane, from a slot and an index in it on.

    Return the plane to use from then on. The native kernels change it in place, whatever else has it: a slot is read
    only up to its row's length.
    """
    written = append(plane, rows.astype(plane.dtype), slot, begin)
    if written is not None:
        return written
    plane[slot : slot + rows.shape[0], :, begin : begin + rows.shape[2]] = rows
    return plane


def write_each(plane: mx.array, rows: mx.array, slots: mx.array, begins: mx.array) -> mx.array:
    """Write one token of each row, `(rows, heads, 1, width)`, at its own slot and index. Return the plane to use.

    It is one operation, which a GPU starts sooner than one for each row.
    """
    plane[slots, :, begins] = rows[:, :, 0].astype(plane.dtype)
    return plane


def resized(plane: mx.array, axis: int, size: int) -> mx.array:
    """Cut off or pad with zeros along an axis."""
    present = plane.shape[axis]
    if size == present:
        return plane
    if size < present:
        return mx.contiguous(plane[:size] if axis == 0 else plane[:, :, :size])
    shape = list(plane.shape)
    shape[axis] = size - present
    return mx.concatenate([plane, mx.zeros(shape, plane.dtype)], axis=axis)


@dataclass(slots=True)
class RowPart:
    """Keys and values that a bank holds as rows."""

    index: int
    """Index among the row parts of the stage."""
    window: int | None
    """Tokens that a position attends to, itself included; None: all."""
    bits: int | None
    chunked: bool = False
    """True if the model itself asks for the first key's position, which is one number for the whole batch."""
    group_size: int | None = None
    planes: tuple[Plane, ...] = ()
    """Planes, learned from the first keys and values. Float: keys, values; quantized: data, scales, biases of each."""

    def encode(self, keys: mx.array, values: mx.array) -> tuple[mx.array, ...]:
        """Return the arrays to store, one for each plane."""
        if self.bits is None:
            return keys, values
        if self.group_size is None:
            self.group_size = _group_size(keys.shape[-1], values.shape[-1])
        encoded: list[mx.array] = []
        for array in (keys, values):
            encoded.extend(mx.quantize(array, group_size=self.group_size, bits=self.bits))
        return tuple(encoded)

    def learn(self, encoded: Sequence[mx.array]) -> None:
        """Record heads, widths and types of the first arrays."""
        if not self.planes:
            self.planes = tuple(Plane(array.shape[1], array.shape[3], array.dtype) for array in encoded)


@dataclass(frozen=True, slots=True)
class ObjectPart:
    """State in mlx-lm's own cache object, one for each sequence."""

    index: int
    prototype: Any

    def fresh(self) -> Any:
        return copy.deepcopy(self.prototype)

    @property
    def copies(self) -> bool:
        """True if a copy shares no array that a forward pass changes in place."""
        return type(self.prototype) is _ArraysCache

    def copied(self, state: Any) -> Any:
        """Return an independent copy."""
        if not self.copies:
            return copy.deepcopy(state)
        twin = copy.copy(state)
        twin.cache = list(state.cache)
        return twin


CachePart = RowPart | ObjectPart


@dataclass(frozen=True, slots=True)
class Layer:
    """Cache of one owned layer: one part, or several if the model keeps a list of caches."""

    parts: tuple[CachePart, ...]
    nested: bool

    def assemble(self, caches: Sequence[Any]) -> Any:
        """Return the cache that the model gets for this layer."""
        return _CacheList(*caches) if self.nested else caches[0]


_LATE = 16
"""Tokens that a sequence may have beyond the end of a block when that is copied."""


@dataclass(slots=True)
class Layout:
    """All layers of a stage, and how much a sliding layer holds beyond its window."""

    layers: tuple[Layer, ...]
    slack: int
    row_parts: list[RowPart] = field(default_factory=list[RowPart])
    object_parts: list[ObjectPart] = field(default_factory=list[ObjectPart])

    @property
    def windows(self) -> tuple[int, ...]:
        return tuple(sorted({part.window for part in self.row_parts if part.window is not None}))

    @property
    def kinds(self) -> tuple[int | None, ...]:
        """Windows of all row parts, None for full attention."""
        return tuple({part.window: None for part in self.row_parts})

    def token_bytes(self, window: int | None) -> int:
        """Return the bytes of one token in all layers of this window, as far as they are known."""
        return sum(
            plane.heads * plane.width * plane.dtype.size
            for part in self.row_parts
            if part.window == window
            for plane in part.planes
        )

    def keep(self, window: int) -> int:
        """Return the number of tokens that a sliding row keeps: those that the next token attends to, and `slack` for a rollback.

        It also keeps the blocks of saved KV in which these tokens lie, until they are copied to a disk.
        """
        needed = window - 1
        in_blocks = -(-needed // BLOCK_TOKENS) * BLOCK_TOKENS
        return max(needed + self.slack, in_blocks + _LATE if needed >= BLOCK_TOKENS else 0)

    def block(self, window: int) -> int:
        """Return the number of tokens that a full sliding row takes in before it is shifted."""
        return max(_MIN_BLOCK, window // 4, self.slack)

    def most(self, window: int) -> int:
        """Return the capacity of a full sliding row."""
        return self.keep(window) + self.block(window)


def read_layout(prototypes: Sequence[Any], kv_bits: int | None, slack: int) -> Layout:
    """Read the layout from the model's fresh caches.

    Quantization concerns layers with full attention: a sliding layer is bounded anyway, and mlx-lm has no
    quantized form of it.
    """
    layout = Layout((), slack)
    layers: list[Layer] = []
    for prototype in prototypes:
        children = _children(prototype)
        parts = tuple(_part(child, layout, kv_bits) for child in children)
        layers.append(Layer(parts, nested=type(prototype) is _CacheList))
    layout.layers = tuple(layers)
    return layout


def _children(prototype: Any) -> tuple[Any, ...]:
    return tuple(prototype.caches) if type(prototype) is _CacheList else (prototype,)


def _part(prototype: Any, layout: Layout, kv_bits: int | None) -> CachePart:
    kind = cast("type[object]", type(prototype))
    if kind is _KVCache:
        part = RowPart(len(layout.row_parts), None, kv_bits)
    elif kind is _RotatingKVCache and prototype.keep == 0:
        part = RowPart(len(layout.row_parts), int(prototype.max_size), None)
    elif kind is _ChunkedKVCache:
        # It returns a chunk's worth of tokens and the new ones; the model's mask cuts at the chunk's edge.
        part = RowPart(len(layout.row_parts), int(prototype.chunk_size) + 1, None, chunked=True)
    else:
        part = ObjectPart(len(layout.object_parts), prototype)
        layout.object_parts.append(part)
        return part
    layout.row_parts.append(part)
    return part


def _group_size(*widths: int) -> int:
    for size in _GROUP_SIZES:
        if all(width % size == 0 for width in widths):
            return size
    raise ModelUnsupported(
        f"Keys and values of width {widths} cannot be quantized: none of the group sizes {_GROUP_SIZES} "
        "divides them. Serve this model without --kv-bits."
    )


class JoinedStates:
    """State of each object part, for one row or several side by side."""

    def __init__(self, states: list[Any], rows: int) -> None:
        self.states = states
        self.rows = rows
        self._shape: Hashable = None

    @property
    def nbytes(self) -> int:
        return sum(int(state.nbytes) for state in self.states)

    @property
    def shape(self) -> Hashable:
        """Property that rows must share to be put side by side; for mlx-lm's caches of plain arrays."""
        if self._shape is None:
            self._shape = tuple(
                None if array is None else (array.shape[1:], array.dtype)
                for state in self.states
                for array in state.cache
            )
        return self._shape


class RowStates:
    """Index of one row in joined states."""

    __slots__ = ("index", "joined")

    def __init__(self, joined: JoinedStates, index: int) -> None:
        self.joined = joined
        self.index = index

    @property
    def nbytes(self) -> int:
        return self.joined.nbytes // self.joined.rows

    def alone(self, parts: Sequence[ObjectPart]) -> list[Any]:
        """Return independent states of this row only."""
        if self.joined.rows == 1:
            return [part.copied(state) for part, state in zip(parts, self.joined.states, strict=True)]
        return [_picked(state, self.index) for state in self.joined.states]

    def owned(self, parts: Sequence[ObjectPart]) -> RowStates:
        """Return the same states in separate memory, so that they keep no other row's alive."""
        if self.joined.rows == 1:
            return self
        states = self.alone(parts)
        for state in states:
            # MLX would let a slice share the memory of the whole array.
            state.cache = [
                None if array is None else array + mx.zeros((), array.dtype) for array in state.cache
            ]
        mx.eval([array for state in states for array in state.cache if array is not None])
        return RowStates(JoinedStates(states, 1), 0)


def join_states(parts: Sequence[ObjectPart], rows: Sequence[RowStates | None]) -> list[Any]:
    """Return states for a pass over these rows. Several rows have one shape; None stands for a new row."""
    if len(rows) == 1:
        (row,) = rows
        if row is None:
            return [part.fresh() for part in parts]
        return row.alone(parts) if all(part.copies for part in parts) else row.joined.states
    known = [row for row in rows if row is not None]
    joined = known[0].joined
    if joined.rows == len(rows) and all(
        row.joined is joined and row.index == index for index, row in enumerate(known)
    ):
        return [part.copied(state) for part, state in zip(parts, joined.states, strict=True)]
    return [_side_by_side(states) for states in zip(*(row.alone(parts) for row in known), strict=True)]


def _picked(state: Any, index: int) -> Any:
    one = copy.copy(state)
    one.cache = [None if array is None else array[index : index + 1] for array in state.cache]
    return one


def _side_by_side(states: Sequence[Any]) -> Any:
    joined = copy.copy(states[0])
    joined.cache = [
        None if arrays[0] is None else mx.concatenate(list(arrays))
        for arrays in zip(*(state.cache for state in states), strict=True)
    ]
    return joined
