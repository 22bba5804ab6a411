"""Admission to an instance and to its queue. Pure.

Each request goes to the instance with the lowest cost: the number of tokens that it would compute before the request's
first token. These are its waiting prompts, the request's tokens after the cached prefix, and an amount for each running
sequence. A conversation therefore returns to the instance that holds its KV cache, unless that instance is too busy.

A request waits until all sampling ranks have compiled its grammar. Answers under the same grammar share one, which the
ranks keep as long as one of these answers exists. A request that may have caused losses runs alone, and its grammar is
compiled alone.

A full queue is shared evenly among clients: the client with most requests loses its newest to one with fewer. One
client alone may fill the queue.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from itertools import count, takewhile
from typing import NamedTuple, Protocol

from mlx_ring.core.engine_stats import Policy
from mlx_ring.core.errors import NotReady, Overloaded, RequestError, RingError
from mlx_ring.core.generation import GenerateRequest, RequestStream
from mlx_ring.core.types import Grammar, RankId
from mlx_ring.engine.sequence import Sequence
from mlx_ring.rpc.failures import failure_to_error
from mlx_ring.rpc.protos import step_pb2, worker_pb2

_RETRY_AFTER_S = 1.0
GRAMMAR_WITHIN_S = 30.0
"""Longest time for the ranks to compile a grammar, from when they have compiled those before it."""


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


def choose_places_to_shed(
    held: Iterable[QueuePlace], client: str, *, wants: int, needs: int
) -> list[int] | None:
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
            return self.fail(prepared.id, _error(wanted.grammar, prepared.failure))
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
        return not any(each.awaits_grammar for each in self.before()) and all(
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


def _error(grammar: Grammar, failure: step_pb2.Failure) -> RingError:
    """Return the error with the name of the request's field."""
    error = failure_to_error(failure)
    if isinstance(error, RequestError):
        error.param = grammar.param or None
    return error


# ---- choice of the instance

SEQUENCE_TOKENS = 64
"""Cost of a running sequence for a new one, in prompt tokens: decode steps go between its chunks."""


@dataclass(frozen=True, slots=True)
class Load:
    """Load of one instance, and its cost for some prompts."""

    is_open: bool
    """True if it answers."""
    sequences: int
    """Number of sequences that run or wait there."""
    tokens_to_read: int
    """Number of their prompt tokens that are not yet computed."""
    shared_tokens: int
    """Tokens of the new prompts that are cached there."""

    def cost(self, prompt_tokens: int) -> int:
        """Return the cost of a prompt's first token, in tokens to compute."""
        own = prompt_tokens - self.shared_tokens
        return self.tokens_to_read + own + SEQUENCE_TOKENS * self.sequences


class Routed(Protocol):
    """An engine that the router can choose."""

    def load_for(self, prompts: Iterable[tuple[int, ...]]) -> Load: ...
    def submit_all(self, *requests: GenerateRequest) -> list[RequestStream]: ...
    def make_room(self, *requests: GenerateRequest) -> bool:
        """Shed other clients' requests for these, if fairness allows it; return False if not."""
        ...


class Router:
    """A router that gives each request to one of several engines."""

    def __init__(self, engines: Callable[[], Ordered[Routed]]) -> None:
        """Route among the engines that `engines` returns at the time."""
        self._engines = engines
        self._turn = 0
        self.rejected: Counter[str] = Counter()
        """Requests that were refused, by the error's name."""

    def submit_all(self, *requests: GenerateRequest) -> list[RequestStream]:
        """Start to answer requests that belong together, on one instance.

        Raises:
            RequestError: the model cannot serve one of them, or there are more than the server ever admits.
            Overloaded: too many requests wait everywhere.
            NotReady: no instance can answer.
        """
        try:
            return self._submit(requests)
        except RingError as error:
            self.rejected[type(error).__name__] += len(requests)
            raise

    def _submit(self, requests: Ordered[GenerateRequest]) -> list[RequestStream]:
        refusal: Overloaded | None = None
        engines = self._by_cost(requests)
        for engine in engines:
            try:
                return engine.submit_all(*requests)
            except Overloaded as error:
                refusal = refusal or error
        for engine in engines:
            if engine.make_room(*requests):
                return engine.submit_all(*requests)
        raise refusal or NotReady("No instance of the model can answer now.")

    def _by_cost(self, requests: Ordered[GenerateRequest]) -> list[Routed]:
        """Return the engines that answer, the cheapest first; equal ones in turn."""
        engines = self._engines()
        if len(engines) < 2:  # noqa: PLR2004 - no choice
            return list(engines)
        self._turn += 1
        turned = [engines[(place + self._turn) % len(engines)] for place in range(len(engines))]
        prompts = list(dict.fromkeys(request.prompt_tokens for request in requests))
        tokens = max((len(prompt) for prompt in prompts), default=0)
        loads = [engine.load_for(prompts) for engine in turned]
        by_load = sorted(zip(loads, turned, strict=True), key=lambda pair: pair[0].cost(tokens))
        return [engine for load, engine in by_load if load.is_open]
