"""Sources of a model's folder: the package, the disk, a GGUF file, the hub (`hub.py`), or another program's folder.

A GGUF file gets a folder in the user's cache, once for each state of the file. It has the small files that a model's
folder has, and a link to the GGUF file. Everything else works with that folder: workers read ranges of the file.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mlx_ring.core.environment import package_version
from mlx_ring.core.errors import ConfigError, Conflict, ModelCorrupt, ModelError, ModelNotFound
from mlx_ring.core.folders import absolute_path, cache_folder, is_there, typed_path
from mlx_ring.host.private_files import hold, is_held, lock_open_file, may_remove
from mlx_ring.models.config_limits import require_loadable
from mlx_ring.models.gguf import MAGIC, SUFFIX, read_gguf, read_range
from mlx_ring.models.gguf.model_config import small_files_of
from mlx_ring.models.model_folder import (
    ModelFolder,
    Report,
    has_tokenizer,
    read_gguf_model,
    read_model_config,
    read_model_folder,
)
from mlx_ring.models.other_programs import (
    lm_studio_files,
    lm_studio_folder,
    lm_studio_folders,
    ollama_file,
    ollama_models,
)
from mlx_ring.models.short_names import find_hub_id, is_hub_id, short_names_of, unknown_model

log = logging.getLogger(__name__)

BUILTIN_FOLDER = Path(__file__).resolve().parent.parent / "builtin_models"
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_LONGEST_STEM = 100
_UNFINISHED, _ABANDONED_S = ".new-", 3600.0
"""Begin of the names of folders that are being made, and the age from which they are removed."""

SourceKind = Literal["built-in", "folder", "file", "hub", "LM Studio", "ollama"]


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


def _path_of(name: str) -> Path:
    """Return the absolute path that a name may be. Raises `ModelNotFound` for an empty one, the working folder's."""
    if not name:
        raise unknown_model(name, builtin_names())
    return absolute_path(typed_path(name))


def interrupted_downloads() -> Mapping[str, int]:
    """Return the bytes on the disk of the hub's models that are not complete, by id."""
    from mlx_ring.models import hub_cache  # importing its client takes a while

    return hub_cache.interrupted_downloads()


def list_local_models() -> Iterator[LocalModel]:
    """List built-in models, complete ones in the hub's cache and LM Studio's folders, ollama's, and GGUF files that were served.

    Folders that need to run code are left out, and those whose configuration gives no size, which are no language models.
    """
    for name in builtin_names():
        yield LocalModel(name, "built-in", read_model_folder(BUILTIN_FOLDER / name))
    from mlx_ring.models import hub_cache  # importing its client takes a while

    for name in hub_cache.cached_ids():
        from mlx_ring.models import hub  # importing all of the client takes twice as long

        with contextlib.suppress(ModelError):
            if (folder := hub.complete_in_cache(name)) is not None:
                yield LocalModel(name, "hub", _with_sizes(folder))
    for name, path in lm_studio_folders():
        with contextlib.suppress(ModelError, OSError):
            if has_tokenizer(folder := read_model_folder(path)):
                yield LocalModel(name, "LM Studio", _with_sizes(folder))
    for name, file in ollama_models().items():
        with contextlib.suppress(ModelError):
            yield LocalModel(name, "ollama", read_gguf_model([file]))
    blobs = set(ollama_models().values())
    for file in dict.fromkeys([*_linked_files(), *hub_cache.cached_gguf_files(), *lm_studio_files()]):
        if file not in blobs:
            with contextlib.suppress(ModelError):
                yield LocalModel(str(file), "file", read_gguf_model(_parts(file)))


def _with_sizes(folder: ModelFolder) -> ModelFolder:
    """Return the folder. Raises `ModelCorrupt` if its configuration gives no sizes."""
    _ = folder.num_layers, folder.hidden_size, folder.vocab_size
    return folder


