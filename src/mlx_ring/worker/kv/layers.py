"""What each owned layer must keep, read off the fresh caches that the model itself makes.

mlx-lm's plain, sliding and chunked caches become rows of a `Bank`. Everything else (recurrent state, cache kinds
not known here) stays an object of mlx-lm's own, one for each sequence.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import mlx.core as mx
from mlx_lm.models import cache as mlx_lm_cache

from mlx_ring.core.errors import ModelUnsupported

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


@dataclass(slots=True)
class RowPart:
    """Keys and values that a bank holds as rows."""

    index: int
    """Among the row parts of the stage."""
    window: int | None
    """Tokens that a position sees, itself included; None: all."""
    bits: int | None
    chunked: bool = False
    """Whether the model itself asks where the first key lies, which is one number for the whole batch."""
    group_size: int | None = None
    planes: tuple[Plane, ...] = ()
    """Learned from the first keys and values. Float: keys, values; quantized: data, scales, biases of each."""

    def encode(self, keys: mx.array, values: mx.array) -> tuple[mx.array, ...]:
        """The arrays to store, one for each plane."""
        if self.bits is None:
            return keys, values
        if self.group_size is None:
            self.group_size = _group_size(keys.shape[-1], values.shape[-1])
        encoded: list[mx.array] = []
        for array in (keys, values):
            encoded.extend(mx.quantize(array, group_size=self.group_size, bits=self.bits))
        return tuple(encoded)

    def learn(self, encoded: Sequence[mx.array]) -> None:
        """Note heads, widths and types from the first arrays that come."""
        if not self.planes:
            self.planes = tuple(Plane(array.shape[1], array.shape[3], array.dtype) for array in encoded)


@dataclass(frozen=True, slots=True)
class ObjectPart:
    """State that mlx-lm's own cache object keeps, one for each sequence."""

    index: int
    prototype: Any

    def fresh(self) -> Any:
        return copy.deepcopy(self.prototype)

    @property
    def copies(self) -> bool:
        """Whether a copy shares no array that a forward pass changes in place."""
        return type(self.prototype) is _ArraysCache

    def copied(self, state: Any) -> Any:
        """A copy that goes on by itself."""
        if not self.copies:
            return copy.deepcopy(state)
        twin = copy.copy(state)
        twin.cache = list(state.cache)
        return twin


Part = RowPart | ObjectPart


@dataclass(frozen=True, slots=True)
class Layer:
    """One owned layer's cache: one part, or several where the model keeps a list of caches."""

    parts: tuple[Part, ...]
    nested: bool

    def assemble(self, caches: Sequence[Any]) -> Any:
        """What the model gets for this layer."""
        return _CacheList(*caches) if self.nested else caches[0]


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
        """Windows of all row parts, None for those that see everything."""
        return tuple({part.window: None for part in self.row_parts})

    def token_bytes(self, window: int | None) -> int:
        """Bytes of one token in all layers of this window, as far as they are known."""
        return sum(
            plane.heads * plane.width * plane.dtype.size
            for part in self.row_parts
            if part.window == window
            for plane in part.planes
        )

    def keep(self, window: int) -> int:
        """Tokens before the next one that a sliding row keeps: what that one sees, and `slack` to go back."""
        return window - 1 + self.slack

    def block(self, window: int) -> int:
        """Tokens that a full sliding row takes in before it is shifted down."""
        return max(_MIN_BLOCK, window // 4, self.slack)

    def most(self, window: int) -> int:
        """Capacity of a full sliding row."""
        return self.keep(window) + self.block(window)


def read_layout(prototypes: Sequence[Any], kv_bits: int | None, slack: int) -> Layout:
    """What the model's fresh caches ask for.

    Quantization concerns layers that see everything: a sliding layer is bounded anyway, and mlx-lm has no
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


def _part(prototype: Any, layout: Layout, kv_bits: int | None) -> Part:
    kind = cast("type[object]", type(prototype))
    if kind is _KVCache:
        part = RowPart(len(layout.row_parts), None, kv_bits)
    elif kind is _RotatingKVCache and prototype.keep == 0:
        part = RowPart(len(layout.row_parts), int(prototype.max_size), None)
    elif kind is _ChunkedKVCache:
        # It hands out a chunk's worth of tokens and the new ones; the model's mask cuts at the chunk's edge.
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
