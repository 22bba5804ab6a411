"""Commands of `mlx-ring`: a thin shell over the other packages."""

from __future__ import annotations

INTERRUPTED = 130
"""Exit code after Ctrl-C, as in shells: 128 plus the number of SIGINT."""
