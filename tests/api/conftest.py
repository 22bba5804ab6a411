"""The served twin in the process and over a socket."""

from __future__ import annotations

import pytest
from tests.api.clients import Api


@pytest.fixture
def api() -> Api:
    """Return a ready service, reached in the process."""
    return Api()
