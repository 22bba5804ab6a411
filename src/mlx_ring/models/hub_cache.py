"""Models in the hub's cache: which there are, complete or not, how their parts grow, and how they are removed.

Also why a model cannot be fetched into it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import math
import os
import re
import shutil
import threading
import time
from pathlib import Path
from typing import Literal

from huggingface_hub import constants, get_token, scan_cache_dir
from huggingface_hub.errors import CacheNotFound, GatedRepoError, HfHubHTTPError, RepositoryNotFoundError
from huggingface_hub.file_download import repo_folder_name

from mlx_ring.core.environment import library_variable
from mlx_ring.core.errors import (
    ConfigError,
    ExceedsMemory,
    ModelNotFound,
    PlanError,
    RingError,
    without_number,
)
from mlx_ring.core.folders import typed_path
from mlx_ring.host.private_files import is_held, may_remove
from mlx_ring.models.config_limits import gigabytes
from mlx_ring.models.gguf import SUFFIX
from mlx_ring.models.model_folder import PullProgress, Report
from mlx_ring.models.short_names import short_names_of

PART = ".mlx-ring.part"
"""End of the names of weights files that are not complete."""
_DISK_RESERVE_BYTES = 1 << 30
_DISK_ERRORS = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO),
    *(errno.EROFS, errno.ESTALE, errno.ENOLCK, errno.ENOTSUP),
)
"""Errors of a disk that name no file."""
_UNAUTHORIZED = 401
_LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}")


class Meter:
    """Counter of bytes that are there, from several threads."""

    def __init__(self, total: int, report: Report) -> None:
        self.total = total
        self._done = 0
        self._parts: dict[Path, int] = {}
        self._grown_s = -math.inf
        self._report = report
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    @property
    def is_stopped(self) -> bool:
        """True once the threads shall end."""
        return self._stopped.is_set()

    def stop(self) -> None:
        """Let the threads end."""
        self._stopped.set()

    def wait(self, seconds: float) -> None:
        """Wait for so long, or until the threads shall end."""
        self._stopped.wait(seconds)

    def add(self, count: int, status: Literal["downloading", "verifying"] = "downloading") -> None:
        """Count bytes, and report it."""
        with self._lock:
            self._done += count
            self._report(PullProgress(status, self._done, self.total))

    def set_part(self, path: Path, size: int, *, has_grown: bool = False) -> None:
        """Count the bytes of a part: `size` in all, however often it is begun. It `has_grown` if bytes have arrived now."""
        before, self._parts[path] = self._parts.get(path, 0), size
        self._grown_s = time.monotonic() if has_grown else self._grown_s
        self.add(size - before)

    def has_grown_within(self, seconds: float) -> bool:
        """Report whether the threads continue, and bytes have arrived in the last seconds."""
        return not self.is_stopped and time.monotonic() - self._grown_s < seconds


class Part(io.FileIO):
    """Incomplete file whose growth is counted. It refuses to grow once its fetch has ended."""

    def __init__(self, path: Path, meter: Meter) -> None:
        super().__init__(path, "a+")
        self._path, self._meter = path, meter
        self._size = 0

    def count(self) -> int:
        """Count the bytes that an earlier fetch has left, and return their number."""
        self._size = self.seek(0, io.SEEK_END)
        self._meter.set_part(self._path, self._size)
        return self._size

    def write(self, data: bytes, /) -> int:  # pyright: ignore[reportIncompatibleMethodOverride] - the client writes bytes alone
        if self._meter.is_stopped:
            raise InterruptedError("the fetch has ended")
        if not self._path.exists():  # on a file system where several processes hold a lock
            raise InterruptedError("another process has fetched the file, or removed it")
        written = super().write(data)
        self._size += written
        self._meter.set_part(self._path, self._size, has_grown=True)
        return written

    def truncate(self, size: int | None = None, /) -> int:
        """Cut the file, as the client does if the hub sends it from its start."""
        self._size = self.tell() if size is None else size
        self._meter.set_part(self._path, self._size)
        self.seek(self._size)
        return super().truncate(self._size)


def cached_ids() -> list[str]:
    """Return the ids of all models that are at least partly in the cache."""
    try:
        cache = scan_cache_dir(constants.HF_HUB_CACHE)
    except (CacheNotFound, OSError, RuntimeError):  # RuntimeError: the user has no home
        return []
    return sorted(repository.repo_id for repository in cache.repos if repository.repo_type == "model")


def cached_gguf_files() -> list[Path]:
    """Return the GGUF files in the cache. Of one that was split, this is the first part."""
    try:
        cache = scan_cache_dir(constants.HF_HUB_CACHE)
    except (CacheNotFound, OSError, RuntimeError):  # RuntimeError: the user has no home
        return []
    files = {
        file.file_path
        for repository in cache.repos
        for revision in repository.revisions
        for file in revision.files
    }
    return sorted(file for file in files if file.suffix == SUFFIX and not _LATER_PART.search(file.name))


def interrupted_downloads() -> dict[str, int]:
    """Return the models with weights files that are not complete: by id, the bytes that are here."""
    parts = typed_path(constants.HF_HUB_CACHE).glob(f"models--*/blobs/*{PART}")
    return {
        "/".join(blobs.parent.name.split("--")[1:]): sum(file.lstat().st_size for file in blobs.iterdir())
        for blobs in sorted({part.parent for part in parts})
    }


def kept_bytes(blobs: Path, sha256: str | None) -> int:
    """Return the bytes of a file that an earlier download has left."""
    for path in (blobs / f"{sha256}", blobs / f"{sha256}{PART}"):
        if path.is_file():
            return path.stat().st_size
    return 0


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's content, as the hub writes it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remove_outdated_parts(name: str) -> None:
    """Remove what earlier downloads of a complete model left of other versions, unless a process still downloads it."""
    for part in repository_folder(name).glob(f"blobs/*{PART}"):
        if may_remove(part):
            with contextlib.suppress(OSError):  # of another user
                part.unlink()


def cached_repository(name: str) -> Path | None:
    """Return the folder of a model in the cache, complete or not; None if there is none."""
    folder = repository_folder(name)
    return folder if os.path.isdir(folder) else None  # noqa: PTH112 - False also if the cache may not be read


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


def check_shared_memory(name: str, weight_bytes: int, memory_bytes: int) -> None:
    """Refuse to fetch a model whose weights all machines together cannot hold.

    Raises:
        ExceedsMemory: weights larger than the memory.
    """
    if weight_bytes > memory_bytes:
        raise ExceedsMemory(
            f"{name} needs {gigabytes(weight_bytes)} of memory for its weights, but the machines here have "
            f"{gigabytes(memory_bytes)}. Choose a smaller model."
        )


def is_of_disk(error: Exception) -> bool:
    """Report whether an error is the disk's, and not the network's."""
    if not isinstance(error, OSError) or not error.strerror:
        return False
    return bool(error.filename) or error.errno in _DISK_ERRORS


def explain_failure(name: str, error: Exception, *, is_here: bool = False) -> RingError:
    """Return the error for a failure of the hub, of the network, or of the disk, for a model that is complete here or not."""
    if isinstance(error, HfHubHTTPError):
        return ModelNotFound(_explain_refusal(name, error))
    if isinstance(error, OSError) and is_of_disk(error):
        return PlanError(
            f"{name} cannot be written to {error.filename or constants.HF_HUB_CACHE} ({error.strerror}): correct that, or "
            "set HF_HOME to another folder, then pull it again; the download continues where it ended."
        )
    reason = without_number(" ".join(str(error).split())) or type(error).__name__
    if is_here:
        return ModelNotFound(f"The hub cannot be asked ({reason}).")
    return ModelNotFound(
        f"{name} is not on this machine and cannot be fetched ({reason}): connect to the network, or give a folder "
        "that holds the model; `mlx-ring models list` names the models on this machine."
    )


def _explain_refusal(name: str, error: HfHubHTTPError) -> str:
    status = error.response.status_code
    if isinstance(error, GatedRepoError):
        return f"{name} is gated: accept its terms at {constants.ENDPOINT}/{name}, then {_how_to_log_in()}."
    # Mirrors answer 404 without the hub's own code.
    if isinstance(error, RepositoryNotFoundError) or (type(error), status) == (HfHubHTTPError, 404):
        return _not_on_hub(name)
    if status == _UNAUTHORIZED:
        return f"{name} cannot be fetched, because {_about_token()}"
    return (
        f"{name} cannot be fetched now: the hub answered {status}. Pull it again later; the download continues where it "
        "ended."
    )


def _not_on_hub(name: str) -> str:
    if short := short_names_of(name):
        return (
            f"The hub has {name} no more, for which {short[0]} stands: choose another model with `mlx-ring recommend`, or "
            "give the id of another conversion."
        )
    return f"The hub has no model {name}, or it is private: check the spelling. For a private one, {_how_to_log_in()}."


def _how_to_log_in() -> str:
    """Return the two ways to give this machine a token of the hub."""
    return (
        "run `hf auth login` on this machine, or set HF_TOKEN to a token from "
        f"{constants.ENDPOINT}/settings/tokens (for a server, before it starts)"
    )


def _about_token() -> str:
    """Return why the hub lets nobody in without another token, and what to do: a token in HF_TOKEN counts before a login's."""
    if library_variable("HF_TOKEN").strip():
        return (
            "the hub refuses the token in HF_TOKEN: it is wrong or has expired. Set HF_TOKEN to another token from "
            f"{constants.ENDPOINT}/settings/tokens, or unset it for models that need none (for a server, before it starts)."
        )
    if get_token() is None:
        return f"the hub asks for a token: {_how_to_log_in()}."
    return (
        "the hub refuses the token of this machine: it is wrong or has expired. Run `hf auth login` on this machine for "
        "another one, or `hf auth logout` for models that need none."
    )


