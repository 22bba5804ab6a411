"""`python -m mlx_ring.agent`: the agent of the head's own machine, started by `mlx-ring serve` and ending with it."""

from __future__ import annotations

import argparse
import asyncio
import logging
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

from mlx_ring.agent.server import AgentService
from mlx_ring.agent.supervisor import Supervisor, WorkerOptions
from mlx_ring.core.logs import configure_logging
from mlx_ring.host.child import watch_lifeline
from mlx_ring.host.process import dump_stacks_on_signal
from mlx_ring.rpc.channels import make_aio_server

log = logging.getLogger("mlx_ring.agent")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run until the head ends or asks to stop, or SIGTERM arrives; leave no worker and no socket behind."""
    options = _parse(arguments)
    configure_logging(
        process="agent",
        node=options.node,
        rank=None,
        level=options.log_level,
        log_dir=options.log_dir,
        log_format=options.log_format,
    )
    dump_stacks_on_signal()
    try:
        asyncio.run(_serve(options))
    finally:
        shutil.rmtree(options.run_dir, ignore_errors=True)


async def _serve(options: argparse.Namespace) -> None:
    supervisor = Supervisor(
        WorkerOptions(
            node=options.node,
            run_dir=options.run_dir,
            log_dir=options.log_dir,
            log_level=options.log_level,
            log_format=options.log_format,
            blas=options.blas,
            blas_threads=options.blas_threads,
            lent=options.lent,
            spare=options.spare_worker,
        )
    )
    if options.with_spare:
        supervisor.expect_worker()
    service = AgentService(options.node, supervisor, options.load_timeout)
    end = service.stop_requested
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, end.set)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    watch_lifeline(options.lifeline_fd, lambda: _set_from_thread(loop, end))
    server = make_aio_server()
    server.add_generic_rpc_handlers((service.handler(),))
    server.add_insecure_port(f"unix:{options.run_dir / 'agent.sock'}")
    await server.start()
    await end.wait()
    # The reply to a Stop still has to leave: workers first, then the server.
    await supervisor.stop()
    await server.stop(grace=0.5)
    log.info("Ended")


def _set_from_thread(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    loop.call_soon_threadsafe(event.set)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="mlx_ring.agent", description=__doc__)
    parser.add_argument(
        "--run-dir", type=Path, required=True, help="private folder; agent.sock is made in it"
    )
    parser.add_argument("--node", required=True)
    parser.add_argument("--log-dir", type=Path, required=True)
    parser.add_argument("--log-level", default="info")
    parser.add_argument("--log-format", choices=("text", "json"), default="text")
    parser.add_argument("--lifeline-fd", type=int, required=True)
    parser.add_argument("--blas", choices=("auto", "openblas", "off"), default="auto")
    parser.add_argument("--blas-threads", type=int, default=1)
    parser.add_argument(
        "--lent", type=Path, help="folder where processes of other ranks listen, which start their workers"
    )
    parser.add_argument("--spare-worker", choices=("auto", "on", "off"), default="off")
    parser.add_argument(
        "--with-spare", action="store_true", help="start a process at once for the first worker"
    )
    parser.add_argument("--load-timeout", type=float, default=600.0, help="seconds")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