def find_model(
    name: str,
    *,
    must_fit: bool = False,
    memory_bytes: int | None = None,
    report: Report = lambda _: None,
) -> LocalModel:
    """Return the model's folder; fetch it from the hub if necessary.

    Args:
        name: a built-in name, a folder or GGUF file, a short name or a hub id, tried in this order.
        must_fit: whether to refuse a model that is too large for this machine's memory before fetching it.
        memory_bytes: the same for the memory of several machines together; None for any.
        report: receives the progress of a fetch.

    Raises:
        ModelNotFound: there is none of that name, or the hub cannot be reached.
        ModelCorrupt, ModelUnsafe: the folder cannot be served.
        PlanError: its weights do not fit this machine's disk, or memory that must hold them.
    """
    if name in builtin_names():
        return LocalModel(name, "built-in", read_model_folder(BUILTIN_FOLDER / name))
    path = _path_of(name)
    if _is_gguf(path):
        return LocalModel(_gguf_name(path), "file", read_model_folder(_folder_of_gguf(path)))
    if is_there(path):
        return LocalModel(path.name, "folder", read_model_folder(path))
    found = _downloaded(name)
    if found is not None:
        return found
    from mlx_ring.models import hub

    hub_id = full_name(name)
    fetched = hub.fetch(hub_id, must_fit=must_fit, memory_bytes=memory_bytes, report=report)
    return LocalModel(hub_id, "hub", fetched)


def full_name(name: str) -> str:
    """Return the hub's id that a name means; a built-in name, a path and one of ollama's models stay as they are.

    Raises:
        ModelNotFound: no model has this name, or several have it.
    """
    if name in builtin_names() or is_there(_path_of(name)) or is_hub_id(name):
        return name
    hub_id = find_hub_id(name)
    if hub_id is None:
        if ollama_file(name) is not None:
            return name
        raise unknown_model(name, builtin_names())
    return hub_id


def exact_name(name: str) -> str:
    """Return the hub's id that a whole short name means; others stay as they are, as for `full_name`.

    Raises:
        ModelNotFound: no model has this name, or it is only a part of one.
    """
    hub_id = full_name(name)
    short = short_names_of(hub_id)
    if name == hub_id or name.lower() in short:
        return hub_id
    raise ModelNotFound(
        f"{name} is not the whole name of a model: {' or '.join([*short[:1], hub_id])} is one."
    )


def _downloaded(name: str) -> LocalModel | None:
    """Return a model of the hub that is complete in its cache or in LM Studio's folders, or one of ollama's; else None.

    Raises:
        ModelNotFound: several models have this name.
        ModelUnsafe: it needs code of its own to be run.
        ModelCorrupt, ModelUnsupported: only ollama has it, and it cannot be served.
    """
    from mlx_ring.models import hub

    hub_id = full_name(name)
    if is_hub_id(hub_id):
        if (folder := hub.complete_in_cache(hub_id)) is not None:
            return LocalModel(hub_id, "hub", folder)
        path = lm_studio_folder(hub_id)
        with contextlib.suppress(ModelCorrupt, ModelNotFound, OSError):
            if path is not None and has_tokenizer(folder := read_model_folder(path)):
                return LocalModel(hub_id, "LM Studio", folder)
    file = ollama_file(name)
    if file is None:
        return None
    try:
        return LocalModel(name, "ollama", read_model_folder(_folder_of_gguf(file)))
    except ModelError as error:
        if not is_hub_id(hub_id):
            raise
        log.warning("Ollama has %s, but it cannot be served: %s", name, error)
        return None


def must_be_fetched(name: str) -> bool:
    """Report whether the model is the hub's, and not complete on this machine.

    Raises:
        ModelNotFound: no model has this name, or several have it.
        ModelUnsafe: it needs code of its own to be run.
        ModelCorrupt, ModelUnsupported: only ollama has it, and it cannot be served.
    """
    if name in builtin_names() or is_there(_path_of(name)):
        return False
    return _downloaded(name) is None


def describe_model(name: str) -> LocalModel:
    """Describe a model without fetching its weights: from their headers if they are here, else from its configuration.

    Args:
        name: a built-in name, a folder, a GGUF file, a config.json, or a hub id, whose configuration is fetched.

    Raises:
        ModelNotFound: there is none of that name, or the hub cannot be reached.
        ModelCorrupt, ModelUnsafe: the files cannot be read.
        ModelUnsupported: it cannot be served.
    """
    described = _describe(name)
    # A folder with weights was checked by their types when it was read.
    if not described.folder.tensors:
        require_loadable(Path(name), described.folder.config)
    return described


