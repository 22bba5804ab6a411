"""View of a forward pass on rows of one bank, with mlx-lm's cache interface for each layer.

A batch whose rows all start at the same position behaves bit for bit as mlx-lm's own cache. The offset is
an integer and the mask is mlx-lm's. Otherwise the offset is an array `(batch,)` and the mask is boolean,
`(batch, 1, queries, keys)`. Padding is on the right: a padded query sees finite leftovers, and no query of a
row sees beyond that row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, Literal, cast

import mlx.core as mx
from mlx_lm.models import base as mlx_lm_base
from mlx_lm.models import cache as mlx_lm_cache

from mlx_ring.core.errors import StepFailed
from mlx_ring.worker.kv.bank import Bank, Row
from mlx_ring.worker.kv.layers import Layout, RowPart, write, write_each

Mask = mx.array | Literal["causal"] | None

_full_mask = cast("Callable[..., Mask]", mlx_lm_cache.create_attention_mask)
_causal_mask = cast("Callable[..., mx.array]", mlx_lm_base.create_causal_mask)


def writes_together() -> bool:
    """Report whether tokens of several rows are written in one operation: on a GPU. A CPU writes faster row by row."""
    return mx.default_device() != mx.Device(mx.cpu)


class IndexSpan:
    """Physical indices of a batch's tokens within a bank's capacity, in the layers of one window."""

    def __init__(self, rows: Sequence[Row], counts: Sequence[int], window: int | None) -> None:
        width = max(counts)
        starts = [row.length for row in rows]
        bases = [row.base(window) for row in rows]
        sees = [start if window is None else min(start, window - 1) for start in starts]
        self.window = window
        self.seen = sees[0]
        """Number of tokens before the batch that its first row sees."""
        self.begins = [start - base for start, base in zip(starts, bases, strict=True)]
        self.low = min(begin - seen for begin, seen in zip(self.begins, sees, strict=True))
        self.high = max(begin + count for begin, count in zip(self.begins, counts, strict=True))
        self.runs = _runs(self.begins, counts)
        """Neighbours that are written at the same index, together: (begin, count, first row, end row)."""
        self.uniform = len(set(starts)) == 1 and len(set(bases)) == 1
        self._starts, self._bases = starts, bases
        self._width = width
        self._indices: mx.array | None = None
        self._masks: dict[int | None, mx.array] = {}

    def ragged_mask(self, window: int | None) -> mx.array:
        """Return `(batch, 1, queries, keys)`: true where a query sees a key."""
        if window not in self._masks:
            begins = mx.array([base + self.low for base in self._bases])[:, None, None, None]
            keys = begins + mx.arange(self.high - self.low)
            queries = mx.array(self._starts)[:, None, None, None] + mx.arange(self._width)[:, None]
            mask = keys <= queries
            if window is not None:
                mask = mask & (keys > queries - window)
            self._masks[window] = mask
        return self._masks[window]

    def indices(self) -> mx.array:
        """Return the index at which each row's first token is written: (batch,) int32."""
        if self._indices is None:
            self._indices = mx.array(self.begins, dtype=mx.int32)
        return self._indices

    def is_own(self, mask: Mask) -> bool:
        """Report whether a mask is the one by which each row sees its own tokens, all of them."""
        return isinstance(mask, mx.array) and mask is self._masks.get(None)


