"""Fetch a model in a separate process, which can be ended at any moment. Within one nothing ends the hub's client.

Complete files stay in the hub's cache, and the next fetch continues from there. The last line of its output says why there
is no model.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence

from mlx_ring.core import errors
from mlx_ring.core.environment import inherited_environment
from mlx_ring.core.errors import ModelError, ModelNotFound, PlanError, RingError
from mlx_ring.host.child import ChildProcess, watch_lifeline
from mlx_ring.models.model_source import find_model

_QUIET = {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}


async def fetch_beside(name: str, *, must_fit: bool) -> None:
    """Fetch a model from the hub into the cache; cancelling stops it at once and keeps what arrived.

    Raises:
        ModelError, PlanError: as `find_model` does.
    """
    lines: list[str] = []

    def record_line(line: str) -> str:
        lines.append(line)
        return ""

    child = await ChildProcess.start(
        "mlx_ring.models.fetching",
        [f"--name={name}", *(["--must-fit"] if must_fit else [])],
        name=f"fetching {name}",
        rank=None,
        environment=inherited_environment(_QUIET),
        word=record_line,
    )
    try:
        reason = await child.wait()
    finally:
        await child.stop(asks_where=False)
    if reason != "exit code 0":
        raise _read(lines, f"{name} could not be fetched: {reason}.")


def _read(lines: Sequence[str], otherwise: str) -> RingError:
    """Return the error that ended the process; without one, `otherwise`."""
    try:
        last: dict[str, str] = json.loads(lines[-1])
        kind, said = getattr(errors, last["kind"]), last["said"]
        return kind(said) if issubclass(kind, ModelError | PlanError) else ModelNotFound(said)
    except (IndexError, ValueError, TypeError, KeyError, AttributeError):
        return ModelNotFound(otherwise)


# ---- in the process


def main(arguments: Sequence[str] | None = None) -> int:
    """Fetch the model, and return 0 if it is here."""
    options = _parse(arguments)
    watch_lifeline(options.lifeline_fd, lambda: os._exit(1))
    try:
        find_model(options.name, must_fit=options.must_fit)
    except RingError as error:
        sys.stdout.write(json.dumps({"kind": type(error).__name__, "said": str(error)}) + "\n")
        return 1
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="mlx_ring.models.fetching", description=__doc__)
    parser.add_argument("--name", required=True, help="name of the hub's repository")
    parser.add_argument(
        "--must-fit", action="store_true", help="refuse a model that exceeds this machine's memory"
    )
    parser.add_argument("--lifeline-fd", type=int, required=True, help="pipe that closes with the parent")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
