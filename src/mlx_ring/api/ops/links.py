"""The `links` of `/cluster/status`: what is between the nodes, and what the instance sends over it."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from mlx_ring.api.service import InstanceInfo, LinkInfo, LinkUse

Way = tuple[str, str]
_IDLE = "no stage of the model sends over it"


def told_links(instance: InstanceInfo, unix_time_s: float) -> list[dict[str, object]]:
    """Each way between two nodes; `unix_time_s` is now."""
    uses = _uses(instance)
    return [_told(link, uses, unix_time_s) for link in instance.links]


def _uses(instance: InstanceInfo) -> dict[Way, LinkUse | None]:
    """By the nodes of stages that follow each other, what the first says of its sending."""
    firsts = [worker for worker in instance.workers if worker.rank == 0]
    return {
        (one.node, following.node): one.sends
        for one, following in pairwise(firsts)
        if one.node != following.node
    }


def _told(link: LinkInfo, uses: Mapping[Way, LinkUse | None], unix_time_s: float) -> dict[str, object]:
    way = link.source, link.target
    use = uses.get(way)
    told: dict[str, object] = {"from": link.source, "to": link.target, "problem": link.problem or None}
    if not link.problem:
        told |= {
            "round_trip_us": round(1e6 * link.round_trip_s, 1),
            "bytes_per_s": round(link.bytes_per_s),
            "measured_s_ago": round(max(0.0, unix_time_s - link.unix_time_s), 1),
        }
    told |= {
        "carries_activations": way in uses,
        "compresses": use is not None and use.compresses,
        "why": _why(way, uses),
    }
    if use is not None:
        told |= {"frames": use.frames, "tensor_bytes": use.tensor_bytes, "sent_bytes": use.sent_bytes}
    return told


def _why(way: Way, uses: Mapping[Way, LinkUse | None]) -> str:
    """Why it compresses, or does not."""
    use = uses.get(way)
    if way not in uses:
        return _IDLE
    return "nothing is known of what was sent yet" if use is None else use.why
