"""Environment of worker processes."""

from __future__ import annotations

import sys
from typing import cast

import pytest

from mlx_ring.core.environment import restart_without, worker_environment

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="large pages are requested only on Linux")


def test_no_flag_with_a_secret_is_left_in_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[object, ...]] = []
    monkeypatch.setattr("os.execve", lambda *given: started.append(given))  # pyright: ignore[reportUnknownArgumentType, reportUnknownLambdaType]
    words = ["python", "-m", "x", "join", "--token", "old", "--token=older", "head", "--token", "new"]
    monkeypatch.setattr("sys.orig_argv", words)
    restart_without("new", "--token", "SECRET")
    ((_, command, environment),) = started
    assert command == [sys.executable, "-m", "x", "join", "head"]
    assert cast("dict[str, str]", environment)["SECRET"] == "new"  # noqa: S105 - no real one


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
