"""Installation from a checkout by pip alone, as the README describes it, into an empty environment."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.conformance, pytest.mark.timeout(900)]
MULTIPLY = "import mlx_cpu_kernels; print(mlx_cpu_kernels.speed_up())"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed") / "environment"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    subprocess.run([folder / "bin/pip", "install", "--quiet", str(ROOT)], check=True)
    return folder


def run(environment: Path, *command: str, variables: Mapping[str, str] = {}) -> str:
    done = subprocess.run(
        [str(environment / "bin" / command[0]), *command[1:]],
        env={"HOME": str(environment), "PATH": "/usr/bin:/bin", **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_wheel_holds_both_packages(environment: Path) -> None:
    assert run(environment, "mlx-ring", "--version").startswith("mlx-ring ")
    assert (
        run(environment, "python", "-c", "import mlx_cpu_kernels.build as b; print(b.SOURCES.is_dir())")
        == "True"
    )


@pytest.mark.skipif(sys.platform != "linux", reason="the kernels are for Linux")
def test_kernels_are_compiled_on_request_and_used(environment: Path) -> None:
    without = run(environment, "python", "-c", MULTIPLY)
    assert "they are not built" in without
    binary = run(environment, "python", "-m", "mlx_cpu_kernels.build")
    assert Path(binary).is_relative_to(environment)
    assert "native kernels" in run(environment, "python", "-c", MULTIPLY)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernels are for Linux")
@pytest.mark.parametrize("target", ["test", "sanitized"])
def test_every_instruction_set_equals_the_scalar_reference(tmp_path: Path, target: str) -> None:
    native = ROOT / "packages/mlx-cpu-kernels/src/mlx_cpu_kernels/native"
    subprocess.run(["make", "-j2", "-C", str(native), f"BUILD={tmp_path}", target], check=True)
