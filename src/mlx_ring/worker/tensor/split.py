"""Turns a model of mlx-lm's into one rank's: its own forward runs, on fewer heads and rows, with two sums a layer.

What makes heads and rows (queries, keys, values, the gate and what it opens) is cut by outputs; what takes them in (behind
attention, behind an MLP or its experts) by inputs, so that ranks' results add up. Norms, the router and the embedding
are whole on every rank, and so are the activations between layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import mlx.core as mx
from mlx import nn

from mlx_ring.core.errors import ModelUnsupported, PlanError
from mlx_ring.core.types import MemberRange
from mlx_ring.models.tensor_shares import SPLIT_FAMILIES, TensorShare, splittable
from mlx_ring.worker.head_tap import override
from mlx_ring.worker.tensor.group import Group
from mlx_ring.worker.tensor.head import SplitHead, split_head
from mlx_ring.worker.tensor.slices import keep_columns, keep_rows

_LATE_BIAS = "bias_of_sum"


def split(
    model: nn.Module, shares: Sequence[TensorShare], group: Group, *, looks_up: bool = True
) -> SplitHead:
    """Leave a model this rank's part, lazily: weights that nobody has read are read in part alone.

    A stage is split after it was cut, for the cut finds the head by its size.

    Args:
        model: as mlx-lm built it, or a stage's.
        shares: of every rank of the group, in order.
        looks_up: whether this stage embeds tokens.

    Returns:
        What makes of the model's output, this rank's part of the logits, those of all.

    Raises:
        ModelUnsupported: the model's layers cannot be split.
        PlanError: the shares are not this model's or this group's.
    """
    _check(model, shares, group)
    share = shares[group.rank]
    for layer in cast("Sequence[Any]", cast("Any", model).layers):
        if isinstance(layer, nn.Module):  # those of other stages are none any more
            _split_layer(layer, share, group)
    split_head(model, share.vocabulary, looks_up=looks_up)
    return SplitHead(group, [share.vocabulary for share in shares])


def _check(model: nn.Module, shares: Sequence[TensorShare], group: Group) -> None:
    module = type(model).__module__
    if module.rpartition(".")[2] not in SPLIT_FAMILIES:
        raise ModelUnsupported(
            f"{module} cannot be split over several ranks: that is done for {splittable()}."
        )
    if len(shares) != group.size:
        raise PlanError(f"There are shares for {len(shares)} ranks, and {group.size} ranks in the group.")
    told, found = _ends(shares[-1]), _sizes(cast("Any", model).args)
    if told != found:
        raise PlanError(
            f"The shares are of {told} KV heads, query heads, rows and tokens, where the model has {found}: they were made "
            "for another."
        )


def _ends(last: TensorShare) -> tuple[int, ...]:
    extents = (last.kv_heads, last.query_heads, last.intermediate, last.experts, last.vocabulary)
    return tuple(extent.end for extent in extents)


def _sizes(of_model: Any) -> tuple[int, ...]:
    return (
        of_model.num_key_value_heads,
        of_model.num_attention_heads,
        of_model.intermediate_size,
        getattr(of_model, "moe_intermediate_size", 0),
        of_model.vocab_size,
    )


def _split_layer(layer: nn.Module, share: TensorShare, group: Group) -> None:
    _split_attention(cast("nn.Module", layer["self_attn"]), share, group)
    mlp = cast("nn.Module", layer["mlp"])
    if "switch_mlp" in mlp:
        _split_mlp(cast("nn.Module", mlp["switch_mlp"]), share.experts)
        # Behind the choice of experts, where their outputs have become one.
        _sum(mlp, group)
    else:
        _split_mlp(mlp, share.intermediate)
        _sum(cast("nn.Module", mlp["down_proj"]), group)


def _split_attention(attention: nn.Module, share: TensorShare, group: Group) -> None:
    sizes = cast("Any", attention)
    queries, keys = share.query_heads, share.kv_heads
    width = _head_dim(attention)
    if "qkv_proj" in attention:
        behind_queries, behind_keys = sizes.n_heads * width, (sizes.n_heads + sizes.n_kv_heads) * width
        keep_rows(
            cast("nn.Module", attention["qkv_proj"]),
            queries.times(width),
            keys.times(width).shifted(behind_queries),
            keys.times(width).shifted(behind_keys),
        )
    else:
        for name, heads in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
            keep_rows(cast("nn.Module", attention[name]), heads.times(width))
    output = cast("nn.Module", attention["o_proj"])
    keep_columns(output, queries.times(width))
    _sum(output, group)
    sizes.n_heads, sizes.n_kv_heads = len(queries), len(keys)


def _head_dim(attention: nn.Module) -> int:
    """From the rows that there are: families name it in different ways, or not at all."""
    fused = "qkv_proj" in attention
    sizes = cast("Any", attention)
    rows = cast("Any", attention["qkv_proj" if fused else "q_proj"]).weight.shape[0]
    return rows // (sizes.n_heads + 2 * sizes.n_kv_heads if fused else sizes.n_heads)


def _split_mlp(mlp: nn.Module, rows: MemberRange) -> None:
    if "gate_up_proj" in mlp:
        both = cast("nn.Module", mlp["gate_up_proj"])
        keep_rows(both, rows, rows.shifted(cast("Any", both).weight.shape[0] // 2))
    else:
        for name in ("gate_proj", "up_proj"):
            keep_rows(cast("nn.Module", mlp[name]), rows)
    keep_columns(cast("nn.Module", mlp["down_proj"]), rows)


def _sum(module: nn.Module, group: Group) -> None:
    """Have the module give the sum over the ranks, and add its bias once."""
    if "bias" in module:
        module[_LATE_BIAS] = module.pop("bias")

    def make(run: Callable[..., mx.array]) -> Callable[..., mx.array]:
        def call(self: nn.Module, *arguments: Any) -> mx.array:
            total = group.all_sum(run(self, *arguments))
            return total + cast("mx.array", self[_LATE_BIAS]) if _LATE_BIAS in self else total

        return call

    override(module, "__call__", make)
