"""`python -m mlx_ring.agent.mpi`: gives the ranks of one group their places, started by the agent alone."""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
from collections.abc import Sequence
from pathlib import Path

from mlx_ring.agent.mpi.pmix import PmixServer
from mlx_ring.core.errors import ConfigError
from mlx_ring.host.child import watch_lifeline


def main(arguments: Sequence[str] | None = None) -> None:
    """Report the environment of each rank, and serve until the agent ends."""
    options = _parse(arguments)
    watch_lifeline(options.lifeline_fd, lambda: os._exit(0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        server = PmixServer(options.ranks, options.folder)
    except ConfigError as error:
        raise SystemExit(str(error)) from None
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(options.socket)
        connection.sendall(json.dumps(server.places).encode())
    signal.pause()


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="mlx_ring.agent.mpi", description=__doc__)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="private, for files of its own")
    parser.add_argument("--socket", required=True, help="Unix socket that receives the places")
    parser.add_argument("--lifeline-fd", type=int, required=True)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
