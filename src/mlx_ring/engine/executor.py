"""How steps reach the ranks and answers come back: the contract between the engine and what carries them.

`engine/grpc_executor.py` carries steps over gRPC; the tests' twin runs the ranks in the
process. Both pass the same tests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from mlx_ring.core.errors import RingError
from mlx_ring.rpc.protos import step_pb2, worker_pb2


class RankId(NamedTuple):
    """A worker's place in the plan."""

    stage: int
    rank: int


def ranks_that_draw(ranks: Sequence[RankId]) -> list[RankId]:
    """Those of the last stage: all of them, for they draw alike."""
    last = max(rank.stage for rank in ranks)
    return [rank for rank in ranks if rank.stage == last]


class Listener(Protocol):
    """Who hears from the ranks. Every call comes in the event loop, never from inside `Executor.send`."""

    def answered(self, done: step_pb2.StepDone) -> None:
        """One rank has executed one step. A rank answers in stream order; ranks answer in any order."""
        ...

    def prepared(self, rank: RankId, prepared: worker_pb2.GrammarPrepared) -> None:
        """A rank that draws has made a grammar, or cannot. Comes in any order."""
        ...

    def failed(self, error: RingError) -> None:
        """The instance is lost: a worker died, a channel broke, a deadline passed. Said once, and last."""
        ...


class Executor(Protocol):
    """Carries every step to every rank of every stage, in one order."""

    @property
    def ranks(self) -> Sequence[RankId]:
        """Every rank of every stage, in order of stage and rank."""
        ...

    def set_listener(self, listener: Listener) -> None:
        """Who is told. Set once, before the first step."""
        ...

    def limit_kv(self, limits: Mapping[RankId, int]) -> None:
        """Tell each rank how many bytes of KV it may hold; before the first step."""
        ...

    def prepare(self, wanted: worker_pb2.PrepareGrammar) -> None:
        """Have every rank of the last stage make a grammar, while steps go on."""
        ...

    def drop_grammar(self, id_: int) -> None:
        """They need it no more, behind the steps that were sent."""
        ...

    def send(self, step: step_pb2.Step) -> None:
        """Hand a step on. Never blocks and never raises: trouble comes through the listener."""
        ...
