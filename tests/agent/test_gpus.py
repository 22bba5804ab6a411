"""Each worker of a group has a GPU of its own, where there are enough."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlx_ring.agent.supervisor import own_gpu
from mlx_ring.rpc.protos.worker_pb2 import StageAssignment


@pytest.mark.parametrize(
    ("gpus", "visible", "given"),
    [
        (4, "", ["0", "1", "2", "3"]),
        (8, "7,6,5,4,3", ["7", "6", "5", "4"]),
        (8, "1,2", [None] * 4),
        (2, "", [None] * 4),
        (0, "", [None] * 4),
    ],
)
def test_workers_have_a_gpu_each_where_there_are_as_many(
    gpus: int, visible: str, given: list[str | None], tmp_path: Path
) -> None:
    for number in range(gpus):
        (tmp_path / f"0000:{number:02x}:00.0").mkdir()
    places = [
        StageAssignment(stage=stage, stages=2, rank=rank, tp_size=2) for stage in (0, 1) for rank in (0, 1)
    ]
    assert [own_gpu(place, tmp_path, visible).get("CUDA_VISIBLE_DEVICES") for place in places] == given
