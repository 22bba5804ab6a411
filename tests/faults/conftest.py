"""Servers of one machine, in two stages, whose workers stop at steps."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.faults.models import write_model


@pytest.fixture(scope="session")
def dense_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "dense", "dense")
