"""Building a stage: what it reports, and kernels that a GPU's build compiles before the stage is ready."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest
from tests.worker.random_models import QWEN3, write_random_model

from mlx_ring.models.model_folder import read_model_folder
from mlx_ring.rpc.hello import make_hello
from mlx_ring.rpc.links import Inbox
from mlx_ring.rpc.protos import worker_pb2
from mlx_ring.worker import stage as subject
from mlx_ring.worker.shard import StageModel


def phases_of(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[int]]:
    """Build a stage; return its reported phases, and the numbers of tokens of its passes."""
    assignment = worker_pb2.StageAssignment(
        instance="test", epoch=1, dtype="float32", stages=1, end_layer=QWEN3["num_hidden_layers"]
    )
    hello = make_hello(model_digest=read_model_folder(folder).digest)
    request = worker_pb2.LoadRequest(hello=hello, assignment=assignment, model_path=str(folder))
    phases: list[str] = []
    passes: list[int] = []
    forward = StageModel.forward

    def counted(self: StageModel, tokens: mx.array, *others: object, **named: object) -> mx.array:
        passes.append(tokens.shape[1])
        return forward(self, tokens, *others, **named)  # pyright: ignore[reportArgumentType] - as given

    monkeypatch.setattr(StageModel, "forward", counted)
    built = subject.build_stage(request, Inbox("test", 1), hello, lambda report: phases.append(report.phase))
    assert built.runner.num_sequences == 0
    return list(dict.fromkeys(phases)), passes


def test_kernels_are_compiled_before_a_stage_is_warm_where_the_first_use_compiles_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_random_model(tmp_path / "model", QWEN3)
    monkeypatch.setattr(subject, "compiles_kernels", lambda: True)
    assert phases_of(folder, monkeypatch) == (["weights", "kernels", "warm-up"], [64, 32, 16, 2, 1])


def test_a_stage_without_such_kernels_only_warms_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_random_model(tmp_path / "model", QWEN3)
    monkeypatch.setattr(subject, "compiles_kernels", lambda: False)
    assert phases_of(folder, monkeypatch) == (["weights", "warm-up"], [2, 1])
