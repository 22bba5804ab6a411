"""Checkpoints of a transformer alone, without the model around it: as embedding models are saved.

Their tensors are named `layers.0...` where mlx-lm's models say `model.layers.0...`, and most have no output head. Nobody
asks an embedding model for one, so its embedding stands in for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import mlx.core as mx
from mlx import nn
from mlx_lm.utils import (
    _get_classes,  # pyright: ignore[reportPrivateUsage, reportUnknownVariableType] - the one way to a class
)

from mlx_ring.core.architectures import find_architecture
from mlx_ring.core.layer_tensors import names_head
from mlx_ring.core.model_folder import ModelFolder

_INNER = "model"


def loading_options(folder: ModelFolder) -> dict[str, Any]:
    """What mlx-lm must be told to load a folder; nothing for most."""
    names = [entry.name for entry in folder.tensors]
    if any(name.startswith(f"{_INNER}.") for name in names) or not any(map(_is_bare, names)):
        return {}
    architecture = find_architecture(folder.model_type, folder.classes)
    lacks_head = architecture is not None and architecture.tied and not any(map(names_head, names))
    return {
        "get_model_classes": _whole_classes,
        "model_config": {"tie_word_embeddings": True} if lacks_head else {},
    }


def _is_bare(name: str) -> bool:
    return name.startswith("layers.")


def _whole_classes(config: dict[str, Any]) -> tuple[type[nn.Module], type]:
    """mlx-lm's own, but that tensors get their whole names before anything is made of them."""
    model, arguments = cast("tuple[Any, type]", cast("object", _get_classes(config)))

    def sanitize(self: nn.Module, weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
        whole = {_whole_name(name) if _INNER in self else name: array for name, array in weights.items()}
        own = getattr(cast("object", super(named, self)), "sanitize", dict)
        return cast("dict[str, mx.array]", own(whole))

    named = type(model.__name__, (model,), {"sanitize": sanitize, "__module__": model.__module__})
    return cast("type[nn.Module]", named), arguments


def _whole_name(name: str) -> str:
    return name if names_head(name) else f"{_INNER}.{name}"
