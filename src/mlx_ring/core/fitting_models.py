"""Which well-known model would fit a machine: the answer to "and now with a real one?"."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model on the hub. `weight_bytes` as its safetensors files have them."""

    hub_id: str
    weight_bytes: int


_BY_SIZE = (
    KnownModel("mlx-community/Qwen3-0.6B-4bit", 336_000_000),
    KnownModel("mlx-community/Qwen3-1.7B-4bit", 968_000_000),
    KnownModel("mlx-community/Qwen3-4B-4bit", 2_263_000_000),
    KnownModel("mlx-community/Qwen3-8B-4bit", 4_609_000_000),
    KnownModel("mlx-community/Qwen3-14B-4bit", 8_308_000_000),
    KnownModel("mlx-community/Qwen3-30B-A3B-4bit", 17_180_000_000),
    KnownModel("mlx-community/Qwen3-235B-A22B-4bit", 132_260_000_000),
)
_RESERVE_BYTES = 2_000_000_000
"""For KV, working memory, and whoever sits at the machine."""


def largest_fitting(free_bytes: int) -> KnownModel | None:
    """The largest known model whose weights take at most two thirds of what is free beyond a reserve."""
    room = (free_bytes - _RESERVE_BYTES) * 2 // 3
    fitting = [model for model in _BY_SIZE if model.weight_bytes <= room]
    return fitting[-1] if fitting else None
