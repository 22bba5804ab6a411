"""Models that are fetched while the head serves: each by a process of its own, so that the head can end at any moment."""

from __future__ import annotations

import json
from collections.abc import Sequence

from mlx_ring.core import errors
from mlx_ring.core.child import ChildProcess
from mlx_ring.core.environment import inherited_environment
from mlx_ring.core.errors import ModelError, ModelNotFound, PlanError, RingError

_QUIET = {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}


async def fetch_beside(name: str, *, must_fit: bool) -> None:
    """Have all of a hub's model in the cache; being cancelled ends it at once, and what has come is kept.

    Raises:
        ModelError, PlanError: as `find_model` does.
    """
    told: list[str] = []

    def hear(line: str) -> str:
        told.append(line)
        return ""

    child = await ChildProcess.start(
        "mlx_ring.core.fetching",
        [f"--name={name}", *(["--must-fit"] if must_fit else [])],
        name=f"fetching {name}",
        rank=None,
        environment=inherited_environment(_QUIET),
        word=hear,
    )
    try:
        reason = await child.wait()
    finally:
        await child.stop(asks_where=False)
    if reason != "exit code 0":
        raise _read(told, f"{name} could not be fetched: {reason}.")


def _read(told: Sequence[str], otherwise: str) -> RingError:
    """The error that ended the process; where it said none, what is known of its end."""
    try:
        last: dict[str, str] = json.loads(told[-1])
        kind, said = getattr(errors, last["kind"]), last["said"]
        return kind(said) if issubclass(kind, ModelError | PlanError) else ModelNotFound(said)
    except (IndexError, ValueError, TypeError, KeyError, AttributeError):
        return ModelNotFound(otherwise)
