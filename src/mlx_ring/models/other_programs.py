"""Models that other programs have downloaded: LM Studio's folders, and ollama's files by its manifests. They are read in place."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from mlx_ring.core.environment import library_variable

_LM_STUDIO = (".lmstudio/models", ".cache/lm-studio/models")
_OLLAMA = ".ollama/models"
_REGISTRY = "registry.ollama.ai"
_LIBRARY = "library"
_USUAL_TAG = "latest"
_WEIGHTS = "application/vnd.ollama.image.model"
_LARGEST_MANIFEST = 1 << 20


def _home() -> Path | None:
    try:
        return Path.home()
    except RuntimeError:  # the user has no home
        return None


# ---- LM Studio


def lm_studio_folders() -> Iterator[tuple[str, Path]]:
    """Yield the folders of models that LM Studio keeps, as publisher/name, with the folder of each."""
    for root in _lm_studio_roots():
        for config in sorted(root.glob("*/*/config.json")):
            folder = config.parent
            yield f"{folder.parent.name}/{folder.name}", folder


def lm_studio_folder(name: str) -> Path | None:
    """Return LM Studio's folder of a model of the hub; None if it has none."""
    folders = (root / name for root in _lm_studio_roots())
    return next((folder for folder in folders if (folder / "config.json").is_file()), None)


def lm_studio_files() -> Iterator[Path]:
    """Yield the GGUF files of LM Studio."""
    for root in _lm_studio_roots():
        yield from sorted(root.glob("*/*/[!.]*.gguf"))  # macOS writes `._` files on other disks


def _lm_studio_roots() -> list[Path]:
    home = _home()
    return [] if home is None else [home / place for place in _LM_STUDIO if (home / place).is_dir()]


# ---- ollama


def ollama_models() -> Mapping[str, Path]:
    """Return the GGUF files of ollama's models by name, such as `qwen3:8b`.

    A name has the tag always, and its owner or registry if that is not the usual one.
    """
    root = _ollama_root()
    if root is None:
        return {}
    manifests = root / "manifests"
    return {
        _ollama_name(path.relative_to(manifests).parts): weights
        for path in sorted(manifests.glob("*/*/*/*"))
        if (weights := _weights_of(path, root)) is not None
    }


def ollama_file(name: str) -> Path | None:
    """Return the GGUF file of one of ollama's models; None if it has none of this name."""
    tagged = name if ":" in name.rpartition("/")[2] else f"{name}:{_USUAL_TAG}"
    return ollama_models().get(tagged)


def _ollama_root() -> Path | None:
    given, home = library_variable("OLLAMA_MODELS"), _home()
    root = Path(given) if given else home and home / _OLLAMA
    return root if root is not None and (root / "manifests").is_dir() else None


def _ollama_name(parts: tuple[str, ...]) -> str:
    registry, owner, model, tag = parts
    owners = [] if owner == _LIBRARY and registry == _REGISTRY else [owner]
    return "/".join([*([] if registry == _REGISTRY else [registry]), *owners, f"{model}:{tag}"])


def _weights_of(manifest: Path, root: Path) -> Path | None:
    """Return the file of the weights that a manifest names; None if it is no manifest, or the file is missing."""
    try:
        if manifest.stat().st_size > _LARGEST_MANIFEST:
            return None
        content = cast("dict[str, Any]", json.loads(manifest.read_text("utf-8")))
        layers = [layer for layer in content["layers"] if layer["mediaType"] == _WEIGHTS]
        # Several are the parts of one model, which no single file can be read for.
        if len(layers) != 1:
            return None
        kind, _, digest = str(layers[0]["digest"]).partition(":")
        blob = root / "blobs" / f"{kind}-{digest}"
        is_whole = digest.isalnum() and kind.isalnum() and blob.stat().st_size == layers[0]["size"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return blob if is_whole else None
