"""Sources of a model's folder: the package, the disk, or the hub (`hub.py`)."""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mlx_ring.core.errors import ModelCorrupt, ModelNotFound, ModelUnsafe
from mlx_ring.models.model_folder import ModelFolder, read_model_config, read_model_folder

BUILTIN_FOLDER = Path(__file__).resolve().parent.parent / "builtin_models"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")

Kind = Literal["built-in", "folder", "hub"]


@dataclass(frozen=True, slots=True)
class LocalModel:
    """Model that can be served without fetching anything."""

    name: str
    kind: Kind
    folder: ModelFolder


def builtin_names() -> list[str]:
    """Return the names of the models in the package."""
    if not BUILTIN_FOLDER.is_dir():
        return []
    return sorted(path.name for path in BUILTIN_FOLDER.iterdir() if (path / "config.json").is_file())


def list_local_models() -> Iterator[LocalModel]:
    """List built-in models, then the complete ones in the hub's cache.

    Folders that need to run code are left out, and those whose configuration gives no size, which are no language models.
    """
    for name in builtin_names():
        yield LocalModel(name, "built-in", read_model_folder(BUILTIN_FOLDER / name))
    from mlx_ring.models import hub  # importing its client takes a while

    for name in hub.cached_ids():
        try:
            folder = hub.complete_in_cache(name)
            if folder is not None:
                _ = folder.num_layers, folder.hidden_size, folder.vocab_size
        except (ModelUnsafe, ModelCorrupt):
            continue
        if folder is not None:
            yield LocalModel(name, "hub", folder)


def find_model(name: str, *, must_fit: bool = False) -> LocalModel:
    """Return the model's folder; fetch it from the hub if necessary.

    Args:
        name: a built-in name, a folder, or a hub id, tried in this order.
        must_fit: whether to refuse a model that is too large for this machine's memory before fetching it.

    Raises:
        ModelNotFound: there is none of that name, or the hub cannot be reached.
        ModelCorrupt, ModelUnsafe: the folder cannot be served.
        PlanError: its weights do not fit this machine's disk, or memory that must hold them.
    """
    if name in builtin_names():
        return LocalModel(name, "built-in", read_model_folder(BUILTIN_FOLDER / name))
    path = _path(name)
    if _is_there(path):
        return LocalModel(path.absolute().name, "folder", read_model_folder(path.absolute()))
    if not _HUB_ID.fullmatch(name) or name.startswith("."):
        raise ModelNotFound(_unknown(name))
    from mlx_ring.models import hub

    return LocalModel(name, "hub", hub.complete_in_cache(name) or hub.fetch(name, must_fit=must_fit))


def must_be_fetched(name: str) -> bool:
    """Report whether the model is the hub's, and incomplete in the cache.

    Raises:
        ModelUnsafe: it needs code of its own to be run.
    """
    if name in builtin_names() or _is_there(_path(name)):
        return False
    if not _HUB_ID.fullmatch(name) or name.startswith("."):
        return False
    from mlx_ring.models import hub

    return hub.complete_in_cache(name) is None


def describe_model(name: str) -> LocalModel:
    """Describe a model without fetching its weights: from their headers if they are here, else from its configuration.

    Args:
        name: a built-in name, a folder, a config.json, or a hub id, whose configuration is fetched.

    Raises:
        ModelNotFound: there is none of that name, or the hub cannot be reached.
        ModelCorrupt, ModelUnsafe: the files cannot be read.
    """
    path = _path(name)
    if name not in builtin_names() and _is_there(path):
        if path.is_file():
            return LocalModel(path.absolute().parent.name, "folder", read_model_config(path.absolute()))
        if not any(path.glob("model*.safetensors")):
            return LocalModel(
                path.absolute().name, "folder", read_model_config(path.absolute() / "config.json")
            )
    if name in builtin_names() or _is_there(path) or not _HUB_ID.fullmatch(name) or name.startswith("."):
        return find_model(name)
    from mlx_ring.models import hub

    return LocalModel(name, "hub", hub.complete_in_cache(name) or hub.fetch_config(name))


def _path(name: str) -> Path:
    """Return the path of a folder. `~` with an unknown user stays as it is."""
    with contextlib.suppress(RuntimeError):
        return Path(name).expanduser()
    return Path(name)


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        # Longer than any name may be.
        return False


def _unknown(name: str) -> str:
    names = builtin_names()
    close = difflib.get_close_matches(name, names, n=1)
    meant = f" Did you mean {close[0]!r}?" if close else ""
    return (
        f"There is no model {name!r}: it is no folder, no hub id such as Qwen/Qwen3-0.6B, "
        f"and none of the built-in models ({', '.join(names)}).{meant}"
    )
