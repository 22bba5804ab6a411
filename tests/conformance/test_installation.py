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

from mlx_cpu_kernels.build import Target, extension_flags

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "packages/mlx-cpu-kernels"
pytestmark = [pytest.mark.conformance, pytest.mark.timeout(900)]
SANITIZED = (
    *("products", "layers", "attention", "prepared_layers", "decoder_layers", "decoder_caches"),
    *("changed_layers", "hostile_use"),
)
"""Tests of the kernels' package that use the extension."""
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
    assert without.count("they are not built") == 1
    binary = run(environment, "python", "-m", "mlx_cpu_kernels.build")
    assert Path(binary).is_relative_to(environment)
    assert "; native kernels (" in run(environment, "python", "-c", MULTIPLY)


@pytest.fixture(scope="module")
def native_build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("native")


def make_kernels(build: Path, target: str, **variables: str) -> None:
    given = [f"{name}={value}" for name, value in {"BUILD": build, **variables}.items()]
    subprocess.run(
        ["make", "-j2", "-C", str(KERNELS / "src/mlx_cpu_kernels/native"), *given, target], check=True
    )


@pytest.mark.skipif(sys.platform != "linux", reason="the kernels are for Linux")
@pytest.mark.parametrize("target", ["test", "sanitized"])
def test_every_instruction_set_equals_the_scalar_reference(native_build: Path, target: str) -> None:
    make_kernels(native_build, target)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernels are for Linux")
@pytest.mark.timeout(2400)
def test_the_sanitizers_find_nothing_in_the_extension(native_build: Path) -> None:
    """Run the package's own tests with a binary that AddressSanitizer and UndefinedBehaviorSanitizer watch.

    Python and MLX leave memory at their end, so leaks are not looked for.
    """
    names = ("libasan.so", "libubsan.so", "libstdc++.so.6")
    found = [
        subprocess.check_output(["g++", f"-print-file-name={name}"], text=True).strip() for name in names
    ]
    if not all(Path(library).is_absolute() for library in found):
        pytest.skip(f"g++ has no {', '.join(names)}")
    target = Target.installed()
    make_kernels(
        native_build,
        "sanitized_extension",
        EXTENSION_FLAGS=" ".join(extension_flags(target)),
        MLX=str(target.mlx.folder),
        NANOBIND=str(target.nanobind.folder),
    )
    variables = {
        "TESTED_KERNELS": str(native_build / "sanitized/_kernels.so"),
        "LD_PRELOAD": ":".join(found),
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONMALLOC": "malloc",
    }
    tests = [str(KERNELS / f"tests/test_{name}.py") for name in SANITIZED]
    command = [
        "env",
        *(f"{name}={value}" for name, value in variables.items()),
        sys.executable,
        "-m",
        "pytest",
    ]
    command += ["-q", "-n", "2", "-m", "not slow", *tests]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


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