def _describe(name: str) -> LocalModel:
    path = _path_of(name)
    if name not in builtin_names() and is_there(path):
        if _is_gguf(path):
            return LocalModel(_gguf_name(path), "file", read_gguf_model(_parts(path)))
        if path.is_file():
            return LocalModel(path.parent.name, "folder", read_model_config(path))
        if not any(path.glob("model*.safetensors")):
            return LocalModel(path.name, "folder", read_model_config(path / "config.json"))
    if name in builtin_names() or is_there(path):
        return find_model(name)
    found = _downloaded(name)
    if found is not None:
        return found
    from mlx_ring.models import hub

    hub_id = full_name(name)
    return LocalModel(hub_id, "hub", hub.fetch_config(hub_id))


def remove_model(name: str) -> tuple[str, int]:
    """Remove a model of the hub from this machine's cache, also a part of one.

    Returns:
        Its id, and the bytes that are free now.

    Raises:
        ConfigError: it is part of the package, a file or folder of the user's, or another program's, or cannot be removed.
        Conflict: a process of mlx-ring serves it, or downloads it.
        ModelNotFound: it is not on this machine, or the name is not a whole one.
    """
    from mlx_ring.models import hub_cache

    if name in builtin_names():
        raise ConfigError(f"{name} is part of mlx-ring and takes no space: it cannot be removed.")
    path = _path_of(name)
    if is_there(path):
        raise ConfigError(f"{path} is your own: remove it yourself if nothing needs it.")
    hub_id = exact_name(name)
    repository = hub_cache.cached_repository(hub_id)
    if repository is None:
        found = _downloaded(name)
        if found is None:
            raise ModelNotFound(f"{name} is not on this machine; `mlx-ring list` names the models that are.")
        raise ConfigError(f"{name} belongs to {found.kind}: remove it there.")
    if any(is_held(folder) for folder in repository.glob("snapshots/*")):
        raise Conflict(
            f"{hub_id} is served on this machine: `mlx-ring ps` shows where; `mlx-ring stop` stops it, then remove it."
        )
    if hub_cache.is_being_fetched(repository):
        raise Conflict(f"{hub_id} is being downloaded: end the download, then remove the model.")
    if not all(map(may_remove, repository.glob("snapshots/*"))) or not may_remove(repository):
        raise ConfigError(
            f"{hub_id} may be in use, because its file system has no locks that would show it: end all servers of the model "
            f"and its downloads, then remove {repository} yourself."
        )
    return hub_id, hub_cache.remove_repository(repository)


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
    with contextlib.suppress(OSError):
        return _make_folder(root, target, contents, parts)
    try:
        # Another process may have removed what it took for outdated.
        return _make_folder(root, target, contents, parts)
    except OSError as error:
        raise ConfigError(
            f"{root} cannot be written ({error.strerror}), but the configuration of a GGUF file is kept there: free "
            "some space, or set XDG_CACHE_HOME to another folder."
        ) from error


def _make_folder(root: Path, target: Path, contents: Mapping[str, object], parts: list[Path]) -> Path:
    """Make a folder aside, and give it its name once it is complete. Raises `OSError` if it cannot be written."""
    root.mkdir(parents=True, exist_ok=True)
    _remove_outdated(root)
    aside = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=root))
    try:
        for name, content in contents.items():
            (aside / name).parent.mkdir(exist_ok=True)
            (aside / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
        for part, name in zip(parts, _link_names(len(parts)), strict=True):
            (aside / name).symlink_to(part)
        if not target.is_dir():
            aside.rename(target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
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
    links = (link for link in root.glob(f"*/model*{SUFFIX}") if first.fullmatch(link.name))
    return sorted(link for link in links if not link.parent.name.startswith(_UNFINISHED))


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
    """Hold a folder of a GGUF file, or of the hub's cache, until `release` or the end of this process.

    A GGUF file may be replaced or removed meanwhile.
    """
    if folder.parent == _gguf_folders() or folder.parent.name == "snapshots":
        hold(folder)


def _remove_unless_held(folder: Path) -> None:
    with contextlib.suppress(OSError):  # another process holds it, or has removed it
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            if lock_open_file(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB):
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
    for folder in root.glob(f"{_UNFINISHED}*"):
        with contextlib.suppress(OSError):  # another process has removed it
            if time.time() - folder.stat().st_mtime > _ABANDONED_S:
                shutil.rmtree(folder, ignore_errors=True)
