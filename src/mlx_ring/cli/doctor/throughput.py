"""Checks what a link carries: to a head, over the channel that members speak with it."""

from __future__ import annotations

from pathlib import Path

from mlx_ring.cli.doctor.finding import Finding
from mlx_ring.core.addresses import HeadAddress
from mlx_ring.core.errors import PeerRefused, RingError, VersionMismatch
from mlx_ring.rpc.channels import open_channel
from mlx_ring.rpc.hello import make_hello
from mlx_ring.rpc.link_probe import LinkMeasure, ProbeBounds, probe_link
from mlx_ring.rpc.tls.credentials import load_credentials
from mlx_ring.rpc.tls.names import HEAD_NAME

_BOUNDS = ProbeBounds(largest_bytes=1 << 20)
"""The head takes no messages over 2 MiB."""
_SLOW_BYTES_S, _LONG_TRIP_S = 50e6, 5e-3
_USE_A_CABLE = (
    "Use a cable, gigabit Ethernet or better, between the machines, and end what else fills the network."
)


def check_throughput(head: HeadAddress, folder: Path) -> Finding:
    """Measure it; `folder` is this machine's `node_folder`. Takes a second or two."""
    what = f"throughput to {head}"
    try:
        credentials = load_credentials(folder)
        if credentials is None:
            return Finding("note", what, "not measured: this machine has not joined", _JOIN)
        with open_channel(head.cluster, credentials, HEAD_NAME) as channel:
            measure = probe_link(channel, make_hello(), f"The head at {head}", _BOUNDS)
    except PeerRefused as error:
        return Finding("broken", what, str(error), _JOIN)
    except VersionMismatch as error:
        return Finding("note", what, f"not measured: {error}", "Mend the versions first.")
    except RingError as error:
        fix = f"Check that TCP port {head.port} is open all the way, and that the head runs."
        return Finding("broken", what, str(error), fix)
    return judge_link(what, measure)


_JOIN = "Join with a token from `mlx-ring token create` on the head."


def judge_link(what: str, measure: LinkMeasure) -> Finding:
    """Each token crosses a link with some kilobytes, a prompt with some megabytes."""
    value = (
        f"{measure.bandwidth / 1e6:,.0f} MB/s ({8e-9 * measure.bandwidth:.2f} Gbit/s), a round trip over TLS of "
        f"{1e3 * measure.round_trip_s:.2f} ms"
    )
    if measure.bandwidth < _SLOW_BYTES_S or measure.round_trip_s > _LONG_TRIP_S:
        return Finding("warning", what, value, _USE_A_CABLE)
    return Finding("ok", what, value)
