"""Environment of worker processes."""

from __future__ import annotations

import sys

import pytest

from mlx_ring.core.environment import worker_environment

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="large pages are requested only on Linux")


def test_workers_request_large_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    environment = worker_environment(3)
    assert environment["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=1"
    assert environment["OPENBLAS_NUM_THREADS"] == "3"


@pytest.mark.parametrize(
    ("theirs", "expected"),
    [
        ("glibc.malloc.check=1", "glibc.malloc.check=1:glibc.malloc.hugetlb=1"),
        ("glibc.malloc.hugetlb=0", "glibc.malloc.hugetlb=0"),
    ],
)
def test_tunables_of_the_user_are_kept(monkeypatch: pytest.MonkeyPatch, theirs: str, expected: str) -> None:
    monkeypatch.setenv("GLIBC_TUNABLES", theirs)
    assert worker_environment(1)["GLIBC_TUNABLES"] == expected
