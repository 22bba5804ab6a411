"""Archive of the program for other machines."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from mlx_cpu_kernels.build import Target, find_binary
from mlx_ring.cluster.lifecycle import programs
from mlx_ring.cluster.lifecycle.programs import (
    archived_files,
    needed_distributions,
    of_nobody,
    wanted_here,
    write_archive,
)


def test_an_installed_extra_is_sent_too(monkeypatch: pytest.MonkeyPatch) -> None:
    extra = "opentelemetry-exporter-otlp-proto-http"
    assert extra in {found.name for found in needed_distributions()}
    assert any(text.startswith(extra) and ";" not in text for text in wanted_here().requirements)
    monkeypatch.setattr(programs, "_EXTRAS", ())
    assert extra not in {found.name for found in needed_distributions()}


def test_all_requirements_are_listed_once() -> None:
    names = [found.name.lower() for found in needed_distributions()]
    assert {"mlx-ring", "mlx", "mlx-lm", "grpcio", "numpy", "typer"} <= set(names)
    assert len(set(names)) == len(names)
    assert not {"pytest", "ruff", "pyright"} & set(names)


def test_the_running_package_is_sent_with_its_metadata_and_data() -> None:
    names = [name for name, _ in archived_files()]
    assert {"mlx_ring/cli/main.py", "mlx_ring/builtin_models/demo/config.json"} <= set(names)
    assert any(name.startswith("mlx_ring-") and name.endswith(".dist-info/METADATA") for name in names)
    assert any(name.startswith("mlx/") for name in names)
    assert {"mlx_cpu_kernels/build.py", "mlx_cpu_kernels/native/quantized.h"} <= set(names)
    binaries = {Path(name).parent.name for name in names if name.startswith("mlx_cpu_kernels/binaries/")}
    target = Target.installed()
    assert binaries == ({target.key} if find_binary(target) else set())
    assert not any(".." in name or "__pycache__" in name or name.endswith(".pth") for name in names)
    assert len(set(names)) == len(names)


def test_an_archive_holds_the_named_files() -> None:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w|") as archive:
        for name, path in archived_files():
            if name.startswith("mlx_ring/core/"):
                archive.add(path, name, recursive=False)
    stream.seek(0)
    with tarfile.open(fileobj=stream) as archive:
        assert "mlx_ring/core/errors.py" in archive.getnames()


def test_an_archive_does_not_reveal_its_owner() -> None:
    entry = tarfile.TarInfo("a")
    entry.uid, entry.gid, entry.uname, entry.gname, entry.mode = 501, 20, "me", "staff", 0o4777
    anonymous = of_nobody(entry)
    assert (anonymous.uid, anonymous.gid, anonymous.uname, anonymous.gname, anonymous.mode) == (
        0,
        0,
        "",
        "",
        0o755,
    )


@pytest.mark.timeout(300)
def test_a_program_that_was_sent_can_be_sent_again(tmp_path: Path) -> None:
    first, site = tmp_path / "first.tar", tmp_path / "site"
    with first.open("wb") as stream:
        write_archive(stream)
    site.mkdir()
    # Unpack it like a host does. Before 3.11.4, Python itself has no filter of unsafe members.
    unpack = ("tar", "-xf", str(first), "--no-same-owner", "--no-same-permissions", "-C", str(site))
    subprocess.run(unpack, check=True)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); "
        "from mlx_ring.cluster.lifecycle.programs import archived_files; "
        "print(*sorted(name for name, _ in archived_files()), sep='\\n')"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code, str(site)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == sorted(name for name, _ in archived_files())
