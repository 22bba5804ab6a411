"""Where a model's folder comes from: the package, the disk, or the hub.

A hub id is served from the local cache when that is complete, without asking the
network. Otherwise only what is needed is fetched: configuration, tokenizer, weights;
never a line of Python.
"""

from __future__ import annotations

import difflib
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

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

from mlx_ring.core.errors import ModelCorrupt, ModelNotFound, ModelUnsafe, PlanError
from mlx_ring.core.model_folder import SMALL_FILES, ModelFolder, read_model_config, read_model_folder
from mlx_ring.core.process_limits import usable_memory

BUILTIN_FOLDER = Path(__file__).resolve().parent.parent / "builtin_models"
_WANTED = ("model*.safetensors", *SMALL_FILES)
_UNWANTED = ("*.py", "*/*")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tiktoken.model")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_ANSWER_WAIT_S = 8.0
"""For the hub's list of files: with a start of the program, less than ten seconds in all."""
_DISK_RESERVE_BYTES = 1 << 30

Kind = Literal["built-in", "folder", "hub"]
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model that can be served without fetching anything."""

    name: str
    kind: Kind
    folder: ModelFolder


def builtin_names() -> list[str]:
    """Names of the models that come with the package."""
    if not BUILTIN_FOLDER.is_dir():
        return []
    return sorted(path.name for path in BUILTIN_FOLDER.iterdir() if (path / "config.json").is_file())


def list_local_models() -> Iterator[LocalModel]:
    """Built-in models, then the complete ones in the hub's cache. Folders that want to run code are left out."""
    for name in builtin_names():
        yield LocalModel(name, "built-in", read_model_folder(BUILTIN_FOLDER / name))
    for name in _cached_ids():
        try:
            folder = _complete_in_cache(name)
        except ModelUnsafe:
            continue
        if folder is not None:
            yield LocalModel(name, "hub", folder)


def find_model(name: str) -> LocalModel:
    """The model's folder, fetched from the hub where it is not here yet.

    Args:
        name: a built-in name, a folder, or a hub id, looked for in this order.

    Raises:
        ModelNotFound: there is none of that name, or the hub cannot be reached.
        ModelCorrupt, ModelUnsafe: the folder cannot be served.
        PlanError: its weights do not fit this machine's disk or memory.
    """
    if name in builtin_names():
        return LocalModel(name, "built-in", read_model_folder(BUILTIN_FOLDER / name))
    path = Path(name).expanduser()
    if _is_there(path):
        return LocalModel(path.absolute().name, "folder", read_model_folder(path.absolute()))
    if not _HUB_ID.fullmatch(name) or name.startswith("."):
        raise ModelNotFound(_unknown(name))
    folder = _complete_in_cache(name)
    return LocalModel(name, "hub", folder if folder is not None else _fetch(name))


def describe_model(name: str) -> LocalModel:
    """What is known of a model without fetching its weights: their headers where they are here, else its configuration.

    Args:
        name: a built-in name, a folder, a config.json, or a hub id, of which the configuration is fetched.

    Raises:
        ModelNotFound: there is none of that name, or the hub cannot be reached.
        ModelCorrupt, ModelUnsafe: what is there cannot be read.
    """
    path = Path(name).expanduser()
    if name not in builtin_names() and _is_there(path):
        if path.is_file():
            return LocalModel(path.absolute().parent.name, "folder", read_model_config(path.absolute()))
        if not any(path.glob("model*.safetensors")):
            return LocalModel(
                path.absolute().name, "folder", read_model_config(path.absolute() / "config.json")
            )
    if name in builtin_names() or _is_there(path) or not _HUB_ID.fullmatch(name) or name.startswith("."):
        return find_model(name)
    folder = _complete_in_cache(name)
    if folder is None:
        file = _in_time(name, lambda: hf_hub_download(name, "config.json"))
        folder = read_model_config(Path(file))
    return LocalModel(name, "hub", folder)


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


