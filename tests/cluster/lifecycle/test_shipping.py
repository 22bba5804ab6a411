"""The program as an archive."""

from __future__ import annotations

import io
import tarfile

from mlx_ring.cluster.lifecycle.shipping import archived_files, needed_distributions


def test_all_that_is_required_here_is_named_once_and_no_more() -> None:
    names = [found.name.lower() for found in needed_distributions()]
    assert {"mlx-ring", "mlx", "mlx-lm", "grpcio", "numpy", "typer"} <= set(names)
    assert len(set(names)) == len(names)
    assert not {"pytest", "ruff", "pyright"} & set(names)


def test_the_package_is_taken_from_where_it_runs_with_its_metadata_and_its_data() -> None:
    names = [name for name, _ in archived_files()]
    assert {"mlx_ring/cli/main.py", "mlx_ring/builtin_models/demo/config.json"} <= set(names)
    assert any(name.startswith("mlx_ring-") and name.endswith(".dist-info/METADATA") for name in names)
    assert any(name.startswith("mlx/") for name in names)
    assert not any(".." in name or "__pycache__" in name or name.endswith(".pth") for name in names)
    assert len(set(names)) == len(names)


def test_names_and_files_make_an_archive() -> None:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w|") as archive:
        for name, path in archived_files():
            if name.startswith("mlx_ring/core/"):
                archive.add(path, name, recursive=False)
    stream.seek(0)
    with tarfile.open(fileobj=stream) as archive:
        assert "mlx_ring/core/errors.py" in archive.getnames()
