"""Cores, shared between stages."""

from __future__ import annotations

import pytest

from mlx_ring.host import machine
from mlx_ring.host.machine import share_cores


@pytest.mark.parametrize(
    ("cores", "stages", "threads"), [(8, 1, 7), (8, 2, 3), (2, 1, 1), (1, 1, 1), (1, 4, 1), (3, 9, 1)]
)
def test_stages_share_the_cores_but_one_and_have_one_each_at_least(
    cores: int, stages: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "usable_cores", lambda: cores)
    assert share_cores(stages) == threads