def is_being_fetched(folder: Path) -> bool:
    """Report whether a process fetches weights into a model's folder of the cache."""
    return any(is_held(part) for part in folder.glob(f"blobs/*{PART}"))


def remove_repository(folder: Path) -> int:
    """Remove a model's folder from the cache, and return the bytes that it took.

    Raises:
        ConfigError: it is a link, or the file system refuses.
    """
    if folder.is_symlink():
        raise ConfigError(
            f"{folder} is a link to {folder.readlink()}: remove both yourself if nothing needs them."
        )
    try:
        size = sum(
            path.lstat().st_size for path in folder.rglob("*") if not path.is_dir() or path.is_symlink()
        )
        shutil.rmtree(folder)
    except OSError as error:
        raise ConfigError(
            f"{error.filename or folder} cannot be removed ({error.strerror or error}): correct its permissions, or "
            f"remove {folder} as its owner."
        ) from error
    return size


def repository_folder(name: str) -> Path:
    """Return the place of a model's folder in the cache.

    Raises:
        ConfigError: the user has no home, and no other folder is set.
    """
    try:
        cache = Path(constants.HF_HUB_CACHE).expanduser()
    except RuntimeError as error:
        raise ConfigError(
            "This user has no home folder for models: set HF_HOME to a folder that can be written."
        ) from error
    return cache / repo_folder_name(repo_id=name, repo_type="model")
