"""Fetch a model in a separate process, which can be ended at any moment. Within one nothing ends the hub's client.

Complete files stay in the hub's cache, and the next fetch continues from there. The last line of output
says why there is no model, for `head/models.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence

from mlx_ring.core.errors import RingError
from mlx_ring.host.child import watch_lifeline
from mlx_ring.models.model_source import find_model


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
