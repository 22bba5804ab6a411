"""Models of the hub: those in its local cache, and those to fetch.

A model that is complete in the cache is used without the network. Otherwise only the necessary files are
fetched: configuration, tokenizer, weights; never any Python code.

Memory and disk are checked before anything is fetched or loaded.
"""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import httpx
from huggingface_hub import (
    HfApi,
    constants,
    hf_hub_download,  # pyright: ignore[reportUnknownVariableType] - its signature has a bare dict
    scan_cache_dir,
    snapshot_download,  # pyright: ignore[reportUnknownVariableType] - its signature has a bare dict
    try_to_load_from_cache,
)
from huggingface_hub.errors import (
    CacheNotFound,
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import filter_repo_objects

from mlx_ring.core.errors import ModelCorrupt, ModelNotFound, PlanError
from mlx_ring.models.gguf import SUFFIX
from mlx_ring.models.model_folder import (
    SMALL_FILES,
    ModelFolder,
    check_memory,
    gigabytes,
    has_tokenizer,
    read_model_config,
    read_model_folder,
)

_WANTED = ("model*.safetensors", *SMALL_FILES)
_UNWANTED = ("*.py", "*/*")
_LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}")
_ANSWER_WAIT_S = 8.0
"""Time for the hub's list of files: with the program's start, less than ten seconds in all."""
_DISK_RESERVE_BYTES = 1 << 30


def check_disk(name: str, needed_bytes: int, folder: Path) -> None:
    """Refuse to fetch a model that would fill the disk of the folder.

    Raises:
        PlanError: too little free space there.
    """
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if needed_bytes + _DISK_RESERVE_BYTES > free:
        raise PlanError(
            f"{name} needs {gigabytes(needed_bytes)} on disk, but {folder} has {gigabytes(free)} free: "
            "free some space, or set HF_HOME to a folder on another disk."
        )


Found = TypeVar("Found")


def cached_ids() -> list[str]:
    """Return the ids of all models that are at least partly in the cache."""
    try:
        cache = scan_cache_dir(constants.HF_HUB_CACHE)
    except (CacheNotFound, OSError):
        return []
    return sorted(repository.repo_id for repository in cache.repos if repository.repo_type == "model")


def cached_gguf_files() -> list[Path]:
    """Return the GGUF files in the cache. Of one that was split, this is the first part."""
    try:
        cache = scan_cache_dir(constants.HF_HUB_CACHE)
    except (CacheNotFound, OSError):
        return []
    files = {
        file.file_path
        for repository in cache.repos
        for revision in repository.revisions
        for file in revision.files
    }
    return sorted(file for file in files if file.suffix == SUFFIX and not _LATER_PART.search(file.name))


def complete_in_cache(name: str) -> ModelFolder | None:
    """Return the newest snapshot in the cache, if none of its files is missing.

    Raises:
        ModelUnsafe: it needs code of its own to be run.
    """
    try:
        folder = read_model_folder(_snapshot(name, offline=True))
    except (LocalEntryNotFoundError, HFValidationError, OSError, ModelNotFound, ModelCorrupt):
        return None
    return folder if has_tokenizer(folder) else None


def _snapshot(name: str, *, offline: bool) -> Path:
    return Path(
        snapshot_download(
            name,
            local_files_only=offline,
            allow_patterns=list(_WANTED),
            ignore_patterns=list(_UNWANTED),
        )
    )


def fetch_config(name: str) -> ModelFolder:
    """Fetch a model's configuration, without weights.

    Raises:
        ModelNotFound: a model that the hub does not have, or a hub out of reach.
    """
    return read_model_config(Path(_in_time(name, lambda: hf_hub_download(name, "config.json"))))


def fetch(name: str, *, must_fit: bool = False) -> ModelFolder:
    """Fetch everything that serving needs.

    Args:
        name: of the hub's repository.
        must_fit: whether this machine alone must hold the weights; checked before anything is fetched.

    Raises:
        ModelNotFound: a model that the hub does not have, or a hub out of reach.
        PlanError: weights that do not fit the disk, or with `must_fit` the memory.
    """
    sizes = _in_time(name, lambda: _file_sizes(name))
    weight_bytes = sum(size for file, size in sizes.items() if file.endswith(".safetensors"))
    if not weight_bytes:
        raise ModelNotFound(
            f"{name} has no model*.safetensors: choose a repository with safetensors weights, or fetch one of its GGUF "
            "files, if it has any, and serve that file."
        )
    missing = sum(
        size for file, size in sizes.items() if not isinstance(try_to_load_from_cache(name, file), str)
    )
    if must_fit:
        check_memory(name, weight_bytes)
    check_disk(name, missing, Path(constants.HF_HUB_CACHE).expanduser())
    try:
        return read_model_folder(_snapshot(name, offline=False))
    except (httpx.HTTPError, OSError) as error:
        raise _unreachable(name, error) from error


def _file_sizes(name: str) -> dict[str, int]:
    """Return the bytes of every file of a hub repository that serving needs."""
    siblings = HfApi().model_info(name, files_metadata=True, timeout=_ANSWER_WAIT_S).siblings or []
    wanted = filter_repo_objects(
        (file.rfilename for file in siblings), allow_patterns=list(_WANTED), ignore_patterns=list(_UNWANTED)
    )
    sizes = {file.rfilename: file.size or 0 for file in siblings}
    return {file: sizes[file] for file in wanted}


def _in_time(name: str, ask: Callable[[], Found]) -> Found:
    """Return the hub's answer within the time limit, or raise the error: name resolution alone may block for a minute."""
    answers: list[Found] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            answers.append(ask())
        except Exception as error:  # noqa: BLE001 - the caller's thread explains any error
            errors.append(error)

    thread = threading.Thread(target=run, name="hub", daemon=True)
    thread.start()
    thread.join(_ANSWER_WAIT_S)
    if answers:
        return answers[0]
    cause = errors[0] if errors else TimeoutError(f"no answer within {_ANSWER_WAIT_S:g} s")
    raise _unreachable(name, cause) from cause


def _unreachable(name: str, error: Exception) -> ModelNotFound:
    """Return the error for a failure of the hub."""
    if isinstance(error, GatedRepoError):
        return ModelNotFound(
            f"{name} is gated: accept its terms at {constants.ENDPOINT}/{name} and set HF_TOKEN to your token."
        )
    if isinstance(error, RepositoryNotFoundError):
        return ModelNotFound(
            f"The hub has no model {name}, or it is private: check the spelling, or set HF_TOKEN to your token."
        )
    reason = " ".join(str(error).split()) or type(error).__name__
    return ModelNotFound(
        f"{name} is not on this machine and cannot be fetched ({reason}): connect to the network, or give a folder "
        "that holds the model; `mlx-ring models list` names the models on this machine."
    )
