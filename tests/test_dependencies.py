"""pyproject.toml declares every package that the sources import, and no other."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import distribution, packages_distributions
from pathlib import Path, PurePosixPath
from typing import cast

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "src" / "mlx_ring"
KERNELS = ROOT / "packages/mlx-cpu-kernels"
OWN = {"mlx_ring": SOURCES, "mlx_cpu_kernels": KERNELS / "src/mlx_cpu_kernels"}
"""Packages of this repository, which one wheel holds, and their sources."""
EXTRAS = {
    "otel": {"core/otlp_traces.py"},
    "plot": {"cli/bench/summary.py"},
    "deploy": {"cluster/lifecycle/wheels.py"},
}
"""Files that may import the packages of an extra, by extra. `serve` and `join` load them only when a setting needs it."""
UNIMPORTED = {
    "zeus-apple-silicon": "imported by name on Macs alone",
    "nanobind": "native kernels are compiled with its headers",
    "scipy-openblas32": "its shared library is loaded, not its module",
}
"""Packages that may be declared without an import of them, each with the reason."""


ELSEWHERE = ("tests/clients/programs", "packages/mlx-cpu-kernels/src")
"""Folders of programs with an environment of their own, and of sources."""


def pyproject(table: str) -> dict[str, object]:
    return cast("dict[str, object]", tomllib.loads((ROOT / "pyproject.toml").read_text())[table])


def project() -> dict[str, object]:
    return pyproject("project")


def names(requirements: object) -> set[str]:
    """Return the normalized package names of a list of requirements."""
    return {normal(re.split(r"[\[<>=!~; ]", each, maxsplit=1)[0]) for each in cast("list[str]", requirements)}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def imported_modules(file: Path) -> Iterator[str]:
    """Yield the dotted names of all third-party modules that a file imports, also in its functions."""
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found = [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            found = [f"{node.module}.{each.name}" for each in node.names]
        else:
            continue
        for name in found:
            top = name.partition(".")[0]
            if top not in sys.stdlib_module_names and top not in OWN:
                yield name


@cache
def owners(module: str) -> frozenset[str]:
    """Return the installed packages that hold a module. Several of them may share a namespace, such as `google`."""
    parts = module.split(".")
    sharing = frozenset(map(normal, distributions_by_module().get(parts[0], ())))
    if len(sharing) == 1:
        return sharing
    for length in range(len(parts), 1, -1):
        if owning := {name for name in sharing if "/".join(parts[:length]) in modules_of(name)}:
            return frozenset(owning)
    return sharing


@cache
def distributions_by_module() -> Mapping[str, list[str]]:
    return packages_distributions()


@cache
def modules_of(name: str) -> frozenset[str]:
    """Return the paths of a package's modules, without suffixes."""
    paths = (PurePosixPath(str(each)) for each in distribution(name).files or ())
    return frozenset(
        str(path.parent if path.name == "__init__.py" else path.parent / path.name.partition(".")[0])
        for path in paths
        if path.suffix in {".py", ".so"}
    )


@cache
def imports() -> tuple[tuple[str, str], ...]:
    """Return (file, module) of every third-party import."""
    return tuple(
        (str(file.relative_to(source)), module)
        for source in OWN.values()
        for file in sorted(source.rglob("*.py"))
        for module in imported_modules(file)
    )


@pytest.mark.slow
def test_every_import_is_declared() -> None:
    declared = names(project()["dependencies"])
    extras = cast("dict[str, list[str]]", project()["optional-dependencies"])
    missing: list[str] = []
    for file, module in imports():
        allowed = declared.union(*(names(extras[extra]) for extra, files in EXTRAS.items() if file in files))
        if not owners(module) & allowed:
            missing.append(f"{file} imports {module} of {' or '.join(owners(module)) or 'no package'}")
    assert not missing, "\n".join(missing)


def test_benches_and_scripts_find_what_they_import_from_the_tests() -> None:
    """Expect the checkout on the path before such an import, because Python puts only the program's own folder there."""
    for folder in ("bench", "scripts"):
        for path in (ROOT / folder).glob("*.py"):
            nodes = list(ast.walk(ast.parse(path.read_text("utf-8"))))
            imports = [
                node.lineno
                for node in nodes
                if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tests"
            ]
            found = [
                node.lineno
                for node in nodes
                if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("sys.path.")
            ]
            assert not imports or (found and min(found) < min(imports)), path.name


