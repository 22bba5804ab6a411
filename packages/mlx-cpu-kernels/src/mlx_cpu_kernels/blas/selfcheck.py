"""Products with known results, to judge a `cblas_sgemm` before MLX relies on it."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_ROW_MAJOR = 101
_AS_STORED = 111
_TRANSPOSED = 112

# Entries lie within [-1, 1] and no product here sums more than 48 of them.
_TOLERANCE = 1e-4

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
    padding = product.padding
    a = _Stored(product.rows, product.inner, padding, seed=1, transposed=product.transpose_a)
    b = _Stored(product.inner, product.columns, padding, seed=2, transposed=product.transpose_b)
    c = _Stored(product.rows, product.columns, padding, seed=3)
    expected = _expected(product, a, b, c)
    if product.beta == 0:
        c.fill(math.nan)
    call(
        _ROW_MAJOR,
        _TRANSPOSED if product.transpose_a else _AS_STORED,
        _TRANSPOSED if product.transpose_b else _AS_STORED,
        product.rows,
        product.columns,
        product.inner,
        product.alpha,
        a.entries,
        a.stride,
        b.entries,
        b.stride,
        product.beta,
        c.entries,
        c.stride,
    )
    return all(
        abs(c.at(i, j) - expected[i][j]) <= _TOLERANCE for i in range(c.rows) for j in range(c.columns)
    )


def _expected(product: Product, a: _Stored, b: _Stored, c: _Stored) -> Sequence[Sequence[float]]:
    columns = [[b.at(k, j) for k in range(product.inner)] for j in range(product.columns)]
    rows = [[a.at(i, k) for k in range(product.inner)] for i in range(product.rows)]
    return [
        [
            product.alpha * sum(map(float.__mul__, row, column)) + product.beta * c.at(i, j)
            for j, column in enumerate(columns)
        ]
        for i, row in enumerate(rows)
    ]


class _Stored:
    """Matrix as BLAS stores it, with entries from a formula."""

    def __init__(self, rows: int, columns: int, padding: int, seed: int, *, transposed: bool = False) -> None:
        self.rows = rows
        self.columns = columns
        self.transposed = transposed
        stored_rows, stored_columns = (columns, rows) if transposed else (rows, columns)
        self.stride = max(1, stored_columns + padding)
        self.entries = (ctypes.c_float * max(1, stored_rows * self.stride))()
        for index in range(len(self.entries)):
            self.entries[index] = math.sin(seed + 0.7 * index)

    def at(self, row: int, column: int) -> float:
        stored_row, stored_column = (column, row) if self.transposed else (row, column)
        return self.entries[stored_row * self.stride + stored_column]

    def fill(self, entry: float) -> None:
        self.entries[:] = [entry] * len(self.entries)
