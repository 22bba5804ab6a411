"""`python -m mlx_ring.agent.head_member`: the agent of the head's own machine in a cluster.

It is a member like any other. `mlx-ring serve --nodes N` starts it, but not as its child. When the head is killed it
stays, with its workers, and the next head takes them over.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path

from mlx_ring.core.environment import enable_grpc_logs, quieten_grpc
from mlx_ring.core.logs import configure_logging
from mlx_ring.host.addresses import bracketed, parse_head_address
from mlx_ring.host.machine import make_run_folder
from mlx_ring.host.running import recorded


def main(arguments: Sequence[str] | None = None) -> None:
    """Run until the head asks to end, or SIGTERM comes."""
    given = _parse(arguments)
    quieten_grpc()
    enable_grpc_logs()
    # gRPC reads its log level on import, and these modules import it.
    from mlx_ring.agent.member import MemberOptions, serve_as_member
    from mlx_ring.host.trusted_interfaces import Trust
    from mlx_ring.rpc.tls.handshakes import log_refused_handshakes

    configure_logging(
        process="agent",
        node=given.node,
        rank=None,
        level=given.log_level,
        log_dir=given.log_dir,
        log_format=given.log_format,
    )
    log_refused_handshakes()
    with recorded(given.state, "agent"), make_run_folder(given.run_dir) as run_dir:
        options = MemberOptions(
            head=parse_head_address(given.head),
            node=given.node,
            state=given.state,
            run_dir=run_dir,
            log_dir=given.log_dir,
            log_level=given.log_level,
            log_format=given.log_format,
            blas=given.blas,
            blas_threads=given.blas_threads,
            load_timeout_s=given.load_timeout,
            memory_utilization=given.memory_utilization,
            listen=bracketed(given.listen),
            memory_limit_bytes=given.memory_limit,
            weights_limit_bytes=given.weights_limit,
            spare=given.spare_worker,
            trust=Trust(tuple(given.trusted_interface)),
        )
        asyncio.run(serve_as_member(options))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="mlx_ring.agent.head_member", description=__doc__)
    parser.add_argument("--head", required=True, help="address and port for members")
    parser.add_argument("--node", required=True)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--run-dir", type=Path, help="folder in which to create a private folder for sockets")
    parser.add_argument("--log-dir", type=Path, required=True)
    parser.add_argument("--log-level", default="info")
    parser.add_argument("--log-format", choices=("text", "json"), default="text")
    parser.add_argument("--blas", choices=("auto", "openblas", "off"), default="auto")
    parser.add_argument("--blas-threads", type=int, default=1)
    parser.add_argument("--spare-worker", choices=("auto", "on", "off"), default="off")
    parser.add_argument("--load-timeout", type=float, default=600.0, help="seconds")
    parser.add_argument("--memory-utilization", type=float, default=0.9)
    parser.add_argument("--memory-limit", type=int, help="bytes that plans may use")
    parser.add_argument("--weights-limit", type=int, help="bytes that fetched tensors may take")
    parser.add_argument("--listen", default="[::]", help="address for other machines")
    parser.add_argument("--trusted-interface", action="append", default=[], help="for collectives")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