@pytest.mark.slow
def test_every_import_of_tests_benches_and_scripts_is_declared() -> None:
    groups = pyproject("dependency-groups").values()
    declared = names(project()["dependencies"]).union(*map(names, groups))
    extras = cast("dict[str, list[str]]", project()["optional-dependencies"])
    declared = declared.union(*map(names, extras.values()))
    files = [
        file
        for folder in ("tests", "bench", "scripts", "packages")
        for file in sorted((ROOT / folder).rglob("*.py"))
        if not file.is_relative_to(ROOT / ELSEWHERE[0]) and not file.is_relative_to(ROOT / ELSEWHERE[1])
    ]
    missing = [
        f"{file.relative_to(ROOT)} imports {module} of {' or '.join(owners(module))}"
        for file in files
        for module in imported_modules(file)
        # Modules without an owner are those of these folders, or of packages that no test needs.
        if owners(module) and not owners(module) & declared
    ]
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_s_packages_are_required_by_nothing_else(extra: str) -> None:
    extras = cast("dict[str, list[str]]", project()["optional-dependencies"])
    assert not names(extras[extra]) & names(project()["dependencies"])
    assert all((SOURCES / file).exists() for file in EXTRAS[extra])


def test_everything_declared_is_imported() -> None:
    used = frozenset[str]().union(*(owners(module) for _, module in imports()))
    extras = cast("dict[str, list[str]]", project()["optional-dependencies"])
    declared = names(project()["dependencies"]).union(*(names(extras[extra]) for extra in EXTRAS))
    assert declared - used == UNIMPORTED.keys()


def test_the_kernels_declare_the_same_versions() -> None:
    """Alone, they need what mlx-ring declares for them."""
    kernels = tomllib.loads((KERNELS / "pyproject.toml").read_text())["project"]
    assert names(kernels["dependencies"]) == {"mlx", "nanobind", "scipy-openblas32"}
    assert set(kernels["dependencies"]) <= set(cast("list[str]", project()["dependencies"]))
    assert kernels["requires-python"] == project()["requires-python"]


def test_the_development_tools_include_all_extras() -> None:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    own = next(each for each in groups["dev"] if each.startswith("mlx-ring["))
    assert set(re.findall(r"\w+", own.partition("[")[2])) == EXTRAS.keys()


@pytest.mark.skipif(sys.platform != "linux", reason="MLX has a build for NVIDIA GPUs on Linux only")
def test_the_build_for_gpus_is_refused_without_a_driver_before_anything_changes(tmp_path: Path) -> None:
    listing = tmp_path / "ldconfig"
    listing.write_text("#!/bin/sh\n")
    listing.chmod(0o755)
    path = f"{tmp_path}:/usr/bin:/bin"
    for flag, sentence in (
        ("--cuda", "No driver of an NVIDIA GPU is installed here"),
        ("--gpu", "not '--gpu'"),
    ):
        done = subprocess.run(
            [ROOT / "scripts/setup", flag], env={"PATH": path}, capture_output=True, text=True, check=False
        )
        assert done.returncode
        assert sentence in done.stderr
        assert not done.stdout


@pytest.mark.parametrize(
    ("system", "machine", "taken"),
    [("darwin", "x86_64", False), ("darwin", "arm64", True), ("linux", "x86_64", True)],
)
def test_setup_passes_over_a_python_that_rosetta_translates(
    tmp_path: Path, system: str, machine: str, *, taken: bool
) -> None:
    stand_in = tmp_path / "python3"
    stand_in.write_text(
        f"#!{sys.executable}\nimport platform, sys\n"
        f"sys.platform, platform.machine = {system!r}, lambda: {machine!r}\nexec(sys.argv[2])\n"
    )
    stand_in.chmod(0o755)
    found = re.search(
        r"^interpreter\(\) \{\n.*?^\}$", (ROOT / "scripts/setup").read_text(), re.MULTILINE | re.DOTALL
    )
    assert found is not None
    done = subprocess.run(
        ["bash", "-c", f'{found[0]}\ninterpreter "$0"', stand_in], capture_output=True, text=True, check=False
    )
    assert (done.returncode == 0, done.stdout.strip() != "") == (taken, taken), done.stderr


def test_the_guide_to_installing_names_the_present_version() -> None:
    named = set(
        re.findall(r"mlx_ring-(\d[\w.]*?)(?:-py3|\.tar)", (ROOT / "docs/install.md").read_text("utf-8"))
    )
    assert named == {tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]}
