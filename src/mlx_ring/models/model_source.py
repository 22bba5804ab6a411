"""Sources of a model's folder: the package, the disk, a GGUF file, or the hub (`hub.py`).

A GGUF file gets a folder in the user's cache, once for each state of the file. It has the small files that a model's
folder has, and a link to the GGUF file. Everything else works with that folder: workers read ranges of the file.
"""

from __future__ import annotations

import contextlib
import difflib
import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mlx_ring.core.environment import cache_folder, package_version
from mlx_ring.core.errors import ConfigError, ModelCorrupt, ModelError, ModelNotFound, ModelUnsafe
from mlx_ring.models.gguf import MAGIC, SUFFIX, read_gguf, read_range
from mlx_ring.models.gguf.model_config import small_files_of
from mlx_ring.models.model_folder import (
    ModelFolder,
    read_gguf_model,
    read_model_config,
    read_model_folder,
)

BUILTIN_FOLDER = Path(__file__).resolve().parent.parent / "builtin_models"
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_LONGEST_STEM = 100
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")

SourceKind = Literal["built-in", "folder", "file", "hub"]


@dataclass(frozen=True, slots=True)
class LocalModel:
    """Model that can be served without fetching anything."""

    name: str
    kind: SourceKind
    folder: ModelFolder


def builtin_names() -> list[str]:
    """Return the names of the models in the package."""
    if not BUILTIN_FOLDER.is_dir():
        return []
    return sorted(path.name for path in BUILTIN_FOLDER.iterdir() if (path / "config.json").is_file())


def list_local_models() -> Iterator[LocalModel]:
    """List built-in models, the complete ones in the hub's cache, and GGUF files: there, and those served before.

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
    for file in dict.fromkeys([*_linked_files(), *hub.cached_gguf_files()]):
        with contextlib.suppress(ModelError):
            yield LocalModel(str(file), "file", read_gguf_model(_parts(file)))


def find_model(name: str, *, must_fit: bool = False) -> LocalModel:
    """Return the model's folder; fetch it from the hub if necessary.

    Args:
        name: a built-in name, a folder or GGUF file, or a hub id, tried in this order.
        must_fit: whether to refuse a model that is too large for this machine's memory before fetching it.

    Raises:
        ModelNotFound: there is none of that name, or the hub cannot be reached.
        ModelCorrupt, ModelUnsafe: the folder cannot be served.
        PlanError: its weights do not fit this machine's disk, or memory that must hold them.
    """
    if name in builtin_names():
        return LocalModel(name, "built-in", read_model_folder(BUILTIN_FOLDER / name))
    path = _path(name)
    if _is_gguf(path):
        return LocalModel(_gguf_name(path), "file", read_model_folder(_folder_of_gguf(path.absolute())))
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
        name: a built-in name, a folder, a GGUF file, a config.json, or a hub id, whose configuration is fetched.

    Raises:
        ModelNotFound: there is none of that name, or the hub cannot be reached.
        ModelCorrupt, ModelUnsafe: the files cannot be read.
    """
    path = _path(name)
    if name not in builtin_names() and _is_there(path):
        if _is_gguf(path):
            return LocalModel(_gguf_name(path), "file", read_gguf_model(_parts(path.absolute())))
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
        f"There is no model {name!r}: it is no folder, no GGUF file, no hub id such as Qwen/Qwen3-0.6B, "
        f"and none of the built-in models ({', '.join(names)}).{meant}"
    )


