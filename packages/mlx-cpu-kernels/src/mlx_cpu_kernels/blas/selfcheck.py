"""Products with known results, to judge a `cblas_sgemm` before MLX relies on it."""

from __future__ import annotations

import ctypes
import math
from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from operator import mul

_ROW_MAJOR = 101
_AS_STORED = 111
_TRANSPOSED = 112

# Entries lie within [-1, 1] and no product here sums more than 48 of them.
_TOLERANCE = 1e-4
_PERIOD = 251
"""Number of different entries of a matrix, a prime: rows that are equal lie no whole number of blocks apart."""

_SGEMM = ctypes.CFUNCTYPE(
    None,
    *[ctypes.c_int] * 6,
    ctypes.c_float,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_float,
    ctypes.c_void_p,
    ctypes.c_int,
)


@dataclass(frozen=True, slots=True)
class Product:
    """C (rows, columns) = alpha op(A) op(B) + beta C, with `inner` terms to each sum.

    Every stored row is `padding` entries longer than it needs to be. With beta 0 C starts as NaN,
    because such a product must not read it.
    """

    rows: int
    columns: int
    inner: int
    transpose_a: bool = False
    transpose_b: bool = False
    padding: int = 0
    alpha: float = 1.0
    beta: float = 0.0


# One row (sgemv), one column, a few rows (in blocks of columns), many; no term at all.
PRODUCTS = (
    Product(1, 37, 19),
    Product(1, 37, 19, transpose_b=True),
    Product(1, 5, 48, transpose_a=True, transpose_b=True, padding=3, alpha=0.5, beta=-2.0),
    Product(1, 21, 7, transpose_a=True, padding=2, beta=1.0),
    Product(33, 1, 9, transpose_a=True, padding=1, alpha=-1.5),
    Product(9, 1, 33, transpose_b=True, padding=4, beta=0.25),
    Product(2, 1, 1, padding=2),
    Product(1, 1, 1, alpha=2.0),
    Product(8, 170, 33, transpose_b=True, padding=1, alpha=0.5),
    Product(2, 625, 32, transpose_b=True, padding=3, beta=-1.0),
    Product(17, 13, 11, padding=5, alpha=2.0, beta=0.5),
    Product(13, 17, 11, transpose_a=True, transpose_b=True),
    Product(1, 4, 0, transpose_b=True, beta=0.5),
)


def first_wrong_product(sgemm: int) -> Product | None:
    """Compute every product with the `cblas_sgemm` at an address; return the first that is wrong."""
    call = _SGEMM(sgemm)
    return next((product for product in PRODUCTS if not _is_right(call, product)), None)


def _is_right(call: Callable[..., object], product: Product) -> bool:
    case = _case(product)
    # Each call gets entries of its own, which a wrong function may change.
    a, b, c = (array("f", matrix.entries) for matrix in (case.a, case.b, case.c))
    if product.beta == 0:
        c = array("f", [math.nan]) * len(c)
    call(
        _ROW_MAJOR,
        _TRANSPOSED if product.transpose_a else _AS_STORED,
        _TRANSPOSED if product.transpose_b else _AS_STORED,
        product.rows,
        product.columns,
        product.inner,
        product.alpha,
        a.buffer_info()[0],
        case.a.stride,
        b.buffer_info()[0],
        case.b.stride,
        product.beta,
        c.buffer_info()[0],
        case.c.stride,
    )
    results = chain.from_iterable(replace(case.c, entries=c).lines())
    return all(
        abs(result - expected) <= _TOLERANCE for result, expected in zip(results, case.expected, strict=True)
    )


@dataclass(frozen=True, slots=True)
class _Stored:
    """Matrix as BLAS stores it."""

    entries: array[float]
    stride: int
    rows: int
    columns: int
    transposed: bool

    def lines(self, *, standing: bool = False) -> list[list[float]]:
        """Return the rows, or the columns."""
        count, length = (self.columns, self.rows) if standing else (self.rows, self.columns)
        if self.transposed != standing:
            return [list(self.entries[i :: self.stride][:length]) for i in range(count)]
        return [list(self.entries[i * self.stride : i * self.stride + length]) for i in range(count)]


@dataclass(frozen=True, slots=True)
class _Case:
    """Matrices of a product, and the entries of its result, row by row."""

    a: _Stored
    b: _Stored
    c: _Stored
    expected: array[float]


@cache
def _case(product: Product) -> _Case:
    """Compute a product. It is compared twice: before MLX calls the function, and as MLX calls it."""
    padding = product.padding
    a = _stored(product.rows, product.inner, padding, seed=1, transposed=product.transpose_a)
    b = _stored(product.inner, product.columns, padding, seed=2, transposed=product.transpose_b)
    c = _stored(product.rows, product.columns, padding, seed=3)
    columns = b.lines(standing=True)
    expected = [
        product.alpha * sum(map(mul, row, column)) + product.beta * before
        for row, row_before in zip(a.lines(), c.lines(), strict=True)
        for column, before in zip(columns, row_before, strict=True)
    ]
    return _Case(a, b, c, array("d", expected))


def _stored(rows: int, columns: int, padding: int, seed: int, *, transposed: bool = False) -> _Stored:
    """Return a matrix with entries from a formula."""
    stored_rows, stored_columns = (columns, rows) if transposed else (rows, columns)
    stride = max(1, stored_columns + padding)
    count = max(1, stored_rows * stride)
    numbers = (_numbers(seed) * (count // _PERIOD + 1))[:count]
    return _Stored(numbers, stride, rows, columns, transposed)


@cache
def _numbers(seed: int) -> array[float]:
    """Return the entries that large matrices repeat: a process that starts compares with them."""
    return array("f", [math.sin(seed + 0.7 * index) for index in range(_PERIOD)])
