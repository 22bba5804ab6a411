"""The names in certificates. Machines change addresses, so a certificate names the node and nobody checks an address."""

from __future__ import annotations

import re

from mlx_ring.core.errors import ConfigError

HEAD_NAME = "head.mlx-ring"
_NODE_SUFFIX = ".node.mlx-ring"
_NODE_ID = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,46}[a-z0-9])?")


def check_node_id(node: str) -> str:
    """The id itself.

    Raises:
        ConfigError: it cannot stand in a host name.
    """
    if not _NODE_ID.fullmatch(node):
        raise ConfigError(
            f"{node[:80]!r} is no node id: it takes up to 48 small letters, digits and dashes, such as mini-7f3a."
        )
    return node


def node_name(node: str) -> str:
    """The name in a node's certificate, which channels to it expect."""
    return check_node_id(node) + _NODE_SUFFIX


def node_of(name: str) -> str:
    """The node id of a certificate's name; empty where it is not a node's."""
    node = name.removesuffix(_NODE_SUFFIX)
    return node if node != name and _NODE_ID.fullmatch(node) else ""
