"""Identity of this machine: a readable id and a key, made once and kept on disk."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass, field
from pathlib import Path

from mlx_ring.host.machine import node_name
from mlx_ring.host.private_files import locked, read_private, write_private
from mlx_ring.rpc.tls.certificates import Key, key_from_pem, key_to_pem, make_key
from mlx_ring.rpc.tls.credentials import KEY_FILE
from mlx_ring.rpc.tls.peers import check_node_id

_ID_FILE = "node-id"
_LONGEST_NAME = 40


@dataclass(frozen=True, slots=True)
class Identity:
    """A node's id and its key. Certificates change; these stay."""

    node: str
    key: Key = field(repr=False)


def open_identity(folder: Path, machine: str = "") -> Identity:
    """Open the identity in this folder. The first call makes it: `mini-7f3a` on a machine called Mini.local.

    Args:
        folder: private to this machine; the credentials lie there too.
        machine: start of a new id; by default the machine's own name.

    Raises:
        ConfigError: the files cannot be read.
    """
    with locked(folder):
        kept = read_private(folder / _ID_FILE)
        node = _new_id(machine or node_name()) if kept is None else kept.decode(errors="replace").strip()
        check_node_id(node)
        pem = read_private(folder / KEY_FILE)
        key = make_key() if pem is None else key_from_pem(pem, folder / KEY_FILE)
        if pem is None:
            write_private(folder / KEY_FILE, key_to_pem(key))
        if kept is None:
            write_private(folder / _ID_FILE, f"{node}\n".encode())
    return Identity(node, key)


def _new_id(machine: str) -> str:
    """Make an id from the machine's name and six digits, because machines may have the same name."""
    readable = re.sub(r"[^a-z0-9]+", "-", machine.split(".", 1)[0].lower())[:_LONGEST_NAME].strip("-")
    return f"{readable or 'node'}-{secrets.token_hex(3)}"
