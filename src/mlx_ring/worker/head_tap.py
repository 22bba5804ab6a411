"""What enters a model's head: the hidden states after its final norm, for embeddings and the like."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, cast

import mlx.core as mx
from mlx import nn

from mlx_ring.core.errors import ModelUnsupported
from mlx_ring.worker.overrides import override


class HeadTap:
    """Notes what enters the head, be it a layer of its own or the embedding turned round."""

    def __init__(self, model: nn.Module, heads: Sequence[str]) -> None:
        self._model = model
        self._entered: mx.array | None = None
        modules = dict(cast("list[tuple[str, nn.Module]]", model.named_modules()))
        for path in heads:
            override(modules[path], "__call__", self._tapped)
        for module in modules.values():
            if hasattr(module, "as_linear"):
                override(module, "as_linear", self._tapped)

    def run(self, forward: Callable[[], mx.array], output: Literal["logits", "hidden"]) -> mx.array:
        """A lazy pass; with "hidden" the head's own product is never evaluated."""
        self._entered = None
        logits = forward()
        entered, self._entered = self._entered, None
        if output == "logits":
            return logits
        if entered is None:
            raise ModelUnsupported(
                f"{type(self._model).__module__} gives no access to its hidden states: its head was not found."
            )
        return entered

    def _tapped(self, head: Callable[..., mx.array]) -> Callable[..., mx.array]:
        def tapped(module: nn.Module, hidden: mx.array) -> mx.array:
            self._entered = hidden
            return head(module, hidden)

        return tapped


def find_heads(model: nn.Module, vocab_size: int) -> tuple[str, ...]:
    """Paths of the linear layers that give a vocabulary; none where the embedding serves as the head."""
    return tuple(
        path
        for path, module in cast("list[tuple[str, nn.Module]]", model.named_modules())
        if isinstance(module, nn.Linear | nn.QuantizedLinear) and module.weight.shape[0] == vocab_size
    )
