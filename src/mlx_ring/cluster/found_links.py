"""What is known of the links between nodes: who measures which and when, and what planning and people make of it. Pure."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from mlx_ring.cluster.planner.profiles import FRAMES_S, UNREACHABLE, LinkProfile


@dataclass(frozen=True, slots=True)
class FoundLink:
    """One way between two nodes: measured, or why it could not be."""

    source: str
    """The node that measured, and would send."""
    target: str
    round_trip_s: float = 0.0
    bytes_per_s: float = 0.0
    """From source to target."""
    unix_time_s: float = 0.0
    """When it was measured, by the head's clock."""
    problem: str = ""
    """Why nothing gets through; empty where it does."""


def as_they_are(found: Iterable[FoundLink], attending: Container[str]) -> list[FoundLink]:
    """Whatever was measured, nothing gets through to or from a node that is gone since."""
    return [
        _without(link, [node for node in (link.source, link.target) if node not in attending])
        for link in found
    ]


def _without(link: FoundLink, gone: Sequence[str]) -> FoundLink:
    return FoundLink(link.source, link.target, problem=f"{' and '.join(gone)} is gone") if gone else link


def rounds(nodes: Sequence[str]) -> Iterator[list[tuple[str, str]]]:
    """Every pair once, in rounds in which no node is in two pairs, so that no probe disturbs another.

    It is the circle method of tournaments: the first stays, the others go around.
    """
    circle: list[str | None] = [*nodes, *([None] if len(nodes) % 2 else [])]
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        facing = zip(circle[:half], reversed(circle[half:]), strict=True)
        yield [(one, other) for one, other in facing if one is not None and other is not None]
        circle = [circle[0], circle[-1], *circle[1:-1]]


def link_profiles(found: Iterable[FoundLink]) -> dict[frozenset[str], LinkProfile]:
    """Links as planning takes them: both ways as the worse of them, and as none where one way is none."""
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


def hops_told(nodes: Sequence[str], links: Mapping[frozenset[str], LinkProfile]) -> tuple[str, ...]:
    """A sentence about the links that a plan's stages use, in their order; none where none was measured."""
    around = [frozenset(pair) for pair in zip(nodes, [*nodes[1:], *nodes[:1]], strict=True)]
    used = [(pair, links[pair]) for pair in dict.fromkeys(around) if pair in links]
    if not used:
        return ()
    told = [
        f"{' - '.join(sorted(pair))} {1e3 * link.round_trip_s:.2f} ms there and back, {_speed(link.bandwidth)}"
        for pair, link in used
    ]
    return (f"Links, as measured: {'; '.join(told)}.",)


def _speed(bytes_per_s: float) -> str:
    bits = 8 * bytes_per_s
    return f"{bits / 1e9:.1f} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.0f} Mbit/s"  # noqa: PLR2004 - a gigabit
