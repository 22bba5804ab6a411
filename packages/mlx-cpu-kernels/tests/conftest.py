"""Fixtures of the kernels' tests."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import pytest

from mlx_cpu_kernels import operations


@pytest.fixture
def installed() -> Iterator[None]:
    """Compute on the CPU with the kernels, and give MLX its own operations back."""
    before = mx.default_device()
    mx.set_default_device(mx.Device(mx.cpu))
    report = operations.install()
    assert report.active, report.detail
    yield
    operations.uninstall()
    mx.set_default_device(before)
