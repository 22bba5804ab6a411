"""Parts of a layer's matrices, lazily: nothing is read before the part itself is evaluated.

A part is a copy of its own, for a view would hold the whole matrix in memory.

A model's output head, of which each rank computes some tokens of the vocabulary.

Turns a model of mlx-lm's into one rank's: its own forward runs, on fewer heads and rows, with two sums a layer.

What makes heads and rows (queries, keys, values, the gate and what it opens) is cut by outputs; what takes them in (behind
attention, behind an MLP or its experts) by inputs, so that ranks' results add up. Norms, the router and the embedding
are whole on every rank, and so are the activations between layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import mlx.core as mx
from mlx import nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from mlx_ring.core.errors import ModelUnsupported, PlanError
from mlx_ring.core.types import MemberRange
from mlx_ring.models.tensor_shares import SPLIT_FAMILIES, TensorShare, splittable
from mlx_ring.worker.head_tap import override
from mlx_ring.worker.tensor.group import Group

_MATRICES = ("weight", "scales", "biases")
"""Of a layer, quantized or not: (outputs, inputs), and (experts, outputs, inputs)."""
_QUANTIZED = (nn.QuantizedLinear, QuantizedSwitchLinear, nn.QuantizedEmbedding)
_FLOAT = (nn.Linear, SwitchLinear, nn.Embedding)
_BITS_IN_WORD = 32


def keep_rows(layer: nn.Module, *extents: MemberRange) -> None:
    """Leave a layer those of its outputs, in this order; of an embedding those tokens."""
    _require_known(layer)
    for name in (*_MATRICES, "bias"):
        matrix = _parameter(layer, name)
        if matrix is not None:
            axis = matrix.ndim - (1 if name == "bias" else 2)
            layer[name] = _cut(matrix, axis, extents)


def keep_columns(layer: nn.Module, extent: MemberRange) -> None:
    """Leave a layer those of its inputs. Its bias, which all ranks' parts have once between them, stays whole."""
    _require_known(layer)
    _require_whole_groups(layer, extent)
    for name in _MATRICES:
        matrix = _parameter(layer, name)
        if matrix is not None:
            layer[name] = _cut(matrix, matrix.ndim - 1, (_stored(layer, name, extent),))


def rows_of(layer: nn.Module, extent: MemberRange) -> dict[str, mx.array]:
    """Views of a layer's matrices: what keeps them keeps the whole."""
    found = {name: _parameter(layer, name) for name in _MATRICES}
    return {name: matrix[extent.start : extent.end] for name, matrix in found.items() if matrix is not None}


def _cut(matrix: mx.array, axis: int, extents: Sequence[MemberRange]) -> mx.array:
    parts = [matrix[(slice(None),) * axis + (slice(extent.start, extent.end),)] for extent in extents]
    return mx.contiguous(parts[0] if len(parts) == 1 else mx.concatenate(parts, axis))


def _stored(layer: nn.Module, name: str, columns: MemberRange) -> MemberRange:
    """Where a matrix has what belongs to these inputs."""
    if not isinstance(layer, _QUANTIZED):
        return columns
    of_layer = cast("Any", layer)
    words, inputs = (of_layer.bits, _BITS_IN_WORD) if name == "weight" else (1, of_layer.group_size)
    return MemberRange(columns.start * words // inputs, columns.end * words // inputs)


def _require_whole_groups(layer: nn.Module, columns: MemberRange) -> None:
    size = cast("int", cast("Any", layer).group_size) if isinstance(layer, _QUANTIZED) else 1
    if columns.start % size or columns.end % size:
        raise PlanError(
            f"Columns {columns} of a matrix that is quantized in groups of {size} cannot be had without parting a group: "
            "make the shares for this model anew."
        )


def _require_known(layer: nn.Module) -> None:
    if not isinstance(layer, (*_FLOAT, *_QUANTIZED)):
        raise ModelUnsupported(
            f"A layer of kind {type(layer).__name__} cannot be split over several ranks: its weights must be plain, or "
            "quantized by weight alone."
        )


def _parameter(layer: nn.Module, name: str) -> mx.array | None:
    return cast("mx.array | None", layer.get(name))


_OF_QUANTIZATION = ("group_size", "bits", "mode")


class SplitHead:
    """Puts together what the ranks' heads give: (..., own tokens of the vocabulary) each."""

    def __init__(self, group: Group, vocabulary: Sequence[MemberRange]) -> None:
        """`vocabulary` is every rank's part, in order."""
        self._group = group
        self._widths = [len(extent) for extent in vocabulary]
        self.first = vocabulary[group.rank].start
        """This rank's first token."""
        self.vocabulary = vocabulary[-1].end

    def logits(self, own: mx.array) -> mx.array:
        """(..., vocabulary), on every rank."""
        return self._group.all_gather(own, self._widths)

    def best(self, own: mx.array) -> mx.array:
        """(...) int32, on every rank: the token with the highest logit, of equal ones that with the lowest id.

        Two numbers a rank and position go round, where `logits` takes the whole vocabulary.
        """
        ids = mx.argmax(own, axis=-1).astype(mx.int32) + self.first
        values = mx.max(own, axis=-1).astype(mx.float32)
        found = self._group.stack(mx.stack([values.view(mx.int32), ids]))
        first = mx.argmax(found[:, 0].view(mx.float32), axis=0, keepdims=True)
        return mx.take_along_axis(found[:, 1], first, axis=0)[0]


def split_head(model: nn.Module, own: MemberRange, *, looks_up: bool) -> None:
    """Have the head give this rank's part of the logits.

    Where the embedding serves as the head it stays whole for looking tokens up, and the head takes a view of it;
    a stage that looks none up keeps that part alone.
    """
    head = cast("nn.Module | None", model.get("lm_head"))
    if head is not None:
        keep_rows(head, own)
        return
    embedding = cast("nn.Module", model["model"]["embed_tokens"])
    if looks_up:
        _turn_round(embedding, own)
    else:
        keep_rows(embedding, own)


def _turn_round(embedding: nn.Module, own: MemberRange) -> None:
    part = nn.Module()  # in no tree, so that its matrices are nobody's parameters
    for name in _OF_QUANTIZATION:
        if hasattr(embedding, name):
            setattr(part, name, getattr(embedding, name))

    def make(run: Callable[..., mx.array]) -> Callable[..., mx.array]:
        def as_linear(module: nn.Module, hidden: mx.array) -> mx.array:
            for name, matrix in rows_of(module, own).items():
                part[name] = matrix
            return run(part, hidden)

        return as_linear

    override(embedding, "as_linear", make)


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
