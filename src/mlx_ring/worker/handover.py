"""Sampled tokens on their way from the last stage to stage 0, for rows with `previous`.

The last stage sends one small tensor for each step that asks for it; stage 0
remembers which sequences that step sampled for, and waits only when a row needs
a token that has not come.
"""

from __future__ import annotations

from collections.abc import Iterable

from mlx_ring.core.errors import ProtocolError, RingError
from mlx_ring.rpc.links import SAMPLED, Inbox, LinkKey, WireTensor
from mlx_ring.rpc.protos import step_pb2
from mlx_ring.worker.sequences import SequenceTable


def samples_token(row: step_pb2.Row) -> bool:
    """Whether a row's result includes a sampled token."""
    return any(want.what == step_pb2.Want.TOKEN for want in row.wants)


class TokenHandover:
    """Stage 0's side."""

    def __init__(self, inbox: Inbox, sequences: SequenceTable) -> None:
        self._inbox = inbox
        self._sequences = sequences
        self._expected: dict[LinkKey, tuple[int, ...]] = {}
        self._sampled_by: dict[int, LinkKey] = {}

    def expect(self, key: LinkKey, rows: Iterable[step_pb2.Row]) -> None:
        """Note whose tokens the last stage will send under `key`."""
        sequences = tuple(row.sequence for row in rows if samples_token(row))
        self._expected[key] = sequences
        self._sampled_by.update(dict.fromkeys(sequences, key))

    def token(self, sequence: int, deadline: float | None) -> int:
        """The token that the sequence's previous step sampled; waits for it if need be.

        Raises:
            ProtocolError: no step sampled one, or it was not handed over.
            RingError: that step failed, the deadline passed, or the link broke.
        """
        self.collect()
        key = self._sampled_by.get(sequence)
        if key is not None and key in self._expected:
            self._wait(key, deadline)
        token = self._sequences[sequence].sampled
        if token is None:
            raise ProtocolError(f"No sampled token was handed over for sequence {sequence}.")
        return token

    def _wait(self, key: LinkKey, deadline: float | None) -> None:
        try:
            message = self._inbox.recv(key, deadline)
        except RingError:
            self._forget(key)
            raise
        self._file(key, message)

    def collect(self) -> None:
        """File what has arrived, so that tokens nobody asks for do not pile up."""
        for key, message in self._inbox.take_arrived(SAMPLED):
            if isinstance(message, RingError):
                self._forget(key)
            else:
                self._file(key, message)

    def _file(self, key: LinkKey, message: WireTensor) -> None:
        for sequence, token in zip(self._forget(key), message.tokens, strict=True):
            if sequence in self._sequences:
                self._sequences[sequence].sampled = token

    def _forget(self, key: LinkKey) -> tuple[int, ...]:
        sequences = self._expected.pop(key, ())
        for sequence in sequences:
            if self._sampled_by.get(sequence) == key:
                del self._sampled_by[sequence]
        return sequences
