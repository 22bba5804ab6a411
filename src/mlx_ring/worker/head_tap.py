"""Input of a model's head: the hidden states after its final norm.

The head is the most expensive layer, so it runs only at the wanted positions. They are selected here because everything
that a model does after its last layer has seen all positions by then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import mlx.core as mx
from mlx import nn

from mlx_ring.core.errors import ModelUnsupported


def override(module: nn.Module, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Give the module a subclass of its class, whose method `name` is `make(the old one)`.

    The module itself stays in its place. Attributes, the paths of its parameters and `isinstance` remain
    valid, which a wrapper around it would break.
    """
    kind = type(module)
    module.__class__ = type(kind.__name__, (kind,), {name: make(getattr(kind, name))})


class HeadTap:
    """Filter of the head's input, whether the head is a layer or the transposed embedding."""

    def __init__(self, model: nn.Module, heads: Sequence[str]) -> None:
        self._model = model
        self._positions: mx.array | None = None
        self._entered: mx.array | None = None
        self._given: mx.array | None = None
        self.is_reached = False
        """True once a pass has come through the head."""
        modules = dict(cast("list[tuple[str, nn.Module]]", model.named_modules()))
        for path in heads:
            override(modules[path], "__call__", self._tapped)
        for module in modules.values():
            if hasattr(module, "as_linear"):
                override(module, "as_linear", self._tapped)

    def run(
        self,
        forward: Callable[[], mx.array],
        positions: mx.array | None,
        *,
        hidden_only: bool = False,
        given: mx.array | None = None,
    ) -> mx.array:
        """Build a lazy pass.

        Args:
            forward: returns (batch, n, vocabulary) logits.
            positions: (p,) or (batch, p) offsets into n whose results are wanted; None: all.
            hidden_only: return the head's input, and never evaluate its product.
            given: (batch, p, hidden) input of the head instead of what comes from the layers, which is not evaluated.
        """
        self._positions, self._entered, self._given = positions, None, given
        try:
            logits = forward()
        finally:
            self._given = None
        entered, self._entered = self._entered, None
        if hidden_only:
            if entered is None:
                raise ModelUnsupported(
                    f"{type(self._model).__module__} gives no access to its hidden states: its head was not found."
                )
            return entered
        return logits if entered is not None or positions is None else _at_positions(logits, positions)

    def _tapped(self, head: Callable[..., mx.array]) -> Callable[..., mx.array]:
        def tapped(module: nn.Module, hidden: mx.array) -> mx.array:
            self.is_reached = True
            if self._given is not None:
                hidden = self._given
            elif self._positions is not None:
                hidden = _at_positions(hidden, self._positions)
            self._entered = hidden
            return head(module, hidden)

        return tapped


def _at_positions(output: mx.array, positions: mx.array) -> mx.array:
    """Return (batch, n, width) at (p,) or (batch, p) offsets."""
    if positions.ndim == 1:
        return output[:, positions]
    return mx.take_along_axis(output, positions[:, :, None], axis=1)


def find_heads(model: nn.Module, vocab_size: int) -> tuple[str, ...]:
    """Return the paths of linear layers that produce a vocabulary; none if the embedding is the head."""
    return tuple(
        path
        for path, module in cast("list[tuple[str, nn.Module]]", model.named_modules())
        if isinstance(module, nn.Linear | nn.QuantizedLinear) and module.weight.shape[0] == vocab_size
    )
