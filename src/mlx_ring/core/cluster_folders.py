"""Where in the state folder a machine keeps what. A head has both folders: its machine is a node too."""

from __future__ import annotations

from pathlib import Path

AGENT_LOCK = "agent.lock"
"""Name of the lock in the node's folder that its agent holds while it runs."""
AUTHORITY_FILE = "authority.pem"
"""Beside a node's certificate: whom it trusts."""


def authority_folder(state: Path) -> Path:
    """The cluster's CA, tokens and members; only the head's machine has it."""
    return state / "cluster"


def node_folder(state: Path) -> Path:
    """The machine's own id, key and certificate."""
    return state / "node"


def weights_folder(state: Path) -> Path:
    """The tensors that the machine has fetched from others; what is lost there is fetched again."""
    return state / "weights"


def manifests_folder(state: Path) -> Path:
    """Digests of the models that lie on this machine; what is lost there is computed again."""
    return state / "manifests"


def packages_folder(state: Path) -> Path:
    """Packages that were fetched for machines of other systems; what is lost there is fetched again."""
    return state / "packages"


def running_folder(state: Path) -> Path:
    """A note of each head and agent that runs here."""
    return state / "running"


def logs_folder(state: str) -> str:
    """Where head and agent of a cluster that was started from one file write, wherever that was."""
    return f"{state}/logs"
