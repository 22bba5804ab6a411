"""Contract of the machines on which a head serves."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from mlx_ring.api.service import LinkInfo
from mlx_ring.core.errors import RingError
from mlx_ring.head.instance import Epoch
from mlx_ring.head.placing import Order
from mlx_ring.head.served_model import ServedModel
from mlx_ring.head.status import ClusterView
from mlx_ring.settings.config import Settings

OnNodeLost = Callable[[str, str], None]
"""Callback for a lost node, with the reason."""


@dataclass(frozen=True, slots=True)
class Declared:
    """A model to serve, with its settings."""

    served: ServedModel
    settings: Settings


class Machines(Protocol):
    """The machines of a head."""

    async def candidate_nodes(self, declared: Declared, nodes: int) -> Sequence[frozenset[str] | None]:
        """Choose the nodes that each replica of a model may use, once enough are present; None means any.

        Raises:
            PlanError: there is no room for it.
        """
        ...

    async def next_epoch(self, order: Order) -> Epoch:
        """Place an instance.

        Raises:
            PlanError: there is no room for it.
        """
        ...

    def watching(self, instance: str, on_node_lost: OnNodeLost) -> AbstractContextManager[None]:
        """Report lost nodes to `on_node_lost` while an instance lives."""
        ...

    @property
    def links(self) -> Sequence[LinkInfo]:
        """Known links between the machines."""
        ...

    @property
    def missing(self) -> int:
        """Number of machines that must still join before anything is loaded."""
        ...

    def record_failure(self, error: RingError | None, begun_s: float) -> None:
        """Record the loss or failed load of an instance that began at this Unix time.

        A node that fails repeatedly is quarantined.
        """
        ...

    def cluster_view(self) -> ClusterView:
        """Return the state of the machines."""
        ...


def new_instance(served: ServedModel) -> str:
    """Make a unique name of an instance."""
    return f"{served.local.name.rsplit('/', 1)[-1]}-{secrets.token_hex(3)}"
