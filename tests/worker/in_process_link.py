"""Twin of a link, with both ends in one process, under the contract of every link."""

from __future__ import annotations

from mlx_ring.rpc.failures import failure_to_error
from mlx_ring.rpc.links import Inbox, LinkKey, WireTensor
from mlx_ring.rpc.protos import step_pb2


class InProcessLink:
    """Link whose sender stores each message in the receiver's inbox."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox

    def send(self, key: LinkKey, tensor: WireTensor) -> None:
        self._inbox.put(key, tensor)

    def send_failure(self, key: LinkKey, failure: step_pb2.Failure) -> None:
        self._inbox.put(key, failure_to_error(failure))

    def close(self) -> None:
        """Do nothing, because nothing is open."""
