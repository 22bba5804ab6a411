"""Arguments that the kernels take of a layer's modules: weights, sums over ranks and rotations."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple, Protocol, cast

import mlx.core as mx
from mlx import nn

MODELS = "mlx_lm.models"
"""Package of mlx-lm's models."""


class Ranks(Protocol):
    """Group whose ranks sum up parts of products, in one order on all of them."""

    @property
    def joined(self) -> mx.distributed.Group: ...

    def all_sum(self, array: mx.array) -> mx.array: ...

    def in_turn(self, array: mx.array) -> mx.array:
        """Return the array as computed after all sums so far."""
        ...

    def follow(self, array: mx.array) -> None:
        """Take an array that is computed by sums of its own, which are in turn."""
        ...


class _InOrderOfData(NamedTuple):
    """Ranks of mlx-lm's own split, whose layers' sums depend on each other."""

    joined: mx.distributed.Group

    def all_sum(self, array: mx.array) -> mx.array:
        return mx.distributed.all_sum(array, group=self.joined)

    def in_turn(self, array: mx.array) -> mx.array:
        return array

    def follow(self, array: mx.array) -> None: ...


Sum = tuple[Ranks, mx.array | None]
"""Ranks that sum up a layer's products, with what is added once."""


def linear_of(module: nn.Module) -> tuple[Any, ...] | None:
    """Return the parts of a quantized layer as the kernels take them."""
    # A part of the rows adds up gradients of the input, and otherwise computes the same.
    is_part = type(module) is nn.QuantizedAllToShardedLinear and not module.training
    if not (is_part or type(module) is nn.QuantizedLinear):
        return None
    return parts_of(module, cast("Any", module).get("bias"))


def parts_of(module: Any, bias: mx.array | None = None) -> tuple[Any, ...] | None:
    """Return the parts with this bias."""
    if module.mode != "affine":
        return None
    return module["weight"], module["scales"], module["biases"], bias, module.group_size, module.bits


def sum_of(module: Any) -> Sum | None:
    """Return what sums up a layer's products; None for a layer without ranks.

    A subclass of `nn.QuantizedLinear` may have a method `sums` that returns it.
    """
    kind = cast("type[nn.Module]", type(module))
    if kind.__bases__ == (nn.QuantizedLinear,) and "sums" in vars(kind):
        return module.sums()
    if kind is not nn.QuantizedShardedToAllLinear:
        return None
    return _InOrderOfData(module.group), module.get("bias")


def rotation_of(rope: Any) -> tuple[Any, ...] | None:
    """Return the options of a rotation as the kernels take them; None if the module has to compute it."""
    if type(rope) is nn.RoPE:
        return rope.dims, rope.traditional, rope.base, rope.scale, None
    if type(rope) is getattr(sys.modules.get(f"{MODELS}.rope_utils"), "Llama3RoPE", None):
        return rope.dims, rope.traditional, None, 1.0, rope["_freqs"]
    return None
