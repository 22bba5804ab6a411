"""Building a stage: what it reports, and kernels that a GPU's build compiles before the stage is ready."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest
from mlx_lm.utils import load_model  # pyright: ignore[reportUnknownVariableType] - configurations are bare dicts
from tests.conformance.families import configuration
from tests.worker.random_models import QWEN3, write_random_model
from tests.worker.stages import Pipeline, chunk, decode, open_sequence, tokens_of, want

from mlx_ring.models.model_folder import read_model_folder
from mlx_ring.rpc.hello import make_hello
from mlx_ring.rpc.links import Inbox
from mlx_ring.rpc.protos import worker_pb2
from mlx_ring.worker import stage as subject
from mlx_ring.worker.shard import StageModel


def record_passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Record the rows and tokens of each pass from now on."""
    passes: list[tuple[int, ...]] = []
    forward = StageModel.forward

    def recorded(self: StageModel, tokens: mx.array, *others: object, **named: object) -> mx.array:
        passes.append(tokens.shape)
        return forward(self, tokens, *others, **named)  # pyright: ignore[reportArgumentType] - as given

    monkeypatch.setattr(StageModel, "forward", recorded)
    return passes


def phases_of(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[int]]:
    """Build a stage; return its reported phases, and the numbers of tokens of its passes."""
    assignment = worker_pb2.StageAssignment(
        instance="test", epoch=1, dtype="float32", stages=1, end_layer=QWEN3["num_hidden_layers"]
    )
    hello = make_hello(model_digest=read_model_folder(folder).digest)
    request = worker_pb2.LoadRequest(hello=hello, assignment=assignment, model_path=str(folder))
    phases: list[str] = []
    passes = record_passes(monkeypatch)
    built = subject.build_stage(request, Inbox("test", 1), hello, lambda report: phases.append(report.phase))
    assert built.runner.num_sequences == 0
    return list(dict.fromkeys(phases)), [count for _, count in passes]


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


def _answers(folder: Path, cuts: Sequence[int], prompts: Mapping[int, Sequence[int]]) -> dict[int, list[int]]:
    """Return the first three tokens with which stages answer each prompt, all at once."""
    pipeline = Pipeline(folder, cuts)
    operations = [open_sequence(sequence, len(prompt)) for sequence, prompt in prompts.items()]
    rows = [chunk(sequence, 0, prompt, want()) for sequence, prompt in prompts.items()]
    answers: dict[int, list[int]] = {sequence: [] for sequence in prompts}
    for _ in range(3):
        results = pipeline.results(*rows, operations=operations)
        for sequence, result in results.items():
            answers[sequence] += tokens_of(result)
        ends = {sequence: len(prompts[sequence]) + len(tokens) - 1 for sequence, tokens in answers.items()}
        rows = [decode(sequence, ends[sequence], tokens[-1]) for sequence, tokens in answers.items()]
        operations = []
    return answers


DYNAMIC = {"rope_scaling": {"type": "dynamic", "factor": 2.0}}  # as InternLM 2.5 has it
LONGER_THAN_ROTATIONS = {
    name: value
    for name, value in configuration("internlm2").items()
    if name not in ("max_position_embeddings", "n_positions", "n_ctx")
} | {"max_seq_len": 1 << 16, **DYNAMIC}
"""Configuration with a longer context than that within which the rotations are always the same: 32768 tokens."""
PROMPTS = {1: [3, 14, 15, 92], 2: [65, 35], 3: [89, 79, 3, 23, 84, 62, 64]}


@pytest.mark.parametrize(
    ("config", "cuts"),
    [
        (LONGER_THAN_ROTATIONS, [0, 3, 6]),
        # The fourth layer is the only one without chunks.
        (configuration("llama4"), [0, 3, 4, 6]),
    ],
    ids=["rotations that depend on the length", "chunks of other stages"],
)
def test_rows_at_different_positions_are_computed_where_a_pass_takes_one_position(
    tmp_path: Path, config: dict[str, Any], cuts: list[int]
) -> None:
    folder = write_random_model(tmp_path / "model", config)
    alone = {
        sequence: _answers(folder, cuts, {sequence: prompt})[sequence] for sequence, prompt in PROMPTS.items()
    }
    assert _answers(folder, cuts, PROMPTS) == alone


def test_rows_share_passes_where_rotations_depend_on_the_length_only_beyond_the_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_random_model(tmp_path / "model", QWEN3 | DYNAMIC)
    whole = cast("Any", load_model(folder)[0])
    expected: dict[int, list[int]] = {}
    for sequence, prompt in PROMPTS.items():
        tokens = list(prompt)
        for _ in range(3):
            tokens.append(cast("int", mx.argmax(whole(mx.array([tokens]))[0, -1]).item()))
        expected[sequence] = tokens[len(prompt) :]
    passes = record_passes(monkeypatch)
    assert _answers(folder, [0, 5], PROMPTS) == expected
    assert [rows for rows, _ in passes] == [len(PROMPTS)] * 3
