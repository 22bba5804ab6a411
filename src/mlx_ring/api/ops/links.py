"""The `links` of `/cluster/status`: what is between the nodes, and what instances send over it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from mlx_ring.api.service import InstanceInfo, LinkInfo, LinkUse

Way = tuple[str, str]
_IDLE = "no stage of a model sends over it"


def told_links(
    links: Sequence[LinkInfo], instances: Iterable[InstanceInfo], unix_time_s: float
) -> list[dict[str, object]]:
    """Each way between two nodes; `unix_time_s` is now."""
    uses: dict[Way, list[LinkUse | None]] = {}
    for instance in instances:
        for way, use in _uses(instance):
            uses.setdefault(way, []).append(use)
    return [_told(link, uses, unix_time_s) for link in links]


def _uses(instance: InstanceInfo) -> Iterable[tuple[Way, LinkUse | None]]:
    """The nodes of stages that follow each other, and what the first of the two says of its sending."""
    firsts = [worker for worker in instance.workers if worker.rank == 0]
    for one, following in pairwise(firsts):
        if one.node != following.node:
            yield (one.node, following.node), one.sends


def _told(
    link: LinkInfo, uses: Mapping[Way, Sequence[LinkUse | None]], unix_time_s: float
) -> dict[str, object]:
    told: dict[str, object] = {"from": link.source, "to": link.target, "problem": link.problem or None}
    if not link.problem:
        told |= {
            "round_trip_us": round(1e6 * link.round_trip_s, 1),
            "bytes_per_s": round(link.bytes_per_s),
            "measured_at": round(link.unix_time_s),
            "measured_s_ago": round(max(0.0, unix_time_s - link.unix_time_s), 1),
        }
    senders = uses.get((link.source, link.target), ())
    known = [use for use in senders if use is not None]
    told |= {
        "carries_activations": bool(senders),
        "compresses": any(use.compresses for use in known),
        "why": _why(senders, known),
    }
    if known:
        for name in ("frames", "tensor_bytes", "sent_bytes"):
            told[name] = sum(getattr(use, name) for use in known)
    return told


def _why(senders: Sequence[LinkUse | None], known: Sequence[LinkUse]) -> str:
    """Why it compresses, or does not: what whoever sends most says."""
    if known:
        return max(known, key=lambda use: use.tensor_bytes).why
    return "nothing is known of what was sent yet" if senders else _IDLE
