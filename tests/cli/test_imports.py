"""What the commands bring in."""

from __future__ import annotations

import subprocess
import sys

from tests.processes import clean_environment


def test_no_command_brings_grpc_in_before_it_is_told_how_much_to_say() -> None:
    """It reads that when it is imported, and would then never say whom it refused."""
    program = "import sys, mlx_ring.cli.app; sys.exit('grpc' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], env=clean_environment(), check=False)
    assert done.returncode == 0


def test_nor_does_the_agent_of_the_heads_machine() -> None:
    program = "import sys, mlx_ring.agent.head_member; sys.exit('grpc' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], env=clean_environment(), check=False)
    assert done.returncode == 0
