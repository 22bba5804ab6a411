"""KV that moves from the ranks of one engine to those of another one, when requests move and both serve.

So does the prefix cache: without it, each conversation would be computed again from its first token on. `left_kv.py` moves
KV of the stages that an engine's ranks had before in the same way.

Every rank of the target reads its layers from those ranks of the source that have them, whatever the two cuts are. KV of
what two texts begin with moves once. It moves if that is predicted to be faster than to compute it. A long text comes in
pieces: one is read while the one before it is copied, so that ranks need little memory besides that of the KV. If anything
fails, the tokens that have not arrived are computed: nothing here ends a request.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from mlx_ring.core.engine_stats import Meter
from mlx_ring.core.errors import RingError
from mlx_ring.core.generation import WayBack, WaysBack
from mlx_ring.core.types import KvPlace, RankId, fetch_ids, is_moved
from mlx_ring.engine.executor import Executor, KvOrigin
from mlx_ring.engine.kv_budget import RankKv
from mlx_ring.engine.prefix_cache import LEAST_TOKENS, Extent, Match, Text, Tokens
from mlx_ring.engine.resumption import Candidate, choose_way
from mlx_ring.engine.rows import (
    adopt_operation,
    arrival_operations,
    drop_operation,
    parts_of,
    retain_operation,
)
from mlx_ring.engine.scheduler import Scheduler
from mlx_ring.engine.sequence import Sequence as EngineSequence
from mlx_ring.engine.ways_back import MoveTimes, in_seconds
from mlx_ring.rpc.protos import worker_pb2

log = logging.getLogger(__name__)

_LEAST_WITHIN_S, _MOST_WITHIN_S, _WITHIN = 10.0, 600.0, 4.0
"""Time after which a move has failed: so many seconds at least and at most, and so many times the predicted time."""
_KEPT_WITHIN_S, _MOST_FAILURES = 30.0, 3
"""Time for the KV of ended sequences, and failures after which no more moves: the source's machines wait for it."""
_PIECE_BYTES = 128 << 20
"""About the size of a piece on the rank with most. Two of them are in memory besides the KV."""
_ANSWER_S = 5.0
"""Time for ranks to report that they have given up."""
_LEFT = 1 << 50
"""Account of the KV of stages that the ranks had before, far from ids of sequences."""
_NOT_KEPT = "a worker could not keep it, or its memory was needed"
_LOOK_S, _STEP_LOOK_S = 0.25, 0.002
"""Time between two looks at the engine during a fetch, and while ranks execute a step."""


@dataclass(slots=True)
class _Fetch:
    """KV of a piece of a text, which ranks read."""

    id: int
    start: int
    end: int
    within_s: float
    owed_by: set[RankId]
    result: asyncio.Future[str]
    """Reason of the failure; empty once every rank has read its layers."""


