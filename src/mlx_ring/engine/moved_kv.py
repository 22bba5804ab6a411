"""KV that moves from the ranks of one engine to those of another one, when requests move and both serve.

So does the prefix cache: without it, each conversation would be computed again from its first token on.

Every rank of the target reads its layers from those ranks of the source that have them, whatever the two cuts are. KV of
what two texts begin with moves once. It moves if that is predicted to be faster than to compute it. If anything fails,
it is computed: nothing here ends a request.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from mlx_ring.core.engine_stats import Meter
from mlx_ring.core.errors import RingError
from mlx_ring.core.generation import WayBack, WaysBack
from mlx_ring.core.types import RankId, fetch_ids, is_moved
from mlx_ring.engine.executor import Executor, KvPlace
from mlx_ring.engine.kv_budget import RankKv
from mlx_ring.engine.prefix_cache import LEAST_TOKENS, Match, Tokens
from mlx_ring.engine.resumption import Candidate, choose_way
from mlx_ring.engine.rows import drop_operation, moved_operations, parts_of
from mlx_ring.engine.scheduler import Scheduler
from mlx_ring.engine.sequence import Sequence as EngineSequence
from mlx_ring.rpc.protos import worker_pb2

log = logging.getLogger(__name__)

_LOCAL_BYTES_PER_S, _REMOTE_BYTES_PER_S = 1e9, 1e8
"""Assumed throughput within a machine, and of a link between machines that was not measured."""
_ASSUMED = (1.0, 0.02)
"""Factor by which moves take longer than links promise, and seconds for connections and waits, until they are measured."""
_SPEED, _WEIGHT, _FORGET_S = "move", 0.5, 600.0
"""Name of the measurement, the weight of the newest one, and the seconds after which slow ones are forgotten."""
_LARGE_BYTES = 4 << 20
"""Size from which a move measures the factor. The time of a smaller one is mostly that of connections and waits."""
_LEAST_WITHIN_S, _MOST_WITHIN_S, _WITHIN = 10.0, 600.0, 4.0
"""Time after which a move has failed: so many seconds at least and at most, and so many times the predicted time."""
_KEPT_WITHIN_S, _MOST_FAILURES = 30.0, 3
"""Time for the KV of ended sequences, and failures after which no more moves: the source's machines wait for it."""
_ANSWER_S = 5.0
"""Time for ranks to report that they have given up."""
_LOOK_S, _STEP_LOOK_S = 0.25, 0.002
"""Time between two looks at the engine during a fetch, and while ranks execute a step."""


