"""Installation from a checkout by pip alone, as the README describes it, into an empty environment."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "packages/mlx-cpu-kernels"
pytestmark = [pytest.mark.conformance, pytest.mark.timeout(900)]
MULTIPLY = "import mlx_cpu_kernels; print(mlx_cpu_kernels.speed_up())"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed") / "environment"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    subprocess.run([folder / "bin/pip", "install", "--quiet", str(ROOT)], check=True)
    return folder


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the kernels' wheel with a binary for the MLX that is installed here, as its README describes."""
    folder = tmp_path_factory.mktemp("wheels")
    subprocess.run([sys.executable, "-m", "venv", str(folder / "builder")], check=True)
    run(
        *(
            folder / "builder",
            "pip",
            "wheel",
            "--quiet",
            "--no-deps",
            "--wheel-dir",
            str(folder),
            str(KERNELS),
        ),
        variables={"MLX_CPU_KERNELS_FOR_MLX": version("mlx")},
    )
    (wheel,) = folder.glob("*.whl")
    return wheel


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
    assert "; native kernels (" in run(environment, "python", "-c", MULTIPLY)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernels are for Linux")
@pytest.mark.parametrize("target", ["test", "sanitized"])
def test_every_instruction_set_equals_the_scalar_reference(tmp_path: Path, target: str) -> None:
    native = KERNELS / "src/mlx_cpu_kernels/native"
    subprocess.run(["make", "-j2", "-C", str(native), f"BUILD={tmp_path}", target], check=True)


def test_neon_equals_the_scalar_reference_on_an_emulated_processor(tmp_path: Path) -> None:
    done = subprocess.run([ROOT / "scripts/setup_aarch64"], stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        pytest.skip(f"scripts/setup_aarch64: {done.stderr.strip()}")
    test = KERNELS / "tests/native/test_aarch64"
    output = subprocess.run([test, str(tmp_path)], capture_output=True, text=True, check=False)
    assert output.returncode == 0, output.stdout + output.stderr
    assert output.stdout.count(" 0 failures") == 3


@pytest.mark.skipif(sys.platform != "linux", reason="the kernels are for Linux")
def test_a_wheel_with_a_binary_is_tagged_and_needs_no_compiler(wheel: Path, tmp_path: Path) -> None:
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert re.fullmatch(
        rf"mlx_cpu_kernels-[\d.]+-{python}-{python}t?-manylinux_2_\d+_{platform.machine()}\.whl", wheel.name
    )
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    run(environment, "pip", "install", "--quiet", str(wheel), f"mlx[cpu]=={version('mlx')}")
    without = {"PATH": "/nonexistent"}
    assert "native kernels" in run(environment, "python", "-c", MULTIPLY, variables=without)
    binary = Path(run(environment, "python", "-m", "mlx_cpu_kernels.build", variables=without))
    assert binary.is_relative_to(environment)
    assert binary.parents[1].name == "binaries"


@pytest.mark.skipif(sys.platform != "linux", reason="the kernels are for Linux")
def test_either_distribution_can_be_uninstalled(environment: Path, wheel: Path) -> None:
    """Find the kernels' own distribution first, and what stays whole: both bring the same package.

    It is the last test, and leaves an environment without mlx-ring.
    """
    where = "import mlx_cpu_kernels, mlx_cpu_kernels.build; print(mlx_cpu_kernels.__path__[0])"
    vendored = run(environment, "python", "-c", where)
    assert vendored.endswith("/mlx_ring/vendored/mlx_cpu_kernels")
    run(environment, "pip", "install", "--quiet", str(wheel))
    own = run(environment, "python", "-c", where)
    assert own == vendored.replace("mlx_ring/vendored/", "")
    run(environment, "pip", "uninstall", "--quiet", "--yes", "mlx-cpu-kernels")
    assert run(environment, "python", "-c", where) == vendored
    run(environment, "pip", "install", "--quiet", "--no-deps", str(wheel))
    run(environment, "pip", "uninstall", "--quiet", "--yes", "mlx-ring")
    assert run(environment, "python", "-c", where) == own
