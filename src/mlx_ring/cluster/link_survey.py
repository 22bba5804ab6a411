"""Survey of the links between all nodes, before a plan is made.

The nodes' agents measure them over the same addresses that activations take.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from mlx_ring.cluster.agent_link import AgentLink
from mlx_ring.core.errors import ProtocolError, RingError, WorkerStuck
from mlx_ring.rpc.hello import make_hello
from mlx_ring.rpc.link_profile import FRAMES_S, UNREACHABLE, LinkProfile
from mlx_ring.rpc.protos import agent_pb2


@dataclass(frozen=True, slots=True)
class FoundLink:
    """One direction of a link between two nodes, measured or with the reason of the failure."""

    source: str
    """The sending node, which measured the link."""
    target: str
    round_trip_s: float = 0.0
    bytes_per_s: float = 0.0
    """Bandwidth from source to target."""
    unix_time_s: float = 0.0
    """Time of the measurement by the head's clock."""
    problem: str = ""
    """Reason why nothing gets through; empty for a working link."""


def as_they_are(found: Iterable[FoundLink], attending: Container[str]) -> list[FoundLink]:
    """Return the links, with those of nodes that have left since marked as broken."""
    return [
        _without(link, [node for node in (link.source, link.target) if node not in attending])
        for link in found
    ]


def _without(link: FoundLink, lost: Sequence[str]) -> FoundLink:
    verb = "are" if len(lost) > 1 else "is"
    problem = f"{' and '.join(lost)} {verb} disconnected"
    return FoundLink(link.source, link.target, problem=problem) if lost else link


def rounds(nodes: Sequence[str]) -> Iterator[list[tuple[str, str]]]:
    """Yield rounds that hold each pair once, with no node in two pairs of a round, so that probes do not interfere.

    This is the circle method of tournaments: the first node stays, and the others rotate.
    """
    circle: list[str | None] = [*nodes, *([None] if len(nodes) % 2 else [])]
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        facing = zip(circle[:half], reversed(circle[half:]), strict=True)
        yield [(one, other) for one, other in facing if one is not None and other is not None]
        circle = [circle[0], circle[-1], *circle[1:-1]]


def link_profiles(found: Iterable[FoundLink]) -> dict[frozenset[str], LinkProfile]:
    """Return links as the planner needs them: the worse of both directions, unreachable if one of them is."""
    profiles: dict[frozenset[str], LinkProfile] = {}
    for one in found:
        pair = frozenset((one.source, one.target))
        profile = UNREACHABLE if one.problem else LinkProfile(one.round_trip_s, one.bytes_per_s, FRAMES_S)
        other = profiles.get(pair, profile)
        profiles[pair] = LinkProfile(
            max(profile.round_trip_s, other.round_trip_s),
            min(profile.bandwidth, other.bandwidth),
            min(profile.frames_s, other.frames_s),
        )
    return profiles


def link_remarks(nodes: Sequence[str], links: Mapping[frozenset[str], LinkProfile]) -> tuple[str, ...]:
    """Return a sentence about the links that a plan's stages use, in their order; none if none was measured."""
    around = [frozenset(pair) for pair in zip(nodes, [*nodes[1:], *nodes[:1]], strict=True)]
    used = [(pair, links[pair]) for pair in dict.fromkeys(around) if pair in links]
    if not used:
        return ()
    measured = [
        f"{' - '.join(sorted(pair))} round trip {1e3 * link.round_trip_s:.2f} ms, {_speed(link.bandwidth)}"
        for pair, link in used
    ]
    return (f"Measured links: {'; '.join(measured)}.",)


def _speed(bytes_per_s: float) -> str:
    bits = 8 * bytes_per_s
    return f"{bits / 1e9:.1f} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.0f} Mbit/s"  # noqa: PLR2004 - a gigabit


log = logging.getLogger(__name__)

MAX_AGE_S = 24 * 3600.0
"""Age up to which a measurement is reused between the same two addresses; nodes store theirs."""
_ANSWER_S = 8.0
"""Time limit of one measurement; the node's own limits are lower."""
_FRESH_PROBLEM_S = 10.0
"""Age up to which a failed measurement is reused, because plans may be tried one after the other."""
_FRESH_LOSS_S = 60.0
"""Time after a loss during which answers wait for a link's measurement.

A link that does not answer is then not tried twice, and plans use the nodes' last reports.
"""


@dataclass(frozen=True, slots=True)
class LinkEnd:
    """A node whose links are measured."""

    node: str
    session: int
    """Number of its current session, because it may have moved since the last one."""
    agent: AgentLink
    address_from: Callable[[str], str]
    """Function that returns the address at which another node, by its ID, reaches this one's probe responder.

    If it is empty, neither direction is measured.
    """


async def _no_reports(_nodes: Container[str]) -> None:
    """Wait for no report."""


