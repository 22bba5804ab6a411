"""Single rank with its part of a model: its results, its collectives and its refusals."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest
from mlx import nn
from mlx_lm.utils import load_model  # pyright: ignore[reportUnknownVariableType] - configurations are bare dicts
from tests.conformance.families import configuration
from tests.worker.random_models import write_random_model
from tests.worker.tensor.models import FAMILIES, write_family
from tests.worker.test_weights import native_kernels

from mlx_cpu_kernels import decoder_layers
from mlx_ring.core.errors import ModelUnsupported, PlanError
from mlx_ring.core.types import LayerRange, MemberRange
from mlx_ring.models.model_folder import read_model_folder
from mlx_ring.models.tensor_shares import TensorShare, read_tensor_sizes, share_out
from mlx_ring.worker.shard import StageModel
from mlx_ring.worker.tensor import Group, SplitHead, split
from mlx_ring.worker.weights import load_stage

TOKENS = mx.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])


class FakeGroup:
    """Stand-in for MLX's group, without other ranks."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


class SingleRankGroup(Group):
    """Group that counts sums, to which the other ranks add nothing."""

    def __init__(self, rank: int = 0, size: int = 2) -> None:
        super().__init__(cast("Any", FakeGroup(rank, size)))
        self.sums = 0

    def all_sum(self, array: mx.array) -> mx.array:
        self.sums += 1
        return array


def shares_of(path: Path, proportions: Sequence[float]) -> tuple[TensorShare, ...]:
    return share_out(read_tensor_sizes(read_model_folder(path)), proportions)


def load_part(
    path: Path, start: int, end: int, group: Group, proportions: Sequence[float] = (1, 1)
) -> StageModel:
    """Load a rank's part of a stage."""
    shares = shares_of(path, proportions)

    def divide(stage: StageModel) -> None:
        split(stage.model, shares, group, looks_up=stage.is_first)

    folder = read_model_folder(path)
    return load_stage(folder, LayerRange(start, end), "float32", lambda _done, _total: None, divide)


def forward(stage: StageModel, positions: mx.array | None = None, output: Any = "logits") -> mx.array:
    hidden = None if stage.is_first else mx.random.normal((2, 5, stage.hidden_size), key=mx.random.key(1))
    return stage.forward(TOKENS, hidden, stage.make_layer_caches(), positions, output=output)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_layer_needs_two_sums(tmp_path: Path, family: str) -> None:
    group = SingleRankGroup()
    stage = load_part(write_family(tmp_path / "model", family), 0, 2, group)
    assert forward(stage).shape == (2, 5, 255)
    assert group.sums == 4


@pytest.mark.parametrize("family", FAMILIES)
def test_group_of_one_computes_the_whole_model(tmp_path: Path, family: str) -> None:
    path = write_family(tmp_path / "model", family)
    whole = cast("Any", load_model(path)[0])(TOKENS)
    logits = forward(load_part(path, 0, 2, SingleRankGroup(0, 1), (1,)))
    assert (mx.abs(logits - whole).max() <= 1e-4 * mx.abs(whole).max()).item()


