"""Imports of the command modules."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest
from tests.processes import clean_environment

from mlx_ring.cli.app import COMMANDS
from mlx_ring.core.lean_imports import importing

MODULES = sorted({place.partition(":")[0] for place in COMMANDS.values()})


def test_command_modules_do_not_import_grpc() -> None:
    """Keep grpc out, because it reads its log level on import and would never log whom it refused.

    One process imports all modules, one after the other, and prints the first that has brought it.
    """
    program = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    if "grpc" in sys.modules:
        sys.exit(f"{name} imports grpc")
"""
    modules = [*MODULES, "mlx_ring.agent.head_member"]
    done = subprocess.run(
        [sys.executable, "-c", program, *modules],
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("module", "slow"),
    [
        ("mlx_ring.head.head", ("huggingface_hub", "transformers", "mlx", "cryptography", "zeroconf")),
        (
            "mlx_ring.core.lean_imports as lean; lean.import_bare('uvicorn'); import mlx_ring.head.head",
            ("uvicorn.main", "click", "multiprocessing"),
        ),
        (
            "mlx_ring.agent.__main__, mlx_ring.agent.head_member, mlx_ring.worker.profile.__main__",
            ("numpy", "cryptography", "pydantic", "mlx"),
        ),
        ("mlx_ring.agent.member", ("numpy", "mlx")),
        ("mlx_ring.worker.__main__", ("numpy", "cryptography", "pydantic")),
        ("mlx_ring.cli.app, mlx_ring.cli.processes", ("numpy", "rich", "yaml")),
        ("mlx_ring.cli.startup", ("numpy", "rich")),
        ("mlx_ring.cli.join", ("numpy", "rich", "zeroconf", "cryptography")),
        (
            (
                "mlx_ring.cli.cluster, mlx_ring.cluster.lifecycle.verbs, "
                "mlx_ring.cli.on_host, mlx_ring.cluster.lifecycle.host_side"
            ),
            ("numpy", "mlx_ring.planner", "zeroconf"),
        ),
    ],
)
def test_processes_start_without_libraries_that_they_may_never_need(
    module: str, slow: tuple[str, ...]
) -> None:
    """Keep out what takes long to import. A model of the hub brings its client, and a cluster its certificates."""
    program = f"import sys, {module}; print([name for name in {slow} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", program], env=clean_environment(), check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]"


def test_a_worker_starts_without_numpy() -> None:
    """NumPy takes a fifth of a worker's start, and is needed with grammars, GGUF files and slow CPUs alone."""
    program = """
import sys
from mlx_ring.core.lean_imports import import_mlx_lm
import_mlx_lm()
import mlx_ring.worker.server
from mlx_lm.models import llama, qwen3
print([name for name in ("numpy", "llguidance", "transformers") if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], env=clean_environment(), check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]"


def test_numpy_is_there_before_the_first_frame_is_packed() -> None:
    program = """
import sys
from mlx_ring.rpc.frames import Packer
before = "numpy" in sys.modules
Packer(1e9)
print(before, "numpy" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], env=clean_environment(), check=True, capture_output=True, text=True
    )
    assert done.stdout.split() == ["False", "True"]


def test_garbage_is_collected_again_after_imports() -> None:
    with importing():
        assert not gc.isenabled()
    assert gc.isenabled()


@pytest.mark.parametrize("module", ["mlx_ring.agent.__main__", "mlx_ring.worker.__main__"])
def test_agents_and_workers_leave_their_first_imports_out_of_garbage_collections(module: str) -> None:
    program = f"import gc, {module}; print(gc.get_freeze_count() > 0, gc.isenabled())"
    done = subprocess.run(
        [sys.executable, "-c", program], env=clean_environment(), check=True, capture_output=True, text=True
    )
    assert done.stdout.split() == ["True", "True"]
