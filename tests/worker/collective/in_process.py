"""Twin of a collective, with both ends in one process. It matches messages by order and refuses other sizes."""

from __future__ import annotations

import queue

from mlx_ring.worker.collective.link_ends import Form

FORM = Form(hidden=3, dtype="float32", number_bytes=4)


class InProcessTransport:
    """Transport from one stage to the next."""

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[bytes | Exception] = queue.SimpleQueue()

    def send(self, message: bytearray) -> None:
        self._messages.put(bytes(message))

    def receive(self, nbytes: int) -> memoryview:
        message = self._messages.get(timeout=60)
        if isinstance(message, Exception):
            raise message
        assert len(message) == nbytes, "a collective would wait for ever, or mix messages"
        return memoryview(message)

    def fail(self, error: Exception) -> None:
        """Fail as if the other end had closed."""
        self._messages.put(error)
