"""The mlx-ring that runs here. Whatever is asked over ssh begins with it, so it brings nothing along."""

from __future__ import annotations

import sys

from mlx_ring.cluster.lifecycle.about import PACKAGES
from mlx_ring.core.versions import package_version

OWN_PROGRAM = (sys.executable, "-c", "from mlx_ring.cli.main import main; main()")


def own_versions() -> dict[str, str]:
    """Of what runs here."""
    return {name: package_version(name) for name in PACKAGES}
