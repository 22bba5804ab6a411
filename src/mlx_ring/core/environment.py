"""Environment variables that libraries of this process and its children read, and installed versions.

Settings of ours come by `config.py`.

Processes that compute need variables that are read before any argument is.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

_OUR_GRPC_LEVEL = "info"
"""Level in lower case, which gRPC accepts and users do not write, so that it is recognized as ours."""


def quieten_grpc() -> None:
    """Keep gRPC's C library from writing untagged lines, in this process and in its children.

    Call it before gRPC is imported. gRPC also reports what matters through its errors.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def enable_grpc_logs() -> None:
    """Let gRPC's C library write why it refused a connection, for `rpc/tls/handshakes.py`.

    gRPC reads its level when it is imported, and writes by default. So a process that inherited silence must be
    started with `environment_with_grpc_logs`. A level that the user has set stays; children are silent again.
    """
    if os.environ.get("GRPC_VERBOSITY", "NONE") == "NONE":
        os.environ["GRPC_VERBOSITY"] = _OUR_GRPC_LEVEL


def quieten_transformers() -> None:
    """Keep transformers from recommending PyTorch, as mlx-lm does as a whole.

    Call it before transformers is imported.
    """
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


def leave_out_pydantic_plugins() -> None:
    """Keep pydantic from looking for plugins, for which it reads the metadata of all installed packages.

    Call it before the first model is made.
    """
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")


def library_variable(name: str) -> str:
    """Return a variable for a library of this process; empty if it is not set."""
    return os.environ.get(name, "")


_OF_LIBRARIES = (
    *("HF_HOME", "HF_HUB_CACHE", "HF_ENDPOINT", "HF_HUB_OFFLINE", "HF_TOKEN", "OLLAMA_MODELS"),
    *("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "SSL_CERT_FILE", "SSL_CERT_DIR"),
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"),
)
"""Variables that decide where models, state and networks are. Those of proxies may be in lower case."""


def library_variables() -> tuple[str, ...]:
    """Return the names of those variables that are set."""
    return tuple(name for given in _OF_LIBRARIES for name in (given, given.lower()) if os.environ.get(name))


def take_variable(name: str) -> str:
    """Remove a variable, so that no child inherits it, and return it; empty if it is not set."""
    return os.environ.pop(name, "")


def restart_without(secret: str, flag: str, variable: str) -> None:
    """Start this process's program again with a variable instead of a secret flag, which every user can read otherwise.

    Return if this process was not started with the flag, or cannot be started again.
    """
    words: list[str] = []
    given = iter(sys.orig_argv[1:])
    for word in given:
        if word == flag:
            next(given, None)
        elif not word.startswith(f"{flag}="):
            words.append(word)
    if secret and len(words) < len(sys.orig_argv) - 1:
        with contextlib.suppress(OSError):
            os.execve(sys.executable, [sys.executable, *words], {**os.environ, variable: secret})  # noqa: S606 - no shell is wanted


def set_for_libraries(variables: Mapping[str, str]) -> None:
    """Set variables for libraries of this process that offer no other way."""
    os.environ.update(variables)


def inherited_environment(changes: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of this process with changes, for a child."""
    inherited = dict(os.environ)
    if inherited.get("GRPC_VERBOSITY") == _OUR_GRPC_LEVEL:
        inherited["GRPC_VERBOSITY"] = "NONE"
    return inherited | dict(changes)


def environment_with_grpc_logs(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which gRPC writes why it refused a connection. A level that the user has set stays."""
    changes = (
        {} if environment.get("GRPC_VERBOSITY", "NONE") != "NONE" else {"GRPC_VERBOSITY": _OUR_GRPC_LEVEL}
    )
    return dict(environment) | changes


_TUNABLES, _HUGE_PAGES = "GLIBC_TUNABLES", "glibc.malloc.hugetlb"


def worker_environment(blas_threads: int) -> dict[str, str]:
    """Return the whole environment of a worker by its number of BLAS threads.

    On Linux it asks for large pages of memory if the system only gives them on request (`madvise`, the default of most
    distributions). Weights then need one entry of the address tables for 2 MiB instead of 4 KiB.
    Decoding 130 M parameters in float32 was 5 to 17 % faster with them. A setting of the user stays.
    """
    threads = str(blas_threads)
    environment = inherited_environment({"OPENBLAS_NUM_THREADS": threads, "OMP_NUM_THREADS": threads})
    tunables = environment.get(_TUNABLES, "")
    if sys.platform == "linux" and _HUGE_PAGES not in tunables:
        environment[_TUNABLES] = ":".join(filter(None, (tunables, f"{_HUGE_PAGES}=1")))
    return environment


@cache
def has_cuda_build() -> bool:
    """Report whether MLX's build for NVIDIA GPUs is installed. Does not load MLX."""
    # A look at the names of installed packages; reading the metadata of all would take a tenth of a head's start.
    return any(any(Path(folder).glob("mlx_cuda*.dist-info")) for folder in sys.path)


@cache
def package_version(name: str) -> str:
    """Return the installed version of a package, "absent" if there is none."""
    from mlx_cpu_kernels.packages import version_of  # imports code that greetings alone do not need

    return version_of(name) or "absent"


def program(*, shows_folders: bool = True) -> str:
    """Return the name by which this program was called, for commands to paste.

    Args:
        shows_folders: False for readers elsewhere, who need not know the folders above the working folder.
    """
    called = Path(sys.argv[0])
    if shutil.which("mlx-ring") or called.name != "mlx-ring" or (called.is_absolute() and not shows_folders):
        return "mlx-ring"
    return str(called)
