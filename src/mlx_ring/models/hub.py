"""Models of the hub: those in its local cache, and those to fetch.

A model that is complete in the cache is used without the network. Otherwise only the necessary files are
fetched: configuration, tokenizer, weights; never any Python code.

Memory and disk are checked before anything is fetched or loaded. Weights continue where an earlier fetch ended, also
one that was killed: the hub's client alone would begin the file again. They are compared with the hub's SHA-256.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar
from urllib.parse import urlsplit

from huggingface_hub import (
    HfApi,
    ModelInfo,
    constants,
    get_hf_file_metadata,  # pyright: ignore[reportUnknownVariableType] - its signature has a bare dict
    hf_hub_download,  # pyright: ignore[reportUnknownVariableType] - its signature has a bare dict
    snapshot_download,  # pyright: ignore[reportUnknownVariableType] - its signature has a bare dict
    try_to_load_from_cache,
)
from huggingface_hub import hf_hub_url as url_of
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
)
from huggingface_hub.file_download import (
    are_symlinks_supported,
    http_get,  # pyright: ignore[reportUnknownVariableType] - its signature has a bare tqdm
)
from huggingface_hub.utils import (
    build_hf_headers,  # pyright: ignore[reportUnknownVariableType] - its signature has a bare dict
    disable_progress_bars,
    filter_repo_objects,
)

from mlx_ring.core.errors import ModelCorrupt, ModelNotFound, RingError
from mlx_ring.host.private_files import is_held, lock_open_file, may_remove
from mlx_ring.models.config_limits import QUANTIZATION_FILE, check_memory, require_loadable
from mlx_ring.models.hub_cache import (
    PART,
    Meter,
    Part,
    check_disk,
    check_shared_memory,
    explain_failure,
    is_of_disk,
    kept_bytes,
    remove_outdated_parts,
    repository_folder,
    sha256_of,
)
from mlx_ring.models.model_folder import (
    SMALL_FILES,
    ModelFolder,
    PullProgress,
    Report,
    has_tokenizer,
    read_model_config,
    read_model_folder,
)

log = logging.getLogger(__name__)

_WANTED = ("model*.safetensors", *SMALL_FILES)
_UNWANTED = ("*.py", "*/*")
_ANSWER_WAIT_S = 8.0
"""Time for the hub's list of files: with the program's start, less than ten seconds in all."""
_AT_ONCE = 4
"""Weights files that are fetched at the same time."""
_CHUNK_BYTES = 256 << 10
"""Bytes that the hub's client gathers before it writes them: those that a killed fetch loses. The client's own are 10 MB."""
PATIENCE_S, _PAUSE_S = 300.0, 2.0
"""Time without a byte after which a fetch that received some ends, and the time between attempts."""
_SERVER_ERRORS = 500
"""Least status of an answer that another attempt may change."""


Found = TypeVar("Found")


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
            cache_dir=repository_folder(name).parent,
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
    return read_model_config(_in_time(name, lambda: _config_file(name)))


def _config_file(name: str) -> Path:
    """Return the file of a configuration: the hub's newest, or the cache's while the hub cannot be asked.

    The client alone would try several times to reach the hub, and print each failure.
    """
    try:
        info = HfApi().model_info(name, timeout=_ANSWER_WAIT_S)
    except Exception:
        kept = try_to_load_from_cache(name, "config.json")
        if isinstance(kept, str):
            return Path(kept)
        raise
    return _fetch_config(info)


def _fetch_config(info: ModelInfo) -> Path:
    """Fetch a configuration, with the file beside it that says how weights are quantized, if there is one."""
    if any(file.rfilename == QUANTIZATION_FILE for file in info.siblings or ()):
        hf_hub_download(info.id, QUANTIZATION_FILE)
    return Path(hf_hub_download(info.id, "config.json"))


def fetch(
    name: str,
    *,
    must_fit: bool = False,
    memory_bytes: int | None = None,
    report: Report = lambda _: None,
) -> ModelFolder:
    """Fetch everything that serving needs, and compare it with the hub's sizes and SHA-256.

    Args:
        name: of the hub's repository.
        must_fit: whether this machine alone must hold the weights; checked before anything is fetched.
        memory_bytes: memory of all machines that may share the weights, checked as well; None for any.
        report: receives the progress, from threads of its own too.

    Raises:
        ModelNotFound: a model that the hub does not have, or a hub out of reach.
        ModelCorrupt: a file that arrived with another content.
        ModelUnsupported: weights that are quantized in a way that mlx-lm does not load.
        PlanError: weights that do not fit the disk, or the memory; a disk that cannot be written.
        ExceedsMemory: weights that do not fit `memory_bytes`.
    """
    disable_progress_bars()
    constants.DOWNLOAD_CHUNK_SIZE = _CHUNK_BYTES
    info = _in_time(name, lambda: _repository(name))
    files = _wanted_files(info)
    weights = [file for file in files if file.name.endswith(".safetensors")]
    weight_bytes = sum(file.size for file in weights)
    if not weight_bytes:
        raise ModelNotFound(
            f"{name} has no model*.safetensors: choose a repository with safetensors weights, or fetch one of its GGUF "
            "files, if it has any, and serve that file."
        )
    if any(file.name == "config.json" for file in files):
        config = _in_time(name, lambda: _fetch_config(info))
        require_loadable(
            Path(name), read_model_config(config).config, info.safetensors and info.safetensors.parameters
        )
    if must_fit:
        check_memory(name, weight_bytes)
    if memory_bytes is not None:
        check_shared_memory(name, weight_bytes, memory_bytes)
    missing = [file for file in files if not isinstance(try_to_load_from_cache(name, file.name), str)]
    folder = repository_folder(name)
    kept = sum(kept_bytes(folder / "blobs", file.sha256) for file in missing)
    check_disk(name, sum(file.size for file in missing) - kept, folder)
    meter = Meter(sum(file.size for file in files), report)
    meter.add(sum(file.size for file in files) - sum(file.size for file in missing))
    try:
        _fetch_weights(name, [file for file in missing if file in weights], meter)
        path = _snapshot(name, offline=False)
        _check_sizes(name, path, files)
    except RingError:
        raise
    except Exception as error:
        # The client has its own errors, and those of its HTTP library.
        raise explain_failure(name, error) from error
    remove_outdated_parts(name)
    report(PullProgress("done", meter.total, meter.total))
    return read_model_folder(path)


@dataclass(frozen=True, slots=True)
class _HubFile:
    """File of a repository on the hub."""

    name: str
    size: int
    sha256: str | None
    """SHA-256 of its content; None where the hub gives none."""


def _fetch_weights(name: str, files: list[_HubFile], meter: Meter) -> None:
    """Fetch files into the cache's blobs, some at once. The hub's client then finds them there.

    Raises:
        ModelCorrupt: a file has another SHA-256 than the hub's.
    """
    blobs = repository_folder(name) / "blobs"
    blobs.mkdir(parents=True, exist_ok=True)
    waiting, ended = deque(files), SimpleQueue[Exception | None]()

    def run() -> None:
        with contextlib.suppress(IndexError):  # no file is left
            while not meter.is_stopped:
                file = waiting.popleft()
                try:
                    _fetch_file(name, file, blobs, meter)
                    ended.put(None)
                except Exception as error:  # noqa: BLE001 - the caller raises it
                    ended.put(error)

    # Daemons, because an error or an interrupt must not wait for the other files.
    for number in range(min(_AT_ONCE, len(files))):
        threading.Thread(target=run, name=f"fetch {number}", daemon=True).start()
    try:
        for _ in files:
            if (error := ended.get()) is not None:
                raise error
    finally:
        meter.stop()


def _fetch_file(name: str, file: _HubFile, blobs: Path, meter: Meter) -> None:
    """Fetch a file. After a failure of the network, continue it at another address: the former one may have expired."""
    refused_at = 0
    while True:
        try:
            _fetch_rest(name, file, blobs, meter)
        except Exception as error:
            kept = kept_bytes(blobs, file.sha256)
            is_refusal = isinstance(error, HfHubHTTPError) and error.response.status_code < _SERVER_ERRORS
            may_pass = (
                kept > refused_at
                if is_refusal
                else not isinstance(error, RingError) and not is_of_disk(error)
            )
            if not may_pass or not meter.has_grown_within(PATIENCE_S):
                raise
            refused_at = kept if is_refusal else refused_at
            log.warning("The download of %s of %s was interrupted; trying again", file.name, name)
            meter.wait(_PAUSE_S)
        else:
            return


def _fetch_rest(name: str, file: _HubFile, blobs: Path, meter: Meter) -> None:
    url, headers = url_of(name, file.name), build_hf_headers()
    found = get_hf_file_metadata(url, headers=headers)
    complete = blobs / (found.etag or "")
    if found.commit_hash and not are_symlinks_supported(blobs.parent):
        # The client would copy a blob: weights of 100 GB would take 200 GB.
        complete = blobs.parent / "snapshots" / found.commit_hash / file.name
        complete.parent.mkdir(parents=True, exist_ok=True)
    if (
        found.etag is None
        or found.size is None
        or found.size > constants.MAX_HTTP_DOWNLOAD_SIZE
        or complete.is_file()
    ):
        # The client itself fetches it: a file without a known name, or one that is too large for plain HTTP.
        return
    path = blobs / f"{found.etag}{PART}"
    with Part(path, meter) as part:
        # Another process may fetch the same file; this one then continues from what it leaves.
        lock_open_file(part)
        if complete.is_file():
            return
        begun = part.count()
        if begun > found.size:  # the hub would refuse to continue it
            begun = part.truncate(0)
        if urlsplit(found.location).netloc != urlsplit(url).netloc:
            headers.pop("authorization", None)
        http_get(found.location, part, resume_size=begun, headers=headers, expected_size=found.size)
        if file.sha256 is not None:
            meter.add(0, "verifying")
            part.seek(0)
            digest = hashlib.file_digest(part, "sha256").hexdigest()  # pyright: ignore[reportArgumentType] - a file
            if digest != file.sha256:
                path.unlink(missing_ok=True)
                raise ModelCorrupt(
                    f"{file.name} of {name} arrived with SHA-256 {digest[:16]}…, but the hub states {file.sha256[:16]}…: "
                    "it is removed; pull the model again."
                )
        path.rename(complete)


def _check_sizes(name: str, folder: Path, files: list[_HubFile]) -> None:
    """Compare the sizes of a snapshot's files with the hub's. Raises `ModelCorrupt` as `verify` does.

    Raises `ModelNotFound` if one is missing: the hub's client takes an older snapshot if the hub fails meanwhile.
    """
    for file in files:
        path = folder / file.name
        if not path.is_file():
            raise ModelNotFound(
                f"{name} cannot be fetched now: the hub did not send {file.name}. Pull it again later; the download "
                "continues where it ended."
            )
        if (size := path.stat().st_size) != file.size:
            raise _damaged(name, path, f"{size:,} bytes, but the hub states {file.size:,}")


def verify(name: str, report: Report = lambda _: None) -> str:
    """Compare a complete model's files in the cache with the hub's sizes and SHA-256 for the same version.

    Returns:
        Sentence with the result, which may be that the hub cannot be asked.

    Raises:
        ModelCorrupt: a file differs. It is removed, so that another fetch gets it again, unless a process serves the model.
    """
    folder = _snapshot(name, offline=True)
    try:
        files = _in_time(name, lambda: _wanted_files(_repository(name, folder.name)), is_here=True)
    except ModelNotFound as error:
        return f"Its files were not compared: {error}"
    present = [file for file in files if (folder / file.name).is_file()]
    total = sum(file.size for file in present)
    done = 0
    _check_sizes(name, folder, present)
    for file in present:
        path = folder / file.name
        if file.sha256 is not None and sha256_of(path) != file.sha256:
            raise _damaged(name, path, "another SHA-256 than the hub states")
        done += file.size
        report(PullProgress("verifying", done, total))
    remove_outdated_parts(name)
    compared = "Its files have the hub's sizes and SHA-256."
    with contextlib.suppress(ModelNotFound):
        if _in_time(name, lambda: HfApi().model_info(name, timeout=_ANSWER_WAIT_S)).sha != folder.name:
            return f"{compared} The hub has a newer version: to get it, `mlx-ring rm {name}`, then pull the model."
    return compared


def _damaged(name: str, path: Path, found: str) -> ModelCorrupt:
    """Remove a file that differs from the hub's, unless a process serves the model, and return the error that says so."""
    if not may_remove(path.parent):
        why = (
            "a server uses it: stop that server, then pull"
            if is_held(path.parent)
            else "its file system has no locks that would show whether a server uses it: end all servers of the model, "
            f"remove {path.resolve()}, then pull"
        )
        return ModelCorrupt(f"{path.name} of {name} has {found}. It stays, because {why} the model again.")
    path.resolve().unlink(missing_ok=True)
    path.unlink(missing_ok=True)
    return ModelCorrupt(f"{path.name} of {name} has {found}: it is removed; pull the model again.")


def _repository(name: str, revision: str | None = None) -> ModelInfo:
    """Return the description of a hub repository, of its newest revision by default."""
    return HfApi().model_info(name, revision=revision, files_metadata=True, timeout=_ANSWER_WAIT_S)


def _wanted_files(info: ModelInfo) -> list[_HubFile]:
    """Return the files of a hub repository that serving needs."""
    siblings = info.siblings or []
    wanted = set(
        filter_repo_objects(
            (file.rfilename for file in siblings),
            allow_patterns=list(_WANTED),
            ignore_patterns=list(_UNWANTED),
        )
    )
    return [
        _HubFile(file.rfilename, file.size or 0, None if file.lfs is None else file.lfs.sha256)
        for file in siblings
        if file.rfilename in wanted
    ]


def _in_time(name: str, ask: Callable[[], Found], *, is_here: bool = False) -> Found:
    """Return the hub's answer within the time limit, or raise the error: name resolution alone may block for a minute."""
    answers, errors = list[Found](), list[Exception]()

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
    raise explain_failure(name, cause, is_here=is_here) from cause