class LinkSurvey:
    """The measured links between the nodes of a cluster."""

    def __init__(
        self,
        node: str,
        clock: Callable[[], float] = time.time,
        *,
        keeps_problems: bool = False,
        wait_for_reports: Callable[[Container[str]], Awaitable[None]] = _no_reports,
    ) -> None:
        """Create an empty survey.

        Args:
            node: the head's own node.
            clock: the clock in Unix seconds.
            keeps_problems: True to keep failed measurements instead of repeating them.
            wait_for_reports: waits until these nodes have reported their memory. A measurement takes some messages of
                up to 64 MB, so reports of that time are too high for plans.
        """
        self._node = node
        self._clock = clock
        self._keeps_problems = keeps_problems
        self._wait_for_reports = wait_for_reports
        self._measured = set[str]()
        """Nodes that have not reported since their links were measured."""
        self._found: dict[tuple[str, str], tuple[FoundLink, object]] = {}
        """Links by source and target, each with the sessions and address that it is valid for."""
        self._lost_at: dict[frozenset[str], float] = {}
        """Times of the last connections that were lost between two nodes, within `MAX_AGE_S`."""
        self._alone = asyncio.Lock()

    def distrust(self, nodes: Iterable[str]) -> None:
        """Forget the link between two nodes, because a connection was lost there. Older measurements no longer count."""
        pair, now = frozenset(nodes), self._clock()
        # Measurements older than MAX_AGE_S do not count anyway.
        recent = {other: at for other, at in self._lost_at.items() if now - at < MAX_AGE_S}
        self._lost_at = {**recent, pair: now}
        self._found = {ends: found for ends, found in self._found.items() if frozenset(ends) != pair}

    @property
    def has_distrusted(self) -> bool:
        """True if a link was not measured since a connection was lost there."""
        known = {frozenset(ends) for ends in self._found}
        return any(pair not in known for pair in self._lost_at)

    def _lost_s_ago(self, source: LinkEnd, target: LinkEnd) -> float:
        """Return the seconds since the last loss between two nodes."""
        return self._clock() - self._lost_at.get(frozenset((source.node, target.node)), -inf)

    @property
    def found(self) -> tuple[FoundLink, ...]:
        """All known links, including those of nodes that have left."""
        return tuple(link for link, _ in self._found.values())

    async def take(self, ends: Sequence[LinkEnd]) -> tuple[FoundLink, ...]:
        """Return the links between these nodes in both directions; measure unknown and failed ones now.

        A link that cannot be measured is returned with the reason, after some seconds at most.
        """
        by_node = {end.node: end for end in ends}
        async with self._alone:
            for pairs in rounds(sorted(by_node)):
                await asyncio.gather(
                    *(self._measure_pair(by_node[one], by_node[other]) for one, other in pairs)
                )
            if self._measured:
                await self._wait_for_reports(self._measured)
                self._measured.clear()
        return tuple(link for link in self.found if link.source in by_node and link.target in by_node)

    async def _measure_pair(self, one: LinkEnd, other: LinkEnd) -> None:
        """Measure one direction, then the other one if the first one works."""
        if not (other.address_from(one.node) and one.address_from(other.node)):
            return
        if not (await self._known_or_measured(one, other)).problem:
            await self._known_or_measured(other, one)

    async def _known_or_measured(self, source: LinkEnd, target: LinkEnd) -> FoundLink:
        address = target.address_from(source.node)
        holds_for = (source.session, target.session, address)
        known, held_for = self._found.get((source.node, target.node), (None, None))
        if known is not None and held_for == holds_for and self._is_good(known):
            return known
        measured = await self._measure(source, target, address)
        self._found[source.node, target.node] = measured, holds_for
        return measured

    def _is_good(self, known: FoundLink) -> bool:
        if known.problem:
            return self._keeps_problems or self._clock() - known.unix_time_s < _FRESH_PROBLEM_S
        return self._clock() - known.unix_time_s < MAX_AGE_S

    async def _measure(self, source: LinkEnd, target: LinkEnd, address: str) -> FoundLink:
        try:
            try:
                said = await self._ask(source, target, address)
            except WorkerStuck:
                if self._lost_s_ago(source, target) < _FRESH_LOSS_S:
                    raise
                # A node that is busy for a moment does not mean a broken link.
                said = await self._ask(source, target, address)
        except RingError as error:
            log.warning("The link from %s to %s could not be measured: %s", source.node, target.node, error)
            return FoundLink(source.node, target.node, unix_time_s=self._clock(), problem=str(error))
        if not said.age_s and self._lost_s_ago(source, target) >= _FRESH_LOSS_S:
            self._measured |= {source.node, target.node}
        return FoundLink(
            source.node, target.node, said.round_trip_s, said.bytes_per_s, self._clock() - said.age_s
        )

    async def _ask(self, source: LinkEnd, target: LinkEnd, address: str) -> agent_pb2.MeasureLinkReply:
        hello = make_hello(node=self._node)
        max_age_s = min(MAX_AGE_S, self._lost_s_ago(source, target))
        said = await source.agent.measure_link(hello, target.node, address, max_age_s, _ANSWER_S)
        if not (0 < said.round_trip_s < inf and 0 < said.bytes_per_s < inf):
            raise ProtocolError(
                f"{source.node} reports a link with a round trip of {said.round_trip_s:g} s and "
                f"{said.bytes_per_s:g} bytes/s: both must be positive and finite."
            )
        return said
