"""The share of a machine's memory that plans may count on, as a file states it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from mlx_ring.core.errors import ConfigError

SHARE_FIELDS = frozenset({"gpu_memory_utilization", "memory_utilization"})
"""As the flags are called, vLLM's and ours."""


def read_share(name: str, where: str, *places: Mapping[str, Any]) -> float | None:
    """Of the machine called `name`; None where none of the places states one.

    Args:
        name: of the machine, in sentences.
        where: the file, in sentences.
        places: fields among which it may stand; under `serve` names may have dashes for underscores.

    Raises:
        ConfigError: it is no share, or stands there twice.
    """
    given = [
        (key, value)
        for place in places
        for key, value in place.items()
        if is_share(key) and value is not None
    ]
    if len(given) > 1:
        twice = " and ".join(key for key, _ in given)
        raise ConfigError(f"{where}: the share of memory of {name} stands there twice, as {twice}: give one.")
    for key, value in given:
        if type(value) not in (int, float) or not 0 < cast("float", value) <= 1:
            raise ConfigError(
                f"{where}: {key} of {name} is {value!r}; it must be a number above 0, at most 1."
            )
        return float(cast("float", value))
    return None


def is_share(key: object) -> bool:
    """Whether a field is called so."""
    return str(key).replace("-", "_") in SHARE_FIELDS
