"""What a rank knows of its sequences: their tokens by position and how they are sampled."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mlx_ring.core.errors import ProtocolError
from mlx_ring.rpc.protos import step_pb2
from mlx_ring.worker.kv import KVStore
from mlx_ring.worker.sampler import Parameters, SamplerRow


@dataclass(slots=True)
class OpenSequence:
    """One sequence on this rank."""

    opened: step_pb2.Open
    tokens: list[int]
    """By position: `tokens[p]` was fed at position p."""
    sampling: Parameters
    eos: frozenset[int]
    sampled: int | None = None
    """What its previous step sampled: the input of a row with `previous`."""

    @classmethod
    def from_message(cls, opened: step_pb2.Open) -> OpenSequence:
        return cls(
            opened, list(opened.tokens), Parameters.from_message(opened.sampling), frozenset(opened.eos)
        )

    def sampler_row(self, position: int) -> SamplerRow:
        """How the token at `position` is drawn, given the tokens before it."""
        return SamplerRow(
            sampling=self.sampling,
            seed=self.opened.seed,
            position=position,
            tokens=self.tokens,
            prompt_length=self.opened.prompt_length,
            eos=self.eos,
        )


class SequenceTable:
    """Every open sequence, beside its KV. Cache operations run on both."""

    def __init__(self, kv: KVStore) -> None:
        self._kv = kv
        self._open: dict[int, OpenSequence] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._open

    def __getitem__(self, sequence: int) -> OpenSequence:
        try:
            return self._open[sequence]
        except KeyError:
            raise ProtocolError(f"Sequence {sequence} is not open here.") from None

    def apply(self, operations: Iterable[step_pb2.CacheOperation]) -> None:
        """Run a step's cache operations in their order."""
        for operation in operations:
            match operation.WhichOneof("operation"):
                case "open":
                    self._start(operation.open)
                case "fork":
                    self._fork(operation.fork)
                case "trim":
                    self._kv.trim(operation.trim.sequence, operation.trim.length)
                case "free":
                    self._free(operation.free.sequence)
                case "reset":
                    self.reset()
                case _:
                    raise ProtocolError("A cache operation names nothing to do.")

    def _start(self, opened: step_pb2.Open) -> None:
        if opened.HasField("grammar"):
            raise ProtocolError(
                f"Sequence {opened.sequence} asks for a {opened.grammar.kind!r} grammar, "
                "which this version of the worker does not apply."
            )
        self._kv.open(opened.sequence, opened.max_length)
        self._open[opened.sequence] = OpenSequence.from_message(opened)

    def _fork(self, fork: step_pb2.Fork) -> None:
        source, destination = self[fork.source], self[fork.destination]
        self._kv.fork(fork.source, fork.destination, fork.length)
        destination.tokens = source.tokens[: fork.length]

    def _free(self, sequence: int) -> None:
        self._kv.free(sequence)
        self._open.pop(sequence, None)

    def reset(self) -> None:
        """Free every sequence."""
        self._kv.reset()
        self._open.clear()

    def feed(self, row: step_pb2.Row, ids: Iterable[int]) -> None:
        """Note the tokens that a row feeds, from its start on."""
        self[row.sequence].tokens[row.start :] = ids

    def check_start(self, row: step_pb2.Row) -> None:
        """Raises `ProtocolError` when the head's idea of the KV length is not this rank's."""
        length = self._kv.length(row.sequence)
        if length != row.start:
            raise ProtocolError(
                f"Sequence {row.sequence} has {length} tokens of KV here; the step expects {row.start}."
            )
