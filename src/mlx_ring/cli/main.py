"""The console script `mlx-ring`. Light, so that a Ctrl-C is heard from the first moment on."""

from __future__ import annotations

import sys

from mlx_ring.cli import INTERRUPTED


def main() -> None:
    """Run what was typed and end with its exit code."""
    try:
        from mlx_ring.cli.app import run  # what it brings in takes a second

        sys.exit(run())
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
