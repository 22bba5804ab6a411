"""Sampled tokens on their way from the last stage to stage 0, for rows with `previous`.

The last stage sends one small message for each step that asks for it; stage 0
remembers which sequences that step sampled for, and waits only when a row needs
a token that has not come.
"""

from __future__ import annotations

from collections.abc import Iterable

from mlx_ring.core.errors import ProtocolError, RingError
from mlx_ring.rpc.failures import failure_to_error
from mlx_ring.rpc.links import SAMPLED, Inbox, LinkKey, WireTensor
from mlx_ring.worker.sequences import SequenceTable


class TokenHandover:
    """Stage 0's side."""

    def __init__(self, inbox: Inbox, sequences: SequenceTable) -> None:
        self._inbox = inbox
        self._sequences = sequences
        self._expected: dict[LinkKey, tuple[int, ...]] = {}
        self._sampled_by: dict[int, LinkKey] = {}
        self._failed: dict[int, RingError] = {}
        """Sequences whose row failed on a later stage, until they are sampled for again."""

    def expect(self, key: LinkKey, sequences: Iterable[int]) -> None:
        """Note for which sequences the last stage will send tokens under `key`."""
        self._expected[key] = tuple(sequences)
        self._sampled_by.update(dict.fromkeys(self._expected[key], key))
        for sequence in self._expected[key]:
            self._failed.pop(sequence, None)

    def has(self, sequence: int) -> bool:
        """Whether the sequence's token is here: `token` would not wait."""
        self.collect()
        return (
            sequence in self._sequences
            and sequence not in self._sampled_by
            and self._sequences[sequence].sampled is not None
        )

    def wait(self, sequence: int, deadline: float | None) -> None:
        """Wait until the step that samples for the sequence has said what it sampled.

        Raises:
            RingError: that step failed, the deadline passed, or the link broke.
        """
        self.collect()
        key = self._sampled_by.get(sequence)
        if key is None:
            return
        try:
            message = self._inbox.recv(key, deadline)
        except RingError:
            self._forget(key)
            raise
        self._file(key, message)

    def token(self, sequence: int) -> int:
        """The token that the sequence's previous step sampled, as far as that is known.

        Raises:
            ProtocolError: no step sampled one, or it was not handed over.
            RingError: what befell the sequence's row on a later stage.
        """
        token = self._sequences[sequence].sampled
        if token is None:
            raise self._failed.get(sequence) or ProtocolError(
                f"No sampled token was handed over for sequence {sequence}."
            )
        return token

    def collect(self) -> None:
        """File what has arrived, so that tokens nobody asks for do not pile up."""
        for key, message in self._inbox.take_arrived(SAMPLED):
            if isinstance(message, RingError):
                self._forget(key)
            else:
                self._file(key, message)

    def reset(self) -> None:
        """Forget every sequence."""
        self._expected.clear()
        self._sampled_by.clear()
        self._failed.clear()

    def _file(self, key: LinkKey, message: WireTensor) -> None:
        if key not in self._expected:
            return
        sequences, latest = self._forget(key)
        failed = frozenset(message.failure.sequences if message.failure is not None else ())
        if message.failure is not None:
            self._failed.update(dict.fromkeys(failed & latest, failure_to_error(message.failure)))
            self._failed = {
                sequence: error for sequence, error in self._failed.items() if sequence in self._sequences
            }
        sampled = [sequence for sequence in sequences if sequence not in failed]
        if len(sampled) != len(message.tokens):
            raise ProtocolError(
                f"{len(message.tokens)} tokens were handed over for {len(sampled)} sequences."
            )
        for sequence, token in zip(sampled, message.tokens, strict=True):
            if sequence in latest and sequence in self._sequences:
                self._sequences[sequence].sampled = token

    def _forget(self, key: LinkKey) -> tuple[tuple[int, ...], frozenset[int]]:
        """Stop expecting a step's tokens. Its sequences, and those of them that no later step samples for."""
        sequences = self._expected.pop(key, ())
        latest = frozenset(sequence for sequence in sequences if self._sampled_by.get(sequence) == key)
        for sequence in latest:
            del self._sampled_by[sequence]
        return sequences, latest
