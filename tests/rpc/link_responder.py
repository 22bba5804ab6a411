"""Process that answers probes of its link: `python link_responder.py threads|loop`.

It prints its port, and ends with its input.
"""

from __future__ import annotations

import asyncio
import sys

from mlx_ring.core.environment import quieten_grpc
from mlx_ring.rpc.channels import make_aio_server, make_server
from mlx_ring.rpc.hello import make_hello
from mlx_ring.rpc.link_probe import LinkResponder


def _print_port(port: int) -> None:
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()


def _serve_threads() -> None:
    server = make_server(4)
    server.add_generic_rpc_handlers((LinkResponder(make_hello(node="other")).handler(),))
    _print_port(server.add_insecure_port("127.0.0.1:0"))
    server.start()
    sys.stdin.read()
    server.stop(None).wait()


async def _serve_loop() -> None:
    server = make_aio_server()
    server.add_generic_rpc_handlers((LinkResponder(make_hello(node="other")).aio_handler(),))
    _print_port(server.add_insecure_port("127.0.0.1:0"))
    await server.start()
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)


if __name__ == "__main__":
    quieten_grpc()
    if sys.argv[1] == "threads":
        _serve_threads()
    else:
        asyncio.run(_serve_loop())
