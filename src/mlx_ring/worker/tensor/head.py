"""A model's output head, of which each rank computes some tokens of the vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import mlx.core as mx
from mlx import nn

from mlx_ring.core.types import MemberRange
from mlx_ring.worker.head_tap import override
from mlx_ring.worker.tensor.group import Group
from mlx_ring.worker.tensor.slices import keep_rows, rows_of

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
