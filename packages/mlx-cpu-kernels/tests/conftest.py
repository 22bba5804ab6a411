"""Fixtures of the kernels' tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_cpu_kernels import operations
from mlx_cpu_kernels.build import Target


def _given_binary(_target: Target) -> Path:
    return Path(os.environ[BINARY])


BINARY = "TESTED_KERNELS"
"""Variable with the path of a binary to test instead of the one that is found."""
if BINARY in os.environ:
    setattr(operations, "find_binary", _given_binary)  # noqa: B010 - it has it from build.py


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
