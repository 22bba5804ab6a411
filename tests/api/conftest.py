"""Fixtures of the API's tests."""

from __future__ import annotations

import pytest
from tests.api.clients import Api


@pytest.fixture
def api() -> Api:
    """Return a client of a ready twin service in this process."""
    return Api()


@pytest.fixture
def patient_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not take a busy disk for one that hangs. Tests of such disks set less."""
    monkeypatch.setattr("mlx_ring.api.disk_thread._SLOWEST_S", 60.0)
