"""Products with weights of one kind: of a single row, which reads them, and of many rows, which computes.

Weights are square and each product's result is the input of the next, as in layers. A repetition continues where the last one
stopped, so that its weights have left the caches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

import mlx.core as mx

from mlx_ring.worker.profile.rounds import Stopwatch

GROUP = 64
"""Group size of quantized weights, as nearly every model has it."""
WIDE_RATIO = 4
"""Ratio of two widths that are read, because short rows are slower than long ones."""
_CPU_WIDTH, _GPU_WIDTH = 512, 1024
_READ_S = 8e-3
"""Duration of a repetition that reads, and of one that computes: long for a clock, short for a second."""
_COMPUTE_S = 15e-3
_MOST_ROWS = 512
_FEWEST_ROWS = 16
_MOST_PRODUCTS = 4096

Multiply = Callable[[mx.array, int], mx.array]
"""Product of (rows, width) with the weights of a number -> (rows, width)."""


@dataclass(frozen=True, slots=True)
class WeightKind:
    """Storage of weights, and the type that they are multiplied with."""

    name: str
    dtype: mx.Dtype
    """Type of activations."""
    bits: int = 0
    """Bits of a quantized weight; 0: weights are of the dtype."""


def narrow_width() -> int:
    """Return the width of the smaller weights, beside those that are `WIDE_RATIO` times as wide."""
    return _CPU_WIDTH if mx.default_device() == mx.Device(mx.cpu) else _GPU_WIDTH


class Products:
    """Weights of one kind and width, ready to be measured."""

    def __init__(self, kind: WeightKind, width: int, set_bytes: int, stopwatch: Stopwatch) -> None:
        """Make weights of about `set_bytes`, two matrices at least."""
        self.width = width
        self._stopwatch = stopwatch
        self._dtype = kind.dtype
        self._multiply, self.nbytes, count = _make_weights(kind, width, set_bytes)
        self._turns = cycle(range(count))
        self._row = mx.ones((1, width), kind.dtype)
        self._reads = self._products_in(_READ_S, self._row)
        self._rows: mx.array | None = None
        self._blocks = 1

    def read(self) -> float:
        """Return the seconds for reading one matrix, in products of a single row."""
        return self._seconds(self._row, self._reads) / self._reads

    def compute(self) -> float:
        """Return the operations a second in products of many rows."""
        if self._rows is None:
            self._rows, self._blocks = self._block_of_rows()
        taken = self._seconds(self._rows, self._blocks)
        return 2 * self._blocks * self._rows.shape[0] * self.width**2 / taken

    def _seconds(self, rows: mx.array, products: int) -> float:
        return self._stopwatch(lambda: mx.eval(self._chain(rows, islice(self._turns, products))))

    def _chain(self, rows: mx.array, turns: Iterator[int]) -> mx.array:
        for number in turns:
            rows = self._multiply(rows, number)
        return rows

    def _products_in(self, seconds: float, rows: mx.array) -> int:
        """Return how many products take so long. The first call is slower and does not count."""
        self._seconds(rows, 1)
        products = 1
        while products < _MOST_PRODUCTS and (taken := self._seconds(rows, products)) < seconds / 2:
            products = min(_MOST_PRODUCTS, products * max(2, int(seconds / taken / 2)))
        return products

    def _block_of_rows(self) -> tuple[mx.array, int]:
        """Return as many rows as a chunk of a prompt has, or fewer if they take too long."""
        few = mx.ones((_FEWEST_ROWS, self.width), self._dtype)
        self._seconds(few, 1)
        each = self._seconds(few, 1) / _FEWEST_ROWS
        count = min(_MOST_ROWS, max(_FEWEST_ROWS, int(_COMPUTE_S / each)))
        # Many rows are faster than few, so there may be time for more of them.
        rows = mx.ones(
            (min(_MOST_ROWS, 2 * count) if count > _FEWEST_ROWS else count, self.width), self._dtype
        )
        return rows, 1 if count < _MOST_ROWS else self._products_in(_COMPUTE_S, rows)


def _make_weights(kind: WeightKind, width: int, set_bytes: int) -> tuple[Multiply, int, int]:
    """Make weights that keep a row of equal numbers unchanged.

    Also return the bytes of a matrix and the number of matrices.
    """
    matrix = mx.full((width, width), 1 / width, kind.dtype)
    parts = [matrix] if not kind.bits else list(mx.quantize(matrix, GROUP, kind.bits))
    nbytes = sum(part.nbytes for part in parts)
    weights = [_copies(parts) for _ in range(max(2, set_bytes // nbytes))]
    mx.eval(weights)

    def multiply(rows: mx.array, number: int) -> mx.array:
        if not kind.bits:
            return rows @ weights[number][0].T
        packed, scales, biases = weights[number]
        return mx.quantized_matmul(
            rows, packed, scales, biases, transpose=True, group_size=GROUP, bits=kind.bits
        )

    return multiply, nbytes, len(weights)


def _copies(parts: Sequence[mx.array]) -> list[mx.array]:
    """Return arrays with their own memory: adding zero is computed, while `mx.array` might share."""
    return [part + mx.zeros((1,), part.dtype) for part in parts]
