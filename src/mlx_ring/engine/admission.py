"""Admission to the queue: grammars that must be compiled first, and load shedding when the queue is full. Pure.

A request waits until all sampling ranks have compiled its grammar. Answers under the same grammar share one, which the
ranks keep as long as one of these answers exists.

A full queue is shared evenly among clients: the client with most requests loses its newest to one with fewer. One
client alone may fill the queue.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from mlx_ring.core.engine_stats import Policy
from mlx_ring.core.errors import Overloaded, RequestError, RingError
from mlx_ring.core.types import Grammar, RankId
from mlx_ring.engine.sequence import Sequence
from mlx_ring.rpc.failures import failure_to_error
from mlx_ring.rpc.protos import step_pb2, worker_pb2

_RETRY_AFTER_S = 1.0


def check_places(requests: int, policy: Policy, *, free: int, waiting: int) -> None:
    """Check that requests that belong together can be admitted to the queue now.

    Args:
        requests: number of requests.
        policy: limits of the scheduler.
        free: number of free places.
        waiting: number of requests in the queue.

    Raises:
        RequestError: there are more than the server ever admits.
        Overloaded: the queue has no room for them now.
    """
    most = policy.most_requests
    if requests > most:
        raise RequestError(
            f"This request asks for {requests} answers (its prompts times n), but the server accepts {most} at once "
            f"(--max-num-seqs {policy.max_num_seqs}, --max-queued-requests {policy.max_queued_requests}): ask for fewer.",
            param="n",
        )
    if requests > free:
        wait = "1 request waits" if waiting == 1 else f"{waiting} requests wait"
        asked = f", and this one asks for {requests} answers" if requests > 1 else ""
        raise Overloaded(
            f"{wait} already{asked}; try again in {_RETRY_AFTER_S:g} s.",
            retry_after_s=_RETRY_AFTER_S,
        )


def shed_error() -> Overloaded:
    """Return the error of a waiting request that was shed for another client."""
    return Overloaded(
        "The queue is full, and this client has the most requests in it: one of them was shed for another client; "
        f"try again in {_RETRY_AFTER_S:g} s.",
        retry_after_s=_RETRY_AFTER_S,
    )


@dataclass(frozen=True, slots=True)
class QueuePlace:
    """A place that a client holds."""

    sequence: int
    client: str
    may_be_shed: bool
    """True if the request waits and nothing was computed for it yet."""


def choose_to_shed(held: Iterable[QueuePlace], client: str, *, wants: int, needs: int) -> list[int] | None:
    """Choose the newest waiting sequences of the clients that have most.

    Args:
        held: places, the oldest first.
        client: the client that sends requests.
        wants: number of its new requests.
        needs: number of these that have no free place.

    Returns:
        As many sequences as needed; None if that would leave another client with fewer than this one.
    """
    places, waiting = Counter({client: wants}), dict[str, list[int]]()
    for each in held:
        places[each.client] += 1
        if each.may_be_shed:
            waiting.setdefault(each.client, []).append(each.sequence)
    shed: list[int] = []
    while len(shed) < needs:
        most = max((name for name in waiting if waiting[name]), key=places.__getitem__, default=client)
        if places[most] <= places[client]:
            return None
        shed.append(waiting[most].pop())
        places[most] -= 1
    return shed


@dataclass(slots=True)
class _Wanted:
    """A grammar that the ranks have, or are compiling."""

    grammar: Grammar
    owed_by: set[RankId]
    """Ranks that have not compiled it yet."""
    sequences: dict[int, Sequence] = field(default_factory=dict[int, Sequence])


class Settled(NamedTuple):
    """Sequences whose wait for a grammar has ended."""

    sequences: tuple[Sequence, ...]
    error: RingError | None = None
    """Error of the grammar, if it failed."""


class Grammars:
    """Grammars of one instance, for one epoch."""

    def __init__(self, ranks: Iterable[RankId]) -> None:
        """Start with the sampling ranks. If one of them cannot compile a grammar, it fails for all."""
        self._ranks = frozenset(ranks)
        self._ids = count(1)
        self._wanted: dict[int, _Wanted] = {}
        self._shared: dict[Grammar, int] = {}
        """Grammars that further sequences may join."""

    def want(self, sequence: Sequence) -> worker_pb2.PrepareGrammar | None:
        """Record a sequence's grammar; return the request to the ranks if it was not sent yet."""
        grammar = sequence.request.sampling.grammar
        if grammar is None:
            return None
        known = self._shared.get(grammar)
        id_ = next(self._ids) if known is None else known
        wanted = self._wanted.setdefault(id_, _Wanted(grammar, set(self._ranks)))
        wanted.sequences[sequence.id] = sequence
        sequence.grammar_id, sequence.awaits_grammar = id_, bool(wanted.owed_by)
        if known is not None:
            return None
        self._shared[grammar] = id_
        return worker_pb2.PrepareGrammar(
            id=id_, grammar=step_pb2.Grammar(kind=grammar.kind, text=grammar.text)
        )

    def answered(self, rank: RankId, prepared: worker_pb2.GrammarPrepared) -> Settled:
        """Record a rank's answer about a grammar; return the sequences whose wait it ends."""
        wanted = self._wanted.get(prepared.id)
        if wanted is None:
            return Settled(())
        if prepared.HasField("failure"):
            return self.fail(prepared.id, _error(wanted.grammar, prepared.failure))
        wanted.owed_by.discard(rank)
        return Settled(() if wanted.owed_by else tuple(wanted.sequences.values()))

    def fail(self, id_: int, error: RingError) -> Settled:
        """Fail a grammar that is not ready, for all sequences that wait for it."""
        wanted = self._wanted.get(id_)
        if wanted is None or not wanted.owed_by:
            return Settled(())
        self._unshare(id_, wanted)
        return Settled(tuple(wanted.sequences.values()), error)

    def leave(self, sequence: Sequence, *, is_spoiled: bool = False) -> int | None:
        """Record the end of a sequence; return the id of a grammar that is no longer used.

        A grammar that may have reached its limits is not shared with later requests.
        """
        wanted = self._wanted.get(sequence.grammar_id)
        if wanted is None or wanted.sequences.pop(sequence.id, None) is None:
            return None
        if is_spoiled or not wanted.sequences:
            self._unshare(sequence.grammar_id, wanted)
        if wanted.sequences:
            return None
        del self._wanted[sequence.grammar_id]
        return sequence.grammar_id

    def _unshare(self, id_: int, wanted: _Wanted) -> None:
        if self._shared.get(wanted.grammar) == id_:
            del self._shared[wanted.grammar]


def _error(grammar: Grammar, failure: step_pb2.Failure) -> RingError:
    """Return the error with the name of the request's field."""
    error = failure_to_error(failure)
    if isinstance(error, RequestError):
        error.param = grammar.param or None
    return error
