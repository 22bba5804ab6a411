"""Fixtures of the API's tests."""

from __future__ import annotations

import pytest
from tests.api.clients import Api


@pytest.fixture
def api() -> Api:
    """Return a client of a ready twin service in this process."""
    return Api()
