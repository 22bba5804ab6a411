"""How far an instance is loaded."""

from __future__ import annotations

from mlx_ring.core.types import RankId
from mlx_ring.head.status import Loaded, LoadingProgress
from mlx_ring.rpc.protos import agent_pb2, worker_pb2


def hear(progress: LoadingProgress, stage: int, **report: object) -> None:
    told = worker_pb2.LoadProgress(**report)  # pyright: ignore[reportArgumentType] - fields of the message
    progress.record(agent_pb2.StageProgress(stage=stage, progress=told))


def test_fetching_and_loading_are_told_apart_and_what_is_done_stays() -> None:
    progress = LoadingProgress()
    assert progress.of(RankId(0, 0)) == Loaded()
    hear(progress, 1, phase="fetch", bytes_loaded=5, bytes_total=10)
    assert progress.of(RankId(1, 0)) == Loaded("fetch", bytes_fetched=5, bytes_to_fetch=10)
    hear(progress, 1, phase="fetch", bytes_loaded=10, bytes_total=10)
    hear(progress, 1, phase="weights", bytes_loaded=3, bytes_total=8)
    assert progress.of(RankId(1, 0)) == Loaded("weights", 10, 10, 3, 8)
    hear(progress, 1, phase="warm-up")
    hear(progress, 1, phase="ready", ready=True, bytes_loaded=8)
    assert progress.of(RankId(1, 0)) == Loaded("ready", 10, 10, 8, 8)
    assert progress.of(RankId(0, 0)) == Loaded()
