"""Tensor parallelism: the group of a stage's ranks, and the split of an mlx-lm model for one of them.

The model's own forward runs, on fewer heads and rows, with two sums a layer.

Layers that make heads and rows (queries, keys, values, the gate and its input) are cut by outputs. Layers that take
them in (behind attention, behind an MLP or its experts) are cut by inputs, so that ranks' results add up. Norms, the
router and the embedding are whole on every rank, and so are the activations between layers. Each rank computes
some tokens of the vocabulary in the output head.

Parts are lazy: nothing is read before the part itself is evaluated. A part is a copy, because a view would hold the
whole matrix in memory.
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

_MATRICES = ("weight", "scales", "biases")
"""Matrices of a layer, quantized or not: (outputs, inputs), and (experts, outputs, inputs)."""
_QUANTIZED = (nn.QuantizedLinear, QuantizedSwitchLinear, nn.QuantizedEmbedding)
_FLOAT = (nn.Linear, SwitchLinear, nn.Embedding)
_BITS_IN_WORD = 32


class Group:
    """Place of this process among ranks that MLX has joined.

    Collectives are lazy, and match by order: each rank must build the same ones in the same order. They are also
    computed in that order, because each depends on the one built before. MLX only orders dependent arrays, and may
    walk two graphs that differ in a node in different ways. If a collective fails, the group is unusable and its
    processes end.
    """

    def __init__(self, joined: mx.distributed.Group) -> None:
        self.joined = joined
        self.rank = joined.rank()
        self.size = joined.size()
        self._last: mx.array | None = None
        """Result of the last collective of this step."""

    def all_sum(self, array: mx.array) -> mx.array:
        """Return the sum of all ranks' arrays, with the same bits on each."""
        self._last = mx.distributed.all_sum(self.in_turn(array), group=self.joined)
        return self._last

    def end_step(self) -> None:
        """Drop what was built and not computed. All ranks do this alike, because all wait for the end of a step.

        Otherwise the next step would compute the rest of a pass of which only the KV was needed, and keep
        some of it alive.
        """
        self._last = None

    def follow(self, array: mx.array) -> None:
        """Take an array that is computed by sums of its own, after those so far."""
        self._last = array

    def in_turn(self, array: mx.array) -> mx.array:
        """Return the array as computed after all collectives so far."""
        return array if self._last is None else cast("mx.array", mx.depends(array, self._last))

    def all_gather(self, array: mx.array, widths: Sequence[int]) -> mx.array:
        """Return all ranks' arrays side by side along the last axis, in rank order.

        Args:
            array: (..., own width).
            widths: of every rank, in order; the collective itself takes equal ones.
        """
        longest = max(widths)
        if array.shape[-1] < longest:
            array = mx.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, longest - array.shape[-1])])
        parts = self.stack(array)
        return mx.concatenate([parts[rank, ..., :width] for rank, width in enumerate(widths)], axis=-1)

    def stack(self, array: mx.array) -> mx.array:
        """Return (ranks, ...): all ranks' arrays, which have one shape."""
        self._last = mx.distributed.all_gather(self.in_turn(array[None]), group=self.joined)
        return self._last

    def from_first(self, array: mx.array) -> mx.array:
        """Return rank 0's array. Others pass one of the same shape and type, whose content does not matter."""
        return self.all_sum(mx.zeros_like(array) if self.rank else array)


def keep_rows(layer: nn.Module, *extents: MemberRange) -> None:
    """Keep these outputs of a layer, in this order, or these tokens of an embedding."""
    _require_known(layer)
    for name in (*_MATRICES, "bias"):
        matrix = _parameter(layer, name)
        if matrix is not None:
            axis = matrix.ndim - (1 if name == "bias" else 2)
            layer[name] = _cut(matrix, axis, extents)


def keep_columns(layer: nn.Module, extent: MemberRange) -> None:
    """Keep these inputs of a layer. Its bias, which all ranks' parts add once in total, stays whole."""
    _require_known(layer)
    _require_whole_groups(layer, extent)
    for name in _MATRICES:
        matrix = _parameter(layer, name)
        if matrix is not None:
            layer[name] = _cut(matrix, matrix.ndim - 1, (_stored(layer, name, extent),))


def rows_of(layer: nn.Module, extent: MemberRange) -> dict[str, mx.array]:
    """Return views of a layer's matrices. A view keeps the whole matrix alive."""
    found = {name: _parameter(layer, name) for name in _MATRICES}
    return {name: matrix[extent.start : extent.end] for name, matrix in found.items() if matrix is not None}


def _cut(matrix: mx.array, axis: int, extents: Sequence[MemberRange]) -> mx.array:
    parts = [matrix[(slice(None),) * axis + (slice(extent.start, extent.end),)] for extent in extents]
    return mx.contiguous(parts[0] if len(parts) == 1 else mx.concatenate(parts, axis))


