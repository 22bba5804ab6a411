"""Fast BLAS, compared with NumPy, and its refusal where it cannot work. Scenarios run in processes of their own."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import blas_scenarios
import pytest
from blas_scenarios import SCENARIOS, assert_inactive, products_of_all_shapes_equal_numpys

from mlx_cpu_kernels.blas import install, install_fast_blas

on_linux_x86_64 = pytest.mark.skipif(
    (platform.system(), platform.machine()) != ("Linux", "x86_64"),
    reason="OpenBLAS is used on Linux x86-64 only",
)


def run_alone(scenario: str, core_type: str | None = None) -> str:
    """Run a scenario in a process of its own; return what it printed."""
    environment = {"OPENBLAS_CORETYPE": core_type} if core_type else {}
    process = subprocess.run(
        [sys.executable, str(blas_scenarios.__file__), scenario],
        env={"HOME": "/nonexistent", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


@on_linux_x86_64
@pytest.mark.processes
@pytest.mark.parametrize("scenario", [function.__name__ for function in SCENARIOS])
def test_scenario_in_its_own_process(scenario: str) -> None:
    run_alone(scenario)


NEEDED = {
    "SkylakeX": {"avx512f", "avx512dq", "avx512bw", "avx512vl"},
    "Haswell": {"avx2", "fma"},
    "SandyBridge": {"avx"},
}
"""Instructions that the kernels of a core type need, as /proc/cpuinfo names them."""


def processor_flags() -> set[str]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return set(next((line for line in lines if line.startswith("flags")), "").split())


@pytest.mark.processes
@on_linux_x86_64
@pytest.mark.parametrize("core_type", [None, "SkylakeX", "Haswell", "SandyBridge", "Nehalem", "Prescott"])
def test_products_with_the_kernels_of_each_processor(core_type: str | None) -> None:
    if not NEEDED.get(core_type or "", set()) <= processor_flags():
        # OpenBLAS uses what the variable names, and these kernels would end the process.
        core_type = None
    run_alone(products_of_all_shapes_equal_numpys.__name__, core_type)


@pytest.fixture
def not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide that the fast BLAS is installed in this process, as the suite's own products need it."""
    monkeypatch.setattr(install, "_installed", None)


@pytest.mark.usefixtures("not_installed")
@pytest.mark.parametrize(
    ("system", "machine", "library"),
    [
        ("Darwin", "arm64", "Accelerate"),
        ("Linux", "aarch64", "the BLAS of the mlx wheel"),
        ("Windows", "AMD64", "the BLAS of the mlx wheel"),
    ],
)
def test_another_platform_keeps_its_own_blas(
    monkeypatch: pytest.MonkeyPatch, system: str, machine: str, library: str
) -> None:
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    report = install_fast_blas()
    assert_inactive(report, "MLX keeps its own BLAS")
    assert report.library == library


@pytest.mark.usefixtures("not_installed")
def test_another_c_library_keeps_its_own_blas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    assert_inactive(install_fast_blas(), "not glibc")


@pytest.mark.processes
def test_importing_the_package_does_not_import_mlx() -> None:
    code = "import sys, mlx_cpu_kernels.blas; sys.exit('mlx.core' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
