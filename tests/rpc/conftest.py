"""Fixtures of links."""

from __future__ import annotations

import pytest

from mlx_ring.rpc.links import Inbox


@pytest.fixture
def inbox() -> Inbox:
    return Inbox("demo", epoch=1)
