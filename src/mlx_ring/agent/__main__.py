"""`python -m mlx_ring.agent`: the agent of the head's own machine, started by `mlx-ring serve` and ending with it."""

from __future__ import annotations

import argparse
import asyncio
import logging
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

from mlx_ring.core.lean_imports import importing

with importing():
    from mlx_ring.agent.server import AgentService
    from mlx_ring.agent.supervisor import Supervisor, WorkerOptions
    from mlx_ring.core.logs import configure_logging
    from mlx_ring.host.child import watch_lifeline
    from mlx_ring.host.process import dump_stacks_on_signal
    from mlx_ring.host.yielding import YieldWatch
    from mlx_ring.rpc.channels import make_aio_server
    from mlx_ring.settings.process_settings import AgentSettings, add_argument

log = logging.getLogger("mlx_ring.agent")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run until the head ends or asks to stop, or SIGTERM arrives; leave no worker and no socket behind."""
    options = _parse(arguments)
    settings: AgentSettings = options.settings
    configure_logging(
        process="agent",
        node=options.node,
        rank=None,
        level=settings.log_level,
        log_dir=settings.log_dir,
        log_format=settings.log_format,
    )
    dump_stacks_on_signal()
    try:
        asyncio.run(_serve(options))
    finally:
        shutil.rmtree(options.run_dir, ignore_errors=True)


async def _serve(options: argparse.Namespace) -> None:
    settings: AgentSettings = options.settings
    supervisor = Supervisor(WorkerOptions(options.node, options.run_dir, settings, lent=options.lent))
    if options.with_spare:
        supervisor.expect_worker()
    yields = YieldWatch(supervisor.pids) if settings.yielding == "on" else None
    service = AgentService(options.node, supervisor, settings.model_load_timeout, yields=yields)
    watching = None if yields is None else asyncio.create_task(yields.run(), name="yielding")
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
    if watching is not None:
        watching.cancel()
    # The reply to a Stop still has to leave: workers first, then the server.
    await supervisor.stop()
    await server.stop(grace=0.5)
    # Another signal must not reach the loop while it closes, or end the process before its folder is removed.
    loop.remove_signal_handler(signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    log.info("Ended")


def _set_from_thread(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    loop.call_soon_threadsafe(event.set)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="mlx_ring.agent", description=__doc__)
    parser.add_argument(
        "--run-dir", type=Path, required=True, help="private folder; agent.sock is made in it"
    )
    parser.add_argument("--node", required=True)
    add_argument(parser, AgentSettings)
    parser.add_argument("--lifeline-fd", type=int, required=True)
    parser.add_argument(
        "--lent", type=Path, help="folder where processes of other ranks listen, which start their workers"
    )
    parser.add_argument(
        "--with-spare", action="store_true", help="start a process at once for the first worker"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
