"""Folders of a user's files, and places in the state folder, which is `--state-dir` or the user's data folder."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from mlx_ring.core.environment import library_variable
from mlx_ring.core.errors import ConfigError

_STATE = "state that outlives a run"
_GIVE_STATE = "set HOME, or MLX_RING_STATE_DIR to a folder that can be written"
_SET_CACHE = "set XDG_CACHE_HOME to a folder that can be written"


def home_folder(purpose: str, advice: str) -> Path:
    """Return this user's home.

    Args:
        purpose: what needs it, for the error.
        advice: what to do without one, for the error.

    Raises:
        ConfigError: the user has none, as with a number that no account has.
    """
    try:
        return Path.home()
    except RuntimeError as error:
        raise ConfigError(f"This user has no home folder for {purpose}: {advice}.") from error


def data_folder() -> Path:
    """Return mlx-ring's folder in this user's data, for files that outlive a run.

    Raises:
        ConfigError: the user has no home, and no other folder is set.
    """
    if sys.platform == "darwin":
        return home_folder(_STATE, _GIVE_STATE) / "Library" / "Application Support" / "mlx-ring"
    given = Path(library_variable("XDG_DATA_HOME"))
    # The XDG standard says to ignore a relative path.
    folder = given if given.is_absolute() else home_folder(_STATE, _GIVE_STATE) / ".local" / "share"
    return folder / "mlx-ring"


def cache_folder() -> Path:
    """Return the folder of files of this user that can be made again.

    Raises:
        ConfigError: the user has no home, and no other folder is set.
    """
    given = Path(library_variable("XDG_CACHE_HOME"))
    # The XDG standard says to ignore a relative path.
    folder = given if given.is_absolute() else home_folder("a cache", _SET_CACHE) / ".cache"
    return folder / "mlx-ring"


def state_folder(given: Path | None) -> Path:
    """Return the folder of state that outlives a run: `--state-dir` if it is given, or the user's data folder."""
    return given or data_folder()


AGENT_LOCK = "agent.lock"
"""Name of the lock in the node's folder that its agent holds while it runs."""
AUTHORITY_FILE = "authority.pem"
"""CA's certificate, beside a node's own."""
REVOKED_FILE = "revoked"
"""Serials of revoked certificates that the node's agent refuses, one in a line."""


def authority_folder(state: Path) -> Path:
    """Return the folder of the cluster's CA, tokens and members, which only the head's machine has."""
    return state / "cluster"


def node_folder(state: Path) -> Path:
    """Return the folder of the machine's own id, key and certificate."""
    return state / "node"


def weights_folder(state: Path) -> Path:
    """Return the folder of tensors fetched from other machines. Lost ones are fetched again."""
    return state / "weights"


def kv_folder(state: Path) -> Path:
    """Return the folder of saved KV, unless `--kv-disk-dir` names another. Lost KV is computed again."""
    return state / "kv"


def journal_folder(state: Path) -> Path:
    """Return the folder of kept answers, unless `--journal-dir` names another."""
    return state / "journal"


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


def typed_path(name: str) -> Path:
    """Return the path of a folder. `~` with an unknown user stays as it is."""
    with contextlib.suppress(RuntimeError):
        return Path(name).expanduser()
    return Path(name)


def absolute_path(path: Path) -> Path:
    """Return the absolute path without `..`, whose last name can stand for it. Links after the last `..` stay.

    A relative path stays as it is in a working folder that was removed: it leads nowhere.
    """
    try:
        whole = path.absolute()
    except FileNotFoundError:
        return path
    if ".." not in whole.parts:
        return whole
    end = len(whole.parts) - whole.parts[::-1].index("..")
    with contextlib.suppress(OSError, RuntimeError, ValueError):  # a loop of links, or no possible path
        return Path(*whole.parts[:end]).resolve().joinpath(*whole.parts[end:])
    return whole


def is_there(path: Path) -> bool:
    """Report whether a path exists; False also for a name longer than any may be, or in a folder closed to this user."""
    try:
        return path.exists()
    except OSError:
        return False
