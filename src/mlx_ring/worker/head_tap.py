"""What enters a model's head: the hidden states after its final norm, for embeddings and the like."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import mlx.core as mx
from mlx import nn

from mlx_ring.core.errors import ModelUnsupported


class _TappedHead(nn.Module):
    """A separate output head: notes what it is given."""

    def __init__(self, head: nn.Module, note: Callable[[mx.array], None]) -> None:
        super().__init__()
        self["head"] = head  # Module.__setattr__ would ask __getattr__ below before it is there
        object.__setattr__(self, "_note", note)

    def __getattr__(self, name: str) -> Any:
        held = cast("dict[str, Any]", self)
        return held[name] if name in held else getattr(held["head"], name)

    def __call__(self, hidden: mx.array) -> mx.array:
        self._note(hidden)
        return cast("Callable[[mx.array], mx.array]", self["head"])(hidden)


class HeadTap:
    """Notes what enters the head, be it a layer of its own or the embedding turned round."""

    def __init__(self, model: nn.Module, heads: Sequence[str]) -> None:
        self._model = model
        self._entered: mx.array | None = None
        modules = dict(cast("list[tuple[str, nn.Module]]", model.named_modules()))
        for path in heads:
            parent, _, name = path.rpartition(".")
            setattr(modules[parent], name, _TappedHead(modules[path], self._note))
        for module in modules.values():
            if hasattr(module, "as_linear"):
                self._tap_embedding(module)

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

    def _note(self, hidden: mx.array) -> None:
        self._entered = hidden

    def _tap_embedding(self, module: nn.Module) -> None:
        as_linear = cast("Callable[[mx.array], mx.array]", module.as_linear)

        def tapped(hidden: mx.array) -> mx.array:
            self._note(hidden)
            return as_linear(hidden)

        object.__setattr__(module, "as_linear", tapped)


def find_heads(model: nn.Module, vocab_size: int) -> tuple[str, ...]:
    """Paths of the linear layers that give a vocabulary; none where the embedding serves as the head."""
    return tuple(
        path
        for path, module in cast("list[tuple[str, nn.Module]]", model.named_modules())
        if isinstance(module, nn.Linear | nn.QuantizedLinear) and module.weight.shape[0] == vocab_size
    )
