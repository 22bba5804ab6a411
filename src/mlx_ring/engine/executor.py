"""How steps reach the ranks and answers come back: the contract between the engine and what carries them.

`engine/grpc_executor.py` carries steps over gRPC; the tests' twin runs the ranks in the
process. Both pass the same tests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from mlx_ring.core.errors import RingError
from mlx_ring.rpc.protos import step_pb2


class RankId(NamedTuple):
    """A worker's place in the plan."""

    stage: int
    rank: int


class Listener(Protocol):
    """Who hears from the ranks. Every call comes in the event loop, never from inside `Executor.send`."""

    def answered(self, done: step_pb2.StepDone) -> None:
        """One rank has executed one step. A rank answers in stream order; ranks answer in any order."""
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

    def send(self, step: step_pb2.Step) -> None:
        """Hand a step on. Never blocks and never raises: trouble comes through the listener."""
        ...
