"""Stages of a model, compared bit for bit with the whole model at any cut."""

from __future__ import annotations

from typing import Any, cast

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx.utils import tree_flatten  # pyright: ignore[reportUnknownVariableType] - its tree is any
from tests.conformance.families import HIDDEN, LAYERS, VOCABULARY, configuration
from tests.conformance.pipelines import CHUNKS, Family, run_cut, run_whole
from tests.examples import examples

from mlx_ring.core.errors import ModelUnsupported
from mlx_ring.core.types import LayerRange
from mlx_ring.worker.shard import StageModel

QWEN3 = Family(configuration("qwen3"))
TIED = Family({**configuration("qwen3"), "tie_word_embeddings": True})
SHARING = Family({**configuration("gemma4_text"), "hidden_size_per_layer_input": 0})
"""Family whose layers 4 and 5 read the keys and values of layers 2 and 3."""
TOKENS = mx.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])


def stage(family: Family, start: int, end: int) -> StageModel:
    return StageModel(family.model(), LayerRange(start, end), mx.float32, VOCABULARY, HIDDEN)


def logits(last: StageModel, positions: mx.array | None, output: Any = "logits") -> mx.array:
    hidden = mx.random.normal((2, 5, HIDDEN), key=mx.random.key(1))
    return last.forward(TOKENS, hidden, last.make_layer_caches(), positions, output=output)


def parameter_names(stage: StageModel) -> set[str]:
    return set(cast("dict[str, mx.array]", tree_flatten(stage.model.parameters(), destination={})))


@given(cuts=st.sets(st.integers(1, LAYERS - 1)))
@examples(0.08)
def test_any_cut_gives_the_logits_of_the_whole_model(cuts: set[int]) -> None:
    expected = run_whole(QWEN3.model(), CHUNKS)
    found = run_cut(QWEN3.stages([0, *sorted(cuts), LAYERS]), CHUNKS)
    assert all(mx.array_equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


def test_only_the_wanted_positions_reach_the_head() -> None:
    last = stage(QWEN3, 3, LAYERS)
    every = logits(last, None)
    assert every.shape == (2, 5, VOCABULARY)
    assert mx.allclose(logits(last, mx.array([4])), every[:, 4:], atol=1e-5)
    of_each_row = logits(last, mx.array([[0, 4], [2, 3]]))
    expected = mx.stack([every[0, mx.array([0, 4])], every[1, mx.array([2, 3])]])
    assert mx.allclose(of_each_row, expected, atol=1e-5)


@pytest.mark.parametrize("family", [QWEN3, TIED], ids=["own head", "tied head"])
def test_hidden_states_are_the_heads_input(family: Family) -> None:
    last = stage(family, 3, LAYERS)
    whole = cast("Any", family.model())
    head = whole.model.embed_tokens.as_linear if family is TIED else whole.lm_head
    hidden = logits(last, mx.array([1, 4]), "hidden")
    assert hidden.shape == (2, 2, HIDDEN)
    assert mx.array_equal(head(hidden), logits(last, mx.array([1, 4])))


def test_parameters_include_no_layers_of_other_stages() -> None:
    names = parameter_names(stage(QWEN3, 2, 4))
    assert {name.split(".")[2] for name in names if ".layers." in name} == {"2", "3"}


@pytest.mark.parametrize(
    ("family", "needed"),
    [
        (QWEN3, [{"model.embed_tokens.weight"}, set[str](), {"model.norm.weight", "lm_head.weight"}]),
        (
            TIED,
            [{"model.embed_tokens.weight"}, set[str](), {"model.norm.weight", "model.embed_tokens.weight"}],
        ),
    ],
    ids=["own head", "tied head"],
)
def test_only_the_first_and_last_stage_need_embedding_and_head(
    family: Family, needed: list[set[str]]
) -> None:
    for (start, end), expected in zip([(0, 2), (2, 4), (4, LAYERS)], needed, strict=True):
        part = stage(family, start, end)
        outside = {name for name in parameter_names(part) if part.needs(name) and ".layers." not in name}
        assert expected <= outside <= expected | {"model.norm.weight"}


def test_every_stage_needs_an_embedding_that_layers_read_again() -> None:
    family = Family(configuration("talkie"))
    assert all(stage(family, *layers).needs("model.embed.weight") for layers in ((0, 2), (2, 4), (4, LAYERS)))
    assert [stage(family, *layers).needs("lm_head") for layers in ((0, 2), (4, LAYERS))] == [True, True]


@pytest.mark.parametrize("family", ["deepseek_v41", "kimi_k3"])
def test_wanted_positions_are_right_if_layers_return_more_than_activations(family: str) -> None:
    only = stage(Family(configuration(family)), 0, LAYERS)
    every, last = (
        only.forward(TOKENS, None, only.make_layer_caches(), positions) for positions in (None, mx.array([4]))
    )
    assert mx.allclose(last, every[:, 4:], atol=1e-5)


def test_layer_as_wide_as_the_vocabulary_is_not_taken_for_the_head() -> None:
    """Use a layer with an output as wide as the vocabulary; the head is the transposed embedding."""
    family = Family({**TIED.config, "intermediate_size": VOCABULARY})
    assert stage(family, 4, LAYERS).needs("model.embed_tokens.weight")


def test_activations_take_the_stages_dtype() -> None:
    middle = stage(QWEN3, 2, 4)
    half = mx.random.normal((1, 5, HIDDEN)).astype(mx.bfloat16)
    output = middle.forward(TOKENS[:1], half, middle.make_layer_caches(), None)
    assert output.dtype == mx.float32


@pytest.mark.parametrize(("start", "end"), [(-1, 2), (2, 2), (3, 2), (0, LAYERS + 1)])
def test_range_outside_the_model_is_refused(start: int, end: int) -> None:
    with pytest.raises(ModelUnsupported, match=f"the model has {LAYERS}"):
        stage(QWEN3, start, end)


def test_layers_that_share_keys_and_values_cannot_be_separated() -> None:
    with pytest.raises(ModelUnsupported, match="Layer 5 reads more of layer 2 than activations"):
        stage(SHARING, 0, 3)


def test_cut_before_all_shared_layers_is_exact() -> None:
    expected = run_whole(SHARING.model(), CHUNKS)
    found = run_cut(SHARING.stages([0, 1, 2, LAYERS]), CHUNKS)
    assert all(mx.array_equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