@dataclass(slots=True)
class _Text:
    """Text whose KV arrives."""

    tokens: Tokens
    key: str
    """Secret with which ranks read it."""
    start: int
    """Number of its first tokens that need not move."""
    arrived: int
    """Number of its first tokens that every rank has, or copies with the last step."""
    is_oldest: bool
    """True if it evicts nothing, and is evicted first."""
    end_s: float
    """Time on the engine's clock from which on no more pieces are read."""
    is_there: Callable[[], bool]
    """Function that returns False once its source was given up."""
    entry: int = 0
    """Id of its KV; 0 until there is room for it."""
    is_offered: bool = False

    def pieces(self, token_bytes: int) -> Iterator[tuple[int, int]]:
        """Yield the begin and the end of each piece of the tokens that are missing."""
        first, count = self.arrived, len(self.tokens) - self.arrived
        number = min(count, max(1, -(-count * token_bytes // _PIECE_BYTES)))
        return pairwise(first + count * place // number for place in range(number + 1))


@dataclass(frozen=True, slots=True)
class Moved:
    """Result of an attempt to move KV."""

    tokens: int = 0
    """Known tokens whose KV the target has now; 0: they are to be computed."""
    back: WayBack | None = None
    """Way back that ends once they are computed."""


class KvMoves:
    """Moves of KV from and to the ranks of one engine."""

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        kv: Mapping[RankId, RankKv] | None,
        meter: Meter,
        clock: Callable[[], float],
        send: Callable[[float], None],
        error: Callable[[], RingError | None],
    ) -> None:
        """Start without any.

        Args:
            executor: transport to the ranks, which knows their places.
            scheduler: the engine's scheduler.
            kv: KV memory of each rank.
            meter: measurements of the replica.
            clock: the engine's clock.
            send: sends new steps; it receives the time.
            error: returns the reason why the engine no longer answers, if it does not.
        """
        self._executor, self._scheduler, self._meter = executor, scheduler, meter
        self._kv, self._send, self._error = dict(kv or {}), send, error
        self.clock, self._times = clock, MoveTimes(meter, clock)
        self._ids = fetch_ids(scheduler.epoch, moved=True)
        self._fetches: dict[int, _Fetch] = {}
        self._refused: set[str] = set()
        """Reasons that were logged."""

    @property
    def places(self) -> Sequence[KvPlace]:
        """Places of the ranks' KV; empty if no KV moves."""
        return self._executor.kv_places

    @property
    def _token_bytes(self) -> int:
        """Bytes of a token on the rank with most."""
        return max((rank.bytes_per_first_token for rank in self._kv.values()), default=0)

    # ---- the target

    async def bring(self, source: KvOrigin, sequence: EngineSequence) -> Moved:
        """Move KV of a sequence's known tokens here, if that is predicted to be faster than to compute it.

        Args:
            source: ranks that have it.
            sequence: the sequence there.
        """
        length, known = sequence.computed, sequence.length
        tokens = tuple(sequence.tokens[:length])
        if (start := self._movable_from(source, tokens, sequence.reached)) is None:
            return Moved()
        move_s = self._predict_s(source, length - start)
        compute_s = self._scheduler.ways.speed.seconds(start, known)
        rest_s = self._scheduler.ways.speed.seconds(length, known)
        move = Candidate(
            "move", None if rest_s is None and compute_s is not None else move_s + (rest_s or 0.0)
        )
        chosen = choose_way([move, Candidate("recompute", compute_s)])
        about = f" ({length - start} tokens; move: {in_seconds(move.seconds)}, recompute: {in_seconds(compute_s)})"
        ways = WaysBack(sequence.request.request_id, self._meter.record_way, about)
        back = ways.begin(chosen.way, move_s if chosen is move else compute_s, self.clock())
        if chosen is not move:
            return Moved(0, back)
        if problem := await self._move(source, sequence.id, tokens, start):
            log.warning("KV of %s is computed again, because it was not moved: %s", ways.what, problem)
            back.turn("recompute", None)
            return Moved(0, back)
        back.arrive(self.clock())
        return Moved(length)

    async def bring_kept(self, source: KvOrigin, texts: Iterable[Text]) -> None:
        """Move KV of ended sequences here, the last used first, as far as there is room.

        It moves where that is predicted to be faster than to compute it, and only for a limited time. The rest is computed
        once a prompt begins with it.
        """
        began, arrived, failures, before = self.clock(), 0, 0, self._scheduler.kv.moved_tokens
        for sequence, tokens, reached in texts:
            if self._error() is not None or source.error() is not None or failures == _MOST_FAILURES:
                break
            start = self._movable_from(source, tokens, reached)
            if start is None or not self._scheduler.kv.budget.has_room(len(tokens)):
                continue
            move_s = self._predict_s(source, len(tokens) - start)
            compute_s = self._scheduler.ways.speed.seconds(start, len(tokens))
            left_s = began + _KEPT_WITHIN_S - self.clock()
            if move_s > left_s or (compute_s is not None and compute_s <= move_s):
                continue
            if problem := await self._move(source, sequence, tokens, start, left_s, is_oldest=True):
                log.info("KV of %d tokens of an ended sequence was not moved: %s", len(tokens), problem)
                # It is none if others have computed the tokens meanwhile.
                failures += self._movable_from(source, tokens, reached) is not None
            else:
                arrived += 1
        if arrived:
            moved = arrived, self._scheduler.kv.moved_tokens - before, self.clock() - began
            log.info("Moved KV of ended sequences (%d): %d tokens in %.2f s", *moved)

    def has_room(self, tokens: int, *, without_left: bool = False) -> bool:
        """Return True if so many tokens could be kept without evicting a text, or if all that `keep_left` keeps were freed."""
        budget, without = self._scheduler.kv.budget, (_LEFT,) if without_left else ()
        return budget.fits(tokens, -1, without=without, spare_blocks=budget.awaited_blocks)

    def keep_left(self, ids: Collection[int], tokens: int, give_up: Callable[[int | None], None]) -> None:
        """Let ranks keep the KV of some sequences of the stages that they had before, and free the rest.

        Args:
            ids: the sequences.
            tokens: tokens here that take as much memory.
            give_up: called if some of that memory is needed, so that nothing waits for it.
        """
        if self._error() is not None:
            return
        kv = self._scheduler.kv
        kv.arriving.pop(_LEFT, None)
        if ids:
            kv.budget.charge(_LEFT, tokens)
            kv.arriving[_LEFT] = give_up
        else:
            kv.budget.hand_over(_LEFT)
        self._executor.keep_left(ids)

    def _movable_from(self, source: KvOrigin, tokens: Tokens, reached: int) -> int | None:
        """Return the number of a sequence's first tokens that need not move; None if too few others can."""
        match = self._match(tokens)
        start = 0 if match is None else match.length
        if len(tokens) - start < LEAST_TOKENS or not (self.places and source.places):
            return None
        is_off = not self._scheduler.policy.prefix_cache
        objection = "the prefix cache is off" if is_off else source.objection(self.places, self._kv, reached)
        if not objection:
            return start
        if objection not in self._refused:
            self._refused.add(objection)
            log.info("KV is computed again, and not moved, because %s", objection)
        return None

    async def _move(
        self,
        source: KvOrigin,
        sequence: int,
        tokens: Tokens,
        start: int,
        most_s: float = _MOST_WITHIN_S,
        *,
        is_oldest: bool = False,
    ) -> str:
        """Move a sequence's tokens from `start` on within `most_s`; return the reason if some have not arrived."""
        began = self.clock()
        ends = began + most_s, partial(source.has, sequence)
        text = _Text(tokens, secrets.token_hex(16), start, start, is_oldest, *ends)
        # Once for all pieces, because it waits for the source's steps.
        source.export(text.key, sequence, len(tokens), {place.node for place in self.places}, most_s)
        try:
            problem = await self._bring_pieces(text, source)
        finally:
            source.export(text.key, 0, 0, (), 0.0)
            self._keep_arrived(text)
            self._send(self.clock())
        # Another request may have taken the entry over.
        if not problem and ((match := self._match(tokens)) is None or match.length < len(tokens)):
            problem = _NOT_KEPT
        if not problem:
            self._measure(source, len(tokens) - start, self.clock() - began)
            self._scheduler.kv.moved_tokens += len(tokens) - start
        return problem

    async def _bring_pieces(self, text: _Text, source: KvOrigin) -> str:
        """Let the ranks read the missing tokens of a text, and keep them; return the reason of a failure."""
        pieces = text.pieces(self._token_bytes)
        read = [self._read(text, source, next(pieces))]
        try:
            while read:
                fetch = read[0]
                if problem := await self._result(text, fetch) or self._opening(text):
                    return problem
                # The next piece is read while this one is copied.
                if self.clock() < text.end_s and (piece := next(pieces, None)) is not None:
                    read.append(self._read(text, source, piece))
                if problem := await self._take_parts(text, fetch):
                    return problem
                self._end(text, read.pop(0))
        finally:
            for fetch in read:
                self._end(text, fetch)
        return "" if text.arrived == len(text.tokens) else "the time for it is over"

    def _read(self, text: _Text, source: KvOrigin, piece: tuple[int, int]) -> _Fetch:
        """Let the ranks read a piece of a text."""
        start, end = piece
        usual_s = max(_LEAST_WITHIN_S, _WITHIN * self._predict_s(source, end - start))
        within_s = min(usual_s, text.end_s - self.clock())
        result = asyncio.get_running_loop().create_future()
        fetch = _Fetch(next(self._ids), start, end, within_s, {*self._executor.ranks}, result)
        self._fetches[fetch.id] = fetch
        wanted = worker_pb2.FetchKv(id=fetch.id, start=start, end=end, within_s=within_s)
        wanted.sources.extend(source.sources(self.places, text.key))
        self._executor.fetch_kv(wanted)
        return fetch

    def _end(self, text: _Text, fetch: _Fetch) -> None:
        """Let the ranks forget a piece, unless they were asked to copy all of it."""
        del self._fetches[fetch.id]
        if text.arrived < fetch.end and self._error() is None:
            self._scheduler.kv.add_operations([drop_operation(fetch.id, moved=True)])
            self._send(self.clock())

    async def _result(self, text: _Text, fetch: _Fetch) -> str:
        """Wait until the ranks have read a piece of a text; return the reason if they do not."""
        end_s = self.clock() + fetch.within_s + _ANSWER_S
        while not fetch.result.done():
            if (error := self._error()) is not None:
                return f"the instance was lost: {error}"
            if text.entry and not self._is_arriving(text):
                return _NOT_KEPT
            if self.clock() > end_s:
                return f"workers have not answered within {fetch.within_s + _ANSWER_S:.0f} s"
            await asyncio.wait((fetch.result,), timeout=_LOOK_S)
        return fetch.result.result()

    def fetched(self, rank: RankId, fetched: worker_pb2.KvFetched) -> bool:
        """Record a rank's answer; return False if it concerns another kind of fetch."""
        fetch = self._fetches.get(fetched.id)
        if fetch is not None and not fetch.result.done():
            fetch.owed_by.discard(rank)
            if not fetched.blocks:
                problem = fetched.problem or f"worker {rank.rank} of stage {rank.stage} gave up"
                fetch.result.set_result(problem)
            elif not fetch.owed_by:
                fetch.result.set_result("")
        return is_moved(fetched.id)

    def _match(self, tokens: Tokens) -> Match | None:
        """Return the KV here of some first tokens, or of all."""
        # A look-up leaves one token over to compute.
        return self._scheduler.kv.match((*tokens, *tokens[-1:]), self._scheduler.running)

    def _opening(self, text: _Text) -> str:
        """Make room for a text whose first piece is there; return the reason why that cannot be kept."""
        if text.entry:
            return ""
        kv, match = self._scheduler.kv, self._match(text.tokens)
        shared, source = (0, None) if match is None else (match.length, match.source)
        if shared < text.arrived:
            return f"the first {text.arrived} tokens were evicted meanwhile"
        if shared >= len(text.tokens):
            return "others have computed the tokens meanwhile"
        # Others may have taken the room since the move began.
        has_room = not text.is_oldest or kv.budget.has_room(len(text.tokens))
        entry = kv.begin_entry(text.tokens, spare=source) if has_room else None
        if entry is None:
            return "there is no room for it"
        kv.add_operations(arrival_operations(entry, len(text.tokens), source, text.arrived))
        text.entry = entry
        if text.is_oldest:
            kv.arriving[entry] = partial(self._keep_arrived, text)
        return ""

    def _is_arriving(self, text: _Text) -> bool:
        """Return True if a text has room, and more of it can be kept."""
        return text.entry in self._scheduler.kv.held and not text.is_offered

    async def _take_parts(self, text: _Text, fetch: _Fetch) -> str:
        """Let the ranks copy a part of a piece with each step; return the reason of a failure.

        The text can be used from the last part of its last piece on.
        """
        kv, piece = self._scheduler.kv, text.tokens[fetch.start : fetch.end]
        # With the first piece, ranks allocate the memory of all tokens.
        parts = parts_of(len(piece if text.arrived > text.start else text.tokens) * self._token_bytes)
        for part in range(parts):
            if not (self._is_arriving(text) and text.is_there()):
                return _NOT_KEPT
            # The next step takes all operations along. Rows of answers go out between the parts.
            step = self._scheduler.in_flight.sent + 1
            kv.add_operations([adopt_operation(text.entry, fetch.id, fetch.start, piece, part, parts)])
            if part == parts - 1:
                # Operations that follow find the whole piece.
                text.arrived = fetch.end
                if fetch.end == len(text.tokens):
                    self._offer(text)
            self._send(self.clock())
            if problem := await self._until_executed(step, fetch.within_s + _ANSWER_S):
                return problem
        return ""

    def _offer(self, text: _Text) -> None:
        """Keep what has arrived of a text as an ended sequence."""
        kv, length, text.is_offered = self._scheduler.kv, text.arrived, True
        kv.arriving.pop(text.entry, None)
        kv.add_operations([retain_operation(text.entry)])
        kv.budget.charge(text.entry, length)
        kv.offer_entry(text.entry, text.tokens[:length], length, is_oldest=text.is_oldest)

    def _keep_arrived(self, text: _Text, spare: int | None = None) -> None:
        """Take no more of a text, and keep what has arrived; free it if that might replace `spare`, or is too little."""
        kv, arrived = self._scheduler.kv, text.tokens[: text.arrived]
        kv.arriving.pop(text.entry, None)
        if not self._is_arriving(text) or self._error() is not None:
            return
        if spare is None and kv.cache.is_worth_keeping(arrived, Extent(len(arrived), len(arrived))):
            self._offer(text)
            kv.moved_tokens += len(arrived) - text.start
            log.info("%d tokens of it had arrived, and are kept", len(arrived) - text.start)
        else:
            kv.free(text.entry)

    async def _until_executed(self, step: int, within_s: float) -> str:
        """Wait until every rank has answered a step; return the reason if that does not happen."""
        end_s = self.clock() + within_s
        while self._scheduler.in_flight.completed < step:
            if (error := self._error()) is not None:
                return f"the instance was lost: {error}"
            if self.clock() > end_s:
                return f"workers have not taken it over within {within_s:.0f} s"
            await asyncio.sleep(_STEP_LOOK_S)
        return ""

    # ---- the source

    @property
    def origin(self) -> KvOrigin:
        """Ranks of this engine, for another one to which KV moves."""
        return KvOrigin(self.places, self._kv, self._executor.export_kv, self._error, self._times)

    @property
    def texts(self) -> Sequence[Text]:
        """Ended sequences whose KV is cached, the last used first."""
        return self._scheduler.kv.cache.texts()

    def _predict_s(self, source: KvOrigin, tokens: int) -> float:
        """Return the predicted time of a move of some tokens."""
        return self._times.predict_s(source.link_use(self.places, tokens), source.times)

    def _measure(self, source: KvOrigin, tokens: int, taken_s: float) -> None:
        self._times.measure(source.link_use(self.places, tokens), taken_s, source.times)
