"""Replaces a method of one module of a model, and leaves the module what it was to everyone who asks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mlx import nn


def override(module: nn.Module, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Give the module a subclass of its class, whose method `name` is `make(the old one)`.

    The module itself stays in its place: attributes, the paths of its parameters and `isinstance` go on to
    hold, which a wrapper around it would break.
    """
    kind = type(module)
    module.__class__ = type(kind.__name__, (kind,), {name: make(getattr(kind, name))})
