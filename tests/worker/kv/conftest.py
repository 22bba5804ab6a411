"""Ways in which a bank writes: by the native kernels in place, or by assignments of MLX, row by row or together."""

from __future__ import annotations

import pytest

from mlx_cpu_kernels import decoder_layers, operations
from mlx_ring.worker.kv import row_views


@pytest.fixture(params=["assignments", "assignments together", "kernels"])
def writing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write as the parameter says, without other operations of the kernels."""
    if request.param != "kernels":
        monkeypatch.setattr(row_views, "writes_together", lambda: request.param == "assignments together")
        return
    if not operations.install().active:
        pytest.skip("the native kernels are not built")
    kernels = list(decoder_layers._kernels)  # pyright: ignore[reportPrivateUsage]
    operations.uninstall()
    monkeypatch.setattr(decoder_layers, "_kernels", kernels)
