"""KV of the stages that an engine's ranks had before: their workers have changed to another split of the layers.

The ranks read it as if another instance still had it, each its own layers. First comes that of interrupted requests, before
they continue, then that of ended ones. Until it has been read, it counts as used memory. If that is needed, the text that was
used longest ago is given up first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace

from mlx_ring.core.types import KvPlace, RankId
from mlx_ring.engine.executor import KvOrigin
from mlx_ring.engine.kv_budget import RankKv
from mlx_ring.engine.live_request import LiveRequest
from mlx_ring.engine.moved_kv import KvMoves
from mlx_ring.engine.prefix_cache import Text
from mlx_ring.engine.resumption import LeftKv

_MOST_FAILED_S = 5.0
"""Time in failed moves after which the other interrupted requests are computed again."""


@dataclass(frozen=True, slots=True)
class LeftStages:
    """KV that an engine leaves if its workers change their stages."""

    origin: KvOrigin
    texts: Sequence[Text]
    """Ended sequences, the last used first."""
    ranks: AbstractSet[RankId] = frozenset()
    """Ranks of that engine whose workers keep their KV."""
    lives: Mapping[LiveRequest, LeftKv] = field(default_factory=dict[LiveRequest, LeftKv])
    """Interrupted requests, with what that engine left of each."""


class LeftKvMoves:
    """Moves of KV to an engine from the stages that its ranks had before."""

    def __init__(self, moves: KvMoves, left: LeftStages) -> None:
        """Let the ranks keep what can move; they free the rest."""
        self._moves, self._texts = moves, left.texts
        self._lives = [
            (live, each, live.sequence.id) for live, each in left.lives.items() if live.left is each
        ]
        places = [*_present_places(left, moves.places)]
        origin = moves.origin
        self._origin = replace(
            left.origin, places=places, send=origin.send, error=origin.error, is_left=True, has=self._keeps
        )
        has_all = _layers(moves.places) <= _layers(places)
        lengths = {sequence: live.sequence.computed for live, _, sequence in self._lives}
        lengths |= {sequence: len(tokens) for sequence, tokens, _ in self._texts}
        self._lengths = lengths if has_all else dict[int, int]()
        """Tokens of each sequence that the ranks keep, the first to be given up last."""
        self._share = _share(self._origin, origin)
        self._keep()

    def _keep(self) -> None:
        tokens = math.ceil(sum(self._lengths.values()) * self._share)
        self._moves.keep_left(self._lengths, tokens, self._give_up_last)

    def _keeps(self, sequence: int) -> bool:
        return sequence in self._lengths

    def _give_up(self, sequence: int) -> None:
        """Let the ranks free a sequence."""
        if self._lengths.pop(sequence, None) is not None:
            self._keep()

    def _give_up_last(self, _spare: int | None = None) -> None:
        self._give_up([*self._lengths][-1])

    async def bring_running(self) -> None:
        """Move KV of the interrupted requests, in their order. All of them wait for it, so failures end it soon."""
        failed_s = 0.0
        for live, left, sequence in self._lives:
            is_wanted = failed_s < _MOST_FAILED_S and not live.sequence.request.computes_all
            # Another replica may have taken it over, and lost it too, or its client may have left.
            if is_wanted and sequence in self._lengths and live.left is left and not live.has_ended:
                began = self._moves.clock()
                moved = await self._moves.bring(self._origin, live.sequence)
                failed_s += 0.0 if moved.tokens else self._moves.clock() - began
                if moved.back is not None:
                    moved.back.arrive(None)
                if moved.tokens and (back := live.sequence.back) is not None:
                    back.turn("move", None)
            self._give_up(sequence)

    async def bring_rest(self) -> None:
        """Move KV of ended sequences, and let the ranks free all that is left."""
        try:
            await self._moves.bring_kept(self._origin, self._kept_texts())
        finally:
            self._lengths.clear()
            self._keep()

    def _kept_texts(self) -> Iterator[Text]:
        """Yield the texts that the ranks keep. Each is freed once the next one is wanted."""
        for text in self._texts:
            sequence, tokens, _ = text
            # It is here twice until it has been copied. Others are given up for it only if that is enough.
            if not self._moves.has_room(
                len(tokens) + math.ceil(len(tokens) * self._share), without_left=True
            ):
                self._give_up(sequence)
                continue
            while len(self._lengths) > 1 and not self._moves.has_room(len(tokens)):
                self._give_up_last()
            if sequence in self._lengths:
                yield text
            self._give_up(sequence)


def _present_places(left: LeftStages, readers: Iterable[KvPlace]) -> Iterator[KvPlace]:
    """Yield the places of KV that was left, with the present ways to its workers."""
    by_node = {place.node: place for place in readers}
    for place in left.origin.places:
        if place.rank in left.ranks and (now := by_node.get(place.node)) is not None:
            yield replace(place, address_from=now.address_from, bytes_per_s=now.bytes_per_s)


def _layers(places: Iterable[KvPlace]) -> frozenset[int]:
    return frozenset(layer for place in places for layer in range(place.layers.start, place.layers.end))


def _share(left: KvOrigin, now: KvOrigin) -> float:
    """Return the tokens here that take as much memory as one that was left, on the machine where they are most."""
    nodes = {place.node: now.kv.get(place.rank) for place in now.places}
    sizes = ((left.kv.get(place.rank), nodes.get(place.node)) for place in left.places)
    return max((_per_token(before) / max(1, _per_token(after)) for before, after in sizes), default=0.0)


def _per_token(kv: RankKv | None) -> int:
    return 0 if kv is None else kv.bytes_per_first_token
