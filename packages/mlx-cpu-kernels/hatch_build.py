"""Wheels with a compiled binary: `MLX_CPU_KERNELS_FOR_MLX=0.32.4 pip wheel --no-deps .` makes one for that MLX.

The Python that runs pip is the one that the binary is for. Without the variable a wheel has the sources alone, for all.
"""

from __future__ import annotations

import os
import platform
import re
import sys
import tempfile
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import sys_tags

VARIABLE = "MLX_CPU_KERNELS_FOR_MLX"
PACKAGE = "mlx_cpu_kernels"
# Newest symbols of the C++ library, GLIBCXX_3.4.N, of the distributions that have a C library 2.N.
LIBRARIES = ((30, 35), (32, 38), (33, 39))


class BinaryHook(BuildHookInterface):
    """Compiles the kernels into a wheel, and tags it with the Python and the system that it is for."""

    def dependencies(self) -> list[str]:
        """Return what the binary is compiled for; pip installs it where it builds the wheel."""
        return [f"mlx[cpu]=={_mlx()}", "nanobind==3.1.0"] if _mlx() else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile and try the binary, unless the wheel is for all, or only refers to the sources."""
        if version == "editable" or not _mlx():
            return
        sys.path.insert(0, str(Path(self.root, "src")))
        from mlx_cpu_kernels.build import Target, build

        target = Target.installed()
        if target.mlx.version != _mlx():
            raise RuntimeError(f"MLX {target.mlx.version} is installed, not {_mlx()}.")
        self._folder = (
            tempfile.TemporaryDirectory()
        )  # as long as this object, because the wheel is written later
        binary = build(target, Path(self._folder.name))
        build_data["force_include"][str(binary)] = f"{PACKAGE}/binaries/{target.key}/{binary.name}"
        tag = next(iter(sys_tags()))
        build_data["pure_python"] = False
        build_data["tag"] = f"{tag.interpreter}-{tag.abi}-{_platform(binary)}"


def _mlx() -> str:
    """Return the version of MLX that a binary is wanted for; empty if none is."""
    return os.environ.get(VARIABLE, "")


def _platform(binary: Path) -> str:
    """Return the tag of the oldest system that the binary loads on: MLX's own, or one of newer libraries."""
    content = binary.read_bytes()
    needed = [int(minor) for minor in re.findall(rb"GLIBC_2\.(\d+)\0", content)]
    symbols = max((int(minor) for minor in re.findall(rb"GLIBCXX_3\.4\.(\d+)\0", content)), default=0)
    needed += next(([libc] for known, libc in LIBRARIES if symbols <= known), [])
    if symbols > LIBRARIES[-1][0]:
        raise RuntimeError(f"Compile with an older compiler: no known system has GLIBCXX_3.4.{symbols}.")
    own = distribution("mlx").read_text("WHEEL") or ""
    needed += [int(minor) for minor in re.findall(r"manylinux_2_(\d+)_", own)]
    return f"manylinux_2_{max(needed)}_{platform.machine()}"
