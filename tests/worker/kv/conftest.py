"""Ways in which a bank writes: by the native kernels in place, or by assignments of MLX."""

from __future__ import annotations

import pytest

from mlx_cpu_kernels import decoder_layers, operations


@pytest.fixture(params=["assignments", "kernels"])
def writing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write as the parameter says, without other operations of the kernels."""
    if request.param == "assignments":
        return
    if not operations.install().active:
        pytest.skip("the native kernels are not built")
    kernels = list(decoder_layers._kernels)  # pyright: ignore[reportPrivateUsage]
    operations.uninstall()
    monkeypatch.setattr(decoder_layers, "_kernels", kernels)
