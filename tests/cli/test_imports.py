"""Imports of the command modules."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tests.processes import clean_environment

from mlx_ring.cli.app import COMMANDS

MODULES = sorted({place.partition(":")[0] for place in COMMANDS.values()})


@pytest.mark.parametrize("module", [*MODULES, "mlx_ring.agent.head_member"])
def test_command_modules_do_not_import_grpc(module: str) -> None:
    """Keep grpc out, because it reads its log level on import and would never log whom it refused."""
    program = f"import sys, {module}; sys.exit('grpc' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], env=clean_environment(), check=False)
    assert done.returncode == 0
