"""Building of the kernels: what it needs, what it refuses, and where binaries are kept."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from dataclasses import replace
from pathlib import Path

import pytest

from mlx_cpu_kernels import build
from mlx_cpu_kernels.build import Target, Unavailable, find_binary

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernels are for Linux")
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")


@pytest.fixture
def target() -> Target:
    return Target.installed()


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Replace the virtual environment and the user's cache; return their folders of binaries."""
    environment, cache = tmp_path / "environment", tmp_path / "cache"
    monkeypatch.setattr(sys, "prefix", str(environment))
    monkeypatch.setattr(sys, "base_prefix", "/usr")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    return environment / "lib/mlx-cpu-kernels", cache / "mlx-cpu-kernels"


def put(folder: Path) -> Path:
    folder.mkdir(parents=True)
    path = folder / f"_kernels{SUFFIX}"
    path.touch()
    return path


def test_a_binary_is_found_in_the_environment_before_the_users_cache(
    target: Target, folders: tuple[Path, Path]
) -> None:
    environment, cache = folders
    assert find_binary(target) is None
    of_user = put(cache / target.key)
    assert find_binary(target) == of_user
    assert find_binary(target) == of_user
    of_environment = put(environment / target.key)
    assert find_binary(target) == of_environment


def test_a_binary_of_another_mlx_or_nanobind_is_not_found(target: Target, folders: tuple[Path, Path]) -> None:
    put(folders[0] / target.key)
    assert find_binary(replace(target, mlx=replace(target.mlx, version="0.32.5"))) is None
    assert find_binary(replace(target, nanobind=replace(target.nanobind, version="2.15.0"))) is None


def test_changed_sources_are_compiled_again(
    target: Target, folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(folders[0] / target.key)
    sources = tmp_path / "native"
    sources.mkdir()
    monkeypatch.setattr(build, "SOURCES", sources)
    assert find_binary(Target.installed()) is None


def test_without_a_compiler_the_reason_is_one_sentence(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(Unavailable, match=r"^no C\+\+ compiler was found \(g\+\+, c\+\+, clang\+\+\)$"):
        build.build(target)


def test_without_pythons_headers_the_missing_file_is_named(
    target: Target, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    with pytest.raises(Unavailable, match=rf"^Python's headers are missing: {tmp_path}/Python\.h$"):
        build.build(target, tmp_path)


def test_an_mlx_without_headers_is_refused(target: Target, tmp_path: Path) -> None:
    bare = replace(target, mlx=replace(target.mlx, folder=tmp_path))
    with pytest.raises(Unavailable, match=r"^this MLX carries no headers"):
        build.build(bare, tmp_path)


def test_a_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "find_spec", dict[str, None]().get)
    with pytest.raises(Unavailable, match=r"^the package mlx is not installed$"):
        Target.installed()


@pytest.mark.processes
def test_the_compilers_first_error_is_the_reason(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text(
        "#!/bin/sh\necho 'note: here' >&2\necho 'a.cpp:1: error: no such thing' >&2\nexit 1\n"
    )
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(Unavailable, match=r"compiler failed: a\.cpp:1: error: no such thing$"):
        build.build(target, tmp_path / "binaries")
    assert not list((tmp_path / "binaries").rglob("*.so"))


def test_another_nanobinds_binary_is_refused(target: Target, tmp_path: Path) -> None:
    binary = tmp_path / "binary.so"
    binary.write_bytes(b"\0nanobind_system_libstdcpp_gxx_abi_1xxx_use_cxx11_abi_1_a1_v99\0")
    with pytest.raises(
        Unavailable, match=r"^nanobind 3\.1\.0 shares no types with this MLX, which needs nanobind_\w+_v22$"
    ):
        build._check_internals(target, binary)  # pyright: ignore[reportPrivateUsage]


@pytest.mark.processes
def test_the_command_prints_the_binary_or_one_sentence(tmp_path: Path) -> None:
    environment = {"PATH": "/nonexistent", "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "mlx_cpu_kernels.build"]
    missing = subprocess.run(
        [*command, "--into", str(tmp_path)], env=environment, capture_output=True, text=True, check=False
    )
    assert missing.returncode == 1
    assert missing.stderr == (
        "The native kernels cannot be built: no C++ compiler was found (g++, c++, clang++).\n"
    )
    found = find_binary(Target.installed())
    if found is not None:
        done = subprocess.run(
            command, env={**os.environ, **environment}, capture_output=True, text=True, check=True
        )
        assert done.stdout == f"{found}\n"
