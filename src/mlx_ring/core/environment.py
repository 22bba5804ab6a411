"""Environment variables that libraries of this process and its children read, installed versions, and places of files.

Settings of ours come by `config.py`.

Processes that compute need variables that are read before any argument is.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from mlx_ring.core.errors import ConfigError

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


def library_variable(name: str) -> str:
    """Return a variable for a library of this process; empty if it is not set."""
    return os.environ.get(name, "")


def data_folder() -> Path:
    """Return mlx-ring's folder in this user's data, for files that outlive a run."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "mlx-ring"
    given = Path(os.environ.get("XDG_DATA_HOME", ""))
    # The XDG standard says to ignore a relative path.
    return (given if given.is_absolute() else Path.home() / ".local" / "share") / "mlx-ring"


def cache_folder() -> Path:
    """Return the folder of files of this user that can be made again.

    Raises:
        ConfigError: the user has no home, and no other folder is set.
    """
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG standard says to ignore a relative path.
    if given.is_absolute():
        return given / "mlx-ring"
    try:
        return Path.home() / ".cache" / "mlx-ring"
    except RuntimeError as error:
        raise ConfigError(
            "This user has no home folder for a cache: set XDG_CACHE_HOME to a folder that can be written."
        ) from error


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
def package_version(name: str) -> str:
    """Return the installed version of a package, "absent" if there is none."""
    from mlx_cpu_kernels.packages import version_of  # imports code that greetings alone do not need

    return version_of(name) or "absent"


# ---- places in the state folder. A head has both folders, because its machine is also a node.

AGENT_LOCK = "agent.lock"
"""Name of the lock in the node's folder that its agent holds while it runs."""
AUTHORITY_FILE = "authority.pem"
"""CA's certificate, beside a node's own."""


def authority_folder(state: Path) -> Path:
    """Return the folder of the cluster's CA, tokens and members, which only the head's machine has."""
    return state / "cluster"


def node_folder(state: Path) -> Path:
    """Return the folder of the machine's own id, key and certificate."""
    return state / "node"


def weights_folder(state: Path) -> Path:
    """Return the folder of tensors fetched from other machines. Lost ones are fetched again."""
    return state / "weights"


def manifests_folder(state: Path) -> Path:
    """Return the folder of digests of local models. Lost ones are computed again."""
    return state / "manifests"


def packages_folder(state: Path) -> Path:
    """Return the folder of packages fetched for machines of other systems. Lost ones are fetched again."""
    return state / "packages"


def running_folder(state: Path) -> Path:
    """Return the folder of records of the heads and agents that run here."""
    return state / "running"


def logs_folder(state: str) -> str:
    """Return the folder in which head and agent of a cluster log that was started from one file."""
    return f"{state}/logs"
