"""Run one rank of one stage: `python -m mlx_ring.worker`. Only the agent starts it."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import TypeVar

from mlx_ring.core.lean_imports import import_mlx_lm, importing

with importing():
    from mlx_cpu_kernels import SpeedReport
    from mlx_ring.core.errors import AddressInUse
    from mlx_ring.core.logs import configure_logging, keep_early_records, write_to_stderr
    from mlx_ring.host.child import READY_LINE, SPARE_FLAG, read_lifeline, watch_lifeline
    from mlx_ring.host.process import dump_stacks_on_signal
    from mlx_ring.rpc.channels import add_secure_port, make_server
    from mlx_ring.rpc.methods import LOAD, RELINK, STATUS, STEPS
    from mlx_ring.rpc.tls.caller_checks import PeerGuard
    from mlx_ring.rpc.tls.credentials import KeptCredentials, serve_from_folder
    from mlx_ring.settings.process_settings import WorkerSettings, add_argument
    from mlx_ring.worker.compute_thread import prefer_latency, prefer_throughput
    from mlx_ring.worker.platform.device import (
        choose_products,
        keep_compiled_kernels,
        keep_freed_memory,
        limit_kept_buffers,
    )

Listening = TypeVar("Listening")
_END_WITHIN_S = 1.0
_IMPORTED_LATER = ("grpc._channel", "grpc._server", "mlx_lm.models.rope_utils", "numpy")
"""Modules that gRPC, most models, and links between machines import at their first use."""
_HEAD_ONLY = (STEPS.path, STATUS.path)
"""Calls that only the head may make. Nodes send activations to each other, but not these."""
_LOCAL_ONLY = (LOAD.path, RELINK.path)
"""Calls that only this machine's agent may make, over the Unix socket.

The agent first checks which interface an MLX group would use.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Start the server, then compute in this thread until the worker is stopped."""
    given = sys.argv[1:] if arguments is None else [*arguments]
    options = _parse(_wait_as_spare(given[1:]) if given[:1] == [SPARE_FLAG] else given)
    settings: WorkerSettings = options.settings
    configure_logging(
        process=f"worker-{options.stage}-{options.rank}",
        node=options.node,
        rank=options.rank,
        level=settings.log_level,
        log_dir=settings.log_dir,
        log_format=settings.log_format,
    )
    dump_stacks_on_signal()
    watch_lifeline(options.lifeline_fd, lambda: os._exit(0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    set_scheduling = prefer_latency if options.in_group else prefer_throughput
    set_scheduling()
    products = _import_libraries(settings)

    from mlx_ring.worker.group import GroupPort, group_capabilities
    from mlx_ring.worker.neighbours import PeerAccess
    from mlx_ring.worker.reshaping import WorkerIdentity
    from mlx_ring.worker.server import WorkerServer  # MLX must load after the BLAS
    from mlx_ring.worker.stage import DiskSettings

    access = PeerAccess(None if options.credentials is None else KeptCredentials(options.credentials))
    if options.in_group:
        access.group, access.capabilities = (
            listening(options.group_listen, GroupPort),
            group_capabilities(options.in_group),
        )
    disk = (
        DiskSettings(settings.kv_disk_dir, settings.kv_disk, options.node, access.trust)
        if settings.kv_disk and settings.kv_disk_dir
        else None
    )
    worker = WorkerServer(
        WorkerIdentity(options.node, options.stage, options.rank, str(products), products.kernels, disk),
        access,
    )

    def stop(_number: int, _frame: FrameType | None) -> None:
        worker.stop()

    signal.signal(signal.SIGTERM, stop)
    # gRPC's threads have little work and must react quickly; this thread computes.
    prefer_latency()
    guard = PeerGuard(access.revoked.refusal, _HEAD_ONLY, _LOCAL_ONLY)
    access.end_refused = guard.end_refused
    server = make_server(threads=16, interceptors=[guard])
    server.add_generic_rpc_handlers((worker.handler(),))
    server.add_insecure_port(f"unix:{options.socket}")
    if options.credentials is not None:
        own = serve_from_folder(options.credentials)
        access.port = listening(options.listen, lambda address: add_secure_port(server, address, own))
    server.start()
    set_scheduling()
    worker.compute()
    server.stop(grace=None).wait(_END_WITHIN_S)
    logging.shutdown()
    # gRPC's threads may still hold an open stream, which is no longer needed.
    os._exit(0)


def listening(address: str, listen: Callable[[str], Listening]) -> Listening:
    """Listen, or end with a sentence, which the agent reports: another process may have begun to listen there."""
    try:
        return listen(address)
    except (AddressInUse, OSError) as error:
        problem = f"{address} cannot be used: {error.strerror}." if isinstance(error, OSError) else error
        sys.exit(
            f"{problem} If several agents of this machine have the same --node-ports, give each its own."
        )


@cache
def _import_libraries(settings: WorkerSettings) -> SpeedReport:
    """Import what every worker needs; return what computes products."""
    keep_freed_memory()
    with importing():
        import_mlx_lm()
        import_module("mlx_ring.worker.server")
        keep_compiled_kernels()
        limit_kept_buffers()
        return choose_products(settings.blas, settings.blas_threads)


def _wait_as_spare(arguments: Sequence[str]) -> list[str]:
    """Import everything, and wait for the arguments of a worker. End with the agent."""
    parser = argparse.ArgumentParser(prog=f"mlx_ring.worker {SPARE_FLAG}")
    parser.add_argument("--lifeline-fd", type=int, required=True)
    parser.add_argument("--joined", action="store_true", help="MLX joins this rank with others")
    add_argument(parser, WorkerSettings)
    options = parser.parse_args(arguments)
    keep_early_records()
    dump_stacks_on_signal()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    set_scheduling = prefer_latency if options.joined else prefer_throughput
    set_scheduling()
    _import_libraries(options.settings)
    with importing():
        for part in _IMPORTED_LATER:
            with contextlib.suppress(ImportError):
                import_module(part)
    # Threads that are started next are scheduled as in other workers.
    prefer_latency()
    write_to_stderr(READY_LINE)
    line = read_lifeline(options.lifeline_fd)
    if not line:
        os._exit(0)
    return [*json.loads(line), "--lifeline-fd", str(options.lifeline_fd)]


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="mlx_ring.worker", description=__doc__)
    parser.add_argument("--socket", required=True, help="Unix socket to listen on")
    parser.add_argument("--node", required=True)
    parser.add_argument("--listen", default="[::]:0", help="address and port on which other machines connect")
    parser.add_argument(
        "--credentials",
        type=Path,
        help="folder of this node's credentials; without it, only this machine can connect",
    )
    parser.add_argument("--stage", type=int, required=True)
    parser.add_argument("--rank", type=int, required=True)
    add_argument(parser, WorkerSettings)
    parser.add_argument("--lifeline-fd", type=int, required=True)
    parser.add_argument(
        "--in-group", metavar="BACKEND", help="backend by which MLX joins this rank with others, or `auto`"
    )
    parser.add_argument(
        "--group-listen",
        default="127.0.0.1:0",
        help="address and port on which this rank listens for the others of its group",
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
