"""Copies of a model's folder with the tensors of some layers only: files of the same names and sizes, with holes.

A mark in the folder names its layers, so that no others are read from it as zeros.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO, cast

from mlx_ring.core.errors import ModelCorrupt, PlanError
from mlx_ring.core.types import LayerRange
from mlx_ring.models.layer_tensors import tensors_of_stage
from mlx_ring.models.model_folder import SMALL_FILES, ModelFolder, WeightFile

STAGE_FILE = "mlx-ring-stage.json"


_COPY_BYTES = 4 << 20


def small_files(path: Path) -> list[str]:
    """Return the names of a model folder's files beside its weights, in order."""
    found = {file.name for pattern in SMALL_FILES for file in path.glob(pattern) if file.is_file()}
    return sorted({name for name in found if not name.startswith(".")} - {STAGE_FILE})


def stage_bytes(folder: ModelFolder, layers: LayerRange) -> int:
    """Return the bytes of a stage's tensors."""
    return sum(entry.nbytes for entry in tensors_of_stage(folder, layers))


def write_stage_folder(
    folder: ModelFolder, layers: LayerRange, target: Path, progress: Callable[[int], None]
) -> None:
    """Make `target`, from which a worker can load these layers; it appears whole or not at all.

    Args:
        progress: receives the bytes of tensors copied since its last call.

    Raises:
        PlanError: `target` exists, or cannot be written.
    """
    require_absent(target)
    aside = target.with_name(f".{target.name}.new")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        for name in small_files(folder.path):
            shutil.copyfile(folder.path / name, aside / name)
        for file in folder.weight_files:
            _copy_tensors(folder, file, layers, aside / file.name, progress)
        mark_stage_folder(aside, layers)
        aside.rename(target)
    except OSError as error:
        raise PlanError(f"{target} cannot be written: {error.strerror}.") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def require_absent(target: Path) -> None:
    """Refuse to make a stage's folder over something else. Raises `PlanError`."""
    if target.exists():
        raise PlanError(f"{target} already exists: remove it, or choose another folder with --out.")


def mark_stage_folder(path: Path, layers: LayerRange) -> None:
    """Write the mark that names the folder's layers."""
    (path / STAGE_FILE).write_text(
        json.dumps({"layers": [layers.start, layers.end]}) + "\n", encoding="utf-8"
    )


def _copy_tensors(
    folder: ModelFolder, file: WeightFile, layers: LayerRange, target: Path, progress: Callable[[int], None]
) -> None:
    wanted = [entry for entry in tensors_of_stage(folder, layers) if entry.file == file.name]
    with (folder.path / file.name).open("rb") as source, target.open("wb") as copy:
        copy.truncate(file.nbytes)
        _copy_ranges(source, copy, [(0, file.header_bytes)], lambda _count: None)
        _copy_ranges(source, copy, sorted((entry.offset, entry.nbytes) for entry in wanted), progress)


def _copy_ranges(
    source: BinaryIO, copy: BinaryIO, ranges: Iterable[tuple[int, int]], progress: Callable[[int], None]
) -> None:
    for offset, nbytes in ranges:
        source.seek(offset)
        copy.seek(offset)
        left = nbytes
        while left and (data := source.read(min(left, _COPY_BYTES))):
            left -= copy.write(data)
            progress(len(data))


def require_layers(path: Path, layers: LayerRange) -> None:
    """Raise `ModelCorrupt` if the folder is marked for other layers.

    Fewer do not suffice either: the last ones come with the output head, and the first with the embedding.
    """
    held = _held(path / STAGE_FILE)
    if held is not None and held != layers:
        raise ModelCorrupt(
            f"{path} was made for layers {held}, but layers {layers} are needed: use the folder of that "
            "stage, or the whole model."
        )


def is_whole(path: Path) -> bool:
    """Report whether the folder is not marked, so that it has the weights of all layers."""
    return _held(path / STAGE_FILE) is None


def require_whole(path: Path) -> None:
    """Raise `ModelCorrupt` if the folder is marked, because other nodes can only fetch from a whole model."""
    held = _held(path / STAGE_FILE)
    if held is not None:
        raise ModelCorrupt(
            f"{path} holds layers {held} only: other nodes need a folder with the whole model."
        )


def _held(mark: Path) -> LayerRange | None:
    if not mark.is_file():
        return None
    try:
        start, end = cast("dict[str, Any]", json.loads(mark.read_text(encoding="utf-8")))["layers"]
        return LayerRange(int(start), int(end))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ModelCorrupt(f"{mark} cannot be parsed: create the folder again.") from error