def _cached_ids() -> list[str]:
    try:
        cache = scan_cache_dir(constants.HF_HUB_CACHE)
    except (CacheNotFound, OSError):
        return []
    return sorted(repository.repo_id for repository in cache.repos if repository.repo_type == "model")


def _complete_in_cache(name: str) -> ModelFolder | None:
    """The newest snapshot in the cache, where none of its files is missing.

    Raises:
        ModelUnsafe: it is there, and asks for code of its own to be run.
    """
    try:
        folder = read_model_folder(_snapshot(name, offline=True))
    except (LocalEntryNotFoundError, HFValidationError, OSError, ModelNotFound, ModelCorrupt):
        return None
    return folder if has_tokenizer(folder) else None


def has_tokenizer(folder: ModelFolder) -> bool:
    """Whether there is one at all: transformers makes an empty one up where there is none."""
    return any((folder.path / file).is_file() for file in _TOKENIZERS)


def _snapshot(name: str, *, offline: bool) -> Path:
    return Path(
        snapshot_download(
            name,
            local_files_only=offline,
            allow_patterns=list(_WANTED),
            ignore_patterns=list(_UNWANTED),
        )
    )


def _fetch(name: str) -> ModelFolder:
    sizes = _in_time(name, lambda: _file_sizes(name))
    weight_bytes = sum(size for file, size in sizes.items() if file.endswith(".safetensors"))
    if not weight_bytes:
        raise ModelNotFound(
            f"{name} has no model*.safetensors: choose a repository with safetensors weights."
        )
    missing = sum(
        size for file, size in sizes.items() if not isinstance(try_to_load_from_cache(name, file), str)
    )
    check_memory(name, weight_bytes)
    _check_disk(name, missing)
    try:
        return read_model_folder(_snapshot(name, offline=False))
    except (httpx.HTTPError, OSError) as error:
        raise _unreachable(name, error) from error


def _file_sizes(name: str) -> dict[str, int]:
    """Bytes of every file of a hub repository that serving needs."""
    siblings = HfApi().model_info(name, files_metadata=True, timeout=_ANSWER_WAIT_S).siblings or []
    wanted = filter_repo_objects(
        (file.rfilename for file in siblings), allow_patterns=list(_WANTED), ignore_patterns=list(_UNWANTED)
    )
    sizes = {file.rfilename: file.size or 0 for file in siblings}
    return {file: sizes[file] for file in wanted}


def _in_time(name: str, ask: Callable[[], Found]) -> Found:
    """The hub's answer, or the sentence to say why there is none: name resolution alone may hang for a minute."""
    answers: list[Found] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            answers.append(ask())
        except Exception as error:  # noqa: BLE001 - whatever it was, the caller's thread explains it
            errors.append(error)

    thread = threading.Thread(target=run, name="hub", daemon=True)
    thread.start()
    thread.join(_ANSWER_WAIT_S)
    if answers:
        return answers[0]
    cause = errors[0] if errors else TimeoutError(f"no answer within {_ANSWER_WAIT_S:g} s")
    raise _unreachable(name, cause) from cause


def _unreachable(name: str, error: Exception) -> ModelNotFound:
    """What a failure of the hub means to whoever asked for `name`."""
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
        "that holds the model; `mlx-ring models list` names what is here."
    )


def check_memory(name: str, needed_bytes: int) -> None:
    """Refuse what this machine could only serve by swapping.

    Raises:
        PlanError: the weights alone exceed the memory.
    """
    total = usable_memory().total_bytes
    if needed_bytes > total:
        raise PlanError(
            f"{name} needs {_gigabytes(needed_bytes)} of memory for its weights and this machine has "
            f"{_gigabytes(total)}: choose a smaller or more strongly quantized model."
        )


def _check_disk(name: str, needed_bytes: int) -> None:
    folder = Path(constants.HF_HUB_CACHE).expanduser()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if needed_bytes + _DISK_RESERVE_BYTES > free:
        raise PlanError(
            f"{name} needs {_gigabytes(needed_bytes)} on disk and {folder} has {_gigabytes(free)} free: "
            "make room, or set HF_HOME to a folder on another disk."
        )


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB"
