"""Console script `mlx-ring`. It imports little, so that Ctrl-C works from the start."""

from __future__ import annotations

import sys

from mlx_ring.cli import INTERRUPTED


def main() -> None:
    """Run the command line and exit with its code."""
    try:
        from mlx_ring.core.environment import leave_out_pydantic_plugins
        from mlx_ring.core.lean_imports import importing

        leave_out_pydantic_plugins()
        with importing():
            from mlx_ring.cli.app import run  # its imports are slow

        sys.exit(run())
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