class BatchRows:
    """Rows side by side in one bank that take part in one forward pass."""

    def __init__(self, layout: Layout, bank: Bank, rows: Sequence[Row], counts: Sequence[int]) -> None:
        self._layout = layout
        self.bank = bank
        self.rows = tuple(rows)
        self.counts = tuple(counts)
        self.width = max(counts)
        starts = [row.length for row in rows]
        self._starts = tuple(starts)
        self.offset: int | mx.array = starts[0] if len(set(starts)) == 1 else mx.array(starts, dtype=mx.int32)
        self.spans = {window: IndexSpan(rows, counts, window) for window in layout.kinds}
        self.slots = (rows[0].slot, rows[0].slot + len(rows))
        self._writes_together = writes_together()
        self._numbers: mx.array | None = None
        self.tails: dict[int, list[mx.array]] = {}
        """Keys and values by part. A sliding row takes them over at the commit: its slot cannot hold chunk and window at once."""

    def update(self, part: RowPart, keys: mx.array, values: mx.array) -> list[mx.array]:
        """Append `(batch, heads, tokens, width)` and return everything that the batch sees, as stored."""
        if keys.shape[0] != len(self.rows) or keys.shape[2] != self.width:
            raise StepFailed(
                f"The batch has {len(self.rows)} rows of {self.width} tokens; its keys have shape {keys.shape}."
            )
        encoded = part.encode(keys, values)
        part.learn(encoded)
        planes = self.bank.memory.ensure(part)
        span = self.spans[part.window]
        if span.high > self.bank.memory.capacity(part.window):
            return self._append_apart(part, planes, span, encoded)
        first, last = self.slots
        if self.width == 1 and len(span.runs) > 1 and self._writes_together:
            for position, new in enumerate(encoded):
                planes[position] = write_each(planes[position], new, self._slot_numbers(), span.indices())
        else:
            self._write_runs(planes, span, encoded)
        return [plane[first:last, :, span.low : span.high] for plane in planes]

    def _write_runs(self, planes: list[mx.array], span: IndexSpan, encoded: Sequence[mx.array]) -> None:
        whole = len(span.runs) == 1 and self.counts[0] == self.width
        for begin, count, low, high in span.runs:
            for position, new in enumerate(encoded):
                rows = new if whole else new[low:high, :, :count]
                planes[position] = write(planes[position], rows, self.slots[0] + low, begin)

    def _slot_numbers(self) -> mx.array:
        """Return each row's slot: (batch,) int32."""
        if self._numbers is None:
            self._numbers = mx.arange(*self.slots, dtype=mx.int32)
        return self._numbers

    def _append_apart(
        self, part: RowPart, planes: list[mx.array], span: IndexSpan, encoded: Sequence[mx.array]
    ) -> list[mx.array]:
        """Append a chunk that is longer than a sliding slot's room: seen beside the window, stored at the commit."""
        first, last = self.slots
        window = cast("int", part.window)
        begin, keep = span.begins[0], self._layout.keep(window)

        def with_tokens_before(count: int) -> list[mx.array]:
            return [
                mx.concatenate([plane[first:last, :, begin - count : begin], new], axis=2)
                for plane, new in zip(planes, encoded, strict=True)
            ]

        whole = with_tokens_before(span.seen)
        # A row may keep more than the tokens that the chunk sees.
        before = min(begin, keep - encoded[0].shape[2])
        longer = with_tokens_before(before) if before > span.seen else whole
        keep = min(keep, longer[0].shape[2])
        self.tails[part.index] = [array[:, :, -keep:] for array in longer]
        return whole

    def store_tails(self) -> None:
        """Store what did not fit beside sliding rows' windows. Call it after the pass."""
        if not self.tails:
            return
        mx.eval(list(self.tails.values()))
        (row,) = self.rows
        for index, tail in self.tails.items():
            planes = self.bank.planes[index]
            for position, content in enumerate(tail):
                planes[position] = write(planes[position], content, row.slot, 0)
            window = cast("int", self._layout.row_parts[index].window)
            row.bases[window] = self._starts[0] + self.counts[0] - tail[0].shape[2]
        self.tails.clear()


def _runs(begins: Sequence[int], counts: Sequence[int]) -> list[tuple[int, int, int, int]]:
    runs: list[tuple[int, int, int, int]] = []
    row = 0
    for (begin, count), members in groupby(zip(begins, counts, strict=True)):
        size = len(list(members))
        runs.append((begin, count, row, row + size))
        row += size
    return runs


