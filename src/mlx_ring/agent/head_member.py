"""`python -m mlx_ring.agent.head_member`: the agent of the head's own machine in a cluster.

It is a member like any other. `mlx-ring serve --nodes N` starts it, but not as its child. When the head is killed it
stays, with its workers, and the next head takes them over.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from mlx_ring.core.environment import enable_grpc_logs, quieten_grpc
from mlx_ring.host.addresses import parse_head_address
from mlx_ring.host.head_announcement import HeadPlace
from mlx_ring.settings.process_settings import MemberSettings, add_argument


def main(arguments: Sequence[str] | None = None) -> None:
    """Run until the head asks to end, or SIGTERM comes."""
    given = _parse(arguments)
    quieten_grpc()
    enable_grpc_logs()
    # gRPC reads its log level on import, and this module imports it.
    from mlx_ring.agent.member import run_member

    # The API sleeps and ends with this machine, so that moving its layers would gain nothing.
    run_member(
        HeadPlace(parse_head_address(given.head)),
        given.node,
        given.state,
        given.settings,
        listen=given.listen,
        may_be_away=False,
    )


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="mlx_ring.agent.head_member", description=__doc__)
    parser.add_argument("--head", required=True, help="address and port for members")
    parser.add_argument("--node", required=True)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--listen", required=True, help="address for other machines")
    add_argument(parser, MemberSettings)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