def _stored(layer: nn.Module, name: str, columns: MemberRange) -> MemberRange:
    """Return where a matrix stores these inputs."""
    if not isinstance(layer, _QUANTIZED):
        return columns
    of_layer = cast("Any", layer)
    words, inputs = (of_layer.bits, _BITS_IN_WORD) if name == "weight" else (1, of_layer.group_size)
    return MemberRange(columns.start * words // inputs, columns.end * words // inputs)


def _require_whole_groups(layer: nn.Module, columns: MemberRange) -> None:
    size = cast("int", cast("Any", layer).group_size) if isinstance(layer, _QUANTIZED) else 1
    if columns.start % size or columns.end % size:
        raise PlanError(
            f"Columns {columns} of a matrix that is quantized in groups of {size} cannot be taken without splitting a group: "
            "compute the shares for this model again."
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
    """Head that combines the logits of all ranks: (..., own tokens of the vocabulary) each."""

    def __init__(self, group: Group, vocabulary: Sequence[MemberRange]) -> None:
        """Set the parts of the vocabulary, for every rank in order."""
        self._group = group
        self._widths = [len(extent) for extent in vocabulary]
        self.first = vocabulary[group.rank].start
        """First token of this rank."""
        self.vocabulary = vocabulary[-1].end

    def logits(self, own: mx.array) -> mx.array:
        """Return (..., vocabulary), on every rank."""
        return self._group.all_gather(own, self._widths)

    def best(self, own: mx.array) -> mx.array:
        """Return (...) int32, on every rank: the token with the highest logit, of equal ones that with the lowest id.

        It exchanges two numbers for each rank and position, where `logits` exchanges the whole vocabulary.
        """
        ids = mx.argmax(own, axis=-1).astype(mx.int32) + self.first
        values = mx.max(own, axis=-1).astype(mx.float32)
        found = self._group.stack(mx.stack([values.view(mx.int32), ids]))
        first = mx.argmax(found[:, 0].view(mx.float32), axis=0, keepdims=True)
        return mx.take_along_axis(found[:, 1], first, axis=0)[0]


def split_head(model: nn.Module, own: MemberRange, *, looks_up: bool) -> None:
    """Let the head compute this rank's part of the logits.

    If the embedding is the head, it stays whole for embedding tokens, and the head uses a view of it.
    A stage that embeds no tokens keeps that part alone.
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
    part = nn.Module()  # in no tree, so that its matrices are no module's parameters
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
    """Reduce a model to this rank's part, lazily: only parts of unread weights are read.

    A stage is split after it was cut, because the cut finds the head by its size.

    Args:
        model: as mlx-lm built it, or a stage's.
        shares: of every rank of the group, in order.
        looks_up: whether this stage embeds tokens.

    Returns:
        A head that combines the ranks' parts of the logits.

    Raises:
        ModelUnsupported: the model's layers cannot be split.
        PlanError: the shares are not this model's or this group's.
    """
    _check(model, shares, group)
    share = shares[group.rank]
    for layer in cast("Sequence[Any]", cast("Any", model).layers):
        if isinstance(layer, nn.Module):  # layers of other stages are pass-throughs
            _split_layer(layer, share, group)
    split_head(model, share.vocabulary, looks_up=looks_up)
    return SplitHead(group, [share.vocabulary for share in shares])


def _check(model: nn.Module, shares: Sequence[TensorShare], group: Group) -> None:
    module = type(model).__module__
    if module.rpartition(".")[2] not in SPLIT_FAMILIES:
        raise ModelUnsupported(f"{module} cannot be split over several ranks; supported are {splittable()}.")
    if len(shares) != group.size:
        raise PlanError(f"There are shares for {len(shares)} ranks, but {group.size} ranks in the group.")
    expected, found = _ends(shares[-1]), _sizes(cast("Any", model).args)
    if expected != found:
        raise PlanError(
            f"The shares have {expected} KV heads, query heads, rows and tokens, but the model has {found}: they were made "
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
        # After the experts' choice and sum.
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
    """Return the head's size from the stored rows, because model families name it in different ways, or not at all."""
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
    """Let the module return the sum over the ranks, and add its bias once."""
    if "bias" in module:
        module[_LATE_BIAS] = module.pop("bias")

    def sums(self: nn.Module) -> tuple[Group, mx.array | None]:
        return group, _parameter(self, _LATE_BIAS)

    def make(run: Callable[..., mx.array]) -> Callable[..., mx.array]:
        def call(self: nn.Module, *arguments: Any) -> mx.array:
            total = group.all_sum(run(self, *arguments))
            return total + cast("mx.array", self[_LATE_BIAS]) if _LATE_BIAS in self else total

        return call

    override(module, "__call__", make)
    # With it, native kernels compute parts and sums of several layers in one operation.
    cast("Any", type(module)).sums = sums


def override(module: nn.Module, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Give the module a subclass of its class, whose method `name` is `make(the old one)`.

    The module itself stays in its place. Attributes, the paths of its parameters and `isinstance` remain
    valid, which a wrapper around it would break.
    """
    kind = type(module)
    module.__class__ = type(kind.__name__, (kind,), {name: make(getattr(kind, name))})
