"""Small parts of moves, for the tests of them."""

from __future__ import annotations

from collections.abc import Generator

import pytest
from tests.engine.twin_rank import KV_BYTES_PER_TOKEN

from mlx_ring.engine import moved_kv, rows, takeover


@pytest.fixture(scope="module")
def moves_in_small_parts() -> Generator[None]:
    """Let moves look for the last answers at each turn, so that a random case is the same each time.

    With limited memory, they read few tokens at a time, and copy fewer with each step.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "_PART_BYTES", 8 * KV_BYTES_PER_TOKEN)
        patch.setattr(moved_kv, "_PIECE_BYTES", 20 * KV_BYTES_PER_TOKEN)
        patch.setattr(takeover, "_LOOK_S", 0.0)
        patch.setattr(moved_kv, "_STEP_LOOK_S", 0.0)
        yield
