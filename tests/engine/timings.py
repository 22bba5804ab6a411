"""Made-up timing of a step."""

from __future__ import annotations

from mlx_ring.core.engine_stats import StepTiming
from mlx_ring.core.types import RankId


def timing(step: int, compute_us: int, **changes: object) -> StepTiming:
    """Return the timing of a decode step of one row on the first stage, with changes."""
    values: dict[str, object] = {
        "step": step,
        "rank": RankId(0, 0),
        "rows": 1,
        "tokens": 1,
        "is_decode": True,
        "started_us": 0,
        "finished_us": 0,
        "queue_us": 0,
        "link_wait_us": 0,
        "compute_us": compute_us,
        "link_send_us": 0,
    }
    return StepTiming(**(values | changes))  # pyright: ignore[reportArgumentType] - fields of the dataclass
