"""Has the links between all nodes measured: by their agents, over the addresses that activations take, before a plan is made."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from mlx_ring.cluster.agent_link import AgentLink
from mlx_ring.cluster.found_links import FoundLink, rounds
from mlx_ring.core.errors import ProtocolError, RingError, WorkerStuck
from mlx_ring.rpc.hello import make_hello
from mlx_ring.rpc.protos import agent_pb2

log = logging.getLogger(__name__)

MAX_AGE_S = 24 * 3600.0
"""Nodes keep what they have measured, and it is good for so long between the same two addresses."""
_ANSWER_S = 8.0
"""For one measurement; the node's own bounds are below."""


@dataclass(frozen=True, slots=True)
class LinkEnd:
    """A node whose links are measured."""

    node: str
    came: int
    """Which of its attendances: it may have moved since the last."""
    agent: AgentLink
    address_from: Callable[[str], str]
    """Where another node, by its id, reaches what answers probes here; empty: there is nothing to measure, either way."""


class LinkSurvey:
    """All that is known of the links between the nodes of a cluster."""

    def __init__(
        self, node: str, clock: Callable[[], float] = time.time, *, keeps_problems: bool = False
    ) -> None:
        """`node` is the head's own; `clock` gives Unix seconds; with `keeps_problems` what did not work is not tried again."""
        self._node = node
        self._clock = clock
        self._keeps_problems = keeps_problems
        self._found: dict[tuple[str, str], tuple[FoundLink, object]] = {}
        """By source and target, with what it holds for."""
        self._alone = asyncio.Lock()

    @property
    def found(self) -> tuple[FoundLink, ...]:
        """What is known now, of nodes that are there and of those that were."""
        return tuple(link for link, _ in self._found.values())

    async def take(self, ends: Sequence[LinkEnd]) -> tuple[FoundLink, ...]:
        """The links between these nodes, each way. What is not known yet, or did not work, is measured now.

        A link that cannot be measured is told with the reason, and holds nobody up for longer than some seconds.
        """
        by_node = {end.node: end for end in ends}
        async with self._alone:
            for pairs in rounds(sorted(by_node)):
                await asyncio.gather(
                    *(self._measure_pair(by_node[one], by_node[other]) for one, other in pairs)
                )
        return tuple(link for link in self.found if link.source in by_node and link.target in by_node)

    async def _measure_pair(self, one: LinkEnd, other: LinkEnd) -> None:
        """There and then back, unless nothing gets there."""
        if not (other.address_from(one.node) and one.address_from(other.node)):
            return
        if not (await self._known_or_measured(one, other)).problem:
            await self._known_or_measured(other, one)

    async def _known_or_measured(self, source: LinkEnd, target: LinkEnd) -> FoundLink:
        address = target.address_from(source.node)
        holds_for = (source.came, target.came, address)
        known, held_for = self._found.get((source.node, target.node), (None, None))
        if known is not None and held_for == holds_for and self._is_good(known):
            return known
        measured = await self._measure(source, target, address)
        self._found[source.node, target.node] = measured, holds_for
        return measured

    def _is_good(self, known: FoundLink) -> bool:
        if known.problem:
            return self._keeps_problems
        return self._clock() - known.unix_time_s < MAX_AGE_S

    async def _measure(self, source: LinkEnd, target: LinkEnd, address: str) -> FoundLink:
        try:
            try:
                said = await self._ask(source, target, address)
            except WorkerStuck:
                # Who is busy with something else for a moment is no broken link.
                said = await self._ask(source, target, address)
        except RingError as error:
            log.warning("the link from %s to %s could not be measured: %s", source.node, target.node, error)
            return FoundLink(source.node, target.node, problem=str(error))
        return FoundLink(
            source.node, target.node, said.round_trip_s, said.bytes_per_s, self._clock() - said.age_s
        )

    async def _ask(self, source: LinkEnd, target: LinkEnd, address: str) -> agent_pb2.MeasureLinkReply:
        hello = make_hello(node=self._node)
        said = await source.agent.measure_link(hello, target.node, address, MAX_AGE_S, _ANSWER_S)
        if not (0 < said.round_trip_s < inf and 0 < said.bytes_per_s < inf):
            raise ProtocolError(
                f"{source.node} tells of {said.round_trip_s:g} s and {said.bytes_per_s:g} bytes/s."
            )
        return said