@pytest.mark.parametrize("tied", [True, False], ids=["tied head", "own head"])
@pytest.mark.parametrize("start", [0, 1], ids=["first stage", "later stage"])
@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_wanted_positions_reach_a_part_of_the_head(
    tmp_path: Path,
    tied: bool,  # noqa: FBT001 - an example's column
    start: int,
    rank: int,
) -> None:
    stage = load_part(
        write_family(tmp_path / "model", "qwen3", tie_word_embeddings=tied), start, 2, SingleRankGroup(rank)
    )
    every, hidden = forward(stage), forward(stage, output="hidden")
    assert every.shape == (2, 5, (255, 254)[rank])
    assert hidden.shape == (2, 5, stage.hidden_size)
    of_each_row = forward(stage, mx.array([[0, 4], [2, 3]]))
    expected = mx.stack([every[0, mx.array([0, 4])], every[1, mx.array([2, 3])]])
    assert mx.allclose(of_each_row, expected, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_native_kernels_compute_a_part_of_a_layer_in_few_operations(tmp_path: Path, family: str) -> None:
    path, group = write_family(tmp_path / "model", family, 4), SingleRankGroup()
    with native_kernels(wanted=True):
        stage = load_part(path, 0, 2, group)
        logits, dot = forward(stage), io.StringIO()
        mx.export_to_dot(dot, forward(stage))
        assert group.sums == 8
        assert dot.getvalue().count("CpuHeadProducts") == dot.getvalue().count("CpuGatedLayer") > 0
        decoder_layers.uninstall()
        assert mx.array_equal(logits, forward(stage)).item()


def test_last_of_several_stages_keeps_only_its_part_of_a_tied_embedding(tmp_path: Path) -> None:
    path = write_family(tmp_path / "model", "qwen3", tie_word_embeddings=True)
    tables = [
        cast("Any", load_part(path, *layers, SingleRankGroup()).model).model.embed_tokens
        for layers in ((0, 2), (1, 2))
    ]
    assert [table.weight.shape for table in tables] == [(509, 256), (255, 256)]


def test_layers_of_other_stages_are_not_split(tmp_path: Path) -> None:
    stage = load_part(write_family(tmp_path / "model", "llama"), 1, 2, SingleRankGroup())
    other, own = cast("Any", stage.model).layers
    assert (other.self_attn.n_heads, own.self_attn.n_heads) == (16, 8)


def whole_model(path: Path, family: str = "qwen3", bits: int | None = None) -> nn.Module:
    return load_model(write_family(path, family, bits), lazy=True)[0]


def test_family_that_cannot_be_split_is_refused(tmp_path: Path) -> None:
    path = write_random_model(tmp_path / "model", configuration("gemma3_text"))
    shares = shares_of(write_family(tmp_path / "other", "qwen3"), (1, 1))
    with pytest.raises(
        ModelUnsupported, match=r"gemma3_text cannot be split .* Phi-3, Qwen2, Qwen3 and Qwen3-MoE"
    ):
        split(load_model(path, lazy=True)[0], shares, SingleRankGroup())


def test_shares_for_another_number_of_ranks_are_refused(tmp_path: Path) -> None:
    model = whole_model(tmp_path / "model")
    with pytest.raises(PlanError, match="shares for 2 ranks, but 3 ranks in the group"):
        split(model, shares_of(tmp_path / "model", (1, 1)), SingleRankGroup(0, 3))


@pytest.mark.parametrize("name", ["kv_heads", "intermediate", "experts", "vocabulary"])
def test_shares_of_another_model_are_refused(tmp_path: Path, name: str) -> None:
    model = whole_model(tmp_path / "model")
    first, last = shares_of(tmp_path / "model", (1, 1))
    changed = replace(last, **{name: MemberRange(0, 7)})
    with pytest.raises(PlanError, match="they were made for another"):
        split(model, (first, changed), SingleRankGroup())


def test_shares_that_divide_a_quantization_group_are_refused(tmp_path: Path) -> None:
    model = whole_model(tmp_path / "model", bits=4)
    unquantized = replace(read_tensor_sizes(read_model_folder(tmp_path / "model")), group_size=1)
    shares = share_out(unquantized, (1, 1.1))
    with pytest.raises(
        PlanError, match="quantized in groups of 32 cannot be taken without splitting a group"
    ):
        split(model, shares, SingleRankGroup())


def test_layer_of_an_unsupported_kind_is_refused(tmp_path: Path) -> None:
    model = whole_model(tmp_path / "model")
    cast("Any", model).layers[1].mlp.up_proj = nn.QQLinear(256, 512)
    with pytest.raises(ModelUnsupported, match="A layer of kind QQLinear cannot be split"):
        split(model, shares_of(tmp_path / "model", (1, 1)), SingleRankGroup())


def test_best_token_counts_from_the_start_of_its_ranks_part() -> None:
    class Both(SingleRankGroup):
        def stack(self, array: mx.array) -> mx.array:
            first = mx.stack([mx.array([-1.0]).view(mx.int32), mx.array([7])])
            return mx.stack([first, array])

    head = SplitHead(Both(rank=1), [MemberRange(0, 100_000_000), MemberRange(100_000_000, 100_000_003)])
    assert head.best(mx.array([[0.0, 2.0, 2.0]])).tolist() == [100_000_001]
