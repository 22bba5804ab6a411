"""How a model samples where a request does not say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlx_ring.api.service import SamplingDefaults


def sampling_defaults(config: Mapping[str, Any]) -> SamplingDefaults:
    """What the model's makers advise, where their file gives numbers."""
    fallback = SamplingDefaults()

    def number(name: str, otherwise: float) -> float:
        value: object = config.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return otherwise
        return float(value) if value >= 0 else otherwise

    return SamplingDefaults(
        temperature=0.0 if config.get("do_sample") is False else number("temperature", fallback.temperature),
        top_p=number("top_p", fallback.top_p),
        top_k=int(number("top_k", fallback.top_k)),
        min_p=number("min_p", fallback.min_p),
        repetition_penalty=number("repetition_penalty", fallback.repetition_penalty),
    )
