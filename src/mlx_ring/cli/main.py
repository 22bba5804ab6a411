"""Console script `mlx-ring`. It imports little, so that Ctrl-C works from the start."""

from __future__ import annotations

import os
import sys

from mlx_ring.cli import INTERRUPTED


def main() -> None:
    """Run the command line and exit with its code."""
    try:
        _open_standard_streams()
        from mlx_ring.core.environment import leave_out_pydantic_plugins
        from mlx_ring.core.lean_imports import importing

        leave_out_pydantic_plugins()
        with importing():
            from mlx_ring.cli.app import run  # its imports are slow

        sys.exit(run())
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _open_standard_streams() -> None:
    """Open stdin, stdout and stderr as `/dev/null` where they are closed.

    Otherwise the next socket would get the number of one of them, and what is written there.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number is this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # noqa: FBT003 - it has no name
            setattr(sys, name, os.fdopen(number, "r" if name == "stdin" else "w", closefd=False))