def _folder_of_gguf(file: Path) -> Path:
    """Return the folder of a GGUF file, which is made if it is missing or the file has changed.

    Args:
        file: the file, or any part of one that was split.

    Raises:
        ModelNotFound: a part of the file is missing.
        ModelCorrupt, ModelUnsupported: It cannot be served.
        ConfigError: the cache cannot be written.
    """
    parts = _parts(file)
    root = _gguf_folders()
    target = root / f"{_gguf_name(file)[:_LONGEST_STEM]}-{_identity(parts)}"
    if target.is_dir():
        return target
    contents = small_files_of([read_gguf(part) for part in parts])
    try:
        root.mkdir(parents=True, exist_ok=True)
        _remove_outdated(root)
        aside = Path(tempfile.mkdtemp(prefix=".new-", dir=root))
        try:
            for name, content in contents.items():
                (aside / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
            for part, name in zip(parts, _link_names(len(parts)), strict=True):
                (aside / name).symlink_to(part)
            if not target.is_dir():
                aside.rename(target)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    except OSError as error:
        if not target.is_dir():
            raise ConfigError(
                f"{root} cannot be written ({error.strerror}), but the configuration of a GGUF file is kept there: free "
                "some space, or set XDG_CACHE_HOME to another folder."
            ) from error
    return target


def _gguf_name(file: Path) -> str:
    """Return the name of a GGUF file's model: the file's own, without the number of a part."""
    found = _PART.fullmatch(file.name)
    return found["stem"] if found else file.name.removesuffix(SUFFIX)


def _gguf_folders() -> Path:
    """Return the folder with the folders of all GGUF files that were used."""
    return cache_folder() / "gguf"


def _linked_files() -> list[Path]:
    """Return the GGUF files that were used and are still there, first parts only."""
    return [link.readlink() for link in _links(_gguf_folders()) if link.exists()]


def _links(root: Path) -> list[Path]:
    """Return the links to GGUF files, of those in parts to the first. The files may be lost."""
    first = re.compile(rf"model(-00001-of-\d+)?\{SUFFIX}")
    return sorted(link for link in root.glob(f"*/model*{SUFFIX}") if first.fullmatch(link.name))


def _is_gguf(file: Path) -> bool:
    """Report whether a file is named as a GGUF file, or begins like one."""
    try:
        return file.is_file() and (file.suffix == SUFFIX or read_range(file, 0, len(MAGIC)) == MAGIC)
    except (OSError, ModelCorrupt):
        # A name may be longer than any may be.
        return False


def _parts(file: Path) -> list[Path]:
    """Return the files of a model, by the name of any of them. Raises `ModelNotFound` if one is missing."""
    found = _PART.fullmatch(file.name)
    count = int(found["count"]) if found else 0
    if found is None or count == 0:
        return [file]
    parts = [
        file.with_name(f"{found['stem']}-{number:05}-of-{count:05}{SUFFIX}") for number in range(1, count + 1)
    ]
    missing = next((part for part in parts if not part.is_file()), None)
    if missing is not None:
        raise ModelNotFound(f"{file} is one of {count} parts, but {missing} is not there: fetch it too.")
    return parts


def _link_names(count: int) -> list[str]:
    """Return the parts' names in the folder."""
    if count == 1:
        return [f"model{SUFFIX}"]
    return [f"model-{number:05}-of-{count:05}{SUFFIX}" for number in range(1, count + 1)]


def _identity(parts: Iterable[Path]) -> str:
    """Return a digest of the files' places and states, and of this version."""
    marks = [(str(part), status.st_size, status.st_mtime_ns) for part in parts for status in [part.stat()]]
    return hashlib.sha256(json.dumps([package_version("mlx-ring"), marks]).encode()).hexdigest()[:16]


def hold_folder(folder: Path) -> None:
    """Keep a GGUF file's folder as long as this process runs, also if the file is replaced or removed meanwhile."""
    if folder.parent == _gguf_folders() and folder not in _held:
        with contextlib.suppress(OSError):  # a file system without locks
            _held[folder] = descriptor = os.open(folder, os.O_RDONLY)
            fcntl.flock(descriptor, fcntl.LOCK_SH)


_held: dict[Path, int] = {}
"""Open descriptors of folders that this process holds."""


def _remove_unless_held(folder: Path) -> None:
    with contextlib.suppress(OSError):  # another process holds it, or has removed it
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(descriptor)


def _remove_outdated(root: Path) -> None:
    """Remove the folders of files that are no longer there, or have changed since, unless a server holds them."""
    for link in _links(root):
        parts = [part.readlink() for part in sorted(link.parent.glob(f"model*{SUFFIX}"))]
        is_current = all(map(Path.exists, parts)) and link.parent.name.endswith(f"-{_identity(parts)}")
        if not is_current:
            _remove_unless_held(link.parent)