@dataclass(slots=True)
class _Fetch:
    """KV that ranks read."""

    owed_by: set[RankId]
    result: asyncio.Future[str]
    """Reason of the failure; empty once every rank has read its layers."""


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
        self.clock = clock
        self._ids = fetch_ids(scheduler.epoch, moved=True)
        self._fetches: dict[int, _Fetch] = {}
        self._refused: set[str] = set()
        """Reasons that were logged."""

    @property
    def places(self) -> Sequence[KvPlace]:
        """Places of the ranks' KV; empty if no KV moves."""
        return self._executor.kv_places

    # ---- the target

    async def bring(self, source: KvMoves, sequence: EngineSequence) -> Moved:
        """Move KV of a sequence's known tokens here, if that is predicted to be faster than to compute it.

        Args:
            source: moves of the engine that runs the sequence.
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
        about = f" ({length - start} tokens; move: {_in_seconds(move.seconds)}, recompute: {_in_seconds(compute_s)})"
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

    async def bring_kept(self, source: KvMoves) -> None:
        """Move KV of ended sequences here, the last used first, as far as there is room.

        It moves where that is predicted to be faster than to compute it, and only for a limited time. The rest is computed
        once a prompt begins with it.
        """
        began, texts, failures, before = self.clock(), 0, 0, self._scheduler.kv.moved_tokens
        for sequence, tokens, reached in source._scheduler.kv.cache.texts():
            if self._error() is not None or source._error() is not None or failures == _MOST_FAILURES:
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
                texts += 1
        if texts:
            moved = texts, self._scheduler.kv.moved_tokens - before, self.clock() - began
            log.info("Moved KV of ended sequences (%d): %d tokens in %.2f s", *moved)

    def _movable_from(self, source: KvMoves, tokens: Tokens, reached: int) -> int | None:
        """Return the number of a sequence's first tokens that need not move; None if too few others can."""
        match = self._match(tokens)
        start = 0 if match is None else match.length
        if len(tokens) - start < LEAST_TOKENS or not (self.places and source.places):
            return None
        if not (objection := self._objection(source, reached)):
            return start
        if objection not in self._refused:
            self._refused.add(objection)
            log.info("KV is computed again, and not moved, because %s", objection)
        return None

    async def _move(
        self,
        source: KvMoves,
        sequence: int,
        tokens: Tokens,
        start: int,
        most_s: float = _MOST_WITHIN_S,
        *,
        is_oldest: bool = False,
    ) -> str:
        """Move a sequence's tokens from `start` on within `most_s`; return the reason if that failed."""
        count, began = len(tokens) - start, self.clock()
        within_s = min(max(_LEAST_WITHIN_S, _WITHIN * self._predict_s(source, count)), most_s)
        key = secrets.token_hex(16)
        source.export(key, sequence, len(tokens), {place.node for place in self.places}, within_s)
        try:
            sources = self._sources(source, key)
            problem = await self._fetch(tokens, start, sources, within_s, is_oldest=is_oldest)
        finally:
            source.export(key, 0, 0, (), 0.0)
        if not problem:
            self._measure(source, count, self.clock() - began)
        return problem

    async def _fetch(
        self,
        tokens: Tokens,
        start: int,
        sources: Iterable[worker_pb2.KvSource],
        within_s: float,
        *,
        is_oldest: bool,
    ) -> str:
        """Let the ranks read tokens from `start` on, and keep them; return the reason if that failed."""
        id_, is_adopted = next(self._ids), False
        fetch = _Fetch(set(self._executor.ranks), asyncio.get_running_loop().create_future())
        self._fetches[id_] = fetch
        wanted = worker_pb2.FetchKv(id=id_, sources=sources, start=start, end=len(tokens), within_s=within_s)
        try:
            self._executor.fetch_kv(wanted)
            if not (problem := await self._result(fetch, within_s + _ANSWER_S)):
                problem = await self._adopt(id_, tokens, start, within_s + _ANSWER_S, is_oldest=is_oldest)
                is_adopted = not problem
            return problem
        finally:
            del self._fetches[id_]
            if not is_adopted and self._error() is None:
                self._scheduler.kv.add_operations([drop_operation(id_, moved=True)])
                self._send(self.clock())

    async def _result(self, fetch: _Fetch, within_s: float) -> str:
        end_s = self.clock() + within_s
        while not fetch.result.done():
            if (error := self._error()) is not None:
                return f"the instance was lost: {error}"
            if self.clock() > end_s:
                return f"workers have not answered within {within_s:.0f} s"
            await asyncio.wait((fetch.result,), timeout=_LOOK_S)
        return fetch.result.result()

    def fetched(self, rank: RankId, fetched: worker_pb2.KvFetched) -> bool:
        """Record a rank's answer; return False if it concerns another kind of fetch."""
        fetch = self._fetches.get(fetched.id)
        if fetch is not None and not fetch.result.done():
            fetch.owed_by.discard(rank)
            if not fetched.blocks:
                fetch.result.set_result(
                    fetched.problem or f"worker {rank.rank} of stage {rank.stage} gave up"
                )
            elif not fetch.owed_by:
                fetch.result.set_result("")
        return is_moved(fetched.id)

    def _match(self, tokens: Tokens) -> Match | None:
        """Return the KV here of some first tokens, or of all."""
        # A look-up leaves one token over to compute.
        return self._scheduler.kv.match((*tokens, *tokens[-1:]), self._scheduler.running)

    async def _adopt(self, id_: int, tokens: Tokens, start: int, within_s: float, *, is_oldest: bool) -> str:
        """Let the ranks keep what they have read as KV of an ended sequence; return the reason if that failed."""
        kv, match = self._scheduler.kv, self._match(tokens)
        shared, source = (0, None) if match is None else (match.length, match.source)
        if shared < start:
            return f"the first {start} tokens were evicted meanwhile"
        if shared >= len(tokens):
            return "others have computed the tokens meanwhile"
        # Others may have taken the room since the fetch began.
        has_room = not is_oldest or kv.budget.has_room(len(tokens))
        entry = kv.begin_entry(tokens, spare=source) if has_room else None
        if entry is None:
            return "there is no room for it"
        if problem := await self._take_parts(
            id_, tokens, start, source, entry, within_s, is_oldest=is_oldest
        ):
            return problem
        # Another request may have taken the entry over.
        if (match := self._match(tokens)) is None or match.length < len(tokens):
            return "a worker could not keep it, or its memory was needed"
        kv.moved_tokens += len(tokens) - start
        return ""

    async def _take_parts(
        self,
        id_: int,
        tokens: Tokens,
        start: int,
        source: int | None,
        entry: int,
        within_s: float,
        *,
        is_oldest: bool,
    ) -> str:
        """Let the ranks copy a part with each step, and offer the entry with the last one; return the reason of a failure."""
        kv, is_offered = self._scheduler.kv, False
        token_bytes = max((rank.bytes_per_token for rank in self._kv.values()), default=0)
        parts = parts_of((len(tokens) - start) * token_bytes)
        try:
            for part in range(parts):
                if entry not in kv.held:
                    return "a worker could not keep it"
                # The next step takes all operations along. Rows of answers go out between the parts.
                step = self._scheduler.in_flight.sent + 1
                kv.add_operations(moved_operations(id_, tokens, start, source, entry, part, parts))
                if part == parts - 1:
                    kv.offer_entry(entry, tokens, len(tokens), is_oldest=is_oldest)
                    is_offered = True
                self._send(self.clock())
                if problem := await self._until_executed(step, within_s):
                    return problem
        finally:
            if not is_offered and self._error() is None:
                kv.free(entry)
        return ""

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

    def export(self, key: str, sequence: int, length: int, nodes: Iterable[str], within_s: float) -> None:
        """Let workers of some nodes read a sequence's first tokens, or with a length of 0 no longer."""
        if self._error() is not None:
            return
        own = {place.node for place in self.places}
        # Workers of a machine reach each other without a certificate.
        readers = {*nodes, *([""] if own & {*nodes} else [])}
        self._executor.export_kv(
            worker_pb2.ExportKv(
                key=key, sequence=sequence, length=length, within_s=within_s, nodes=sorted(readers)
            )
        )

    # ---- both

    def _objection(self, source: KvMoves, reached: int) -> str:
        """Return the reason why KV of a sequence that held `reached` tokens cannot move; empty if it can."""
        ranks = [*self._kv.values(), *source._kv.values()]
        if not self._scheduler.policy.prefix_cache:
            return "the prefix cache is off"
        if any(rank.recurrent for rank in ranks):
            return "the model has recurrent layers"
        if any(rank.slack and reached > rank.exact_length for rank in ranks):
            return "sliding layers have dropped tokens"
        for ours, theirs in self._pairs(source):
            if ours.shares != theirs.shares and max(len(ours.shares), len(theirs.shares)) > 1:
                return "ranks have other shares of the heads there"
            if not theirs.address_from(ours.node)[0]:
                return f"workers of {ours.node} do not reach those of {theirs.node}"
        return ""

    def _pairs(self, source: KvMoves) -> list[tuple[KvPlace, KvPlace]]:
        """Return the ranks here with those of the source that have some of their layers, and the same heads."""
        return [
            (ours, theirs)
            for ours in self.places
            for theirs in source.places
            if ours.rank.rank == theirs.rank.rank and _common(ours, theirs)
        ]

    def _sources(self, source: KvMoves, key: str) -> list[worker_pb2.KvSource]:
        sources: list[worker_pb2.KvSource] = []
        for ours, theirs in self._pairs(source):
            address, node = theirs.address_from(ours.node)
            layers = _common(ours, theirs)
            sources.append(
                worker_pb2.KvSource(
                    stage=ours.rank.stage,
                    rank=ours.rank.rank,
                    address=address,
                    node=node,
                    first_layer=layers.start,
                    end_layer=layers.stop,
                    key=key,
                )
            )
        return sources

    def _link_s(self, source: KvMoves, tokens: int) -> tuple[float, float]:
        """Return the seconds that the busiest machine needs at the speed of its links, and the bytes of all."""
        seconds, nbytes = defaultdict[tuple[str, str], float](float), 0.0
        for ours, theirs in self._pairs(source):
            kv = source._kv.get(theirs.rank)
            of_layer = kv.bytes_per_token / max(1, theirs.layers.end - theirs.layers.start) if kv else 0.0
            of_pair = tokens * of_layer * len(_common(ours, theirs))
            local = ours.node == theirs.node
            speed = theirs.bytes_per_s.get(ours.node) or _REMOTE_BYTES_PER_S
            of_pair_s = of_pair / (_LOCAL_BYTES_PER_S if local else speed)
            nbytes += of_pair
            for end in {("from", theirs.node), ("to", ours.node)}:
                seconds[end] += of_pair_s
        return max(seconds.values(), default=0.0), nbytes

    def _measured(self, source: KvMoves) -> tuple[float, float]:
        """Return the factor and the seconds by which times are predicted."""
        known = self._meter.measured.get(_SPEED) or source._meter.measured.get(_SPEED)
        if known is None:
            return _ASSUMED
        factor, setup_s, measured_at = known
        if self.clock() - measured_at > _FORGET_S:
            return min(factor, _ASSUMED[0]), min(setup_s, _ASSUMED[1])
        return factor, setup_s

    def _predict_s(self, source: KvMoves, tokens: int) -> float:
        factor, setup_s = self._measured(source)
        return setup_s + factor * self._link_s(source, tokens)[0]

    def _measure(self, source: KvMoves, tokens: int, taken_s: float) -> None:
        """Learn from the time of a move."""
        (link_s, nbytes), (factor, setup_s) = self._link_s(source, tokens), self._measured(source)
        if nbytes < _LARGE_BYTES:
            setup_s += _WEIGHT * (max(0.0, taken_s - factor * link_s) - setup_s)
        else:
            factor += _WEIGHT * (max(0.0, taken_s - setup_s) / link_s - factor)
        self._meter.measured[_SPEED] = [factor, setup_s, self.clock()]


def _common(one: KvPlace, other: KvPlace) -> range:
    """Return the layers that two ranks both have."""
    return range(max(one.layers.start, other.layers.start), min(one.layers.end, other.layers.end))


def _in_seconds(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{seconds:.2f} s"
