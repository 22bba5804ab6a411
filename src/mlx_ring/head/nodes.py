"""What a head asks of the machines that it serves with."""

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
"""A node is gone, and why."""


@dataclass(frozen=True, slots=True)
class Declared:
    """A model to be served, with the settings that hold for it."""

    served: ServedModel
    settings: Settings


class Machines(Protocol):
    """What a head asks of them."""

    async def candidate_nodes(self, declared: Declared, nodes: int) -> Sequence[frozenset[str] | None]:
        """Which nodes each replica of a model is to have, once so many are there; None: any.

        Raises:
            PlanError: there is no room for it.
        """
        ...

    async def next_epoch(self, order: Order) -> Epoch:
        """Where an instance goes now.

        Raises:
            PlanError: there is no room for it.
        """
        ...

    def watching(self, instance: str, on_node_lost: OnNodeLost) -> AbstractContextManager[None]:
        """While an instance lives: `on_node_lost` is told of nodes that go."""
        ...

    @property
    def links(self) -> Sequence[LinkInfo]:
        """What is known of the links between them."""
        ...

    @property
    def missing(self) -> int:
        """How many more machines must join before anything is loaded."""
        ...

    def record_failure(self, error: RingError | None, begun_s: float) -> None:
        """An instance that was begun then, since the Unix epoch, was lost, or could not be loaded.

        A node that this happens to again and again is left out.
        """
        ...

    def cluster_view(self) -> ClusterView:
        """How they stand now."""
        ...


def new_instance(served: ServedModel) -> str:
    """A name that no other instance has."""
    return f"{served.local.name.rsplit('/', 1)[-1]}-{secrets.token_hex(3)}"