class RowCache:
    """One layer's cache in one batch, with the interface that mlx-lm's models use."""

    def __init__(self, rows: BatchRows, part: RowPart) -> None:
        self._rows = rows
        self._part = part
        self._span = rows.spans[part.window]
        self.offset: int | mx.array = rows.offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Append `(batch, heads, tokens, width)`; return keys and values of all tokens that the batch sees."""
        stored = self._rows.update(self._part, keys, values)
        self.offset = self.offset + self._rows.width
        half = len(stored) // 2
        if half == 1:
            return stored[0], stored[1]
        return tuple(stored[:half]), tuple(stored[half:])

    def places(self, mask: Mask) -> tuple[mx.array, mx.array, int, list[int]] | None:
        """Return planes, first slot and each row's index for one more token a row, as `PlaneCache` has it."""
        rows, span, window = self._rows, self._span, self._part.window
        planes = rows.bank.planes[self._part.index]
        if window is not None or self._part.bits is not None or not planes or rows.width != 1:
            return None
        if span.high > rows.bank.memory.capacity(None) or not (
            mask is None if span.uniform else span.is_own(mask)
        ):
            return None
        return planes[0], planes[1], rows.slots[0], span.begins

    def replace_planes(self, keys: mx.array, values: mx.array) -> None:
        """Take the planes with one more token a row."""
        self._rows.bank.planes[self._part.index][:] = keys, values
        self.offset = self.offset + 1

    def make_mask(
        self,
        N: int,  # noqa: N803 - name in mlx-lm's interface
        return_array: bool = False,  # noqa: FBT001, FBT002 - signature of mlx-lm's interface
        window_size: int | None = None,
    ) -> Mask:
        """Return which keys each query may see: None for all, "causal", or booleans."""
        window = self._part.window
        if not self._span.uniform:
            narrow = min((w for w in (window, window_size) if w is not None), default=None)
            return self._span.ragged_mask(narrow)
        start = self._rows.rows[0].length
        if window is None:
            return _full_mask(N, offset=start, return_array=return_array, window_size=window_size)
        return _sliding_mask(N, start, window, return_array=return_array, window_size=window_size)

    @property
    def keys(self) -> mx.array:
        """Keys of the whole bank; some models read them."""
        return self._rows.bank.planes[self._part.index][0]

    @keys.setter
    def keys(self, array: mx.array) -> None:
        self._rows.bank.planes[self._part.index][0] = array

    @property
    def values(self) -> mx.array:
        return self._rows.bank.planes[self._part.index][1]

    @values.setter
    def values(self, array: mx.array) -> None:
        self._rows.bank.planes[self._part.index][1] = array

    @property
    def state(self) -> list[mx.array]:
        """Arrays to evaluate after the forward pass."""
        tails = self._rows.tails.get(self._part.index, [])
        return [*self._rows.bank.planes[self._part.index], *tails]

    @property
    def nbytes(self) -> int:
        return sum(plane.nbytes for plane in self._rows.bank.planes[self._part.index])

    def size(self) -> int:
        return max(row.length for row in self._rows.rows)

    def empty(self) -> bool:
        return self.size() == 0

    def is_trimmable(self) -> bool:
        """Return False: the store trims row by row, and the model cannot."""
        return False


class QuantizedRowCache(RowCache):
    """Row cache that returns keys and values as (data, scales, biases)."""

    @property
    def bits(self) -> int:
        return cast("int", self._part.bits)

    @property
    def group_size(self) -> int:
        return cast("int", self._part.group_size)


class ChunkedRowCache(RowCache):
    """Row cache of a layer with chunked attention, for rows that all start at one position."""

    @property
    def start_position(self) -> int:
        """Position of the first key that `update_and_fetch` returns."""
        return self._rows.rows[0].length - self._span.seen

    def maybe_trim_front(self) -> None:
        """Do nothing: the store drops tokens before the chunk and the slack."""


def row_cache(rows: BatchRows, part: RowPart) -> RowCache:
    """Return the cache for one part of one layer in one batch."""
    if part.chunked:
        return ChunkedRowCache(rows, part)
    return RowCache(rows, part) if part.bits is None else QuantizedRowCache(rows, part)


def _sliding_mask(
    queries: int, start: int, window: int, *, return_array: bool, window_size: int | None
) -> Mask:
    """Return the mask that mlx-lm's rotating cache makes, for keys in temporal order."""
    if queries > 1:
        size = window_size or window
        seen = min(window - 1, start)
        if seen + queries > size or return_array:
            return _causal_mask(queries, seen, window_size=size)
        return "causal"
    if window_size is None or start < window_size or window <= window_size:
        return None
    length = min(start + 1, window)
    return mx.arange(length) >= length - window_size
