"""Imports of the command modules."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest
from tests.processes import clean_environment

from mlx_ring.cli import importing
from mlx_ring.cli.app import COMMANDS

MODULES = sorted({place.partition(":")[0] for place in COMMANDS.values()})


@pytest.mark.parametrize("module", [*MODULES, "mlx_ring.agent.head_member"])
def test_command_modules_do_not_import_grpc(module: str) -> None:
    """Keep grpc out, because it reads its log level on import and would never log whom it refused."""
    program = f"import sys, {module}; sys.exit('grpc' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], env=clean_environment(), check=False)
    assert done.returncode == 0


def test_head_starts_without_clients_of_the_hub_and_without_mlx() -> None:
    """Keep out what takes long to import and serves no request. A model of the hub brings its client."""
    slow = ("huggingface_hub", "transformers", "mlx")
    program = f"import sys, mlx_ring.head.head; print([name for name in {slow} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", program], env=clean_environment(), check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]"


def test_garbage_is_collected_again_after_imports() -> None:
    with importing():
        assert not gc.isenabled()
    assert gc.isenabled()
