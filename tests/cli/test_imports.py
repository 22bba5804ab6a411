"""What the commands bring in."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tests.processes import clean_environment

from mlx_ring.cli.app import COMMANDS

MODULES = sorted({place.partition(":")[0] for place in COMMANDS.values()})


@pytest.mark.parametrize("module", [*MODULES, "mlx_ring.agent.head_member"])
def test_nothing_brings_grpc_in_before_it_is_told_how_much_to_say(module: str) -> None:
    """It reads that when it is imported, and would then never say whom it refused."""
    program = f"import sys, {module}; sys.exit('grpc' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], env=clean_environment(), check=False)
    assert done.returncode == 0
