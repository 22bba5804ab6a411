"""The mark of a folder that holds the tensors of some layers only, so that no others are read from it as zeros."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from mlx_ring.core.errors import ModelCorrupt
from mlx_ring.core.types import LayerRange

STAGE_FILE = "mlx-ring-stage.json"


def mark_stage_folder(path: Path, layers: LayerRange) -> None:
    """Say in the folder which layers it is for."""
    (path / STAGE_FILE).write_text(
        json.dumps({"layers": [layers.start, layers.end]}) + "\n", encoding="utf-8"
    )


def require_layers(path: Path, layers: LayerRange) -> None:
    """Raise `ModelCorrupt` where the folder is marked, and not for exactly these layers.

    Fewer will not do either: the last ones come with the output head, and the first with the embedding.
    """
    held = _held(path / STAGE_FILE)
    if held is not None and held != layers:
        raise ModelCorrupt(
            f"{path} was made for layers {held} and layers {layers} are to be loaded from it: use the folder of that "
            "stage, or the whole model."
        )


def _held(mark: Path) -> LayerRange | None:
    if not mark.is_file():
        return None
    try:
        start, end = cast("dict[str, Any]", json.loads(mark.read_text(encoding="utf-8")))["layers"]
        return LayerRange(int(start), int(end))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ModelCorrupt(f"{mark} cannot be understood: make the folder again.") from error
