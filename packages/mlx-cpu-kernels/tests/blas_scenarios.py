"""Scenarios of the fast BLAS. `python blas_scenarios.py NAME` runs one, because a redirection lasts as long as its process.

They start without pytest, which takes longer to import than most scenarios.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
# Scenarios break one part on purpose; the stubs of mlx leave arrays untyped.

# pyright: reportPrivateImportUsage=false
# Parts are replaced where `install` looks them up.
from __future__ import annotations

import ctypes
import sys
from itertools import product

from mlx_cpu_kernels import build
from mlx_cpu_kernels.blas import BlasReport, install, install_fast_blas, selfcheck, slots
from mlx_cpu_kernels.blas import install as openblas


def products_of_all_shapes_equal_numpys() -> None:
    report = install_fast_blas()
    assert report.active, report
    assert not report.detail
    random_products_equal_numpys()
    narrow_products_equal_numpys_at_the_bounds_of_every_path()


def random_products_equal_numpys() -> None:
    """Compare products of random shapes and layouts."""
    import mlx.core as mx
    import numpy as np
    from hypothesis import given, settings  # most scenarios start without it
    from hypothesis import strategies as st

    extents = st.one_of(st.just(1), st.integers(1, 9), st.sampled_from([33, 64, 130, 700]))
    layouts = st.sampled_from(["plain", "transposed", "strided"])

    def operand(
        generator: np.random.Generator, shape: tuple[int, ...], layout: str
    ) -> tuple[mx.array, np.ndarray]:
        rows, columns = shape[-2:]
        if layout == "transposed":
            stored = generator.standard_normal((*shape[:-2], columns, rows), dtype=np.float32)
            return mx.array(stored).swapaxes(-1, -2), stored.swapaxes(-1, -2)
        if layout == "strided":
            stored = generator.standard_normal((*shape[:-1], 2 * columns), dtype=np.float32)
            return mx.array(stored)[..., ::2], stored[..., ::2]
        stored = generator.standard_normal(shape, dtype=np.float32)
        return mx.array(stored), stored

    @settings(max_examples=50, deadline=None, database=None)
    @given(extents, extents, extents, layouts, layouts, st.integers(0, 3), st.integers(0, 2**32 - 1))
    def check(rows: int, columns: int, inner: int, left: str, right: str, batch: int, seed: int) -> None:
        generator = np.random.default_rng(seed)
        batches = (batch,) if batch else ()
        a, a_expected = operand(generator, (*batches, rows, inner), left)
        b, b_expected = operand(generator, (*batches, inner, columns), right)
        c, c_expected = operand(generator, (*batches, rows, columns), "plain")
        expected = a_expected.astype(np.float64) @ b_expected.astype(np.float64)
        np.testing.assert_allclose(np.array(a @ b), expected, rtol=1e-4, atol=1e-3)
        added = mx.addmm(c, a, b, alpha=0.5, beta=-2.0)
        np.testing.assert_allclose(np.array(added), 0.5 * expected - 2.0 * c_expected, rtol=1e-4, atol=1e-3)

    check()


def narrow_products_equal_numpys_at_the_bounds_of_every_path() -> None:
    """Compare around one row, the most rows in blocks, the least K for blocks, and the size of a block."""
    import mlx.core as mx
    import numpy as np

    generator = np.random.default_rng(0)
    for rows, columns, inner in product((1, 2, 5, 8, 9), (1, 149, 150, 151, 1201), (1, 31, 32, 33, 1024)):
        a = generator.standard_normal((rows, inner), dtype=np.float32)
        b = generator.standard_normal((columns, inner), dtype=np.float32)
        np.testing.assert_allclose(np.array(mx.array(a) @ mx.array(b).T), a @ b.T, rtol=1e-4, atol=1e-3)


def double_and_complex_products_equal_numpys() -> None:
    assert install_fast_blas().active

    import mlx.core as mx
    import numpy as np

    generator = np.random.default_rng(0)
    a, b = generator.standard_normal((2, 24, 24))
    doubles = mx.matmul(mx.array(a, dtype=mx.float64), mx.array(b, dtype=mx.float64), stream=mx.cpu)
    np.testing.assert_allclose(np.array(doubles), a @ b, rtol=1e-12)
    z, w = (a + 1j * b).astype(np.complex64), (b - 2j * a).astype(np.complex64)
    np.testing.assert_allclose(np.array(mx.array(z) @ mx.array(w)), z @ w, rtol=1e-3, atol=1e-3)


def second_call_changes_only_the_threads() -> None:
    first = install_fast_blas()
    functions = [slot.read() for slot in sgemm_slots()]
    second = install_fast_blas(threads=2)
    assert (second.library, second.active, second.detail) == (first.library, first.active, first.detail)
    assert (first.threads, second.threads) == (1, 2)
    assert [slot.read() for slot in sgemm_slots()] == functions


def install_works_after_mlx_was_imported_and_used() -> None:
    import mlx.core as mx

    ones = mx.ones((4, 4))
    mx.eval(ones @ ones)
    before = [slot.read() for slot in sgemm_slots()]
    assert install_fast_blas().active
    assert all(old != slot.read() for old, slot in zip(before, sgemm_slots(), strict=True))
    assert (ones @ ones).tolist() == [[4.0] * 4] * 4


def wrong_dispatch_is_not_used() -> None:
    """Use a dispatch that computes nothing: its products fail, and sgemm is called directly."""
    nothing = selfcheck._SGEMM(lambda *_: None)
    install.load_dispatch = lambda *_: ctypes.cast(nothing, ctypes.c_void_p).value or 0
    report = install_fast_blas()
    assert report.active
    assert "wrong product" in report.detail
    assert report.detail.endswith(".")
    assert [slot.read() for slot in sgemm_slots()] == [openblas.load_openblas().address("cblas_sgemm")]


def dispatch_that_is_not_compiled_is_not_used() -> None:
    """Call OpenBLAS directly, and say what that costs."""
    build.find_binary = lambda _: None
    build.why_without = lambda _: "they are not built"
    report = install_fast_blas()
    assert report.active
    assert report.detail == "Each token takes 2.5 to 4.5 times as long: they are not built."
    assert [slot.read() for slot in sgemm_slots()] == [openblas.load_openblas().address("cblas_sgemm")]
    assert_mlx_still_multiplies()


def redirection_with_a_wrong_product_is_undone() -> None:
    """Fail the last check, which runs through the slots: the redirection is undone."""
    before = [slot.read() for slot in sgemm_slots()]
    verdicts = iter([None, selfcheck.PRODUCTS[0]])
    install.first_wrong_product = lambda _: next(verdicts)
    report = install_fast_blas()
    assert_inactive(report, "wrong product")
    assert [slot.read() for slot in sgemm_slots()] == before
    assert_mlx_still_multiplies()


def wrong_library_is_not_installed() -> None:
    before = [slot.read() for slot in sgemm_slots()]
    nothing = selfcheck._SGEMM(lambda *_: None)
    address = ctypes.cast(nothing, ctypes.c_void_p).value or 0
    openblas.OpenBlas.address = lambda self, function: address  # noqa: ARG005 - the method's own names
    assert_inactive(install_fast_blas(), "wrong product")
    assert [slot.read() for slot in sgemm_slots()] == before
    assert_mlx_still_multiplies()


def missing_package_is_reported() -> None:
    openblas.PACKAGE = "no_such_package_of_openblas"
    assert_inactive(install_fast_blas(), "no_such_package_of_openblas is not installed")
    assert_mlx_still_multiplies()


def missing_slot_is_reported() -> None:
    install.find_slots = lambda *_: []
    assert_inactive(install_fast_blas(), "does not call cblas_sgemm")
    assert_mlx_still_multiplies()


def missing_symbol_of_openblas_is_reported() -> None:
    install._PRODUCTS = frozenset({"cblas_sgemm", "cblas_no_such_product"})
    assert_inactive(install_fast_blas(), "has no cblas_no_such_product")
    assert_mlx_still_multiplies()


def protected_slot_is_redirected_and_protected_again() -> None:
    """Protect a slot as in a library linked with `-z relro -z now`, whose slots are read-only."""
    (slot,) = sgemm_slots()
    page = slot.address & -4096
    slots._protect(page, 1)
    assert install_fast_blas().active
    assert not slots._is_writable(slot.address)
    slots._protect(page, 3)
    assert_mlx_still_multiplies()


# ---- helpers of scenarios


def sgemm_slots() -> list[install.Slot]:
    return install.find_slots(openblas.load_from_package("mlx", "lib/libmlx.so"), frozenset({"cblas_sgemm"}))


def assert_inactive(report: BlasReport, reason: str) -> None:
    assert not report.active
    assert reason in report.detail
    assert report.detail.endswith(".")


def assert_mlx_still_multiplies() -> None:
    import mlx.core as mx

    assert (mx.ones((3, 5)) @ mx.ones((5, 2))).tolist() == [[5.0, 5.0]] * 3


SCENARIOS = [
    double_and_complex_products_equal_numpys,
    second_call_changes_only_the_threads,
    install_works_after_mlx_was_imported_and_used,
    wrong_dispatch_is_not_used,
    dispatch_that_is_not_compiled_is_not_used,
    redirection_with_a_wrong_product_is_undone,
    wrong_library_is_not_installed,
    missing_package_is_reported,
    missing_slot_is_reported,
    missing_symbol_of_openblas_is_reported,
    protected_slot_is_redirected_and_protected_again,
]


if __name__ == "__main__":
    globals()[sys.argv[1]]()
