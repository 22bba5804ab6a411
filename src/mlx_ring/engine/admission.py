"""Admission of sequences: the places of an engine, and what a sequence waits for, beside memory, before it may run. Pure.

Places are limited. All of them are shared evenly among clients: the client with most requests loses its newest to one
with fewer. One client alone may have every place. A sequence waits for these:

- Its grammar: all sampling ranks must have compiled it. Answers under the same grammar share one, which the ranks keep as
  long as one of these answers exists.
- Its turn alone: a sequence that may have caused losses runs without others. Its grammar is compiled alone, too.
- Its KV from the disks (`disk_kv.py`), of which the ranks copy a part with each step (`Restores` in `rows.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count, takewhile
from typing import NamedTuple, Protocol, TypeVar

from mlx_ring.core.engine_stats import Policy
from mlx_ring.core.errors import Overloaded, RequestError, RingError
from mlx_ring.core.types import Grammar, RankId
from mlx_ring.engine.sequence import Sequence
from mlx_ring.rpc.failures import failure_to_error
from mlx_ring.rpc.protos import step_pb2, worker_pb2

_RETRY_AFTER_S = 1.0
GRAMMAR_WITHIN_S = 30.0
"""Longest time for the ranks to compile a grammar, from when they have compiled those before it."""


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
        self._timed = 0
        """Id of the last grammar whose time has begun."""

    def next_to_time(self) -> int:
        """Return, once, the id of the grammar that the ranks compile now, whose time begins; 0 if there is no other one.

        They compile grammars in the order of requests. If some are waiting, the time of each begins after those before it.
        """
        oldest = next((id_ for id_, wanted in self._wanted.items() if wanted.owed_by), 0)
        before, self._timed = self._timed, oldest
        return 0 if oldest == before else oldest

    @property
    def unanswered(self) -> dict[int, dict[RankId, int]]:
        """Ranks that may be compiling a sequence's grammar, with 0 for each, by sequence."""
        return {
            number: dict.fromkeys(wanted.owed_by, 0)
            for wanted in self._wanted.values()
            if wanted.owed_by
            for number in wanted.sequences
        }

    def want(self, sequence: Sequence, grammar: Grammar) -> worker_pb2.PrepareGrammar | None:
        """Record a sequence's grammar; return the request to the ranks if it was not sent yet."""
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
            return self.fail(prepared.id, _grammar_error(wanted.grammar, prepared.failure))
        wanted.owed_by.discard(rank)
        return Settled(() if wanted.owed_by else tuple(wanted.sequences.values()))

    def time_out(self, id_: int) -> Settled:
        """Fail a grammar that is not ready in time."""
        return self.fail(
            id_,
            Overloaded(
                f"The answer's schema was not ready for this model within {GRAMMAR_WITHIN_S:g} s; "
                "try again later, or simplify it.",
                retry_after_s=GRAMMAR_WITHIN_S,
            ),
        )

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


def _grammar_error(grammar: Grammar, failure: step_pb2.Failure) -> RingError:
    """Return the error with the name of the request's field."""
    error = failure_to_error(failure)
    if isinstance(error, RequestError):
        error.param = grammar.param or None
    return error


class Suspects:
    """Sequences that may have caused a loss, each of which runs alone for a while."""

    def __init__(self, waiting: Mapping[int, Sequence], running: Mapping[int, Sequence]) -> None:
        """Start without any, beside the sequences of a scheduler, in their order."""
        self._waiting, self._running = waiting, running
        self._suspects: dict[int, Sequence] = {}
        """Sequences that have to run alone, or had to."""
        self._compiling: Sequence | None = None
        """The last one that was alone while its grammar was compiled."""
        self._lacking: dict[int, Sequence] = {}
        """Sequences, also of others, whose grammar was not requested when they were added."""

    def add(self, sequence: Sequence) -> None:
        """Add a sequence, which may be a suspect."""
        if sequence.runs_alone:
            self._suspects[sequence.id] = sequence
        if sequence.lacks_grammar:
            self._lacking[sequence.id] = sequence

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence."""
        self._suspects.pop(sequence.id, None)
        self._lacking.pop(sequence.id, None)
        if self._compiling is sequence:
            self._compiling = None

    def next_one(self) -> Sequence | None:
        """Return the suspect that runs alone, else the first one that could; None if there is none."""
        suspects = [each for each in self._suspects.values() if each.runs_alone]
        return next((each for each in suspects if each.id in self._running), next(iter(suspects), None))

    @property
    def may_be_alone(self) -> bool:
        """True if those before the next one have made progress and await no grammar."""
        return all(each.is_ready for each in self.before()) and all(
            each.has_progress for each in self._running.values()
        )

    def has_grammar(self, suspect: Sequence) -> bool:
        """Return True if a suspect that is alone now can run. If not, its grammar is compiled first."""
        if suspect.awaits_grammar:
            self._compiling = suspect
        return not suspect.awaits_grammar

    def take_lacking(self) -> list[Sequence]:
        """Return, once, the sequences whose grammar is to be compiled now.

        A suspect's is compiled while it is alone, and those of later sequences after that.
        """
        if not self._lacking:
            return []
        suspect = self.next_one()
        if suspect is None or suspect not in (self._compiling, self._running.get(suspect.id)):
            taken = [each for each in self.before() if each.id in self._lacking]
        else:
            taken = [suspect] if suspect.lacks_grammar else []
        for sequence in taken:
            del self._lacking[sequence.id]
        return taken

    def before(self) -> Iterator[Sequence]:
        """Iterate over the waiting sequences up to the first suspect."""
        return takewhile(lambda each: not each.runs_alone, self._waiting.values())


# ---- places


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


class PlaceHolder(Protocol):
    """A request that has a place."""

    @property
    def client(self) -> str: ...
    @property
    def may_be_shed(self) -> bool: ...


PlaceHolderT = TypeVar("PlaceHolderT", bound=PlaceHolder)


def choose_to_shed(
    held: Iterable[PlaceHolderT], client: str, *, wants: int, needs: int
) -> list[PlaceHolderT] | None:
    """Choose the newest waiting requests of the clients that have most.

    Args:
        held: requests that have places, the oldest first.
        client: the client that sends new requests.
        wants: number of these.
        needs: number of these that have no free place.

    Returns:
        As many requests as needed; None if that would leave another client with fewer than this one.
    """
    places, waiting = Counter({client: wants}), dict[str, list[PlaceHolderT]]()
    for each in held:
        places[each.client] += 1
        if each.may_be_shed:
            waiting.setdefault(each.client, []).append(each)
    shed: list[PlaceHolderT] = []
    while len(shed) < needs:
        most = max((name for name in waiting if waiting[name]), key=places.__getitem__, default=client)
        if places[most] <= places[client]:
            return None
        shed.append(waiting[most].pop())
        places[most] -= 1
    return shed
