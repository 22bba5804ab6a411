"""Places of a machine's files in the state folder. A head has both folders, because its machine is also a node."""

from __future__ import annotations

from pathlib import Path

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
