"""Shares of heads and rows: complete, in order, and as close to the requested proportions as packs allow."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import gcd
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mlx_ring.core.errors import ModelCorrupt, ModelUnsupported, PlanError
from mlx_ring.core.types import MemberRange
from mlx_ring.models.model_folder import ModelFolder
from mlx_ring.models.tensor_shares import (
    TensorSizes,
    nearest_proportions,
    part_of_kv,
    read_tensor_sizes,
    share_out,
)

QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151936,
}
FLOAT = TensorSizes(8, 16, 128, 3072, 0, 151936)


def read(**entries: Any) -> TensorSizes:
    return read_tensor_sizes(ModelFolder(Path("any"), QWEN3 | entries, {}, ()))


@st.composite
def sizes(draw: st.DrawFn) -> TensorSizes:
    group = draw(st.sampled_from([1, 32, 64]))
    kv_heads, queries = draw(st.integers(1, 16)), draw(st.integers(1, 8))
    head_dim = draw(st.sampled_from([16, 48, 64, 128]))
    rows = draw(st.integers(1, 400)) * draw(st.sampled_from([1, 32, 64]))
    experts = draw(st.sampled_from([0, 96, 768]))
    return TensorSizes(
        kv_heads, kv_heads * queries, head_dim, rows, experts, draw(st.integers(64, 200_000)), group
    )


PROPORTIONS = st.lists(st.floats(0.05, 20), min_size=1, max_size=5)


@given(sizes=sizes(), proportions=PROPORTIONS)
def test_shares_are_complete_in_order_and_within_a_pack_of_the_proportions(
    sizes: TensorSizes, proportions: list[float]
) -> None:
    try:
        shares = share_out(sizes, proportions)
    except PlanError:
        assume(False)  # noqa: FBT003 - makes hypothesis skip an example
        return
    heads, rows, experts, vocabulary = sizes.divisibles
    for kind, extents in (
        (heads, [share.kv_heads for share in shares]),
        (rows, [share.intermediate for share in shares]),
        (experts, [share.experts for share in shares]),
        (vocabulary, [share.vocabulary for share in shares]),
    ):
        assert [extents[0].start, extents[-1].end] == [0, kind.total]
        assert all(left.end == right.start for left, right in pairwise(extents))
        for extent, number in zip(extents, proportions, strict=True):
            assert abs(len(extent) - kind.total * number / sum(proportions)) < kind.pack + 1e-6
            assert extent.start % kind.pack == extent.end % kind.pack == 0
            assert len(extent) > 0 or kind.total == 0
    for share in shares:
        assert share.query_heads == share.kv_heads.times(sizes.query_heads // sizes.kv_heads)


@given(sizes=sizes(), proportions=PROPORTIONS)
def test_no_share_splits_a_quantization_group(sizes: TensorSizes, proportions: list[float]) -> None:
    shares = share_out(sizes, nearest_proportions(sizes, proportions))
    for share in shares:
        for extent, total in (
            (share.query_heads.times(sizes.head_dim), sizes.query_heads * sizes.head_dim),
            (share.intermediate, sizes.intermediate),
            (share.experts, sizes.experts),
        ):
            group = gcd(total, sizes.group_size)  # matrices of the others may have larger ones
            assert extent.start % group == extent.end % group == 0


@given(sizes=sizes(), proportions=PROPORTIONS)
def test_the_nearest_proportions_are_always_possible(sizes: TensorSizes, proportions: list[float]) -> None:
    nearest = nearest_proportions(sizes, proportions)
    assert 1 <= len(nearest) <= len(proportions)
    shares = share_out(sizes, nearest)
    assert nearest_proportions(sizes, nearest) == nearest
    assert len(shares) == len(nearest)


@pytest.mark.parametrize(
    ("proportions", "heads", "rows"),
    [
        ((1, 1), [4, 4], [1536, 1536]),
        ((3, 1), [6, 2], [2304, 768]),
        ((5, 3), [5, 3], [1920, 1152]),
        ((0.625, 0.375), [5, 3], [1920, 1152]),
        ((1, 1, 1, 1), [2, 2, 2, 2], [768] * 4),
        ((1,), [8], [3072]),
    ],
)
def test_proportions_that_divide_evenly_are_met_exactly(
    proportions: Sequence[float], heads: list[int], rows: list[int]
) -> None:
    shares = share_out(FLOAT, proportions)
    assert [len(share.kv_heads) for share in shares] == heads
    assert [len(share.query_heads) for share in shares] == [2 * count for count in heads]
    assert [len(share.intermediate) for share in shares] == rows


def test_sizes_come_from_the_configuration() -> None:
    assert read() == FLOAT
    moe = read(model_type="qwen3_moe", moe_intermediate_size=768)
    assert moe == TensorSizes(8, 16, 128, 3072, 768, 151936)


@pytest.mark.parametrize("model_type", ["qwen2", "phi3"])
def test_a_family_without_a_head_size_divides_the_hidden_size(model_type: str) -> None:
    assert read(model_type=model_type).head_dim == 64


def test_without_a_number_of_kv_heads_each_query_head_has_one() -> None:
    assert read(model_type="mistral", num_key_value_heads=None).kv_heads == 16


@pytest.mark.parametrize(
    ("quantization", "group_size"),
    [
        ({"group_size": 32, "bits": 4}, 32),
        ({"group_size": 32, "bits": 4, "model.layers.0.mlp.gate": {"group_size": 64, "bits": 8}}, 32),
        ({"group_size": 32, "bits": 4, "model.layers.0.mlp.down_proj": {"group_size": 128, "bits": 8}}, 128),
        ({"quant_method": "mxfp4"}, 64),
        ({"config_groups": {"group_0": {"weights": {"group_size": 128}}}}, 128),
    ],
)
def test_the_group_size_is_that_of_matrices_split_along_their_input(
    quantization: dict[str, Any], group_size: int
) -> None:
    assert read(quantization=quantization).group_size == group_size


def test_a_group_of_another_matrix_does_not_let_a_smaller_one_be_split() -> None:
    quantization = {
        "group_size": 32,
        "bits": 4,
        "model.layers.0.self_attn.o_proj": {"group_size": 64, "bits": 8},
    }
    shares = share_out(read(intermediate_size=96, quantization=quantization), (5, 4))
    assert [len(share.intermediate) for share in shares] == [64, 32]


def test_heads_are_shared_in_packs_if_a_group_spans_several() -> None:
    sizes = TensorSizes(4, 8, 16, 512, 0, 320, 64)
    assert [len(share.kv_heads) for share in share_out(sizes, (1, 1))] == [2, 2]
    with pytest.raises(PlanError, match=r"4 KV heads in packs of 2 cannot be divided 1:1:1") as raised:
        share_out(sizes, (1, 1, 1))
    assert "the nearest possible split is 1:1." in str(raised.value)


@pytest.mark.parametrize(
    ("sizes", "proportions", "sentence"),
    [
        (
            FLOAT,
            (1,) * 9,
            (
                "8 KV heads cannot be divided 1:1:1:1:1:1:1:1:1 among 9 ranks, each of which needs at least 1; the nearest "
                "possible split is 1:1:1:1:1:1:1:1."
            ),
        ),
        (
            FLOAT,
            (100, 1, 1),
            (
                "8 KV heads cannot be divided 100:1:1 among 3 ranks, each of which needs at least 1; the nearest possible "
                "split is 6:1:1."
            ),
        ),
        (
            TensorSizes(8, 8, 64, 128, 0, 320, 64),
            (3, 1, 1),
            (
                "128 rows of the MLP in packs of 64 cannot be divided 3:1:1 among 3 ranks, each of which needs at least 64; "
                "the nearest possible split is 1:1."
            ),
        ),
        (FLOAT, (), "No shares were given: give one number for each rank, such as 3,1."),
        (FLOAT, (1, 0), "Shares 1:0 were given; each must be a number above 0."),
        (FLOAT, (1, float("nan")), "Shares 1:nan were given; each must be a number above 0."),
    ],
)
def test_impossible_shares_are_refused_with_the_nearest_possible_ones(
    sizes: TensorSizes, proportions: Sequence[float], sentence: str
) -> None:
    with pytest.raises(PlanError) as raised:
        share_out(sizes, proportions)
    assert str(raised.value) == sentence


def test_a_family_that_cannot_be_split_is_refused_with_those_that_can() -> None:
    with pytest.raises(
        ModelUnsupported, match=r"is a 'gemma3' model, .* Llama and Mistral, Phi-3, Qwen2, Qwen3"
    ):
        read(model_type="gemma3")


@pytest.mark.parametrize("entries", [{"num_attention_heads": 12}, {"intermediate_size": None}])
def test_missing_or_contradictory_sizes_are_refused(entries: dict[str, Any]) -> None:
    with pytest.raises(ModelCorrupt, match=r"config\.json gives"):
        read(**entries)


def test_a_range_is_written_as_an_interval() -> None:
    assert str(MemberRange(2, 5).times(4).shifted(1)) == "[9, 21)"


def test_parts_of_kv_are_exactly_proportional_to_the_heads() -> None:
    shares = share_out(FLOAT, (5, 3))
    assert [part_of_kv(shares, rank, 1007) for rank in (0, 1)] == [5 * 125, 3 * 125]
